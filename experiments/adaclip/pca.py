"""Pichapati et al., Table 2: DP-PCA, then one hidden layer with a bound of its own per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments.adaclip.dp_pca import principal_directions
from experiments.adaclip.mnist import load_images
from experiments.framework.base import (
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
from experiments.framework.central import DenseNet, train
from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.config.keys import Section
from fedsim.mechanisms import AdaClip, Clipping, Mechanism, PerLayer
from fedsim.privacy import Ledger, calibrate, calibrate_events
from fedsim.reports.palette import COLOURS
from fedsim.reports.plots import curve_style, grid
from fedsim.strategies import sgd

__all__ = ["METHODS", "Pca", "PcaSettings"]

METHODS = {"clipping": "Abadi, C = 4 a layer", "adaclip": "AdaCliP, corrected"}


class PcaRates(Section):
    """Learning rates that each method chooses among."""

    clipping: list[float]
    adaclip: list[float]


class PcaSettings(Settings):
    """Keys of ``experiment.toml``."""

    dataset: str = "mnist"
    directions: int = 60
    hidden: int = 1000
    batch: float = 600.0
    epochs: int = 10
    delta: float = 1e-5
    epsilons: list[float]
    clip_norm: float = 4.0
    pca_share: float = 0.3
    rates: PcaRates
    examples: int = 0


class Pca(Experiment):
    """Central DP-SGD with ghost rows; one ledger holds the PCA and the training."""

    settings: PcaSettings
    settings_type: ClassVar[type[Settings]] = PcaSettings

    def members(self) -> list[ExperimentMember]:
        """Every epsilon, method and rate, for every seed."""
        common = self.settings.model_dump(
            by_alias=True, exclude={"experiment", "seeds", "epsilons", "rates"}
        )
        rates = self.settings.rates.model_dump(by_alias=True)
        return [
            ExperimentMember(
                _name(method, epsilon, rate, seed),
                {**common, "epsilon": epsilon, "method": method, "rate": rate, "seed": seed},
            )
            for seed in range(1, self.settings.seeds + 1)
            for epsilon in self.settings.epsilons
            for method in METHODS
            for rate in rates[method]
        ]

    def run(self, settings: Mapping[str, Any]) -> Result:
        """One PCA and one training: accuracy by epoch, and what the ledger says they cost."""
        x, y, (x_test, y_test) = load_images(
            settings["dataset"], str(self.context.data), settings["examples"]
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
        """Table 2."""
        settings = self.settings
        rates = settings.rates.model_dump(by_alias=True)
        seeds = range(1, settings.seeds + 1)
        best: dict[tuple[str, float], tuple[float, float, float]] = {}
        for method in METHODS:
            for epsilon in settings.epsilons:
                finals = {
                    rate: [
                        100 * results[_name(method, epsilon, rate, seed)]["accuracy"][-1]
                        for seed in seeds
                    ]
                    for rate in rates[method]
                }
                best[method, epsilon] = max(
                    (*over_seeds(values), rate) for rate, values in finals.items()
                )
        rows = [
            [label, *(_cell(best[method, epsilon]) for epsilon in settings.epsilons)]
            for method, label in METHODS.items()
        ]
        spent = max(result["epsilon"] / _epsilon_of(name) for name, result in results.items())
        gains = [best["adaclip", e][0] - best["clipping", e][0] for e in settings.epsilons]
        return Report(
            tables=[
                Table(
                    "table2",
                    f"{settings.directions} private directions, {settings.hidden} hidden units: "
                    f"test accuracy (%), {seeds_text(settings.seeds)} (rate)",
                    ["", *(f"eps {epsilon:g}" for epsilon in settings.epsilons)],
                    rows,
                )
            ],
            figures={f"{m} eps={e:g}": value[0] for (m, e), value in best.items()},
            claims=[
                PaperClaim(
                    "adaclip-ahead",
                    "AdaCliP is ahead of Abadi's clipping at every eps",
                    min(gains) > 0,
                    ", ".join(f"{gain:+.2f}" for gain in gains),
                ),
                PaperClaim(
                    "within-budget",
                    "PCA and training together stay within epsilon, by their one ledger",
                    spent <= 1,
                    f"at most {spent:.4f} of it",
                ),
            ],
            pictures={"table2": self._picture(best)},
        )

    def _picture(self, best: Mapping[tuple[str, float], tuple[float, float, float]]) -> Figure:
        epsilons = self.settings.epsilons
        figure, (panel,) = grid(
            1, 1, title="AdaCliP, Table 2: DP-PCA and one hidden layer", width=6, height=4
        )
        for method, label in METHODS.items():
            values = np.array([best[method, epsilon][:2] for epsilon in epsilons])
            panel.errorbar(
                epsilons,
                values[:, 0],
                values[:, 1],
                **curve_style(COLOURS[method]),
                label=label,
            )
        panel.set_xscale("log")
        panel.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        panel.minorticks_off()
        panel.set_xlabel("$\\epsilon$, PCA and training together")
        panel.set_ylabel("test accuracy (%); bars: s.d. over seeds")
        panel.legend(frameon=False, fontsize=9)
        return figure


def _noise(settings: Mapping[str, Any], population: int, batch: float) -> tuple[float, float]:
    """Noise multipliers of the PCA, which alone costs its share of epsilon, and the training."""
    epsilon, delta = settings["epsilon"], settings["delta"]
    everybody = FullCohort(population=population)
    z_pca = calibrate(
        target_epsilon=settings["pca-share"] * epsilon, cohort=everybody, rounds=1, delta=delta
    )
    batches = PoissonCohort(rate=batch / population, population=population)
    steps = settings["epochs"] * round(population / batch)
    z = calibrate_events(
        lambda z: [everybody.event(z_pca), batches.event(z, count=steps)],
        target_epsilon=epsilon,
        delta=delta,
    )
    return z_pca, z


def _mechanism(settings: Mapping[str, Any]) -> Mechanism:
    if settings["method"] == "clipping":
        return PerLayer(Clipping(settings["clip-norm"]))
    return PerLayer(AdaClip(settings["clip-norm"]))


def _name(method: str, epsilon: float, rate: float, seed: int) -> str:
    return f"{method} eps={epsilon:g} rate={rate:g} seed={seed}"


def _epsilon_of(name: str) -> float:
    return float(name.split("eps=")[1].split()[0])


def _cell(value: tuple[float, float, float]) -> str:
    mean, spread, rate = value
    return f"{mean:.2f}±{spread:.2f} ({rate:g})"
