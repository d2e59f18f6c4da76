"""Callbacks: what is called as a run goes on, on every engine alike, and may stop it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from flwr.app import ArrayRecord

from fedsim.config import RunConfig
from fedsim.federation.state_tree import Tree, split_tree
from fedsim.runs.directory import Ended, Row, RunDirectory
from fedsim.strategies import RoundReport

_log = logging.getLogger("fedsim")

_OPERATORS = {
    *RoundReport.columns(),
    *("bytes-down", "bytes-up", "virtual-seconds", "clients-per-second", "seconds"),
}


@dataclass(frozen=True)
class RunStatus:
    """What a run has reached, as callbacks see it.

    Attributes
    ----------
    config : RunConfig
        Resolved.
    round : int
        The last one that was made; 0 is the initial model's.
    row : mapping of str to number
        The round's row of metrics.csv. The counts of clients and times in it are the operator's:
        in a private run they are not covered by the guarantee, and must decide nothing.
    arrays : ArrayRecord
        The parameters.
    protects : bool
        Whether the run claims privacy, at whichever level.
    of_clients : tuple of str
        Which of ``test`` and ``validation`` are examples of a private run's clients.
    directory : RunDirectory or None
        Where the artefacts are.
    ended : "finished", "budget", "stopped", "interrupted" or None
        How the run has ended; None while it goes on, and at the end of one that failed.
    why : str
        One sentence, where it ended early.
    """

    config: RunConfig
    round: int
    row: Row
    arrays: ArrayRecord
    protects: bool
    of_clients: tuple[str, ...] = ()
    directory: RunDirectory | None = None
    ended: Ended | None = None
    why: str = ""

    @property
    def metrics(self) -> dict[str, float | int]:
        """Those of the row that may decide something: in a private run, what is covered."""
        if not self.protects:
            return dict(self.row)
        uncovered = tuple(f"{split}-" for split in ("train", "clients", *self.of_clients))
        # What examples have cost tells who took part, which is covered where clients are.
        if "epsilon" in self.row:
            uncovered += ("example-epsilon",)
        return {
            name: value
            for name, value in self.row.items()
            if name not in _OPERATORS and not name.startswith(uncovered)
        }


class Callback:
    """Called at the start of a run, after each of its rounds, and at its end.

    What it raises is its own failure: it is logged, and the run goes on. A callback that keeps
    anything gives it to checkpoints by `state`, and is given it back when the run is resumed.
    """

    def on_start(self, status: RunStatus) -> str | bool | None:
        """Before the first round, or the first one after a resume; may stop as `on_round` may."""

    def on_round(self, status: RunStatus) -> str | bool | None:
        """After a round; True, or a sentence that says why, makes it the last.

        The initial model's evaluation, where there is one, is round 0.
        """

    def on_end(self, status: RunStatus) -> None:
        """When the run has ended, whatever has ended it."""

    def state(self) -> Tree:
        """What outlives the process: tensors, what JSON can say, and mappings of such."""
        return {}

    def restore(self, state: Tree) -> None:
        """Go on from what `state` gave."""


class Callbacks(Callback):
    """Several callbacks as one, in order; none of them can fail the run or another one.

    Parameters
    ----------
    callbacks : mapping of str to Callback
        What one keeps is given back to the one of the same name.

    Attributes
    ----------
    stopped : str or None
        Why one of them has stopped the run.
    """

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self._callbacks = dict(callbacks)
        self._warned: set[str] = set()
        self.stopped: str | None = None

    @classmethod
    def numbered(cls, callbacks: Iterable[Callback]) -> Self:
        """Named by their places."""
        return cls({str(place): callback for place, callback in enumerate(callbacks)})

    def on_start(self, status: RunStatus) -> str | None:
        """See `Callback`."""
        return self._ask(lambda callback: callback.on_start(status))

    def on_round(self, status: RunStatus) -> str | None:
        """See `Callback`."""
        return self._ask(lambda callback: callback.on_round(status))

    def on_end(self, status: RunStatus) -> None:
        """See `Callback`."""
        self._ask(lambda callback: callback.on_end(status))

    def state(self) -> Tree:
        """See `Callback`."""
        kept: dict[str, Tree] = {}

        def take(name: str, callback: Callback) -> None:
            if state := callback.state():
                split_tree(state)  # what no checkpoint can hold fails its callback alone
                kept[name] = state

        self._each(take)
        return kept

    def restore(self, state: Tree) -> None:
        """See `Callback`."""

        def give(name: str, callback: Callback) -> None:
            if (kept := state.get(name)) is not None:
                callback.restore(kept)

        self._each(give)

    def _ask(self, question: Callable[[Callback], str | bool | None]) -> str | None:
        def ask(_: str, callback: Callback) -> None:
            answer = question(callback)
            if answer and self.stopped is None:
                said = isinstance(answer, str)
                self.stopped = str(answer) if said else f"{type(callback).__name__} has stopped it"

        self._each(ask)
        return self.stopped

    def _each(self, do: Callable[[str, Callback], None]) -> None:
        for name, callback in self._callbacks.items():
            try:
                do(name, callback)
            except Exception:
                if name not in self._warned:
                    what = type(callback).__name__
                    _log.warning("callback %s failed; the run goes on.", what, exc_info=True)
                self._warned.add(name)
