"""Gradients of single examples of models with recurrent layers, which `torch.func` cannot take.

Opacus unrolls such a layer into linear ones and knows each example's gradient of those. It is
imported at the first use: only models with such layers wait for it.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.rows import DenseRows
from fedsim.rows.dense import BlockRows
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss

__all__ = ["Unrolled", "is_recurrent"]

RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


def is_recurrent(model: nn.Module) -> bool:
    """Whether a layer of the model is torch's RNN, GRU or LSTM."""
    return any(type(module) in RECURRENT for module in model.modules())


@dataclass(frozen=True)
class Unrolled:
    """Gradients of single examples by Opacus, on a copy of the model with its recurrent layers.

    The copy is what `fedsim.training.probe` compares with the model: that Opacus's layers compute
    what torch's do is tried, not believed.
    """

    model: nn.Module
    packing: Packing
    loss: Loss

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """See `OneClientsRows`."""
        copied = self._copy
        parameters: dict[str, Any] = dict(copied.named_parameters())
        for name, value in self.packing.named(theta).items():
            parameters[name].data.copy_(value)
        self._follow_mode()
        try:
            # Inputs need no gradients, of which a hook warns.
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                losses = self.loss(copied(x), y)
                losses.sum().backward()  # type: ignore[no-untyped-call]
            rows = [_rows(parameters[entry.name], len(x)) for entry in self.packing.layout.entries]
        finally:
            for parameter in parameters.values():
                parameter.grad, parameter.grad_sample = None, None
        return DenseRows(torch.cat(rows, dim=1)[None]), losses.detach()

    @cached_property
    def _copy(self) -> nn.Module:
        """The model with Opacus's layers in the place of torch's, watched by Opacus.

        Raises
        ------
        RuntimeError
            Where Opacus would compute something else than the model does, or knows no rule for a
            layer; the probe takes the next way then.
        """
        from opacus.grad_sample import GradSampleHooks

        copied = copy.deepcopy(self.model)
        for name, module in list(copied.named_modules()):
            if type(module) in RECURRENT:
                parent, _, child = name.rpartition(".")
                if not child or module is copied:
                    raise RuntimeError("a model that is one recurrent layer gives no tensor")
                setattr(copied.get_submodule(parent), child, _unrolled(module))
        watched = GradSampleHooks(copied, loss_reduction="sum")
        for module in watched.iterate_submodules(copied):
            trained = any(p.requires_grad for p in module.parameters(recurse=False))
            known = type(module) in GradSampleHooks.GRAD_SAMPLERS or _is_unrolled(module)
            if trained and not known:
                raise RuntimeError(f"Opacus has no rule for {type(module).__name__}")
        return copied

    def _follow_mode(self) -> None:
        """Train or evaluate as the model does; layers with parameters are watched in training."""
        self._copy.train(self.model.training)
        for module in self._copy.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.training = True


def _rows(parameter: Any, examples: int) -> Tensor:
    """Each example's gradient of one parameter, ``[B, size]``; zero of one that is not used."""
    rows: Tensor | None = parameter.grad_sample
    if rows is None:
        rows = parameter.new_zeros(examples, parameter.numel())
    return rows.detach().flatten(1)


def _unrolled(layer: Any) -> nn.Module:
    """Opacus's layer with the parameters of torch's."""
    from opacus import layers

    if layer.dropout:
        raise RuntimeError("Opacus drops out between steps where torch does between layers")
    if layer.proj_size:
        raise RuntimeError("Opacus has no projections in an LSTM")
    settings = {
        name: getattr(layer, name)
        for name in (
            "input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional",
        )
    }  # fmt: skip
    if isinstance(layer, nn.RNN):
        settings["nonlinearity"] = layer.nonlinearity
    unrolled: nn.Module = getattr(layers, f"DP{type(layer).__name__}")(**settings)
    first = next(layer.parameters())
    unrolled.to(first)
    theirs = dict(unrolled.named_parameters())
    for name, parameter in layer.named_parameters():
        theirs[name].data.copy_(parameter.data)
        theirs[name].requires_grad_(parameter.requires_grad)
    return unrolled.train(layer.training)


def _is_unrolled(module: nn.Module) -> bool:
    from opacus.layers import DPGRU, DPLSTM, DPRNN

    return isinstance(module, DPRNN | DPGRU | DPLSTM)
