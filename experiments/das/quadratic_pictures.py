"""Pictures of the quadratic problem: distance and SNR by round, and trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.framework.base import Result
from fedsim.reports.plots import COLOURS, INK, curve_style, grid

Panels = Sequence[tuple[str, str]]
Runs = Mapping[tuple[str, str], Sequence[Result]]
METHODS = ("clipping", "normalization")
WIDTHS = {"clipping": 2.4, "normalization": 1.2}  # both stay visible where the curves agree


def curves(panels: Panels, runs: Runs, ratio: float) -> Figure:
    """Draw the distance to w*, and below it the SNR of the clients' updates, by round."""
    figure, axes = grid(
        2,
        len(panels),
        title="Quadratic problem: normalised updates keep their signal, clipped ones lose it",
        width=max(3.3 * len(panels), 6),
        height=5.6,
    )
    for column, (name, label) in enumerate(panels):
        top, below = axes[column], axes[len(panels) + column]
        top.set_title(label, fontsize=10)
        for method in METHODS:
            _band(top, runs[name, method], "distance", method)
            _band(below, runs[name, method], "snr", method)
        top.set_ylim(bottom=0)
        below.set_ylim(0, ratio * 1.15)
        below.set_xlabel("round")
    axes[0].set_ylabel("$\\|w_k - w^*\\|$")
    axes[len(panels)].set_ylabel("SNR of an update")
    axes[0].legend(frameon=False, fontsize=9)
    axes[len(panels)].annotate(
        f"{ratio:.6f}", (0, ratio), xytext=(4, 4), textcoords="offset points", fontsize=8
    )
    return figure


def trajectories(panels: Panels, runs: Runs) -> Figure:
    """Draw the iterates, one line per seed: distance along the line from w_0 to w*, and off it."""
    figure, axes = grid(
        1,
        len(panels),
        title="Quadratic problem: trajectories from $w_0$ (square) to $w^*$ (star)",
        width=max(3.3 * len(panels), 6),
        height=3.6,
    )
    for panel, (name, label) in zip(axes, panels, strict=True):
        for method in METHODS:
            for k, run in enumerate(runs[name, method]):
                panel.plot(
                    run["along"],
                    run["off"],
                    **curve_style(COLOURS[method]),
                    linewidth=0.7 * WIDTHS[method],
                    label=None if k else method,
                )
        start = runs[name, METHODS[0]][0]["along"][0]
        panel.plot(start, 0, "s", color=INK, markersize=5)
        panel.plot(0, 0, "*", color=INK, markersize=10)
        panel.set_title(label, fontsize=10)
        panel.set_xlabel("distance still to go along $w_0 - w^*$")
        panel.invert_xaxis()
    axes[0].set_ylabel("distance off that line")
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _band(axes: Axes, runs: Sequence[Result], quantity: str, method: str) -> None:
    """Draw the mean over seeds with a band of their range."""
    values = np.array([run[quantity] for run in runs])
    rounds = runs[0]["rounds"][: values.shape[1]]
    axes.plot(
        rounds,
        values.mean(0),
        **curve_style(COLOURS[method]),
        linewidth=WIDTHS[method],
        label=method,
    )
    axes.fill_between(
        rounds, values.min(0), values.max(0), color=COLOURS[method], alpha=0.2, linewidth=0
    )
