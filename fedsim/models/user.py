"""A model of the user's own: ``module:callable``.

``callable`` (see `fedsim.registry`) is called with those of the keywords ``input_shape`` (a tuple,
``(C, H, W)`` or ``(d,)``) and ``num_classes`` that it takes, and returns an `nn.Module` that maps
a batch ``[B, *input_shape]`` to logits ``[B, num_classes]``. It draws its initial weights from
torch's global generator on the CPU, as layers do: that is seeded for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fedsim.errors import FedsimError
from fedsim.registry import current_directory_importable, load

__all__ = ["user_model"]


def user_model(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Import and call ``module:callable``.

    Raises
    ------
    FedsimError
        If there is no such module or callable, it wants other arguments, or what it returns is
        no `nn.Module`. Errors of the user's own code come through as they are.
    """
    with current_directory_importable():
        make = load("model.name", name)
        offered = {"input_shape": input_shape, "num_classes": num_classes}
        model = make(**_taken(name, make, offered))
    if not isinstance(model, nn.Module):
        raise FedsimError(
            f"model.name is '{name}', which returns {type(model).__name__}; it must return a "
            "torch.nn.Module."
        )
    return model


def _taken(name: str, make: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the offered keywords that ``make`` takes."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError as error:
        raise FedsimError(
            f"model.name is '{name}', which is no Python function or class with known parameters."
        ) from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind is not p.VAR_POSITIONAL
        and (p.name not in offered or p.kind is p.POSITIONAL_ONLY)
    ]
    if missing:
        raise FedsimError(
            f"model.name is '{name}', which needs the argument '{missing[0]}'; it is called with "
            "input_shape and num_classes, or with neither if it has no such parameters."
        )
    names = {p.name for p in parameters}
    return {key: value for key, value in offered.items() if key in names}
