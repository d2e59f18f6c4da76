"""The members of a sweep: each point of a grid, or points that are drawn."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from fedsim.config import RunConfig, Scalar
from fedsim.config.values import read_options, read_value, split_top_level
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness
from fedsim.runs import factories
from fedsim.runs.sweep.measure import Measure

LONGEST_LABEL = 150


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes
    ----------
    point : mapping of key to value
        Its place on each axis.
    config : RunConfig
    """

    point: dict[str, Scalar]
    config: RunConfig

    @property
    def label(self) -> str:
        """``key=value`` for each axis; also the name of its directory.

        What cannot stand in a path, or makes it too long, is left out, and a digest of the whole
        comes in its place.
        """
        label = ",".join(f"{key}={value}" for key, value in self.point.items())
        name = re.sub(r"[^A-Za-z0-9=,.+_-]", "_", label)
        if name == label and len(name) <= LONGEST_LABEL:
            return name
        digest = hashlib.sha256(label.encode()).hexdigest()[:8]
        return f"{name[: LONGEST_LABEL - 9]}-{digest}"


def members(config: RunConfig, axes: Axes) -> list[Member]:
    """The grid, the last axis fastest, of valid configs; those that are equal are one member.

    Raises
    ------
    FedsimError
        If an axis is a span, or a config is no good.
    """
    values = []
    for key, axis in axes.items():
        if isinstance(axis, Span):
            raise FedsimError(
                f"--over {key} is a span, from which values are drawn; say how many with --random, "
                "or give values with commas between."
            )
        values.append(axis)
    return _distinct(config, axes, itertools.product(*values))


def drawn(config: RunConfig, axes: Axes, number: int) -> list[Member]:
    """Points drawn at random, each with every seed where ``seed`` is an axis.

    What is drawn follows from the config's seed, the key and how many were drawn before: more of
    them, or another axis, leave those that were there as they are.

    Raises
    ------
    FedsimError
        If the seed is a span, or a config is no good.
    """
    seeds = axes.get("seed", [config.seed])
    if isinstance(seeds, Span):
        raise FedsimError("--over seed is a span; it must be values: each point is run with all.")
    source = Randomness(config.seed)
    points = [
        tuple(
            seed if key == "seed" else _draw(axis, source, key, index) for key, axis in axes.items()
        )
        for index in range(number)
        for seed in seeds
    ]
    return _distinct(config, axes, points)


def _draw(axis: list[Any] | Span, source: Randomness, key: str, index: int) -> Any:
    part = int.from_bytes(hashlib.sha256(key.encode()).digest()[:5], "little")
    # Of each seed again: it is the point's, not the member's.
    generator = source.repeated().generator(Purpose.SEARCH, level="run", round=index, part=part)
    return axis.draw(generator) if isinstance(axis, Span) else axis[generator.integers(len(axis))]


def _distinct(config: RunConfig, axes: Axes, points: Iterable[tuple[Any, ...]]) -> list[Member]:
    distinct: dict[tuple[object, ...], Member] = {}
    for values in points:
        changed = config.replace(**dict(zip(axes, values, strict=True)))
        flat = changed.to_run_config()
        # As a config writes them: 64 and '64' are one value of a list, 1 and 1.0 of a number.
        point = {key: _written(flat, key) for key in axes}
        distinct.setdefault(tuple(flat.items()), Member(point, changed))
    return list(distinct.values())


def _written(flat: Mapping[str, Scalar], key: str) -> Scalar:
    """What stands at a key of a flattened config, in which options are one string."""
    table, option_of, name = key.partition(".options.")
    if not option_of:
        return flat.get(key, "")
    options = read_options(str(flat.get(f"{table}.options", "")), f"{table}.options")
    value = options.get(name, "")
    # 1, 1.0, true and '1' are four values of an option, whose type nobody has declared.
    misread = isinstance(value, str) and (read_value(value) != value or value in ("True", "False"))
    return f"'{value}'" if misread else str(value)


def measure_of(config: RunConfig) -> Measure:
    """What a member is judged by: the first of ``task.metrics``, or the loss without any."""
    for name, metric in factories.metrics(config).items():
        return Measure(name, metric.higher_is_better)
    return Measure("loss", higher_is_better=False)


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
        axes[key] = _span(over, text) or [read_value(value) for value in split_top_level(text)]
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
