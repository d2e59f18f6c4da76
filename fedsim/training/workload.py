"""How much each client does in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.errors import FedsimError
from fedsim.privacy.plan import LocalWork
from fedsim.training.batches import Ints
from fedsim.training.data import ClientData
from fedsim.training.side_effects import scratch_copy

Floats = npt.NDArray[np.float64]


@dataclass
class Workload:
    """The work of a trainer's clients, the same for all of them or each its own.

    Attributes
    ----------
    work : LocalWork
    data : ClientData
    counts : int64 ``[population]`` or None
        Each client's own number of epochs, or of steps, in the place of the work's.
    """

    work: LocalWork
    data: ClientData
    counts: Ints | None = None

    @classmethod
    def of(cls, work: LocalWork, data: ClientData, counts: Sequence[int] | Ints | None) -> Workload:
        """Of clients whose numbers are given, or of all alike.

        Raises
        ------
        FedsimError
            If there is not one number, at least 1, for each client.
        """
        if counts is None:
            return cls(work, data)
        if len(counts) != data.population or min(counts) < 1:
            raise FedsimError(
                f"client.work has {len(counts)} numbers, the least of them {min(counts)}; it must "
                f"have one, at least 1, for each of the {data.population} clients."
            )
        return cls(work, data, np.asarray(counts, dtype=np.int64))

    def counts_of(self, client_ids: Ints) -> Ints | None:
        """These clients' own numbers, ``[n]``."""
        return None if self.counts is None else self.counts[client_ids]

    def steps(self, client_ids: Ints) -> Floats:
        """Gradient evaluations of each client in a round, ``[n]``."""
        steps = [work.steps_of(size) for work, size in self._each_of(client_ids)]
        return np.array(steps, dtype=np.float64)

    def examples(self, client_ids: Ints) -> Floats:
        """How many examples each client goes through in a round, ``[n]``."""
        examples = [work.examples_of(size) for work, size in self._each_of(client_ids)]
        return np.array(examples, dtype=np.float64)

    def _each_of(self, client_ids: Ints) -> Iterator[tuple[LocalWork, int]]:
        """Each client's work, and how many examples it has."""
        for client in client_ids.tolist():
            work = self.work
            if self.counts is not None:
                work = work.counted(int(self.counts[client]))
            yield work, self.data.size(client)


CLIENTS = 1000
"""So many clients stand for all of them."""

PASSES = 3
"""The outputs, the gradients of the inputs and those of the weights."""


def local_multiplications(model: nn.Module, workload: Workload, dtype: torch.dtype) -> float:
    """Multiplications of a client's local work, on average over the first clients."""
    data, work = workload.data, workload.work
    sizes = [data.size(client) for client in range(min(data.population, CLIENTS))]
    examples = data.first(2)
    if examples is None or not any(sizes):
        return 0.0
    gradients = sum(work.steps_of(n) * min(work.batch_size or n, n) for n in sizes) / len(sizes)
    return gradients * multiplications(model, data.inputs(examples, dtype))


@torch.no_grad()
def multiplications(model: nn.Module, sample: Tensor) -> float:
    """About how many multiplications one gradient of one example takes.

    Each module's own parameters count once for every place that it puts out: a linear layer's
    once an example (or token), a convolution's once a pixel.

    Parameters
    ----------
    model : nn.Module
        Left as it is.
    sample : Tensor ``[B, ...]``
        Examples.
    """
    counted = 0.0

    def count(module: nn.Module, _: Any, outputs: Any) -> None:
        nonlocal counted
        tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        parameters = sum(p.numel() for p in module.parameters(recurse=False))
        # Rows of an embedding are looked up, not multiplied.
        if parameters and torch.is_tensor(tensor) and not isinstance(module, nn.Embedding):
            axis = 1 if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else -1
            counted += parameters * tensor.numel() / max(1, tensor.shape[axis])

    watched = scratch_copy(model).eval()
    for module in watched.modules():
        module.register_forward_hook(count)
    watched(sample)
    return PASSES * counted / len(sample)
