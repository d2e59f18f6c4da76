"""Pictures of runs: test accuracy over rounds, and against a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.framework.config_runs import Score
from experiments.framework.spread import over_seeds
from fedsim.reports.plots import COLOURS, curve_style, grid

_STYLES = {
    "adadp": COLOURS["normalization"],
    "sgd": COLOURS["clipping"],
    "kept": COLOURS["third"],
    "fixed": COLOURS["norm-bound"],
    "second": COLOURS["norm-bound"],
    "fifth": COLOURS["literal"],
    "other": COLOURS["other"],
}


@dataclass(frozen=True)
class Curve:
    """One curve.

    Attributes
    ----------
    label : str
        Label in the legend; empty for none.
    score : Score
    style : str
        Name of a style; "other" is a line in the background.
    """

    label: str
    score: Score
    style: str


def curves(
    title: str,
    panels: Sequence[tuple[str, Sequence[Curve]]],
    *,
    xlabel: str,
    width: float = 0.0,
    first: int = 0,
) -> Figure:
    """Draw test accuracy by round, from the ``first`` on, in panels with a common scale.

    Bands are one standard deviation over seeds to both sides; lines in the background have none.
    """
    figure, axes = grid(
        1, len(panels), title=title, width=width or max(3.4 * len(panels), 7.5), height=4.2
    )
    differ = len({tuple(line.label for line in lines) for _, lines in panels}) > 1
    for panel, (name, lines) in zip(axes, panels, strict=True):
        for line in lines:
            shown = line.score.rounds >= first
            rounds, curve = line.score.rounds[shown], line.score.curve[shown]
            style, spread = _style(line.style), line.score.deviation[shown]
            if line.style != "other":
                panel.fill_between(
                    rounds,
                    curve - spread,
                    curve + spread,
                    color=style["color"],
                    alpha=0.18,
                    linewidth=0,
                )
            panel.plot(
                rounds,
                curve,
                **style,
                zorder=3 if line.style == "adadp" else 2,
                linewidth=1.0 if line.style == "other" else 1.6,
                label=line.label or None,
            )
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(xlabel)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.sharey(axes[0])
        if differ or panel is axes[0]:
            # With many lines, a legend inside the panel would cover one of them.
            if len(lines) > 5:
                panel.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
            else:
                panel.legend(frameon=False, fontsize=8, loc="lower right")
    axes[0].set_ylabel("test accuracy (%); bands: s.d. over seeds")
    return figure


def sweeps(
    title: str,
    lines: Sequence[tuple[str, Mapping[float, Score], str]],
    *,
    xlabel: str,
    log: bool = False,
) -> Figure:
    """Draw final accuracy against a setting, with the standard deviation over seeds."""
    figure, axes = grid(1, 1, title=title, width=7.5, height=4.4)
    panel = axes[0]
    for label, points, style in lines:
        finals = [score.finals for score in points.values()]
        error_bars(panel, [*points], finals, _STYLES[style], label)
    ticks = sorted({x for _, points, _ in lines for x in points})
    if log:
        panel.set_xscale("log")
    panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
    panel.minorticks_off()
    panel.set_xlabel(xlabel)
    panel.set_ylabel("final test accuracy (%); bars: s.d. over seeds")
    panel.legend(frameon=False, fontsize=9)
    return figure


def error_bars(
    panel: Axes,
    xs: Sequence[float],
    values: Sequence[Sequence[float]],
    colour: str,
    label: str,
    **style: Any,
) -> None:
    """Draw means with standard deviations over seeds, which ``values`` has for every x."""
    means, spreads = np.transpose([over_seeds(seeds) for seeds in values])
    style = {**curve_style(colour), **style}
    panel.errorbar(xs, means, spreads, **style, capsize=3, label=label)


def log_ticks(panel: Axes, xs: Sequence[float]) -> None:
    """Make an axis logarithmic, with a tick at every x and at no other place."""
    panel.set_xscale("log")
    panel.set_xticks(xs, [f"{x:g}" for x in xs])
    panel.minorticks_off()


def _style(style: str) -> dict[str, Any]:
    return {"color": _STYLES[style]} if style == "other" else curve_style(_STYLES[style])
