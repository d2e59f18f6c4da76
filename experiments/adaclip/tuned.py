"""Compare methods on one grid of rates: tune on some seeds, then judge the best rate on others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from matplotlib.axes import Axes

from experiments.curves import error_bars, log_ticks
from experiments.framework.base import NOT_EMPTY, BestOfGrid, Experiment, Members, Result, Settings
from experiments.framework.spread import Difference, over_seeds, paired
from fedsim.reports.plots import COLOURS
from fedsim.settings import Ge

PRINTED = "paper, for its neural model"


@dataclass(frozen=True, kw_only=True)
class TunedSettings(Settings):
    """Keys of experiments of this kind.

    Attributes
    ----------
    seeds : int
        Number of fresh seeds, on which methods are judged.
    epsilons : list of float
    rates : list of float
        The common grid of all methods.
    whitened_rates : list of float
        Further rates for methods that whiten rows: their steps have length ``rate * ||b||``, which
        may be orders of magnitude smaller.
    tuning_seeds : int
        Number of seeds (1, 2, ...) by which the rate is chosen, by test accuracy; the fresh seeds
        follow them.
    """

    seeds: Annotated[int, Ge(1)] = 5
    epsilons: list[float]
    rates: Annotated[list[float], NOT_EMPTY]
    whitened_rates: list[float] = field(default_factory=list)
    tuning_seeds: Annotated[int, Ge(1)] = 1


class TunedRates(Experiment):
    """Base class; subclasses define the methods, and the settings of one training run."""

    settings: TunedSettings
    methods: ClassVar[Mapping[str, str]]
    """Labels of the methods, by name."""
    whitened: ClassVar[frozenset[str]] = frozenset({"adaclip", "literal"})
    """Methods that whiten rows."""
    colours: ClassVar[Mapping[str, str]] = COLOURS

    @abstractmethod
    def plan(self, method: str, epsilon: float, rate: float, seed: int) -> dict[str, Any]:
        """Settings of one training run."""

    def members(self) -> Members:
        """Every rate of every method at every epsilon, with the tuning seeds."""
        settings = self.settings
        return {
            member_name(*point): self.plan(*point)
            for seed in range(1, settings.tuning_seeds + 1)
            for epsilon in settings.epsilons
            for method in self.methods
            for rate in self.grid(method)
            for point in [(method, epsilon, rate, seed)]
        }

    def followers(self, results: Mapping[str, Result]) -> Members:
        """Fresh seeds of every method at its best rate."""
        return {
            member_name(*point): self.plan(*point)
            for seed in self.fresh
            for epsilon in self.settings.epsilons
            for method in self.methods
            for point in [(method, epsilon, self.rate(results, method, epsilon), seed)]
        }

    @property
    def fresh(self) -> range:
        """The fresh seeds, on which methods are judged."""
        first = self.settings.tuning_seeds + 1
        return range(first, first + self.settings.seeds)

    def grid(self, method: str) -> list[float]:
        """Grid of rates from which a method's rate is chosen."""
        settings = self.settings
        return [*settings.rates, *(settings.whitened_rates if method in self.whitened else [])]

    def rate(self, results: Mapping[str, Result], method: str, epsilon: float) -> float:
        """The rate with the highest final accuracy on the tuning seeds."""
        return self._choice(results, method, epsilon).value

    def _choice(self, results: Mapping[str, Result], method: str, epsilon: float) -> BestOfGrid:
        scores = {
            rate: over_seeds(
                [
                    100 * results[member_name(method, epsilon, rate, seed)]["accuracy"][-1]
                    for seed in range(1, self.settings.tuning_seeds + 1)
                ]
            )[0]
            for rate in self.grid(method)
        }
        return BestOfGrid(f"rate of {method} at eps = {epsilon:g}", scores)

    def finals(self, results: Mapping[str, Result], method: str, epsilon: float) -> list[float]:
        """Final accuracies (%) of the fresh seeds."""
        return [100 * run["accuracy"][-1] for run in self.judged(results, method, epsilon)]

    def judged(self, results: Mapping[str, Result], method: str, epsilon: float) -> list[Result]:
        """Results of the fresh seeds at the chosen rate."""
        rate = self.rate(results, method, epsilon)
        return [results[member_name(method, epsilon, rate, seed)] for seed in self.fresh]

    def choices(self, results: Mapping[str, Result]) -> list[BestOfGrid]:
        """All chosen rates."""
        return [
            self._choice(results, method, epsilon)
            for method in self.methods
            for epsilon in self.settings.epsilons
        ]

    def gains(self, results: Mapping[str, Result], method: str, other: str) -> list[Difference]:
        """Accuracy of a method minus that of another, by epsilon."""
        return [
            paired(self.finals(results, method, epsilon), self.finals(results, other, epsilon))
            for epsilon in self.settings.epsilons
        ]

    @property
    def columns(self) -> list[str]:
        """Names of the epsilons, for columns of tables and texts of claims."""
        return [f"eps {epsilon:g}" for epsilon in self.settings.epsilons]

    def rows(self, results: Mapping[str, Result]) -> list[list[str | float | None]]:
        """One row per method: mean, standard deviation and the chosen rate, by epsilon."""
        rows: list[list[str | float | None]] = []
        for method, label in self.methods.items():
            cells = []
            for epsilon in self.settings.epsilons:
                mean, spread = over_seeds(self.finals(results, method, epsilon))
                rate = self.rate(results, method, epsilon)
                cells.append(f"{mean:.2f} ± {spread:.2f} ({rate:g})")
            rows.append([label, *cells])
        return rows

    def figures(self, results: Mapping[str, Result]) -> dict[str, float]:
        """Mean final accuracies by method and epsilon."""
        return {
            f"{method} eps={epsilon:g}": over_seeds(self.finals(results, method, epsilon))[0]
            for method in self.methods
            for epsilon in self.settings.epsilons
        }

    def ratios(
        self, results: Mapping[str, Result], method: str = "adaclip", other: str = "clipping"
    ) -> list[list[float]]:
        """Ratio of ``||g - g~||`` of two methods: by epsilon, one value per fresh seed."""
        return [
            [
                one["distortion"] / two["distortion"]
                for one, two in zip(
                    self.judged(results, method, epsilon),
                    self.judged(results, other, epsilon),
                    strict=True,
                )
            ]
            for epsilon in self.settings.epsilons
        ]

    def draw_accuracy(self, panel: Axes, results: Mapping[str, Result]) -> None:
        """Draw the final accuracy of every method against epsilon."""
        for method, label in self.methods.items():
            self.draw_line(
                panel,
                [self.finals(results, method, epsilon) for epsilon in self.settings.epsilons],
                self.colours[method],
                label,
            )
        panel.set_ylabel("test accuracy (%); bars: s.d. over seeds")
        panel.legend(frameon=False, fontsize=8)

    def draw_ratios(self, panel: Axes, results: Mapping[str, Result]) -> None:
        """Draw the ratio of the noises against epsilon, with the paper's 0.8."""
        self.draw_line(panel, self.ratios(results), COLOURS["adaclip"], "AdaCliP / Abadi")
        panel.axhline(1, color=COLOURS["clipping"], linewidth=1, linestyle="--", label="Abadi")
        panel.axhline(0.8, color=COLOURS["neutral"], linewidth=1, linestyle=":", label=PRINTED)
        panel.set_ylim(0, 1.15)
        panel.set_ylabel("$\\|g - \\tilde g\\|$, AdaCliP / Abadi")
        panel.legend(frameon=False, fontsize=8)

    def draw_line(
        self, panel: Axes, values: Sequence[Sequence[float]], colour: str, label: str
    ) -> None:
        """Draw means with standard deviations against epsilon."""
        error_bars(panel, self.settings.epsilons, values, colour, label, markevery=1)
        log_ticks(panel, self.settings.epsilons)
        panel.set_xlabel("$\\epsilon$")


def member_name(method: str, epsilon: float, rate: float, seed: int) -> str:
    """Name of one training run."""
    return f"{method} eps={epsilon:g} rate={rate:g} seed={seed}"
