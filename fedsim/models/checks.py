"""What a model must not have where its training is to be private."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedsim.errors import FedsimError


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
            said = "complex" if parameter.is_complex() else parameter.layout
            raise FedsimError(
                f"the model's {name} is {said}; parameters must be dense real numbers."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise FedsimError(
                f"the model's {name} is on the device 'meta', where it has no values; it must have "
                "some, on a CPU or a GPU."
            )


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
