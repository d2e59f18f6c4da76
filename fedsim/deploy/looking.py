"""A SuperNode that looks for messages as often as its federation can answer.

Run as ``python -m fedsim.deploy.looking SECONDS ARGUMENTS``, the last as for Flower's
``flower-supernode``. Flower's own looks every three seconds while there is nothing to do, which is
most of a small federation's round, and every half second whether its app has replied.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

__all__ = ["FLOWERS", "look_seconds", "main"]

FLOWERS = 3.0
"""Seconds from one look of Flower's SuperNode to the next."""

_OFTEN = 0.5
_ANSWERED = 20.0  # looks a second that leave a SuperLink's core most of its time
_LOOP = "flwr.supernode.start_client_internal"


def look_seconds(clients: int) -> float:
    """Seconds from one look of a node to the next, in a federation of so many clients.

    Examples
    --------
    >>> look_seconds(10), look_seconds(60), look_seconds(1000)
    (0.5, 3.0, 3.0)
    """
    return min(FLOWERS, max(_OFTEN, clients / _ANSWERED))


def main(seconds: float, arguments: Sequence[str]) -> None:
    """Run the SuperNode; one of a Flower that waits in another way looks as often as that does."""
    from flwr.supernode.cli import flower_supernode

    loop: Any = importlib.import_module(_LOOP)
    if getattr(loop, "time", None) is time:
        loop.time = SimpleNamespace(sleep=lambda wanted: time.sleep(min(wanted, seconds)))
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
