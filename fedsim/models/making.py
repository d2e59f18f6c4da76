"""Build a model by its name, initialised as a function of the seed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fedsim import registry
from fedsim.errors import FedsimError
from fedsim.models.parameters import refuse_other_than_numbers
from fedsim.randomness import Purpose, Randomness
from fedsim.settings import REQUIRED, Setting, settings_of

OFFERED = ("input_shape", "num_classes", "vocabulary")
"""Sizes of the data that are passed to a model, where its constructor takes them."""


def build(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    vocabulary: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **settings: Any,
) -> nn.Module:
    """Build a model on the CPU, initialised.

    Parameters
    ----------
    name : str
        One of ``fedsim config list model``, or ``module:callable`` (see `fedsim.registry`), which
        must return an `nn.Module`. It is called with its settings and with those of the keywords
        ``input_shape``, ``num_classes`` and ``vocabulary`` that it accepts. It must draw initial
        weights from torch's global CPU generator, as layers do, which is seeded for the call.
    input_shape : ``(C, H, W)`` or ``(d,)``
        Shape of one example. The model takes a batch ``[B, *input_shape]`` and returns logits
        ``[B, num_classes]``.
    num_classes : int
        Number of classes, or of the numbers in a target if targets are not classes.
    vocabulary : int
        Number of tokens; 0 if inputs are not tokens.
    dtype : torch.float32 or torch.float64
        The float64 model starts from the float32 one's numbers.
    seed : int
        Seed of the initialisation, which depends on nothing else.
    settings
        Settings of the model, such as ``widths="256,256"``.

    Returns
    -------
    nn.Module
        The dense models are an `nn.Sequential` of one `nn.Flatten`, then `nn.Linear` layers
        with `nn.ReLU` between them, and nothing else.

    Raises
    ------
    FedsimError
        If there is no such model, or its settings or shapes do not fit. Exceptions of the user's
        own code are passed on unchanged.

    Examples
    --------
    >>> model = build("mlp", (1, 28, 28), 10, widths="256,256", seed=1)
    >>> [name for name, _ in model.named_parameters()][:2]
    ['fc1.weight', 'fc1.bias']
    """
    if dtype not in (torch.float32, torch.float64):
        raise FedsimError(f"model.dtype is {dtype}; it must be float32 or float64.")
    draws = Randomness(seed).generator(Purpose.INIT, level="run")
    # Layers draw initial weights from torch's global generator, which is the user's: fork_rng
    # restores its state afterwards. No devices: models are built on the CPU.
    with torch.random.fork_rng(devices=[]), registry.current_directory_importable():
        torch.default_generator.manual_seed(int(draws.integers(2**63)))
        thing: Any = registry.find("model", name, "model.name")
        about = (tuple(input_shape), num_classes, vocabulary)
        offered: dict[str, Any] = dict(zip(OFFERED, about, strict=True))
        is_module = isinstance(thing, type) and issubclass(thing, nn.Module)
        if dataclasses.is_dataclass(thing) and not is_module:
            recipe: Any = thing
            _check_names(name, settings, settings_of(thing))
            maker = recipe(**settings)
            accepted = _accepted(name, maker, offered, {})
            if vocabulary and "vocabulary" not in accepted:
                raise FedsimError(
                    f"model.name is '{name}', which takes numbers, but the data's inputs are tokens"
                    " (integers); it must be a model that embeds them, such as one of your own."
                )
            model = maker(**accepted)
        else:
            model = thing(**_accepted(name, thing, offered, settings), **settings)
    if not isinstance(model, nn.Module):
        raise FedsimError(
            f"model.name is '{name}', which returns {type(model).__name__}; it must return a "
            "torch.nn.Module."
        )
    refuse_other_than_numbers(model)
    return model.to(dtype)


def _check_names(name: str, given: dict[str, Any], takes: Sequence[Setting]) -> None:
    names = [setting.name for setting in takes]
    for key in given:
        if key not in names:
            raise FedsimError(
                f"model.{key} = {given[key]!r} has no effect with model.name = '{name}', which "
                f"takes {', '.join(names) or 'nothing'}."
            )
    for setting in takes:
        if setting.default is REQUIRED and setting.name not in given:
            raise setting.absent(f"model.{setting.key}")


def _accepted(
    name: str, make: Callable[..., Any], offered: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """The offered keywords that ``make`` takes.

    Raises
    ------
    FedsimError
        If ``make`` requires an argument that is neither offered nor a setting.
    """
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError as error:
        raise FedsimError(
            f"model.name is '{name}', which is not a Python function or class with known "
            "parameters."
        ) from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind is not p.VAR_POSITIONAL
        and p.name not in settings
        and (p.name not in offered or p.kind is p.POSITIONAL_ONLY)
    ]
    if missing:
        raise FedsimError(
            f"model.name is '{name}', which needs the argument '{missing[0]}'; it is called with "
            f"{', '.join(OFFERED)}, where it has such parameters, and [model.options]."
        )
    names = {p.name for p in parameters}
    return {key: value for key, value in offered.items() if key in names}
