"""What a model must be and not contain if clients are to train it in blocks."""

from __future__ import annotations

import torch
from torch import nn

from fedsim.errors import FedsimError

__all__ = ["check_model"]

CARRIED = (torch.float16, torch.float32, torch.float64)


def check_model(model: nn.Module) -> None:
    """Refuse modules whose result is not a function of one example and the parameters.

    Raises
    ------
    FedsimError
        For batch normalisation with running statistics, which a row does not carry; and for
        parameters of a type that no Flower array carries.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in CARRIED:
            raise FedsimError(
                f"model parameter '{name}' is {parameter.dtype}, which no Flower array carries; it "
                f"must be one of {', '.join(map(str, CARRIED))}."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.batchnorm._LazyNormBase):
            raise FedsimError(
                f"model module '{name}' is a {type(module).__name__}: it mixes examples and keeps "
                "running statistics that an update does not carry; use nn.GroupNorm, or let "
                "model.fix = true put it in its place."
            )
