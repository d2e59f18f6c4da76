"""Run sides in turns of one round, each in a process of its own that waits between rounds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class PackageCommand:
    """One package's command.

    Attributes
    ----------
    name : str
        Its name in the table.
    command : tuple of str
        The command, which answers by `benchmarks.quickstarts.stamps`.
    folder : Path
        Working directory.
    variables : mapping of str to str
        Environment variables, in addition to this process's.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundTimes:
    """Times of a side's rounds.

    Attributes
    ----------
    wall, cpu : list of float
        Seconds of each round, over all of the side's processes.
    evaluation : list of (wall, cpu)
        Seconds of each round spent in the global model's evaluation, if that is timed.
    accuracy : list of float
        Accuracy after 0, 1, ... rounds.
    """

    wall: list[float]
    cpu: list[float]
    evaluation: list[tuple[float, float]]
    accuracy: list[float]

    @property
    def training(self) -> list[float]:
        """CPU seconds of each round without those of the evaluation."""
        return [cpu - spent for cpu, (_, spent) in zip(self.cpu, self.evaluation, strict=True)]


class Player:
    """A side's process.

    Raises
    ------
    RuntimeError
        If it ends before it has answered; the log has the reason.
    """

    def __init__(self, side: PackageCommand, log: Path) -> None:
        self._name, self._log = side.name, log
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **side.variables}
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                side.command, cwd=side.folder, env=variables, text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # ends a process that still waits for its turn
        self._process.wait()

    def answer(self) -> dict[str, Any]:
        """Read its next line of figures."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} has ended; see {self._log}.")
        figures: dict[str, Any] = json.loads(line)
        return figures

    def round(self) -> dict[str, Any]:
        """Let it run a round; returns its figures."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # if the process has ended, `answer` raises
            self._process.stdin.write("\n")
        return self.answer()


def in_turns(sides: Sequence[PackageCommand], rounds: int, logs: Path) -> list[RoundTimes]:
    """Run rounds of every side in turns, after a first round that is not counted."""
    rows: list[list[dict[str, Any]]] = [[] for _ in sides]
    with ExitStack() as stack:
        players = []
        for side in sides:
            log = logs / f"{side.name.replace(' ', '-').replace(',', '')}.log"
            players.append(stack.enter_context(Player(side, log)))
            players[-1].answer()  # waits until it is ready, so that sides start one after another
        for turn in range(rounds + 1):
            # The order alternates: a turn's first side finds the caches as the other left them.
            order = range(len(sides)) if turn % 2 else reversed(range(len(sides)))
            for place in order:
                row = players[place].round()
                print(turn, sides[place].name, json.dumps(row), flush=True)
                if turn:
                    rows[place].append(row)
        last = [player.answer() for player in players]
    return [
        RoundTimes(
            wall=[row["wall"] for row in side_rows],
            cpu=[row["cpu"] for row in side_rows],
            evaluation=[(row["evaluation"][0], row["evaluation"][1]) for row in side_rows],
            accuracy=final["accuracy"],
        )
        for side_rows, final in zip(rows, last, strict=True)
    ]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median of the turns' ratios, ours over theirs, with their range, as text."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
