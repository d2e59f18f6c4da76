"""One run of the real strategy on the real engine, and what it lets an observer see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedsim.audit.claim import Claim
from fedsim.audit.worlds import Canaries
from fedsim.engines import LocalGrid
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import State
from fedsim.privacy import Entry
from fedsim.rows import Layout
from fedsim.strategies import DPFedAvg

__all__ = [
    "PARAMETERS",
    "Observation",
    "Parameters",
    "Plan",
    "StrategyFactory",
    "columns",
    "observe",
    "parameters",
]

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
StrategyFactory = Callable[[int | None], DPFedAvg]
Parameters = Mapping[str, Tensor]


def parameters(d: int) -> dict[str, Tensor]:
    """A model of ``d`` parameters in layers of unequal size, all zero: at most four."""
    sizes = [d // 16, d // 8, d // 16] if d >= 64 else [d // 2]
    names = ("first.bias", "second.weight", "third.weight") if d >= 64 else ("first.weight",)
    layers = dict(zip(names, sizes, strict=True)) | {"last.weight": d - sum(sizes)}
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in layers.items()}


PARAMETERS = parameters(8)


def columns(start: Parameters) -> list[slice]:
    """Columns of each parameter in a row."""
    stops = np.cumsum([tensor.numel() for tensor in start.values()]).tolist()
    return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]


@dataclass(frozen=True)
class Plan:
    """What is audited: so many rounds of a strategy.

    Attributes
    ----------
    strategy : callable
        From a seed to a fresh strategy. The seed must decide its cohorts and noise; None
        leaves them to the operating system.
    rounds : int
    """

    strategy: StrategyFactory
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise FedsimError(f"rounds is {self.rounds}; it must be at least 1.")


@dataclass(frozen=True)
class Observation:
    """What one run showed.

    Attributes
    ----------
    moves : float64 ``[rounds, d]``
        By how much each round moved the parameters; zero for a round that never came.
    shown : sequence of mapping of name to float
        The numbers that the mechanism shows after each round.
    asked : sequence of int64 arrays
        Who was asked in each round, in the order in which clients answered.
    entries : tuple of Entry
        The ledger's lines.
    charged : int ``[rounds]``
        Number of lines when each round's parameters could be seen.
    states : sequence of State
        The mechanism's state before each round.
    ended : str
        "" for a run that came to its end; else why it did not.
    error : Exception or None
        What was raised, if that was why.
    delta : float
    """

    moves: Floats
    shown: Sequence[Mapping[str, float]]
    asked: Sequence[Ids]
    entries: tuple[Entry, ...]
    charged: Sequence[int]
    states: Sequence[State]
    ended: str
    error: Exception | None
    delta: float

    @property
    def released(self) -> int:
        """Rounds in which the parameters moved."""
        return int((self.moves != 0).any(1).sum())

    @property
    def claim(self) -> Claim:
        """What the run's ledger says it cost."""
        return Claim(tuple(entry.event for entry in self.entries), self.delta)

    @property
    def sizes(self) -> Floats:
        """Number of clients asked in each round, ``[rounds]``."""
        return np.array([len(ids) for ids in self.asked], dtype=np.float64)

    def table(self) -> Floats:
        """Moves and numbers shown, side by side: float64 ``[rounds, d + k]``."""
        width = max((len(shown) for shown in self.shown), default=0)
        numbers = np.zeros((len(self.moves), width))
        for row, shown in zip(numbers, self.shown, strict=False):
            row[: len(shown)] = list(shown.values())
        return np.concatenate([self.moves, numbers], axis=1)


def observe(
    plan: Plan,
    trainer: Canaries,
    start: Parameters,
    seed: int | None,
    *,
    grid: Grid | None = None,
    timeout: float = 3600,
) -> Observation:
    """Run once.

    Parameters
    ----------
    grid : Grid, optional
        What the strategy talks to, if not `LocalGrid`'s blocks.
    timeout : float
        Seconds that the strategy is told to wait for a round.
    """
    strategy = plan.strategy(seed)
    layout = Layout.of(start)
    vector = layout.flatten(start)
    moves = np.zeros((plan.rounds, layout.d))
    shown: list[Mapping[str, float]] = []
    charged: list[int] = []
    states: list[State] = [strategy.mechanism.init(layout)]

    def look(server_round: int, result: Result) -> None:
        nonlocal vector
        reached = layout.flatten(tensors(result.arrays))
        moves[server_round - 1] = (reached - vector).numpy()
        vector = reached
        report = strategy.report
        shown.append({} if report is None else dict(report.info))
        charged.append(len(strategy.ledger.entries))
        states.append({name: tensor.clone() for name, tensor in strategy.mechanism_state.items()})

    trainer.answered.clear()
    error = None
    try:
        strategy.start(
            grid or LocalGrid(trainer), array_record(start), plan.rounds, timeout=timeout,
            on_round=look,
        )  # fmt: skip
    except Exception as raised:  # a run that fails is something to be seen too
        error = raised
    ended = strategy.stopped or "" if error is None else f"{type(error).__name__}: {error}"
    asked = [
        np.concatenate(trainer.answered.get(t, [np.empty(0, dtype=np.int64)]))
        for t in range(1, plan.rounds + 1)
    ]
    return Observation(
        moves=moves,
        shown=shown,
        asked=asked,
        entries=strategy.ledger.entries,
        charged=charged,
        states=states[:-1] or states,
        ended=ended,
        error=error,
        delta=strategy.delta,
    )
