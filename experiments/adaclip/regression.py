"""Pichapati et al., Fig. 2: error of private mean estimation against the dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

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
    seeds_text,
)
from experiments.framework.spread import all_ahead, over_seeds, paired
from fedsim.mechanisms import AdaClip, Clipping, State
from fedsim.mechanisms.base import Released
from fedsim.randomness import Purpose, Randomness
from fedsim.reports.palette import COLOURS, INK
from fedsim.reports.plots import curve_style, grid
from fedsim.rows import Layout

__all__ = [
    "METHODS",
    "Regression",
    "RegressionSettings",
    "descend",
    "error_of_clipping",
    "make_mechanism",
]

Values = Mapping[str, list[list[float]]]
"""By method: for every dimension, a value a seed."""

FLAT_FACTOR = 5.0

METHODS = {
    "clipping": ("Abadi", COLOURS["clipping"]),
    "literal": ("AdaCliP as printed, h2 = C²", COLOURS["literal"]),
    "stabilised": ("AdaCliP, h2 = 4 C², clamped after averaging", COLOURS["adaclip"]),
}


class RegressionSettings(Settings):
    """Keys of ``experiment.toml``."""

    dimensions: list[int]
    clip_norms: list[float]
    steps: int
    rate: float
    noise_multiplier: float
    law: Literal["two-point", "normal"] = "two-point"


class Regression(Experiment):
    """Rows of one example go straight through the mechanisms; no epsilon is claimed."""

    settings: RegressionSettings
    settings_type: ClassVar[type[Settings]] = RegressionSettings

    def members(self) -> list[ExperimentMember]:
        """Every C, dimension and method, all seeds together."""
        other = {"experiment", "dimensions", "clip_norms"}
        common = self.settings.model_dump(by_alias=True, exclude=other)
        return [
            ExperimentMember(
                _name(method, bound, d),
                {**common, "clip-norm": bound, "dimension": d, "method": method},
            )
            for bound in self.settings.clip_norms
            for d in self.settings.dimensions
            for method in METHODS
        ]

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Final errors ``||theta_T - theta*||^2``, mean noises and clipped shares, by seed."""
        runs = descend(settings, range(1, settings["seeds"] + 1))
        error, noise, clipped = zip(*runs, strict=True)
        return {"error": list(error), "noise": list(noise), "clipped": list(clipped)}

    def report(self, results: Mapping[str, Result]) -> Report:
        """Errors and noises by dimension at every C, beside the theory for clipping."""
        settings = self.settings
        tables, claims = [], []
        figures: dict[str, float] = {}
        panels = {}
        for bound in settings.clip_norms:
            errors, noises = (
                {
                    method: [results[_name(method, bound, d)][what] for d in settings.dimensions]
                    for method in METHODS
                }
                for what in ("error", "noise")
            )
            panels[bound] = errors
            for method in METHODS:
                for d, seeds in zip(settings.dimensions, errors[method], strict=True):
                    figures[f"error {method} C={bound:g} d={d}"] = over_seeds(seeds)[0]
            tables.append(self._table(f"errors-c{bound:g}", "||theta_T||^2", bound, errors))
            tables.append(self._table(f"noises-c{bound:g}", "||g - g~||^2", bound, noises))
            claims += self._claims(bound, errors)
        return Report(tables, figures, claims, {"errors": self._picture(panels)})

    def _theory(self, d: int, bound: float) -> float:
        settings = self.settings
        return error_of_clipping(d, settings.rate, settings.noise_multiplier * bound)

    def _table(self, name: str, what: str, bound: float, values: Values) -> Table:
        title = f"C = {bound:g}: {what}, mean ± s.d. of {seeds_text(self.settings.seeds)}"
        rows: list[list[str | float | None]] = [
            [
                str(d),
                *("{:.4g} ± {:.2g}".format(*over_seeds(column[k])) for column in values.values()),
            ]
            for k, d in enumerate(self.settings.dimensions)
        ]
        return Table(name, title, ["d", *(METHODS[method][0] for method in values)], rows)

    def _claims(self, bound: float, errors: Values) -> list[PaperClaim]:
        claims = []
        for method in ("literal", "stabilised"):
            label = f"C = {bound:g}, {METHODS[method][0]}"
            saved = [
                paired(clipping, adaclip)
                for clipping, adaclip in zip(errors["clipping"], errors[method], strict=True)
            ]
            means = [over_seeds(seeds)[0] for seeds in errors[method]]
            claims += [
                PaperClaim(
                    f"{method}-below-c{bound:g}",
                    "Fig. 2",
                    f"{label}: error below clipping's in every dimension",
                    all_ahead(saved),
                    ", ".join(
                        f"d = {d}: {_word(difference.positive)}"
                        for d, difference in zip(self.settings.dimensions, saved, strict=True)
                    ),
                ),
                PaperClaim(
                    f"{method}-flat-c{bound:g}",
                    "Fig. 2",
                    f"{label}: error independent of d, to a factor of {FLAT_FACTOR:g}",
                    max(means) <= FLAT_FACTOR * min(means),
                    f"{min(means):.3g} to {max(means):.3g}",
                ),
            ]
        return claims

    def _picture(self, panels: Mapping[float, Values]) -> Figure:
        dimensions = self.settings.dimensions
        title = "AdaCliP, Fig. 2: what the dimension costs"
        figure, axes = grid(1, len(panels), title=title, width=4 * len(panels), height=4)
        for panel, (bound, errors) in zip(axes, panels.items(), strict=True):
            for method, (label, colour) in METHODS.items():
                means, spreads = np.transpose([over_seeds(seeds) for seeds in errors[method]])
                panel.errorbar(
                    dimensions, means, spreads, **curve_style(colour), capsize=3, label=label
                )
            panel.plot(
                dimensions,
                [self._theory(d, bound) for d in dimensions],
                color=INK,
                linestyle=":",
                linewidth=1,
                label="theory, Abadi, nothing clipped",
            )
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xticks(dimensions, [str(d) for d in dimensions])
            panel.minorticks_off()
            panel.set_xlabel("dimension")
            panel.set_title(f"C = {bound:g}", fontsize=10)
        axes[0].set_ylabel("error $\\|\\theta_T\\|^2$; bars: s.d. over seeds")
        axes[0].legend(frameon=False, fontsize=8)
        return figure


def _cell(seeds: Sequence[float]) -> str:
    return "{:.4g} ± {:.2g}".format(*over_seeds(seeds))


def _word(positive: bool | None) -> str:
    return {True: "below", False: "above", None: "undecided"}[positive]


def _name(method: str, bound: float, d: int) -> str:
    return f"{method} C={bound:g} d={d}"


def error_of_clipping(d: int, rate: float, noise: float) -> float:
    """Stationary ``E||theta||^2`` of SGD with noise std ``noise`` a coordinate and one noisy x.

    Each coordinate is an autoregression: ``rate / (2 - rate)`` times the variance of what is
    added, which is ``noise^2``, and 1 more on the coordinate in which the data vary. That no
    gradient is clipped is assumed.
    """
    return rate / (2 - rate) * (noise**2 * d + 1)


def descend(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[tuple[float, float, float]]:
    """SGD on ``1/2 ||theta - x||^2``, one example a step, x of variance 1 in one coordinate.

    All seeds at once, ``[n, d]``: what is one row through a releaser (a test holds the two equal)
    is a row of its own here, with a state of its own.

    Returns
    -------
    list of (error, noise, clipped)
        ``||theta_T||^2``, the mean of ``||g - g~||^2``, and the share of clipped gradients.
    """
    d, rate, z = settings["dimension"], settings["rate"], settings["noise-multiplier"]
    steps, count = settings["steps"], len(seeds)
    mechanism = make_mechanism(settings["method"], settings["clip-norm"])
    layout = Layout.of({"theta": torch.zeros(d, dtype=torch.float64)})
    state: State = {name: value.repeat(count, 1) for name, value in mechanism.init(layout).items()}
    randomness = [Randomness(seed) for seed in seeds]
    draws = [r.generator(Purpose.SAMPLE, level="example") for r in randomness]
    noises = [r.generator(Purpose.NOISE, level="example") for r in randomness]
    data = torch.from_numpy(np.array([_examples(g, settings["law"], steps) for g in draws]))
    starts = [r.generator(Purpose.INIT, level="run").standard_normal(d) for r in randomness]
    theta = torch.from_numpy(np.array(starts) / np.sqrt(d))
    noise, clipped = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
    for step in range(steps):
        rows = -theta
        rows[:, 0] += data[:, step]
        drawn = torch.from_numpy(np.array([g.standard_normal(d) for g in noises]))
        released, long, state = _release(mechanism, state, rows, z, drawn)
        noise += (released - rows).square().sum(1)
        clipped += long
        theta = theta + rate * released
    errors = theta.square().sum(1)
    return list(
        zip(errors.tolist(), (noise / steps).tolist(), (clipped / steps).tolist(), strict=True)
    )


def _release(
    mechanism: Clipping | AdaClip, state: State, rows: Tensor, z: float, drawn: Tensor
) -> tuple[Tensor, Tensor, State]:
    """Released means of one row each, which rows were clipped, and the next states."""
    if isinstance(mechanism, Clipping):
        bounded, radius = mechanism.bound(rows), mechanism.clip_norm
        return (
            bounded + z * radius * drawn,
            torch.linalg.vector_norm(rows, dim=1) > radius,
            state,
        )
    ready = mechanism.ready(state)
    scale, centre = mechanism.whitening(ready)
    centred = rows if centre is None else rows - centre
    whitened = centred if scale is None else centred * scale
    lengths = torch.linalg.vector_norm(whitened, dim=1)
    bounded = whitened * (1 / lengths).clamp(max=1.0)[:, None]
    mean = mechanism.restore(bounded + z * drawn, ready)
    one = torch.ones(1, dtype=torch.float64)
    released = Released(mean, {}, z * one, one, {})
    return mean, lengths > 1, mechanism.next(state, ready, released)


def _examples(generator: np.random.Generator, law: str, steps: int) -> np.ndarray:
    if law == "normal":
        return generator.standard_normal(steps)
    # Half of the examples are at -1 and half at 1, in an order of chance.
    return generator.permutation(np.resize([-1.0, 1.0], steps))


def make_mechanism(method: str, clip_norm: float) -> Clipping | AdaClip:
    """A method's, at one C."""
    match method:
        case "clipping":
            return Clipping(clip_norm)
        case "literal":
            return AdaClip(clip_norm, h2=clip_norm**2, literal=True)
        case _:
            return AdaClip(
                clip_norm, h2=4.0 * clip_norm**2, gamma=0.5, beta2=0.999, center=False, clamp="post"
            )
