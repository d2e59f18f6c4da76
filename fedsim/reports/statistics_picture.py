"""Picture of private statistics: estimates with their errors, and histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsim.reports.charts import Bars, Chart
from fedsim.reports.pictures import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsim.runs.private_statistics import Estimate, StatisticsResult

MAX_HISTOGRAMS = 12
"""Most histograms in a picture; statistics.json has all of them."""


def draw(statistics: StatisticsResult, name: str) -> Figure:
    """Draw means and shares as bars, with the noise's standard deviation, and histograms."""
    groups = {
        quantity: [e for e in statistics.estimates if e.name.endswith(f": {quantity}")]
        for quantity in ("mean", "share")
    }
    charts: list[Chart] = [_bars(group, quantity) for quantity, group in groups.items() if group]
    for histogram in statistics.histograms[:MAX_HISTOGRAMS]:
        labels = [f"{edge:.4g}" for edge in histogram.edges[:-1]]
        name_of_bin = "lower edge of the bin"
        charts.append(
            Bars(
                histogram.name,
                name_of_bin,
                "share of examples",
                labels,
                histogram.shares.tolist(),
            )
        )
    return picture(charts, f"{name}: private statistics of {statistics.clients:,} clients")


def _bars(estimates: Sequence[Estimate], quantity: str) -> Bars:
    labels = [estimate.name.rpartition(":")[0].rpartition(" ")[2] for estimate in estimates]
    x = estimates[0].name.partition(":")[0].rstrip("0123456789 ")
    values, errors = ([getattr(e, field) for e in estimates] for field in ("value", "error"))
    return Bars(f"{quantity}s", x, quantity, labels, values, errors=errors)
