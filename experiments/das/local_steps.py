"""Das et al.: one local step against many, at the same privacy cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.curves import log_ticks
from experiments.das.quadratic import METHODS, descend
from experiments.framework.base import (
    FLAT,
    NOT_EMPTY,
    BestOfGrid,
    Experiment,
    ExperimentClaim,
    Members,
    Report,
    Result,
    Settings,
    Table,
    seeds_text,
)
from experiments.framework.spread import all_ahead, listed, over_seeds, paired, within
from fedsim.cohorts import FullCohort
from fedsim.privacy import calibrate
from fedsim.reports.plots import COLOURS, curve_style, grid
from fedsim.settings import Constraint, Ge, Gt, Lt

PANELS = {"rate": "One rate", "path": "One path length"}
"""Panels, by the quantity that is equal at every number of steps: eta, or E eta."""


TICKS = (0.5, 1, 2, 5, 10)


@dataclass(frozen=True, kw_only=True)
class LocalStepsSettings(Settings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    rate : float
        The rate eta with ``reference_steps`` local steps; the path length is their product.
    local_steps : list of int
        Values of E, ascending.
    lengths : list of float
        Grid of eta C, the largest change of the model that a client sends. At every E, each
        method takes the value with the lowest final f on the tuning seeds.
    tuning_seeds : int
        Number of seeds (1, 2, ...) by which lengths are chosen; the ``seeds`` after them judge.
    """

    seeds: Annotated[int, Ge(1)] = 5
    clients: Annotated[int, Ge(1)] = 100
    dimension: Annotated[int, Ge(2)] = 200
    columns: Annotated[int, Ge(1)] = 20
    rounds: Annotated[int, Ge(1)] = 500
    epsilon: Annotated[float, Gt(0)] = 5.0
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-6
    problem_seed: Annotated[int, Ge(0)] = 1
    heterogeneity: Annotated[float, Ge(0)] = 0.1
    start: Annotated[float, Gt(0)] = 1.0
    rate: Annotated[float, Gt(0)]
    reference_steps: Annotated[int, Ge(1)] = 20
    local_steps: Annotated[
        list[int], Constraint(lambda steps: len(steps) > 1, "a list of two or more")
    ]
    lengths: Annotated[list[float], NOT_EMPTY]
    tuning_seeds: Annotated[int, Ge(1)] = 1


class Point(NamedTuple):
    """A method with a number of local steps and their rate."""

    method: str
    steps: int
    rate: float


class LocalSteps(Experiment):
    """Runs of `quadratic` with E varied; noise and privacy do not depend on E."""

    settings: LocalStepsSettings

    def members(self) -> Members:
        """Every length at every point, with the tuning seeds."""
        return {
            _name(point, length, seed): self._member(point, length, seed)
            for seed in range(1, self.settings.tuning_seeds + 1)
            for point in self._points
            for length in self.settings.lengths
        }

    def followers(self, results: Mapping[str, Result]) -> Members:
        """Fresh seeds at every point, with its best length."""
        return {
            _name(point, length, seed): self._member(point, length, seed)
            for seed in self._fresh
            for point in self._points
            for length in [self._choice(results, point).value]
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Mean distance to w* and gap of f over the last rounds."""
        result = descend(settings)
        return {"end": result["end"], "end-gap": result["end-gap"]}

    def report(self, results: Mapping[str, Result]) -> Report:
        """Final gaps by E: at one rate, and at one path length."""
        rows: list[list[str | float | None]] = []
        figures: dict[str, float] = {}
        for panel, title in PANELS.items():
            for point in self._along(panel):
                length = self._choice(results, point).value
                gaps = [10**power for power in self._logs(results, point)]
                mean, spread = over_seeds(gaps)
                rows.append([title, point.method, str(point.steps), f"{point.rate:g}",
                             f"{length:g}", f"{mean:.4g} ± {spread:.2g}"])  # fmt: skip
                figures[f"{panel} {point.method} E={point.steps}"] = mean
        title = (
            f"f - f* over the last rounds, mean ± s.d. of {seeds_text(self.settings.seeds)} "
            "(best eta C of the common grid)"
        )
        columns = ["the same at every E", "method", "E", "eta", "eta C", "f - f*"]
        return Report(
            tables=[Table("gaps", title, columns, rows)],
            figures=figures,
            claims=[
                *(self._more(results, panel, method) for panel in PANELS for method in METHODS),
                *(self._ahead(results, panel) for panel in PANELS),
            ],
            pictures={"gaps": self._picture(results)},
            choices=[self._choice(results, point) for point in self._points],
        )

    @property
    def _points(self) -> list[Point]:
        return list(dict.fromkeys(point for panel in PANELS for point in self._along(panel)))

    def _along(self, panel: str, methods: Sequence[str] = METHODS) -> list[Point]:
        s = self.settings
        path = s.rate * s.reference_steps
        return [
            Point(method, steps, s.rate if panel == "rate" else path / steps)
            for method in methods
            for steps in s.local_steps
        ]

    @property
    def _fresh(self) -> range:
        first = self.settings.tuning_seeds + 1
        return range(first, first + self.settings.seeds)

    @property
    def _noise_multiplier(self) -> float:
        s = self.settings
        return calibrate(
            target_epsilon=s.epsilon, cohort=FullCohort(), rounds=s.rounds, delta=s.delta
        )

    def _member(self, point: Point, length: float, seed: int) -> dict[str, Any]:
        s = self.settings
        return {
            "clients": s.clients,
            "dimension": s.dimension,
            "columns": s.columns,
            "rounds": s.rounds,
            "steps": point.steps,
            "delta": s.delta,
            "problem-seed": s.problem_seed,
            "case": {
                "name": f"E = {point.steps}",
                "heterogeneity": s.heterogeneity,
                "start": s.start,
                "lr": point.rate,
                "clip-norm": length / point.rate,
            },
            "method": point.method,
            "seed": seed,
            "noise-multiplier": self._noise_multiplier,
        }

    def _choice(self, results: Mapping[str, Result], point: Point) -> BestOfGrid:
        """Choice of the length with the lowest f; scores are in decibels below a gap of 1."""
        scores = {
            length: over_seeds(
                [
                    -10 * math.log10(results[_name(point, length, seed)]["end-gap"])
                    for seed in range(1, self.settings.tuning_seeds + 1)
                ]
            )[0]
            for length in self.settings.lengths
        }
        return BestOfGrid(
            f"eta C of {point.method} at E = {point.steps}, eta = {point.rate:g}", scores
        )

    def _logs(self, results: Mapping[str, Result], point: Point) -> list[float]:
        """log10 of the gaps of the fresh seeds, at the chosen length."""
        length = self._choice(results, point).value
        return [math.log10(results[_name(point, length, seed)]["end-gap"]) for seed in self._fresh]

    def _more(self, results: Mapping[str, Result], panel: str, method: str) -> ExperimentClaim:
        """Claim that the paper's number of steps ends at a lower f than one step."""
        points = {point.steps: point for point in self._along(panel, [method])}
        one, many = (
            points[k] for k in (self.settings.local_steps[0], self.settings.reference_steps)
        )
        lower = paired(*(self._decibels(results, point) for point in (one, many)))
        return ExperimentClaim(
            f"{panel}-{method}",
            PANELS[panel],
            f"{method}: E = {many.steps} ends at a lower f than E = {one.steps}, by {FLAT:g} dB "
            "or more",
            within([lower], FLAT, math.inf),
            f"lower by {lower.text} dB",
        )

    def _ahead(self, results: Mapping[str, Result], panel: str) -> ExperimentClaim:
        lower = [
            paired(*(self._decibels(results, Point(method, e, rate)) for method in METHODS))
            for _, e, rate in self._along(panel, METHODS[:1])
        ]
        names = [f"E = {e}" for e in self.settings.local_steps]
        return ExperimentClaim(
            f"{panel}-normalization-ahead",
            PANELS[panel],
            "with C tuned for each, normalisation ends at a lower f than clipping, at every E",
            all_ahead(lower),
            "lower by " + listed(lower, names) + " dB",
        )

    def _decibels(self, results: Mapping[str, Result], point: Point) -> list[float]:
        return [10 * power for power in self._logs(results, point)]

    def _picture(self, results: Mapping[str, Result]) -> Figure:
        title = "Quadratic problem: local steps, C tuned for each"
        figure, axes = grid(1, len(PANELS), title=title, width=9, height=4)
        steps = self.settings.local_steps
        for panel, (key, name) in zip(axes, PANELS.items(), strict=True):
            for method in METHODS:
                gaps = [
                    10 ** np.array(self._logs(results, point))
                    for point in self._along(key, [method])
                ]
                means = np.array([of.mean() for of in gaps])
                bars = [means - [of.min() for of in gaps], [of.max() for of in gaps] - means]
                style = {**curve_style(COLOURS[method]), "markevery": 1}
                panel.errorbar(steps, means, bars, **style, capsize=3, label=method)
            panel.set_yscale("log")
            panel.sharey(axes[0])
            log_ticks(panel, steps)
            panel.set_xlabel("local steps E")
            panel.set_title(name, fontsize=10)
        axes[0].set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes[0].set_ylabel("$f - f^*$; bars: range of seeds")
        axes[0].legend(frameon=False, fontsize=9)
        return figure


def _name(point: Point, length: float, seed: int) -> str:
    return f"{point.method} E={point.steps} eta={point.rate:g} eta-C={length:g} seed={seed}"
