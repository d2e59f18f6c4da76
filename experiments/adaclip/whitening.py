"""Pichapati et al., section 4.3: AdaCliP's scaling b against the b that whitens gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from experiments.adaclip.mnist import LABELS, Mnist, load_images, make_mechanism
from experiments.adaclip.tuned import TunedRates
from experiments.framework.base import ExperimentClaim, Members, Report, Result, Table, seeds_text
from experiments.framework.spread import all_ahead, listed, over_seeds, paired
from fedsim.mechanisms import AdaClip, Mechanism, State
from fedsim.reports.plots import COLOURS, grid

PANEL = "Section 4.3"
SPECTRUM = "spectrum"
CLASSES = 10


@dataclass(frozen=True)
class Whitened(AdaClip):
    """AdaCliP with ``b_i = sqrt(d / gamma) s_i``, so that all coordinates have equal variance.

    Guarantee: as AdaCliP's. It meets the same constraint ``sum s_i^2 / b_i^2 <= gamma``, with a
    total noise variance of ``d sum s_i^2 / gamma``; AdaCliP's b has the least possible,
    ``(sum s_i)^2 / gamma``.
    """

    def round_state(self, state: State) -> State:
        """Entries b, ``1 / b``, and m if rows are centred."""
        b = state["s"] * math.sqrt(state["s"].shape[-1] / self.gamma)
        return {**super().round_state(state), "b": b, "scale": 1 / b}


def noises(s: Tensor) -> tuple[float, float]:
    """Total noise variance of the whitening b and of AdaCliP's, at gamma = 1 and z = 1.

    Parameters
    ----------
    s : float64 ``[d]``
        Standard deviations of a row's coordinates.
    """
    return float(len(s) * s.square().sum()), float(s.sum().square())


class Whitening(Mnist):
    """`Mnist` with three bounds, and the noise variance by formula for two of them."""

    methods: ClassVar[Mapping[str, str]] = {
        "clipping": LABELS["clipping"],
        "whitening": "whitening",
        "adaclip": LABELS["adaclip"],
    }
    whitened: ClassVar[frozenset[str]] = frozenset({"adaclip", "whitening"})
    colours: ClassVar[Mapping[str, str]] = {**COLOURS, "whitening": COLOURS["third"]}

    def members(self) -> Members:
        """The standard deviations of the first gradients, and every rate of every method."""
        settings = {"part": SPECTRUM, "dataset": self.settings.dataset}
        spectrum = {**settings, "examples": self.settings.examples}
        return {SPECTRUM: spectrum, **super().members()}

    def followers(self, results: Mapping[str, Result]) -> Members:
        """Fresh seeds at the best rates."""
        return TunedRates.followers(self, results)

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Train once, or compute both formulas' noise for the gradients at zero."""
        if settings.get("part") != SPECTRUM:
            return super().run(settings)
        x, y, _ = load_images(settings["dataset"], str(self.data), settings["examples"])
        whitening, optimal = noises(spread(x.double(), y))
        return {"whitening": whitening, "optimal": optimal}

    def mechanism(self, settings: Mapping[str, Any]) -> Mechanism:
        """The mechanism that bounds a member's rows."""
        if settings["method"] == "whitening":
            return Whitened(settings["clip-norm"], h2=settings["h2"])
        return make_mechanism(settings)

    def report(self, results: Mapping[str, Result]) -> Report:
        """Accuracies and noises by epsilon, and the noise by formula."""
        spectrum = results[SPECTRUM]
        formula = math.sqrt(spectrum["optimal"] / spectrum["whitening"])
        rows = self.rows(results)
        figures = {**self.figures(results), "formula": formula}
        for method, label in (("whitening", "whitening"), ("adaclip", "AdaCliP")):
            cells = [
                "{:.3f} ± {:.3f}".format(*over_seeds(of)) for of in self.ratios(results, method)
            ]
            rows.append([f"noise, {label} / clipping", *cells])
        left = self.ratios(results, "adaclip", "whitening")
        saved = [paired([1.0] * len(values), values) for values in left]
        gains = self.gains(results, "adaclip", "whitening")
        for epsilon, values in zip(self.settings.epsilons, left, strict=True):
            figures[f"noise left eps={epsilon:g}"] = over_seeds(values)[0]
        title = (
            f"Test accuracy (%), mean ± s.d. of {seeds_text(self.settings.seeds)} (best rate), and "
            "||g - g~|| over that of clipping"
        )
        return Report(
            tables=[
                Table("whitening", title, ["", *self.columns], rows),
                Table(
                    "formula",
                    "Noise variance at gamma = z = 1, for the spread s of the gradients at zero",
                    ["b", "formula", "value"],
                    [
                        ["whitening; clipping at C = ||s||", "d sum s^2", spectrum["whitening"]],
                        ["AdaCliP", "(sum s)^2", spectrum["optimal"]],
                    ],
                ),
            ],
            figures=figures,
            claims=[
                ExperimentClaim(
                    "formula", PANEL, "by formula AdaCliP's b adds less noise than the whitening b",
                    spectrum["optimal"] < spectrum["whitening"],
                    f"a standard deviation of {formula:.3f} of it",
                ),
                ExperimentClaim(
                    "less-noise", PANEL,
                    "in training AdaCliP's b adds less noise than the whitening b at every eps run "
                    "here, as shares of it saved",
                    all_ahead(saved), listed(saved, self.columns),
                ),
                ExperimentClaim(
                    "ahead", PANEL,
                    "AdaCliP's b ends ahead of the whitening b at every eps run here",
                    all_ahead(gains), listed(gains, self.columns),
                ),
            ],
            pictures={"whitening": self._compared(results)},
            choices=self.choices(results),
        )  # fmt: skip

    def _compared(self, results: Mapping[str, Result]) -> Figure:
        figure, axes = grid(1, 2, title="AdaCliP against whitening, MNIST", width=10, height=4)
        self.draw_accuracy(axes[0], results)
        for method in ("whitening", "adaclip"):
            values = self.ratios(results, method)
            self.draw_line(axes[1], values, self.colours[method], self.methods[method])
        axes[1].axhline(1, color=COLOURS["clipping"], linewidth=1, linestyle="--", label="clipping")
        axes[1].set_ylim(bottom=0)
        axes[1].set_ylabel("$\\|g - \\tilde g\\|$ over clipping's")
        axes[1].legend(frameon=False, fontsize=8)
        return figure


def spread(x: Tensor, y: Tensor) -> Tensor:
    """Standard deviations of the coordinates of softmax regression's gradients at zero, ``[d]``."""
    delta = 1 / CLASSES - F.one_hot(y, CLASSES).double()
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    mean = delta.T @ inputs / len(x)
    square = delta.square().T @ inputs.square() / len(x)
    return (square - mean.square()).clamp(min=0).sqrt().flatten()
