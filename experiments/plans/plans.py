"""Compare ways to spend one epsilon: kinds of noise and cohorts, at a fixed C and rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from matplotlib.figure import Figure

from experiments.curves import error_bars, log_ticks
from experiments.framework.base import (
    NOT_EMPTY,
    ExperimentClaim,
    Report,
    Result,
    Table,
    seeds_text,
)
from experiments.framework.config_runs import ConfigRuns, ConfigRunsSettings, Score, Variant
from experiments.framework.spread import paired
from fedsim.config import Scalar
from fedsim.reports.plots import COLOURS, SERIES, grid

FREE = "without noise"


@dataclass(frozen=True, kw_only=True)
class EpsilonsClaim:
    """A claim: one way is more accurate than another at these epsilons."""

    name: str
    panel: str
    ahead: str
    behind: str
    epsilons: Annotated[list[float], NOT_EMPTY]


@dataclass(frozen=True, kw_only=True)
class PlansSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``."""

    title: str
    epsilons: Annotated[list[float], NOT_EMPTY]
    ways: Annotated[list[Variant], NOT_EMPTY]
    claims: list[EpsilonsClaim] = field(default_factory=list)


class Plans(ConfigRuns):
    """Every way at every epsilon, and a run without noise; nothing is chosen by test accuracy."""

    settings: PlansSettings
    last: ClassVar[int] = 5

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """The run without noise, then every epsilon and way."""
        plans: dict[str, dict[str, Scalar]] = {
            FREE: {"noise.target-epsilon": "", "noise.multiplier": 0.0}
        }
        for epsilon in self.settings.epsilons:
            for way in self.settings.ways:
                keys = {**way.keys, "noise.target-epsilon": epsilon}
                plans[_name(way.name, epsilon)] = keys
        return plans

    def report(self, results: Mapping[str, Result]) -> Report:
        """Accuracies by way and epsilon, as a table and a picture, and the claims."""
        settings, scores = self.settings, self.scores(results)
        rows: list[list[str | float | None]] = [
            [way.name, *(scores[_name(way.name, epsilon)].text for epsilon in settings.epsilons)]
            for way in settings.ways
        ]
        rows.append([FREE, scores[FREE].text, *[None] * (len(settings.epsilons) - 1)])
        title = (
            f"{settings.title}: {self.base.data.name}, test accuracy (%), mean of the last "
            f"{self.last} of {self.base.rounds} rounds, mean ± s.d. of "
            f"{seeds_text(settings.seeds)}"
        )
        columns = ["way", *(f"epsilon {epsilon:g}" for epsilon in settings.epsilons)]
        return Report(
            tables=[Table("accuracy", title, columns, rows)],
            figures={name: score.mean for name, score in scores.items()},
            claims=[
                self._claim(claim, epsilon, scores)
                for claim in settings.claims
                for epsilon in claim.epsilons
                if epsilon in settings.epsilons
            ],
            pictures={"accuracy": self._picture(scores, title)},
        )

    def _claim(
        self, claim: EpsilonsClaim, epsilon: float, scores: Mapping[str, Score]
    ) -> ExperimentClaim:
        first, second = (scores[_name(variant, epsilon)] for variant in (claim.ahead, claim.behind))
        gain = paired(first.finals, second.finals)
        return ExperimentClaim(
            f"{claim.name}-{epsilon:g}",
            claim.panel,
            f"epsilon {epsilon:g}: {claim.ahead} ends above {claim.behind}",
            gain.positive,
            gain.text,
        )

    def _picture(self, scores: Mapping[str, Score], title: str) -> Figure:
        figure, (axes,) = grid(1, 1, title=title, width=9.0, height=5.0)
        epsilons = self.settings.epsilons
        for index, way in enumerate(self.settings.ways):
            tried = [scores[_name(way.name, epsilon)].finals for epsilon in epsilons]
            colour, alpha = SERIES[index % len(SERIES)], 1.0 if index < len(SERIES) else 0.5
            error_bars(axes, epsilons, tried, colour, way.name, alpha=alpha)
        axes.axhline(scores[FREE].mean, color=COLOURS["neutral"], linewidth=1, label=FREE)
        log_ticks(axes, epsilons)
        axes.set_xlabel("epsilon")
        axes.set_ylabel("test accuracy (%); bars: s.d. over seeds")
        axes.legend(frameon=False, fontsize=8)
        return figure


def _name(variant: str, epsilon: float) -> str:
    return f"{variant} eps={epsilon:g}"
