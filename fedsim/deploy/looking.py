"""A SuperNode that looks for messages as often as its federation can answer.

Run as ``python -m fedsim.deploy.looking SECONDS ARGUMENTS``, the last as for Flower's
``flower-supernode``. Flower's own looks every three seconds while there is nothing to do, which is
most of a small federation's round, and every half second whether its app has replied; and its
app's SuperExec finds out by itself that there is a message. This one rings for it (`bell`).
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedsim.deploy.bell import ring

__all__ = ["FLOWERS", "look_seconds", "main", "retry_soon"]

FLOWERS = 3.0
"""Seconds from one look of Flower's SuperNode to the next."""

_OFTEN = 0.5
_APP = 0.05  # for the reply of an app, which comes into the SuperNode's own memory
_UNREADY = 0.1
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
        loop.time = SimpleNamespace(sleep=lambda wanted: time.sleep(_shorter(wanted, seconds)))
    if (wait_for_reply := getattr(loop, "_push_messages", None)) is not None:

        def ring_and_wait(*args: Any, **options: Any) -> Any:
            ring(Path(os.environ["FLWR_HOME"]))
            return wait_for_reply(*args, **options)

        loop._push_messages = ring_and_wait
    retry_soon()
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def _shorter(wanted: float, seconds: float) -> float:
    return min(wanted, seconds if wanted == FLOWERS else _APP)


def retry_soon() -> None:
    """Have this process ask again soon for what a message consists of, where it is on its way.

    A message can be seen before all of it has arrived. Flower waits a second then, and twice as
    long each time; a tenth of that is enough for what takes milliseconds.
    """
    module: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        defaults = getattr(getattr(module, name, None), "__kwdefaults__", None) or {}
        if "initial_backoff" in defaults:
            defaults["initial_backoff"] = _UNREADY


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
