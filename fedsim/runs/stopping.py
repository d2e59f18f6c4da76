"""Which round was best by a central metric, and stopping once none has been for long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedsim.errors import FedsimError
from fedsim.federation.state_tree import Tree
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.resolve import Resolved

_CENTRAL = "validation-"


@dataclass(frozen=True)
class Judge:
    """Says which of two values of a metric is better.

    Attributes
    ----------
    metric : str
        A column of metrics.csv.
    higher_is_better : bool
    """

    metric: str
    higher_is_better: bool

    @classmethod
    def of(cls, resolved: Resolved, key: str, metric: str) -> Judge:
        """By a metric that the config names under ``key``.

        Raises
        ------
        FedsimError
            If the run has no such metric, if it is of the test examples, which nothing is chosen
            by, or in a private run of clients' own.
        """
        config, own = resolved.config, resolved.data.split.of_clients
        evaluated = {"loss": False}
        evaluated |= {k: m.higher_is_better for k, m in resolved.trainer.metrics.items()}
        central = config.evaluate.every and config.data.validation
        private = config.private or config.client.private
        # What may be shown all the same (evaluate.unprotected) may still decide nothing.
        prefixes = [_CENTRAL] if central and "validation" not in own else []
        if not private:
            prefixes += ["clients-"] if config.evaluate.clients_every else []
        known = {f"{prefix}{name}": high for prefix in prefixes for name, high in evaluated.items()}
        if metric not in known:
            allowed = ", ".join(known) or "unset without data.validation and evaluate.every"
            of_clients = private * " (of clients' data it may be none in a private run)"
            test = "; nothing is chosen by test examples, data.validation holds out others"
            test *= metric.startswith("test-")
            raise FedsimError(f"{key} = '{metric}'; it must be {allowed}{of_clients}{test}.")
        return cls(metric, known[metric])

    def improves(self, row: Mapping[str, float | int], best: float | None) -> bool:
        """Whether a row has the metric, better than the best so far."""
        value = row.get(self.metric)
        if value is None or math.isnan(value):
            return False
        return best is None or (value > best if self.higher_is_better else value < best)


class EarlyStopping(Callback):
    """Stops a run whose metric has not become better for ``patience`` rounds.

    Parameters
    ----------
    judge : Judge
    patience : int
        Rounds; one without the metric is not judged.
    """

    def __init__(self, judge: Judge, patience: int) -> None:
        self._judge = judge
        self._patience = patience
        self._best: float | None = None
        self._round = 0

    def on_start(self, status: RunStatus) -> str | None:
        """See `Callback`: a resumed run may have stopped already."""
        return self._verdict(status)

    def on_round(self, status: RunStatus) -> str | None:
        """See `Callback`."""
        metrics = status.metrics
        if self._judge.metric not in metrics:
            return None
        if self._judge.improves(metrics, self._best):
            self._best, self._round = float(metrics[self._judge.metric]), status.round
        return self._verdict(status)

    def _verdict(self, status: RunStatus) -> str | None:
        if self._best is None or status.round - self._round < self._patience:
            return None
        return (
            f"{self._judge.metric} has not been better than {self._best:.4g} in the "
            f"{status.round - self._round} rounds since round {self._round}"
        )

    def state(self) -> Tree:
        """See `Callback`."""
        return {"best": self._best, "round": self._round}

    def restore(self, state: Tree) -> None:
        """See `Callback`."""
        self._best, self._round = state["best"], state["round"]
