"""The `fedsim` command: one file a subcommand."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; a user's mistake ends it with one sentence and status 2."""
    # Before Flower and torch are imported: neither may phone home, and one process uses one
    # thread for each operation.
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fedsim.cli.app import app
    from fedsim.errors import FedsimError

    try:
        app()
    except FedsimError as error:
        print(f"fedsim: {error}", file=sys.stderr)
        sys.exit(2)
