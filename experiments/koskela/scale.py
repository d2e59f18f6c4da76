"""ADADP's gap to rate-tuned SGD by number of rounds, images per client and network width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.framework.base import BestOfGrid, ExperimentClaim, Report, Result, Table
from experiments.framework.config_runs import ConfigRunsSettings
from experiments.framework.spread import Difference, over_seeds, paired
from experiments.koskela.common import (
    KEEPS,
    KNOWN_KEEPS,
    Koskela,
    adadp,
    constant_rate,
    left_open,
    units,
)
from experiments.koskela.federated_scores import UNITS
from fedsim.config import Scalar
from fedsim.models.networks import parse_widths
from fedsim.reports.plots import COLOURS, curve_style, grid

WINDOW = 5  # rounds that an accuracy is the mean of
PANEL = "Figs. 1a and 2a by scale"
OPEN = "the unit of eta_0"
ADADP = {"mean": "adadp", "sum": "adadp sum"}  # by the unit of eta_0; see `_method`
_BASE = "rounds"  # the run's own scale, for the most rounds


@dataclass(frozen=True, kw_only=True)
class KoskelaScaleSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    rates : list of float
        Grid of rates for SGD.
    keeps : list of str
        Which iterates ADADP keeps (of `KEEPS`); a verdict must be the same with each.
    horizons : list of int
        Rounds at which the two are compared; runs have the largest number.
    images, widths : list of int
        Examples per client, and hidden units, compared at the first horizon; for the run's own
        values, the beginning of the longest run is used. The largest number of images is compared
        at every horizon.
    """

    rates: list[float]
    keeps: Annotated[list[str], KNOWN_KEEPS] = field(default_factory=lambda: ["half"])
    horizons: list[int]
    images: list[int]
    widths: list[int]


class KoskelaScale(Koskela):
    """Varies one scale at a time from the small experiment's setting."""

    settings: KoskelaScaleSettings

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """ADADP (eta kept by clients) and every rate of SGD, at every scale."""
        return {
            f"{scale} {method}": {**keys, **changes}
            for scale, changes in self._scales().items()
            for method, keys in self._methods().items()
        }

    def _scales(self) -> dict[str, dict[str, Scalar]]:
        s = self.settings
        scales: dict[str, dict[str, Scalar]] = {_BASE: {"rounds": max(s.horizons)}}
        for n, name in self._by_images.items():
            rounds = max(s.horizons) if n == max(s.images) else min(s.horizons)
            if name != _BASE:
                scales[name] = {"rounds": rounds, "partition.max-examples": n}
        for n, name in self._by_width.items():
            if name != _BASE:
                scales[name] = {"rounds": min(s.horizons), "model.widths": str(n)}
        return scales

    @property
    def _by_images(self) -> dict[int, str]:
        """Names of the runs, by the number of examples per client."""
        base_images = self.base.partition.max_examples
        return {n: _BASE if n == base_images else f"images={n}" for n in self.settings.images}

    @property
    def _by_width(self) -> dict[int, str]:
        """Names of the runs, by the number of hidden units."""
        base_widths = parse_widths(self.base.model.widths)
        return {n: _BASE if (n,) == base_widths else f"width={n}" for n in self.settings.widths}

    def _methods(self) -> dict[str, dict[str, Scalar]]:
        client = self.base.client
        limit = float(client.eta_max)
        methods = {
            _method(unit, keep): {"client.state": "client", **adadp(start, keep, limit)}
            for keep in self.settings.keeps
            for unit, start in units(float(client.lr), client.batch_size).items()
        }
        return methods | {
            f"sgd rate={rate:g}": constant_rate("sgd", rate) for rate in self.settings.rates
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """Gaps by rounds, images and width."""
        s, most = self.settings, max(self.settings.images)
        points = {f"{h} rounds": (_BASE, h) for h in s.horizons}
        points |= {_of_most(h, most): (self._by_images[most], h) for h in s.horizons}
        points |= {f"{n} images": (name, min(s.horizons)) for n, name in self._by_images.items()}
        points |= {
            f"{n} hidden units": (name, min(s.horizons)) for n, name in self._by_width.items()
        }
        readings = {
            f"{KEEPS[keep]}, {UNITS[unit]}": _method(unit, keep)
            for keep in s.keeps
            for unit in ADADP
        }
        drawn, *_ = readings  # of the run's own eta_0
        gaps: dict[str, dict[str, Difference]] = {reading: {} for reading in readings}
        choices: list[BestOfGrid] = []
        rows: list[list[str | float | None]] = []
        figures: dict[str, float] = {}
        for name, (scale, horizon) in points.items():
            sgd = {
                rate: self._finals(results, f"{scale} sgd rate={rate:g}", horizon)
                for rate in s.rates
            }
            choice = BestOfGrid(
                f"rate of sgd at {name}", {rate: over_seeds(of)[0] for rate, of in sgd.items()}
            )
            cells: list[str | float | None] = []
            for reading, method in readings.items():
                adaptive = self._finals(results, f"{scale} {method}", horizon)
                gap = paired(adaptive, sgd[choice.value])
                gaps[reading][name] = gap
                cells += [over_seeds(adaptive)[0], gap.text]
            choices.append(choice)
            figures[f"gap {name}"] = gaps[drawn][name].mean
            rows.append([name, over_seeds(sgd[choice.value])[0], f"{choice.value:g}", *cells])
        columns = ["scale", "SGD, tuned (%)", "its rate"]
        for reading in readings:
            columns += [f"ADADP (%), {reading}", "gap (points)"]
        return Report(
            tables=[Table("gaps", f"ADADP against tuned SGD\n{self._where}", columns, rows)],
            figures=figures,
            claims=[claim for more in (False, True) for claim in self._claims(gaps, more=more)],
            pictures={"gaps": self._picture(gaps[drawn])},
            choices=choices,
        )

    def _claims(
        self, gaps: Mapping[str, Mapping[str, Difference]], *, more: bool
    ) -> list[ExperimentClaim]:
        """Claims on the gap over the rounds, with the run's own number of images or with ``more``.

        ``gaps`` are by reading and scale; all readings must agree on a verdict.
        """
        s = self.settings
        images = max(s.images) if more else self.base.partition.max_examples
        ends = {
            reading: [
                of_reading[_of_most(horizon, images) if more else f"{horizon} rounds"]
                for horizon in (min(s.horizons), max(s.horizons))
            ]
            for reading, of_reading in gaps.items()
        }
        ending = "-images" if more else ""
        return [
            ExperimentClaim.under(
                f"ahead{ending}",
                PANEL,
                f"after {max(s.horizons)} rounds of {images:,} images a client ADADP is ahead of "
                "rate-tuned SGD",
                left_open(OPEN, s.keeps),
                {reading: (last.positive, last.text) for reading, (_, last) in ends.items()},
            ),
            ExperimentClaim.under(
                f"closer{ending}",
                PANEL,
                f"with {images:,} images a client ADADP's gap to SGD is better after "
                f"{max(s.horizons)} rounds than after {min(s.horizons)}",
                left_open(OPEN, s.keeps),
                {
                    reading: (_grown(first, last), f"{first.text}, then {last.text}")
                    for reading, (first, last) in ends.items()
                },
            ),
        ]

    @property
    def _where(self) -> str:
        return self.where("examples a client", "rounds")

    def _finals(self, results: Mapping[str, Result], plan: str, horizon: int) -> list[float]:
        """Accuracy (%) of each seed, averaged over the `WINDOW` rounds up to a horizon."""
        finals = []
        for result in self.of_plan(results, plan):
            rounds, accuracy = np.array(result["rounds"]), np.array(result["accuracy"])
            near = (rounds > horizon - WINDOW) & (rounds <= horizon)
            finals.append(100 * float(accuracy[near].mean()))
        return finals

    def _picture(self, gaps: Mapping[str, Difference]) -> Figure:
        s, most = self.settings, max(self.settings.images)
        title = (
            f"ADADP's accuracy less that of tuned SGD, one scale varied at a time\n{self._where}"
        )
        figure, panels = grid(1, 3, title=title, width=11, height=4)
        by_rounds = [gaps[f"{h} rounds"] for h in s.horizons]
        label = f"{self.base.partition.max_examples:,} images a client"
        _draw(panels[0], s.horizons, by_rounds, "normalization", label)
        by_rounds = [gaps[_of_most(h, most)] for h in s.horizons]
        _draw(panels[0], s.horizons, by_rounds, "third", f"{most:,} images a client")
        panels[0].legend(frameon=False, fontsize=8, loc="lower right")
        _draw(panels[1], s.images, [gaps[f"{n} images"] for n in s.images], "normalization")
        _draw(panels[2], s.widths, [gaps[f"{n} hidden units"] for n in s.widths], "normalization")
        for panel, words in zip(panels, ("rounds", "images a client", "hidden units"), strict=True):
            panel.axhline(0, color=COLOURS["clipping"], linewidth=1, linestyle="--")
            panel.set_xlabel(words)
            panel.sharey(panels[0])
        panels[0].set_ylabel("points; bars: intervals at 95 %")
        return figure


def _draw(
    panel: Axes, values: Sequence[int], gaps: Sequence[Difference], colour: str, label: str = ""
) -> None:
    """Draw gaps with their intervals against a scale."""
    panel.errorbar(
        values,
        [gap.mean for gap in gaps],
        np.array([[gap.mean - gap.low, gap.high - gap.mean] for gap in gaps]).T,
        **{**curve_style(COLOURS[colour]), "markevery": 1},
        capsize=3,
        label=label or None,
    )
    panel.set_xscale("log")
    panel.set_xticks(values, [f"{value:,}" for value in values])
    panel.minorticks_off()


def _method(unit: str, keep: str) -> str:
    return ADADP[unit] if keep == "half" else f"{ADADP[unit]} full"


def _of_most(horizon: int, images: int) -> str:
    """Name of a point in the comparison with the most images."""
    return f"{horizon} rounds of {images} images"


def _grown(before: Difference, after: Difference) -> bool | None:
    """Whether a difference has grown; None if the intervals overlap."""
    return True if after.low > before.high else False if after.high < before.low else None
