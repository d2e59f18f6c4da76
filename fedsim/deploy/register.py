"""Lets several SuperNodes in with one process.

Run as ``python -m fedsim.deploy.register CONNECTION KEY...`` with FLWR_HOME set: Flower's
own command line, once for each public key, without starting Python anew for every one.
"""

from __future__ import annotations

import sys

from flwr.cli.app import app

__all__ = ["main"]


def main(connection: str, keys: list[str]) -> None:
    """Register public key files; ends the process at the first that is refused."""
    for key in keys:
        app(["supernode", "register", key, connection], standalone_mode=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
