"""Pichapati et al.: AdaCliP on MNIST, softmax regression (Table 1, Fig. 3, Fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

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
from fedsim import datasets
from fedsim.cohorts import PoissonCohort
from fedsim.config.keys import Section
from fedsim.mechanisms import AdaClip, Clipping, Mechanism, NormBound
from fedsim.privacy import Ledger, calibrate
from fedsim.reports.palette import COLOURS
from fedsim.reports.plots import curve_style, grid
from fedsim.strategies import sgd

__all__ = ["Mnist", "MnistSettings", "load_images", "make_mechanism"]

LABELS = {
    "norm-bound": "norm bound 28",
    "clipping": "Abadi, C = 4",
    "adaclip": "AdaCliP, corrected",
    "literal": "AdaCliP as printed",
}
_SHARED = (
    "dataset",
    "batch",
    "delta",
    "clip_norm",
    "norm_bound",
    "h2",
    "h2_literal",
    "examples",
)
"""Settings that every member has."""

_COMPARED = (
    (
        "adaclip-ahead",
        "AdaCliP is ahead of Abadi's clipping at every eps",
        "adaclip",
        "clipping",
    ),
    (
        "bound-behind",
        "Abadi's clipping is ahead of the norm bound at every eps",
        "clipping",
        "norm-bound",
    ),
    (
        "printed-ahead",
        "AdaCliP as printed is ahead of Abadi's clipping at every eps",
        "literal",
        "clipping",
    ),
)
"""PaperClaim, its words, and which method is ahead of which."""


class Rates(Section):
    """Learning rates that each method chooses among."""

    norm_bound: list[float]
    clipping: list[float]
    adaclip: list[float]
    literal: list[float]


class MnistSettings(Settings):
    """Keys of ``experiment.toml``."""

    dataset: str = "mnist"
    batch: float = 600.0
    delta: float = 1e-5
    epsilons: list[float]
    epochs: list[int]
    clip_norm: float = 4.0
    norm_bound: float = 28.0
    h2: float = 1e-3
    h2_literal: float = 1e-5
    rates: Rates
    momentum_epsilon: float = 0.5
    momenta: list[float]
    momentum_rate: float = 0.03
    examples: int = 0


class Mnist(Experiment):
    """Central DP-SGD with ghost rows; each member is one training."""

    settings: MnistSettings
    settings_type: ClassVar[type[Settings]] = MnistSettings

    def members(self) -> list[ExperimentMember]:
        """Table 1 (every epsilon, method and rate), then Fig. 4 (momentum)."""
        settings, members = self.settings, []
        methods = settings.rates.model_dump(by_alias=True)
        for seed in range(1, settings.seeds + 1):
            for epsilon, epochs in zip(settings.epsilons, settings.epochs, strict=True):
                for method, rates in methods.items():
                    for rate in rates:
                        plan = self._plan(method, epsilon, epochs, rate, seed)
                        members.append(ExperimentMember(_name(method, epsilon, rate, seed), plan))
            for momentum in settings.momenta:
                plan = self._plan("norm-bound", settings.momentum_epsilon, 10, 0.0, seed)
                # A heavy ball of momentum m moves 1 / (1 - m) times as far a step.
                plan |= {"momentum": momentum, "rate": settings.momentum_rate * (1 - momentum)}
                members.append(ExperimentMember(f"momentum={momentum:g} seed={seed}", plan))
        return members

    def _plan(
        self, method: str, epsilon: float, epochs: int, rate: float, seed: int
    ) -> dict[str, Any]:
        common = self.settings.model_dump(by_alias=True, include=set(_SHARED))
        return {
            **common,
            "method": method,
            "epsilon": epsilon,
            "epochs": epochs,
            "rate": rate,
            "momentum": 0.0,
            "seed": seed,
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """One training: accuracy by epoch, distortion, and the epsilon of its ledger."""
        x, y, test = load_images(settings["dataset"], str(self.context.data), settings["examples"])
        batch, delta = min(settings["batch"], len(y) / 2), settings["delta"]
        z = calibrate(
            target_epsilon=settings["epsilon"],
            cohort=PoissonCohort(rate=batch / len(y)),
            rounds=settings["epochs"] * round(len(y) / batch),
            delta=delta,
        )
        outcome = train(
            DenseNet((x.shape[1], 10)),
            lambda index: x[index].double(),
            y,
            test,
            mechanism=make_mechanism(settings),
            noise_multiplier=z,
            batch=batch,
            epochs=settings["epochs"],
            optimizer=sgd(settings["rate"], settings["momentum"]),
            seed=settings["seed"],
            ledger=Ledger(delta=delta),
        )
        return {
            "accuracy": outcome.accuracy,
            "distortion": outcome.distortion,
            "clipped": outcome.clipped,
            "noise-multiplier": z,
            "epsilon": outcome.ledger.epsilon(delta),
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """Table 1, the noise ratio of Fig. 3 and the momentum curves of Fig. 4."""
        settings = self.settings
        rates = settings.rates.model_dump(by_alias=True)
        best: dict[tuple[str, float], tuple[float, float, float]] = {}
        for method, choices in rates.items():
            for epsilon in settings.epsilons:
                best[method, epsilon] = max(
                    (*over_seeds(self._finals(results, method, epsilon, rate)), rate)
                    for rate in choices
                )
        rows: list[list[str | float | None]] = [
            [LABELS[method], *(_cell(best[method, epsilon]) for epsilon in settings.epsilons)]
            for method in rates
        ]
        ratios = self._ratios(results, best)
        rows.append(["Fig. 3: noise, AdaCliP / Abadi", *(f"{r:.2f}" for r in ratios)])
        figures = {f"{m} eps={e:g}": value[0] for (m, e), value in best.items()}
        figures |= {
            f"noise ratio eps={e:g}": r for e, r in zip(settings.epsilons, ratios, strict=True)
        }
        curves = {m: self._curves(results, m) for m in settings.momenta}
        figures |= {f"momentum={m:g}": 100 * float(c[:, -1].mean()) for m, c in curves.items()}
        columns = ["", *(f"eps {epsilon:g}" for epsilon in settings.epsilons)]
        title = (
            f"Test accuracy (%) at delta = {settings.delta:g}, {seeds_text(settings.seeds)}, with "
            "the better of the declared rates (chosen on the test set)"
        )
        return Report(
            tables=[Table("table1", title, columns, rows)],
            figures=figures,
            claims=self._claims(best, ratios, curves),
            pictures={"table1": self._picture(best, ratios, curves)},
        )

    def _finals(
        self, results: Mapping[str, Result], method: str, epsilon: float, rate: float
    ) -> list[float]:
        seeds = range(1, self.settings.seeds + 1)
        return [100 * results[_name(method, epsilon, rate, s)]["accuracy"][-1] for s in seeds]

    def _ratios(
        self, results: Mapping[str, Result], best: Mapping[tuple[str, float], tuple[float, ...]]
    ) -> list[float]:
        """Mean ``||g - g~||`` of AdaCliP over that of Abadi's clipping, at their best rates."""
        seeds = range(1, self.settings.seeds + 1)
        ratios = []
        for epsilon in self.settings.epsilons:
            noise = {}
            for method in ("adaclip", "clipping"):
                rate = best[method, epsilon][2]
                runs = [results[_name(method, epsilon, rate, s)]["distortion"] for s in seeds]
                noise[method] = float(np.mean(runs))
            ratios.append(noise["adaclip"] / noise["clipping"])
        return ratios

    def _curves(self, results: Mapping[str, Result], momentum: float) -> Any:
        seeds = range(1, self.settings.seeds + 1)
        return np.array([results[f"momentum={momentum:g} seed={s}"]["accuracy"] for s in seeds])

    def _claims(
        self,
        best: Mapping[tuple[str, float], tuple[float, float, float]],
        ratios: list[float],
        curves: Mapping[float, Any],
    ) -> list[PaperClaim]:
        def gains(method: str, baseline: str) -> list[float]:
            return [best[method, e][0] - best[baseline, e][0] for e in self.settings.epsilons]

        def spread(values: list[float]) -> str:
            return ", ".join(f"{value:+.2f}" for value in values)

        claims = []
        for name, says, method, baseline in _COMPARED:
            gain = gains(method, baseline)
            claims.append(PaperClaim(name, says, min(gain) > 0, spread(gain)))
        claims.append(
            PaperClaim(
                "noise-ratio",
                "Fig. 3: AdaCliP adds about 0.8 of Abadi's noise at every eps",
                all(0.7 <= ratio <= 0.9 for ratio in ratios),
                ", ".join(f"{ratio:.2f}" for ratio in ratios),
            )
        )
        finals = [100 * float(curve[:, -1].mean()) for curve in curves.values()]
        apart = max(finals) - min(finals)
        claims.append(
            PaperClaim(
                "momentum",
                "Fig. 4: momentum ends where plain SGD does, to half a point",
                apart <= 0.5,
                f"{apart:.2f} points apart",
            )
        )
        return claims

    def _picture(
        self,
        best: Mapping[tuple[str, float], tuple[float, float, float]],
        ratios: list[float],
        curves: Mapping[float, Any],
    ) -> Figure:
        epsilons = self.settings.epsilons
        figure, axes = grid(
            1, 3, title="AdaCliP on MNIST, softmax regression", width=12, height=3.8
        )
        for method in dict.fromkeys(method for method, _ in best):
            values = np.array([best[method, epsilon][:2] for epsilon in epsilons])
            axes[0].errorbar(
                epsilons,
                values[:, 0],
                values[:, 1],
                **curve_style(COLOURS[method]),
                label=LABELS[method],
            )
        axes[0].set_ylabel("test accuracy (%); bars: s.d. over seeds")
        axes[0].set_title("Table 1", fontsize=10)
        axes[0].legend(frameon=False, fontsize=8)
        axes[1].plot(epsilons, ratios, **curve_style(COLOURS["adaclip"]))
        axes[1].axhline(1, color=COLOURS["clipping"], linewidth=1, linestyle="--")
        axes[1].set_ylim(0, 1.15)
        axes[1].set_ylabel("$\\|g - \\tilde g\\|$, AdaCliP / Abadi")
        axes[1].set_title("Fig. 3: noise", fontsize=10)
        for panel in axes[:2]:
            panel.set_xscale("log")
            panel.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
            panel.minorticks_off()
            panel.set_xlabel("$\\epsilon$")
        for (momentum, curve), colour in zip(curves.items(), _CURVES, strict=False):
            epochs = np.arange(1, curve.shape[1] + 1)
            axes[2].plot(
                epochs, 100 * curve.mean(0), **curve_style(colour), label=f"momentum {momentum:g}"
            )
        axes[2].set_xlabel("epoch")
        axes[2].set_ylabel("test accuracy (%)")
        axes[2].set_title(
            f"Fig. 4: norm bound, $\\epsilon$ = {self.settings.momentum_epsilon:g}", fontsize=10
        )
        axes[2].legend(frameon=False, fontsize=8)
        return figure


_CURVES = (COLOURS["fedavg"], COLOURS["adaclip"], COLOURS["clipping"], COLOURS["third"])


def make_mechanism(settings: Mapping[str, Any]) -> Mechanism:
    """The mechanism of a member: ``method`` and its bounds."""
    match settings["method"]:
        case "norm-bound":
            return NormBound(settings["norm-bound"])
        case "clipping":
            return Clipping(settings["clip-norm"])
        case "adaclip":
            return AdaClip(settings["clip-norm"], h2=settings["h2"])
        case _:
            return AdaClip(settings["clip-norm"], h2=settings["h2-literal"], literal=True)


@lru_cache(maxsize=1)
def load_images(
    name: str, directory: str, examples: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Training images float32 ``[N, pixels]`` in [0, 1], labels, and the test set in float64.

    ``examples`` keeps the first so many of both; 0 keeps all.
    """
    dataset = datasets.load(name, directory=directory)
    keep = examples or len(dataset.train)
    x, y = dataset.train.x[:keep].flatten(1).float() / 255, dataset.train.y[:keep].long()
    test = dataset.test.x[:keep].flatten(1).to(torch.float64) / 255
    return x, y, (test, dataset.test.y[:keep].long())


def _name(method: str, epsilon: float, rate: float, seed: int) -> str:
    return f"{method} eps={epsilon:g} rate={rate:g} seed={seed}"


def _cell(value: tuple[float, float, float]) -> str:
    mean, spread, rate = value
    return f"{mean:.2f}±{spread:.2f} ({rate:g})"
