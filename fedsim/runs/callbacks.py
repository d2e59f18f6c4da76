"""Callbacks: called in a run's rounds, on every engine alike, and may stop it; early stopping."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Self

from flwr.app import ArrayRecord

from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.federation.state_tree import Tree, split_tree
from fedsim.runs.directory import Ended, RunDirectory
from fedsim.runs.factories import private_metrics
from fedsim.runs.metrics import Row, subject
from fedsim.runs.resolve import Resolved

_log = logging.getLogger("fedsim")


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
    uncovered : tuple of str
        Subjects of the row's columns that no noise protects in a private run, such as "train".
    directory : RunDirectory or None
        Where the artefacts are.
    ended : "finished", "budget", "stopped", "interrupted" or None
        How the run has ended; None before its end, and at the end of one that failed.
    why : str
        One sentence, where it ended early.
    """

    config: RunConfig
    round: int
    row: Row
    arrays: ArrayRecord
    protects: bool
    uncovered: tuple[str, ...] = ("train", "clients")
    directory: RunDirectory | None = None
    ended: Ended | None = None
    why: str = ""

    @property
    def metrics(self) -> dict[str, float | int]:
        """Those of the row that may decide something: in a private run, what is covered."""
        if not self.protects:
            return dict(self.row)
        hidden = {"operator", *self.uncovered}
        covered = {key: value for key, value in self.row.items() if subject(key) not in hidden}
        # What examples have cost tells who took part, which is covered where clients are.
        if "epsilon" in covered:
            covered.pop("example-epsilon", None)
        return covered


class Callback:
    """Called at the start of a run, after each of its rounds, and at its end.

    What it raises is its own failure: it is logged, and the run continues. What its
    `state` returns is saved in checkpoints, and given to `restore` when the run is resumed.

    Raises
    ------
    FedsimError
        By a subclass, where it is defined, with a method like a hook that there is not.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name, value in vars(cls).items():
            if name.startswith("on_") and callable(value) and name not in hooks:
                near = difflib.get_close_matches(name, hooks, 1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise FedsimError(
                    f"{cls.__name__}.{name} would never be called; {hint}A callback's hooks are "
                    f"{', '.join(hooks)}; other methods of it must not begin with on_."
                )

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
        """Call all of them; why one has stopped the run, if one has."""
        return self._ask(lambda callback: callback.on_start(status))

    def on_round(self, status: RunStatus) -> str | None:
        """Call all of them; why one has stopped the run, if one has."""
        return self._ask(lambda callback: callback.on_round(status))

    def on_end(self, status: RunStatus) -> None:
        """Call all of them."""
        self._ask(lambda callback: callback.on_end(status))

    def state(self) -> Tree:
        """The state of each that has one, by its name."""
        states = {name: self._call(name, _state_of) for name in self._callbacks}
        return {name: state for name, state in states.items() if state}

    def restore(self, state: Tree) -> None:
        """Give each its state."""
        for name in self._callbacks:
            if state.get(name) is not None:
                self._call(name, methodcaller("restore", state[name]))

    def _ask(self, question: Callable[[Callback], str | bool | None]) -> str | None:
        for name, callback in self._callbacks.items():
            answer = self._call(name, question)
            if answer and self.stopped is None:
                whose = f"{type(callback).__name__} has stopped it"
                self.stopped = str(answer) if isinstance(answer, str) else whose
        return self.stopped

    def _call(self, name: str, function: Callable[[Callback], Any]) -> Any:
        """What a callback gives; None where it fails, which is said once."""
        callback = self._callbacks[name]
        try:
            return function(callback)
        except Exception as error:
            if name not in self._warned:
                what = type(callback).__name__
                if isinstance(error, FedsimError):
                    _log.warning("callback %s failed; the run continues: %s", what, error)
                else:
                    _log.warning("callback %s failed; the run continues.", what, exc_info=True)
            self._warned.add(name)
            return None


def _state_of(callback: Callback) -> Tree:
    state = callback.state()
    split_tree(state or {})  # what no checkpoint can hold fails its callback alone
    return state


@dataclass(frozen=True)
class Measure:
    """What rounds or runs are compared by.

    Attributes
    ----------
    name : str
        Of a metric, or of a column of metrics.csv.
    higher_is_better : bool
    """

    name: str
    higher_is_better: bool

    @classmethod
    def of_column(cls, resolved: Resolved, key: str, column: str) -> Measure:
        """By a column that the config names under ``key``.

        Raises
        ------
        FedsimError
            If the run has no such metric, if it is of the test examples, which nothing is chosen
            by, or in a private run of clients' own.
        """
        config = resolved.config
        evaluated = {"loss": False}
        evaluated |= {k: m.higher_is_better for k, m in resolved.trainer.metrics.items()}
        names: dict[str, Iterable[str]] = {}
        if config.evaluate.every and config.data.validation:
            names["validation"] = evaluated
        if config.evaluate.clients_every:
            released = private_metrics(config)
            names["clients"] = [r.name for r in released.ranges] if released else evaluated
        # What may be shown all the same (evaluate.unprotected) may still decide nothing.
        for examples in resolved.uncovered:
            names.pop(examples, None)
        known = {f"{kind}-{name}": evaluated[name] for kind in names for name in names[kind]}
        if column not in known:
            allowed = ", ".join(known) or "unset without data.validation and evaluate.every"
            of_clients = (
                config.protects
                * " (of clients' data it must have noise, evaluate.private, in a private run)"
            )
            test = "; nothing is chosen by test examples, data.validation holds out others"
            test *= column.startswith("test-")
            raise FedsimError(f"{key} = '{column}'; it must be {allowed}{of_clients}{test}.")
        return cls(column, known[column])

    def score(self, value: float) -> float:
        """A value so that higher is better, and back."""
        return value if self.higher_is_better else -value

    def improves(self, row: Mapping[str, float | int], best: float | None) -> bool:
        """Whether a row has the column, better than the best so far."""
        value = row.get(self.name)
        if value is None or math.isnan(value):
            return False
        return best is None or self.score(value) > self.score(best)


class EarlyStopping(Callback):
    """Stops a run whose metric has not become better for ``patience`` rounds.

    Parameters
    ----------
    measure : Measure
    patience : int
        Rounds; one without the metric is not judged.
    """

    def __init__(self, measure: Measure, patience: int) -> None:
        self._measure = measure
        self._patience = patience
        self._best: float | None = None
        self._round = 0

    def on_start(self, status: RunStatus) -> str | None:
        """A resumed run may have reached its end already."""
        return self._verdict(status)

    def on_round(self, status: RunStatus) -> str | None:
        """Judge the round; a sentence if the run should stop."""
        metrics = status.metrics
        if self._measure.name not in metrics:
            return None
        if self._measure.improves(metrics, self._best):
            self._best, self._round = float(metrics[self._measure.name]), status.round
        return self._verdict(status)

    def _verdict(self, status: RunStatus) -> str | None:
        if self._best is None or status.round - self._round < self._patience:
            return None
        return (
            f"{self._measure.name} has not been better than {self._best:.4g} in the "
            f"{status.round - self._round} rounds since round {self._round}"
        )

    def state(self) -> Tree:
        """The best value so far, and its round."""
        return {"best": self._best, "round": self._round}

    def restore(self, state: Tree) -> None:
        """Resume from them."""
        self._best, self._round = state["best"], state["round"]
