"""Das et al.: clipping, normalisation and FedAvg on real data, with a sweep over C."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.curves import error_bars, log_ticks
from experiments.das.features import FILE, Extractor, write_features
from experiments.framework.base import (
    BestOfGrid,
    ExperimentClaim,
    Report,
    Result,
    Table,
    digest,
    read_table,
    seeds_text,
)
from experiments.framework.config_runs import (
    ConfigRuns,
    ConfigRunsSettings,
    LeaderboardEntry,
    Score,
    best,
)
from experiments.framework.spread import Difference, paired, within
from fedsim.config import Scalar
from fedsim.reports.plots import COLOURS, grid

METHODS = ("clipping", "normalization")
SAME = 0.2  # percentage points within which two methods agree
FEDAVG = "fedavg"


@dataclass(frozen=True, kw_only=True)
class DasSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``; they vary the run of ``run.toml`` in the same directory.

    ``clip-norms``, the common grid of both methods, bound the paper's ``u = (w - w_E) / eta``.
    With ``features`` the runs read features.npz: the user's own from the data folder, or else one
    that is computed once, before the runs.
    """

    epsilons: list[float]
    clip_norms: list[float]
    features: dict[str, Scalar] = field(default_factory=dict)


class Das(ConfigRuns):
    """Each member is one run of ``run.toml`` with some keys set."""

    settings: DasSettings
    last: ClassVar[int] = 5

    def prepare(self, out: Path) -> None:
        """Compute the features, unless the user or an earlier call has."""
        super().prepare(out)
        if not self.settings.features or (self.data / FILE).is_file():
            return
        made = out / f"features-{digest(self._features)[:8]}"
        if not (made / FILE).is_file():
            made.mkdir(exist_ok=True)
            write_features(Extractor(**self._features), self.data, made / FILE)
        self.data = made

    def member_settings(self, changes: dict[str, Scalar]) -> dict[str, Any]:
        """Settings of the run's config, and of the features' extractor."""
        settings = super().member_settings(changes)
        if self.settings.features:
            settings["features"] = self._features
        return settings

    @property
    def _features(self) -> dict[str, Any]:
        return asdict(read_table(Extractor, self.settings.features, "features"))

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """FedAvg, then every combination of epsilon, C and method."""
        plans: dict[str, dict[str, Scalar]] = {
            FEDAVG: {
                "mechanism.name": "none",
                "mechanism.weighting": "uniform",
                "mechanism.clip-norm": "",
                "noise.target-epsilon": "",
            }
        }
        for epsilon in self.settings.epsilons:
            for bound in self.settings.clip_norms:
                for method in METHODS:
                    plans[_name(epsilon, method, bound)] = {
                        "mechanism.name": method,
                        "mechanism.clip-norm": self.base.client.lr * bound,
                        "noise.target-epsilon": epsilon,
                    }
        return plans

    def report(self, results: Mapping[str, Result]) -> Report:
        """The paper's table at every C and at the best one, and accuracy against C."""
        settings, scores = self.settings, self.scores(results)
        choices = self._choices(scores)
        rows: list[list[str | float | None]] = []
        figures = {FEDAVG: scores[FEDAVG].mean}
        for (epsilon, method), choice in choices.items():
            names = [_name(epsilon, method, bound) for bound in settings.clip_norms]
            figures |= {name: scores[name].mean for name in names}
            figures[f"eps={epsilon:g} {method} best C"] = choice.scores[choice.value]
            cells = [scores[name].text for name in names]
            rows.append([f"{epsilon:g}", method, *cells, f"{choice.value:g}"])
        blanks = [None] * (len(settings.clip_norms) - 1)
        rows.append(["none", FEDAVG, scores[FEDAVG].text, *blanks, None])
        bounds = [f"C = {bound:g}" for bound in settings.clip_norms]
        title = (
            f"Main table: {self.base.data.name}, test accuracy (%), mean of the last {self.last} "
            f"rounds, mean ± s.d. of {seeds_text(settings.seeds)}"
        )
        return Report(
            tables=[Table("accuracy", title, ["epsilon", "method", *bounds, "best C"], rows)],
            figures=figures,
            claims=self._claims(scores, choices),
            pictures={"accuracy": self._picture(scores, title)},
            choices=list(choices.values()),
        )

    def _choices(self, scores: Mapping[str, Score]) -> dict[tuple[float, str], BestOfGrid]:
        """The best C of each method at each epsilon."""
        return {
            (epsilon, method): best(
                f"C of {method} at eps = {epsilon:g}",
                {b: scores[_name(epsilon, method, b)] for b in self.settings.clip_norms},
            )[2]
            for epsilon in self.settings.epsilons
            for method in METHODS
        }

    def entries(self, results: Mapping[str, Result]) -> list[LeaderboardEntry]:
        """FedAvg, and each method at its best C; mean of the last rounds, as it is judged."""
        scores = self.scores(results)
        plans = {FEDAVG: FEDAVG} | {
            _name(epsilon, method, choice.value): f"{method}, C chosen on test examples"
            for (epsilon, method), choice in self._choices(scores).items()
        }
        base = self.base
        clients = f"{base.partition.clients:,} clients of sorted shards"
        federation = f"Softmax regression on {base.data.name}, {clients}"
        return [
            LeaderboardEntry(
                method,
                federation,
                {f"{name} seed={k}": value for k, value in enumerate(scores[name].finals, 1)},
            )
            for name, method in plans.items()
        ]

    def _claims(
        self, scores: Mapping[str, Score], choices: Mapping[tuple[float, str], BestOfGrid]
    ) -> list[ExperimentClaim]:
        def gain(epsilon: float, clipping: float, normalization: float) -> Difference:
            return paired(
                scores[_name(epsilon, "normalization", normalization)].finals,
                scores[_name(epsilon, "clipping", clipping)].finals,
            )

        claims = []
        low, high = min(self.settings.clip_norms), max(self.settings.clip_norms)
        for epsilon in self.settings.epsilons:
            small, large = gain(epsilon, low, low), gain(epsilon, high, high)
            tuned = gain(epsilon, *(choices[epsilon, method].value for method in METHODS))
            claims += [
                ExperimentClaim.under(
                    f"ahead-eps{epsilon:g}",
                    "Main table",
                    f"eps = {epsilon:g}: normalisation is ahead",
                    "C",
                    {
                        "C tuned for each": (tuned.positive, tuned.text),
                        f"the largest C for both, {high:g}": (large.positive, large.text),
                    },
                ),
                ExperimentClaim(
                    f"small-c-eps{epsilon:g}",
                    "Main table",
                    f"eps = {epsilon:g}: at the smallest C, {low:g}, they agree to {SAME} points",
                    within([small], -SAME, SAME),
                    small.text,
                ),
            ]
        return claims

    def _picture(self, scores: Mapping[str, Score], title: str) -> Figure:
        settings = self.settings
        figure, axes = grid(
            1, len(settings.epsilons), title=title, width=max(4.6 * len(settings.epsilons), 6)
        )
        bounds = settings.clip_norms
        for panel, epsilon in zip(axes, settings.epsilons, strict=True):
            for method in METHODS:
                finals = [scores[_name(epsilon, method, bound)].finals for bound in bounds]
                error_bars(panel, bounds, finals, COLOURS[method], method)
            draw_fedavg(panel, scores[FEDAVG].mean)
            log_ticks(panel, bounds)
            panel.set_xlabel("C")
            panel.set_title(f"$\\epsilon$ = {epsilon:g}", fontsize=10)
        axes[0].set_ylabel("test accuracy (%); bars: s.d. over seeds")
        axes[0].legend(frameon=False, fontsize=9)
        return figure


def draw_fedavg(panel: Axes, accuracy: float) -> None:
    """Draw FedAvg's accuracy (%) as a line."""
    colour, label = COLOURS["fedavg"], "FedAvg, not private"
    panel.axhline(accuracy, color=colour, linestyle="--", linewidth=1, label=label)


def _name(epsilon: float, method: str, bound: float) -> str:
    return f"eps={epsilon:g} {method} C={bound:g}"
