"""Axes of a sweep: a few values of a key, or a span to draw them from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from fedsim.config.values import apart, read_value
from fedsim.errors import FedsimError

__all__ = ["Axes", "Span", "parse_axes"]

DIGITS = 4


@dataclass(frozen=True)
class Span:
    """Numbers from ``low`` to ``high``.

    Attributes
    ----------
    scale : "uniform", "log" or "whole"
        All numbers alike, all orders of magnitude alike, or whole numbers.
    low, high : float
        Both of them included.
    """

    scale: Literal["uniform", "log", "whole"]
    low: float
    high: float

    def draw(self, generator: np.random.Generator) -> float | int:
        """One of them, to four significant digits."""
        if self.scale == "whole":
            return int(generator.integers(int(self.low), int(self.high), endpoint=True))
        if self.scale == "uniform":
            value = generator.uniform(self.low, self.high)
        else:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        rounded = float(f"{value:.{DIGITS}g}")
        return min(max(rounded, self.low), self.high)


Axes: TypeAlias = Mapping[str, "list[Any] | Span"]


def parse_axes(overs: Iterable[str]) -> dict[str, list[Any] | Span]:
    """``key=v1,v2`` for each axis, each value as ``--set`` reads it; lists stand in brackets.

    A span to draw from is written ``key=log(0.001,1)``, ``uniform(0,1)`` or ``whole(1,20)``.

    Raises
    ------
    FedsimError
        If an axis has no values, or comes twice.
    """
    axes: dict[str, list[Any] | Span] = {}
    for over in overs:
        key, _, text = over.partition("=")
        key = key.strip()
        if not key or not text.strip():
            raise FedsimError(f"--over {over!r} is not of the form key=v1,v2,....")
        if key in axes:
            raise FedsimError(f"--over {key} is given twice; give all its values at once.")
        axes[key] = _span(over, text) or [read_value(value) for value in apart(text)]
    return axes


def _span(over: str, text: str) -> Span | None:
    """The span that a text is, if it looks like one."""
    written = re.fullmatch(r"\s*(uniform|log|whole)\(([^,()]*),([^,()]*)\)\s*", text)
    if written is None:
        return None
    scale, *ends = written.groups()
    low, high = (read_value(end) for end in ends)
    numbers = int if scale == "whole" else int | float
    sound = all(isinstance(end, numbers) and not isinstance(end, bool) for end in (low, high))
    if (
        not sound
        or not low < high
        or not math.isfinite(high - low)
        or (scale == "log" and low <= 0)
    ):
        allowed = {"whole": "two whole numbers", "log": "two numbers above 0"}
        raise FedsimError(
            f"--over {over!r} is no span; {scale}(low,high) takes "
            f"{allowed.get(scale, 'two numbers')}, the smaller one first."
        )
    return Span(scale, low, high)  # type: ignore[arg-type]
