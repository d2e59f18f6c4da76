"""The picture of a sweep: what its settings reach over one axis, with error bars over seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedsim.config import Scalar
from fedsim.reports.palette import SERIES
from fedsim.reports.plots import curve_style, grid
from fedsim.reports.series import spoken
from fedsim.reports.sweep import SeedsLine, Spread

__all__ = ["draw"]


def draw(settings: Sequence[SeedsLine], axis: str, title: str, *, joined: bool = True) -> Figure:
    """What is reached on test examples over one axis.

    Parameters
    ----------
    settings : sequence of SeedsLine
        Those without a number of theirs, since their members failed, are left out.
    axis : str
        Not the seed, unless it is the only one: then nothing is averaged.
    title : str
    joined : bool
        Whether settings that share the others' values are a curve; else all are points.
    """
    figure, (axes,) = grid(1, 1, title=title, width=7.0, height=4.4)
    shown = _numbers_of(settings, axis)
    values = list(dict.fromkeys(value for value, _, _ in shown))
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    places = {value: float(value) if numeric else index for index, value in enumerate(values)}
    curves: dict[str, list[tuple[float, Spread]]] = {}
    for value, others, spread in shown:
        curves.setdefault(others if joined else "", []).append((places[value], spread))
    for index, (name, curve) in enumerate(curves.items()):
        x = [place for place, _ in sorted(curve, key=lambda point: point[0])]
        ordered = [spread for _, spread in sorted(curve, key=lambda point: point[0])]
        style = curve_style(SERIES[index % len(SERIES)])
        style |= {} if joined else {"linestyle": "none", "markevery": 1}
        y, bars = [s.mean for s in ordered], [s.std or 0.0 for s in ordered]
        axes.errorbar(x, y, bars, **style, capsize=3, label=name or None)
    x = list(places.values())
    if numeric and x and min(x) > 0 and max(x) / min(x) >= 20:
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(x, [str(value) for value in values])
    axes.set_xlabel(axis)
    name = spoken(f"test-{settings[0].lines[0].measure.name}")
    axes.set_ylabel(f"{name}, mean of the last five evaluations")
    axes.set_title(_about(settings, [spread for _, _, spread in shown]), fontsize=9, loc="left")
    if any(curves):
        axes.legend(fontsize=8, frameon=False)
    return figure


def _numbers_of(settings: Sequence[SeedsLine], axis: str) -> list[tuple[Scalar, str, Spread]]:
    """Place on the axis, the other axes' values in words, and what was reached there."""
    if axis == "seed":
        spreads = [
            (line.point["seed"], _words(setting.point), Spread(line.mean_test, None, 1))
            for setting in settings
            for line in setting.lines
        ]
        return [entry for entry in spreads if np.isfinite(entry[2].mean)]
    return [
        (
            setting.point[axis],
            _words({key: value for key, value in setting.point.items() if key != axis}),
            setting.test,
        )
        for setting in settings
        if setting.test is not None
    ]


def _words(point: dict[str, Scalar]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in point.items())


def _about(settings: Sequence[SeedsLine], spreads: Sequence[Spread]) -> str:
    """What the bars are, and who is missing."""
    counts = sorted({spread.count for spread in spreads if spread.count > 1})
    about = ""
    if counts:
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        about = f"mean of {seeds} seeds; bars: one standard deviation to either side"
    missing = sum(len(setting.lines) - setting.ended for setting in settings)
    if missing:
        about += f"{'; ' * bool(about)}{missing} members that failed or were dropped are left out"
    return about
