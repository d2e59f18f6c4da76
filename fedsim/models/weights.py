"""Starting from parameters that are there already: a run's own, or any safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.models.patterns import matching

__all__ = ["load_weights", "values_of"]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """What a file of a model's weights holds: parameters and buffers, shared ones once."""
    once = {id(value): name for name, value in reversed(model.state_dict(keep_vars=True).items())}
    return {name: model.state_dict()[name] for name in reversed(once.values())}


def load_weights(model: nn.Module, path: str | Path, patterns: str = "") -> list[str]:
    """Give a model's parameters and buffers the values in a file.

    Parameters
    ----------
    model : nn.Module
        Changed in place, and only if everything fits. Its dtype stays.
    path : path
        A safetensors file, such as the ``model.safetensors`` that a run leaves.
    patterns : str
        Shell-style patterns over names, separated by commas: ``"conv*"``. Only what matches is
        taken from the file, which may hold more. Empty: everything, and the file must hold the
        model's names and no others.

    Returns
    -------
    list of str
        Names of what was replaced, in the model's order.

    Raises
    ------
    FedsimError
        If there is no such file, it is no safetensors file, a pattern matches nothing, or
        something in it is missing, unknown, of another shape or not finite.
    """
    where = f"model.weights = '{path}'"
    if not Path(path).is_file():
        raise FedsimError(
            f"{where}, but there is no such file; it must be a safetensors file such as the "
            "model.safetensors that a run leaves."
        )
    try:
        found = load_file(regular_files.require(Path(path)))
    except (SafetensorError, OSError) as error:
        raise FedsimError(f"{where} is not a readable safetensors file ({error}).") from None
    own = values_of(model)
    wanted = matching("model.weights-for", patterns, list(own)) if patterns else list(own)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise FedsimError(
            f"{where} lacks {', '.join(missing)} and holds {', '.join(found) or 'nothing'}; set "
            "model.weights-for to patterns of what it has, or use another file."
        )
    unknown = [name for name in found if name not in own]
    if unknown and not patterns:
        raise FedsimError(
            f"{where} holds {', '.join(unknown)}, which the model does not have; set "
            "model.weights-for to patterns of what is to be taken, or use another file."
        )
    for name in wanted:
        if found[name].shape != own[name].shape:
            raise FedsimError(
                f"{where} has shape {tuple(found[name].shape)} for {name}; it must be "
                f"{tuple(own[name].shape)}."
            )
        if _sort(found[name]) != _sort(own[name]):
            raise FedsimError(
                f"{where} has dtype {found[name].dtype} for {name}; it must be one that fits "
                f"{own[name].dtype}."
            )
        if not bool(torch.isfinite(found[name].to(own[name].dtype)).all()):
            raise FedsimError(
                f"{where} has NaN, infinite or too large numbers in {name}; every number must be "
                f"finite in {own[name].dtype}."
            )
    with torch.no_grad():
        for name in wanted:
            own[name].copy_(found[name])  # the model's own storage
    return wanted


def _sort(tensor: Tensor) -> str:
    """Which numbers a tensor can hold: those of one sort are cast to each other."""
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else "whole"
