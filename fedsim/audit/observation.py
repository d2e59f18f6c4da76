"""One run of the real strategy on the real engine, and what it lets an observer see."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, Message
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedsim.audit.checks import Floats
from fedsim.audit.claim import Claim
from fedsim.audit.worlds import Canaries, World, reach, silent_clients
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import Mechanism, State
from fedsim.privacy import Adjacency, Entry, Event
from fedsim.rows import Layout
from fedsim.rows.block import BlockTrainer
from fedsim.rows.exchange import RUN, Instructions
from fedsim.strategies import DPFedAvg

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
class Target:
    """What is audited: so many rounds of a strategy, and its settings whatever the seed.

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

    @cached_property
    def settings(self) -> DPFedAvg:
        """One of the strategies, which is never run."""
        return self.strategy(1)

    @property
    def population(self) -> int:
        """Declared number of clients; the canary is the last of them."""
        population = self.settings.cohort.population
        assert population is not None
        return population

    @property
    def adjacency(self) -> Adjacency:
        """What it means that the canary is not there."""
        return self.settings.cohort.adjacency

    @property
    def mechanism(self) -> Mechanism:
        """That bounds the updates."""
        return self.settings.mechanism

    @property
    def sides(self) -> tuple[str, ...]:
        """Scalars that clients report beside their updates, and that are released."""
        return self.mechanism.side_names

    @property
    def denominator(self) -> float:
        """Of the mean that is released."""
        return self.settings.cohort.expected_size

    @property
    def shares(self) -> bool:
        """Whether clients add the noise, a share each."""
        return self.settings.placement == "client"

    @cached_property
    def event(self) -> Event:
        """What the plan says that one round costs."""
        return self.settings.plan.event()

    def adapts(self, start: Parameters) -> bool:
        """Whether the bound of a round depends on what was released before."""
        return bool(self.mechanism.init(Layout.of(start)))

    def with_rounds(self, rounds: int) -> Target:
        """The same strategy for another number of rounds."""
        return Target(self.strategy, rounds)

    def silent_clients(self, start: Parameters) -> Canaries:
        """A federation whose clients all send zeros."""
        return silent_clients(self.population, Layout.of(start).d, self.sides)

    def world(
        self,
        world: World,
        start: Parameters,
        *,
        present: bool = True,
        neighbour: Adjacency | None = None,
        scale: float | None = None,
    ) -> Canaries:
        """A world's clients, as long as every bound shortens: see `World.trainer`."""
        layout = Layout.of(start)
        return world.trainer(
            self.population,
            layout.d,
            reach(self.mechanism, layout) if scale is None else scale,
            present=present,
            neighbour=neighbour or self.adjacency,
            sides=self.sides,
        )


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
    leaving : sequence of mapping of name to float64 ``[n]``
        Everything that leaves each round beside the parameters, where it was asked for: metrics,
        what the release says of itself, state, and what clients are sent.
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
    leaving: Sequence[Mapping[str, Floats]] = ()

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


class RecordedTrainer(BlockTrainer, Protocol):
    """Made-up clients that note who of them was asked."""

    @property
    def answered(self) -> dict[int, list[Ids]]:
        """Who answered or raised in each round, in the order in which they did."""


def observe(
    target: Target,
    trainer: RecordedTrainer,
    start: Parameters,
    seed: int | None,
    *,
    grid: LocalGrid | None = None,
    timeout: float = 3600,
    leaving: bool = False,
) -> Observation:
    """Run once.

    Parameters
    ----------
    grid : LocalGrid, optional
        What the strategy talks to, if not `LocalGrid`'s blocks.
    timeout : float
        Seconds that the strategy waits for a round.
    leaving : bool
        Whether to record everything that leaves a round.
    """
    strategy = target.strategy(seed)
    layout = Layout.of(start)
    vector = layout.flatten(start)
    moves = np.zeros((target.rounds, layout.d))
    shown: list[Mapping[str, float]] = []
    charged: list[int] = []
    states: list[State] = [strategy.mechanism.init(layout)]
    numbers: list[Mapping[str, Floats]] = []
    watching = _WatchingGrid(trainer, strategy.ledger.run) if leaving else None

    def look(server_round: int, result: Result) -> None:
        nonlocal vector
        reached = layout.flatten(tensors(result.arrays))
        moves[server_round - 1] = (reached - vector).numpy()
        vector = reached
        report = strategy.report
        shown.append({} if report is None else dict(report.info))
        charged.append(len(strategy.ledger.entries))
        states.append({name: tensor.clone() for name, tensor in strategy.mechanism_state.items()})
        if watching is not None:
            numbers.append(_leaving(strategy, server_round, result, watching.sent))

    trainer.answered.clear()
    error = None
    try:
        strategy.start(
            grid or watching or LocalGrid(trainer), array_record(start), target.rounds,
            timeout=timeout, on_round=look,
        )  # fmt: skip
    except Exception as raised:  # a run that fails is something to be seen too
        error = raised
    ended = strategy.stopped or "" if error is None else f"{type(error).__name__}: {error}"
    asked = [
        np.concatenate(trainer.answered.get(t, [np.empty(0, dtype=np.int64)]))
        for t in range(1, target.rounds + 1)
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
        leaving=numbers,
    )


def observe_resumed(
    target: Target, trainer: RecordedTrainer, start: Parameters, seed: int | None, after: int
) -> tuple[Floats, tuple[Entry, ...]]:
    """The same run, stopped after so many rounds and resumed in a new strategy.

    Returns
    -------
    moves : float64 ``[rounds, d]``
        As of `Observation`.
    entries : tuple of Entry
        The ledger's lines in the end.
    """
    layout = Layout.of(start)
    reached = [layout.flatten(start)]

    def look(server_round: int, result: Result) -> None:
        reached.append(layout.flatten(tensors(result.arrays)))

    trainer.answered.clear()
    first, second = target.strategy(seed), target.strategy(seed)
    arrays = first.start(LocalGrid(trainer), array_record(start), after, on_round=look).arrays
    second.start(LocalGrid(trainer), arrays, target.rounds, state=first.state(), on_round=look)
    moves = np.zeros((target.rounds, layout.d))
    made = torch.stack(reached).diff(dim=0).numpy()
    moves[: len(made)] = made
    return moves, second.ledger.entries


class _WatchingGrid(LocalGrid):
    """Notes what a strategy sends to all clients beside the parameters.

    The run's name is left out, which is drawn before anything is trained.
    """

    def __init__(self, trainer: BlockTrainer, run: str) -> None:
        super().__init__(trainer)
        self._name = (RUN, run)
        self.sent: Mapping[str, Floats] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Replies to the messages, whose shared part is noted."""
        if isinstance(messages, Instructions):
            config = dict(item for item in messages.config.items() if item != self._name)
            self.sent = dict(_numbers("", {**config, **messages.records}))
        return super().send_and_receive(messages, timeout=timeout)


# Other tests look at the ledger; how many clients failed is the operator's knowledge, which a
# statement says.
NOT_LEAVING = ("ledger", "failures", "round", "stopped")


def _leaving(
    strategy: DPFedAvg, server_round: int, result: Result, sent: Mapping[str, Floats]
) -> dict[str, Floats]:
    """All numbers that somebody may see after a round, but for the parameters."""
    report = strategy.report
    state = {k: v for k, v in strategy.state().items() if k not in NOT_LEAVING}
    return dict(
        _numbers(
            "",
            {
                "metrics": dict(result.train_metrics_clientapp.get(server_round, {})),
                "evaluation": dict(result.evaluate_metrics_clientapp.get(server_round, {})),
                "info": {} if report is None else report.info,
                "update-norm": None if report is None else report.update_norm,
                "state": state,
                "sent": sent,
            },
        )
    )


def _numbers(prefix: str, tree: object) -> Iterator[tuple[str, Floats]]:
    """The numbers of nested mappings, lists and arrays, by their paths; of text, a checksum."""
    if isinstance(tree, Mapping):
        for name, entry in tree.items():
            yield from _numbers(f"{prefix}.{name}" if prefix else str(name), entry)
    elif isinstance(tree, Tensor):
        yield prefix, tree.detach().double().cpu().numpy().ravel()
    elif isinstance(tree, Array):
        yield prefix, np.asarray(tree.numpy(), dtype=np.float64).ravel()
    elif isinstance(tree, int | float | np.ndarray | np.number):
        yield prefix, np.atleast_1d(np.asarray(tree, dtype=np.float64)).ravel()
    elif tree is not None:
        yield prefix, np.array([float(zlib.crc32(repr(tree).encode()))])
