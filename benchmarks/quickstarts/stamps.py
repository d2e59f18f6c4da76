"""Runs in a side's own process: waits for its turn before each round, reports what the round took.

Of the standard library alone, since other packages' environments import it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process and all that it has started, to a hundredth of a second."""
    table: dict[int, tuple[int, int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Its own ticks, and those of children that have ended: in user and in system mode.
        table[int(name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    family, new = set[int](), {os.getpid()}
    while new:
        family |= new
        new = {process for process, (parent, _) in table.items() if parent in family} - family
    return sum(table[process][1] for process in family if process in table) / TICKS


class Stamps:
    """Rounds of this process, one line of JSON each; what the package prints goes to stderr."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began: tuple[float, float] | None = None
        self._evaluation = [0.0, 0.0]

    def boundary(self) -> None:
        """Between two rounds: end the one before, and wait for the turn of the next."""
        self.stop()
        self.wait()

    def stop(self) -> None:
        """End the round that has begun, or say that the first one can."""
        if self._began is None:
            self.report()
            return
        wall, cpu = (now - then for now, then in zip(clocks(), self._began, strict=True))
        self.report(wall=wall, cpu=cpu, evaluation=self._evaluation)

    def wait(self) -> None:
        """Begin a round, once the line that asks for it has come."""
        if not sys.stdin.readline():
            os._exit(1)  # whoever measures has gone; Ray's threads would keep the process
        self._evaluation = [0.0, 0.0]
        self._began = clocks()

    def evaluation(self, function: Callable[P, T]) -> Callable[P, T]:
        """The same function, whose time counts as the round's evaluation too."""

        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = clocks()
            value = function(*args, **kwargs)
            for place, (now, then) in enumerate(zip(clocks(), began, strict=True)):
                self._evaluation[place] += now - then
            return value

        return timed

    def report(self, **figures: Any) -> None:
        """A line of figures."""
        self._lines.write(json.dumps(figures) + "\n")


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds."""
    return time.perf_counter(), cpu_seconds()
