"""A model with other numbers in the place of its parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["call_with"]


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
