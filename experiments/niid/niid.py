"""A table of NIID-Bench: methods on ten clients that differ, beside what was published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field
from scipy import stats

from experiments.framework.base import PaperClaim, Report, Result, Settings, Table
from experiments.framework.config_runs import ConfigRuns, ConfigRunsSettings
from experiments.framework.curves import Curve, curves
from experiments.framework.schema import Section
from experiments.framework.spread import LEVEL, over_seeds
from fedsim.config import Scalar

__all__ = ["Niid", "NiidSettings", "welch"]

STYLES = ("adadp", "sgd", "second", "fifth")
WILD = 5.0
"""Percentage points: a published cell whose seeds spread further is reported, and not judged."""


class PublishedMethod(Section):
    """A method: the run's keys that it changes, and its published accuracy (%)."""

    name: str
    keys: dict[str, Scalar] = Field(default_factory=dict)
    mean: float
    deviation: float


class NiidSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``."""

    title: str
    published_seeds: int
    methods: list[PublishedMethod] = Field(min_length=1)


class Niid(ConfigRuns):
    """Every method with the published settings; nothing is chosen here."""

    settings: NiidSettings
    settings_type: ClassVar[type[Settings]] = NiidSettings

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """A run of each method."""
        return {method.name: method.keys for method in self.settings.methods}

    def report(self, results: Mapping[str, Result]) -> Report:
        """Final and best accuracies beside the published, and a claim for each judged cell."""
        settings, scores = self.settings, self.scores(results)
        rows: list[list[str | float | None]] = []
        claims = []
        for method in settings.methods:
            score = scores[method.name]
            best = [100 * max(r["accuracy"]) for r in self.of_plan(results, method.name)]
            low, high = welch(score.finals, method.mean, method.deviation, settings.published_seeds)
            difference = f"{score.mean - method.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
            published = f"{method.mean:.2f} ± {method.deviation:.2f}"
            mean, spread = over_seeds(best)
            rows.append(
                [method.name, published, score.text, difference, f"{mean:.2f} ± {spread:.2f}"]
            )
            if method.deviation <= WILD:
                says = f"{method.name} ends at {published} %"
                inside = low <= 0 <= high if math.isfinite(high - low) else None
                claims.append(PaperClaim(method.name, settings.title, says, inside, difference))
        columns = ["method", "published", "here", "difference, interval at 95 %", "best round"]
        title = f"{settings.title}, test accuracy (%) after {self.base.rounds} rounds"
        lines = [
            Curve(name, scores[name], style)
            for name, style in zip(self.plans(), STYLES, strict=False)
        ]
        return Report(
            tables=[Table("accuracy", title, columns, rows)],
            figures={name: score.mean for name, score in scores.items()},
            claims=claims,
            pictures={"accuracy": curves(title, [("", lines)], xlabel="round")},
        )


def welch(ours: Sequence[float], mean: float, deviation: float, seeds: int) -> tuple[float, float]:
    """Interval at 95 % of the difference of two means, ours less the published (Welch 1947)."""
    if len(ours) < 2:
        return -math.inf, math.inf
    centre, spread = over_seeds(ours)
    first, second = spread**2 / len(ours), deviation**2 / seeds
    error = math.sqrt(first + second)
    if error == 0:
        return centre - mean, centre - mean
    freedom = (first + second) ** 2 / (first**2 / (len(ours) - 1) + second**2 / (seeds - 1))
    reach = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
    return centre - mean - reach, centre - mean + reach
