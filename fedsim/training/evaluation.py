"""Metrics of a model on many clients' data, in one call."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.array_types import Bools, Floats, Ints
from fedsim.errors import FedsimError
from fedsim.process import memory, thread_pool
from fedsim.randomness import Randomness
from fedsim.rows.block import Block
from fedsim.tasks import Loss, MeanOf, Metric
from fedsim.tasks.losses import is_fedsims_own
from fedsim.training import trainer_checks
from fedsim.training.client_state import PersistentState
from fedsim.training.data import ClientData
from fedsim.training.own_state import OwnState
from fedsim.training.paths.func import FuncPath
from fedsim.training.paths.path_choice import Path, TrainedModel
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.program import Program
from fedsim.training.side_effects import EVALUATION, Seeds, reproducible_arithmetic, seeded
from fedsim.training.steps import Stepper
from fedsim.training.structure.reading import Reading, read

WIDTH = 32  # examples in a chunk; a chunk belongs to one client
MAX_CHUNKS = 64  # chunks in one call
CLIENTS = 256  # clients in a block
CALL_BYTES = 2**26  # most bytes of the inputs and outputs of one call


@dataclass
class CallSize:
    """Number of chunks that go through a model at once: one, until an output's size is known."""

    chunks: int = 1

    def learn(self, *tensors: Tensor) -> None:
        """Set it from the inputs and outputs of a call, tensors with one row per chunk."""
        chunk_bytes = sum(tensor.nbytes // len(tensor) for tensor in tensors)
        self.chunks = max(1, min(MAX_CHUNKS, CALL_BYTES // max(chunk_bytes, 1)))


@dataclass
class Evaluation:
    """Evaluates each client's model on the client's own examples.

    Parameters
    ----------
    trained : TrainedModel
    stepper : Stepper
    metrics : mapping of name to Metric
    data : ClientData
        Test examples, or the training examples if there are none.
    client_state : PersistentState

    Attributes
    ----------
    threads : int
        Most threads that call the model at once, if its graph was read: state that a user's own
        code may keep would be shared by them. Results do not depend on the number of threads.
    """

    trained: TrainedModel
    stepper: Stepper
    metrics: Mapping[str, Metric]
    data: ClientData
    client_state: PersistentState
    threads: int = field(default=1, init=False)
    _call_size: CallSize = field(default_factory=CallSize, init=False)

    def blocks(
        self, vector: Tensor, client_ids: Ints, round: int, randomness: Randomness
    ) -> Iterator[Block]:
        """Loss and metrics of ``vector [d]`` for these clients, block by block."""
        for first in range(0, len(client_ids), CLIENTS):
            ids = client_ids[first : first + CLIENTS]
            self.data.require_usable(ids.tolist())
            theta, draws = (
                self.client_state.evaluation_parameters(vector, ids),
                self.trained.draws.evaluation,
            )
            paths, by_chunk = self._paths
            self.trained.model.eval()
            values = evaluate_clients(
                paths,
                theta,
                self.data,
                [self.data.indices[i] for i in ids],
                self._metrics,
                Seeds([randomness] * len(ids), ids, round) if draws else None,
                self._call_size,
                by_chunk=by_chunk,
                across_examples=self._across_examples,
            )
            yield Block.sent(ids, None, values)

    @cached_property
    def _metrics(self) -> Mapping[str, Metric]:
        """Loss and metrics, which carry nothing over from one client's examples to another's."""
        loss = trainer_checks.loss_on(self.trained.loss, torch.device("cpu"))
        metrics = {"loss": MeanOf(loss), **self.metrics}
        return {name: _restored_metric(metric) for name, metric in metrics.items()}

    @cached_property
    def _reading(self) -> Reading:
        """What is read of the model as it evaluates, and of the loss."""
        shapes = self.stepper.data.empty(self.stepper.dtype)
        model, loss = self.trained.model.eval(), self.trained.loss
        with _own_state(loss).restored():
            return read(model, loss, *shapes, declared=True)

    @cached_property
    def _across_examples(self) -> frozenset[str]:
        """Loss and metrics that may look across examples: no mean of their values on parts."""
        functions = {k: m.function for k, m in self.metrics.items() if isinstance(m, MeanOf)}
        functions = {"loss": self.trained.loss, **functions}
        return frozenset(
            name for name, function in functions.items() if self._may_look_across(function)
        )

    def _may_look_across(self, function: Loss) -> bool:
        declared = getattr(function, "across_batch", None)
        if declared is not None:
            return bool(declared)
        return not (is_fedsims_own(function) or self._reads(function))

    def _reads(self, function: Loss) -> bool:
        with _own_state(function).restored():  # to be read it is called
            return self._reading.reads(function)

    @cached_property
    def _paths(self) -> tuple[Sequence[Path], bool]:
        """A path for each thread, and whether metrics must see one chunk at a time."""
        stepper, model, loss = self.stepper, self.trained.model, self.trained.loss
        structure, reading, path = self.trained.reading.structure, self._reading, stepper.path
        # The trained path may run another graph than the model has in evaluation.
        if structure is None or reading.model is None or not structure.same(reading.model):
            path = PlainPath(model, stepper.packing, loss)
        functions = [m.function for m in self.metrics.values() if isinstance(m, MeanOf)]
        by_example = reading.loss is not None and all(map(self._reads, functions))
        if (
            not isinstance(path, Program | FuncPath)
            or self.trained.draws.evaluation
            or self.data.x.is_cuda
        ):
            return [path], not by_example
        # For as long as it lasts, a call puts a client's parameters into the path's modules: each
        # thread needs modules of its own. The tensors in them are shared.
        tensors = [*path.model.parameters(), *path.model.buffers()]
        copies = [
            replace(path, model=copy.deepcopy(path.model, {id(t): t for t in tensors}))
            for _ in range(1, min(self.threads, -(-len(self.data.x) // WIDTH)))
        ]
        return [path, *copies], not by_example


@dataclass(frozen=True)
class _RestoredMetric(Metric):
    """A user's metric, of which each call starts from the same attributes and random numbers."""

    metric: Metric
    own_state: OwnState

    def init(self) -> Any:
        return self.metric.init()

    def update(self, state: Any, outputs: Tensor, targets: Tensor) -> Any:
        with seeded(0, outputs.device), self.own_state.restored():
            return self.metric.update(state, outputs, targets)

    def merge(self, state: Any, other: Any) -> Any:
        return self.metric.merge(state, other)

    def finish(self, state: Any) -> float:
        return self.metric.finish(state)


def _own_state(owner: Any) -> OwnState:
    return OwnState(nn.Identity(), owner, strict=False)


def _restored_metric(metric: Metric) -> Metric:
    own_state = _own_state(metric.function if isinstance(metric, MeanOf) else metric)
    return metric if own_state.stateless else _RestoredMetric(metric, own_state)


@torch.no_grad()
def evaluate_clients(
    paths: Sequence[Path],
    theta: Tensor,
    data: ClientData,
    indices: Sequence[npt.NDArray[np.int64]],
    metrics: Mapping[str, Metric],
    seeds: Seeds | None = None,
    call_size: CallSize | None = None,
    *,
    by_chunk: bool = False,
    across_examples: Collection[str] = (),
) -> dict[str, Floats]:
    """Metrics of packed parameters ``theta [1 or n, D]`` on the examples of each of ``n`` clients.

    Examples go through the model in chunks, each of one client, and metrics merge exactly, so that
    a client's results do not depend on the other clients. Calls are made in parallel, in one thread
    for each of the ``paths``, which share no module. ``seeds`` are given for a model that draws
    random numbers in evaluation; ``call_size`` is carried over from earlier evaluations. With
    ``by_chunk`` metrics see one chunk at a time, so that no rounding depends on how many chunks a
    call has. Those that are named in ``across_examples`` may look across the examples they are
    given: they see all of a client's in one update.

    Returns
    -------
    dict of str to float64 ``[n]``
        ``num-examples`` and every metric: 0 for a client without data, NaN where it is not defined
        on a client's data.

    Raises
    ------
    FedsimError
        If what must be computed ``across_examples`` does not fit in memory.
    """
    sizes = np.array([len(examples) for examples in indices], dtype=np.int64)
    chunks = -(-sizes // WIDTH)
    padded, is_example = _in_chunks(indices, chunks)
    owner = np.repeat(np.arange(len(sizes)), chunks)
    chunk_seeds = None if seeds is None else _by_chunk(seeds, chunks)
    states = [{name: metric.init() for name, metric in metrics.items()} for _ in indices]
    whole = WholeSets({name: metrics[name] for name in across_examples}, sizes)
    by_part = {name: metric for name, metric in metrics.items() if name not in across_examples}
    # A GPU is sent all indices at once, not batch by batch.
    all_indices = torch.from_numpy(padded).to(data.x.device)
    start, call_size = 0, call_size or CallSize()

    @torch.no_grad()  # which a thread does not inherit
    def outputs_of(path: Path, call: slice) -> tuple[Tensor, Tensor, Tensor]:
        x, owners = data.inputs(all_indices[call], theta.dtype), torch.from_numpy(owner[call])
        # One row for all clients is expanded, not copied for each chunk.
        points = theta.expand(len(x), -1) if len(theta) == 1 else theta[owners.to(theta.device)]
        if isinstance(path, PlainPath):
            counts = is_example[call].sum(axis=1).tolist()
            outputs = path.outputs(
                points, x, counts, None if chunk_seeds is None else chunk_seeds[call]
            )
        else:
            outputs = path.outputs(points, x)
        return x, outputs, data.targets(all_indices[call], theta.dtype)

    with reproducible_arithmetic(data.x.device), thread_pool(len(paths)) as pool:
        while start < len(padded):
            chunks_left = len(padded) - start
            # Calls of one size for all threads; what fits into one call is not split.
            threads = min(len(paths), -(-chunks_left // call_size.chunks))
            calls_per_thread = -(-chunks_left // (threads * call_size.chunks))
            size = -(-chunks_left // (threads * calls_per_thread))
            starts = range(start, min(start + size * threads, len(padded)), size)
            calls = [slice(first, first + size) for first in starts]
            results = (map if threads == 1 else pool.map)(outputs_of, paths, calls)
            for call, (x, outputs, targets) in zip(calls, results, strict=True):
                owners = owner[call]
                groups = np.arange(len(owners)) if by_chunk else owners
                results_on_host = outputs.cpu(), targets.cpu()
                _update_metrics(states, by_part, owners, groups, is_example[call], *results_on_host)
                whole.update(states, owners, is_example[call], *results_on_host)
                call_size.learn(x, outputs)
            start = calls[-1].stop
    result = {"num-examples": sizes.astype(np.float64)}
    for name, metric in metrics.items():
        state_sizes = zip(states, sizes, strict=True)
        values = [metric.finish(state[name]) if size else 0.0 for state, size in state_sizes]
        result[name] = np.array(values, dtype=np.float64)
    return result


def _in_chunks(indices: Sequence[Ints], chunks: Ints) -> tuple[Ints, Bools]:
    """Indices of each client's examples in chunks ``[c, WIDTH]``, and which are no padding."""
    padded = np.zeros((int(chunks.sum()), WIDTH), dtype=np.int64)
    is_example = np.zeros(padded.shape, dtype=np.bool_)
    # A client's chunks are consecutive rows, so that its examples are one run of them, flattened.
    for examples, start in zip(indices, np.cumsum(chunks) - chunks, strict=True):
        padded[start:].reshape(-1)[: len(examples)] = examples
        is_example[start:].reshape(-1)[: len(examples)] = True
    # Padding copies the first example of its chunk.
    return np.where(is_example, padded, padded[:, :1]), is_example


class WholeSets:
    """Outputs and targets of one client after another, until its metrics can see all at once.

    Parameters
    ----------
    metrics : mapping of name to Metric
    sizes : int64 ``[n]``
        Number of each client's examples.
    """

    def __init__(self, metrics: Mapping[str, Metric], sizes: Ints) -> None:
        self.metrics, self.sizes = metrics, sizes
        self._tensors: list[Tensor] = []
        self._count = 0

    def update(
        self,
        states: list[dict[str, Any]],
        owner: npt.NDArray[np.int64],
        is_example: Bools,
        outputs: Tensor,
        targets: Tensor,
    ) -> None:
        """Add chunks ``[c, WIDTH, ...]``, client by client, and update metrics that are complete.

        Raises
        ------
        FedsimError
            If a client's outputs, or a metric of them, do not fit in memory.
        """
        if not self.metrics:
            return
        for client in np.unique(owner).tolist():
            rows = owner == client
            keep = torch.from_numpy(is_example[rows])
            own = [tensor[torch.from_numpy(rows)][keep] for tensor in (outputs, targets)]
            with self._in_memory(int(self.sizes[client])):
                self._add(int(self.sizes[client]), own)
                if self._count == self.sizes[client]:
                    for name, metric in self.metrics.items():
                        states[client][name] = metric.update(states[client][name], *self._tensors)
                    self._tensors, self._count = [], 0

    def _add(self, size: int, parts: Sequence[Tensor]) -> None:
        if not self._tensors:
            needed = size * sum(part.nbytes // len(part) for part in parts)
            if needed > memory():
                raise MemoryError(f"{needed} bytes")
            self._tensors = [part.new_empty(size, *part.shape[1:]) for part in parts]
        stop = self._count + len(parts[0])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor[self._count : stop] = part
        self._count = stop

    @contextmanager
    def _in_memory(self, size: int) -> Iterator[None]:
        """Turn what is raised where memory is short into a sentence that says what to do."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            names = " and ".join(f"'{name}'" for name in self.metrics)
            raise FedsimError(
                f"{names} may look across examples, and all {size} outputs at once do not fit in "
                "memory; evaluate fewer examples (data.test), write it as a fedsim.tasks.Metric, "
                "whose parts merge, or, if it gives each example a value of its own, set its "
                "attribute across_batch = False."
            ) from error


def _update_metrics(
    states: list[dict[str, Any]],
    metrics: Mapping[str, Metric],
    owner: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
    is_example: Bools,
    outputs: Tensor,
    targets: Tensor,
) -> None:
    """Update each client's metrics with its chunks ``[c, WIDTH, ...]``, without the padding.

    All chunks of a group, which belong to one client, make one update.
    """
    firsts = np.flatnonzero(np.diff(groups, prepend=-1))
    for first, end in zip(firsts, [*firsts[1:], len(owner)], strict=True):
        keep = torch.from_numpy(is_example[first:end])
        state, batch = states[owner[first]], (outputs[first:end][keep], targets[first:end][keep])
        for name, metric in metrics.items():
            state[name] = metric.update(state[name], *batch)


def _by_chunk(seeds: Seeds, chunks: npt.NDArray[np.int64]) -> list[int]:
    """A seed for each chunk, client by client."""
    all_seeds = seeds.of_step(EVALUATION, len(chunks), int(chunks.max(initial=1)))
    of_clients: list[int] = all_seeds[np.arange(all_seeds.shape[1]) < chunks[:, None]].tolist()
    return of_clients
