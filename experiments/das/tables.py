"""Das et al.: clipping, normalisation and FedAvg on real data, with a sweep over C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments.framework.base import (
    Context,
    Experiment,
    ExperimentMember,
    PaperClaim,
    Report,
    Result,
    Settings,
    Table,
    over_seeds,
    seeds_text,
)
from fedsim.config import RunConfig
from fedsim.reports.palette import COLOURS
from fedsim.reports.plots import curve_style, grid
from fedsim.runs.runner import run

__all__ = ["METHODS", "Das", "DasSettings"]

METHODS = ("clipping", "normalization")
LAST = 5  # rounds that an accuracy is the mean of


class DasSettings(Settings):
    """Keys of ``experiment.toml``; ``run.toml`` beside it is the run that they vary.

    ``clip-norms`` are in the paper's space, of ``u = (w - w_E) / eta``. ``rounds`` and
    ``max-examples`` change the run where they are not 0.
    """

    epsilons: list[float]
    clip_norms: list[float]
    rounds: int = 0
    max_examples: int = 0


class Das(Experiment):
    """Every member is one ``fedsim run`` of ``run.toml`` with some keys set."""

    settings: DasSettings
    settings_type: ClassVar[type[Settings]] = DasSettings

    def __init__(self, settings: DasSettings, context: Context) -> None:
        super().__init__(settings, context)
        base = RunConfig.load(context.directory / "run.toml")
        changes: dict[str, Any] = {}
        if settings.rounds:
            changes["rounds"] = settings.rounds
        if settings.max_examples:
            changes["partition.max-examples"] = settings.max_examples
        self.base = base.replace(**changes)

    def members(self) -> list[ExperimentMember]:
        """FedAvg, then every epsilon, C and method, each for every seed."""
        free = {
            "mechanism.name": "none",
            "mechanism.weighting": "uniform",
            "mechanism.clip-norm": "",
            "noise.target-epsilon": "",
        }
        plans: dict[str, dict[str, Any]] = {"fedavg": free}
        for epsilon in self.settings.epsilons:
            for bound in self.settings.clip_norms:
                for method in METHODS:
                    plans[_name(epsilon, method, bound)] = {
                        "mechanism.name": method,
                        "mechanism.clip-norm": self.base.client.lr * bound,
                        "noise.target-epsilon": epsilon,
                    }
        return [
            ExperimentMember(f"{name} seed={seed}", _chosen(self.base.replace(**plan, seed=seed)))
            for seed in range(1, self.settings.seeds + 1)
            for name, plan in plans.items()
        ]

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Test accuracy of every round."""
        where = {"data.dir": str(self.context.data)}
        outcome = run(RunConfig.from_run_config({**settings, **where}))
        return {
            "accuracy": [float(row["test-accuracy"]) for row in outcome.metrics],
            "epsilon": outcome.metrics[-1].get("epsilon", "inf"),
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """The paper's table at every C and at the best one, and accuracy against C."""
        settings = self.settings
        scores = {
            name: over_seeds([_last(results[f"{name} seed={s}"]) for s in self._seeds])
            for name in dict.fromkeys(name.rpartition(" seed=")[0] for name in results)
        }
        rows: list[list[str | float | None]] = []
        figures = {"fedavg": scores["fedavg"][0]}
        for epsilon in settings.epsilons:
            for method in METHODS:
                names = [_name(epsilon, method, bound) for bound in settings.clip_norms]
                best = max(scores[name][0] for name in names)
                figures |= {name: scores[name][0] for name in names}
                figures[f"eps={epsilon:g} {method} best C"] = best
                cells = [_pair(*scores[name]) for name in names]
                rows.append([f"{epsilon:g}", method, *cells, f"{best:.2f}"])
        rows.append(
            ["none", "fedavg", *[None] * len(settings.clip_norms), _pair(*scores["fedavg"])]
        )
        bounds = [f"C = {bound:g}" for bound in settings.clip_norms]
        title = (
            f"{self.base.data.name}: test accuracy (%), mean of the last {LAST} rounds, "
            f"{seeds_text(settings.seeds)}"
        )
        return Report(
            tables=[Table("accuracy", title, ["epsilon", "method", *bounds, "best C"], rows)],
            figures=figures,
            claims=self._claims(scores),
            pictures={"accuracy": self._picture(scores, title)},
        )

    @property
    def _seeds(self) -> range:
        return range(1, self.settings.seeds + 1)

    def _claims(self, scores: Mapping[str, tuple[float, float]]) -> list[PaperClaim]:
        settings = self.settings
        claims = []
        low, high = min(settings.clip_norms), max(settings.clip_norms)
        for epsilon in settings.epsilons:
            gain = {
                bound: scores[_name(epsilon, "normalization", bound)][0]
                - scores[_name(epsilon, "clipping", bound)][0]
                for bound in settings.clip_norms
            }
            best = [
                max(scores[_name(epsilon, method, bound)][0] for bound in settings.clip_norms)
                for method in METHODS
            ]
            tuned = best[1] - best[0]
            claims += [
                PaperClaim(
                    f"large-c-eps{epsilon:g}",
                    f"eps = {epsilon:g}: at the largest C, {high:g}, normalisation is ahead by a "
                    "point or more",
                    gain[high] >= 1,
                    f"{gain[high]:+.2f} points",
                ),
                PaperClaim(
                    f"small-c-eps{epsilon:g}",
                    f"eps = {epsilon:g}: at the smallest C, {low:g}, the two agree to 0.2 points",
                    abs(gain[low]) <= 0.2,
                    f"{gain[low]:+.2f} points",
                ),
                PaperClaim(
                    f"tuned-eps{epsilon:g}",
                    f"eps = {epsilon:g}: with C tuned for each, normalisation is still ahead by "
                    "half a point or more",
                    tuned >= 0.5,
                    f"{tuned:+.2f} points",
                ),
            ]
        return claims

    def _picture(self, scores: Mapping[str, tuple[float, float]], title: str) -> Figure:
        settings = self.settings
        figure, axes = grid(
            1, len(settings.epsilons), title=title, width=max(4.6 * len(settings.epsilons), 6)
        )
        bounds = settings.clip_norms
        for panel, epsilon in zip(axes, settings.epsilons, strict=True):
            for method in METHODS:
                values = np.array([scores[_name(epsilon, method, bound)] for bound in bounds])
                panel.errorbar(
                    bounds,
                    values[:, 0],
                    values[:, 1],
                    **curve_style(COLOURS[method]),
                    capsize=3,
                    label=method,
                )
            panel.axhline(
                scores["fedavg"][0],
                color=COLOURS["fedavg"],
                linestyle="--",
                linewidth=1,
                label="FedAvg, not private",
            )
            panel.set_xscale("log")
            panel.set_xticks(bounds, [f"{bound:g}" for bound in bounds])
            panel.minorticks_off()
            panel.set_xlabel("C")
            panel.set_title(f"$\\epsilon$ = {epsilon:g}", fontsize=10)
        axes[0].set_ylabel("test accuracy (%); bars: s.d. over seeds")
        axes[0].legend(frameon=False, fontsize=9)
        return figure


def _chosen(config: RunConfig) -> dict[str, Any]:
    """What a config says that is not a default."""
    defaults = RunConfig().to_run_config()
    return {
        key: value for key, value in config.to_run_config().items() if value != defaults.get(key)
    }


def _name(epsilon: float, method: str, bound: float) -> str:
    return f"eps={epsilon:g} {method} C={bound:g}"


def _last(result: Result) -> float:
    return 100 * float(np.mean(result["accuracy"][-LAST:]))


def _pair(mean: float, spread: float) -> str:
    return f"{mean:.2f}±{spread:.2f}"
