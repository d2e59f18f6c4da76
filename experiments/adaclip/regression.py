"""Pichapati et al., Fig. 2: error of private mean estimation against the dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from matplotlib.figure import Figure

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
from fedsim.mechanisms import AdaClip, Clipping, Independent, Mechanism, NoiseSource, Releaser
from fedsim.randomness import Purpose, Randomness
from fedsim.reports.palette import COLOURS, INK
from fedsim.reports.plots import curve_style, grid
from fedsim.rows import DenseRows, Layout

__all__ = ["METHODS", "Regression", "RegressionSettings", "error_of_clipping"]

METHODS = {
    "clipping": ("Abadi, C = 1", COLOURS["clipping"]),
    "literal": ("AdaCliP as printed, h2 = 1", COLOURS["literal"]),
    "stabilised": ("AdaCliP, h2 = 4, clamped after averaging", COLOURS["third"]),
    "early": ("AdaCliP, h2 = C² γ / d, clamped before averaging", COLOURS["norm-bound"]),
    "safe": ("AdaCliP, h2 = C² γ / d, clamped after averaging", COLOURS["adaclip"]),
}

COLUMNS = {
    "clipping": "Abadi",
    "literal": "as printed",
    "stabilised": "h2 = 4, after",
    "early": "safe h2, before",
    "safe": "safe h2, after",
}


class RegressionSettings(Settings):
    """Keys of ``experiment.toml``."""

    dimensions: list[int]
    steps: int
    rate: float
    noise_multiplier: float
    clip_norm: float = 1.0
    law: Literal["two-point", "normal"] = "two-point"


class Regression(Experiment):
    """Rows of one example go straight through the mechanisms; no epsilon is claimed."""

    settings: RegressionSettings
    settings_type: ClassVar[type[Settings]] = RegressionSettings

    def members(self) -> list[ExperimentMember]:
        """Every dimension and method, all seeds together."""
        common = self.settings.model_dump(by_alias=True, exclude={"experiment", "dimensions"})
        return [
            ExperimentMember(f"{method} d={d}", {**common, "dimension": d, "method": method})
            for d in self.settings.dimensions
            for method in METHODS
        ]

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Final errors ``||theta_T - theta*||^2``, mean noises and clipped shares, by seed."""
        runs = [_descend(settings, seed) for seed in range(1, settings["seeds"] + 1)]
        error, noise, clipped = zip(*runs, strict=True)
        return {"error": error, "noise": noise, "clipped": clipped}

    def report(self, results: Mapping[str, Result]) -> Report:
        """Errors and noises by dimension, beside the theory for clipping."""
        settings = self.settings
        figures: dict[str, float] = {}
        errors: dict[str, list[float]] = {method: [] for method in METHODS}
        noises: dict[str, list[float]] = {method: [] for method in METHODS}
        for d in settings.dimensions:
            for method in METHODS:
                result = results[f"{method} d={d}"]
                error, _ = over_seeds(result["error"])
                noise, _ = over_seeds(result["noise"])
                errors[method].append(error)
                noises[method].append(noise)
                figures |= {f"error {method} d={d}": error, f"noise {method} d={d}": noise}
        theory = [self._theory(d) for d in settings.dimensions]
        many = seeds_text(settings.seeds)
        return Report(
            tables=[
                self._table("errors", f"||theta_T||^2, mean of {many}", theory, errors),
                self._table("noises", f"Mean ||g - g~||^2, {many}", None, noises),
            ],
            figures=figures,
            claims=self._claims(errors, noises),
            pictures={"errors": self._picture(errors, noises)},
        )

    def _table(
        self,
        name: str,
        title: str,
        theory: list[float] | None,
        values: Mapping[str, list[float]],
    ) -> Table:
        named = {} if theory is None else {"theory, Abadi": theory}
        columns = {**named, **{COLUMNS[method]: column for method, column in values.items()}}
        rows = [
            [d, *(column[k] for column in columns.values())]
            for k, d in enumerate(self.settings.dimensions)
        ]
        return Table(name, title, ["d", *columns], rows, digits=4)

    def _theory(self, d: int) -> float:
        settings = self.settings
        return error_of_clipping(d, settings.rate, settings.noise_multiplier * settings.clip_norm)

    def _claims(
        self, errors: Mapping[str, list[float]], noises: Mapping[str, list[float]]
    ) -> list[PaperClaim]:
        dimensions = self.settings.dimensions
        high = [k for k, d in enumerate(dimensions) if d >= 100]
        claims = []
        for method in ("literal", "stabilised", "early", "safe"):
            name = METHODS[method][0]
            below = [
                str(d)
                for k, d in enumerate(dimensions)
                if errors[method][k] < errors["clipping"][k]
            ]
            flat = [errors[method][k] for k in high]
            claims += [
                PaperClaim(
                    f"{method}-below",
                    f"{name}: error below Abadi's in every dimension",
                    len(below) == len(dimensions),
                    f"d = {', '.join(below) or 'none'}",
                ),
                PaperClaim(
                    f"{method}-flat",
                    f"{name}: from d = 100 on, error independent of d (to a factor of 5)",
                    max(flat) <= 5 * min(flat),
                    f"{min(flat):.4f} to {max(flat):.4f}",
                ),
            ]
        quiet = all(a <= 1.02 * b for a, b in zip(noises["safe"], noises["clipping"], strict=True))
        claims.append(
            PaperClaim(
                "safe-quiet",
                "with h2 = C² γ / d, clamped after, ||g - g~||^2 is nowhere above Abadi's",
                quiet,
                ", ".join(
                    f"{a / b:.2f}" for a, b in zip(noises["safe"], noises["clipping"], strict=True)
                ),
            )
        )
        return claims

    def _picture(
        self, errors: Mapping[str, list[float]], noises: Mapping[str, list[float]]
    ) -> Figure:
        dimensions = self.settings.dimensions
        figure, axes = grid(
            1, 2, title="AdaCliP, Fig. 2: what the dimension costs", width=10, height=4
        )
        for method, (label, colour) in METHODS.items():
            for panel, values in zip(axes, (errors, noises), strict=True):
                panel.plot(dimensions, values[method], **curve_style(colour), label=label)
        axes[0].plot(
            dimensions,
            [self._theory(d) for d in dimensions],
            color=INK,
            linestyle=":",
            linewidth=1,
            label="theory, Abadi",
        )
        labels = ("error $\\|\\theta_T\\|^2$", "noise $\\|g - \\tilde g\\|^2$")
        for panel, label in zip(axes, labels, strict=True):
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xticks(dimensions, [str(d) for d in dimensions])
            panel.minorticks_off()
            panel.set_xlabel("dimension")
            panel.set_ylabel(label)
        axes[0].legend(frameon=False, fontsize=8)
        return figure


def error_of_clipping(d: int, rate: float, noise: float) -> float:
    """Stationary ``E||theta||^2`` of SGD with noise std ``noise`` a coordinate and one noisy x.

    Each coordinate is an autoregression: ``rate / (2 - rate)`` times the variance of what is
    added, which is ``noise^2``, and 1 more on the coordinate in which the data vary. That no
    gradient is clipped is assumed.
    """
    return rate / (2 - rate) * (noise**2 * d + 1)


def _descend(settings: Mapping[str, Any], seed: int) -> tuple[float, float, float]:
    """SGD on ``1/2 ||theta - x||^2``, one example a step, x of variance 1 in one coordinate."""
    d, rate = settings["dimension"], settings["rate"]
    mechanism = _mechanism(settings["method"], settings["clip-norm"])
    layout = Layout.of({"theta": torch.zeros(d, dtype=torch.float64)})
    state, randomness = mechanism.init(layout), Randomness(seed)
    releaser = Releaser(
        mechanism, layout, noise=Independent(settings["noise-multiplier"]), denominator=1.0
    )
    draws, steps = randomness.generator(Purpose.SAMPLE, level="example"), settings["steps"]
    normal = settings["law"] == "normal"
    data = draws.standard_normal(steps) if normal else draws.choice([-1.0, 1.0], steps)
    start = randomness.generator(Purpose.INIT, level="run").standard_normal(d) / np.sqrt(d)
    theta, noise, clipped = torch.from_numpy(start), 0.0, 0
    for step, x in enumerate(data, 1):
        row = -theta
        row[0] += x
        total = releaser.start(state)
        total.add(DenseRows(row[None]))
        source = NoiseSource(randomness.generator(Purpose.NOISE, level="example", round=step))
        release = releaser.release(total, source)
        state = release.state
        noise += float((release.mean - row).square().sum())
        clipped += total.clipped
        theta = theta + rate * release.mean
    return float(theta.square().sum()), noise / len(data), clipped / len(data)


def _mechanism(method: str, clip_norm: float) -> Mechanism:
    match method:
        case "clipping":
            return Clipping(clip_norm)
        case "literal":
            return AdaClip(clip_norm, h2=1.0, literal=True)
        case "stabilised":
            return AdaClip(clip_norm, h2=4.0, gamma=0.5, beta2=0.999, center=False, clamp="post")
        case "early":
            return AdaClip(clip_norm, gamma=0.25, center=False)
        case _:
            return AdaClip(clip_norm, gamma=0.25, beta2=0.999, center=False, clamp="post")
