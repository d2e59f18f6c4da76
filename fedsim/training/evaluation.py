"""Loss and metrics of one model on many clients' data, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.tasks.losses import Loss, Metric
from fedsim.training.data import ClientData
from fedsim.training.hidden_draws import EVALUATION, Seeds
from fedsim.training.local_step import exact
from fedsim.training.paths.choice import Path
from fedsim.training.paths.plain import PlainPath

__all__ = ["evaluate_clients"]

Floats = npt.NDArray[np.float64]
WIDTH = 32  # examples in a chunk; a chunk belongs to one client
CHUNKS = 64  # chunks in one call


@torch.no_grad()
def evaluate_clients(
    path: Path,
    theta: Tensor,
    data: ClientData,
    indices: Sequence[npt.NDArray[np.int64]],
    loss: Loss,
    metrics: Mapping[str, Metric],
    seeds: Seeds | None = None,
) -> dict[str, Floats]:
    """Mean loss and metrics of packed parameters ``theta [1, D]`` on the examples of each client.

    Examples go through the model in chunks of one client's own, so that what a client
    reports does not depend on who else is asked. ``seeds`` are those of a model that draws even
    when it is evaluated.

    Returns
    -------
    dict of str to float64 ``[n]``
        ``num-examples``, ``loss`` and every metric; 0 for a client without data.
    """
    sizes = np.array([len(own) for own in indices], dtype=np.int64)
    chunks = -(-sizes // WIDTH)
    padded = np.zeros((int(chunks.sum()), WIDTH), dtype=np.int64)
    real = np.zeros(padded.shape, dtype=np.bool_)
    for own, start in zip(indices, np.cumsum(chunks) - chunks, strict=True):
        padded[start:].reshape(-1)[: len(own)] = own
        real[start:].reshape(-1)[: len(own)] = True
    functions = {"loss": loss, **metrics}
    drawn = None if seeds is None else _by_chunk(seeds, chunks)
    # A GPU is sent all indices and asked for all values once, not batch by batch.
    all_indices = torch.from_numpy(padded).to(data.x.device)
    found = [theta.new_zeros(len(functions), 0, WIDTH, dtype=torch.float64)]
    with exact(data.x.device):
        for start in range(0, len(padded), CHUNKS):
            index = all_indices[start : start + CHUNKS]
            points, x = theta.expand(len(index), -1), data.inputs(index, theta.dtype)
            if drawn is None:
                outputs = path.outputs(points, x)
            else:
                assert isinstance(path, PlainPath)
                outputs = path.outputs(points, x, drawn[start : start + len(index)])
            flat = outputs.flatten(0, 1), data.targets(index).flatten(0, 1)
            columns = [
                function(*flat).double().view(index.shape) for function in functions.values()
            ]
            found.append(torch.stack(columns))
    values = torch.cat(found, dim=1).cpu().numpy()
    owner = np.repeat(np.arange(len(sizes)), chunks)
    result = {"num-examples": sizes.astype(np.float64)}
    whose = np.repeat(owner, WIDTH)[real.reshape(-1)]
    for name, column in zip(functions, values, strict=True):
        # `bincount` adds in order: a client's sum is its own.
        total = np.bincount(whose, weights=column[real], minlength=len(sizes))
        result[name] = total / np.maximum(sizes, 1)
    return result


def _by_chunk(seeds: Seeds, chunks: npt.NDArray[np.int64]) -> list[int]:
    """A seed for each chunk, client by client."""
    drawn = seeds.at(EVALUATION, len(chunks), int(chunks.max(initial=1)))
    return [seed for own, count in zip(drawn.tolist(), chunks, strict=True) for seed in own[:count]]
