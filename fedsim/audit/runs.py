"""One run of the real strategy on the real engine, and what it lets an observer see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedsim.audit.canaries import Canaries
from fedsim.audit.claim import Claim
from fedsim.engines import LocalGrid
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.rows import Layout
from fedsim.strategies import DPFedAvg, RunFailedError

__all__ = ["PARAMETERS", "Plan", "StrategyFactory", "observe", "parameters"]

Floats = npt.NDArray[np.float64]
StrategyFactory = Callable[[int], DPFedAvg]
Parameters = Mapping[str, Tensor]


def parameters(d: int) -> dict[str, Tensor]:
    """A model of ``d`` parameters in two layers, all zero."""
    return {
        "first.weight": torch.zeros(d // 2, dtype=torch.float64),
        "second.weight": torch.zeros(d - d // 2, dtype=torch.float64),
    }


PARAMETERS = parameters(8)


@dataclass(frozen=True)
class Plan:
    """What is audited: so many rounds of a strategy.

    Attributes
    ----------
    strategy : callable
        From a seed to a fresh strategy. The seed must decide its cohorts and noise.
    rounds : int
    """

    strategy: StrategyFactory
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise FedsimError(f"rounds is {self.rounds}; it must be at least 1.")


def observe(plan: Plan, trainer: Canaries, start: Parameters, seed: int) -> tuple[Floats, Claim]:
    """Run once.

    Returns
    -------
    seen : float64 ``[rounds, d + k]``
        By how much each round moved the parameters, and the k numbers that the mechanism
        shows after it.
    claim : Claim
        What the run's ledger says it cost.
    """
    strategy = plan.strategy(seed)
    layout = Layout.of(start)
    vector = layout.flatten(start)
    seen: list[Floats] = []

    def look(_: int, result: Result) -> None:
        nonlocal vector
        reached = layout.flatten(tensors(result.arrays))
        shown = [] if strategy.report is None else strategy.report.info.values()
        seen.append(np.concatenate([(reached - vector).numpy(), list(shown)]))
        vector = reached

    # A run that fails is something to be seen too.
    with suppress(RunFailedError):
        strategy.start(LocalGrid(trainer), array_record(start), plan.rounds, on_round=look)
    width = max((len(row) for row in seen), default=layout.d)
    table = np.zeros((plan.rounds, width))
    for row, values in zip(table, seen, strict=False):
        row[: len(values)] = values
    return table, Claim.of(strategy.ledger, strategy.delta)
