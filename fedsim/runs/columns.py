"""The columns of metrics.csv: known before the first round, whatever clients call theirs."""

from __future__ import annotations

from fedsim.errors import FedsimError
from fedsim.federation.client_metrics import QUANTILES
from fedsim.runs.resolve import Resolved
from fedsim.strategies import DPFedAvg, RoundReport


def columns_of(resolved: Resolved, strategy: DPFedAvg) -> tuple[str, ...]:
    """Every name that a row of this run's metrics may have, in order.

    Raises
    ------
    FedsimError
        If a metric of the user's has the name of another column.
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
    if strategy.private:
        columns.append("epsilon")
    if resolved.client_ledgers is not None:
        columns.append("example-epsilon")
    if strategy.private or resolved.client_ledgers is not None:
        # 1 where noise follows from the config's seed: what the epsilons then are.
        columns.append("simulated")
    columns += RoundReport.columns()
    columns += [*strategy.mechanism.shown(resolved.trainer.layout), "update-norm"]
    columns += ["bytes-down", "bytes-up"]
    if resolved.devices.clocked:
        columns.append("virtual-seconds")
    columns += ["clients-per-second", "seconds"]
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise FedsimError(
            f"'{twice[0]}' would be the name of two columns of metrics.csv; a metric of your own "
            "(task.metrics, mechanism.private-scalar) must have another name."
        )
    return tuple(columns)
