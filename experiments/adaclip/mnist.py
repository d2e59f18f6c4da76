"""Pichapati et al.: AdaCliP on MNIST, softmax regression (Table 1 and Fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from experiments.adaclip.central import DenseNet, train
from experiments.adaclip.tuned import TunedRates, TunedSettings
from experiments.framework.base import (
    ExperimentClaim,
    Members,
    Outcome,
    Report,
    Result,
    Table,
    as_table,
    seeds_text,
)
from experiments.framework.spread import all_ahead, listed, over_seeds, paired, within
from fedsim import datasets
from fedsim.cohorts import PoissonCohort
from fedsim.mechanisms import AdaClip, Clipping, Mechanism, NormBound
from fedsim.privacy import Ledger, calibrate
from fedsim.reports.plots import COLOURS, curve_style, grid
from fedsim.strategies import sgd

FORM = "the form of the algorithm that was run"
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
    "clip-norm",
    "norm-bound",
    "h2",
    "h2-literal",
    "examples",
)
"""Settings that every member has."""

CLOSE = (0.25, 1.0)  # percentage points within which momentum and plain SGD count as equal


@dataclass(frozen=True, kw_only=True)
class MnistSettings(TunedSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    epochs : list of int
        Number of epochs for each epsilon.
    momenta : list of float
        Momenta of the norm bound's SGD in Fig. 4, at its best rate times ``1 - momentum``.
    curves_at : float
        The epsilon of Fig. 4a.
    """

    dataset: str = "mnist"
    batch: float = 600.0
    delta: float = 1e-5
    epochs: list[int]
    clip_norm: float = 4.0
    norm_bound: float = 28.0
    h2: float = 1e-3
    h2_literal: float = 1e-5
    momenta: list[float] = field(default_factory=list)
    curves_at: float = 0.5
    examples: int = 0


class Mnist(TunedRates):
    """Central DP-SGD with ghost rows; each member is one training run."""

    settings: MnistSettings
    methods: ClassVar[Mapping[str, str]] = LABELS

    def plan(self, method: str, epsilon: float, rate: float, seed: int) -> dict[str, Any]:
        """Settings of one training run, without momentum."""
        settings, table = self.settings, as_table(self.settings)
        return {
            **{key: table[key] for key in _SHARED},
            "method": method,
            "epsilon": epsilon,
            "epochs": settings.epochs[settings.epsilons.index(epsilon)],
            "rate": rate,
            "momentum": 0.0,
            "seed": seed,
        }

    def followers(self, results: Mapping[str, Result]) -> Members:
        """Fresh seeds at the best rates, and Fig. 4's momenta."""
        members = super().followers(results)
        for seed in self.fresh:
            for epsilon in self.settings.epsilons:
                rate = self.rate(results, "norm-bound", epsilon)
                plan = self.plan("norm-bound", epsilon, rate, seed)
                for momentum in self.settings.momenta:
                    # SGD with momentum m moves 1 / (1 - m) times as far per step.
                    changes = {"momentum": momentum, "rate": rate * (1 - momentum)}
                    members[_momentum_name(momentum, epsilon, seed)] = plan | changes
        return members

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Train once: accuracy by epoch, distortion, and the epsilon of its ledger."""
        x, y, test = load_images(settings["dataset"], str(self.data), settings["examples"])
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
            mechanism=self.mechanism(settings),
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

    def mechanism(self, settings: Mapping[str, Any]) -> Mechanism:
        """The mechanism that bounds a member's rows."""
        return make_mechanism(settings)

    def report(self, results: Mapping[str, Result]) -> Report:
        """Table 1, Fig. 3's ratio for this model, and both panels of Fig. 4."""
        settings = self.settings
        ratios = self.ratios(results)
        momenta = {
            momentum: [self._momentum(results, momentum, e) for e in settings.epsilons]
            for momentum in (0.0, *settings.momenta)
        }
        figures = self.figures(results)
        rows = self.rows(results)
        ratio_cells = []
        for epsilon, values in zip(settings.epsilons, ratios, strict=True):
            figures[f"noise ratio eps={epsilon:g}"] = over_seeds(values)[0]
            ratio_cells.append("{:.3f} ± {:.3f}".format(*over_seeds(values)))
        rows.append(["noise, AdaCliP / Abadi", *ratio_cells])
        momentum_rows: list[list[str | float | None]] = []
        for momentum, runs in momenta.items():
            cells = ["{:.2f} ± {:.2f}".format(*over_seeds(_ends(seeds))) for seeds in runs]
            momentum_rows.append([f"{momentum:g}", *cells])
        title = (
            f"Test accuracy (%) at delta = {settings.delta:g}, mean ± s.d. of "
            f"{seeds_text(settings.seeds)} (best rate of the common grid)"
        )
        return Report(
            tables=[
                Table("table1", title, ["", *self.columns], rows),
                Table(
                    "figure4",
                    "Norm bound, accuracy by momentum",
                    ["momentum", *self.columns],
                    momentum_rows,
                ),
            ],
            figures=figures,
            claims=[*self._claims(results), *self._momentum_claims(momenta)],
            pictures={
                "table1": self._picture(results),
                "figure4": self._momentum_picture(momenta),
            },
            choices=self.choices(results),
        )

    def _momentum(
        self, results: Mapping[str, Result], momentum: float, epsilon: float
    ) -> list[Result]:
        if momentum == 0:
            return self.judged(results, "norm-bound", epsilon)
        return [results[_momentum_name(momentum, epsilon, seed)] for seed in self.fresh]

    def _claims(self, results: Mapping[str, Result]) -> list[ExperimentClaim]:
        def ahead(method: str, baseline: str) -> Outcome:
            gains = self.gains(results, method, baseline)
            return all_ahead(gains), listed(gains, self.columns)

        behind = "Abadi's clipping is ahead of the norm bound at every eps run here"
        return [
            ExperimentClaim.under(
                "adaclip-ahead",
                "Table 1",
                "AdaCliP is ahead of Abadi's clipping at every eps run here",
                FORM,
                {
                    "as printed": ahead("literal", "clipping"),
                    "corrected": ahead("adaclip", "clipping"),
                },
            ),
            ExperimentClaim("bound-behind", "Table 1", behind, *ahead("clipping", "norm-bound")),
        ]

    def _momentum_claims(
        self, momenta: Mapping[float, list[list[Result]]]
    ) -> list[ExperimentClaim]:
        plain = momenta[0.0]
        names = [f"{m:g} at {column}" for m in self.settings.momenta for column in self.columns]
        apart = [
            paired(_ends(runs), _ends(without))
            for momentum, by_epsilon in momenta.items()
            if momentum
            for runs, without in zip(by_epsilon, plain, strict=True)
        ]
        return [
            ExperimentClaim.under(
                "momentum",
                "Fig. 4",
                "momentum ends where plain SGD does, at every eps run here",
                "what counts as the same",
                {
                    f"to {close:g} points": (
                        within(apart, -close, close),
                        listed(apart, names),
                    )
                    for close in CLOSE
                },
            )
        ]

    def _picture(self, results: Mapping[str, Result]) -> Figure:
        title = "AdaCliP on MNIST, softmax regression"
        figure, axes = grid(1, 2, title=title, width=10, height=4)
        self.draw_accuracy(axes[0], results)
        axes[0].set_title("Table 1", fontsize=10)
        self.draw_ratios(axes[1], results)
        axes[1].set_title("Noise, for this model", fontsize=10)
        return figure

    def _momentum_picture(self, momenta: Mapping[float, list[list[Result]]]) -> Figure:
        settings = self.settings
        title = "AdaCliP, Fig. 4: momentum under the norm bound"
        figure, axes = grid(1, 2, title=title, width=10, height=4)
        there = settings.epsilons.index(settings.curves_at)
        for (momentum, runs), colour in zip(momenta.items(), _CURVES, strict=False):
            label = f"momentum {momentum:g}" if momentum else "plain SGD"
            curves = 100 * np.array([run["accuracy"] for run in runs[there]])
            epochs = np.arange(1, curves.shape[1] + 1)
            axes[0].errorbar(
                epochs,
                curves.mean(0),
                [over_seeds(column)[1] for column in curves.T],
                **curve_style(colour),
                capsize=3,
                label=label,
            )
            self.draw_line(axes[1], [_ends(seeds) for seeds in runs], colour, label)
        axes[0].set_xlabel("epoch")
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0].set_ylabel("test accuracy (%); bars: s.d. over seeds")
        axes[0].set_title(f"(a) $\\epsilon$ = {settings.curves_at:g}", fontsize=10)
        axes[0].legend(frameon=False, fontsize=8)
        axes[1].set_title("(b) against $\\epsilon$", fontsize=10)
        return figure


_CURVES = (COLOURS["fedavg"], COLOURS["adaclip"], COLOURS["clipping"], COLOURS["third"])


def _ends(runs: Sequence[Result]) -> list[float]:
    return [100 * run["accuracy"][-1] for run in runs]


def _momentum_name(momentum: float, epsilon: float, seed: int) -> str:
    return f"momentum={momentum:g} eps={epsilon:g} seed={seed}"


def make_mechanism(settings: Mapping[str, Any]) -> Mechanism:
    """The mechanism of a member, from its settings ``method`` and bounds."""
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

    ``examples`` is the number of first examples to keep of both; 0 keeps all.
    """
    dataset = datasets.load(name, directory=directory)
    keep = examples or len(dataset.train)
    x, y = dataset.train.x[:keep].flatten(1).float() / 255, dataset.train.y[:keep].long()
    test = dataset.test.x[:keep].flatten(1).to(torch.float64) / 255
    return x, y, (test, dataset.test.y[:keep].long())
