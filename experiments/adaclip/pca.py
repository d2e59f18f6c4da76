"""Pichapati et al., Table 2 and Fig. 3: DP-PCA, then one hidden layer with per-layer bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from experiments.adaclip.central import DenseNet, train
from experiments.adaclip.dp_pca import principal_directions
from experiments.adaclip.mnist import load_images
from experiments.adaclip.tuned import TunedRates, TunedSettings
from experiments.framework.base import ExperimentClaim, Report, Result, Table, as_table, seeds_text
from experiments.framework.spread import all_ahead, listed, over_seeds, paired, within
from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.mechanisms import AdaClip, Clipping, Mechanism, PerLayer
from fedsim.privacy import Event, Ledger, calibrate, calibrate_events
from fedsim.reports.plots import grid
from fedsim.strategies import sgd

METHODS = {"clipping": "Abadi, C = 4 a layer", "adaclip": "AdaCliP, corrected"}


@dataclass(frozen=True, kw_only=True)
class PcaSettings(TunedSettings):
    """Keys of ``experiment.toml``."""

    dataset: str = "mnist"
    directions: int = 60
    hidden: int = 1000
    batch: float = 600.0
    epochs: int = 10
    delta: float = 1e-5
    clip_norm: float = 4.0
    pca_share: float = 0.3
    examples: int = 0


class Pca(TunedRates):
    """Central DP-SGD with ghost rows; one ledger holds the PCA and the training."""

    settings: PcaSettings
    methods = METHODS

    def plan(self, method: str, epsilon: float, rate: float, seed: int) -> dict[str, Any]:
        """Settings of one PCA and one training run."""
        other = ("experiment", "seeds", "tuning-seeds", "epsilons", "rates", "whitened-rates")
        common = as_table(self.settings, *other)
        return {**common, "epsilon": epsilon, "method": method, "rate": rate, "seed": seed}

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Run one PCA and train once: accuracy by epoch, and epsilon of both by their ledger."""
        x, y, (x_test, y_test) = load_images(
            settings["dataset"], str(self.data), settings["examples"]
        )
        batch, delta = min(settings["batch"], len(y) / 2), settings["delta"]
        z_pca, z = _noise(settings, len(y), batch)
        ledger = Ledger(delta=delta)
        directions = principal_directions(
            x,
            settings["directions"],
            noise_multiplier=z_pca,
            seed=settings["seed"],
            ledger=ledger,
        )
        features = (x @ directions.float()).double()
        outcome = train(
            DenseNet((settings["directions"], settings["hidden"], 10)),
            lambda index: features[index],
            y,
            (x_test @ directions, y_test),
            mechanism=_mechanism(settings),
            noise_multiplier=z,
            batch=batch,
            epochs=settings["epochs"],
            optimizer=sgd(settings["rate"]),
            seed=settings["seed"],
            ledger=ledger,
        )
        return {
            "accuracy": outcome.accuracy,
            "distortion": outcome.distortion,
            "noise-multipliers": [z_pca, z],
            "epsilon": ledger.epsilon(delta),
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """Table 2 and Fig. 3."""
        settings = self.settings
        spent = max(result["epsilon"] / _epsilon_of(name) for name, result in results.items())
        gains = self.gains(results, "adaclip", "clipping")
        ratios = self.ratios(results)
        figures = self.figures(results)
        for epsilon, values in zip(settings.epsilons, ratios, strict=True):
            figures[f"noise ratio eps={epsilon:g}"] = over_seeds(values)[0]
        cells = ["{:.3f} ± {:.3f}".format(*over_seeds(values)) for values in ratios]
        title = (
            f"{settings.directions} private directions, {settings.hidden} hidden units, "
            f"{settings.epochs} epochs: test accuracy (%), mean ± s.d. of "
            f"{seeds_text(settings.seeds)} (best rate of the common grid)"
        )
        noises = [paired(values, [0.0] * len(values)) for values in ratios]
        saved = [paired([1.0] * len(values), values) for values in ratios]
        seen = ", ".join(
            f"{noise.mean:.3f} [{noise.low:.3f}, {noise.high:.3f}]" for noise in noises
        )
        claims = [
            ExperimentClaim(
                "adaclip-ahead",
                "Table 2",
                "AdaCliP is ahead of Abadi's clipping at every eps run here",
                all_ahead(gains),
                listed(gains, self.columns),
            ),
            ExperimentClaim(
                "within-budget",
                "Table 2",
                "PCA and training together stay within epsilon, by their one ledger",
                spent <= 1,
                f"at most {spent:.4f} of it",
            ),
            ExperimentClaim(
                "noise-below",
                "Fig. 3",
                "AdaCliP adds less noise than Abadi's clipping at every eps run here",
                all_ahead(saved),
                seen,
            ),
            ExperimentClaim.under(
                "noise-ratio",
                "Fig. 3",
                "it adds about 0.8 of it at every eps run here",
                "what counts as about",
                {
                    f"to {about:g}": (within(noises, 0.8 - about, 0.8 + about), seen)
                    for about in (0.05, 0.2)
                },
            ),
        ]
        return Report(
            tables=[
                Table("table2", title, ["", *self.columns], self.rows(results)),
                Table(
                    "figure3",
                    "||g - g~||, AdaCliP over Abadi, mean ± s.d. over seeds",
                    self.columns,
                    [cells],
                ),
            ],
            figures=figures,
            claims=claims,
            pictures={
                "table2": self._picture("Table 2: DP-PCA and one hidden layer", results),
                "figure3": self._picture("Fig. 3: noise, DP-PCA and one hidden layer", results),
            },
            choices=self.choices(results),
        )

    def _picture(self, title: str, results: Mapping[str, Result]) -> Figure:
        figure, (panel,) = grid(1, 1, title=f"AdaCliP, {title}", width=6, height=4)
        draw = self.draw_ratios if title.startswith("Fig") else self.draw_accuracy
        draw(panel, results)
        panel.set_xlabel("$\\epsilon$, PCA and training together")
        return figure


def _noise(settings: Mapping[str, Any], population: int, batch: float) -> tuple[float, float]:
    """Noise multipliers of the PCA and of the training.

    The PCA alone costs its share of epsilon; both together cost epsilon.
    """
    epsilon, delta = settings["epsilon"], settings["delta"]
    everybody = FullCohort(population=population)
    z_pca = calibrate(
        target_epsilon=settings["pca-share"] * epsilon, cohort=everybody, rounds=1, delta=delta
    )
    batches = PoissonCohort(rate=batch / population, population=population)
    steps = settings["epochs"] * round(population / batch)
    z = calibrate_events(
        lambda z: [Event.of(everybody, z_pca), Event.of(batches, z, count=steps)],
        target_epsilon=epsilon,
        delta=delta,
    )
    return z_pca, z


def _mechanism(settings: Mapping[str, Any]) -> Mechanism:
    if settings["method"] == "clipping":
        return PerLayer(Clipping(settings["clip-norm"]))
    return PerLayer(AdaClip(settings["clip-norm"]))


def _epsilon_of(name: str) -> float:
    return float(name.split("eps=")[1].split()[0])
