"""Pichapati et al., Fig. 2: error of private mean estimation against the dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.adaclip.mnist import FORM
from experiments.framework.base import (
    NOT_EMPTY,
    BestOfGrid,
    Experiment,
    ExperimentClaim,
    ExperimentMember,
    Outcome,
    Report,
    Result,
    Settings,
    Table,
    as_table,
    seeds_text,
)
from experiments.framework.spread import Difference, all_ahead, over_seeds, paired
from fedsim.mechanisms import AdaClip, Clipping, State
from fedsim.mechanisms.base import Released
from fedsim.randomness import Purpose, Randomness
from fedsim.reports.plots import COLOURS, curve_style, grid
from fedsim.rows import Layout

PAPER = "paper"
FLAT_FACTORS = (2.5, 10.0)  # of the largest error over the smallest that count as flat
LARGEST = 1e30

METHODS = {
    "clipping": ("Abadi", COLOURS["clipping"]),
    "literal": ("AdaCliP as printed, h2 = C²", COLOURS["literal"]),
    "stabilised": ("AdaCliP, h2 = 4 C², clamped after averaging", COLOURS["adaclip"]),
}


@dataclass(frozen=True)
class _Panel:
    """Errors at one C, by method: a list for every dimension, with a value per seed.

    ``rate`` is the common rate of all methods, or None if each method has its best rate.
    """

    bound: float
    rate: float | None
    errors: Mapping[str, list[list[float]]]
    rates: Mapping[str, list[float]]
    choices: list[BestOfGrid]

    @property
    def name(self) -> str:
        return f"C = {self.bound:g}, " + (f"rate {self.rate:g}" if self.rate else "best rates")


@dataclass(frozen=True, kw_only=True)
class RegressionSettings(Settings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    paper_clip_norm, paper_rate : float
        The paper's own values, shown first.
    rates : list of float
        Grid of rates: at every C and in every dimension, each method takes the one with the
        smallest final mean error.
    """

    dimensions: list[int]
    clip_norms: list[float]
    steps: int
    paper_clip_norm: float = 1.0
    paper_rate: float = 0.01
    rates: Annotated[list[float], NOT_EMPTY]
    noise_multiplier: float
    law: Literal["two-point", "normal"] = "two-point"


class Regression(Experiment):
    """Rows of single examples through the mechanisms alone; no epsilon is claimed."""

    settings: RegressionSettings

    def members(self) -> list[ExperimentMember]:
        """One member for every C, dimension and method, with all rates and seeds."""
        other = ("experiment", "dimensions", "clip-norms", "paper-clip-norm", "paper-rate")
        common = as_table(self.settings, *other)
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
        """Errors by dimension at every C: tables, a picture and the claims."""
        settings = self.settings
        panels = {PAPER: self._panel(results, settings.paper_clip_norm, settings.paper_rate)}
        for bound in settings.clip_norms:
            panels[f"c{bound:g}"] = self._panel(results, bound)
        return Report(
            [self._table(panel) for panel in panels.values()],
            {
                f"error {method} {name} d={d}": over_seeds(seeds)[0]
                for name, panel in panels.items()
                for method in METHODS
                for d, seeds in zip(settings.dimensions, panel.errors[method], strict=True)
            },
            [
                self._grows(panels[PAPER]),
                *(
                    claim
                    for name, panel in panels.items()
                    if panel.bound == settings.paper_clip_norm
                    for claim in self._claims(name, panel)
                ),
            ],
            {"errors": self._picture(list(panels.values()))},
            [choice for panel in panels.values() for choice in panel.choices],
        )

    def _panel(
        self, results: Mapping[str, Result], bound: float, rate: float | None = None
    ) -> _Panel:
        """Errors at one C, of every method at a given rate or at its best one."""
        errors: dict[str, list[list[float]]] = {}
        rates: dict[str, list[float]] = {}
        choices = []
        for method in METHODS:
            for d in self.settings.dimensions:
                choice = self._choice(results, method, bound, d)
                rates.setdefault(method, []).append(rate or choice.value)
                choices.append(choice)
                by_rate = results[_name(method, bound, d)]["error"]
                at = by_rate[self.settings.rates.index(rates[method][-1])]
                errors.setdefault(method, []).append(at)
        return _Panel(bound, rate, errors, rates, [] if rate else choices)

    def _choice(
        self, results: Mapping[str, Result], method: str, bound: float, d: int
    ) -> BestOfGrid:
        """Choice of the rate with the smallest mean error; scores are in decibels below 1."""
        errors = results[_name(method, bound, d)]["error"]
        scores = {
            rate: -10 * math.log10(over_seeds(seeds)[0])
            for rate, seeds in zip(self.settings.rates, errors, strict=True)
        }
        return BestOfGrid(f"rate of {method} at C = {bound:g}, d = {d}", scores)

    def _table(self, panel: _Panel) -> Table:
        title = (
            f"{panel.name}: ||theta_T||^2, mean ± s.d. of {seeds_text(self.settings.seeds)} "
            f"({'rate' if panel.rate else 'best rate of the common grid'})"
        )
        rows: list[list[str | float | None]] = [
            [
                str(d),
                *(
                    "{:.3g} ± {:.2g} ({:g})".format(
                        *over_seeds(panel.errors[method][k]), panel.rates[method][k]
                    )
                    for method in METHODS
                ),
            ]
            for k, d in enumerate(self.settings.dimensions)
        ]
        columns = ["d", *(METHODS[method][0] for method in METHODS)]
        name = f"errors-{PAPER}" if panel.rate else f"errors-c{panel.bound:g}"
        return Table(name, title, columns, rows)

    def _grows(self, panel: _Panel) -> ExperimentClaim:
        """Whether clipping's error grows from each dimension to the next."""
        logs = [np.log10(seeds).tolist() for seeds in panel.errors["clipping"]]
        steps = [paired(more, fewer) for fewer, more in pairwise(logs)]
        means = [over_seeds(seeds)[0] for seeds in panel.errors["clipping"]]
        return ExperimentClaim(
            f"clipping-grows-{PAPER}",
            "Fig. 2",
            f"{panel.name}, {METHODS['clipping'][0]}: error grows with d",
            all_ahead(steps),
            ", ".join(f"{mean:.2g}" for mean in means)
            + f" at d = {', '.join(map(str, self.settings.dimensions))}",
        )

    def _claims(self, name: str, panel: _Panel) -> list[ExperimentClaim]:
        below: dict[str, Outcome] = {}
        flat: dict[str, Outcome] = {}
        for form, method in (("as printed", "literal"), ("corrected", "stabilised")):
            # Errors of seeds are orders of magnitude apart: compare factors, not differences.
            saved = [
                paired(np.log10(clipping).tolist(), np.log10(adaclip).tolist())
                for clipping, adaclip in zip(
                    panel.errors["clipping"], panel.errors[method], strict=True
                )
            ]
            below[form] = (
                all_ahead(saved),
                "; ".join(
                    f"d = {d}: {_factor(difference)}"
                    for d, difference in zip(self.settings.dimensions, saved, strict=True)
                ),
            )
            means = [over_seeds(seeds)[0] for seeds in panel.errors[method]]
            for factor in FLAT_FACTORS:
                flat[f"{form}, to a factor of {factor:g}"] = (
                    max(means) <= factor * min(means),
                    f"{min(means):.3g} to {max(means):.3g}",
                )
        return [
            ExperimentClaim.under(
                f"below-{name}",
                "Fig. 2",
                f"{panel.name}: AdaCliP's error is below clipping's in every dimension",
                FORM,
                below,
            ),
            ExperimentClaim.under(
                f"flat-{name}",
                "Fig. 2",
                f"{panel.name}: AdaCliP's error does not depend on d",
                f"what counts as flat, and {FORM}",
                flat,
            ),
        ]

    def _picture(self, panels: Sequence[_Panel]) -> Figure:
        dimensions = self.settings.dimensions
        title = "AdaCliP, Fig. 2: what the dimension costs"
        figure, axes = grid(1, len(panels), title=title, width=3.4 * len(panels), height=4)
        for axis, panel in zip(axes, panels, strict=True):
            errors = panel.errors
            for method, (label, colour) in METHODS.items():
                means = np.mean(errors[method], axis=1)
                # Ranges: on a logarithmic axis, a standard deviation may exceed the mean.
                bars = [
                    means - np.min(errors[method], axis=1),
                    np.max(errors[method], axis=1) - means,
                ]
                axis.errorbar(
                    dimensions, means, bars, **curve_style(colour), capsize=3, label=label
                )
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xticks(dimensions, [str(d) for d in dimensions])
            axis.minorticks_off()
            axis.set_xlabel("dimension")
            axis.set_title(panel.name, fontsize=10)
        axes[0].set_ylabel("error $\\|\\theta_T\\|^2$; bars: range of seeds")
        lines, labels = axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        return figure


def _factor(decades: Difference) -> str:
    """Error as a fraction of clipping's, with its interval, as text."""
    mean, low, high = (10**-power for power in (decades.mean, decades.high, decades.low))
    return f"{mean:.2g} [{low:.2g}, {high:.2g}] of it"


def _name(method: str, bound: float, d: int) -> str:
    return f"{method} C={bound:g} d={d}"


def descend(settings: Mapping[str, Any], seeds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """SGD on ``1/2 ||theta - x||^2``, one example per step, x of variance 1 in one coordinate.

    All r rates and n seeds run at once as rows ``[r n, d]``, each with a mechanism state of its
    own; a test checks that this equals one row through a releaser. Draws of a seed are the same at
    every rate.

    Returns
    -------
    error, noise, clipped : float64 ``[r, n]``
        ``||theta_T||^2`` (`LARGEST` if it diverges), the mean of ``||g - g~||^2``, and the
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
    """Release each row by itself: the released rows, which were clipped, and the next states."""
    if isinstance(mechanism, Clipping):
        bounded, radius = mechanism.bound(rows), mechanism.clip_norm
        return (
            bounded + z * radius * drawn,
            torch.linalg.vector_norm(rows, dim=1) > radius,
            state,
        )
    round_state = mechanism.round_state(state)
    scale, centre = mechanism.whitening(round_state)
    centred = rows if centre is None else rows - centre
    whitened = centred if scale is None else centred * scale
    lengths = torch.linalg.vector_norm(whitened, dim=1)
    bounded = whitened * (1 / lengths).clamp(max=1.0)[:, None]
    mean = mechanism.restore(bounded + z * drawn, round_state)
    one = torch.ones(1, dtype=torch.float64)
    released = Released(mean, {}, z * one, one, {})
    return mean, lengths > 1, mechanism.next(state, round_state, released)


def _examples(generator: np.random.Generator, law: str, steps: int) -> np.ndarray:
    if law == "normal":
        return generator.standard_normal(steps)
    # Half of the examples are at -1 and half at 1, in random order.
    return generator.permutation(np.resize([-1.0, 1.0], steps))


def make_mechanism(method: str, clip_norm: float) -> Clipping | AdaClip:
    """The mechanism of a method, at one C."""
    match method:
        case "clipping":
            return Clipping(clip_norm)
        case "literal":
            return AdaClip(clip_norm, h2=clip_norm**2, literal=True)
        case _:
            return AdaClip(
                clip_norm, h2=4.0 * clip_norm**2, gamma=0.5, beta2=0.999, center=False, clamp="post"
            )
