"""Callbacks, which are called in each round on every engine and may stop a run; early stopping."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Self

from flwr.app import ArrayRecord

from fedsim.arguments import as_text
from fedsim.config import RunConfig
from fedsim.errors import FedsimError, keep_user_frames
from fedsim.federation.state_tree import Tree, split_tree
from fedsim.runs.directory import RunDirectory
from fedsim.runs.factories import private_metrics
from fedsim.runs.metrics import Row, subject
from fedsim.runs.resolve import Resolved
from fedsim.runs.run_ledgers import OutcomeKind, RunOutcome
from fedsim.synonyms import closest

_log = logging.getLogger("fedsim")


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, passed to callbacks.

    Attributes
    ----------
    config : RunConfig
        The resolved config.
    round : int
        The last finished round; 0 is the initial model's.
    row : mapping of str to number
        The round's row of metrics.csv. Its counts of clients and its times are for the operator:
        in a private run the guarantee does not cover them, and no decision may depend on them.
    arrays : ArrayRecord
        The current shared parameters.
    protects : bool
        Whether the run claims privacy at any level.
    uncovered : tuple of str
        Subjects of the row's columns that no noise protects in a private run, such as "train".
    directory : RunDirectory or None
        The run's directory; None if nothing is written.
    ending : RunOutcome or None
        How the run ended; None before its end, and at the end of one that failed.
    columns : tuple of str
        Of a table: what each of its columns became. Empty for other data.
    """

    config: RunConfig
    round: int
    row: Row
    arrays: ArrayRecord
    protects: bool
    uncovered: tuple[str, ...] = ("train", "clients")
    directory: RunDirectory | None = None
    outcome: RunOutcome | None = None
    columns: tuple[str, ...] = ()

    @property
    def ended(self) -> OutcomeKind | None:
        """How the run ended: as in `RunResult`, or None before its end and if it failed."""
        return None if self.outcome is None else self.outcome.ended

    @property
    def why(self) -> str:
        """One sentence if the run ended early; else empty."""
        return "" if self.outcome is None else self.outcome.why

    @property
    def metrics(self) -> dict[str, float | int]:
        """Columns of the row that decisions may depend on: in a private run, the covered ones."""
        if not self.protects:
            return dict(self.row)
        hidden = {"operator", *self.uncovered}
        covered = {key: value for key, value in self.row.items() if subject(key) not in hidden}
        # The example-level cost reveals which clients took part, which client level protects.
        if "epsilon" in covered:
            covered.pop("example-epsilon", None)
        return covered


class Callback:
    """Called at the start of a run, after each of its rounds, and at its end.

    If it raises, the error is logged and the run continues; `sys.exit` makes the round the last
    one. What `state` returns is saved in checkpoints, and passed to `restore` when the run is
    resumed.

    Raises
    ------
    FedsimError
        When a subclass is defined with an ``on_...`` method that is no hook.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name, value in vars(cls).items():
            if name.startswith("on_") and callable(value) and name not in hooks:
                similar_hooks = difflib.get_close_matches(name, hooks, 1)
                hint = f"did you mean {similar_hooks[0]}? " if similar_hooks else ""
                raise FedsimError(
                    f"{cls.__name__}.{name} would never be called; {hint}A callback's hooks are "
                    f"{', '.join(hooks)}; other methods of it must not begin with on_."
                )

    def on_start(self, status: RunStatus) -> str | bool | None:
        """Called before the first round, also after a resume; may stop the run like `on_round`."""

    def on_round(self, status: RunStatus) -> str | bool | None:
        """Called after a round; return True, or a sentence that says why, to stop the run.

        The evaluation of the initial model, if there is one, is round 0.
        """

    def on_end(self, status: RunStatus) -> None:
        """Called when the run has ended, also after an error."""

    def state(self) -> Tree:
        """State for checkpoints: a mapping of tensors, JSON values and nested mappings."""
        return {}

    def restore(self, state: Tree) -> None:
        """Take back a state that `state` returned."""


class Callbacks(Callback):
    """Calls several callbacks in order; an error of one stops neither the run nor the others.

    Parameters
    ----------
    callbacks : mapping of str to Callback
        Callbacks by name; a state is restored to the callback of the same name.

    Attributes
    ----------
    stopped : str or None
        Why a callback has stopped the run; None if none has.
    """

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self._callbacks = dict(callbacks)
        self._warned: set[str] = set()
        self.stopped: str | None = None

    @classmethod
    def numbered(cls, callbacks: Iterable[Callback]) -> Self:
        """Make it from a list, each callback named by its position."""
        return cls({str(place): callback for place, callback in enumerate(callbacks)})

    def on_start(self, status: RunStatus) -> str | None:
        """Call all callbacks; return why one has stopped the run, or None."""
        return self._ask(methodcaller("on_start", status))

    def on_round(self, status: RunStatus) -> str | None:
        """Call all callbacks; return why one has stopped the run, or None."""
        return self._ask(methodcaller("on_round", status))

    def on_end(self, status: RunStatus) -> None:
        """Call all callbacks; what they return has no effect."""
        for name in self._callbacks:
            with suppress(SystemExit):
                self._call(name, methodcaller("on_end", status))

    def state(self) -> Tree:
        """State of each callback that has one, by name."""
        states = {name: self._call(name, _state_of) for name in self._callbacks}
        return {name: state for name, state in states.items() if state}

    def restore(self, state: Tree) -> None:
        """Restore each callback's state by its name."""
        for name in self._callbacks:
            if state.get(name) is not None:
                self._call(name, methodcaller("restore", state[name]))

    def _ask(self, question: Callable[[Callback], Any]) -> str | None:
        for name, callback in self._callbacks.items():
            try:
                answer = self._call(name, lambda callback: _checked(question(callback)))
            except SystemExit:  # what was released may have decided it, as it does an answer
                answer = True
            if answer and self.stopped is None:
                default_reason = f"{type(callback).__name__} has stopped it"
                self.stopped = str(answer) if isinstance(answer, str) else default_reason
        return self.stopped

    def _call(self, name: str, function: Callable[[Callback], Any]) -> Any:
        """Result of a callback's method; None if it fails, which is logged once."""
        callback = self._callbacks[name]
        try:
            return function(callback)
        except Exception as error:
            if name not in self._warned:
                label = type(callback).__name__
                if isinstance(error, FedsimError):
                    _log.warning("callback %s failed; the run continues: %s", label, error)
                else:
                    keep_user_frames(error)
                    _log.warning("callback %s failed; the run continues.", label, exc_info=True)
            self._warned.add(name)
            return None


def _checked(answer: Any) -> str | bool | None:
    """A callback's answer; other objects are refused, since most are true and would end the run."""
    if hasattr(answer, "item"):  # a truth value of NumPy or torch
        answer = answer.item()
    if not isinstance(answer, str | bool | None):
        raise FedsimError(
            f"it returned {as_text(answer)}; it must return True or a sentence to stop the run, "
            "and None otherwise."
        )
    return answer


def _state_of(callback: Callback) -> Tree:
    state = callback.state()
    split_tree(state or {})  # raises here if a checkpoint could not hold it: only this one fails
    return state


@dataclass(frozen=True)
class Measure:
    """Metric by which rounds or runs are compared.

    Attributes
    ----------
    name : str
        Name of a metric, or of a column of metrics.csv.
    higher_is_better : bool, or None
        None if a user-defined metric does not say: nothing is chosen by it.
    """

    name: str
    higher_is_better: bool | None

    @classmethod
    def of_column(cls, resolved: Resolved, key: str, column: str) -> Measure:
        """Make it for a column that the config names under ``key``.

        Raises
        ------
        FedsimError
            If the run has no such metric; if it is a test metric, since nothing may be chosen by
            test examples; in a private run, if it is one of clients' data without noise; or if it
            does not say whether higher is better.
        """
        config = resolved.config
        evaluated: dict[str, bool | None] = {"loss": False}
        evaluated |= {k: m.higher_is_better for k, m in resolved.trainer.metrics.items()}
        names: dict[str, Iterable[str]] = {}
        if config.evaluate.every and config.data.validation:
            names["validation"] = evaluated
        if config.evaluate.clients_every:
            released = private_metrics(config)
            names["clients"] = [r.name for r in released.ranges] if released else evaluated
        # evaluate.unprotected allows showing these, not basing decisions on them.
        for examples in resolved.uncovered:
            names.pop(examples, None)
        columns = {f"{kind}-{name}": evaluated[name] for kind in names for name in names[kind]}
        if column not in columns:
            hint = closest("measure", column, columns)
            allowed = ", ".join(columns) or _how_to_have_columns(resolved)
            notes = ""
            if config.protects:
                notes += "; in a private run, what is of clients' data needs evaluate.private"
            if column.startswith("test-"):
                notes += "; test examples must not choose anything: set data.validation"
            raise FedsimError(f"{key} = '{column}';{hint} must be {allowed}{notes}.")
        if columns[column] is None:
            raise FedsimError(
                f"{key} = '{column}'; this metric of your own does not say which values are "
                "better: its function or class needs an attribute higher_is_better, True or False."
            )
        return cls(column, columns[column])

    def score(self, value: float) -> float:
        """The value with its sign changed so that higher is better; also the inverse of that."""
        return value if self.higher_is_better else -value

    def improves(self, row: Mapping[str, float | int], best: float | None) -> bool:
        """Whether a row's value in the column is better than the best so far."""
        value = row.get(self.name)
        if value is None or math.isnan(value):
            return False
        return best is None or self.score(value) > self.score(best)


def _how_to_have_columns(resolved: Resolved) -> str:
    """What must be set so that there is a column by which rounds can be compared."""
    config = resolved.config
    if "validation" in resolved.uncovered:
        needed = [] if config.evaluate.clients_every else ["evaluate.clients-every = 1"]
        kind, settings = "clients", [*needed, "evaluate.private = true"]
    else:
        needed = [] if config.data.validation else ["data.validation = 0.1"]
        kind, settings = "validation", needed
        settings += [] if config.evaluate.every else ["evaluate.every = 1"]
    columns = ", ".join(f"{kind}-{name}" for name in ("loss", *resolved.trainer.metrics))
    return f"{columns}, which {' and '.join(settings)} would give"


class EarlyStopping(Callback):
    """Stops a run whose metric has not improved for ``patience`` rounds.

    Parameters
    ----------
    measure : Measure
    patience : int
        Number of rounds. A round without the metric is not judged, but counts.
    """

    def __init__(self, measure: Measure, patience: int) -> None:
        self._measure = measure
        self._patience = patience
        self._best: float | None = None
        self._round = 0

    def on_start(self, status: RunStatus) -> str | None:
        """Judge at once: a resumed run may already have had its last round."""
        return self._verdict(status)

    def on_round(self, status: RunStatus) -> str | None:
        """Judge the round; return a sentence if the run should stop."""
        metrics = status.metrics
        if self._measure.improves(metrics, self._best):
            self._best, self._round = float(metrics[self._measure.name]), status.round
        return self._verdict(status)

    def _verdict(self, status: RunStatus) -> str | None:
        if self._measure.name not in status.metrics:  # also of the round that a run resumes from
            return None
        if self._best is None or status.round - self._round < self._patience:
            return None
        return (
            f"{self._measure.name} has not been better than {self._best:.4g} in the "
            f"{status.round - self._round} rounds since round {self._round}"
        )

    def state(self) -> Tree:
        """State: the best value so far, and its round."""
        return {"best": self._best, "round": self._round}

    def restore(self, state: Tree) -> None:
        """Restore the best value and its round."""
        self._best, self._round = state["best"], state["round"]
