"""A model's parameters: choose the trained ones, load them, check them, substitute others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from fedsim import regular_files
from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError

Result = TypeVar("Result")


@check_arguments
def matching(key: str, patterns: str, names: Sequence[str]) -> list[str]:
    """Names that match one of the comma-separated shell patterns, in their order.

    Raises
    ------
    FedsimError
        Naming the config's ``key``, if a pattern matches nothing.
    """
    each = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in each:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = names if len(names) <= 12 else get_close_matches(pattern, names, n=8, cutoff=0)
            others = f" and {len(names) - len(near)} others" * (len(names) > len(near))
            raise FedsimError(
                f"{key} has the pattern '{pattern}', which matches no parameter; the model has "
                f"{', '.join(near)}{others}."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in each)]


@check_arguments
def freeze(model: nn.Module, trainable: str = "") -> list[str]:
    """Set ``requires_grad`` so that only the parameters that match are trained.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    trainable : str
        Shell-style patterns over parameter names, separated by commas: ``"fc*"``,
        ``"fc3.weight,*.bias"``. Empty: the model is not changed.

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
def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a model's floating-point parameters and buffers to ``dtype``, in place.

    To bfloat16 no buffer that is not saved with the model is converted: the frequencies of rotary
    positions are one, and bfloat16 does not tell positions above 256 apart.
    """
    if dtype is not torch.bfloat16:
        return model.to(dtype)
    computed = [
        (module, name, module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    ]
    model.to(dtype)
    for module, name, buffer in computed:
        module._buffers[name] = buffer
    return model


@check_arguments
def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a file of the model's weights holds, tied ones only once.

    A tied tensor is listed under its first name, since safetensors refuses shared memory.
    """
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
        Shell-style patterns over names, separated by commas: ``"conv*"``. Only matching tensors
        are loaded, and the file may hold others. Empty: all are loaded, and the file must hold
        exactly the model's names.

    Returns
    -------
    list of str
        Names of the loaded tensors, in the model's order.

    Raises
    ------
    FedsimError
        If there is no such file, it is no safetensors file, a pattern matches nothing, or a
        tensor is missing, unknown, of another shape or dtype, or not finite.
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
        if _number_kind(found[name]) != _number_kind(own[name]):
            raise FedsimError(
                f"{where} has dtype {found[name].dtype} for {name}; it must be one that fits "
                f"{own[name].dtype}."
            )
        require_finite(where, name, found[name], own[name].dtype)
    with torch.no_grad():
        for name in wanted:
            own[name].copy_(found[name])  # writes into the model's storage
    return wanted


def require_finite(where: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor of a file that is not finite in the model's dtype.

    Parameters
    ----------
    where : str
        Description of the file, for the error message.
    name : str
        The tensor's name.

    Raises
    ------
    FedsimError
    """
    if not bool(torch.isfinite(tensor.to(dtype)).all()):
        raise FedsimError(
            f"{where} has NaN, infinite or too large numbers in {name}; every number must be "
            f"finite in {dtype}."
        )


def _number_kind(tensor: Tensor) -> str:
    """Kind of numbers that a tensor holds; only tensors of the same kind are cast."""
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else "whole"


def call_with(model: nn.Module, named: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of a model for ``x [B, ...]``, with its parameters replaced by the given tensors.

    The model is unchanged afterwards, even if it contains a module under two names, where
    PyTorch's `functional_call` with ``tie_weights=True`` would leave the tensors in the model.

    Parameters
    ----------
    model : nn.Module
    named : mapping of str to Tensor
        Tensors by the names of `nn.Module.named_parameters`, which lists a tied parameter once.
    x : Tensor
    """
    outputs: Tensor = functional_call(model, _by_every_name(model, named), (x,), tie_weights=False)
    return outputs


class _Scope(nn.Module):
    """Calls a function while `functional_call` substitutes the parameters of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Result]) -> Result:
        return function()


def with_parameters(
    model: nn.Module, named: Mapping[str, Tensor], function: Callable[[], Result]
) -> Result:
    """What a function returns while a model's parameters are replaced, as in `call_with`.

    Gradients are taken within it: a checkpointed layer computes again in the backward pass, from
    the parameters that its modules have then.
    """
    tensors = {f"model.{name}": tensor for name, tensor in _by_every_name(model, named).items()}
    result: Result = functional_call(_Scope(model), tensors, (function,), tie_weights=False)
    return result


def _by_every_name(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by all names of the parameters that they replace."""
    names: dict[int, str] = {}
    tensors = dict(named)
    # A tied parameter of two modules gets its tensor under both names; a module is visited once.
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            first = names.setdefault(id(parameter), name)
            if first in named:
                tensors[name] = named[first]
    return tensors


@check_arguments
def refuse_other_than_numbers(model: nn.Module) -> None:
    """Refuse models whose parameters are not dense real numbers with values, or not accessible.

    Raises
    ------
    FedsimError
        For complex, sparse, lazy or "meta" parameters, ScriptModules and DataParallel, and for
        hooks on gradients.
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
    refuse_gradient_hooks(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise FedsimError(
                f"the model's {name} is on the device 'meta', where it has no values; it must have "
                "some, on a CPU or a GPU."
            )


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on the gradients of trained parameters.

    A copy of the model lacks them, and they are called only where autograd runs on the parameters
    themselves, as on few paths.

    Raises
    ------
    FedsimError
        Naming the first such parameter.
    """
    for name, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if parameter.requires_grad and any(hooks):
            raise FedsimError(
                f"the model's {name} has a hook on its gradient (register_hook, say), which would "
                "not be called; it must have none: a mask belongs in the forward."
            )


@check_arguments
def refuse_unusable_parameters(model: nn.Module) -> None:
    """Refuse parameters that are NaN or infinite.

    Raises
    ------
    FedsimError
        Naming the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise FedsimError(
                f"the model starts with NaN or infinite numbers in {name}; every parameter must be "
                "finite."
            )
