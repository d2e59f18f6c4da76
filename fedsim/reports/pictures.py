"""The charts of pages as pictures: the same specification, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsim.reports.charts import Bars, Chart, Heat, Line, Lines
from fedsim.reports.plots import LIGHT, SERIES, curve_style, grid
from fedsim.runs.metrics import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_TICKS = 12  # most labels of bars or rows


def picture(charts: Sequence[Chart], title: str) -> Figure:
    """Draw charts beside one another, under a title.

    Parameters
    ----------
    charts : sequence of Lines, Bars or Heat
    title : str
    """
    columns = min(max(len(charts), 1), _COLUMNS)
    rows = -(-max(len(charts), 1) // columns)
    width = 7.5 if columns == 1 else 4.4 * columns + 0.6
    figure, panels = grid(rows, columns, title=title, width=width, height=3.6 * rows + 0.8)
    for panel, chart in zip(panels, charts, strict=False):
        if len(charts) > 1:
            panel.set_title(chart.title, fontsize=10, loc="left")
        elif chart.about:
            panel.set_title(chart.about, fontsize=9, loc="left")
        panel.set_xlabel(chart.x)
        panel.set_ylabel(chart.y)
        match chart:
            case Lines():
                _lines(panel, chart)
            case Bars():
                _bars(panel, chart)
            case Heat():
                _heat(panel, chart)
    for panel in panels[len(charts) :]:
        panel.set_axis_off()
    return figure


def _lines(panel: Axes, chart: Lines) -> None:
    for index, line in enumerate(chart.lines):
        _line(panel, line, SERIES[index % len(SERIES)])
    if chart.bytes:
        panel.yaxis.set_major_formatter(lambda y, _: size(y))
    if chart.from_zero or chart.counts:
        panel.set_ylim(bottom=0)
    if chart.log_x:
        panel.set_xscale("log")
    if len(chart.lines) > 1:
        panel.legend(fontsize=8, frameon=False)


def _line(panel: Axes, line: Line, colour: str) -> None:
    if line.reference:
        panel.plot(line.x, line.y, color=LIGHT.muted, linestyle="--", linewidth=1, label=line.name)
        return
    panel.plot(line.x, line.y, **curve_style(colour), label=line.name)
    if len(line.low):
        panel.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)


def _bars(panel: Axes, chart: Bars) -> None:
    places = np.arange(len(chart.values))
    heights = [0.0 if math.isnan(value) else value for value in chart.values]
    errors = [0.0 if math.isnan(error) else error for error in chart.errors] or None
    panel.bar(places, heights, color=SERIES[0], yerr=errors, ecolor=LIGHT.muted, capsize=2)
    few = places[:: -(-len(places) // _TICKS) or 1]
    labels = [chart.labels[k] for k in few]
    slanted = sum(map(len, labels)) > 50
    panel.set_xticks(few, labels, rotation=30 * slanted, ha="right" if slanted else "center")


def _heat(panel: Axes, chart: Heat) -> None:
    # The square root of a share: a tenth is visible beside rows of one class.
    values = np.sqrt(np.asarray(chart.values, dtype=np.float64))
    panel.imshow(values, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    rows = np.arange(len(chart.labels))[:: -(-len(chart.labels) // (2 * _TICKS)) or 1]
    panel.set_yticks(rows, [chart.labels[k] for k in rows], fontsize=8)
    columns = np.arange(len(chart.columns))[:: -(-len(chart.columns) // _TICKS) or 1]
    panel.set_xticks(columns, [chart.columns[k] for k in columns] if chart.ticks else [])
    panel.grid(visible=False)
