"""The cohort trainer: local work of many clients at once, with a leading client axis."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.arguments import check_arguments
from fedsim.clients.base import LocalAlgorithm
from fedsim.clients.proximal import server_numbers
from fedsim.errors import FedsimError, users_traceback_alone
from fedsim.privacy import ClientLedgers
from fedsim.privacy.local_work import LocalWork
from fedsim.randomness import Randomness
from fedsim.rows.block import RUN, Block, ClientStates
from fedsim.rows.layout import Layout
from fedsim.tasks import Accuracy, MeanOf, Metric
from fedsim.tasks.losses import CrossEntropy, Loss
from fedsim.training import checks
from fedsim.training.batches import Floats, Ints, Workload
from fedsim.training.client_state import PersistentState, StateKind
from fedsim.training.data import ClientData
from fedsim.training.evaluation import Evaluation
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.graphs import captured_steps
from fedsim.training.local_rounds import LocalResult, LocalRounds
from fedsim.training.paths.choice import (
    KernelName,
    Path,
    PathName,
    TrainedModel,
    choose,
    kernel_of,
    most_clients,
)
from fedsim.training.payload import Compression, Payload, Personal
from fedsim.training.steps import RoundClients, RoundStart, Stepper


class Trainer:
    """Clients with their data and their algorithm, trained block by block.

    Parameters
    ----------
    model : nn.Module
        Its trainable floating-point parameters make up a row; the rest stays as it is here.
    algorithm : LocalAlgorithm
    data : ClientData
    batch_size : int
        Examples a step, or all that a client has where these are fewer; 0 takes all.
    epochs : int or None
        Passes over the client's own data, each freshly shuffled (1 if steps is not given).
    steps : int or None
        Gradient evaluations instead of passes, the same for every client.
    counts : sequence of int, optional
        Each client's own number of passes or steps; refused beside example-level privacy, where
        it is one declared number.
    loss : callable ``(outputs [B, ...], targets [B, ...]) -> [B]``, optional
        One loss for each example; cross-entropy, if it is not given.
    metrics : mapping of name to Metric, or to a callable ``(outputs, targets) -> [B]``
        What an evaluation reports besides the loss (accuracy); of a callable's numbers the mean.
    test : ClientData, optional
        Examples on which clients evaluate, each its own; those they train on, if it is not given.
    path : "auto", "layered", "func" or "plain"
    kernel : "auto", "eager" or "compiled"
        What the layered path computes with: they agree up to rounding.
    block_size : int
        Most clients at a time; 0 leaves it to the rule. Only on a GPU do last bits depend on it,
        and is a step computed for as many clients: about a cohort's is best there.
    randomness : Randomness
        With example-level privacy and without a release digest it takes one of the settings given
        here, so that two trainers of one seed share no noise.
    device : torch.device or str
    privacy : ExamplePrivacy, optional
        Example-level privacy.
    max_grad_norm : float
        A batch's gradient that is longer is shortened to this L2 norm; 0 for any length. This is
        no privacy, and is refused beside example-level privacy.
    compression : Compression, optional
        Of updates; each client keeps what it leaves out (``state`` must be "client").
    state : "reset", "client" or "server"
        The algorithm's state (ADADP's rate, a momentum) between rounds: it starts afresh, each
        client keeps its own, or all start from the mean of what the last round's clients ended
        with, which they report and the server sends (`receive`).
    state_dir : path, optional
        Keep it in files there, for runtimes whose processes do not outlive a round.
    personal : collection of str
        Names of parameters that are trained but not sent: each client keeps and evaluates its own.

    Notes
    -----
    A client without data sends a zero update and ``num-examples`` 0. Every row is
    ``w_client - w_global``, both in the model's dtype, on every engine. What a model draws by
    itself (dropout) comes from the client's own stream. With example-level privacy the model and
    the loss are tried on made-up examples first, and refused if they mix them.

    Raises
    ------
    FedsimError
        If a setting is out of range or the model cannot be trained this way.
    """

    @users_traceback_alone
    @check_arguments
    def __init__(
        self,
        model: nn.Module,
        algorithm: LocalAlgorithm,
        data: ClientData,
        *,
        batch_size: int = 10,
        epochs: int | None = None,
        steps: int | None = None,
        counts: Sequence[int] | Ints | None = None,
        loss: Loss | None = None,
        metrics: Mapping[str, Metric | Loss] | None = None,
        test: ClientData | None = None,
        path: PathName = "auto",
        kernel: KernelName = "auto",
        block_size: int = 0,
        randomness: Randomness,
        device: torch.device | str = "cpu",
        privacy: ExamplePrivacy | None = None,
        max_grad_norm: float = 0.0,
        compression: Compression | None = None,
        state: StateKind = "reset",
        state_dir: FilePath | None = None,
        personal: Collection[str] = (),
    ) -> None:
        self.device = checks.device_of(device)
        self.model = model.to(self.device)
        private = privacy is not None
        checks.check_model(self.model, private=private)
        self.algorithm = algorithm
        self.data = data.to(self.device)
        self.test = test
        checks.check_settings(algorithm, data, test, counts, max_grad_norm, private=private)
        self.workload = Workload.of(LocalWork(batch_size, epochs, steps), self.data, counts)
        self.loss: Loss = CrossEntropy() if loss is None else loss
        metrics = {"accuracy": Accuracy()} if metrics is None else metrics
        self.metrics: dict[str, Metric] = {
            k: m if isinstance(m, Metric) else MeanOf(m) for k, m in metrics.items()
        }
        if privacy is not None and randomness.release is None:
            randomness = privacy.keyed(randomness, algorithm, self.workload.work, self.loss)
        self.randomness = randomness
        self.privacy = privacy
        self.max_grad_norm = max_grad_norm
        self.compression = compression
        self.personal = Personal.of(self.model, personal)
        own = self.personal.names
        checks.check_algorithm(algorithm, state, compression, personal=bool(own))
        self.client_state = PersistentState(
            state, algorithm, self.personal, data.population, state_dir
        )
        self.packing = self.personal.packing
        self.layout = self.personal.shared.layout
        self.payload = Payload.of(self.personal.shared, algorithm)
        statistics = checks.check_statistics(self.model, algorithm, own, private=private)
        self.kernel = kernel_of(kernel, self.device)
        self.trained = TrainedModel.of(
            self.model,
            self.packing,
            self.loss,
            self.data,
            self.kernel,
            statistics=bool(statistics),
            private=private,
        )
        self.path: Path = choose(path, self.trained, self.device)
        self.block_size = most_clients(self.model, self.packing, self.device, block_size)
        self.stepper = Stepper(
            self.path,
            self.data,
            algorithm,
            self.packing,
            self.client_state.entries,
            max_grad_norm,
            self.personal.places(statistics) if statistics else None,
        )
        self.stepper.captured = captured_steps(self.stepper, self.block_size)
        self.rounds = LocalRounds(
            self.trained,
            self.stepper,
            self.client_state,
            self.payload,
            self.workload,
            compression,
            privacy,
        )
        evaluated = self.data if test is None else test.to(self.device)
        self.evaluation = Evaluation(
            self.trained, self.stepper, self.metrics, evaluated, self.client_state
        )

    @property
    def population(self) -> int:
        """Number of clients."""
        return self.data.population

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of what clients report of their training."""
        names = ["num-examples"]
        if self.rounds.factory.reports_loss:
            names.append("loss")
        if self.client_state.kind != "reset":
            names.append("fresh-state")
        return (*names, *self.algorithm.report(self.algorithm.sample(1)))

    def receive(self, config: Mapping[str, object]) -> None:
        """Take from the config entries of a round's instructions what is meant for clients.

        That is the state that the server keeps for them, FedProx's mu, and which run it is.

        Raises
        ------
        FedsimError
            If clients count on the server's state, and it keeps none; or if it sends a pull to its
            model, as Flower's FedProx does, to clients that have none.
        """
        self.rounds.server_numbers = server_numbers(self.algorithm, config)
        self.client_state.receive(config)
        if isinstance(run := config.get(RUN), str):
            self.join(run)

    def key_by(self, release: str) -> None:
        """Key noise, and draws that amplify, by the digest of all that a run releases.

        The digest holds the path and the kernels, which are chosen when a trainer is made: it is
        known only then. Nothing has been drawn before.
        """
        self.randomness = Randomness(self.randomness.seed, release)

    def join(self, run: str) -> None:
        """Take part in this run: clients' ledgers know a round trained again by the run's name."""
        if self.rounds.releases is not None:
            self.rounds.releases.run = run

    def examples(self, client: int) -> int:
        """How many examples a client has."""
        return self.data.size(client)

    def costs(self, client_ids: Ints) -> Floats:
        """Local steps of each client, ``[n]``, or 1 without any."""
        return np.maximum(self.workload.steps(client_ids), 1.0)

    def state(self, client_ids: Ints | None = None, round: int | None = None) -> ClientStates:
        """What these clients keep between rounds, as of the start of ``round``."""
        return self.client_state.state(client_ids, round)

    def keep(self, states: ClientStates, round: int) -> None:
        """Let these clients keep what `state` gave elsewhere, at the end of ``round``."""
        self.client_state.keep(states, round)

    def restore(self, states: ClientStates) -> None:
        """Let clients keep what `state` gave, and nothing else."""
        self.client_state.store.restore(states)

    def on(self, path: PathName, block_size: int = 0) -> Self:
        """The same clients on another path, without state."""
        state: StateKind = "client" if self.client_state.required else "reset"
        return self._copy(path=path, block_size=block_size, state=state)

    def copy_for(self, device: str) -> Self:
        """The same clients on another device, by the same path, in blocks of the same size."""
        model, state = copy.deepcopy(self.model), self.client_state.kind
        copied = self._copy(model=model, path=self.path.name, device=device, state=state)
        copied.rounds.releases = None  # the original writes down what it releases (`charge`)
        return copied

    def _copy(self, **changes: Any) -> Self:
        return type(self)(**(self._settings() | changes))

    def _settings(self) -> dict[str, Any]:
        work = self.workload.work
        return {
            "model": self.model,
            "algorithm": self.algorithm,
            "data": self.data,
            "batch_size": work.batch_size,
            "epochs": work.epochs,
            "steps": work.steps,
            "counts": self.workload.counts,
            "loss": self.loss,
            "metrics": self.metrics,
            "test": self.test,
            "randomness": self.randomness,
            "device": self.device,
            "kernel": self.kernel,
            "block_size": self.block_size,  # not another device's rule: a run may use several
            "privacy": self.privacy,
            "max_grad_norm": self.max_grad_norm,
            "compression": self.compression,
            "personal": self.personal.names,
        }

    def initial(self) -> Tensor:
        """What clients are sent at first, ``[d]``: the model's own parameters, and zero vectors."""
        parameters = self.layout.flatten(dict(self.model.named_parameters()))
        vectors = self.received_layout.d - self.layout.d
        return torch.cat([parameters, parameters.new_zeros(vectors)])

    @property
    def row_layout(self) -> Layout:
        """Of a row: the parameters that are sent, and the algorithm's vectors after them."""
        return self.payload.layout

    @property
    def received_layout(self) -> Layout:
        """Of what clients are sent: the same parameters, and the vectors of `receives`."""
        return self.payload.received_layout

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Local work of these clients from ``vector [d]``, block by block."""
        sizes = (self.received_layout.d,)
        checks.check_call(vector, sizes, client_ids, round, self.population)
        vector = self._on_device(vector)
        received = self.payload.received(vector[None])
        for clients in self.rounds.blocks(client_ids, round, self.randomness, self.block_size):
            result = self.rounds.fit(received, clients, {})
            rows = self.payload.rows(result.theta, result.vectors, vector)
            block = Block.sent(clients.client_ids, rows, result.metrics)
            self.rounds.finish(result, clients)
            # A generator would hold on to a block's parameters while its rows are looked at.
            del result, clients
            yield block

    def fit(
        self,
        vector: Tensor,
        client_ids: Ints,
        round: int,
        *,
        numbers: Mapping[str, Sequence[float]] | None = None,
        randomness: Sequence[Randomness] | None = None,
    ) -> LocalResult:
        """Train these clients as one block, and keep where they end.

        Parameters
        ----------
        vector : Tensor ``[d]`` or ``[n, d]``
            Where they start: the global parameters, or each client's own; and what the server
            sends beside.
        client_ids : int64 ``[n]``
        round : int
        numbers : mapping of str to n floats, optional
            Values for the algorithm's per-client numbers, where they differ by client.
        randomness : sequence of n Randomness, optional
            Where each client's draws come from, where that differs by client.
        """
        if numbers and self.client_state.kind != "reset":
            raise FedsimError("clients with numbers of their own must have client.state = 'reset'.")
        sources = [self.randomness] * len(client_ids) if randomness is None else randomness
        vectors = self._on_device(vector).view(-1, self.received_layout.d)
        clients = self.rounds.one_block(client_ids, round, sources)
        result = self.rounds.fit(self.payload.received(vectors), clients, numbers or {})
        theta = self.payload.ended(result.theta, result.vectors, vectors)
        self.rounds.finish(result, clients)
        return LocalResult(theta, result.metrics)

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Loss and metrics of ``vector [d]`` on these clients' test examples, or on all theirs."""
        sizes = (self.layout.d, self.received_layout.d)
        checks.check_call(vector, sizes, client_ids, round, self.population)
        vector = self._on_device(vector)[: self.layout.d]
        # An evaluation done twice is the same.
        yield from self.evaluation.blocks(vector, client_ids, round, self.randomness.repeated())

    @property
    def ledgers(self) -> ClientLedgers | None:
        """What clients have spent of their examples' privacy, if they protect it."""
        return None if self.rounds.releases is None else self.rounds.releases.ledgers

    def over_budget(self, vector: Tensor, client_ids: Ints, round: int) -> str | None:
        """Why these clients' budgets do not allow a round from ``vector [d]``; None if they do."""
        if (releases := self.rounds.releases) is None:
            return None
        return releases.exceeded(round, self._starts(vector, client_ids, round))

    def charge(self, vector: Tensor, client_ids: Ints, round: int) -> None:
        """Write down what these clients will release in a copy that trains them from ``vector``."""
        if self.rounds.releases is not None:
            self.rounds.releases.record(round, self._starts(vector, client_ids, round))

    def _starts(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[RoundStart]:
        carried = self.client_state.store.load(client_ids, round)
        clients = RoundClients(client_ids, round, [self.randomness] * len(client_ids), carried)
        return self.rounds.starts(self._on_device(vector)[None], clients)

    def _on_device(self, vector: Tensor) -> Tensor:
        return vector.to(self.device, self.layout.dtype)
