"""The runs of a sweep: all points of a grid, or random points, and how runs are compared."""

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
from fedsim.runs.callbacks import Measure
from fedsim.runs.resolve import Resolved

LONGEST_LABEL = 150

Setting: TypeAlias = tuple[tuple[str, Scalar], ...]
"""Values on a sweep's axes but the seed's."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes
    ----------
    point : mapping of key to value
        Its value on each axis.
    config : RunConfig
    """

    point: dict[str, Scalar]
    config: RunConfig

    @property
    def setting(self) -> Setting:
        """The point without the seed: runs of one setting differ in their seeds only."""
        return tuple((key, value) for key, value in self.point.items() if key != "seed")

    @property
    def label(self) -> str:
        """``key=value`` for each axis; also the name of the run's directory.

        Characters that are not allowed in a path are replaced and a long label is cut; a digest of
        the full label is appended then.
        """
        label = ",".join(f"{key}={value}" for key, value in self.point.items())
        name = re.sub(r"[^A-Za-z0-9=,.+_-]", "_", label)
        if name == label and len(name) <= LONGEST_LABEL:
            return name
        digest = hashlib.sha256(label.encode()).hexdigest()[:8]
        return f"{name[: LONGEST_LABEL - 9]}-{digest}"


def grid_runs(config: RunConfig, axes: Axes) -> list[SweepRun]:
    """The runs of a grid, the last axis varying fastest.

    Raises
    ------
    FedsimError
        If an axis is a span or has a value twice, or a config is invalid.
    """
    values = []
    for key, axis in axes.items():
        if isinstance(axis, Span):
            raise FedsimError(
                f"--over {key} is a range, from which values are drawn; say how many with "
                "--random, or give values with commas between."
            )
        values.append(axis)
    runs = _distinct(config, axes, itertools.product(*values))
    if len(runs) < math.prod(map(len, values)):
        # As configs write them, in which 0.1 and 0.10 are one value.
        points = {key: {run.point[key] for run in runs} for key in axes}
        raise _repeated(
            key for key, axis in zip(axes, values, strict=True) if len(points[key]) < len(axis)
        )
    return runs


def random_runs(config: RunConfig, axes: Axes, number: int) -> list[SweepRun]:
    """Runs at randomly drawn points, each with all seeds if ``seed`` is an axis.

    A value depends only on the config's seed, the key and the point's number: adding points or
    another axis leaves the others unchanged.

    Raises
    ------
    FedsimError
        If the seed is a span, an axis has a value twice, or a config is invalid.
    """
    for key, axis in axes.items():
        if not isinstance(axis, Span) and len(set(map(repr, axis))) < len(axis):
            raise _repeated([key])
    seeds = axes.get("seed", [config.seed])
    if isinstance(seeds, Span):
        raise FedsimError(
            "--over seed is a range; it must be values: each point is run with all of them."
        )
    source = Randomness(config.seed)
    points = [
        tuple(
            seed if key == "seed" else _draw(axis, source, key, index) for key, axis in axes.items()
        )
        for index in range(number)
        for seed in seeds
    ]
    return _distinct(config, axes, points)


def _repeated(keys: Iterable[str]) -> FedsimError:
    return FedsimError(
        f"--over {' and '.join(keys)} has a value twice, which would be one run; give each once."
    )


def _draw(axis: list[Any] | Span, source: Randomness, key: str, index: int) -> Any:
    part = int.from_bytes(hashlib.sha256(key.encode()).digest()[:5], "little")
    # `repeated`: all seeds of one point make the same draw.
    generator = source.repeated().generator(Purpose.SEARCH, level="run", round=index, part=part)
    return axis.draw(generator) if isinstance(axis, Span) else axis[generator.integers(len(axis))]


def _distinct(config: RunConfig, axes: Axes, points: Iterable[tuple[Any, ...]]) -> list[SweepRun]:
    distinct: dict[tuple[object, ...], SweepRun] = {}
    for values in points:
        changed = config.replace(**dict(zip(axes, values, strict=True)))
        flat = changed.to_run_config()
        # Values as a config writes them: 64 and '64' are equal as a list, 1 and 1.0 as a number.
        point = {key: _point_value(flat, key) for key in axes}
        distinct.setdefault(tuple(flat.items()), SweepRun(point, changed))
    return list(distinct.values())


def _point_value(flat: Mapping[str, Scalar], key: str) -> Scalar:
    """Value at a key of a flat config, in which a table's options are one string."""
    table, option_of, name = key.partition(".options.")
    if not option_of:
        return flat.get(key, "")
    options = read_options(str(flat.get(f"{table}.options", "")), f"{table}.options")
    value = options.get(name, "")
    # An option's type is not declared: 1, 1.0, true and '1' are four different values.
    misread = isinstance(value, str) and (read_value(value) != value or value in ("True", "False"))
    return f"'{value}'" if misread else str(value)


def measure_of(config: RunConfig) -> Measure:
    """Metric that runs are judged by: the first of ``task.metrics``, or the loss without any."""
    for name, metric in factories.metrics(config).items():
        return Measure(name, metric.higher_is_better)
    return Measure("loss", higher_is_better=False)


def require_validation(config: RunConfig, option: str) -> None:
    """Refuse to compare runs that hold out no validation examples.

    Raises
    ------
    FedsimError
    """
    if not (config.data.validation and config.evaluate.every):
        raise FedsimError(
            f"{option} compares runs by examples that are held out, in the column "
            f"validation-{measure_of(config).name}; set data.validation, such as 0.1, and "
            "evaluate.every = 1."
        )


def comparison_measure(resolved: Resolved, option: str) -> Measure:
    """The measure by which ``option`` compares runs like this one, on their validation examples.

    Raises
    ------
    FedsimError
        If that column of metrics.csv may not decide anything; see `Measure.of_column`.
    """
    column = f"validation-{measure_of(resolved.config).name}"
    return Measure.of_column(resolved, f"the column that {option} compares", column)


DIGITS = 4


@dataclass(frozen=True)
class Span:
    """A range from ``low`` to ``high`` to draw values from.

    Attributes
    ----------
    scale : "uniform", "log" or "whole"
        Uniform, uniform in the logarithm, or uniform over whole numbers.
    low, high : float
        Ends of the range, both included.
    """

    scale: Literal["uniform", "log", "whole"]
    low: float
    high: float

    def draw(self, generator: np.random.Generator) -> float | int:
        """Draw a value, rounded to four significant digits."""
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
    """Parse ``key=v1,v2`` for each axis; values as for ``--set``, lists in brackets.

    A span to draw from is written ``key=log(0.001,1)``, ``uniform(0,1)`` or ``whole(1,20)``.

    Raises
    ------
    FedsimError
        If an axis has no values, or is given twice.
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
    """Parse a span; None if the text does not look like one."""
    match = re.fullmatch(r"\s*(uniform|log|whole)\(([^,()]*),([^,()]*)\)\s*", text)
    if match is None:
        return None
    scale, *ends = match.groups()
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
            f"--over {over!r} is not a range; {scale}(low,high) takes "
            f"{allowed.get(scale, 'two numbers')}, the smaller one first."
        )
    return Span(scale, low, high)  # type: ignore[arg-type]
