"""The cohort trainer: local work of many clients at once, with a leading client axis."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.clients.base import PERSONAL_MASK, LocalAlgorithm, refuse_vectors
from fedsim.errors import FedsimError
from fedsim.privacy import ClientLedgers
from fedsim.privacy.plan import LocalWork, ReleasePlan
from fedsim.randomness import Randomness
from fedsim.rows.exchange import KEEP_SINCE, Block, ClientStates
from fedsim.rows.layout import Layout
from fedsim.tasks import Accuracy, MeanOf, Metric
from fedsim.tasks.losses import CrossEntropy, Loss
from fedsim.training.alone_steps import AloneSteps, DenseSteps
from fedsim.training.batches import Batches, Ints, plan_batches
from fedsim.training.checks import check_model
from fedsim.training.compression import LEFT_OUT, Compression
from fedsim.training.data import ClientData
from fedsim.training.evaluation import evaluate_clients
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.example_releases import ExampleReleases, Starting, starting
from fedsim.training.fitting import Fitted, Local, numbers_of
from fedsim.training.graphs import steps_by
from fedsim.training.hidden_draws import Seeds, hidden_draws
from fedsim.training.local_step import LocalStep
from fedsim.training.memory import Memory, Sent, StateKind, memory_for, packed, unpacked
from fedsim.training.paths.choice import (
    ONE_BY_ONE,
    Path,
    PathName,
    block_limit,
    choose,
    convolutional,
)
from fedsim.training.paths.examples import Way, ways
from fedsim.training.paths.stacked import StackedPath, stack
from fedsim.training.personal import Personal
from fedsim.training.probe import Probe
from fedsim.training.sending import Sending
from fedsim.training.steps import Bench, Ended, PrivateSteps, Steps

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
        if test is not None and test.population != data.population:
            raise FedsimError(
                f"there are test examples of {test.population} clients and training examples of "
                f"{data.population}; both must be of the same clients."
            )
        self.work = LocalWork(batch_size, epochs, steps)
        self.counts = self._checked_counts(counts, privacy)
        loss = CrossEntropy() if loss is None else loss
        self.loss: Loss = loss
        self.metrics: dict[str, Metric] = {
            name: metric if isinstance(metric, Metric) else MeanOf(metric)
            for name, metric in ({"accuracy": Accuracy()} if metrics is None else metrics).items()
        }
        named = randomness.release is not None
        if privacy is not None and not named:
            randomness = privacy.keyed(randomness, algorithm, self.work, loss)
        self.randomness = randomness
        self.personal = Personal.of(self.model, personal)
        self.layout = self.personal.shared.layout
        self.sending = Sending.of(self.personal.shared, algorithm)
        self.packing = self.personal.packing
        keeps = self.personal or algorithm.evaluates or algorithm.remembers
        if keeps and state != "client":
            raise FedsimError(
                f"client.state is '{state}'; it must be 'client' where clients keep parameters to "
                "themselves (model.personal, or an algorithm with a model or a control variate of "
                "its own)."
            )
        if algorithm.sends and self.personal:
            raise FedsimError(
                f"model.personal is set, but {type(algorithm).__name__} (client.name) sends "
                f"{', '.join(algorithm.sends)} beside the update, made of all that is trained; it "
                "must be unset, or client.name another algorithm."
            )
        if algorithm.parts and not self.personal:
            raise FedsimError(
                f"model.personal is empty; {type(algorithm).__name__} (client.name) needs the "
                "patterns of the parameters that each client keeps to itself, such as 'head.*'."
            )
        if privacy is not None:
            refuse_vectors(algorithm)
        self.compression = compression
        if compression is not None and (state != "client" or self.personal or algorithm.sends):
            raise FedsimError(
                f"client.compression is set, and client.state is '{state}'; it must be 'client', "
                "since clients keep what is left out, with no model.personal and an algorithm that "
                "sends its update alone."
            )
        sample = self.data.zeros((2,), self.layout.dtype)[0] if len(self.data.x) else None
        self.draws = hidden_draws(self.model, sample)
        drawing = self.draws.training or self.draws.evaluation
        self.path: Path = choose(
            path,
            self.model,
            self.packing,
            loss,
            device=self.device,
            data=self.data,
            draws=drawing,
        )
        if max_grad_norm < 0 or (max_grad_norm and privacy is not None):
            raise FedsimError(
                f"client.max-grad-norm is {max_grad_norm}; it must be 0 or more, and 0 where "
                "clients protect their examples: client.mechanism bounds their gradients."
            )
        self.max_grad_norm = max_grad_norm
        launched = LocalStep(self.path, self.data, algorithm, self.layout.dtype, max_grad_norm)
        self.step = steps_by(launched, self.device)
        limit = block_limit(self.model, self.packing, self.device)
        if block_size < 0:
            raise FedsimError(f"client.block-size is {block_size}; it must be 0 (auto) or more.")
        # Clients with convolutions never share a block on a CPU: their bits are their own.
        alone = self.device.type == "cpu" and convolutional(self.model)
        self.block_size = limit if alone or not block_size else block_size
        self.privacy = privacy
        self.releases: ExampleReleases | None = None
        if privacy is not None:
            self.example_way = self._probed_way(drawing)
            self.releases = ExampleReleases(
                privacy,
                self.model,
                algorithm,
                self.data,
                self.work,
                path=f"{self.path.name}, {self.example_way.name}",
                rows=self.rows_are,
                named=named,
            )
        self.state_kind = state
        self.memory: Memory | None = memory_for(
            state, algorithm, self.population, self.packing.width, state_dir
        )
        self._begun: dict[int, int] = {}

    def _checked_counts(
        self, counts: Sequence[int] | Ints | None, privacy: ExamplePrivacy | None
    ) -> Ints | None:
        if counts is None:
            return None
        if privacy is not None:
            raise FedsimError(
                "client.work is set; it must be empty where clients protect their examples: their "
                "numbers of steps are a declared constant of the plan, the same for all."
            )
        if len(counts) != self.data.population or min(counts) < 1:
            raise FedsimError(
                f"client.work has {len(counts)} numbers, the least of them {min(counts)}; it must "
                f"have one, at least 1, for each of the {self.data.population} clients."
            )
        return np.asarray(counts, dtype=np.int64)

    def _probed_way(self, drawing: bool) -> Way:
        """How to get the gradients of single examples."""
        made_of = self.model, self.packing, self.loss
        stacked = None if drawing else stack(*made_of, self.data.x.dim() - 1)
        probe = Probe(*made_of, self.draws, self.data)
        return probe.fastest(ways(*made_of, stacked, drawing))

    @property
    def population(self) -> int:
        """Number of clients."""
        return self.data.population

    @property
    def carried(self) -> tuple[str, ...]:
        """Entries of the algorithm's state that outlive a round."""
        return () if self.state_kind == "reset" else self.algorithm.carried

    @property
    def keeps_state(self) -> bool:
        """Whether each client keeps its own."""
        return self.state_kind == "client"

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of what clients report of their training."""
        names = ["num-examples"]
        if self.privacy is None or self.privacy.unprotected_metrics:
            names.append("loss")
        if self.memory is not None:
            names.append("fresh-state")
        return (*names, *self.algorithm.report(self.algorithm.sample(1)))

    def receive(self, config: Mapping[str, object]) -> None:
        """Take from the config entries of a round's instructions what is about clients' state.

        Raises
        ------
        FedsimError
            If clients count on the server, and it keeps none; or if it tells them to be pulled to
            its model, as Flower's FedProx does, and they are not.
        """
        mu = getattr(self.algorithm, "mu", 0.0)
        if config.get("proximal-mu", mu) != mu:
            raise FedsimError(
                f"the server sends proximal-mu = {config['proximal-mu']}, and client.proximal is "
                f"{mu}; they must be the same."
            )
        if self.state_kind == "server":
            self.memory = Sent.of(config)
        elif self.memory is not None:
            self.memory.keep_since(config.get(KEEP_SINCE))

    @property
    def rows_are(self) -> str:
        """What is known of the rows of examples, for a statement: "probed", or "" without any."""
        return "probed" if self.privacy is not None else ""

    @property
    def bench(self) -> Bench:
        """What its clients' steps are made with."""
        return Bench(self.step, self.algorithm, self.data, self.packing, self.carried)

    def costs(self, client_ids: Ints) -> Floats:
        """Local steps of each client, ``[n]``, or 1 without any."""
        steps = [work.steps_of(size) for work, size in self._work_of(client_ids)]
        return np.maximum(np.array(steps, dtype=np.float64), 1.0)

    def passed(self, client_ids: Ints) -> Floats:
        """How many examples each client goes through in a round, ``[n]``."""
        examples = [work.examples_of(size) for work, size in self._work_of(client_ids)]
        return np.array(examples, dtype=np.float64)

    def _work_of(self, client_ids: Ints) -> Iterator[tuple[LocalWork, int]]:
        """Each client's work, and how many examples it has."""
        for client in client_ids.tolist():
            work = self.work
            if self.counts is not None:
                work = work.counted(int(self.counts[client]))
            yield work, self.data.size(client)

    def state(self, client_ids: Ints | None = None, round: int | None = None) -> ClientStates:
        """See `BlockTrainer`."""
        if self.memory is None or (client_ids is not None and not self.keeps_state):
            return {}
        if client_ids is None:
            return self.memory.state()
        return packed(client_ids, *self.memory.load(client_ids, round))

    def keep(self, states: ClientStates, round: int) -> None:
        """See `BlockTrainer`."""
        if self.memory is not None:
            client_ids, rows = unpacked(states)
            self.memory.store(client_ids, round, rows)

    def restore(self, states: ClientStates) -> None:
        """See `BlockTrainer`."""
        if self.memory is not None:
            self.memory.restore(states)

    def on(self, path: PathName, block_size: int = 0) -> Trainer:
        """The same clients on another path, with no state as yet."""
        keeps = self.personal or self.algorithm.evaluates or self.algorithm.remembers
        return self._copy(path=path, block_size=block_size, state="client" if keeps else "reset")

    def copy_for(self, device: str) -> Trainer:
        """See `BlockTrainer`: by the same path, in blocks of the same size."""
        copied = self._copy(
            model=copy.deepcopy(self.model),
            path=cast(PathName, self.path.name),
            block_size=self.block_size,
            device=device,
            state=self.state_kind,
        )
        # What a copy releases its original has written down: see `charge`.
        copied.releases = None
        # Also where the rule for that device is another: clients may be on their way to a third.
        copied.block_size = self.block_size
        return copied

    def _copy(self, **changes: Any) -> Trainer:
        settings: dict[str, Any] = {
            "model": self.model,
            "batch_size": self.work.batch_size,
            "epochs": self.work.epochs,
            "steps": self.work.steps,
            "counts": self.counts,
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
        for first in range(0, len(client_ids), self.block_size):
            ids = client_ids[first : first + self.block_size]
            fitted = self._fit(vector[None], ids, round, {}, [self.randomness] * len(ids))
            rows = self.sending.rows(fitted.theta, fitted.vectors, vector)
            block = Block.sent(ids, rows, fitted.metrics)
            self._finish(fitted, ids, round)
            del fitted
            yield block

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Loss and metrics of ``vector [d]`` on these clients' test examples, or on all theirs."""
        # An evaluation done twice is the same.
        source = self.randomness.repeated()
        vector = self._on_device(vector)[: self.layout.d]
        for first in range(0, len(client_ids), EVALUATE_CLIENTS):
            ids = client_ids[first : first + EVALUATE_CLIENTS]
            self.model.eval()
            data = self.data if self.test is None else self.test
            indices = [data.indices[i] for i in ids]
            seeds = Seeds([source] * len(ids), ids, round) if self.draws.evaluation else None
            metrics = {"loss": MeanOf(self.loss), **self.metrics}
            theta = self._evaluated(vector, ids)
            values = evaluate_clients(self.path, theta, data, indices, metrics, seeds)
            yield Block.sent(ids, None, values)

    def _evaluated(self, vector: Tensor, client_ids: Ints) -> Tensor:
        """With what these clients evaluate, ``[1 or n, D]``: what they keep, where they do."""
        present, kept = np.zeros(len(client_ids), dtype=np.bool_), dict[str, Tensor]()
        if self.memory is not None:
            present, kept = self.memory.load(client_ids, None)
        theta = self.personal.start(vector[None], present, kept)
        if self.algorithm.evaluates in kept:
            there = torch.from_numpy(present).to(theta.device)[:, None]
            theta = torch.where(there, kept[self.algorithm.evaluates].to(theta), theta)
        return theta

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
        if numbers and self.memory is not None:
            raise FedsimError("clients with numbers of their own must have client.state = 'reset'.")
        sources = [self.randomness] * len(client_ids) if randomness is None else randomness
        vectors = self._on_device(vector).view(-1, self.row_layout.d)
        fitted = self._fit(vectors, client_ids, round, numbers or {}, sources)
        local = Local(self.sending.ended(fitted.theta, fitted.vectors, vectors), fitted.metrics)
        self._finish(fitted, client_ids, round)
        return local

    @torch.no_grad()
    def _fit(
        self,
        vectors: Tensor,
        client_ids: Ints,
        round: int,
        numbers: Mapping[str, Sequence[float]],
        randomness: Sequence[Randomness],
    ) -> Fitted:
        """Train from ``vectors [1 or n, d]``; nothing is kept before `_finish`."""
        randomness = self._sources(client_ids, round, randomness)
        n = len(client_ids)
        indices = [self.data.indices[i] for i in client_ids]
        values = numbers_of(self.algorithm, numbers, n)
        metrics = {"num-examples": np.array([len(i) for i in indices], dtype=np.float64)}
        if self.privacy is None or self.privacy.unprotected_metrics:
            metrics["loss"] = np.zeros(n)
        present, kept = np.zeros(n, dtype=np.bool_), dict[str, Tensor]()
        if self.memory is not None:
            present, kept = self.memory.load(client_ids, round)
            metrics["fresh-state"] = (~present).astype(np.float64)
        start = self.personal.start(vectors[:, : self.layout.d], present, kept).expand(n, -1)
        self._write_down(client_ids, round, start, kept, values, randomness)
        self._begun.update(dict.fromkeys(client_ids.tolist(), round))
        received = {k: v.expand(n, -1) for k, v in self.sending.received(vectors).items()}
        fitted = Fitted(start, metrics, {k: torch.zeros_like(v) for k, v in received.items()})
        plan = plan_batches if self.privacy is None else self.privacy.batches
        self.model.train()
        drawn = (self.work, indices, client_ids, randomness, round)
        counts = () if self.counts is None else (self.counts[client_ids],)
        for batches in plan(*drawn, *counts):
            members = batches.members
            everybody = np.array_equal(members, np.arange(n))
            positions = torch.from_numpy(members).to(self.device)
            theirs = {k: v[torch.from_numpy(members).to(v.device)] for k, v in kept.items()}
            sources = [randomness[i] for i in members]
            steps = self._steps(
                batches, round, client_ids[members], sources, theirs, present[members]
            )
            ended = steps.run(
                start.clone() if everybody else start[positions],
                {k: torch.from_numpy(v[members]).to(start) for k, v in values.items()}
                | {k: v[positions] for k, v in received.items()}
                | self._mask(len(members)),
                theirs,
                torch.from_numpy(present[members]).to(self.device),
            )
            if self.compression is not None:
                there = present[members]
                ended = self._compressed(ended, vectors[positions % len(vectors)], theirs, there)
            ended.carried.update(self.personal.kept(ended.theta))
            losses = steps.mean_losses() if "loss" in metrics else None
            fitted.take(members, ended, losses, send=self.state_kind == "server")
        return fitted

    def _compressed(
        self,
        ended: Ended,
        vectors: Tensor,
        kept: Mapping[str, Tensor],
        present: npt.NDArray[np.bool_],
    ) -> Ended:
        """What clients that started at ``vectors [n, d]`` send, and what they leave out."""
        assert self.compression is not None
        shared = self.personal.shared
        target = shared.unpack(ended.theta) - vectors
        if LEFT_OUT in kept:
            there = torch.from_numpy(present).to(target.device)[:, None]
            target = torch.where(there, target + kept[LEFT_OUT].to(target), target)
        sent = vectors + self.compression(target)
        # As it arrives: a sum with the parameters has been rounded.
        left_out = target - (sent - vectors)
        return replace(
            ended, theta=shared.pack(sent), carried={**ended.carried, LEFT_OUT: left_out}
        )

    def _mask(self, n: int) -> dict[str, Tensor]:
        """Which parameters are personal, for an algorithm that asks."""
        if not self.algorithm.parts:
            return {}
        return {PERSONAL_MASK: self.personal.mask.expand(n, -1)}

    def _sources(
        self, client_ids: Ints, round: int, randomness: Sequence[Randomness]
    ) -> list[Randomness]:
        """Where each client's draws come from: a block that raised has asked for them before."""
        return [
            source.repeated() if self._begun.get(client) == round else source
            for client, source in zip(client_ids.tolist(), randomness, strict=True)
        ]

    def _finish(self, fitted: Fitted, client_ids: Ints, round: int) -> None:
        """Let clients keep what they ended with: the last thing that happens to a block."""
        if self.memory is not None:
            for members, carried in fitted.carried:
                self.memory.store(client_ids[members], round, carried)
        for client in client_ids.tolist():
            self._begun.pop(client, None)

    def _steps(
        self,
        batches: Batches,
        round: int,
        ids: Ints,
        randomness: list[Randomness],
        kept: Mapping[str, Tensor],
        present: npt.NDArray[np.bool_],
    ) -> Steps:
        seeds = Seeds(randomness, ids, round) if self.draws.training else None
        if self.privacy is None and isinstance(self.path, StackedPath) and self.path.alone:
            return DenseSteps(self.bench, self.path, batches, round)
        if self.privacy is None and self.path.name in ONE_BY_ONE and self.device.type == "cpu":
            return AloneSteps(self.bench, batches, round, seeds)
        if self.privacy is None:
            return Steps(self.bench, batches, round, seeds)
        plans = [self.plan_of(client) for client in ids.tolist()]
        return PrivateSteps(
            self.bench,
            batches,
            round,
            seeds,
            privacy=self.privacy,
            rows=self.example_way.rows,
            denominators=[plan.denominator for plan in plans if plan is not None],
            client_ids=ids,
            randomness=randomness,
            kept=kept,
            present=present & self.keeps_state,
            keeps_state=self.keeps_state,
        )

    @property
    def ledgers(self) -> ClientLedgers | None:
        """What clients have spent of their examples' privacy, if they protect it."""
        return None if self.releases is None else self.releases.ledgers

    def examples(self, client: int) -> int:
        """How many examples a client has."""
        return self.data.size(client)

    def over_budget(self, vector: Tensor, client_ids: Ints, round: int) -> str | None:
        """Why these clients' budgets do not allow a round from ``vector [d]``; None if they do."""
        if self.releases is None:
            return None
        return self.releases.exceeded(round, self._all_starting(vector, client_ids, round))

    def charge(self, vector: Tensor, client_ids: Ints, round: int) -> None:
        """See `BlockTrainer`."""
        if self.releases is not None:
            self.releases.record(round, self._all_starting(vector, client_ids, round))

    def _all_starting(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Starting]:
        n = len(client_ids)
        present, kept = np.zeros(n, dtype=np.bool_), dict[str, Tensor]()
        if self.memory is not None:
            present, kept = self.memory.load(client_ids, round)
        start = self.personal.start(self._on_device(vector).view(1, -1), present, kept).expand(
            n, -1
        )
        numbers = numbers_of(self.algorithm, {}, n)
        sources = [self.randomness] * n
        return starting(client_ids, start, kept, numbers, sources)

    def plan_of(self, client: int) -> ReleasePlan | None:
        """What a client releases of its examples a round; None if nothing, or nothing private."""
        if self.privacy is None:
            return None
        return self.privacy.plan(self.work, self.data.size(client))

    def _write_down(
        self,
        client_ids: Ints,
        round: int,
        start: Tensor,
        kept: Mapping[str, Tensor],
        numbers: Mapping[str, Floats],
        randomness: Sequence[Randomness],
    ) -> None:
        """The round's line in each client's ledger, before anything is drawn or released.

        A client that has begun this round and whose block then raised has released nothing:
        what it was charged then, it is charged for now.
        """
        if self.releases is None:
            return
        for client in starting(client_ids, start, kept, numbers, randomness):
            if self._begun.get(client.client) != round:
                self.releases.record(round, [client])
                self._begun[client.client] = round

    def _on_device(self, vector: Tensor) -> Tensor:
        return vector.to(self.device, self.layout.dtype)
