"""A model of the user's own: ``module:callable``.

``module`` is a file in the current directory (``nets:Small`` is ``Small`` of ``./nets.py``) or
anything importable. ``callable`` is called with those of the keywords ``input_shape`` (a tuple,
``(C, H, W)`` or ``(d,)``) and ``num_classes`` that it takes, and returns an `nn.Module` that maps
a batch ``[B, *input_shape]`` to logits ``[B, num_classes]``. It draws its initial weights from
torch's global generator on the CPU, as layers do: that is seeded for it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fedsim.errors import FedsimError

__all__ = ["user_model"]


def user_model(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Import and call ``module:callable``.

    Raises
    ------
    FedsimError
        If there is no such module or callable, it wants other arguments, or what it returns is
        no `nn.Module`. Errors of the user's own code come through as they are.
    """
    with _current_directory_importable():
        make = _find(name)
        offered = {"input_shape": input_shape, "num_classes": num_classes}
        model = make(**_taken(name, make, offered))
    if not isinstance(model, nn.Module):
        raise FedsimError(
            f"model.name is '{name}', which returns {type(model).__name__}; it must return a "
            "torch.nn.Module."
        )
    return model


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Let the user's files be found first, as they are under ``python file.py``."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _find(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise FedsimError(
            f"model.name is '{name}'; a model of your own is written module:callable, such as "
            "nets:Small for Small in nets.py."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise FedsimError(
            f"model.name is '{name}', but there is neither a file {module_name.replace('.', '/')}"
            f".py in {os.getcwd()} nor an installed module '{module_name}'."
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise FedsimError(
            f"model.name is '{name}', but '{module_name}' has no callable '{attribute}'."
        )
    return found  # type: ignore[no-any-return]


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
