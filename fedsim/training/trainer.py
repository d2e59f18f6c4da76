"""The cohort trainer: local work of many clients at once, with a leading client axis."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.clients.base import LocalAlgorithm
from fedsim.clients.proximal import told_numbers
from fedsim.errors import FedsimError
from fedsim.privacy import ClientLedgers
from fedsim.privacy.plan import LocalWork
from fedsim.randomness import Randomness
from fedsim.rows.block import Block
from fedsim.rows.exchange import RUN
from fedsim.rows.layout import Layout
from fedsim.rows.trainers import ClientStates
from fedsim.tasks import Accuracy, MeanOf, Metric
from fedsim.tasks.losses import CrossEntropy, Loss
from fedsim.training.batches import Ints
from fedsim.training.checks import (
    check_algorithm,
    check_compression,
    check_example_privacy,
    check_model,
    check_settings,
    check_statistics,
)
from fedsim.training.compression import Compression
from fedsim.training.data import ClientData
from fedsim.training.entering import Entering
from fedsim.training.evaluation import Calls, evaluate_clients
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.example_releases import ExampleReleases, Starting
from fedsim.training.fitting import Local
from fedsim.training.graphs import steps_by
from fedsim.training.hidden_draws import Seeds, hidden_draws
from fedsim.training.keeping import Keeping
from fedsim.training.local_rounds import LocalRounds
from fedsim.training.local_step import LocalStep
from fedsim.training.memory import StateKind
from fedsim.training.paths.choice import Path, PathName, choose
from fedsim.training.paths.choice import block_size as block_size_of
from fedsim.training.paths.plain import PlainPath
from fedsim.training.personal import Personal
from fedsim.training.probe import probed_way
from fedsim.training.sending import Sending
from fedsim.training.stepping import OpenStepping, ReleasedStepping, Stepping
from fedsim.training.steps import Bench
from fedsim.training.structure.reading import Reading, read
from fedsim.training.workload import Workload

__all__ = ["Trainer"]

Floats = npt.NDArray[np.float64]
EVALUATE_CLIENTS = 256


class Trainer:
    """Clients with their data and their algorithm, trained block by block.

    Parameters
    ----------
    model : nn.Module
        Its trainable floating-point parameters make up a row; the rest stays as it is here.
    algorithm : LocalAlgorithm
    data : ClientData
    batch_size : int
        Examples a step; 0 takes all of a client's examples. A client with fewer takes what
        it has.
    epochs : int or None
        Passes over the client's own data, each freshly shuffled (1 if steps is not given).
    steps : int or None
        Gradient evaluations instead of passes, the same for every client.
    counts : sequence of int, optional
        Each client's own number of passes, or of gradient evaluations where ``steps`` is given, in
        its place; refused beside example-level privacy, where they are one declared number.
    loss : callable ``(outputs [B, ...], targets [B, ...]) -> [B]``, optional
        One loss for each example; cross-entropy, if it is not given.
    metrics : mapping of name to Metric, or to a callable ``(outputs, targets) -> [B]``
        What an evaluation reports besides the loss; accuracy, if it is not given. Of a callable's
        numbers it is the mean.
    test : ClientData, optional
        Examples on which clients evaluate, each its own; those they train on, if it is not given.
    path : "auto", "stacked", "layered", "func" or "plain"
    block_size : int
        Most clients at a time; 0 leaves it to the rule. Results do not depend on it.
    randomness : Randomness
        With example-level privacy and without a release digest of its own it takes one of the
        settings given here, so that two trainers of one seed share no noise.
    device : torch.device or str
    privacy : ExamplePrivacy, optional
        Example-level privacy.
    max_grad_norm : float
        A batch's gradient that is longer is shortened to this L2 norm; 0 for any length. It
        protects nobody, and is refused beside example-level privacy.
    compression : Compression, optional
        Of the updates; what it leaves out each client keeps for the next round (``state`` must be
        "client").
    state : "reset", "client" or "server"
        What becomes of the algorithm's state (ADADP's rate, a momentum) between rounds: it
        starts anew, each client keeps its own, or all start from the mean of what the last
        round's clients ended with, which the server sends (`receive`) and they report.
    state_dir : path, optional
        Keep it in files there, for runtimes whose processes do not outlive a round.
    personal : collection of str
        Names of parameters that each client keeps to itself, with its state: they are trained, but
        not sent, and a client evaluates with its own.

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
        self.device = torch.device(device)
        self.model = model.to(self.device)
        check_model(self.model)
        self.algorithm = algorithm
        self.data = data.to(self.device)
        self.test = None if test is None else test.to(self.device)
        check_settings(data, test, max_grad_norm)
        if privacy is not None:
            check_example_privacy(algorithm, counts, max_grad_norm)
        self.workload = Workload.of(LocalWork(batch_size, epochs, steps), self.data, counts)
        loss = CrossEntropy() if loss is None else loss
        self.loss: Loss = loss
        self.metrics: dict[str, Metric] = {
            name: metric if isinstance(metric, Metric) else MeanOf(metric)
            for name, metric in ({"accuracy": Accuracy()} if metrics is None else metrics).items()
        }
        if privacy is not None and randomness.release is None:
            randomness = privacy.keyed(randomness, algorithm, self.workload.work, loss)
        self.randomness = randomness
        self.privacy = privacy
        self.max_grad_norm = max_grad_norm
        self.compression = compression
        self.personal = Personal.of(self.model, personal)
        check_algorithm(algorithm, personal=bool(self.personal))
        self.keeping = Keeping(state, algorithm, self.personal, data.population, state_dir)
        if compression is not None:
            check_compression(algorithm, state, personal=bool(self.personal))
        self.packing = self.personal.packing
        self.layout = self.personal.shared.layout
        self.sending = Sending.of(self.personal.shared, algorithm)
        statistics = check_statistics(
            self.model, algorithm, self.personal.names, private=privacy is not None
        )
        sample = self.data.zeros((2,), self.layout.dtype)[0] if len(self.data.x) else None
        self.draws = hidden_draws(self.model, sample)
        self.reading = self._read(self.model.train(), declared=privacy is None)
        self.path: Path = choose(
            path,
            self.model,
            self.packing,
            loss,
            self.reading,
            device=self.device,
            data=self.data,
            alone=self.draws.training or self.draws.evaluation or bool(statistics),
        )
        self.block_size = block_size_of(self.model, self.packing, self.device, block_size)
        launched = LocalStep(
            self.path,
            self.data,
            algorithm,
            self.layout.dtype,
            max_grad_norm,
            self.personal.places(statistics) if statistics else None,
        )
        self.bench = Bench(
            steps_by(launched, self.device),
            algorithm,
            self.data,
            self.packing,
            self.keeping.carried,
        )
        drawn = self.draws.training
        stepping: Stepping = OpenStepping(self.bench, self.workload, self.path, drawn)
        releases = None
        if privacy is not None:
            way = probed_way(self.model, self.packing, loss, self.draws, self.data, self.reading)
            keeps = self.keeping.by_clients
            stepping = ReleasedStepping(self.bench, self.workload, privacy, way, drawn, keeps)
            releases = ExampleReleases(
                privacy,
                self.model,
                algorithm,
                self.data,
                self.workload.work,
                loss,
                path=f"{self.path.name}, {way.name}",
                rows=way.known,
            )
        self.rounds = LocalRounds(
            self.model, self.bench, self.keeping, self.sending, stepping, compression, releases
        )
        self._calls = Calls()

    def _read(self, model: nn.Module, *, declared: bool) -> Reading:
        """What is known of the model, in its mode, and of the loss; see `read`."""
        nobody = torch.zeros(0, dtype=torch.int64, device=self.device)
        x, y = (f(nobody, self.layout.dtype) for f in (self.data.inputs, self.data.targets))
        return read(model, self.loss, x, y, declared=declared)

    @cached_property
    def _evaluation(self) -> tuple[Path, bool]:
        """The path that evaluates, and whether metrics see one chunk at a time."""
        reading = self._read(self.model.eval(), declared=True)
        trained, evaluated = self.reading.structure, reading.model
        path = self.path
        if trained is None or evaluated is None or not trained.same(evaluated):
            path = PlainPath(self.model, self.packing, self.loss)
        functions = [m.function for m in self.metrics.values() if isinstance(m, MeanOf)]
        apart = reading.loss is not None and all(map(reading.reads, functions))
        return path, not apart

    @property
    def population(self) -> int:
        """Number of clients."""
        return self.data.population

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of what clients report of their training."""
        names = ["num-examples"]
        if self.rounds.stepping.reports_loss:
            names.append("loss")
        if self.keeping.state_kind != "reset":
            names.append("fresh-state")
        return (*names, *self.algorithm.report(self.algorithm.sample(1)))

    def receive(self, config: Mapping[str, object]) -> None:
        """Take from the config entries of a round's instructions what is meant for clients.

        That is what the server says of their state, of FedProx's mu, and which run it is.

        Raises
        ------
        FedsimError
            If clients count on the server, and it keeps none; or if it tells them to be pulled to
            its model, as Flower's FedProx does, and they are not.
        """
        self.rounds.told = told_numbers(self.algorithm, config)
        self.keeping.receive(config)
        if isinstance(run := config.get(RUN), str):
            self.join(run)

    def join(self, run: str) -> None:
        """Go through the rounds of this run, by whose name clients' ledgers know them again."""
        if self.rounds.releases is not None:
            self.rounds.releases.run = run

    def examples(self, client: int) -> int:
        """How many examples a client has."""
        return self.data.size(client)

    def costs(self, client_ids: Ints) -> Floats:
        """Local steps of each client, ``[n]``, or 1 without any."""
        return np.maximum(self.workload.steps(client_ids), 1.0)

    def state(self, client_ids: Ints | None = None, round: int | None = None) -> ClientStates:
        """See `BlockTrainer`."""
        return self.keeping.state(client_ids, round)

    def keep(self, states: ClientStates, round: int) -> None:
        """See `BlockTrainer`."""
        self.keeping.keep(states, round)

    def restore(self, states: ClientStates) -> None:
        """See `BlockTrainer`."""
        self.keeping.memory.restore(states)

    def on(self, path: PathName, block_size: int = 0) -> Trainer:
        """The same clients on another path, with no state as yet."""
        state: StateKind = "client" if self.keeping.required else "reset"
        return self._copy(path=path, block_size=block_size, state=state)

    def copy_for(self, device: str) -> Trainer:
        """See `BlockTrainer`: by the same path, in blocks of the same size."""
        copied = self._copy(
            model=copy.deepcopy(self.model),
            path=cast(PathName, self.path.name),
            block_size=self.block_size,
            device=device,
            state=self.keeping.state_kind,
        )
        # What a copy releases its original has written down: see `charge`.
        copied.rounds.releases = None
        # Also where the rule for that device is another: clients may be on their way to a third.
        copied.block_size = self.block_size
        return copied

    def _copy(self, **changes: Any) -> Trainer:
        work = self.workload.work
        settings: dict[str, Any] = {
            "model": self.model,
            "batch_size": work.batch_size,
            "epochs": work.epochs,
            "steps": work.steps,
            "counts": self.workload.counts,
            "loss": self.loss,
            "metrics": self.metrics,
            "test": self.test,
            "randomness": self.randomness,
            "device": self.device,
            "privacy": self.privacy,
            "max_grad_norm": self.max_grad_norm,
            "compression": self.compression,
            "personal": self.personal.names,
        }
        return Trainer(algorithm=self.algorithm, data=self.data, **(settings | changes))

    def initial(self) -> Tensor:
        """The model's own parameters as a row, ``[d]``; vectors at its end are zero."""
        parameters = self.layout.flatten(dict(self.model.named_parameters()))
        return torch.cat([parameters, parameters.new_zeros(self.row_layout.d - self.layout.d)])

    @property
    def row_layout(self) -> Layout:
        """Of a row: the parameters that are sent, and the algorithm's vectors after them."""
        return self.sending.layout

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Local work of these clients from ``vector [d]``, block by block."""
        vector = self._on_device(vector)
        received = self.sending.received(vector[None])
        blocks = self.rounds.blocks(client_ids, round, self.randomness, self.block_size)
        for entering in blocks:
            fitted = self.rounds.fit(received, entering, {})
            rows = self.sending.rows(fitted.theta, fitted.vectors, vector)
            block = Block.sent(entering.client_ids, rows, fitted.metrics)
            self.rounds.finish(fitted, entering)
            # Nobody holds on to a block's parameters while its rows are looked at.
            del fitted, entering
            yield block

    def fit(
        self,
        vector: Tensor,
        client_ids: Ints,
        round: int,
        *,
        numbers: Mapping[str, Sequence[float]] | None = None,
        randomness: Sequence[Randomness] | None = None,
    ) -> Local:
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
        if numbers and self.keeping.state_kind != "reset":
            raise FedsimError("clients with numbers of their own must have client.state = 'reset'.")
        sources = [self.randomness] * len(client_ids) if randomness is None else randomness
        vectors = self._on_device(vector).view(-1, self.row_layout.d)
        entering = self.rounds.enter(client_ids, round, sources)
        fitted = self.rounds.fit(self.sending.received(vectors), entering, numbers or {})
        local = Local(self.sending.ended(fitted.theta, fitted.vectors, vectors), fitted.metrics)
        self.rounds.finish(fitted, entering)
        return local

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Loss and metrics of ``vector [d]`` on these clients' test examples, or on all theirs."""
        # An evaluation done twice is the same.
        source = self.randomness.repeated()
        vector = self._on_device(vector)[: self.layout.d]
        for first in range(0, len(client_ids), EVALUATE_CLIENTS):
            ids = client_ids[first : first + EVALUATE_CLIENTS]
            data = self.data if self.test is None else self.test
            data.require_usable(ids.tolist())
            indices = [data.indices[i] for i in ids]
            seeds = Seeds([source] * len(ids), ids, round) if self.draws.evaluation else None
            metrics = {"loss": MeanOf(self.loss), **self.metrics}
            theta = self.keeping.evaluated(vector, ids)
            path, by_chunk = self._evaluation
            self.model.eval()
            values = evaluate_clients(
                path, theta, data, indices, metrics, seeds, self._calls, by_chunk=by_chunk
            )
            yield Block.sent(ids, None, values)

    @property
    def ledgers(self) -> ClientLedgers | None:
        """What clients have spent of their examples' privacy, if they protect it."""
        return None if self.rounds.releases is None else self.rounds.releases.ledgers

    def over_budget(self, vector: Tensor, client_ids: Ints, round: int) -> str | None:
        """Why these clients' budgets do not allow a round from ``vector [d]``; None if they do."""
        releases = self.rounds.releases
        if releases is None:
            return None
        return releases.exceeded(round, self._starting(vector, client_ids, round))

    def charge(self, vector: Tensor, client_ids: Ints, round: int) -> None:
        """See `BlockTrainer`."""
        if self.rounds.releases is not None:
            self.rounds.releases.record(round, self._starting(vector, client_ids, round))

    def _starting(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Starting]:
        sources = [self.randomness] * len(client_ids)
        entering = Entering(client_ids, round, sources, self.keeping.load(client_ids, round))
        return self.rounds.starting(self._on_device(vector)[None], entering)

    def _on_device(self, vector: Tensor) -> Tensor:
        return vector.to(self.device, self.layout.dtype)
