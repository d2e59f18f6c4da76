"""Each client's amount of work in a round, and the examples of each of its steps.

The physical width of a client's batches depends only on the batch size and on the client's own
number of examples, never on the other clients of its block; so neither do its bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.array_types import Floats, Ints
from fedsim.errors import FedsimError
from fedsim.privacy.laws.poisson import draw_poisson
from fedsim.privacy.laws.shuffle import draw_passes
from fedsim.privacy.local_work import LocalWork
from fedsim.randomness import Draws, Randomness, Stream
from fedsim.training.data import ClientData

SAMPLED_CLIENTS = 1000
"""Number of clients from which the work of all is estimated."""

PRODUCTS_PER_GRADIENT = 3
"""Products per gradient: for outputs, gradients of the inputs and gradients of the weights."""

DRAWN_TOGETHER, DRAWN_ENTRIES = 64, 2**16
"""Largest number of clients in several blocks that draw their batches together (more gain nothing),
and of the entries of these batches (a MiB)."""


@dataclass
class Workload:
    """Local work of a trainer's clients, the same for all or each client's own.

    Attributes
    ----------
    work : LocalWork
    data : ClientData
    counts : int64 ``[population]`` or None
        Each client's own number of epochs or steps, replacing the work's.
    """

    work: LocalWork
    data: ClientData
    counts: Ints | None = None

    @classmethod
    def from_counts(
        cls, work: LocalWork, data: ClientData, counts: Sequence[int] | Ints | None
    ) -> Workload:
        """Build it from each client's own number, or with the same work for all.

        Raises
        ------
        FedsimError
            If there is not one number, at least 1, for each client.
        """
        if counts is None:
            return cls(work, data)
        try:
            numbers = np.asarray(counts)
        except ValueError:  # rows of different lengths
            numbers = np.asarray(counts, dtype=object)
        is_whole = numbers.shape == (data.population,) and numbers.dtype.kind in "iu"
        if not is_whole or int(numbers.min()) < 1:
            has_least = numbers.size and numbers.dtype.kind in "iuf"
            least = f", the least of them {numbers.min()}" if has_least else ""
            raise FedsimError(
                f"client.work has {numbers.dtype} values of shape {numbers.shape}{least}; it must "
                f"have one whole number, at least 1, for each of the {data.population} clients."
            )
        return cls(work, data, numbers.astype(np.int64))

    def steps(self, client_ids: Ints) -> Floats:
        """Gradient evaluations of each client in a round, ``[n]``."""
        return self._per_client(client_ids, LocalWork.steps_of)

    def examples(self, client_ids: Ints) -> Floats:
        """Number of examples that each client processes in a round, ``[n]``."""
        return self._per_client(client_ids, LocalWork.examples_of)

    def _per_client(self, client_ids: Ints, number: Callable[[LocalWork, int], int]) -> Floats:
        """Values ``[n]`` of ``number``, given each client's work and number of examples."""
        ids, counts = client_ids.tolist(), self.counts
        works = [self.work if counts is None else self.work.counted(int(counts[k])) for k in ids]
        sizes = map(self.data.size, ids)
        return np.array([*map(number, works, sizes)], dtype=np.float64)


@dataclass(frozen=True)
class Batches:
    """Batches of a block: clients with data and one physical width ``B``, most steps first.

    Attributes
    ----------
    index : int64 ``[n, S, B]``
        Indices of examples. Padding repeats the batch's first example with weight 0: its gradient
        is finite if the original's is, and then adds nothing.
    weight : float64 ``[n, S, B]``
        ``1/b`` on the ``b`` real examples of a step, 0 on padding.
    steps : int64 ``[n]``
        Steps of each client, descending; entries of its rows beyond them are undefined.
    """

    index: Ints
    weight: Floats
    steps: Ints

    def select(self, clients: slice) -> Batches:
        """Batches of some of these clients."""
        steps = self.steps[clients]
        return Batches(self.index[clients, : steps[0]], self.weight[clients, : steps[0]], steps)


def draw_groups(widths: Ints, steps: Floats, block_size: int, max_clients: int) -> Iterator[Ints]:
    """Yield the positions of ``n`` clients in groups that draw together, each of one batch width.

    Clients with most steps come first. A group is one block of ``block_size`` clients, or several
    small blocks: to draw for one client at a time takes ten times as long.

    Parameters
    ----------
    widths, steps : ``[n]``
        Batch width and steps of each client; 0 for clients without data, which are in groups of
        their own.
    block_size : int
    max_clients : int
        Largest number of clients in a group of several blocks, which also has at most
        `DRAWN_ENTRIES` batch entries.
    """
    order = np.lexsort((-steps, widths))
    for group in np.split(order, np.flatnonzero(np.diff(widths[order])) + 1):
        while len(group):
            entries = max(1, int(widths[group[0]] * steps[group[0]]))  # of the largest client
            count = min(max_clients, DRAWN_ENTRIES // entries) // block_size * block_size
            count = max(block_size, count)
            yield group[:count]
            group = group[count:]


def batch_width(batch_size: int, size: int) -> int:
    """Physical batch width of a client with ``size`` examples: at least 2.

    The batch size where the client can (nearly) fill it, else the next power of two above
    its size, so that clients of similar size share a block.
    """
    batch = min(batch_size or size, size)
    if 2 * size > batch_size > 0:
        return max(2, batch_size)
    return max(2, 1 << (batch - 1).bit_length())


def plan_batches(
    work: LocalWork,
    indices: Sequence[Ints],
    client_ids: Ints,
    randomness: Sequence[Randomness],
    round: int,
    counts: Ints | None = None,
) -> Batches:
    """Draw the batches of a block's clients in shuffled passes.

    Parameters
    ----------
    work : LocalWork
    indices : sequence of int64 arrays
        Indices of the examples of each of these clients (not of the whole population). All have
        one `batch_width`, and those with most steps come first.
    client_ids : int64 ``[n]``
    randomness : sequence of Randomness
        One for each of these clients (they differ between the runs of a sweep).
    round : int
    counts : int64 ``[n]``, optional
        Epochs or steps of each of these clients, replacing the work's.
    """
    stream = Stream()
    works = [work] * len(indices) if counts is None else [work.counted(int(c)) for c in counts]
    sizes = np.array([len(examples) for examples in indices])
    steps = _steps(works, indices)
    shape = (len(indices), int(steps[0]), batch_width(work.batch_size, len(indices[0])))
    index, weight = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    # Clients with the same (size, steps), for each pair a different number, are drawn together.
    pair_numbers = sizes * (steps[0] + 1) + steps
    for number in np.unique(pair_numbers):
        rows = np.flatnonzero(pair_numbers == number)
        examples = np.stack([indices[i] for i in rows.tolist()])
        draws = [
            Draws(randomness[i], "example", False, int(client_ids[i]), stream)
            for i in rows.tolist()
        ]
        group_work, size = works[rows[0]], examples.shape[1]
        sampler = group_work.passes(size)
        number_of_steps = group_work.steps_of(size)
        orders = draw_passes(sampler, draws, round, -(-number_of_steps // sampler.steps))
        passes = np.take_along_axis(examples[:, None], orders, axis=2)
        index[rows] = examples[:, :1, None]
        _fill(index, weight, rows, passes, group_work.batch_of(size), number_of_steps)
    return Batches(index, weight, steps)


def _steps(works: Sequence[LocalWork], indices: Sequence[Ints]) -> Ints:
    steps = [work.steps_of(len(examples)) for work, examples in zip(works, indices, strict=True)]
    return np.array(steps, dtype=np.int64)


def _fill(index: Ints, weight: Floats, rows: Ints, passes: Ints, batch: int, steps: int) -> None:
    """Cut shuffled ``passes [k, P, N]`` of clients into batches, in these rows of ``[n, S, B]``.

    One pass at a time, for all ``k`` clients at once. A pass ends with a short batch if ``batch``
    does not divide N, so that batches never span two passes.
    """
    full, short = divmod(passes.shape[2], batch)
    for number, first in enumerate(range(0, steps, full + (short > 0))):
        shuffled = passes[:, number]
        complete = min(full, steps - first)
        batches = shuffled[:, : complete * batch].reshape(-1, complete, batch)
        # The first example everywhere, then the batch over it: what remains is padding.
        index[rows, first : first + complete] = batches[:, :, :1]
        index[rows, first : first + complete, :batch] = batches
        weight[rows, first : first + complete, :batch] = 1.0 / batch
        if short and first + full < steps:
            index[rows, first + full] = shuffled[:, full * batch : full * batch + 1]
            index[rows, first + full, :short] = shuffled[:, full * batch :]
            weight[rows, first + full, :short] = 1.0 / short


MAX_CHUNK = 64


def chunk_width(batch_size: int, max_chunk: int = MAX_CHUNK) -> int:
    """Rule for the width of a Poisson batch's chunks, which go through a model one by one.

    Wide enough that a small batch seldom needs two, narrow enough that a large one wastes
    little on padding.
    """
    return max(2, min(max_chunk, 1 << (3 * batch_size // 2 - 1).bit_length()))


def plan_poisson(
    work: LocalWork,
    indices: Sequence[Ints],
    client_ids: Ints,
    randomness: Sequence[Randomness],
    round: int,
    width: int,
    *,
    amplified: bool = True,
) -> Batches:
    """Draw Poisson batches: each example is in a batch with probability ``|B| / N``.

    Parameters as in `plan_batches`, and: ``width``, the number of examples that go through a model
    at once; ``amplified``, whether the draw amplifies a private event. The batches have a chunk
    axis: ``index`` and ``weight`` are ``[n, S, chunks, B]``, with as many chunks as the largest
    draw needs; a weight is 1 for every example drawn.
    """
    stream = Stream()
    steps = _steps([work] * len(indices), indices)
    samplers = [work.poisson(len(examples)) for examples in indices]
    draws = [
        Draws(source, "example", amplified, client, stream)
        for source, client in zip(randomness, client_ids.tolist(), strict=True)
    ]
    ids, included = draw_poisson(samplers, draws, round, [range(count) for count in steps])
    chunks = max(1, -(-int(included.sum(axis=2).max()) // width))
    shape = (len(indices), int(steps[0]), chunks * width)
    index, weight = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    # Rows may be wider than that; as drawn ids come first in a row, none is cut off.
    ids, included = ids[:, :, : chunks * width], included[:, :, : chunks * width]
    filled = slice(ids.shape[2])
    for row, examples in enumerate(indices):
        # If a step draws any example, the first id of its row is one: padding repeats it.
        index[row] = examples[ids[row, :, :1]]
        index[row, :, filled] = np.where(included[row], examples[ids[row]], index[row, :, :1])
    weight[:, :, filled] = included
    in_chunks = (*shape[:2], chunks, width)
    return Batches(index.reshape(in_chunks), weight.reshape(in_chunks), steps)


def local_multiplications(model: nn.Module, workload: Workload, dtype: torch.dtype) -> float:
    """Average number of multiplications of a client's local work, over the first clients."""
    data, work = workload.data, workload.work
    sizes = [data.size(client) for client in range(min(data.population, SAMPLED_CLIENTS))]
    example = data.one_example(protected=True)  # the number of processes must not depend on data
    if example is None or not any(sizes):
        return 0.0
    gradients = sum(work.steps_of(n) * min(work.batch_size or n, n) for n in sizes) / len(sizes)
    index = torch.zeros(2, dtype=torch.int64, device=example.x.device)
    return gradients * multiplications(model, example.inputs(index, dtype))


@torch.no_grad()
def multiplications(model: nn.Module, sample: Tensor) -> float:
    """Approximate number of multiplications for the gradient of one example.

    Each module's own parameters count once for every output position: a linear layer's once per
    example (or token), a convolution's once per pixel.

    Parameters
    ----------
    model : nn.Module
        Not changed.
    sample : Tensor ``[B, ...]``
        Inputs of some examples.
    """
    total = 0.0

    def count(module: nn.Module, _: Any, outputs: Any) -> None:
        nonlocal total
        tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        parameters = sum(p.numel() for p in module.parameters(recurse=False))
        # Rows of an embedding are looked up, not multiplied.
        if parameters and torch.is_tensor(tensor) and not isinstance(module, nn.Embedding):
            axis = 1 if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else -1
            total += parameters * tensor.numel() / max(1, tensor.shape[axis])

    watched = copy.deepcopy(model).eval()
    for module in watched.modules():
        module.register_forward_hook(count)
    watched(sample)
    return PRODUCTS_PER_GRADIENT * total / len(sample)
