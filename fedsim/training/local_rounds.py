"""Rounds of local training, one block of clients at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.array_types import Floats, Ints
from fedsim.clients.base import PERSONAL_MASK
from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.mechanisms import Releaser
from fedsim.privacy import Entropy
from fedsim.randomness import Randomness
from fedsim.training.batches import (
    DRAWN_TOGETHER,
    Batches,
    Workload,
    batch_width,
    draw_groups,
    plan_batches,
)
from fedsim.training.client_state import CarriedState, PersistentState
from fedsim.training.example_privacy import ExamplePrivacy, ExampleReleases
from fedsim.training.paths.dropout import DropoutPath
from fedsim.training.paths.path_choice import TrainedModel
from fedsim.training.payload import PERSONAL, Payload, ReceivedVectors
from fedsim.training.plain_steps import plain_loop
from fedsim.training.private_steps import (
    PrivateLoop,
    PrivateStepper,
    draws_on_device,
    max_chunk,
)
from fedsim.training.probe import Probe, gradient_methods
from fedsim.training.steps import RoundClients, StepLoop, StepLoopResult, Stepper

_MANY_EXAMPLES = 2**31
"""Examples of a client that is larger than any real one."""


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
    privacy : ExamplePrivacy or None
        Example-level privacy, if clients have it.
    entropy : "config" or "system"
        Source of their noise.
    private : PrivateStepper or None
        Makes their steps, if they have example-level privacy.
    releases : ExampleReleases or None
        Records clients' releases; None without example-level privacy, or where another trainer has
        recorded them.
    server_numbers : mapping of str to float
        Values of the algorithm's numeric settings that the server sent, replacing its own.
    """

    trained: TrainedModel
    stepper: Stepper
    client_state: PersistentState
    payload: Payload
    workload: Workload
    privacy: ExamplePrivacy | None
    entropy: Entropy = "system"
    private: PrivateStepper | None = field(default=None, init=False)
    releases: ExampleReleases | None = field(default=None, init=False)
    server_numbers: Mapping[str, float] = field(default_factory=dict, init=False)
    _started_rounds: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        trained = self.trained
        if self.privacy is not None:
            path = self.stepper.path if isinstance(self.stepper.path, DropoutPath) else None
            method = Probe(trained).fastest(gradient_methods(trained, path))
            work, stepper = self.workload.work, self.stepper
            # Refuses a mechanism and noise with which every client would fail. No client's size
            # decides this, since it may be protected: clients with less than a batch fail alone.
            plan = self.privacy.plan(work, work.batch_size or _MANY_EXAMPLES)
            assert plan is not None
            layout, device = stepper.packing.layout, stepper.device
            releaser = Releaser([plan], layout, device=device, exact=False)
            in_step = draws_on_device(device, self.entropy)
            self.private = PrivateStepper(
                stepper, method, releaser, self.privacy.hardened, draws_in_step=in_step
            )
            self.releases = ExampleReleases(
                self.privacy, stepper.data, work, entropy=self.entropy, rows=method.evidence
            )
        # Here for all modules: to visit them for each block would take longer than a small step.
        set_training(trained.model)

    @property
    def reports_loss(self) -> bool:
        """Whether clients report their un-noised training loss."""
        return self.privacy is None or self.privacy.unprotected_metrics

    @property
    def draws_one_by_one(self) -> bool:
        """Whether the model draws from torch's generator, which serves one client at a time."""
        by_client = isinstance(self.stepper.path, DropoutPath)
        return self.trained.draws.training and not by_client

    @property
    def largest_width(self) -> int:
        """Batch width of a client that has more examples than a batch."""
        return self._width(_MANY_EXAMPLES)

    def blocks(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness], size: int
    ) -> Iterator[tuple[Ints, RoundClients]]:
        """Yield blocks of at most ``size`` clients, ready to start a round, with their positions.

        A block's clients have one batch width, and most steps come first; those without data are
        in blocks of their own. Each client has its own ``randomness``.
        """
        sizes = [self.stepper.data.size(client) for client in client_ids.tolist()]
        widths, steps = np.array([*map(self._width, sizes)]), self.workload.steps(client_ids)
        # With example-level privacy a block draws alone, after its clients' ledger lines.
        max_clients = DRAWN_TOGETHER if self.privacy is None else 0
        for group in draw_groups(widths, steps, size, max_clients):
            ids = client_ids[group]
            # Clients that have started the round repeat their draws.
            sources = [
                randomness[i].for_replay()
                if self._started_rounds.get(client) == round
                else randomness[i]
                for i, client in zip(group, ids.tolist(), strict=True)
            ]
            batches = None
            if self.privacy is None and widths[group[0]]:
                self._started_rounds.update(dict.fromkeys(ids.tolist(), round))
                batches = self._draw(ids, round, sources)
            for first in range(0, len(ids), size):
                block = slice(first, first + size)
                carried = self.client_state.store.load(ids[block], round)
                own_batches = None if batches is None else batches.select(block)
                yield (
                    group[block],
                    RoundClients(ids[block], round, sources[block], carried, own_batches),
                )

    def _width(self, size: int) -> int:
        """Batch width of a client with ``size`` examples; 0 without any."""
        work, privacy = self.workload.work, self.privacy
        if privacy is None or not size:
            return batch_width(work.batch_size, size) if size else 0
        return privacy.width(work, size, max_chunk(self.stepper))

    @torch.no_grad()
    def fit(
        self,
        vectors: Tensor,
        client_ids: Ints,
        round: int,
        randomness: Sequence[Randomness],
        numbers: Mapping[str, Sequence[float]],
    ) -> LocalResult:
        """Train ``n`` clients from ``vectors [1 or n, d]``, in blocks of any size."""
        n = len(client_ids)
        theta = vectors.new_empty(n, self.payload.layout.d)
        metrics: dict[str, Floats] = {}
        final_states = []
        for positions, clients in self.blocks(client_ids, round, randomness, n):
            own_vectors = vectors if len(vectors) == 1 else vectors[positions]
            own_numbers = {name: [column[i] for i in positions] for name, column in numbers.items()}
            result = self.fit_block(self.payload.received(own_vectors), clients, own_numbers)
            theta[positions] = self.payload.replies(result.theta, result.sent, own_vectors)
            for name, values in result.metrics.items():
                metrics.setdefault(name, np.zeros(n))[positions] = values
            final_states.append((result.carried, clients))
        for carried, clients in final_states:
            self.finish(carried, clients)
        return LocalResult(theta, metrics)

    @torch.no_grad()
    def fit_block(
        self,
        received: ReceivedVectors,
        clients: RoundClients,
        numbers: Mapping[str, Sequence[float]],
    ) -> BlockResult:
        """Train a block; its clients' stored state does not change before `finish`."""
        n = len(clients)
        values = self._numbers(numbers, n)
        start = self.client_state.start_parameters(received.parameters, clients.carried)
        self._begin_round(clients)
        # Each client gets its own copies, since an algorithm may change them in place.
        named = {k: v.expand(n, -1).clone() for k, v in received.named.items()}
        if (
            self.stepper.algorithm.separates_personal
        ):  # it treats the personal parameters differently
            named[PERSONAL_MASK] = self.client_state.personal.mask.expand(n, -1)
        if not self.trained.model.training:
            set_training(self.trained.model)
        metrics = self._metrics(clients)
        if not metrics["num-examples"].any():
            sent = {k: torch.zeros_like(named[k]) for k in self.stepper.algorithm.sends}
            carried = CarriedState(np.zeros(n, dtype=np.bool_), {})
            return BlockResult(start.clone(), sent, carried, metrics)
        loop = self._loop(clients)
        steps = loop.run(
            start,
            {k: torch.from_numpy(v).to(start) for k, v in values.items()} | named,
            clients.carried,
        )
        if personal := self.client_state.personal:
            steps.carried[PERSONAL] = steps.theta[:, personal.positions]
        if self.reports_loss:
            metrics["loss"] = loop.mean_losses()
        metrics |= _to_numpy(steps.reports)
        return BlockResult(steps.theta, steps.sent, _final_state(steps), metrics)

    def finish(self, carried: CarriedState, clients: RoundClients) -> None:
        """Store the state that clients keep: the last thing that happens in a block's round."""
        self.client_state.store.save(carried.to_client_states(clients.client_ids), clients.round)
        for client in clients.client_ids.tolist():
            self._started_rounds.pop(client, None)

    def _draw(self, client_ids: Ints, round: int, randomness: Sequence[Randomness]) -> Batches:
        """Draw these clients' batches.

        Raises
        ------
        FedsimError
            Without example-level privacy, if a client has an example with an invalid label or
            token.
        """
        data, counts = self.stepper.data, self.workload.counts
        indices = [data.indices[i] for i in client_ids]
        inputs = (self.workload.work, indices, client_ids, randomness, round)
        if self.privacy is not None:
            return self.privacy.batches(*inputs, max_chunk(self.stepper))
        data.require_usable(client_ids.tolist())
        return plan_batches(*inputs, None if counts is None else counts[client_ids])

    def _loop(self, clients: RoundClients) -> StepLoop:
        """The loop over a block's batches, ready to run."""
        seeds = clients.seeds if self.trained.draws.training else None
        batches = clients.batches
        if batches is None:
            batches = self._draw(clients.client_ids, clients.round, clients.randomness)
        if self.privacy is None or self.private is None:
            return plain_loop(self.stepper, batches, clients.round, seeds)
        return PrivateLoop(
            self.private,
            self.privacy,
            self.workload.work,
            batches,
            clients,
            seeds,
            keeps_state=self.client_state.kind == "client",
        )

    def _begin_round(self, clients: RoundClients) -> None:
        """Charge each client for the round, unless it has started the same round before.

        Raises
        ------
        BudgetSpentError
            If a client's budget does not allow it.
        """
        ids, number = clients.client_ids.tolist(), clients.round
        if self.releases is not None:
            beginning = [client for client in ids if self._started_rounds.get(client) != number]
            for reason in self.releases.charge(number, beginning).values():
                raise BudgetSpentError(f"{reason}.")
            self.releases.charge(number, beginning, begins=True)
        self._started_rounds.update(dict.fromkeys(ids, number))

    def _numbers(self, columns: Mapping[str, Sequence[float]], n: int) -> dict[str, Floats]:
        """Values ``[n]`` of each numeric setting of the algorithm, for ``n`` clients.

        Raises
        ------
        FedsimError
            If the algorithm has no such number.
        """
        numbers = {**self.stepper.algorithm.numbers(), **self.server_numbers}
        values: dict[str, Floats] = {k: np.full(n, float(value)) for k, value in numbers.items()}
        for name, column in columns.items():
            if name not in values:
                raise FedsimError(
                    f"'{name}' cannot differ between clients of one block; allowed: "
                    f"{', '.join(values) or 'nothing'}."
                )
            values[name] = np.asarray(column, dtype=np.float64)
        return values

    def _metrics(self, clients: RoundClients) -> dict[str, Floats]:
        """Metrics of a block's clients before they have trained."""
        sizes = [self.stepper.data.size(client) for client in clients.client_ids.tolist()]
        metrics = {"num-examples": np.array(sizes, dtype=np.float64)}
        if self.reports_loss:
            metrics["loss"] = np.zeros(len(clients))
        if self.client_state.kind != "reset":
            metrics["fresh-state"] = (~clients.carried.present).astype(np.float64)
        return metrics


def set_training(model: nn.Module) -> None:
    """Set training mode in all of a model's modules, or, if that is interrupted, not in itself."""
    try:
        model.train()
    except BaseException:
        model.training = False  # so that it is done again: the model's own mode is looked at
        raise


@dataclass(frozen=True)
class BlockResult:
    """Result of a block's local round.

    Attributes
    ----------
    theta : Tensor ``[n, D]``
        Packed parameters, in memory of their own; without data, those at the start.
    sent : mapping of name to Tensor ``[n, D]`` or ``[n, 1]``
        Named vectors to send; zeros without data.
    carried : CarriedState
        State to keep: of clients that end with finite numbers, since others keep their old state.
    metrics : dict of str to float64 ``[n]``
        Clients without data report none of the algorithm's.
    """

    theta: Tensor
    sent: dict[str, Tensor]
    carried: CarriedState
    metrics: dict[str, Floats]


def _to_numpy(reports: Mapping[str, Tensor]) -> dict[str, Floats]:
    return {name: values.double().cpu().numpy().copy() for name, values in reports.items()}


def _final_state(result: StepLoopResult) -> CarriedState:
    """The state that clients keep at the end of a round."""
    carried = {name: _in_own_memory(rows, result.theta) for name, rows in result.carried.items()}
    finite = torch.ones(len(result.theta), dtype=torch.bool, device=result.theta.device)
    for rows in (result.theta, *carried.values()) if carried else ():
        finite &= torch.isfinite(rows.reshape(len(rows), -1)).all(1).to(finite.device)
    return CarriedState(finite.cpu().numpy(), carried)


def _in_own_memory(rows: Tensor, theta: Tensor) -> Tensor:
    """These rows, copied if they share memory with ``theta``, which changes before `finish`."""
    shares_memory = rows.untyped_storage().data_ptr() == theta.untyped_storage().data_ptr()
    return rows.clone() if shares_memory else rows
