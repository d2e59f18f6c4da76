"""Frozen layers at the front of a model (its stem): computed once for each example.

Their outputs are the same in every round, so that the layers behind a frozen stem (pre-trained
convolutions, say) are trained on the stem's outputs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.rows.packing import channels_last, takes_channels_last
from fedsim.training.data import ClientData
from fedsim.training.side_effects import exact

MOST_BYTES = 2**30
"""Most memory for the outputs of all examples; beyond it they are computed batch by batch."""


_LATEST: dict[bytes, dict[bytes, Tensor]] = {}
"""Cache of the outputs of the stem that was used last: by its digest, then by examples' digests.

The runs of a sweep differ in the layers behind the stem and in how examples are split, and
computing the stem's outputs may take longer than training.
"""

# Modules whose output for an example is a function of that example alone.
BY_EXAMPLE = (
    nn.Conv1d, nn.Conv2d, nn.Linear, nn.LayerNorm, nn.GroupNorm,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU,
    nn.Flatten, nn.Identity,
)  # fmt: skip


def behind_frozen_stem(model: nn.Module, data: ClientData) -> tuple[nn.Module, ClientData]:
    """Split a frozen stem off a model, and replace the data by the stem's outputs.

    Parameters
    ----------
    model : nn.Module
        Split if it is a Sequential that begins with frozen layers of the kinds in `BY_EXAMPLE`;
        its parameters keep their names.
    data : ClientData

    Returns
    -------
    nn.Module
        The rest of the model; the model itself if nothing can be computed once.
    ClientData
        The stem's outputs for the examples that some client has: floating-point numbers, which
        are not normalised again.

    Notes
    -----
    On a CPU examples go through the stem one at a time, on a GPU in batches of one width, so that
    an example's bits do not depend on the other examples.
    """
    if type(model) is not nn.Sequential or not data.population:
        return model, data
    children = list(model._modules.items())
    first = next(k for k, (_, child) in enumerate(children) if not _fixed(child))
    stem = nn.Sequential(*(child for _, child in children[:first]))
    used_examples, positions = np.unique(np.concatenate(data.indices), return_inverse=True)
    if not any(True for _ in stem.parameters()) or not len(used_examples):
        return model, data
    examples = torch.from_numpy(used_examples).to(data.x.device)
    outputs = _cached_outputs(stem.to(data.x.device), data, examples, _dtype(model))
    if outputs is None:
        return model, data
    bounds = np.cumsum([len(indices) for indices in data.indices])[:-1]
    indices = [client.astype(np.int64) for client in np.split(positions, bounds)]
    trained = nn.Sequential(OrderedDict(children[first:]))
    mask = None if data.mask is None else data.mask[examples]
    unusable = None if data.unusable is None else data.unusable[used_examples]
    y = data.y[examples]
    return trained, ClientData(outputs, y, indices, mask=mask, unusable=unusable)


def _fixed(module: nn.Module) -> bool:
    """Whether a module is frozen, and treats each example by itself."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return False
    if type(module) is nn.Sequential:
        return all(_fixed(child) for child in module)
    return type(module) in BY_EXAMPLE


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.requires_grad)


def _cached_outputs(
    stem: nn.Module, data: ClientData, examples: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Outputs ``[N, ...]`` of the stem, from the cache or computed; None if they are too large."""
    label = repr((stem, dtype, data.x.dtype, data.x.device, data.mean is None, data.std is None))
    scale = [tensor for tensor in (data.mean, data.std) if tensor is not None]
    key = _digest(*stem.state_dict().values(), *scale, label=label)
    if key not in _LATEST:
        _LATEST.clear()
        _LATEST[key] = {}
    cache = _LATEST[key]
    digests = [_digest(example) for example in data.x[examples].cpu()]
    # Old and new outputs together would be too large: those of earlier runs are dropped.
    if cache and _too_many(len({*cache, *digests}), next(iter(cache.values()))):
        cache = _LATEST[key] = {}
    # The first of equal examples: reversed, it overwrites the later ones.
    firsts = {digest: k for k, digest in reversed([*enumerate(digests)]) if digest not in cache}
    if new_positions := sorted(firsts.values()):
        with exact(data.x.device):
            rows = _outputs(stem, data, examples[new_positions], dtype)
        if rows is None:
            return None
        cache.update(zip((digests[k] for k in new_positions), rows, strict=True))
    return torch.stack([cache[digest] for digest in digests])


def _digest(*tensors: Tensor, label: str = "") -> bytes:
    digest = hashlib.blake2b(label.encode())
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _too_many(count: int, output: Tensor) -> bool:
    return count * output.numel() * output.element_size() > MOST_BYTES


@torch.no_grad()
def _outputs(
    stem: nn.Module, data: ClientData, examples: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Outputs of the stem ``[N, ...]``; None if they take too much memory."""
    count, width = len(examples), 256 if data.x.is_cuda else 1
    outputs: Tensor | None = None
    is_reordered = not data.x.is_cuda and takes_channels_last(stem.modules())
    for start in range(0, count, width):
        chunk = examples[start : start + width]
        # The last chunk is padded: with fewer rows a GPU may choose another kernel.
        x = data.inputs(torch.cat([chunk, chunk[-1:].expand(width - len(chunk))]), dtype)
        if is_reordered and x.dim() == 4:
            x = channels_last(x)
        features = stem(x)
        if outputs is None:
            if _too_many(count, features[0]):
                return None
            outputs = features.new_empty(count, *features.shape[1:])
        outputs[start : start + len(chunk)] = features[: len(chunk)]
    return outputs
