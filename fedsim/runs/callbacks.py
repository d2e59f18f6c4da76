"""Callbacks: what is called as a run goes on, on every engine alike, and may stop it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flwr.app import ArrayRecord

from fedsim.config import RunConfig
from fedsim.runs.artefacts import Ended, Row, RunDirectory
from fedsim.strategies import RoundReport
from fedsim.strategies.state import Tree, parted

__all__ = ["Callback", "Callbacks", "RunStatus", "improves"]

_log = logging.getLogger("fedsim")

_OPERATORS = {*RoundReport.columns(), "clients-per-second", "seconds"}


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
    directory: RunDirectory | None = None
    ended: Ended | None = None
    why: str = ""

    @property
    def metrics(self) -> dict[str, float | int]:
        """Those of the row that may decide something: in a private run, what is covered."""
        if not self.protects:
            return dict(self.row)
        return {
            name: value
            for name, value in self.row.items()
            if name not in _OPERATORS and not name.startswith(("train-", "clients-"))
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


class Callbacks:
    """Several callbacks, in order, none of which can fail the run or another one.

    Attributes
    ----------
    stopped : str or None
        Why one of them has stopped the run.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._warned: set[int] = set()
        self.stopped: str | None = None

    def on_start(self, status: RunStatus) -> None:
        """Tell them that the run begins."""
        self._ask(lambda callback: callback.on_start(status))

    def on_round(self, status: RunStatus) -> None:
        """Tell them of a round."""
        self._ask(lambda callback: callback.on_round(status))

    def on_end(self, status: RunStatus) -> None:
        """Tell them that the run has ended."""
        self._ask(lambda callback: callback.on_end(status))

    def state(self) -> Tree:
        """What they keep, by their places."""
        kept: dict[str, Tree] = {}

        def take(place: int, callback: Callback) -> None:
            if state := callback.state():
                parted(state)  # what no checkpoint can hold fails its callback alone
                kept[str(place)] = state

        self._each(take)
        return kept

    def restore(self, state: Tree) -> None:
        """Give them back what they kept."""

        def give(place: int, callback: Callback) -> None:
            if (kept := state.get(str(place))) is not None:
                callback.restore(kept)

        self._each(give)

    def _ask(self, question: Callable[[Callback], str | bool | None]) -> None:
        def ask(_: int, callback: Callback) -> None:
            answer = question(callback)
            if answer and self.stopped is None:
                said = isinstance(answer, str)
                self.stopped = str(answer) if said else f"{type(callback).__name__} stopped it"

        self._each(ask)

    def _each(self, do: Callable[[int, Callback], None]) -> None:
        for place, callback in enumerate(self._callbacks):
            try:
                do(place, callback)
            except Exception:
                if place not in self._warned:
                    name = type(callback).__name__
                    _log.warning("callback %s failed; the run goes on.", name, exc_info=True)
                self._warned.add(place)


def lower_is_better(metric: str) -> bool:
    """Whether a metric of this name is a loss.

    Examples
    --------
    >>> lower_is_better("test-loss"), lower_is_better("test-accuracy")
    (True, False)
    """
    return metric.endswith(("loss", "error", "perplexity", "mse", "mae", "rmse"))


def improves(metric: str, row: Mapping[str, float | int], best: float | None) -> bool:
    """Whether a row's metric is there and better than the best so far."""
    value = row.get(metric)
    if value is None or value != value:
        return False
    return best is None or (value < best if lower_is_better(metric) else value > best)
