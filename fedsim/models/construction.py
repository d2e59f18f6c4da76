"""Build a model by its name, initialised as a function of the seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedsim import registry
from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.keywords import accepted, arguments_of, complete_arguments
from fedsim.models.hugging_face import kind_of
from fedsim.models.parameters import converted, refuse_other_than_numbers
from fedsim.randomness import Purpose, Randomness

OFFERED = ("input_shape", "num_classes", "vocabulary")
"""Sizes of the data that are passed to a model, where its constructor takes them."""


@check_arguments
def build(
    name: str,
    input_shape: Sequence[int] | Mapping[str, Sequence[int]],
    num_classes: int,
    *,
    vocabulary: int | Mapping[str, int] = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **settings: Any,
) -> nn.Module:
    """Build a model on the CPU, initialised.

    Parameters
    ----------
    name : str
        One of ``fedsim config list model``, ``hf:FOLDER`` (see `HuggingFaceModel`), or
        ``module:callable`` (see `fedsim.registry`), which must return an `nn.Module`. It is called
        with its settings and with those of the keywords
        ``input_shape``, ``num_classes`` and ``vocabulary`` that it accepts. It must draw initial
        weights from torch's global CPU generator, as layers do, which is seeded for the call.
    input_shape : ``(C, H, W)`` or ``(d,)``
        Shape of one example. The model takes a batch ``[B, *input_shape]`` and returns logits
        ``[B, num_classes]``. Of several inputs a mapping of their shapes, by name.
    num_classes : int
        Number of classes, or of the numbers in a target if targets are not classes.
    vocabulary : int
        Number of tokens; 0 if inputs are not tokens. Of several inputs a mapping, by name.
    dtype : torch.float32, torch.float64 or torch.bfloat16
        The models start from the float32 one's numbers; see `converted`.
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
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise FedsimError(f"model.dtype is {dtype}; it must be float32, float64 or bfloat16.")
    draws = Randomness(seed).generator(Purpose.INIT, level="run")
    # Layers draw initial weights from torch's global generator, which is the user's: fork_rng
    # restores its state afterwards. No devices: models are built on the CPU.
    with torch.random.fork_rng(devices=[]), registry.current_directory_importable():
        torch.default_generator.manual_seed(int(draws.integers(2**63)))
        kind = kind_of(name)
        factory: Any = registry.find("model", kind, "model.name")
        by_name = isinstance(input_shape, Mapping)
        about = (input_shape if by_name else tuple(input_shape), num_classes, vocabulary)
        offered: dict[str, Any] = dict(zip(OFFERED, about, strict=True))
        has_settings = dataclasses.is_dataclass(factory) and ":" not in kind
        table = "model" if has_settings else "model.options"
        arguments = arguments_of(factory, name, settings, table, OFFERED)
        if kind != name:
            arguments["name"] = name
        model: Any = factory(**arguments, **accepted(factory, offered))
        is_recipe = dataclasses.is_dataclass(model) and not isinstance(model, nn.Module)
        if is_recipe:
            sizes = complete_arguments(model, name, offered)
            if by_name and "input_shape" in sizes:
                raise FedsimError(
                    f"model.name is '{name}', which takes one input, but the data have "
                    f"{', '.join(map(str, input_shape))} by name; it must be a model of your own, "
                    "whose forward takes them."
                )
            if vocabulary and "vocabulary" not in sizes:
                raise FedsimError(
                    f"model.name is '{name}', which takes numbers, but the data's inputs are tokens"
                    " (integers); it must be a model that embeds them, such as one of your own."
                )
            model = model(**sizes)
    if not isinstance(model, nn.Module):
        raise FedsimError(
            f"model.name is '{name}', which returns {type(model).__name__}; it must return a "
            "torch.nn.Module."
        )
    refuse_other_than_numbers(model)
    return converted(model, dtype)
