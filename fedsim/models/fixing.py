"""The usual cure of models that mix examples: GroupNorm in the place of BatchNorm."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedsim.errors import FedsimError

__all__ = ["fix_normalisation"]


def fix_normalisation(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Put a layer that knows one example only for each that knows a batch, as Opacus does.

    BatchNorm becomes GroupNorm of as many channels, in the greatest number of groups that divides
    both these and 32, and in one group where there are features and no maps (BatchNorm1d): a group
    of one feature would be zero whatever it was. InstanceNorm loses its running statistics. The
    new layers start at scale 1 and shift 0. Opacus, whose cure it is, is imported here.

    Parameters
    ----------
    model : nn.Module
        Changed in place, unless it is one such layer itself.

    Returns
    -------
    nn.Module
    list of str
        One sentence a layer, none where there was nothing to do.

    Raises
    ------
    FedsimError
        If Opacus has no cure for a layer, or refuses the cured one.
    """
    from opacus.validators import ModuleValidator

    said = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, _NormBase):
            continue
        validate = ModuleValidator.VALIDATORS.get(type(module))
        where, was = name or "itself", type(module).__name__
        if validate is None:
            raise FedsimError(
                f"model.fix = true, but there is no cure for {where} ({was}); it must be one of "
                "torch.nn's own layers, or be replaced by hand."
            )
        if not validate(module):
            continue
        cured = _cured(module)
        said.append(f"model.fix: {where} is {cured} now, and was {was}.")
        if not name:
            return cured, said
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, cured)
    return model, said


def _cured(module: _NormBase) -> nn.Module:
    from opacus.validators import ModuleValidator

    groups = {"num_groups": 1} if isinstance(module, nn.BatchNorm1d) else {}
    cured: nn.Module = ModuleValidator.FIXERS[type(module)](module, **groups)
    if problems := ModuleValidator.validate(cured):
        raise FedsimError(f"model.fix = true, but Opacus refuses {cured}: {problems[0]}")
    if isinstance(cured, _NormBase):  # an InstanceNorm, whose statistics would only lie about
        cured.running_mean = cured.running_var = cured.num_batches_tracked = None
    first = next(module.parameters(), None)
    return cured.train(module.training) if first is None else cured.to(first)
