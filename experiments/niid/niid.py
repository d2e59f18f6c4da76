"""A table of NIID-Bench: methods on ten heterogeneous clients, against the published figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar

from scipy import stats

from experiments.curves import Curve, curves
from experiments.framework.base import (
    NOT_EMPTY,
    ExperimentClaim,
    Report,
    Result,
    Table,
    seeds_text,
)
from experiments.framework.config_runs import (
    ConfigRuns,
    ConfigRunsSettings,
    LeaderboardEntry,
    Variant,
)
from experiments.framework.spread import LEVEL, mean_text, over_seeds
from fedsim.config import Scalar

STYLES = ("adadp", "sgd", "second", "fifth")
WILD = 5.0
"""Published standard deviation, in percentage points, above which a cell is not judged."""


@dataclass(frozen=True, kw_only=True)
class PublishedMethod(Variant):
    """A method and its published accuracy (%)."""

    mean: float
    deviation: float


@dataclass(frozen=True, kw_only=True)
class NiidSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``."""

    title: str
    published_seeds: int
    methods: Annotated[list[PublishedMethod], NOT_EMPTY]


class Niid(ConfigRuns):
    """Every method with the published settings, without tuning.

    The published accuracies are the best of all rounds on the test examples, so the best round is
    judged here too; the last one is also reported.
    """

    settings: NiidSettings
    partial: ClassVar[bool] = True

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """The changed keys of each method."""
        return {method.name: method.keys for method in self.settings.methods}

    def report(self, results: Mapping[str, Result]) -> Report:
        """Best and last accuracies next to the published ones, and a claim for each judged cell."""
        settings, scores = self.settings, self.scores(results)
        judged = sum(method.deviation <= WILD for method in settings.methods)
        rows: list[list[str | float | None]] = []
        claims = []
        for method in settings.methods:
            runs = self.of_plan(results, method.name)
            best = [100 * max(run["accuracy"]) for run in runs]
            published = f"{method.mean:.2f} ± {method.deviation:.2f}"
            inside, text = self._judged(method, best, judged)
            shown = mean_text(best) if best else None
            last = scores[method.name].text if best else None
            rows.append([method.name, published, f"{len(best)}", shown, text, last])
            if method.deviation <= WILD:
                says = f"{method.name} reaches {published} % in its best round"
                claims.append(ExperimentClaim(method.name, settings.title, says, inside, text))
        columns = ["method", "published", "seeds", "best round", "difference [95 %]", "last round"]
        title = f"{settings.title}, test accuracy (%) in {self.base.rounds} rounds"
        lines = [
            Curve(name, scores[name], style)
            for name, style in zip(self.plans(), STYLES, strict=False)
            if name in scores
        ]
        return Report(
            tables=[Table("accuracy", title, columns, rows)],
            figures={name: score.mean for name, score in scores.items()},
            claims=claims,
            pictures={"accuracy": curves(title, [("", lines)], xlabel="round")} if lines else {},
        )

    def entries(self, results: Mapping[str, Result]) -> list[LeaderboardEntry]:
        """The last round of every method, since the best one is found on the test examples."""
        return [
            LeaderboardEntry(
                name,
                self.settings.title,
                {
                    member: 100 * results[member]["accuracy"][-1]
                    for seed in range(1, self.settings.seeds + 1)
                    if (member := f"{name} seed={seed}") in results
                },
            )
            for name in self.plans()
        ]

    def _judged(
        self, method: PublishedMethod, best: Sequence[float], claims: int
    ) -> tuple[bool | None, str]:
        """Verdict on whether the best rounds agree with the published ones, and the difference.

        ``claims`` is the number of claims whose intervals must hold jointly.
        """
        missing = self.settings.seeds - len(best)
        if not best:
            return None, "not run"
        centre = f"{fmean(best) - method.mean:+.2f}"
        if missing:
            return None, f"{centre}, {seeds_text(missing)} missing"
        alone, together = (
            welch(best, method.mean, method.deviation, self.settings.published_seeds, of=of)
            for of in (1, claims)
        )
        text = f"{centre} [{alone[0]:+.2f}, {alone[1]:+.2f}]"
        if alone[0] <= 0 <= alone[1]:
            return True, text
        return (None if together[0] <= 0 <= together[1] else False), text


def welch(
    ours: Sequence[float], mean: float, deviation: float, seeds: int, *, of: int = 1
) -> tuple[float, float]:
    """Confidence interval of the difference of two means, ours minus the published (Welch 1947).

    At 95 % for ``of`` such intervals jointly (Bonferroni).
    """
    if len(ours) < 2:
        return -math.inf, math.inf
    centre, spread = over_seeds(ours)
    first, second = spread**2 / len(ours), deviation**2 / seeds
    error = math.sqrt(first + second)
    if error == 0:
        return centre - mean, centre - mean
    freedom = (first + second) ** 2 / (first**2 / (len(ours) - 1) + second**2 / (seeds - 1))
    reach = float(stats.t.ppf(1 - (1 - LEVEL) / (2 * of), freedom)) * error
    return centre - mean - reach, centre - mean + reach
