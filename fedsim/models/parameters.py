"""A model's parameters: trained, loaded from a file, refused, and others in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from fedsim import regular_files
from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError


def matching(key: str, patterns: str, names: Sequence[str]) -> list[str]:
    """Those ``names`` that match one of the ``patterns``, which commas separate.

    Raises
    ------
    FedsimError
        Naming the config's ``key``, if a pattern matches nothing.
    """
    each = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in each:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise FedsimError(
                f"{key} has the pattern '{pattern}', which matches no parameter; the model has "
                f"{', '.join(names)}."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in each)]


@check_arguments
def freeze(model: nn.Module, trainable: str = "") -> list[str]:
    """Let only the parameters that match be trained, by their ``requires_grad``.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    trainable : str
        Shell-style patterns over parameter names, separated by commas: ``"fc*"``,
        ``"fc3.weight,*.bias"``. Empty: the model stays as it is.

    Returns
    -------
    list of str
        Names of the parameters that are trained, in the model's order.

    Raises
    ------
    FedsimError
        If a pattern matches no parameter, or no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    if chosen := set(matching("model.trainable", trainable, names)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise FedsimError("the model has no parameter that is trained; it must have at least one.")
    return trained


@check_arguments
def values_of(model: nn.Module) -> dict[str, Tensor]:
    """What a file of a model's weights holds: parameters and buffers, shared ones once."""
    once = {id(value): name for name, value in reversed(model.state_dict(keep_vars=True).items())}
    return {name: model.state_dict()[name] for name in reversed(once.values())}


@check_arguments
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
        require_finite(where, name, found[name], own[name].dtype)
    with torch.no_grad():
        for name in wanted:
            own[name].copy_(found[name])  # the model's own storage
    return wanted


def require_finite(where: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor of a file, ``where`` in words, that is not finite in the model's dtype.

    Raises
    ------
    FedsimError
    """
    if not bool(torch.isfinite(tensor.to(dtype)).all()):
        raise FedsimError(
            f"{where} has NaN, infinite or too large numbers in {name}; every number must be "
            f"finite in {dtype}."
        )


def _sort(tensor: Tensor) -> str:
    """Which numbers a tensor can hold: those of one sort are cast to each other."""
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else "whole"


def call_with(model: nn.Module, named: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What a model gives for ``x [B, ...]``, with these tensors for the parameters of these names.

    The model is as it was afterwards, also where a module stands in it under two names: PyTorch's
    own `functional_call` puts the tensors in under both, and leaves them there.

    Parameters
    ----------
    model : nn.Module
    named : mapping of str to Tensor
        By the names of `nn.Module.named_parameters`, of which a parameter has one.
    x : Tensor
    """
    names: dict[int, str] = {}
    tensors = dict(named)
    for prefix, module in model.named_modules():  # each module once
        for name, parameter in module.named_parameters(prefix, recurse=False):
            first = names.setdefault(id(parameter), name)
            if first in named:
                tensors[name] = named[first]
    outputs: Tensor = functional_call(model, tensors, (x,), tie_weights=False)
    return outputs


@check_arguments
def refuse_other_than_numbers(model: nn.Module) -> None:
    """Refuse parameters that are no dense real numbers or have no values as yet, or are locked in.

    Raises
    ------
    FedsimError
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule | nn.DataParallel):
            raise FedsimError(
                f"the model has a {type(module).__name__}, which keeps its parameters to itself; "
                "it must be made of plain modules."
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise FedsimError(
                "the model has lazy layers, whose shapes are unknown until data come; give every "
                "layer its sizes."
            )
        if parameter.is_complex() or parameter.layout is not torch.strided:
            form = "complex" if parameter.is_complex() else parameter.layout
            raise FedsimError(
                f"the model's {name} is {form}; parameters must be dense real numbers."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise FedsimError(
                f"the model's {name} is on the device 'meta', where it has no values; it must have "
                "some, on a CPU or a GPU."
            )


@check_arguments
def refuse_unusable_parameters(model: nn.Module) -> None:
    """Refuse parameters with which no training can begin.

    Raises
    ------
    FedsimError
        Naming the first that has NaN or infinite numbers.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise FedsimError(
                f"the model starts with NaN or infinite numbers in {name}; every parameter must be "
                "finite."
            )
