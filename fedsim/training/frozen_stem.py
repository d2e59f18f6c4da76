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

from fedsim.models.memory_format import ViewsOfAnyFormat, channels_last, takes_channels_last
from fedsim.models.modules import is_torchs_own
from fedsim.training.data import ClientData
from fedsim.training.side_effects import reproducible_arithmetic
from fedsim.training.structure.tables import BY_EXAMPLE

MAX_BYTES = 2**30
"""Most memory for the outputs of the examples that clients have; beyond it none are stored."""

_LATEST: dict[bytes, dict[bytes, tuple[Tensor, Tensor]]] = {}
"""Cache of the outputs of the stem that was used last: by its digest, then by the data's digest.

An entry is a pair: the positions of examples in the data, and the outputs, a row for each. The runs
of a sweep differ in the layers behind the stem and in how examples are split, and computing the
stem's outputs may take longer than training.
"""


def split_frozen_stem(model: nn.Module, data: ClientData) -> tuple[nn.Module, ClientData]:
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
        The same clients' data with the stem's outputs as inputs, which are not normalised again;
        examples that no client has are left out.

    Notes
    -----
    On a CPU examples go through the stem one at a time, on a GPU in batches of one width, so that
    an example's bits do not depend on the other examples.
    """
    # The rest is another Sequential: hooks on the model would be lost.
    if type(model) is not nn.Sequential or not is_torchs_own(model) or not data.population:
        return model, data
    children = list(model._modules.items())
    first = next(k for k, (_, child) in enumerate(children) if not _is_frozen(child))
    stem = nn.Sequential(*(child for _, child in children[:first]))
    examples = torch.from_numpy(np.unique(np.concatenate(data.indices))).to(data.x.device)
    if not any(True for _ in stem.parameters()) or not len(examples):
        return model, data
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    with torch.no_grad(), reproducible_arithmetic(data.x.device):
        cached = _cached_outputs(stem.to(data.x.device), data, examples, dtype)
    if cached is None:
        return model, data
    return nn.Sequential(OrderedDict(children[first:])), _with_inputs(data, *cached)


def _with_inputs(data: ClientData, examples: Tensor, x: Tensor) -> ClientData:
    """The clients' data reduced to these ``examples [m]``, with the inputs ``x [m, ...]``."""
    host = examples.cpu().numpy()
    places = np.zeros(len(data.x), dtype=np.int64)
    places[host] = np.arange(len(host))
    return ClientData(
        x,
        data.y[examples],
        [places[own] for own in data.indices],
        mask=None if data.mask is None else data.mask[examples],
        unusable=None if data.unusable is None else data.unusable[host],
    )


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module is frozen, and treats each example by itself."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return False
    if type(module) is nn.Sequential:
        return all(_is_frozen(child) for child in module)
    return type(module) in BY_EXAMPLE


def _cached_outputs(
    stem: nn.Module, data: ClientData, examples: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """These ``examples``, perhaps with others, and their outputs; None if those are too large."""
    row = stem(data.inputs(examples[:1], dtype))[0]
    if len(examples) * row.nbytes > MAX_BYTES:
        return None
    if not all(map(is_torchs_own, stem.modules())):  # no digest tells what a hook does
        return examples, _stem_outputs(row, stem, data, examples)
    # All settings of a layer: torch's repr leaves some out, such as a pooling's count_include_pad.
    settings = [
        (k, v)
        for m in stem.modules()
        for k, v in vars(m).items()
        if k[0] != "_" and k != "training"
    ]
    kinds = dtype, data.x.dtype, data.x.device, data.mean is None, data.std is None
    label = repr((stem, settings, kinds))
    scale = [tensor for tensor in (data.mean, data.std) if tensor is not None]
    digest = _digest(*stem.state_dict().values(), *scale, label=label)
    if digest not in _LATEST:
        _LATEST.clear()
    cache = _LATEST.setdefault(digest, {})
    digest = _digest(data.x)
    empty = examples[:0], row.new_zeros(0, *row.shape)
    entry = cache.get(digest, empty)
    new = examples[~torch.isin(examples, entry[0])]
    if len(new) * row.nbytes + sum(outputs.nbytes for _, outputs in cache.values()) > MAX_BYTES:
        cache.clear()
        new, entry = examples, empty
    if len(new):
        outputs = _stem_outputs(row, stem, data, new)
        cache[digest] = torch.cat([entry[0], new]), torch.cat([entry[1], outputs])
    return cache[digest]


def _digest(*tensors: Tensor, label: str = "") -> bytes:
    digest = hashlib.blake2b(label.encode())
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _stem_outputs(row: Tensor, stem: nn.Module, data: ClientData, examples: Tensor) -> Tensor:
    """The stem's outputs for these ``examples``, each of the shape and dtype of ``row``."""
    width = 256 if data.x.is_cuda else 1
    is_reordered = not data.x.is_cuda and takes_channels_last(stem.modules())
    outputs = row.new_empty(len(examples), *row.shape)
    for start in range(0, len(examples), width):
        chunk = examples[start : start + width]
        # The last chunk is padded: with fewer rows a GPU may choose another kernel.
        padded = torch.cat([chunk, chunk[-1:].expand(width - len(chunk))])
        x = data.inputs(padded, outputs.dtype)
        if is_reordered and x.dim() == 4:
            x = channels_last(x)
        with ViewsOfAnyFormat():
            outputs[start : start + len(chunk)] = stem(x)[: len(chunk)]
    return outputs
