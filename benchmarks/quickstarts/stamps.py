"""In a side's process: wait for the turn before each round, and report the round's times.

It uses only the standard library, since other packages' environments import it.
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
    """CPU seconds of this process and all its descendants, to a hundredth of a second."""
    table: dict[int, tuple[int, int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Ticks of the process and of its ended children, in user and in system mode.
        table[int(name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    family, new = set[int](), {os.getpid()}
    while new:
        family |= new
        new = {process for process, (parent, _) in table.items() if parent in family} - family
    return sum(table[process][1] for process in family if process in table) / TICKS


class Stamps:
    """Reports this process's rounds, one line of JSON each; other output goes to stderr.

    It keeps a copy of descriptor 1 for its lines, and redirects descriptor 1 to 2, so that nothing
    the package prints gets between them.
    """

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began: tuple[float, float] | None = None
        self._evaluation = [0.0, 0.0]

    def boundary(self) -> None:
        """Between two rounds: end the previous one, and wait for the next one's turn."""
        self.stop()
        self.wait()

    def stop(self) -> None:
        """Report the round that has begun or, before the first, that this side is ready."""
        if self._began is None:
            self.report()
            return
        wall, cpu = (now - then for now, then in zip(clocks(), self._began, strict=True))
        self.report(wall=wall, cpu=cpu, evaluation=self._evaluation)

    def wait(self) -> None:
        """Wait for the line that requests a round, and start the clocks."""
        if not sys.stdin.readline():
            os._exit(1)  # the measuring process has ended; Ray's threads would block a normal exit
        self._evaluation = [0.0, 0.0]
        self._began = clocks()

    def evaluation(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap a function so that its time is also counted as the round's evaluation."""

        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            began = clocks()
            value = function(*args, **kwargs)
            for place, (now, then) in enumerate(zip(clocks(), began, strict=True)):
                self._evaluation[place] += now - then
            return value

        return timed

    def report(self, **figures: Any) -> None:
        """Write a line of figures."""
        self._lines.write(json.dumps(figures) + "\n")


def clocks() -> tuple[float, float]:
    """Wall and CPU seconds so far."""
    return time.perf_counter(), cpu_seconds()
