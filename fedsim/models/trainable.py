"""Which parameters are trained; the others are neither sent, nor noised, nor counted."""

from __future__ import annotations

from torch import nn

from fedsim.errors import FedsimError
from fedsim.models.patterns import matching

__all__ = ["freeze"]


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
