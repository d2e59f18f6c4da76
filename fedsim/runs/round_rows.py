"""Rows of metrics.csv: a run's columns in their order, and the values of each round."""

from __future__ import annotations

import logging

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedsim.clients.adadp_lr import AT_LIMIT
from fedsim.config.plan import entropy
from fedsim.errors import FedsimError
from fedsim.runs.factories import private_metrics
from fedsim.runs.metrics import QUANTILES, Row
from fedsim.runs.resolve import Resolved, driver_charges_examples
from fedsim.strategies import DPFedAvg, RoundReport

_log = logging.getLogger("fedsim")


def row_columns(resolved: Resolved, strategy: DPFedAvg) -> tuple[str, ...]:
    """Names of all columns that this run's rows may have, in order.

    Raises
    ------
    FedsimError
        If a user's metric has the name of another column.
    """
    config = resolved.config
    evaluated = ("loss", *resolved.trainer.metrics)
    columns = ["round"]
    if config.evaluate.every:
        splits = ["test", *(["validation"] if config.data.validation else [])]
        columns += [f"{split}-{name}" for split in splits for name in evaluated]
    if strategy.shows_clients:
        columns += [f"train-{name}" for name in sorted(resolved.trainer.reported)]
        if config.evaluate.clients_every:
            columns.append("clients-num-examples")
            columns += [
                f"clients-{name}{suffix}"
                for name in sorted(evaluated)
                for suffix in ("", *(f"-{quantile}" for quantile in QUANTILES))
            ]
    elif (private := private_metrics(config)) is not None:
        columns += [f"clients-{name}" for name in private.released_names]
    if strategy.private:
        columns += ["epsilon", "epsilon-so-far"] if strategy.plan.charged_ahead else ["epsilon"]
    if driver_charges_examples(config):
        columns.append("example-epsilon")
    if strategy.private or driver_charges_examples(config):
        # Above 0 if epsilon must be marked, as in `epsilon_marks`.
        columns += ["simulated", "declared"]
    columns += RoundReport.columns
    columns += [*strategy.plan.mechanism.released_names(resolved.trainer.layout), "update-norm"]
    columns += resolved.devices.columns
    columns += ["clients-per-second", "seconds"]
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise FedsimError(
            f"'{twice[0]}' would be the name of two columns of metrics.csv; a metric of your own "
            "(task.metrics, mechanism.private-scalar) must have another name."
        )
    return tuple(columns)


class RoundRows:
    """Makes the rows of one run's rounds.

    Parameters
    ----------
    resolved : Resolved
    strategy : DPFedAvg
        When a row is made, it must have aggregated that round last.

    Attributes
    ----------
    columns : tuple of str
        The run's columns, from `row_columns`.
    """

    def __init__(self, resolved: Resolved, strategy: DPFedAvg) -> None:
        self.columns = row_columns(resolved, strategy)
        self._resolved, self._strategy = resolved, strategy
        simulated = strategy.plan.simulated_mark(entropy(resolved.config))
        declared = strategy.plan.declared_by_user
        self._marks = {"simulated": simulated, "declared": int(declared)}
        self._has_warned_of_limit = False

    def initial(self, metrics: MetricRecord) -> Row:
        """Row of the initial model, round 0."""
        return self._planned({"round": 0, **_numbers(metrics)})

    def of_round(self, server_round: int, result: Result, seconds: float) -> Row:
        """Row of a finished round, which took ``seconds``."""
        row: dict[str, float | int] = {"round": server_round}
        row |= _numbers(result.evaluate_metrics_serverapp.get(server_round))
        row |= _numbers(result.train_metrics_clientapp.get(server_round), "train-")
        row |= _numbers(result.evaluate_metrics_clientapp.get(server_round), "clients-")
        row |= self.spent(server_round)
        if (report := self._strategy.report) is not None:
            row |= report.row()
            row |= report.info
            if report.update_norm is not None:
                row["update-norm"] = report.update_norm
            row |= self._resolved.devices.load
            row["clients-per-second"] = report.usable / seconds
        row["seconds"] = seconds
        planned = self._planned(row)
        self._warn_of_limit(planned)
        return planned

    def _warn_of_limit(self, row: Row) -> None:
        """Say once that rates stand at their limit, in a run that shows what clients report."""
        share = row.get(f"train-{AT_LIMIT}", 0)
        if share and not self._has_warned_of_limit:
            self._has_warned_of_limit = True
            _log.warning(
                "round %s: the learning rates of clients with %.0f %% of the examples stand at "
                "client.eta-max, %g; a larger limit lets them grow.",
                row["round"],
                100 * share,
                self._resolved.config.client.eta_max,
            )

    def spent(self, server_round: int) -> Row:
        """Columns of the privacy spent so far: epsilon at each level, and its marks."""
        row: dict[str, float | int] = {}
        resolved, strategy = self._resolved, self._strategy
        if strategy.private:
            row["epsilon"] = strategy.ledger.epsilon(strategy.delta)
            if (plan := strategy.plan).charged_ahead:
                row["epsilon-so-far"] = plan.epsilon(strategy.delta, after_round=server_round)
        if (
            driver_charges_examples(resolved.config)
            and (ledger := resolved.trainer.ledger) is not None
        ):
            row["example-epsilon"] = ledger.epsilon(resolved.config.client.noise.delta)
        return row | self._marks if row else row

    def _planned(self, row: Row) -> Row:
        # Values that clients report under names without a column are dropped.
        return {name: row[name] for name in self.columns if name in row}


def _numbers(record: MetricRecord | None, prefix: str = "") -> dict[str, float | int]:
    return {
        f"{prefix}{key}": float(value)
        for key, value in (record or {}).items()
        if isinstance(value, int | float)
    }
