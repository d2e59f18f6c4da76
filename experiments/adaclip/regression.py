"""Pichapati et al., Fig. 2: error of private mean estimation against the dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from experiments.framework.base import (
    BestOfGrid,
    Experiment,
    ExperimentMember,
    PaperClaim,
    Report,
    Result,
    Settings,
    Table,
    seeds_text,
)
from experiments.framework.spread import Difference, all_ahead, over_seeds, paired
from fedsim.mechanisms import AdaClip, Clipping, State
from fedsim.mechanisms.base import Released
from fedsim.randomness import Purpose, Randomness
from fedsim.reports.palette import COLOURS
from fedsim.reports.plots import curve_style, grid
from fedsim.rows import Layout

__all__ = [
    "METHODS",
    "Regression",
    "RegressionSettings",
    "descend",
    "make_mechanism",
]

Values = Mapping[str, list[list[float]]]
"""By method: for every dimension, a value a seed."""

FLAT_FACTOR = 5.0
LARGEST = 1e30

METHODS = {
    "clipping": ("Abadi", COLOURS["clipping"]),
    "literal": ("AdaCliP as printed, h2 = C²", COLOURS["literal"]),
    "stabilised": ("AdaCliP, h2 = 4 C², clamped after averaging", COLOURS["adaclip"]),
}


class RegressionSettings(Settings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    rates : list of float
        At every C and in every dimension, each method takes the one that ends with the smallest
        mean error.
    """

    dimensions: list[int]
    clip_norms: list[float]
    steps: int
    rates: list[float] = Field(min_length=1)
    noise_multiplier: float
    law: Literal["two-point", "normal"] = "two-point"


class Regression(Experiment):
    """Rows of one example go straight through the mechanisms; no epsilon is claimed."""

    settings: RegressionSettings
    settings_type: ClassVar[type[Settings]] = RegressionSettings

    def members(self) -> list[ExperimentMember]:
        """Every C, dimension and method, all rates and seeds together."""
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
        """Final errors ``||theta_T - theta*||^2`` and mean noises, by rate and then by seed."""
        error, noise, _ = descend(settings, range(1, settings["seeds"] + 1))
        return {"error": error.tolist(), "noise": noise.tolist()}

    def report(self, results: Mapping[str, Result]) -> Report:
        """Errors and noises by dimension at every C, beside the theory for clipping."""
        settings = self.settings
        tables, claims = [], []
        figures: dict[str, float] = {}
        panels = {}
        choices = []
        for bound in settings.clip_norms:
            chosen = {
                method: [self._choice(results, method, bound, d) for d in settings.dimensions]
                for method in METHODS
            }
            errors = {
                method: [
                    _at(results[_name(method, bound, d)]["error"], settings.rates, choice.value)
                    for d, choice in zip(settings.dimensions, chosen[method], strict=True)
                ]
                for method in METHODS
            }
            panels[bound] = errors
            for method in METHODS:
                choices += chosen[method]
                for d, seeds in zip(settings.dimensions, errors[method], strict=True):
                    figures[f"error {method} C={bound:g} d={d}"] = over_seeds(seeds)[0]
            tables.append(self._table(bound, errors, chosen))
            claims += self._claims(bound, errors)
        return Report(tables, figures, claims, {"errors": self._picture(panels)}, choices)

    def _choice(
        self, results: Mapping[str, Result], method: str, bound: float, d: int
    ) -> BestOfGrid:
        """The rate of the smallest mean error; scores are decibels below 1."""
        errors = results[_name(method, bound, d)]["error"]
        scores = {
            rate: -10 * math.log10(over_seeds(seeds)[0])
            for rate, seeds in zip(self.settings.rates, errors, strict=True)
        }
        return BestOfGrid(f"rate of {method} at C = {bound:g}, d = {d}", scores)

    def _table(
        self, bound: float, errors: Values, chosen: Mapping[str, Sequence[BestOfGrid]]
    ) -> Table:
        title = (
            f"C = {bound:g}: ||theta_T||^2, mean ± s.d. of {seeds_text(self.settings.seeds)} "
            "(best rate of the common grid)"
        )
        rows: list[list[str | float | None]] = [
            [
                str(d),
                *(
                    "{:.3g} ± {:.2g} ({:g})".format(
                        *over_seeds(errors[method][k]), chosen[method][k].value
                    )
                    for method in METHODS
                ),
            ]
            for k, d in enumerate(self.settings.dimensions)
        ]
        columns = ["d", *(METHODS[method][0] for method in METHODS)]
        return Table(f"errors-c{bound:g}", title, columns, rows)

    def _claims(self, bound: float, errors: Values) -> list[PaperClaim]:
        claims = []
        for method in ("literal", "stabilised"):
            label = f"C = {bound:g}, {METHODS[method][0]}"
            # Errors of seeds lie orders of magnitude apart: factors are compared, not differences.
            saved = [
                paired(np.log10(clipping).tolist(), np.log10(adaclip).tolist())
                for clipping, adaclip in zip(errors["clipping"], errors[method], strict=True)
            ]
            means = [over_seeds(seeds)[0] for seeds in errors[method]]
            claims += [
                PaperClaim(
                    f"{method}-below-c{bound:g}",
                    "Fig. 2",
                    f"{label}: error below clipping's in every dimension",
                    all_ahead(saved),
                    "; ".join(
                        f"d = {d}: {_factor(difference)}"
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
                means = np.mean(errors[method], axis=1)
                # Not standard deviations, which may be more than the mean, on a logarithmic axis.
                bars = [
                    means - np.min(errors[method], axis=1),
                    np.max(errors[method], axis=1) - means,
                ]
                panel.errorbar(
                    dimensions, means, bars, **curve_style(colour), capsize=3, label=label
                )
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xticks(dimensions, [str(d) for d in dimensions])
            panel.minorticks_off()
            panel.set_xlabel("dimension")
            panel.set_title(f"C = {bound:g}", fontsize=10)
        axes[0].set_ylabel("error $\\|\\theta_T\\|^2$; bars: range of seeds")
        lines, labels = axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        return figure


def _at(by_rate: Sequence[list[float]], rates: Sequence[float], rate: float) -> list[float]:
    return by_rate[rates.index(rate)]


def _factor(decades: Difference) -> str:
    """What part of clipping's error is left, with its interval."""
    mean, low, high = (10**-power for power in (decades.mean, decades.high, decades.low))
    return f"{mean:.2g} [{low:.2g}, {high:.2g}] of it"


def _name(method: str, bound: float, d: int) -> str:
    return f"{method} C={bound:g} d={d}"


def descend(settings: Mapping[str, Any], seeds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """SGD on ``1/2 ||theta - x||^2``, one example a step, x of variance 1 in one coordinate.

    All r rates and n seeds at once, ``[r n, d]``: what is one row through a releaser (a test holds
    the two equal) is a row of its own here, with a state of its own. A seed draws the same at
    every rate.

    Returns
    -------
    error, noise, clipped : float64 ``[r, n]``
        ``||theta_T||^2`` (`LARGEST` where it diverges), the mean of ``||g - g~||^2``, and the
        share of clipped gradients.
    """
    d, rates, z = settings["dimension"], settings["rates"], settings["noise-multiplier"]
    steps, count = settings["steps"], len(rates) * len(seeds)
    mechanism = make_mechanism(settings["method"], settings["clip-norm"])
    layout = Layout.of({"theta": torch.zeros(d, dtype=torch.float64)})
    state: State = {name: value.repeat(count, 1) for name, value in mechanism.init(layout).items()}
    randomness = [Randomness(seed) for seed in seeds]
    draws = [r.generator(Purpose.SAMPLE, level="example") for r in randomness]
    noises = [r.generator(Purpose.NOISE, level="example") for r in randomness]
    data = torch.from_numpy(np.array([_examples(g, settings["law"], steps) for g in draws]))
    starts = [r.generator(Purpose.INIT, level="run").standard_normal(d) for r in randomness]
    theta = torch.from_numpy(np.array(starts) / np.sqrt(d)).repeat(len(rates), 1)
    rate = torch.tensor(rates, dtype=torch.float64).repeat_interleave(len(seeds))[:, None]
    noise, clipped = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
    for step in range(steps):
        rows = -theta
        rows[:, 0] += data[:, step].repeat(len(rates))
        drawn = torch.from_numpy(np.array([g.standard_normal(d) for g in noises]))
        drawn = drawn.repeat(len(rates), 1)
        released, long, state = _release(mechanism, state, rows, z, drawn)
        noise += (released - rows).square().sum(1)
        clipped += long
        theta = theta + rate * released
    shape = len(rates), len(seeds)
    return (
        theta.square().sum(1).nan_to_num(LARGEST, LARGEST).clamp(max=LARGEST).view(shape),
        (noise / steps).view(shape),
        (clipped / steps).view(shape),
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
