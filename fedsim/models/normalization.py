"""Normalisation layers, which mix examples of a batch: replaced, made personal, or refused."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.models.modules import is_torchs_own


@check_arguments
def fix_normalisation(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Replace normalisation layers that mix examples of a batch by per-example ones, with Opacus.

    BatchNorm becomes GroupNorm with the same channels, in the greatest number of groups that
    divides both their number and 32. BatchNorm1d (features without maps) becomes one group, since
    a group of a single feature would always normalise to zero. InstanceNorm loses its running
    statistics. The new layers start at scale 1 and shift 0. Opacus does the replacement.

    Parameters
    ----------
    model : nn.Module
        Changed in place, unless it is such a layer itself.

    Returns
    -------
    nn.Module
        The model.
    list of str
        One sentence per replaced layer.

    Raises
    ------
    FedsimError
        If Opacus has no replacement for a layer, or refuses the replacement.
    """
    from opacus.validators import ModuleValidator

    sentences = []
    cured_layers: dict[nn.Module, nn.Module] = {}
    # Under all its names: a layer that is used twice stays one layer.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, _NormBase):
            continue
        validate = ModuleValidator.VALIDATORS.get(type(module))
        where, was = name or "itself", type(module).__name__
        if validate is not None and not validate(module):
            continue
        if validate is None or not is_torchs_own(module):
            raise FedsimError(
                f"model.fix = true, but fedsim cannot replace {where} ({was}); it must be one of "
                "torch.nn's own layers, without hooks, or you must replace it yourself."
            )
        if module not in cured_layers:
            cured = cured_layers[module] = _replacement(module)
            sentences.append(f"model.fix: {where} is now {cured}, instead of {was}.")
        if not name:
            return cured_layers[module], sentences
        model.set_submodule(name, cured_layers[module])
    return model, sentences


def _replacement(module: _NormBase) -> nn.Module:
    from opacus.validators import ModuleValidator

    groups = {"num_groups": 1} if isinstance(module, nn.BatchNorm1d) else {}
    cured: nn.Module = ModuleValidator.FIXERS[type(module)](module, **groups)
    if problems := ModuleValidator.validate(cured):
        raise FedsimError(f"model.fix = true, but Opacus refuses {cured}: {problems[0]}")
    if isinstance(cured, _NormBase):  # an InstanceNorm still has the buffers, now unused
        cured.running_mean = cured.running_var = cured.num_batches_tracked = None
    first = next(module.parameters(), None)
    return cured.train(module.training) if first is None else cured.to(first)


STATISTICS = ("running_mean", "running_var")

KEEP_FIXED = (
    "keep them as they are: put these layers in evaluation mode, by their eval(), when the model "
    "is made (others than torch.nn's own: by a train() of the model's own, in which they stay so)"
)
"""Advice for layers whose features `fix_normalisation` would replace."""


class FixedBatchNorm(nn.Module):
    """BatchNorm whose running statistics never change: an affine map of each example by itself.

    It keeps the layer's parameters and buffers under their names.

    Parameters
    ----------
    layer : BatchNorm1d, 2d or 3d
        The layer to replace; it must have running statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = layer.eps, layer.weight, layer.bias
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [B, C, ...]`` by the running statistics."""
        # As torch does, not in half precision: inputs and shift may be large, and their sum small.
        dtype = torch.promote_types(x.dtype, torch.float32)
        scale = torch.rsqrt(self.running_var.to(dtype) + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -self.running_mean * scale
        shift = shift if self.bias is None else shift + self.bias
        of_channels = -1, *[1] * (x.dim() - 2)
        return (x * scale.view(of_channels) + shift.view(of_channels)).to(x.dtype)


@check_arguments
def keep_statistics(model: nn.Module) -> list[str]:
    """Replace each BatchNorm that is in evaluation mode by a `FixedBatchNorm`.

    Layers are also taken that a ``train`` of the model's own leaves in evaluation mode; others
    than torch's own (a subclass that also activates, one with hooks) are left as they are.

    Parameters
    ----------
    model : nn.Module
        Changed in place.

    Returns
    -------
    list of str
        Names of the replaced layers.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return []
    stays = frozen_normalisation(model)
    fixed: dict[nn.Module, nn.Module] = {}
    names = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        is_fixed = _is_torchs(module) and (name in stays or not module.training)
        if name and is_fixed and module.running_mean is not None and module not in fixed:
            fixed[module] = FixedBatchNorm(module)
        if module in fixed:  # perhaps under a second name
            model.set_submodule(name, fixed[module])
            names.append(name)
    return names


def _is_torchs(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a BatchNorm and nothing else: a subclass may also activate, say."""
    return isinstance(module, _BatchNorm) and is_torchs_own(module)


class LocalBatchNorm(nn.Module):
    """BatchNorm whose running statistics are parameters, so that each client has its own.

    As parameters they are part of a client's row, are kept with its other personal parameters, and
    are used in its evaluation. In training they are updated with each batch as in PyTorch, and
    have no gradient. A batch with one value per channel has no variance and is normalised with
    the running statistics. Source: Li et al. 2021, "FedBN".

    Parameters
    ----------
    layer : BatchNorm1d, 2d or 3d
        The layer to replace; it must have running statistics and a fixed momentum.
    name : str
        The layer's name, for error messages.
    """

    def __init__(self, layer: _BatchNorm, name: str) -> None:
        super().__init__()
        if layer.running_mean is None or layer.running_var is None or layer.momentum is None:
            lacking = "momentum" if layer.running_mean is not None else "running statistics"
            raise FedsimError(
                f"model module '{name}' is a {type(layer).__name__} without {lacking}, so that a "
                "client would evaluate an example by the others of its batch; it must have "
                "track_running_stats=True and a momentum."
            )
        if not _is_torchs(layer):
            raise FedsimError(
                f"model module '{name}' is a {type(layer).__name__} that does more than a "
                "BatchNorm, or has hooks, which would be lost where clients keep its statistics; "
                "it must be one of torch.nn's own layers."
            )
        self.momentum, self.eps = layer.momentum, layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean = nn.Parameter(layer.running_mean.clone())
        self.running_var = nn.Parameter(layer.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [B, C, ...]`` by the batch's statistics, or by the running ones."""
        # `batch_norm` updates mean and var in place. They must be `.data`, not `detach()`, which
        # shares the version counter: all parameters are views of one row, and backward would
        # refuse the whole row as modified in place.
        mean, var = self.running_mean.data, self.running_var.data
        by_batch = self.training and x.numel() > x.shape[1]
        return nn.functional.batch_norm(
            x, mean, var, self.weight, self.bias, by_batch, self.momentum, self.eps
        )


@check_arguments
def localise(model: nn.Module, personal: Collection[str]) -> list[str]:
    """Replace each BatchNorm whose trained parameters are all personal by a `LocalBatchNorm`.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    personal : collection of str
        Names of personal parameters.

    Returns
    -------
    list of str
        Names of the running statistics, which are now personal parameters.

    Raises
    ------
    FedsimError
        If such a layer keeps no running statistics, or is a subclass or has hooks.
    """
    local_layers: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        names = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        if name and isinstance(module, _BatchNorm) and names and {*names} <= {*personal}:
            local_layers[module] = LocalBatchNorm(module, name)
        if module in local_layers:  # perhaps under a second name
            model.set_submodule(name, local_layers[module])
    return running_statistics(model)


@check_arguments
def running_statistics(model: nn.Module) -> list[str]:
    """Names of the parameters that are running statistics, and so have no gradient."""
    return [
        f"{name}.{statistic}" if name else statistic
        for name, module in model.named_modules()
        if isinstance(module, LocalBatchNorm)
        for statistic in STATISTICS
    ]


@check_arguments
def frozen_normalisation(model: nn.Module) -> frozenset[str]:
    """Names of normalisation layers that stay in evaluation mode while the model is trained.

    Their running statistics never change, so that each is a fixed affine map of every example by
    itself. A model keeps them so by a `train` of its own; see `keep_statistics`.
    """
    try:
        copied = copy.deepcopy(model).train()
    except Exception:  # a user's code; then nothing is known of its modes
        return frozenset()
    return frozenset(
        name
        for name, module in copied.named_modules()
        if isinstance(module, _NormBase) and not module.training and module.running_mean is not None
    )


@check_arguments
def refuse_running_statistics(model: nn.Module) -> None:
    """Refuse normalisation layers that keep running statistics of the clients' data.

    Running means and variances are sums over the data that no mechanism bounds or adds noise to:
    sending them would be a release that is not accounted for.

    Raises
    ------
    FedsimError
        Naming the layers and the usual cure, `nn.GroupNorm`.
    """
    fixed = frozen_normalisation(model)
    names = [
        f"{name or 'itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None and name not in fixed
    ]
    if names:
        raise FedsimError(
            f"the model keeps running statistics of the clients' data in {', '.join(names)}, which "
            "no noise protects, so that a private run cannot have them; use nn.GroupNorm, let "
            f"model.fix = true replace them, or, if they are pre-trained, {KEEP_FIXED}."
        )
