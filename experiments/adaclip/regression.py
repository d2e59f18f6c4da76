"""Pichapati et al., Fig. 2: error of private mean estimation against the dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.adaclip.mnist import FORM
from experiments.curves import log_ticks
from experiments.framework.base import (
    NOT_EMPTY,
    BestOfGrid,
    Experiment,
    ExperimentClaim,
    Members,
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
from fedsim.settings import Ge

FLAT_FACTORS = (2.5, 10.0)  # of the largest error over the smallest that count as flat
LARGEST = 1e30
START = "the law of the start"
RATES = "Other rates"
OURS = "N(0, I/d)"
STARTS: Mapping[str, Callable[[int], float]] = {
    ".01 N(0, I)": lambda d: 100.0,
    OURS: math.sqrt,
    "N(0, I)": lambda d: 1.0,
}
"""Laws of the start: a standard normal draw in d dimensions is divided by these."""

METHODS = {
    "clipping": ("Abadi", COLOURS["clipping"]),
    "literal": ("AdaCliP as printed", COLOURS["literal"]),
    "stabilised": ("AdaCliP, h2 = 4 C², clamped after averaging", COLOURS["adaclip"]),
}
FORMS = {"literal": "as printed", "stabilised": "corrected"}


@dataclass(frozen=True)
class _Panel:
    """Errors by method: a list for every dimension, with a value per seed.

    ``notes`` has what was chosen for each, of which ``choices`` are the grids.
    """

    title: str
    errors: Mapping[str, list[list[float]]]
    notes: Mapping[str, list[str]]
    choices: list[BestOfGrid]


@dataclass(frozen=True, kw_only=True)
class RegressionSettings(Settings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    seeds : int
        Number of seeds that judge, and choose best rates; ``tuning-seeds`` others choose h2.
    paper_rate : float
        The paper's rate, at which h2 is chosen.
    h2 : list of float
        Grid of h2 for the printed form.
    rates : list of float
        Grid of rates: in every dimension, each method takes the one with the smallest final mean
        error. This is ours: the paper has one rate.
    """

    dimensions: list[int]
    clip_norm: float = 1.0
    steps: int
    paper_rate: float = 0.01
    tuning_seeds: Annotated[int, Ge(1)] = 3
    h2: Annotated[list[float], NOT_EMPTY]
    rates: Annotated[list[float], NOT_EMPTY]
    noise_multiplier: float
    law: Literal["two-point", "normal"] = "two-point"


class Regression(Experiment):
    """Rows of single examples through the mechanisms alone; no epsilon is claimed."""

    settings: RegressionSettings

    def members(self) -> Members:
        """By dimension and method: at the paper's rate from every start, and at all rates."""
        settings = self.settings
        other = ("experiment", "dimensions", "clip-norm", "paper-rate", "tuning-seeds", "h2")
        common = as_table(settings, *other)
        started = {
            **common,
            "rates": [settings.paper_rate],
            "starts": list(STARTS),
            "seeds": settings.tuning_seeds + settings.seeds,
        }
        members: Members = {}
        for d in settings.dimensions:
            for method in METHODS:
                own = {"clip-norm": settings.clip_norm, "dimension": d, "method": method}
                for h2 in self._h2(method):
                    members[_started(method, d, h2)] = {**started, **own, "h2": h2}
                members[_rated(method, d)] = {**common, **own}
        return members

    def _h2(self, method: str) -> list[float]:
        """The grid of h2; 0 for a method's own."""
        return self.settings.h2 if method == "literal" else [0.0]

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Final errors ``||theta_T - theta*||^2``, mean noises and shares of clipped gradients.

        By start or rate, then by seed.
        """
        error, noise, clipped = descend(settings, range(1, settings["seeds"] + 1))
        result = {"error": error.tolist(), "noise": noise.tolist()}
        return {**result, "clipped": clipped.tolist()} if "starts" in settings else result

    def report(self, results: Mapping[str, Result]) -> Report:
        """Errors by dimension at the paper's rate from every start, and at best rates."""
        settings = self.settings
        panels = {start: self._from(results, start) for start in STARTS}
        best = self._at_best_rates(results)
        figures = {
            f"error {method} {start} d={d}": over_seeds(seeds)[0]
            for start, panel in {**panels, "best": best}.items()
            for method in METHODS
            for d, seeds in zip(settings.dimensions, panel.errors[method], strict=True)
        }
        return Report(
            [self._table(f"errors-{k}", panel) for k, panel in enumerate([*panels.values(), best])],
            figures,
            [self._grows(panels), *self._claims(panels), *self._ours(best)],
            {"errors": self._picture([*panels.values(), best])},
            [choice for panel in (*panels.values(), best) for choice in panel.choices],
        )

    def _from(self, results: Mapping[str, Result], start: str) -> _Panel:
        """Errors from one start at the paper's rate; h2 is chosen with seeds of its own."""
        settings, k = self.settings, list(STARTS).index(start)
        errors: dict[str, list[list[float]]] = {method: [] for method in METHODS}
        notes: dict[str, list[str]] = {method: [] for method in METHODS}
        choices = []
        for d in settings.dimensions:
            for method in METHODS:
                by_h2 = {h2: results[_started(method, d, h2)] for h2 in self._h2(method)}
                scores = {
                    h2: _decibels(result["error"][k][: settings.tuning_seeds])
                    for h2, result in by_h2.items()
                }
                choice = BestOfGrid(f"h2 from {start}, d = {d}", scores)
                chosen = by_h2[choice.value]
                errors[method].append(chosen["error"][k][settings.tuning_seeds :])
                clipped = 100 * over_seeds(chosen["clipped"][k])[0]
                h2 = f"h2 = {choice.value:g}, " if choice.value else ""
                notes[method].append(f"{h2}{clipped:.0f} % clipped")
                if choice.value:
                    choices.append(choice)
        return _Panel(f"start {start}", errors, notes, choices)

    def _at_best_rates(self, results: Mapping[str, Result]) -> _Panel:
        """Errors of every method at its best rate, by the seeds that judge."""
        settings = self.settings
        errors: dict[str, list[list[float]]] = {method: [] for method in METHODS}
        notes: dict[str, list[str]] = {method: [] for method in METHODS}
        choices = []
        for d in settings.dimensions:
            for method in METHODS:
                by_rate = dict(
                    zip(settings.rates, results[_rated(method, d)]["error"], strict=True)
                )
                scores = {rate: _decibels(seeds) for rate, seeds in by_rate.items()}
                choice = BestOfGrid(f"rate of {method} at d = {d}", scores)
                errors[method].append(by_rate[choice.value])
                notes[method].append(f"rate {choice.value:g}")
                choices.append(choice)
        return _Panel(f"best rates, start {OURS}", errors, notes, choices)

    def _table(self, name: str, panel: _Panel) -> Table:
        title = f"{panel.title}: ||theta_T||^2, mean ± s.d. of {seeds_text(self.settings.seeds)}"
        rows: list[list[str | float | None]] = [
            [
                str(d),
                *(
                    f"{_mean(panel.errors[method][k])} ({panel.notes[method][k]})"
                    for method in METHODS
                ),
            ]
            for k, d in enumerate(self.settings.dimensions)
        ]
        return Table(name, title, ["d", *(label for label, _ in METHODS.values())], rows)

    def _grows(self, panels: Mapping[str, _Panel]) -> ExperimentClaim:
        """Whether clipping's error grows from each dimension to the next."""
        readings: dict[str, Outcome] = {}
        for start, panel in panels.items():
            logs = [np.log10(seeds).tolist() for seeds in panel.errors["clipping"]]
            steps = [paired(more, fewer) for fewer, more in pairwise(logs)]
            means = [over_seeds(seeds)[0] for seeds in panel.errors["clipping"]]
            readings[f"from {start}"] = all_ahead(steps), ", ".join(f"{m:.2g}" for m in means)
        return ExperimentClaim.under(
            "clipping-grows", "Fig. 2", "clipping's error grows with d", START, readings
        )

    def _claims(self, panels: Mapping[str, _Panel]) -> list[ExperimentClaim]:
        """The paper's claims, for both forms of the algorithm from every start."""
        below = {
            f"{form} from {start}": self._below(panel, method)
            for method, form in FORMS.items()
            for start, panel in panels.items()
        }
        flat = {
            f"{form} from {start}, to a factor of {factor:g}": _flat(panel, method, factor)
            for method, form in FORMS.items()
            for start, panel in panels.items()
            for factor in FLAT_FACTORS
        }
        return [
            ExperimentClaim.under(
                "below",
                "Fig. 2",
                "AdaCliP's error is below clipping's in every dimension",
                f"{START} and {FORM}",
                below,
            ),
            ExperimentClaim.under(
                "flat",
                "Fig. 2",
                "AdaCliP's error does not depend on d",
                f"what counts as flat, {START} and {FORM}",
                flat,
            ),
        ]

    def _ours(self, best: _Panel) -> list[ExperimentClaim]:
        """The same at best rates."""
        says = "at best rates, AdaCliP's error is below clipping's in every dimension"
        return [
            ExperimentClaim(
                f"{method}-best-rates", RATES, f"{form}: {says}", *self._below(best, method)
            )
            for method, form in FORMS.items()
        ]

    def _below(self, panel: _Panel, method: str) -> Outcome:
        """Whether a method's error is below clipping's in every dimension, and the factors."""
        # Errors of seeds are orders of magnitude apart: compare factors, not differences.
        saved = [
            paired(np.log10(clipping).tolist(), np.log10(adaclip).tolist())
            for clipping, adaclip in zip(
                panel.errors["clipping"], panel.errors[method], strict=True
            )
        ]
        factors = [
            f"d = {d}: {_factor(difference)}"
            for d, difference in zip(self.settings.dimensions, saved, strict=True)
        ]
        return all_ahead(saved), "; ".join(factors)

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
            axis.set_yscale("log")
            log_ticks(axis, dimensions)
            axis.set_xlabel("dimension")
            axis.set_title(panel.title, fontsize=9)
        axes[0].set_ylabel("error $\\|\\theta_T\\|^2$; bars: range of seeds")
        lines, labels = axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        return figure


def _flat(panel: _Panel, method: str, factor: float) -> Outcome:
    """Whether the largest mean error is at most a factor above the smallest."""
    means = [over_seeds(seeds)[0] for seeds in panel.errors[method]]
    return max(means) <= factor * min(means), f"{min(means):.2g} to {max(means):.2g}"


def _mean(errors: Sequence[float]) -> str:
    mean, deviation = over_seeds(errors)
    return f"{mean:.2g} ± {deviation:.2g}"


def _decibels(errors: Sequence[float]) -> float:
    """Mean error in decibels below 1."""
    return -10 * math.log10(over_seeds(errors)[0])


def _factor(decades: Difference) -> str:
    """Error as a fraction of clipping's, with its interval, as text."""
    mean, low, high = (10**-power for power in (decades.mean, decades.high, decades.low))
    return f"{mean:.2g} [{low:.2g}, {high:.2g}] of it"


def _rated(method: str, d: int) -> str:
    return f"{method} C=1 d={d}"


def _started(method: str, d: int, h2: float) -> str:
    return f"{method}{f' h2={h2:g}' if h2 else ''} d={d}"


def descend(settings: Mapping[str, Any], seeds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """SGD on ``1/2 ||theta - x||^2``, one example per step, x of variance 1 in one coordinate.

    All r pairs of a start and a rate, and n seeds, run at once as rows ``[r n, d]``, each with a
    mechanism state of its own; a test checks that this equals one row through a releaser. Draws of
    a seed are the same for every pair.

    Returns
    -------
    error, noise, clipped : float64 ``[r, n]``
        ``||theta_T||^2`` (`LARGEST` if it diverges), the mean of ``||g - g~||^2``, and the
        share of clipped gradients.
    """
    d, rates, z = settings["dimension"], settings["rates"], settings["noise-multiplier"]
    divisors = [STARTS[name](d) for name in settings.get("starts", [OURS])]
    runs = len(divisors) * len(rates)
    steps, count = settings["steps"], runs * len(seeds)
    mechanism = make_mechanism(settings["method"], settings["clip-norm"], settings.get("h2"))
    layout = Layout.of({"theta": torch.zeros(d, dtype=torch.float64)})
    state: State = {name: value.repeat(count, 1) for name, value in mechanism.init(layout).items()}
    randomness = [Randomness(seed) for seed in seeds]
    draws = [r.generator(Purpose.SAMPLE, level="example") for r in randomness]
    noises = [r.generator(Purpose.NOISE, level="example") for r in randomness]
    data = torch.from_numpy(np.array([_examples(g, settings["law"], steps) for g in draws]))
    drawn_starts = np.array(
        [r.generator(Purpose.INIT, level="run").standard_normal(d) for r in randomness]
    )
    theta = torch.cat(
        [torch.from_numpy(drawn_starts / divisor).repeat(len(rates), 1) for divisor in divisors]
    )
    rate = torch.tensor(rates, dtype=torch.float64).repeat_interleave(len(seeds))
    rate = rate.repeat(len(divisors))[:, None]
    noise, clipped = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
    for step in range(steps):
        rows = -theta
        rows[:, 0] += data[:, step].repeat(runs)
        drawn = torch.from_numpy(np.array([g.standard_normal(d) for g in noises]))
        drawn = drawn.repeat(runs, 1)
        released, long, state = _release(mechanism, state, rows, z, drawn)
        noise += (released - rows).square().sum(1)
        clipped += long
        theta = theta + rate * released
    shape = runs, len(seeds)
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


def make_mechanism(method: str, clip_norm: float, h2: float | None = None) -> Clipping | AdaClip:
    """The mechanism of a method, at one C; ``h2`` is of the printed form, C^2 by default."""
    match method:
        case "clipping":
            return Clipping(clip_norm)
        case "literal":
            return AdaClip(clip_norm, h2=h2 or clip_norm**2, literal=True)
        case _:
            return AdaClip(
                clip_norm, h2=4.0 * clip_norm**2, gamma=0.5, beta2=0.999, center=False, clamp="post"
            )
