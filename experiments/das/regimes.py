"""Das et al.: the FMNIST rows with other numbers of clients and rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments.curves import error_bars, log_ticks
from experiments.das.tables import FEDAVG, METHODS, draw_fedavg
from experiments.framework.base import (
    BestOfGrid,
    ExperimentClaim,
    Report,
    Result,
    Table,
    seeds_text,
)
from experiments.framework.config_runs import ConfigRuns, ConfigRunsSettings
from experiments.framework.spread import Difference, mean_text, over_seeds, paired
from fedsim.config import Scalar
from fedsim.reports.plots import COLOURS, grid


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A number of clients n and of rounds K, with the epsilons and the grid of C tried there."""

    clients: int
    rounds: int
    epsilons: list[float]
    clip_norms: list[float]

    @property
    def name(self) -> str:
        """As in ``n=100 K=50``."""
        return f"n={self.clients} K={self.rounds}"


@dataclass(frozen=True, kw_only=True)
class DasRegimesSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    regimes : list of Regime
    costs : dict of str to float
        Points that the paper's clipping loses to FedAvg, by epsilon.
    """

    regimes: list[Regime]
    costs: dict[str, float]


@dataclass(frozen=True)
class RegimeCell:
    """A regime and an epsilon, with the final accuracies (%) of every seed.

    Attributes
    ----------
    regime : Regime
    epsilon : float
    fedavg : list of float
    finals : mapping of (str, float) to list of float
        By method and C.
    """

    regime: Regime
    epsilon: float
    fedavg: list[float]
    finals: Mapping[tuple[str, float], list[float]]

    def choice(self, method: str) -> BestOfGrid:
        """The choice of a method's C."""
        return BestOfGrid(
            f"C of {method} at {self.regime.name}, eps = {self.epsilon:g}",
            {bound: over_seeds(self.finals[method, bound])[0] for bound in self.regime.clip_norms},
        )

    def cost(self, method: str) -> float:
        """Points that a method, with its best C, loses to FedAvg."""
        choice = self.choice(method)
        return over_seeds(self.fedavg)[0] - choice.scores[choice.value]

    def ahead(self, clipping: float, normalization: float) -> Difference:
        """By how much normalisation is ahead, each with its C."""
        return paired(
            self.finals["normalization", normalization], self.finals["clipping", clipping]
        )


class DasRegimes(ConfigRuns):
    """FedAvg and both methods at every C in each regime."""

    settings: DasRegimesSettings
    last: ClassVar[int] = 5
    partial: ClassVar[bool] = True

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """By regime: FedAvg, then every combination of epsilon, C and method."""
        plans: dict[str, dict[str, Scalar]] = {}
        for regime in self.settings.regimes:
            shape: dict[str, Scalar] = {
                "partition.clients": regime.clients,
                "rounds": regime.rounds,
            }
            plans[f"{regime.name} {FEDAVG}"] = shape | {
                "mechanism.name": "none",
                "mechanism.weighting": "uniform",
                "mechanism.clip-norm": "",
                "noise.target-epsilon": "",
            }
            plans |= {
                _name(regime, epsilon, method, bound): shape
                | {
                    "mechanism.name": method,
                    "mechanism.clip-norm": self.base.client.lr * bound,
                    "noise.target-epsilon": epsilon,
                }
                for epsilon in regime.epsilons
                for bound in regime.clip_norms
                for method in METHODS
            }
        return plans

    def report(self, results: Mapping[str, Result]) -> Report:
        """Every complete regime, and the claims where privacy costs what it does in the paper."""
        cells = list(self._cells(results))
        rows: list[list[str | float | None]] = []
        figures: dict[str, float] = {}
        for cell in cells:
            where = f"{cell.regime.name} eps={cell.epsilon:g}"
            figures[f"{cell.regime.name} fedavg"] = over_seeds(cell.fedavg)[0]
            for method in METHODS:
                choice = cell.choice(method)
                figures[f"{where} {method} cost"] = cell.cost(method)
                tried = {bound: mean_text(cell.finals[method, bound]) for bound in choice.scores}
                rows.append(
                    [
                        f"{cell.regime.clients}", f"{cell.regime.rounds}", f"{cell.epsilon:g}",
                        method, *(tried.get(bound) for bound in self._bounds), f"{choice.value:g}",
                        mean_text(cell.fedavg), cell.cost(method),
                    ]
                )  # fmt: skip
        columns = ["n", "K", "epsilon", "method", *(f"C = {bound:g}" for bound in self._bounds)]
        columns += ["best C", "FedAvg", "cost at it"]
        title = (
            f"Fashion-MNIST by clients and rounds, test accuracy (%), mean of the last {self.last} "
            f"rounds, mean ± s.d. of {seeds_text(self.settings.seeds)}"
        )
        return Report(
            tables=[Table("regimes", title, columns, rows)],
            figures=figures,
            claims=self._claims(cells),
            pictures={"regimes": self._picture(cells)} if cells else {},
            choices=[cell.choice(method) for cell in cells for method in METHODS],
        )

    @property
    def _bounds(self) -> list[float]:
        return sorted({bound for regime in self.settings.regimes for bound in regime.clip_norms})

    def _cells(self, results: Mapping[str, Result]) -> Iterator[RegimeCell]:
        """The regimes and epsilons all of whose runs are there."""
        for regime in self.settings.regimes:
            for epsilon in regime.epsilons:
                names = {
                    (method, bound): _name(regime, epsilon, method, bound)
                    for method in METHODS
                    for bound in regime.clip_norms
                }
                finals = {key: self._finals(results, name) for key, name in names.items()}
                fedavg = self._finals(results, f"{regime.name} {FEDAVG}")
                if all(len(of) == self.settings.seeds for of in (fedavg, *finals.values())):
                    yield RegimeCell(regime, epsilon, fedavg, finals)

    def _finals(self, results: Mapping[str, Result], name: str) -> list[float]:
        """Accuracy (%) of each seed that has been run, over the last rounds."""
        runs = self.of_plan(results, name)
        return [100 * float(np.mean(run["accuracy"][-self.last :])) for run in runs]

    def _claims(self, cells: Sequence[RegimeCell]) -> list[ExperimentClaim]:
        claims = []
        for text, paid in self.settings.costs.items():
            here = [cell for cell in cells if f"{cell.epsilon:g}" == text]
            if not here:
                continue
            nearest = min(here, key=lambda cell: abs(cell.cost("clipping") - paid))
            tuned = nearest.ahead(*(nearest.choice(method).value for method in METHODS))
            most = max(nearest.regime.clip_norms)
            largest = nearest.ahead(most, most)
            claims.append(
                ExperimentClaim.under(
                    f"ahead-eps{text}",
                    "Main table",
                    f"eps = {text}: normalisation is ahead where privacy costs most nearly what it "
                    f"costs in the paper ({nearest.regime.name}: clipping "
                    f"{nearest.cost('clipping'):.1f} points, {paid:g} there)",
                    "C",
                    {
                        "C tuned for each": (tuned.positive, tuned.text),
                        f"the largest C for both, {most:g}": (largest.positive, largest.text),
                    },
                )
            )
        return claims

    def _picture(self, cells: Sequence[RegimeCell]) -> Figure:
        title = "Fashion-MNIST: accuracy by C in each regime"
        figure, axes = grid(1, len(cells), title=title, width=max(3.4 * len(cells), 6))
        for panel, cell in zip(axes, cells, strict=True):
            bounds = cell.regime.clip_norms
            for method in METHODS:
                finals = [cell.finals[method, bound] for bound in bounds]
                error_bars(panel, bounds, finals, COLOURS[method], method)
            draw_fedavg(panel, over_seeds(cell.fedavg)[0])
            log_ticks(panel, bounds)
            panel.set_xlabel("C")
            panel.set_title(f"{cell.regime.name}, $\\epsilon$ = {cell.epsilon:g}", fontsize=10)
        axes[0].set_ylabel("test accuracy (%); bars: s.d. over seeds")
        axes[0].legend(frameon=False, fontsize=8)
        return figure


def _name(regime: Regime, epsilon: float, method: str, bound: float) -> str:
    return f"{regime.name} eps={epsilon:g} {method} C={bound:g}"
