"""The cohort trainer: local training of many clients at once, with a leading client axis."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.arguments import check_arguments
from fedsim.array_types import Floats, Ints
from fedsim.clients.base import LocalAlgorithm
from fedsim.clients.proximal import server_numbers
from fedsim.errors import FedsimError, user_traceback
from fedsim.named_tensors import NamedTensors, accept_named
from fedsim.privacy import Ledger
from fedsim.privacy.local_work import LocalWork
from fedsim.randomness import Randomness
from fedsim.rows.block import KEEP_SINCE, RUN, Block, ClientStates
from fedsim.rows.layout import Layout
from fedsim.tasks import Accuracy, MeanOf, Metric
from fedsim.tasks.losses import CrossEntropy, Loss
from fedsim.training import trainer_checks
from fedsim.training.batches import Workload
from fedsim.training.block_memory import clients_within
from fedsim.training.client_state import PersistentState, StateKind
from fedsim.training.data import ClientData
from fedsim.training.evaluation import Evaluation
from fedsim.training.example_privacy import ExamplePrivacy
from fedsim.training.graphs import captured_steps
from fedsim.training.local_rounds import LocalResult, LocalRounds
from fedsim.training.paths import path_choice
from fedsim.training.payload import Payload, Personal, positions_of
from fedsim.training.private_steps import draws_on_device
from fedsim.training.steps import Stepper

_log = logging.getLogger(__name__)


class Trainer:
    """Trains clients, with their data and algorithm, block by block.

    The rounds that it serves, here by hand; parameters are public, blocks of rows secret::

        trainer = Trainer(model, SGD(lr=0.1), data, randomness=Randomness(seed))
        releaser, vector = Releaser(plan, trainer.layout), trainer.initial()
        for number in range(1, plan.rounds + 1):
            total = releaser.start({})
            for block in trainer.train(vector, plan.sampler.draw(number, draws), number):
                total.add(DenseRows(block.rows))  # a row a client: w_client - w_global
            with ledger.release(plan, number):
                vector = vector + releaser.release(total, source_of(number)).mean

    Parameters
    ----------
    model : nn.Module
        Its trainable floating-point parameters make up a row; all others stay fixed.
    algorithm : LocalAlgorithm
    data : ClientData
    batch_size : int
        Examples per step, or all of a client's if it has fewer; 0 takes all.
    epochs : int or None
        Passes over the client's own data, each freshly shuffled (1 if steps is not given).
    steps : int or None
        Gradient evaluations instead of passes, the same for every client.
    counts : sequence of int, optional
        Each client's own number of passes or steps; refused with example-level privacy, where it
        must be one declared number.
    loss : callable ``(outputs [B, ...], targets [B, ...]) -> [B]``, optional
        Loss of each example; cross-entropy by default.
    metrics : mapping of name to Metric, or to a callable ``(outputs, targets) -> [B]``
        Metrics reported besides the loss; accuracy by default. A callable's values are averaged.
    test : ClientData, optional
        Each client's own examples for evaluation; its training examples by default.
    path : "auto", "layered", "func" or "plain"
    kernel : "auto", "eager" or "compiled"
        Executor of the layered path; they agree up to rounding.
    matmul : "float32" or "tf32"
        How a GPU multiplies float32 numbers in local steps; a CPU always does in float32.
    block_size : int
        Most clients trained at once; 0 for the rule's. On a GPU last bits depend on it, and every
        step is computed for that many clients: about a cohort's size is best there.
    randomness : Randomness
        With example-level privacy and without a release digest, it is keyed by a digest of the
        settings given here, so that different trainers with one seed share no noise.
    device : torch.device or str
    privacy : ExamplePrivacy, optional
        Example-level privacy.
    max_grad_norm : float
        Largest L2 norm of a batch's gradient; longer ones are scaled down to it. 0 for no limit.
        It gives no privacy, and is refused with example-level privacy.
    state : "reset" or "client"
        The algorithm's state (ADADP's rate, a momentum) between rounds: reset, or kept by each
        client.
    state_dir : path, optional
        Directory for clients' state, for runtimes whose processes end with a round.
    personal : collection of str
        Names of parameters that are trained but not sent: each client keeps and evaluates its own.

    Notes
    -----
    A client without data sends a zero update and ``num-examples`` 0. Every row is
    ``w_client - w_global``, both in the model's dtype, on every engine. Random draws of the model
    (dropout) and of the loss come from the client's stream. With example-level privacy, the model
    and the loss are first tested on made-up examples, and refused if they mix examples.

    Raises
    ------
    FedsimError
        If a setting is out of range or the model cannot be trained this way.
    """

    @user_traceback
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
        path: path_choice.PathName = "auto",
        kernel: path_choice.KernelName = "auto",
        matmul: Literal["float32", "tf32"] = "float32",
        block_size: int = 0,
        randomness: Randomness,
        device: torch.device | str = "cpu",
        privacy: ExamplePrivacy | None = None,
        max_grad_norm: float = 0.0,
        state: StateKind = "reset",
        state_dir: FilePath | None = None,
        personal: Collection[str] = (),
    ) -> None:
        self.device = trainer_checks.device_of(device)
        self.model = model.to(self.device)
        private = privacy is not None
        trainer_checks.check_model(self.model, private=private)
        if isinstance(data.x, NamedTensors):
            accept_named(self.model)
        self.algorithm = algorithm
        self.data = data.to(self.device)
        self.test = test
        trainer_checks.check_settings(algorithm, data, test, counts, max_grad_norm, private=private)
        self.workload = Workload.from_counts(
            LocalWork(batch_size, epochs, steps), self.data, counts
        )
        self.loss: Loss = CrossEntropy() if loss is None else loss
        metrics = {"accuracy": Accuracy()} if metrics is None else metrics
        self.metrics: dict[str, Metric] = {
            k: m if isinstance(m, Metric) else MeanOf(m) for k, m in metrics.items()
        }
        if privacy is not None and randomness.release is None:
            on_device = draws_on_device(self.device, randomness.entropy)
            randomness = privacy.keyed(
                randomness, algorithm, self.workload.work, self.loss, on_device=on_device
            )
        self.randomness = randomness
        self.privacy = privacy
        self.max_grad_norm = max_grad_norm
        self.personal = Personal.from_model(self.model, personal)
        trainer_checks.check_algorithm(algorithm, personal=bool(self.personal))
        self.client_state = PersistentState(
            state, algorithm, self.personal, data.population, state_dir
        )
        self.packing = self.personal.packing
        self.layout = self.personal.shared.layout
        self.payload = Payload.for_algorithm(self.personal.shared, algorithm)
        self.kernel = path_choice.resolve_kernel(kernel, self.device)
        self.matmul = matmul
        self.block_size = path_choice.max_block_clients(
            self.model, self.packing, self.device, block_size
        )
        self.rounds = self._local_rounds(path)
        self.trained, self.stepper = self.rounds.trained, self.rounds.stepper
        self.path = self.stepper.path
        evaluated = self.data if test is None else test.to(self.device)
        self.evaluation = Evaluation(
            self.trained, self.stepper, self.metrics, evaluated, self.client_state
        )

    def _local_rounds(self, path: path_choice.PathName) -> LocalRounds:
        model, data, algorithm, packing = self.model, self.data, self.algorithm, self.packing
        private, loss = self.privacy is not None, trainer_checks.loss_on(self.loss, self.device)
        statistics = trainer_checks.check_statistics(
            model, algorithm, self.personal.names, private=private
        )
        trained = path_choice.TrainedModel.inspect(
            model, packing, loss, data, self.kernel, statistics=bool(statistics), private=private
        )
        stepper = Stepper(
            path_choice.choose(path, trained, self.device),
            data,
            algorithm,
            packing,
            self.client_state.entries,
            self.max_grad_norm,
            positions_of(packing, statistics, self.device) if statistics else None,
            tf32=self.matmul == "tf32",
        )
        rounds = LocalRounds(
            trained,
            stepper,
            self.client_state,
            self.payload,
            self.workload,
            self.privacy,
            self.randomness.entropy,
        )
        self._capture(rounds)
        return rounds

    def _capture(self, rounds: LocalRounds) -> None:
        """Set up captured steps, where there are any."""
        captured = captured_steps(rounds.private or rounds.stepper, self.block_size)
        rounds.stepper.captured_step = captured
        if self.device.type == "cuda" and (captured is None or rounds.draws_one_by_one):
            _log.warning(
                "clients train one at a time on the GPU, and their steps are not captured: the "
                "model draws or keeps state of its own, or client.path asks for it"
            )
        self.whole_block = 1 if captured is None else self.block_size
        """Number of clients for which a step is computed in any case, however few there are."""

    def limit_memory(self, memory: int) -> None:
        """Make blocks smaller, until the steps of one are predicted to take at most so many bytes.

        Nothing changes for models that train one client at a time, or for batches of all of a
        client's examples, whose number is not known.
        """
        rounds, before = self.rounds, self.block_size
        if self.stepper.captured_step is None or not self.workload.work.batch_size:
            return
        free = memory - self.data.x.nbytes - self.data.y.nbytes
        most = min(before, max(1, self.population))
        fits = clients_within(free, self.stepper, rounds.private, most, rounds.largest_width)
        if fits < most:
            _log.warning(
                "client.block-size is %d: %d clients at once would take more than the %.1f GiB "
                "that are free for them on the GPU",
                fits, most, free / 2**30,
            )  # fmt: skip
            self.block_size = fits
            self._capture(rounds)

    @property
    def population(self) -> int:
        """Number of clients."""
        return self.data.population

    @property
    def draws_noise_in_steps(self) -> bool:
        """Whether noise on gradients is drawn on a GPU, where each step is made."""
        return self.rounds.private is not None and self.rounds.private.draws_in_step

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of the training metrics that clients report."""
        names = ["num-examples"]
        if self.rounds.reports_loss:
            names.append("loss")
        if self.client_state.kind != "reset":
            names.append("fresh-state")
        return (*names, *self.algorithm.report(self.algorithm.example_state(1)))

    def receive(self, config: Mapping[str, object]) -> None:
        """Read the entries of a round's config that are for clients.

        These are the round since which clients must keep their state, FedProx's mu, and the run's
        id.

        Raises
        ------
        FedsimError
            If the server sends a proximal coefficient, as Flower's FedProx does, to clients without
            a proximal term.
        """
        self.rounds.server_numbers = server_numbers(self.algorithm, config)
        self.client_state.store.retain_since(config.get(KEEP_SINCE))
        if isinstance(run := config.get(RUN), str):
            self.join(run)

    def key_by(self, release: str) -> None:
        """Key noise, and the draws that an event amplifies, by the run's release digest.

        The digest covers path and kernels, which are chosen when a trainer is made, so it is known
        only afterwards. Nothing has been drawn by then.
        """
        self.randomness = Randomness(self.randomness.seed, release)

    def join(self, run: str) -> None:
        """Set the run's id, by which its ledger lines and its clients' state are known."""
        self.client_state.store.use_run(run)
        if self.rounds.releases is not None:
            self.rounds.releases.run = run

    def costs(self, client_ids: Ints) -> Floats:
        """Local steps of each client, ``[n]``; 1 for a client that takes none."""
        return np.maximum(self.workload.steps(client_ids), 1.0)

    def state(self, client_ids: Ints | None = None, round: int | None = None) -> ClientStates:
        """State that these clients keep between rounds, at the start of ``round``."""
        return self.client_state.state(client_ids, round)

    def store_states(self, states: ClientStates, round: int) -> None:
        """Store state that another trainer's `state` returned, as of the end of ``round``."""
        self.client_state.store.save(states, round)

    def restore(self, states: ClientStates) -> None:
        """Replace all clients' state by what `state` returned."""
        self.client_state.store.restore(states)

    def on(self, path: path_choice.PathName, block_size: int = 0) -> Self:
        """A trainer of the same clients on another path, without their state."""
        return self._copy(path=path, block_size=block_size, state=self.client_state.kind)

    def copy_for(self, device: str) -> Self:
        """A trainer of the same clients on another device, with the same path and block size."""
        model, state = copy.deepcopy(self.model), self.client_state.kind
        copied = self._copy(model=model, path=self.path.name, device=device, state=state)
        return copied.without_ledger()  # the original records them (`charge`)

    def _copy(self, **changes: Any) -> Self:
        names = (
            "model",
            "algorithm",
            "data",
            "loss",
            "metrics",
            "test",
            "randomness",
            "device",
            "kernel",
            "matmul",
            "privacy",
            "max_grad_norm",
            "block_size",  # one for all devices of a run, not the rule's for each
        )
        settings = {name: getattr(self, name) for name in names} | vars(self.workload.work)
        settings |= {"counts": self.workload.counts, "personal": self.personal.names}
        copied = type(self)(**(settings | changes))
        if self.rounds.private is not None and copied.rounds.private is not None:
            # By the original's formula on every device, as the digest that keys noise says.
            copied.rounds.private.draws_in_step = self.rounds.private.draws_in_step
        return copied

    def initial(self) -> Tensor:
        """First vector sent to clients, ``[d]``: the model's parameters, then zero vectors."""
        parameters = self.layout.flatten(dict(self.model.named_parameters()))
        vectors = self.received_layout.d - self.layout.d
        return torch.cat([parameters, parameters.new_zeros(vectors)])

    @property
    def row_layout(self) -> Layout:
        """Layout of a row: the parameters that are sent, then the algorithm's named vectors."""
        return self.payload.layout

    @property
    def received_layout(self) -> Layout:
        """Layout of what clients are sent: the same parameters, then the vectors of `receives`."""
        return self.payload.received_layout

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Train these clients from ``vector [d]``, block by block."""
        sizes = (self.received_layout.d,)
        trainer_checks.check_call(vector, sizes, client_ids, round, self.population)
        vector = self._on_device(vector)
        received = self.payload.received(vector[None])
        sources = [self.randomness] * len(client_ids)
        for _, clients in self.rounds.blocks(client_ids, round, sources, self.block_size):
            result = self.rounds.fit_block(received, clients, {})
            rows = self.payload.rows(result.theta, result.sent, vector)
            block = Block.sent(clients.client_ids, rows, result.metrics)
            self.rounds.finish(result.carried, clients)
            # Else a generator would keep a block's parameters alive while its rows are used.
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
        """Train these clients, one batch width after another, and store the state that they keep.

        Parameters
        ----------
        vector : Tensor ``[d]`` or ``[n, d]``
            Start parameters, global or each client's own, then the named vectors of the server.
        client_ids : int64 ``[n]``
        round : int
        numbers : mapping of str to n floats, optional
            Values of the algorithm's numeric settings that differ between clients.
        randomness : sequence of n Randomness, optional
            Each client's own source of random draws; the trainer's by default.
        """
        if numbers and self.client_state.kind != "reset":
            raise FedsimError(
                "clients with their own numeric settings must have client.state = 'reset'."
            )
        sources = [self.randomness] * len(client_ids) if randomness is None else randomness
        vectors = self._on_device(vector).view(-1, self.received_layout.d)
        return self.rounds.fit(vectors, client_ids, round, sources, numbers or {})

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Loss and metrics of ``vector [d]`` on these clients' examples for evaluation."""
        sizes = (self.layout.d, self.received_layout.d)
        trainer_checks.check_call(vector, sizes, client_ids, round, self.population)
        vector = self._on_device(vector)[: self.layout.d]
        # A repeated evaluation of a round draws the same numbers.
        yield from self.evaluation.blocks(vector, client_ids, round, self.randomness.for_replay())

    @property
    def ledger(self) -> Ledger | None:
        """Ledger of the clients' releases, in memory unless `record_in` names another.

        None without example-level privacy, or where another process records them.
        """
        releases = self.rounds.releases
        return None if releases is None else releases.ledger

    def record_in(self, ledger: Ledger) -> None:
        """Record the releases of these clients' examples in a ledger of example level."""
        if self.rounds.releases is not None:
            self.rounds.releases.ledger = ledger

    def charge(
        self, client_ids: Ints, round: int, *, begins: bool = False, partly: bool = True
    ) -> Mapping[int, str]:
        """Record, as one ledger line, what these clients will release of their examples in a round.

        Parameters and result are those of `BlockTrainer.charge`; ``partly=False``: if the budget of
        some does not allow it, nobody is charged.
        """
        releases = self.rounds.releases
        if releases is None:
            return {}
        return releases.charge(round, client_ids.tolist(), begins=begins, partly=partly)

    def charge_rest(self, rounds_done: int, rounds: int) -> None:
        """Charge clients for the rest of so many planned rounds, which releases have ended."""
        if (releases := self.rounds.releases) is not None:
            releases.charge_rest(rounds_done, rounds)

    def without_ledger(self) -> Self:
        """This trainer, whose clients' releases another process records from now on."""
        self.rounds.releases = None
        return self

    def _on_device(self, vector: Tensor) -> Tensor:
        return vector.to(self.device, self.layout.dtype)
