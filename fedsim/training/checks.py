"""What a model must not contain if clients are to train it in blocks."""

from __future__ import annotations

from torch import nn

from fedsim.errors import FedsimError

__all__ = ["check_model"]


def check_model(model: nn.Module) -> None:
    """Refuse modules whose result is not a function of one example and the parameters.

    Raises
    ------
    FedsimError
        For batch normalisation with running statistics, which a row does not carry.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.batchnorm._LazyNormBase):
            raise FedsimError(
                f"model module '{name}' is a {type(module).__name__}: it mixes examples and keeps "
                "running statistics that an update does not carry; use GroupNorm instead."
            )
