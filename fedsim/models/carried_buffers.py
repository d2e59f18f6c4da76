"""Buffers that change as a model runs, in runs without privacy: clients' updates carry them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError


class CarriedBuffers:
    """Hooks on a model that make some of its parameters buffers while it runs.

    A buffer of floating-point numbers, such as a vector of ``spectral_norm``, is a parameter of the
    same name outside of the model's calls: part of a client's row, averaged, saved and loaded. It
    has no gradient. The model's own code finds a buffer, in the row's memory, to which it may write
    or assign.

    Attributes
    ----------
    averaged : list of str
        Names of those parameters.
    restored : list of str
        Names of the other buffers that change: of whole numbers or booleans, which are in no row,
        or not saved with the model. They begin each client's round with the model's own values.
    """

    def __init__(self, model: nn.Module, changed: Collection[str]) -> None:
        every = dict(model.named_buffers(remove_duplicate=False))
        chosen = {id(every[name]) for name in changed}
        averaged: dict[int, nn.Parameter] = {}  # a buffer of two modules becomes one parameter
        self._places: dict[str, dict[str, torch.dtype]] = {}
        for path, module in model.named_modules():
            for name, buffer in [*module._buffers.items()]:
                is_saved = name not in module._non_persistent_buffers_set
                if buffer is None or id(buffer) not in chosen or not is_saved:
                    continue
                if buffer.is_floating_point():
                    parameter = averaged.setdefault(id(buffer), nn.Parameter(buffer.detach()))
                    del module._buffers[name]
                    module.register_parameter(name, parameter)
                    self._places.setdefault(path, {})[name] = buffer.dtype
        own = {id(parameter) for parameter in averaged.values()}
        self.averaged = [name for name, p in model.named_parameters() if id(p) in own]
        self.restored = [name for name, b in model.named_buffers() if id(b) in chosen]
        self._parameters: dict[str, Mapping[str, Any]] = {}  # of modules, during a call
        model.register_forward_pre_hook(self, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)

    def __call__(self, model: nn.Module, inputs: object) -> None:
        """Before a call: put buffers in the places of parameters."""
        for path, names in self._places.items():
            module = model.get_submodule(path)
            self._parameters[path] = dict(module._parameters)
            for name, dtype in names.items():
                # `.data` and not `detach()`, which shares the version counter: all parameters are
                # views of one row, and backward would refuse the whole row as modified in place.
                parameter = module._parameters.pop(name)
                assert parameter is not None
                module._buffers[name] = parameter.data.to(dtype)

    @torch.no_grad()
    def _leave(self, model: nn.Module, inputs: object, outputs: object) -> None:
        """After a call, even one that failed: parameters again, with the buffers' values."""
        parameters, self._parameters = self._parameters, {}
        for path, before in parameters.items():
            module = model.get_submodule(path)
            buffers = {name: module._buffers.pop(name, None) for name in self._places[path]}
            module._parameters.clear()
            module._parameters.update(before)
            for name, buffer in buffers.items():
                _copy(buffer, before[name], f"{path}.{name}" if path else name)


def _copy(buffer: Tensor | None, parameter: Tensor, name: str) -> None:
    if buffer is None or buffer.shape != parameter.shape:
        raise FedsimError(
            f"the model gives its buffer {name} another shape as it runs; it must keep it."
        )
    parameter.data.copy_(buffer)


@check_arguments
def carried_buffers(model: nn.Module) -> CarriedBuffers | None:
    """The model's `CarriedBuffers`; None if it has none."""
    hooks = model._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, CarriedBuffers)), None)
