"""Targets of an audit, and what an observer sees of one run."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from flwr.app import Array, Message
from flwr.serverapp.strategy import Result
from torch import Tensor
from whitebox.clients import Canaries, SyntheticClients, World, clipped_scale, silent_clients

from fedsim.array_types import Floats, Ints
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.exchange import Instructions
from fedsim.mechanisms import Mechanism, State
from fedsim.privacy import Adjacency, Entry, Event
from fedsim.privacy.laws import declared_population
from fedsim.privacy.noise import Correlated
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import Layout
from fedsim.rows.block import RUN
from fedsim.strategies import DPFedAvg

StrategyFactory = Callable[[int | None], DPFedAvg]
Parameters = Mapping[str, Tensor]


def parameters(d: int) -> dict[str, Tensor]:
    """A model of ``d`` parameters, all zero, in two or four layers of unequal size."""
    sizes = [d // 16, d // 8, d // 16] if d >= 64 else [d // 2]
    names = ("first.bias", "second.weight", "third.weight") if d >= 64 else ("first.weight",)
    layers = dict(zip(names, sizes, strict=True)) | {"last.weight": d - sum(sizes)}
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in layers.items()}


PARAMETERS = parameters(8)


@dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """What is audited: a number of rounds of something that releases noisy sums of rows.

    Attributes
    ----------
    rounds : int
    start : mapping of name to Tensor
        Initial parameters of the model.
    """

    row: ClassVar[str]

    rounds: int = 1
    start: Parameters = field(default_factory=lambda: PARAMETERS)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise FedsimError(f"rounds is {self.rounds}; it must be at least 1.")

    @property
    @abstractmethod
    def plan(self) -> ReleasePlan[Any]:
        """The claimed release plan; its bound is a `Mechanism`."""

    @property
    @abstractmethod
    def delta(self) -> float:
        """Delta at which epsilon is reported."""

    @abstractmethod
    def observe(self, clients: SyntheticClients, seed: int | None) -> Observation:
        """Run once with synthetic rows; without a seed the system's entropy is used."""

    def with_rounds(self, rounds: int) -> Self:
        """The same target with another number of rounds."""
        return replace(self, rounds=rounds)

    def at_most(self, rounds: int) -> Self:
        """The same target with at most this number of rounds."""
        return replace(self, rounds=min(self.rounds, rounds))

    def with_model(self, start: Parameters) -> Self:
        """The same target with another model."""
        return replace(self, start=start)

    @cached_property
    def layout(self) -> Layout:
        """Layout of the parameters in a row."""
        return Layout.of(self.start)

    @property
    def layers(self) -> dict[str, slice]:
        """Columns of each parameter in a row, by its name."""
        return {entry.name: slice(entry.start, entry.stop) for entry in self.layout.entries}

    def whitened(self, rounds: Floats) -> Floats:
        """Transform rounds ``[T, width]`` so that the noise of different rounds is independent.

        With correlated noise a row then also moves later rounds than its own.
        """
        noise = self.plan.noise
        return noise.matrix(len(rounds)) @ rounds if isinstance(noise, Correlated) else rounds

    @property
    def columns(self) -> list[slice]:
        """Columns of each layer, in order."""
        return list(self.layers.values())

    @property
    def population(self) -> int:
        """Declared number of rows; the canary's is the last."""
        return declared_population(self.plan.sampler)

    @property
    def shares(self) -> bool:
        """Whether each client adds a share of the noise."""
        return False

    @property
    def adjacency(self) -> Adjacency:
        """Adjacency: what happens when the canary does not take part."""
        return self.plan.sampler.adjacency

    @property
    def mechanism(self) -> Mechanism:
        """The bound on rows."""
        mechanism: Mechanism = self.plan.mechanism
        return mechanism

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of scalars that clients report and that are released in addition to updates."""
        return self.mechanism.side_scalar_names

    @cached_property
    def event(self) -> Event:
        """Event of one round, from the plan."""
        return self.plan.event()

    @property
    def adapts(self) -> bool:
        """Whether a round's bound depends on earlier releases."""
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
        """A world's clients, by default with rows longer than every bound; see `World.trainer`."""
        return world.trainer(
            self.population,
            self.layout.d,
            clipped_scale(self.mechanism, self.layout) if scale is None else scale,
            present=present,
            neighbour=neighbour or self.adjacency,
            sides=self.sides,
        )


@dataclass(frozen=True)
class Observation:
    """What an observer sees of one run.

    Attributes
    ----------
    moves : float64 ``[rounds, d]``
        Change of the parameters in each round; zero for a round that was not released.
    statistics : sequence of mapping of name to float
        Numbers that the mechanism shows after each round.
    sampled : sequence of int64 arrays
        Ints of the clients sampled in each round, in the order of their answers; empty if the
        cohort is not visible.
    entries : tuple of Entry
        The ledger's lines.
    charged : int ``[rounds]``
        Number of lines at the time when each round's parameters became visible.
    states, clip_norms : sequences of State and of float
        The mechanism's state before each round, and its C.
    ended : str
        Why the run did not make all its rounds; empty if it did.
    error : Exception or None
        The exception that ended it, if any.
    delta : float
    outputs : sequence of mapping of name to float64 ``[n]``
        If requested, all other outputs of each round: metrics, information about the release,
        state, and what clients are sent.
    """

    moves: Floats
    statistics: Sequence[Mapping[str, float]]
    sampled: Sequence[Ints]
    entries: tuple[Entry, ...]
    charged: Sequence[int]
    states: Sequence[State]
    clip_norms: Sequence[float]
    ended: str
    error: Exception | None
    delta: float
    outputs: Sequence[Mapping[str, Floats]] = ()

    @property
    def released(self) -> int:
        """Rounds in which the parameters moved."""
        return int((self.moves != 0).any(1).sum())

    @property
    def sizes(self) -> Floats:
        """Number of clients sampled in each round, ``[rounds]``."""
        return np.array([len(ids) for ids in self.sampled], dtype=np.float64)

    def table(self) -> Floats:
        """Moves and statistics in one table: float64 ``[rounds, d + k]``."""
        width = max((len(round_statistics) for round_statistics in self.statistics), default=0)
        numbers = np.zeros((len(self.moves), width))
        for row, round_statistics in zip(numbers, self.statistics, strict=False):
            row[: len(round_statistics)] = list(round_statistics.values())
        return np.concatenate([self.moves, numbers], axis=1)


@dataclass(frozen=True)
class StrategyTarget(Target):
    """A strategy as a target, run on this machine's engine.

    Attributes
    ----------
    strategy : callable
        Makes a fresh strategy from a seed, which must determine its cohorts and noise; None
        stands for the system's entropy.
    """

    row: ClassVar[str] = "client"

    strategy: StrategyFactory

    @cached_property
    def template(self) -> DPFedAvg:
        """A strategy that is only inspected, never run."""
        return self.strategy(1)

    @property
    def plan(self) -> ReleasePlan[Any]:
        """The strategy's plan."""
        return self.template.plan

    @property
    def delta(self) -> float:
        """The strategy's delta."""
        return self.template.delta

    @property
    def shares(self) -> bool:
        """Whether the strategy lets clients add the noise."""
        return self.template.plan.placement.at_clients

    def observe(
        self,
        clients: SyntheticClients,
        seed: int | None,
        *,
        grid: LocalGrid | None = None,
        timeout: float = 3600,
        outputs: bool = False,
        resume_after: int = 0,
    ) -> Observation:
        """Run once.

        Parameters
        ----------
        grid : LocalGrid, optional
            Grid for the strategy; by default a `LocalGrid` of the clients.
        timeout : float
            Seconds that the strategy waits for a round.
        outputs : bool
            Whether to record all outputs of a round.
        resume_after : int
            Stop after this number of rounds and resume with a new strategy; 0 for no stop.
        """
        strategy, layout = self.strategy(seed), self.layout
        vector = layout.flatten(self.start)
        moves = np.zeros((self.rounds, layout.d))
        statistics: list[Mapping[str, float]] = []
        charged: list[int] = []
        states: list[State] = [strategy.plan.mechanism.init(layout)]
        numbers: list[Mapping[str, Floats]] = []
        recording = _RecordingGrid(clients, strategy.run) if outputs else None
        grid = grid or recording or LocalGrid(clients)

        def record_round(server_round: int, result: Result) -> None:
            nonlocal vector
            reached = layout.flatten(tensors(result.arrays))
            moves[server_round - 1] = (reached - vector).numpy()
            vector = reached
            statistics.append({} if strategy.report is None else dict(strategy.report.info))
            charged.append(len(strategy.ledger.entries))
            states.append({n: tensor.clone() for n, tensor in strategy.mechanism_state.items()})
            if recording is not None:
                numbers.append(_outputs(strategy, server_round, result, recording.sent))

        clients.answered.clear()
        error, arrays, state = None, array_record(self.start), None
        try:
            if resume_after:
                arrays = strategy.start(grid, arrays, resume_after, on_round=record_round).arrays
                state, strategy = strategy.state(), self.strategy(seed)
            strategy.start(
                grid, arrays, self.rounds, timeout=timeout, state=state, on_round=record_round
            )
        except Exception as raised:  # an observer sees a failure too
            error = raised
        nobody = [np.empty(0, dtype=np.int64)]
        return Observation(
            moves=moves,
            statistics=statistics,
            sampled=[
                np.concatenate(clients.answered.get(t, nobody)) for t in range(1, self.rounds + 1)
            ],
            entries=tuple(strategy.ledger.entries),
            charged=charged,
            states=states[:-1] or states,
            clip_norms=[strategy.plan.mechanism.sensitivity(before, layout) for before in states],
            ended=strategy.stopped or "" if error is None else f"{type(error).__name__}: {error}",
            error=error,
            delta=strategy.delta,
            outputs=numbers,
        )


class _RecordingGrid(LocalGrid):
    """Records what a strategy sends to all clients in addition to the parameters.

    It leaves out the run's random name, which differs from run to run but tells nothing of data.
    """

    def __init__(self, trainer: SyntheticClients, run: str) -> None:
        super().__init__(trainer)
        self._name = (RUN, run)
        self.sent: Mapping[str, Floats] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Record the messages' shared part, and return the replies."""
        if isinstance(messages, Instructions):
            config = dict(item for item in messages.config.items() if item != self._name)
            self.sent = dict(_numbers("", {**config, **messages.records}))
        return super().send_and_receive(messages, timeout=timeout)


def _outputs(
    strategy: DPFedAvg, server_round: int, result: Result, sent: Mapping[str, Floats]
) -> dict[str, Floats]:
    """All numbers that an observer may see after a round, without the parameters.

    Left out are the ledger, which has its own checks; the number of failures, which a statement
    declares to be the operator's; and the secret state of cohort and noise.
    """
    report = strategy.report
    others = ("ledger", "failures", "round", "stopped", "cohort", "noise")
    outputs = {
        "metrics": dict(result.train_metrics_clientapp.get(server_round, {})),
        "evaluation": dict(result.evaluate_metrics_clientapp.get(server_round, {})),
        "info": {} if report is None else report.info,
        "update-norm": None if report is None else report.update_norm,
        "state": {k: v for k, v in strategy.state().items() if k not in others}
        | {"mechanism": strategy.mechanism_state},
        "sent": sent,
    }
    return dict(_numbers("", outputs))


def _numbers(prefix: str, tree: object) -> Iterator[tuple[str, Floats]]:
    """Yield all numbers of nested mappings and arrays by path; other values as a checksum."""
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
