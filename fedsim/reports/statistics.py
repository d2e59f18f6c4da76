"""Picture of private statistics: estimates with their errors, and histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsim.reports.plots import LIGHT, SERIES, grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedsim.runs.statistics import Estimate, Histogram, StatisticsResult

MOST_HISTOGRAMS = 12
"""Most histograms in a picture; statistics.json has all of them."""


def draw(statistics: StatisticsResult, name: str) -> Figure:
    """Draw means and shares as bars, with the noise's standard deviation, and histograms."""
    quantities = ("mean", "share")
    groups = [
        [e for e in statistics.estimates if e.name.endswith(f": {quantity}")]
        for quantity in quantities
    ]
    bars = [(quantity, group) for quantity, group in zip(quantities, groups, strict=True) if group]
    histograms = statistics.histograms[:MOST_HISTOGRAMS]
    panels = len(bars) + len(histograms)
    columns = min(panels, 3)
    rows = -(-panels // max(columns, 1))
    title = f"{name}: private statistics of {statistics.clients:,} clients"
    figure, axes = grid(rows, columns, title=title, width=4.2 * columns + 1, height=3.2 * rows + 1)
    for panel, (quantity, group) in zip(axes, bars, strict=False):
        _bars(panel, group, quantity)
    for panel, histogram in zip(axes[len(bars) :], histograms, strict=False):
        _histogram(panel, histogram)
    for panel in axes[panels:]:
        panel.set_axis_off()
    return figure


def _bars(panel: Axes, estimates: Sequence[Estimate], quantity: str) -> None:
    values = [0.0 if math.isnan(e.value) else e.value for e in estimates]
    errors = [0.0 if math.isnan(e.error) else e.error for e in estimates]
    places = np.arange(len(values))
    panel.bar(places, values, color=SERIES[0], yerr=errors, ecolor=LIGHT.muted, capsize=2)
    panel.set_title(f"{quantity}s", fontsize=10)
    few = places[:: max(1, len(places) // 10)]
    labels = [estimates[k].name.rpartition(":")[0].rpartition(" ")[2] for k in few]
    panel.set_xticks(few, labels)
    panel.set_xlabel(estimates[0].name.partition(":")[0].rstrip("0123456789 "))


def _histogram(panel: Axes, histogram: Histogram) -> None:
    panel.stairs(histogram.shares, histogram.edges, fill=True, color=SERIES[0])
    panel.set_title(histogram.name, fontsize=10)
    panel.set_ylabel("share of examples")
