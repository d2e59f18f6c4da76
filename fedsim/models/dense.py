"""Stacks of fully connected layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from fedsim.errors import FedsimError
from fedsim.lazy import torch
from fedsim.machine import refuse_larger_than_memory

if TYPE_CHECKING:
    from torch import nn

__all__ = ["dense", "fully_connected", "parse_widths", "write_widths"]

DEEPEST, WIDEST = 1000, 10_000_000


def dense(
    input_shape: Sequence[int], widths: Sequence[int], num_classes: int, *, bias: bool
) -> nn.Sequential:
    """Flatten, then `fully_connected` from the examples' size to ``num_classes``."""
    sizes = (math.prod(input_shape), *widths, num_classes)
    parameters = sum(inputs * outputs for inputs, outputs in pairwise(sizes))
    refuse_larger_than_memory(
        4 * parameters,
        f"a model with layers of {', '.join(map(str, sizes))} (the data's size, model.widths, the "
        "number of classes)",
    )
    return torch.nn.Sequential(
        OrderedDict(flatten=torch.nn.Flatten(), **fully_connected(sizes, bias=bias))
    )


def fully_connected(sizes: Sequence[int], *, bias: bool) -> dict[str, nn.Module]:
    """Linear layers ``fc1``, ``fc2``, ... of these sizes with ReLUs between them, by name."""
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        if i > 1:
            layers[f"relu{i - 1}"] = torch.nn.ReLU()
        layers[f"fc{i}"] = torch.nn.Linear(inputs, outputs, bias=bias)
    return layers


def write_widths(widths: Sequence[int]) -> str:
    """As `parse_widths` reads them."""
    return ",".join(map(str, widths))


def parse_widths(widths: str | int | Sequence[int]) -> tuple[int, ...]:
    """Hidden units of each layer, from ``"256,256"``, one number, or as they are.

    Raises
    ------
    FedsimError
        If there is none, or one is not a whole number above 0.
    """
    if isinstance(widths, int):
        widths = str(widths)
    pieces = widths.strip("[] ").split(",") if isinstance(widths, str) else widths
    try:
        parsed = tuple(int(piece) for piece in pieces)
    except (ValueError, TypeError):
        parsed = ()
    if not parsed or min(parsed) < 1 or len(parsed) > DEEPEST or max(parsed) > WIDEST:
        raise FedsimError(
            f"model.widths is '{str(widths)[:100]}'; an mlp needs the hidden units of each of at "
            f"most {DEEPEST:,} layers, whole numbers from 1 to {WIDEST:,} separated by commas, "
            "such as '256,256'."
        )
    return parsed
