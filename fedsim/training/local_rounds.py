"""Rounds of local training, one block of clients at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.base import PERSONAL_MASK, LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.randomness import Randomness
from fedsim.rows.block import CLIENT_STATE
from fedsim.training.batches import Batches, Floats, Ints, Workload
from fedsim.training.client_state import CarriedState, PersistentState
from fedsim.training.example_privacy import ExamplePrivacy, ExampleReleases
from fedsim.training.paths.choice import TrainedModel
from fedsim.training.payload import LEFT_OUT, Compression, Payload, ReceivedVectors
from fedsim.training.plain_steps import PlainStepFactory
from fedsim.training.private_steps import PrivateStepFactory
from fedsim.training.probe import Probe, gradient_methods
from fedsim.training.steps import EndState, RoundClients, RoundStart, Stepper


@dataclass(frozen=True)
class LocalResult:
    """Result of a local round of ``n`` clients.

    Attributes
    ----------
    theta : Tensor ``[n, d]``
        Their parameters ``w_client``.
    metrics : dict of str to float64 ``[n]``
    """

    theta: Tensor
    metrics: dict[str, Floats]


@dataclass
class LocalRounds:
    """Runs a block's local round, in a fixed order.

    A client's ledger line is on disk before anything of the round is drawn, and the state that it
    keeps changes last, once its block is done: a block that raised can be trained again. Until then
    its clients have started the round but not ended it (``_started_rounds``: client to round). They
    have released nothing, so that a second attempt repeats the same draws and is not charged again.

    Attributes
    ----------
    trained : TrainedModel
    stepper : Stepper
    client_state : PersistentState
    payload : Payload
    workload : Workload
    compression : Compression or None
        Compression of what clients send.
    privacy : ExamplePrivacy or None
        Example-level privacy, if clients have it.
    factory : PlainStepFactory or PrivateStepFactory
        Makes their batches and steps.
    releases : ExampleReleases or None
        Records clients' releases in their ledgers; None without example-level privacy, or where
        another trainer has recorded them.
    server_numbers : mapping of str to float
        Values of the algorithm's numeric settings that the server sent, replacing its own.
    """

    trained: TrainedModel
    stepper: Stepper
    client_state: PersistentState
    payload: Payload
    workload: Workload
    compression: Compression | None
    privacy: ExamplePrivacy | None
    factory: PlainStepFactory | PrivateStepFactory = field(init=False)
    releases: ExampleReleases | None = field(default=None, init=False)
    server_numbers: Mapping[str, float] = field(default_factory=dict, init=False)
    _started_rounds: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        trained, stepper, workload = self.trained, self.stepper, self.workload
        draws = trained.draws.training
        if self.privacy is None:
            self.factory = PlainStepFactory(stepper, workload, draws)
        else:
            method = Probe(trained).fastest(gradient_methods(trained))
            keeps_state = self.client_state.kind == "client"
            self.factory = PrivateStepFactory(
                stepper, workload, self.privacy, method, draws, keeps_state=keeps_state
            )
            self.releases = ExampleReleases(self.privacy, trained, stepper, workload.work, method)
        # Here for all modules: to visit them for each block would take longer than a small step.
        trained.model.train()

    def blocks(
        self, client_ids: Ints, round: int, randomness: Randomness, size: int
    ) -> Iterator[RoundClients]:
        """Yield these clients in blocks of ``size``, ready to start a round.

        Small blocks draw their batches ahead, many blocks at once: their clients have then started
        the round.
        """
        first = 0
        while first < len(client_ids):
            ahead = self.factory.prefetched(client_ids[first:], size)
            ids = client_ids[first : first + (ahead or size)]
            sources = self._sources(ids, round, [randomness] * len(ids))
            group_batches = None
            if ahead:
                self._mark_started(ids, round)
                group_batches = list(self.factory.batches(ids, round, sources))
            for start in range(0, len(ids), size):
                block = slice(start, min(start + size, len(ids)))
                carried = self.client_state.store.load(ids[block], round)
                batches = None
                if group_batches is not None:
                    parts = (group.within(block.start, block.stop) for group in group_batches)
                    batches = [part for part in parts if len(part.members)]
                yield RoundClients(ids[block], round, sources[block], carried, batches)
            first += len(ids)

    def one_block(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> RoundClients:
        """These clients as one block, ready to start a round, each with its own randomness."""
        carried = self.client_state.store.load(client_ids, round)
        sources = self._sources(client_ids, round, randomness)
        return RoundClients(client_ids, round, sources, carried)

    def _sources(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> list[Randomness]:
        """Sources of clients' draws; clients that have started the round repeat theirs."""
        return [
            source.repeated() if self._started_rounds.get(client) == round else source
            for client, source in zip(client_ids.tolist(), randomness, strict=True)
        ]

    def _mark_started(self, client_ids: Ints, round: int) -> None:
        self._started_rounds.update(dict.fromkeys(client_ids.tolist(), round))

    def starts(self, vectors: Tensor, clients: RoundClients) -> Iterator[RoundStart]:
        """Inputs of each client's round, given the received ``vectors [1 or n, d]``."""
        start = self.client_state.start(self.payload.received(vectors).parameters, clients.carried)
        return clients.starts(start, self._numbers({}, len(clients)))

    @torch.no_grad()
    def fit(
        self,
        received: ReceivedVectors,
        clients: RoundClients,
        numbers: Mapping[str, Sequence[float]],
    ) -> BlockResult:
        """Train from what was ``received``; clients' stored state does not change before `finish`.

        The parameters of the result are in memory of their own.
        """
        n = len(clients)
        values = self._numbers(numbers, n)
        start = self.client_state.start(received.parameters, clients.carried)
        self._start(clients, start, values)
        named = {k: v.expand(n, -1) for k, v in received.named.items()}
        unsent = {k: torch.zeros_like(named[k]) for k in self.algorithm.sends}
        result = BlockResult(start, self._metrics(clients), unsent)
        if not self.trained.model.training:
            self.trained.model.train()
        for batches in self._batches(clients):
            members = batches.members
            positions = torch.from_numpy(members).to(start.device)
            is_whole_block = np.array_equal(members, np.arange(n))
            group = clients if is_whole_block else clients.at(members)
            steps = self.factory.steps(batches, group)
            # One start for all stays one expanded row, which steps copy when they write to rows.
            shared = is_whole_block or start.stride(0) == 0
            end = steps.run(
                start[: len(members)] if shared else start[positions],
                {k: torch.from_numpy(v[members]).to(start) for k, v in values.items()}
                | {k: v[positions] for k, v in named.items()}
                | self._mask(len(members)),
                group.carried,
            )
            if self.compression is not None:
                # Modulo: there is one row for all clients, or one for each.
                vectors = received.vectors[positions % len(received.vectors)]
                end = self._compressed(self.compression, end, vectors, group.carried)
            end.carried.update(self.client_state.personal.of_rows(end.theta))
            losses = steps.mean_losses() if self.factory.reports_loss else None
            result.add(members, end, losses, report_state=self.client_state.kind == "server")
        if not result.carried:  # no client has data: the result is still the start's own memory
            result.theta = start.clone()
        return result

    def finish(self, result: BlockResult, clients: RoundClients) -> None:
        """Store the state that clients keep: the last thing that happens in a block's round."""
        for members, carried in result.carried:
            self.client_state.store.store(clients.client_ids[members], clients.round, carried)
        for client in clients.client_ids.tolist():
            self._started_rounds.pop(client, None)

    def _batches(self, clients: RoundClients) -> Iterable[Batches]:
        if clients.drawn is not None:
            return clients.drawn
        return self.factory.batches(clients.client_ids, clients.round, clients.randomness)

    def _start(self, clients: RoundClients, start: Tensor, numbers: Mapping[str, Floats]) -> None:
        """Charge each client for the round, unless it has started the same round before."""
        if self.releases is not None:
            for client in clients.starts(start, numbers):
                if self._started_rounds.get(client.client) != clients.round:
                    self.releases.record(clients.round, [client])
                    self._started_rounds[client.client] = clients.round
        self._mark_started(clients.client_ids, clients.round)

    def _numbers(self, columns: Mapping[str, Sequence[float]], n: int) -> dict[str, Floats]:
        """Values ``[n]`` of each numeric setting of the algorithm, for ``n`` clients.

        Raises
        ------
        FedsimError
            If the algorithm has no such number.
        """
        numbers = {**self.algorithm.numbers(), **self.server_numbers}
        values: dict[str, Floats] = {k: np.full(n, float(value)) for k, value in numbers.items()}
        for name, column in columns.items():
            if name not in values:
                raise FedsimError(
                    f"'{name}' cannot differ between clients of one block; allowed: "
                    f"{', '.join(values) or 'nothing'}."
                )
            values[name] = np.asarray(column, dtype=np.float64)
        return values

    @property
    def algorithm(self) -> LocalAlgorithm:
        """The clients' algorithm."""
        return self.stepper.algorithm

    def _metrics(self, clients: RoundClients) -> dict[str, Floats]:
        sizes = [self.stepper.data.size(i) for i in clients.client_ids.tolist()]
        metrics = {"num-examples": np.array(sizes, dtype=np.float64)}
        if self.factory.reports_loss:
            metrics["loss"] = np.zeros(len(clients))
        if self.client_state.kind != "reset":
            metrics["fresh-state"] = (~clients.carried.present).astype(np.float64)
        return metrics

    def _mask(self, n: int) -> dict[str, Tensor]:
        """Mask of the personal parameters, for an algorithm that treats them differently."""
        if not self.algorithm.parts:
            return {}
        return {PERSONAL_MASK: self.client_state.personal.mask.expand(n, -1)}

    def _compressed(
        self, compression: Compression, end: EndState, vectors: Tensor, carried: CarriedState
    ) -> EndState:
        """Compress the updates from ``vectors [n, d]``, and keep the part that is not sent."""
        shared = self.payload.shared
        target = shared.unpack(end.theta) - vectors
        if LEFT_OUT in carried.rows:
            present = torch.from_numpy(carried.present).to(target.device)[:, None]
            target = torch.where(present, target + carried.rows[LEFT_OUT].to(target), target)
        rows = vectors + compression(target)
        # Relative to the update as the server sees it: adding the parameters has rounded it.
        left_out = target - (rows - vectors)
        return replace(end, theta=shared.pack(rows), carried={**end.carried, LEFT_OUT: left_out})


@dataclass
class BlockResult:
    """Result of a block's local round, put together from groups with one batch width each.

    Attributes
    ----------
    theta : Tensor ``[n, D]``
        Packed parameters; those of clients without data stay at the start.
    metrics : dict of str to float64 ``[n]``
    vectors : mapping of name to Tensor ``[n, D]`` or ``[n, 1]``
        Named vectors to send; zeros for clients without data.
    carried : list of (positions, state)
        State to keep, with the positions of the clients that keep it.
    """

    theta: Tensor
    metrics: dict[str, Floats]
    vectors: dict[str, Tensor]
    carried: list[tuple[Ints, dict[str, Tensor]]] = field(default_factory=list)

    def add(
        self, members: Ints, end: EndState, losses: Floats | None, *, report_state: bool
    ) -> None:
        """Add the results of the clients at these positions.

        With ``report_state`` they also report the state to keep, which is one number per entry.
        """
        n = len(self.theta)
        if np.array_equal(members, np.arange(n)):
            self.theta = end.theta
        else:
            if not self.carried:
                self.theta = self.theta.clone()  # it may be one expanded row
            self.theta[torch.from_numpy(members).to(self.theta.device)] = end.theta
        self.carried.append(_finite_state(members, end))
        for name, rows in end.sent.items():
            self.vectors[name][torch.from_numpy(members).to(rows.device)] = rows
        if losses is not None:
            self.metrics["loss"][members] = losses
        for name, report in end.reports.items():
            self._column(name, 0.0)[members] = report.double().cpu().numpy()
        if report_state:
            for name, rows in end.carried.items():
                # NaN by default: a client without data must not enter the server's mean.
                column = self._column(f"{CLIENT_STATE}.{name}", np.nan)
                column[members] = rows.double().cpu().numpy()

    def _column(self, name: str, default: float) -> Floats:
        return self.metrics.setdefault(name, np.full(len(self.theta), default))


def _finite_state(members: Ints, end: EndState) -> tuple[Ints, dict[str, Tensor]]:
    """Positions and state of clients that end with finite numbers; others keep their old state."""
    if not end.carried:
        return members, {}
    carried = {name: _own_memory(rows, end.theta) for name, rows in end.carried.items()}
    finite = torch.ones(len(members), dtype=torch.bool, device=end.theta.device)
    for rows in (end.theta, *carried.values()):
        finite &= torch.isfinite(rows.reshape(len(rows), -1)).all(1).to(finite.device)
    if bool(finite.all()):
        return members, carried
    carried = {name: rows[finite.to(rows.device)] for name, rows in carried.items()}
    return members[finite.cpu().numpy()], carried


def _own_memory(rows: Tensor, theta: Tensor) -> Tensor:
    """These rows, copied if they share memory with ``theta``, which changes before `finish`."""
    shares_memory = rows.untyped_storage().data_ptr() == theta.untyped_storage().data_ptr()
    return rows.clone() if shares_memory else rows
