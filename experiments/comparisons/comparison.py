"""Methods side by side at one budget of privacy for examples: a run with keys changed for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from matplotlib.figure import Figure
from pydantic import Field

from experiments.framework.base import PaperClaim, Report, Result, Settings, Table
from experiments.framework.config_runs import ConfigRuns, ConfigRunsSettings, Score
from experiments.framework.curves import Curve, curves
from fedsim.config import Scalar
from fedsim.config.keys import Section

__all__ = ["Comparison", "ComparisonSettings"]


class Method(Section):
    """One method: the run's keys that it changes, and rates that it chooses among."""

    name: str
    rates: list[float] = Field(min_length=1)
    keys: dict[str, Scalar] = Field(default_factory=dict)


class Ahead(Section):
    """A claim of a paper: one method ends above another."""

    name: str
    says: str
    ahead: str
    behind: str


class ComparisonSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``."""

    title: str
    methods: list[Method] = Field(min_length=1)
    claims: list[Ahead] = Field(default_factory=list)


class Comparison(ConfigRuns):
    """Each method with the rate that ends highest by test accuracy; that choice is not charged."""

    settings: ComparisonSettings
    settings_type: ClassVar[type[Settings]] = ComparisonSettings

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Every method with every rate of its own."""
        return {
            _name(method.name, rate): {**method.keys, "client.lr": rate}
            for method in self.settings.methods
            for rate in method.rates
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """A table of final accuracies, curves over epochs, and the claims."""
        scores = self.scores(results)
        best = {method.name: self._best(method, scores) for method in self.settings.methods}
        rows: list[list[str | float | None]] = []
        for name, (rate, score) in best.items():
            epsilon = self.of_plan(results, _name(name, rate))[0]["epsilon"]
            spent = f"{epsilon:.3f}" if epsilon is not None else "none"
            rows.append([name, spent, f"{rate:g}", score.text])
        claims = [
            PaperClaim(
                claim.name,
                claim.says,
                best[claim.ahead][1].mean > best[claim.behind][1].mean,
                f"{best[claim.ahead][1].mean:.2f} against {best[claim.behind][1].mean:.2f}",
            )
            for claim in self.settings.claims
        ]
        title = f"{self.settings.title}\n{self.where('examples', 'epochs')}"
        return Report(
            tables=[Table("accuracy", title, ["method", "epsilon", "rate", "accuracy (%)"], rows)],
            figures={name: score.mean for name, (_, score) in best.items()},
            claims=claims,
            pictures={"accuracy": self._picture(title, best)},
        )

    def _best(self, method: Method, scores: Mapping[str, Score]) -> tuple[float, Score]:
        tried = [(rate, scores[_name(method.name, rate)]) for rate in method.rates]
        return max(tried, key=lambda pair: pair[1].mean)

    def _picture(self, title: str, best: Mapping[str, tuple[float, Score]]) -> Figure:
        styles = ("adadp", "sgd", "kept", "fixed", "fifth")
        lines = [
            Curve(name, score, styles[k % len(styles)])
            for k, (name, (_, score)) in enumerate(best.items())
        ]
        return curves(title, [("", lines)], xlabel="epoch", first=1)


def _name(method: str, rate: float) -> str:
    return f"{method} rate={rate:g}"
