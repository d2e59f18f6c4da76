"""One run of the real strategy on the real engine, and what it lets an observer see."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from flwr.app import Array, Message
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedsim.audit.checks import Floats, Ids
from fedsim.audit.claim import Claim
from fedsim.audit.worlds import Canaries, MadeUpClients, World, reach, silent_clients
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.exchange import Instructions
from fedsim.mechanisms import Mechanism, State
from fedsim.privacy import Adjacency, Entry, Event
from fedsim.privacy.laws import declared_population
from fedsim.rows import Layout
from fedsim.rows.block import RUN
from fedsim.strategies import DPFedAvg

StrategyFactory = Callable[[int | None], DPFedAvg]
Parameters = Mapping[str, Tensor]


def parameters(d: int) -> dict[str, Tensor]:
    """A model of ``d`` parameters in layers of unequal size, all zero: at most four."""
    sizes = [d // 16, d // 8, d // 16] if d >= 64 else [d // 2]
    names = ("first.bias", "second.weight", "third.weight") if d >= 64 else ("first.weight",)
    layers = dict(zip(names, sizes, strict=True)) | {"last.weight": d - sum(sizes)}
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in layers.items()}


PARAMETERS = parameters(8)


def columns(sizes: Iterable[int]) -> list[slice]:
    """Columns of layers of these sizes in a row."""
    stops = np.cumsum(list(sizes)).tolist()
    return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]


@dataclass(frozen=True)
class Target:
    """What is audited: so many rounds of a strategy on a model, whatever the seed.

    Attributes
    ----------
    strategy : callable
        From a seed to a fresh strategy. The seed must decide its cohorts and noise; None
        leaves them to the operating system.
    rounds : int
    start : mapping of name to Tensor
        Initial parameters of the model.
    """

    strategy: StrategyFactory
    rounds: int = 1
    start: Parameters = field(default_factory=lambda: PARAMETERS)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise FedsimError(f"rounds is {self.rounds}; it must be at least 1.")

    def with_rounds(self, rounds: int) -> Target:
        """The same for another number of rounds."""
        return replace(self, rounds=rounds)

    def at_most(self, rounds: int) -> Target:
        """The same for its first rounds, if it has more."""
        return replace(self, rounds=min(self.rounds, rounds))

    def with_model(self, start: Parameters) -> Target:
        """The same on another model."""
        return replace(self, start=start)

    @cached_property
    def settings(self) -> DPFedAvg:
        """One of the strategies, which is never run."""
        return self.strategy(1)

    @cached_property
    def layout(self) -> Layout:
        """Of the parameters in a row."""
        return Layout.of(self.start)

    @property
    def layers(self) -> dict[str, slice]:
        """Columns of each parameter in a row, by its name."""
        sizes = [tensor.numel() for tensor in self.start.values()]
        return dict(zip(self.start, columns(sizes), strict=True))

    @property
    def population(self) -> int:
        """Declared number of clients; the canary is the last of them."""
        return declared_population(self.settings.cohort)

    @property
    def adjacency(self) -> Adjacency:
        """What it means that the canary does not take part."""
        return self.settings.cohort.adjacency

    @property
    def mechanism(self) -> Mechanism:
        """The bound on updates."""
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

    @property
    def adapts(self) -> bool:
        """Whether the bound of a round depends on what was released before."""
        return bool(self.mechanism.init(self.layout))

    def silent_clients(self) -> Canaries:
        """A federation whose clients all send zeros."""
        return silent_clients(self.population, self.layout.d, self.sides)

    def world(
        self,
        world: World,
        *,
        present: bool = True,
        neighbour: Adjacency | None = None,
        scale: float | None = None,
    ) -> Canaries:
        """A world's clients, whose rows every bound shortens; parameters as `World.trainer`'s."""
        return world.trainer(
            self.population,
            self.layout.d,
            reach(self.mechanism, self.layout) if scale is None else scale,
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
        By how much each round moved the parameters; zero for a round that was not released.
    shown : sequence of mapping of name to float
        The numbers that the mechanism shows after each round.
    asked : sequence of int64 arrays
        Clients that were asked in each round, in the order in which they answered.
    entries : tuple of Entry
        The ledger's lines.
    charged : int ``[rounds]``
        Number of lines when each round's parameters could be seen.
    states : sequence of State
        The mechanism's state before each round.
    ended : str
        "" for a run that made all its rounds; else why it did not.
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


def observe(
    target: Target,
    trainer: MadeUpClients,
    seed: int | None,
    *,
    grid: LocalGrid | None = None,
    timeout: float = 3600,
    leaving: bool = False,
    resume_after: int = 0,
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
    resume_after : int
        Stop after so many rounds, and resume in a new strategy; 0: one strategy runs them all.
    """
    strategy = target.strategy(seed)
    layout = target.layout
    vector = layout.flatten(target.start)
    moves = np.zeros((target.rounds, layout.d))
    shown: list[Mapping[str, float]] = []
    charged: list[int] = []
    states: list[State] = [strategy.mechanism.init(layout)]
    numbers: list[Mapping[str, Floats]] = []
    watching = _WatchingGrid(trainer, strategy.ledger.run) if leaving else None
    grid = grid or watching or LocalGrid(trainer)

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
    error, arrays, state = None, array_record(target.start), None
    try:
        if resume_after:
            arrays = strategy.start(grid, arrays, resume_after, on_round=look).arrays
            state, strategy = strategy.state(), target.strategy(seed)
        strategy.start(grid, arrays, target.rounds, timeout=timeout, state=state, on_round=look)
    except Exception as raised:  # a run that fails is something to be seen too
        error = raised
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
        ended=strategy.stopped or "" if error is None else f"{type(error).__name__}: {error}",
        error=error,
        delta=strategy.delta,
        leaving=numbers,
    )


class _WatchingGrid(LocalGrid):
    """Notes what a strategy sends to all clients beside the parameters.

    The run's name is left out, which is drawn before anything is trained.
    """

    def __init__(self, trainer: MadeUpClients, run: str) -> None:
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


# Other tests look at the ledger; how many clients failed is known to the operator, as a statement
# says.
NOT_LEAVING = ("ledger", "failures", "round", "stopped")


def _leaving(
    strategy: DPFedAvg, server_round: int, result: Result, sent: Mapping[str, Floats]
) -> dict[str, Floats]:
    """All numbers that an observer may see after a round, but for the parameters."""
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
