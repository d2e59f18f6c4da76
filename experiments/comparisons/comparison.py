"""Compare methods at one example-level privacy budget: one config, with keys changed per method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from matplotlib.figure import Figure

from experiments.curves import Curve, curves
from experiments.framework.base import NOT_EMPTY, ExperimentClaim, Report, Result, Table
from experiments.framework.config_runs import ConfigRuns, ConfigRunsSettings, Score, Variant, best
from experiments.framework.spread import paired
from fedsim.config import Scalar


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A claim of a paper: one method ends with a higher accuracy than another."""

    name: str
    panel: str
    says: str
    ahead: str
    behind: str


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``."""

    title: str
    rates: Annotated[list[float], NOT_EMPTY]  # the common grid of all methods
    methods: Annotated[list[Variant], NOT_EMPTY]
    claims: list[Ahead] = field(default_factory=list)


class Comparison(ConfigRuns):
    """Each method at its best rate by test accuracy; the choice's privacy cost is not charged."""

    settings: ComparisonSettings

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Every method with every rate."""
        return {
            _name(method.name, rate): {**method.keys, "client.lr": rate}
            for method in self.settings.methods
            for rate in self.settings.rates
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """A table of final accuracies, curves over epochs, and the claims."""
        scores = self.scores(results)
        best_of = {
            method.name: best(
                f"rate of {method.name}",
                {rate: scores[_name(method.name, rate)] for rate in self.settings.rates},
            )
            for method in self.settings.methods
        }
        rows: list[list[str | float | None]] = []
        for name, (rate, score, _) in best_of.items():
            epsilon = self.of_plan(results, _name(name, rate))[0]["epsilon"]
            spent = f"{epsilon:.3f}" if epsilon is not None else "none"
            rows.append([name, spent, f"{rate:g}", score.text])
        claims = []
        for claim in self.settings.claims:
            gain = paired(best_of[claim.ahead][1].finals, best_of[claim.behind][1].finals)
            claims.append(
                ExperimentClaim(claim.name, claim.panel, claim.says, gain.positive, gain.text)
            )
        title = f"{self.settings.title}\n{self.where('examples', 'epochs')}"
        return Report(
            tables=[Table("accuracy", title, ["method", "epsilon", "rate", "accuracy (%)"], rows)],
            figures={name: score.mean for name, (_, score, _) in best_of.items()},
            claims=claims,
            pictures={
                "accuracy": self._picture(title, {name: row[:2] for name, row in best_of.items()})
            },
            choices=[choice for _, _, choice in best_of.values()],
        )

    def _picture(self, title: str, best_of: Mapping[str, tuple[float, Score]]) -> Figure:
        styles = ("adadp", "sgd", "kept", "fixed", "fifth")
        lines = [
            Curve(name, score, styles[k % len(styles)])
            for k, (name, (_, score)) in enumerate(best_of.items())
        ]
        return curves(title, [("", lines)], xlabel="epoch", first=1)


def _name(method: str, rate: float) -> str:
    return f"{method} rate={rate:g}"
