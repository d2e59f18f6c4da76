"""The runs of a sweep: all points of a grid, and how runs are compared."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fedsim.config import RunConfig, Scalar
from fedsim.config.run_config import flatten, read_tree
from fedsim.config.values import read_options, read_value, split_top_level
from fedsim.errors import FedsimError
from fedsim.runs import factories
from fedsim.runs.callbacks import Measure
from fedsim.settings import settings_of

MAX_LABEL = 150

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
        if name == label and len(name) <= MAX_LABEL:
            return name
        digest = hashlib.sha256(label.encode()).hexdigest()[:8]
        return f"{name[: MAX_LABEL - 9]}-{digest}"


@dataclass(frozen=True)
class SweepVariant:
    """A value on an axis that has a name of its own: a part of a config, such as a method.

    Attributes
    ----------
    name : str
        Its name in labels, tables and pictures.
    changes : mapping of str to Scalar
        Values by dotted key.
    """

    name: str
    changes: Mapping[str, Scalar]

    @classmethod
    def read(cls, path: Path) -> list[SweepVariant]:
        """The variant that a TOML file describes, or those of its tables, by the tables' names.

        Raises
        ------
        FedsimError
            If the file cannot be read.
        """
        tree = read_tree(path)
        named = tree.keys().isdisjoint(setting.key for setting in settings_of(RunConfig))
        if named and tree and all(isinstance(table, Mapping) for table in tree.values()):
            return [cls(name, flatten(table)) for name, table in tree.items()]
        return [cls(path.stem, flatten(tree))]


def changes_at(point: Mapping[str, Any]) -> dict[str, Any]:
    """What a point of a grid changes in the config, by dotted key."""
    changes: dict[str, Any] = {}
    for axis, value in point.items():
        of_value = value.changes if isinstance(value, SweepVariant) else {axis: value}
        if twice := changes.keys() & of_value.keys():
            raise FedsimError(
                f"--over {axis} sets {', '.join(sorted(twice))}, which another axis sets too; one "
                "of them must leave it out."
            )
        changes |= of_value
    return changes


def grid_runs(config: RunConfig, axes: Mapping[str, list[Any]]) -> list[SweepRun]:
    """The runs of a grid, the last axis varying fastest.

    Raises
    ------
    FedsimError
        If an axis has a value twice, or a config is invalid.
    """
    distinct: dict[tuple[object, ...], SweepRun] = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        changed = config.replace(**changes_at(chosen))
        flat = changed.to_run_config()
        # Values as a config writes them: 64 and '64' are equal as a list, 1 and 1.0 as a number.
        point = {
            axis: value.name if isinstance(value, SweepVariant) else _point_value(flat, axis)
            for axis, value in chosen.items()
        }
        distinct.setdefault(tuple(flat.items()), SweepRun(point, changed))
    runs = list(distinct.values())
    if len(runs) < math.prod(map(len, axes.values())):
        # As configs write them, in which 0.1 and 0.10 are one value.
        points = {key: {run.point[key] for run in runs} for key in axes}
        repeated = [key for key, axis in axes.items() if len(points[key]) < len(axis)]
        repeated = repeated or [
            key for key, (first, *_) in axes.items() if type(first) is SweepVariant
        ]
        raise FedsimError(
            f"--over {' and '.join(repeated)} has a value twice, which would be one run; give each "
            "once."
        )
    return runs


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


def sweep_measure(config: RunConfig) -> Measure:
    """Metric that runs are judged by: the first of ``task.metrics``, or the loss without any."""
    for name, metric in factories.metrics(config).items():
        return Measure(name, metric.higher_is_better)
    return Measure("loss", higher_is_better=False)


def parse_axes(overs: Iterable[str]) -> dict[str, list[Any]]:
    """Parse ``key=v1,v2`` for each axis; values as for ``--set``, lists in brackets.

    An axis that is no key of a config, such as ``method``, has `SweepVariant` s, from TOML files.

    Raises
    ------
    FedsimError
        If an axis has no values, or is given twice, or a file cannot be read.
    """
    axes: dict[str, list[Any]] = {}
    for over in overs:
        key, _, text = over.partition("=")
        key = key.strip()
        if not key or not text.strip():
            raise FedsimError(f"--over {over!r} is not of the form key=v1,v2,....")
        if key in axes:
            raise FedsimError(f"--over {key} is given twice; give all its values at once.")
        values = split_top_level(text)
        if _has_variants(key, values):
            axes[key] = [variant for value in values for variant in SweepVariant.read(Path(value))]
        else:
            axes[key] = [read_value(value) for value in values]
    return axes


def _has_variants(key: str, values: Iterable[str]) -> bool:
    is_key = "." in key or key in {setting.key for setting in settings_of(RunConfig)}
    return not is_key and all(value.endswith(".toml") for value in values)
