"""Metrics of a model on many clients' data, in one call."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.process import thread_pool
from fedsim.randomness import Randomness
from fedsim.rows.block import Block
from fedsim.tasks import MeanOf, Metric
from fedsim.training import checks
from fedsim.training.batches import Floats, Ints
from fedsim.training.client_state import PersistentState
from fedsim.training.data import ClientData
from fedsim.training.own_state import OwnState
from fedsim.training.paths.choice import Path, TrainedModel
from fedsim.training.paths.func import FuncPath
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.program import Program
from fedsim.training.side_effects import EVALUATION, Seeds, exact, seeded
from fedsim.training.steps import Stepper
from fedsim.training.structure.reading import read

Bools = npt.NDArray[np.bool_]
WIDTH = 32  # examples in a chunk; a chunk belongs to one client
MOST_CHUNKS = 64  # chunks in one call
CLIENTS = 256  # clients in a block
CALL_BYTES = 2**26  # most bytes of the inputs and outputs of one call


@dataclass
class CallSize:
    """Number of chunks that go through a model at once: one, until an output's size is known."""

    chunks: int = 1

    def learn(self, *tensors: Tensor) -> None:
        """Set it from the inputs and outputs of a call, tensors with one row per chunk."""
        chunk_bytes = sum(tensor.nbytes // len(tensor) for tensor in tensors)
        self.chunks = max(1, min(MOST_CHUNKS, CALL_BYTES // max(chunk_bytes, 1)))


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
            theta, draws = self.client_state.evaluated(vector, ids), self.trained.draws.evaluation
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
            )
            yield Block.sent(ids, None, values)

    @cached_property
    def _metrics(self) -> Mapping[str, Metric]:
        """Loss and metrics, which carry nothing over from one client's examples to another's."""
        loss = checks.loss_on(self.trained.loss, torch.device("cpu"))
        metrics = {"loss": MeanOf(loss), **self.metrics}
        return {name: _restored_metric(metric) for name, metric in metrics.items()}

    @cached_property
    def _paths(self) -> tuple[Sequence[Path], bool]:
        """A path for each thread, and whether metrics must see one chunk at a time."""
        stepper, model, loss = self.stepper, self.trained.model, self.trained.loss
        structure, shapes = self.trained.reading.structure, stepper.data.empty(stepper.dtype)
        reading = read(model.eval(), loss, *shapes, declared=True)
        path = stepper.path
        # The trained path may run another graph than the model has in evaluation.
        if structure is None or reading.model is None or not structure.same(reading.model):
            path = PlainPath(model, stepper.packing, loss)
        functions = [m.function for m in self.metrics.values() if isinstance(m, MeanOf)]
        by_example = reading.loss is not None and all(map(reading.reads, functions))
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


def _restored_metric(metric: Metric) -> Metric:
    owner: Any = metric.function if isinstance(metric, MeanOf) else metric
    own_state = OwnState(nn.Identity(), owner, strict=False)
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
) -> dict[str, Floats]:
    """Metrics of packed parameters ``theta [1 or n, D]`` on the examples of each of ``n`` clients.

    Examples go through the model in chunks, each of one client, and metrics merge exactly, so that
    a client's results do not depend on the other clients. Calls are made in parallel, in one thread
    for each of the ``paths``, which share no module. ``seeds`` are given for a model that draws
    random numbers in evaluation; ``call_size`` is carried over from earlier evaluations. With
    ``by_chunk`` metrics see one chunk at a time. They must where the loss or a metric may look
    across the examples it is given: its value must not depend on how many chunks a call has.

    Returns
    -------
    dict of str to float64 ``[n]``
        ``num-examples`` and every metric: 0 for a client without data, NaN where it is not defined
        on a client's data.
    """
    sizes = np.array([len(examples) for examples in indices], dtype=np.int64)
    chunks = -(-sizes // WIDTH)
    padded = np.zeros((int(chunks.sum()), WIDTH), dtype=np.int64)
    is_example = np.zeros(padded.shape, dtype=np.bool_)
    # A client's chunks are consecutive rows, so that its examples are one run of them, flattened.
    for examples, start in zip(indices, np.cumsum(chunks) - chunks, strict=True):
        padded[start:].reshape(-1)[: len(examples)] = examples
        is_example[start:].reshape(-1)[: len(examples)] = True
    # Padding copies the first example of its chunk.
    padded = np.where(is_example, padded, padded[:, :1])
    owner = np.repeat(np.arange(len(sizes)), chunks)
    chunk_seeds = None if seeds is None else _by_chunk(seeds, chunks)
    states = [{name: metric.init() for name, metric in metrics.items()} for _ in indices]
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

    with exact(data.x.device), thread_pool(len(paths)) as pool:
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
                _update_metrics(
                    states, metrics, owners, groups, is_example[call], outputs.cpu(), targets.cpu()
                )
                call_size.learn(x, outputs)
            start = calls[-1].stop
    result = {"num-examples": sizes.astype(np.float64)}
    for name, metric in metrics.items():
        state_sizes = zip(states, sizes, strict=True)
        values = [metric.finish(state[name]) if size else 0.0 for state, size in state_sizes]
        result[name] = np.array(values, dtype=np.float64)
    return result


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
