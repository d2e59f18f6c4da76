"""A partition's class counts per client: a table for the terminal and a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedsim.partitions.base import (
    Counts,
    Floats,
    by_largest_class,
    class_counts,
    class_shares,
)
from fedsim.reports.plots import HATCHES, INK, SERIES, dress, titled

_BARS_UP_TO = 60  # most clients for a bar chart
_COLOURS_UP_TO = 20  # most classes for a bar chart: each has a colour of its own
_ROWS = 12  # most clients in the table before it is abbreviated
_WIDTH = 80  # columns of a terminal; if a column per class needs more, classes are listed
_PIXELS = 1000  # most columns of a heat map; with more clients, neighbours are averaged
_TICKS = (0.01, 0.1, 0.25, 0.5, 1.0)


def summary(counts: Counts) -> dict[str, str]:
    """Short texts with facts about ``counts [n, K]``, by name."""
    sizes = counts.sum(1)
    has = sizes > 0
    facts = {"clients": f"{len(counts):,}" + (f", {(~has).sum():,} empty" * bool((~has).any()))}
    facts["examples"] = f"{sizes.sum():,}"
    facts["examples a client"] = _spread(sizes)
    facts["classes a client"] = _spread((counts > 0).sum(1))
    if has.any():
        shares = class_shares(counts[has])
        facts["largest class's share"] = f"{np.median(shares.max(1)):.0%} (median)"
        facts["distance from the overall mix"] = (
            f"{_distance(counts):.2f} (total variation, mean), "
            f"{_distance(_shuffled(counts)):.2f} at random"
        )
    return facts


def _distance(counts: Counts) -> float:
    """Mean total variation distance between a client's class distribution and the overall one.

    The mean is over clients that have examples.
    """
    overall = counts.sum(0) / counts.sum()
    shares = class_shares(counts[counts.sum(1) > 0])
    return float(np.abs(shares - overall).sum(1).mean() / 2)


def _shuffled(counts: Counts) -> Counts:
    """Class counts of clients with the same sizes, if examples were assigned at random."""
    num_classes = counts.shape[1]
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), counts.sum(0)))
    return class_counts(
        labels, np.split(np.arange(len(labels)), counts.sum(1).cumsum()[:-1]), num_classes
    )


def tabulate(counts: Counts, title: str) -> RenderableType:
    """Tables of the summary and of each client's classes, for a terminal.

    Parameters
    ----------
    counts : int64 ``[n, K]``
        Class counts per client, from `class_counts`.
    title : str
    """
    facts = Table.grid(padding=(0, 2))
    for name, fact in summary(counts).items():
        facts.add_row(Text(name, style="dim"), fact)
    return Group(Text(title, style="bold"), Text(), facts, Text(), _by_client(counts))


def _by_client(counts: Counts) -> Table:
    """Table of the counts of each client, or of the first and last ones if there are many."""
    n, num_classes = counts.shape
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    widths = [
        max(len(str(label)), len(str(counts[:, label].max()))) for label in range(num_classes)
    ]
    wide = len("client") + len("examples") + 2 * (len(widths) + 2) + sum(widths) > _WIDTH
    for heading in ("client", "examples", *(() if wide else map(str, range(num_classes)))):
        table.add_column(heading, justify="right", no_wrap=True)
    if wide:
        table.add_column("largest classes (examples)")
    shown = range(n) if n <= _ROWS else [*range(_ROWS - 4), -1, *range(n - 3, n)]
    for client in shown:
        if client < 0:
            table.add_row("…", "…", *(["…"] * (1 if wide else num_classes)), style="dim")
            continue
        row = counts[client]
        cells = [_largest(row)] if wide else [str(count) if count else "·" for count in row]
        table.add_row(f"{client}", f"{row.sum():,}", *cells)
    return table


def _largest(row: Counts) -> str:
    order = np.argsort(-row, kind="stable")[: int((row > 0).sum())]
    text = ", ".join(f"{label} ({row[label]})" for label in order[:4])
    return f"{text}, and {len(order) - 4} more" if len(order) > 4 else text


def draw(counts: Counts, title: str) -> Figure:
    """Draw the classes of each client.

    Stacked bars for few clients and classes; otherwise a heat map of each client's class
    distribution, with the clients' sizes above it and, for many clients, histograms below.

    Parameters
    ----------
    counts : int64 ``[n, K]``
        Class counts per client, from `class_counts`.
    title : str
    """
    n, num_classes = counts.shape
    if n <= _BARS_UP_TO and num_classes <= _COLOURS_UP_TO:
        return _bars(counts, title)
    return _heat_map(counts, title)


def _bars(counts: Counts, title: str) -> Figure:
    n, num_classes = counts.shape
    figure = titled(min(max(4.5 + 0.45 * n, 8), 13), 5, title)
    axes = figure.add_subplot()
    clients = np.arange(n)
    below = np.zeros(n)
    looks: list[dict[str, Any]] = [
        {"color": SERIES[k % len(SERIES)], "hatch": HATCHES[k // len(SERIES)]}
        for k in range(num_classes)
    ]
    for label, look in enumerate(looks):
        column = counts[:, label]
        axes.bar(clients, column, 0.85, below, **look, edgecolor="white", linewidth=0.4)
        if n <= _ROWS:
            _write_class(axes, label, column, below, counts.sum(1).max())
        below += column
    for label, look in enumerate(looks):
        axes.bar(0, 0, **look, edgecolor="white", label=str(label))
    axes.set_xlim(-0.6, n - 0.4)
    axes.set_ylim(0, max(below.max(), 1) * 1.03)
    _number_clients(axes, n)
    axes.set_ylabel("training examples")
    axes.yaxis.set_major_formatter(_thousands)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        names[::-1],
        title="class",
        loc="outside right center",
        frameon=False,
        ncols=1 if num_classes <= 12 else 2,
    )
    dress([axes], lines=False)
    return figure


def _write_class(axes: Axes, label: int, column: Counts, below: Floats, highest: int) -> None:
    """Write a class's number into its bar segments that are high enough."""
    for client, count in enumerate(column):
        if count > 0.04 * highest:
            middle = below[client] + count / 2
            axes.text(client, middle, str(label), ha="center", va="center", color="white", size=9)


def _heat_map(counts: Counts, title: str) -> Figure:
    n, num_classes = counts.shape
    many = n > _BARS_UP_TO
    order = by_largest_class(counts) if many else np.arange(n)
    sizes = counts.sum(1)
    figure = titled(11, 7.5 if many else 6, title)
    grid = figure.add_gridspec(
        3 if many else 2, 2, height_ratios=[1, 4, 1.6] if many else [1, 4], hspace=0.05
    )
    top = figure.add_subplot(grid[0, :])
    middle = figure.add_subplot(grid[1, :], sharex=top)
    top.fill_between(
        np.arange(n + 1) - 0.5,
        np.append(sizes[order], 0),
        step="post",
        color=SERIES[0],
        linewidth=0,
    )
    top.set_ylim(0, max(sizes.max(), 1) * 1.08)
    top.set_ylabel("examples")
    top.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    top.yaxis.set_major_formatter(_thousands)
    top.tick_params(labelbottom=False)
    shares = class_shares(counts[order])
    highest = next(tick for tick in _TICKS if tick >= min(shares.max(), 1))
    image = middle.imshow(
        _averaged(shares, _PIXELS).T,
        extent=(-0.5, n - 0.5, -0.5, num_classes - 0.5),
        aspect="auto",
        cmap="Blues",
        # Square-root scale, so that a share of a tenth is visible next to clients of one class.
        norm=PowerNorm(0.5, vmin=0, vmax=highest),
        origin="lower",
        interpolation="nearest",
    )
    middle.set_ylabel("class")
    middle.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(num_classes, 20)))
    middle.spines[:].set_visible(False)
    if many:
        averaged = " (neighbours averaged)" if n > _PIXELS else ""
        middle.set_xlabel(f"clients, in order of their largest class{averaged}")
        middle.tick_params(labelbottom=False, bottom=False)
        top.tick_params(bottom=False)
        _histogram(figure.add_subplot(grid[2, 0]), sizes, "examples a client")
        _histogram(figure.add_subplot(grid[2, 1]), (counts > 0).sum(1), "classes a client")
    else:
        _number_clients(middle, n)
    ticks = [0, *(tick for tick in _TICKS if tick <= highest)]
    bar = figure.colorbar(image, ax=middle, pad=0.01, aspect=25, ticks=ticks)
    bar.ax.set_yticklabels([f"{tick:.0%}" for tick in ticks])
    bar.set_label("share of the client's examples", color=INK)
    bar.outline.set_visible(False)
    dress([top], lines=False)
    return figure


def _averaged(shares: Floats, at_most: int) -> Floats:
    """Means over neighbouring clients, at most ``at_most`` rows."""
    width = -(-len(shares) // at_most)
    starts = np.arange(0, len(shares), width)
    sizes = np.diff(np.append(starts, len(shares)))
    return np.add.reduceat(shares, starts, axis=0) / sizes[:, None]


def _histogram(axes: Axes, values: Counts, name: str) -> None:
    low, high = int(values.min()), int(values.max())
    step = max(1, -(-(high - low + 1) // 40))
    edges = np.arange(low, high + step + 1, step) - 0.5
    axes.hist(values, edges.tolist(), color=SERIES[0], edgecolor="white", linewidth=0.4)
    room = 2 if high - low < 4 else 0  # keeps a single bar from filling the axes
    axes.set_xlim(max(low - room, 0) - 0.6, high + room + 0.6)
    axes.set_xlabel(name)
    axes.set_ylabel("clients")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        axis.set_major_formatter(_thousands)
    dress([axes], lines=False)


def _number_clients(axes: Axes, n: int) -> None:
    axes.set_xlabel("client")
    axes.set_xticks(range(0, n, 1 if n <= 20 else 5))


def _thousands(value: float, _: float) -> str:
    return f"{value:,.0f}"


def _spread(values: Counts) -> str:
    return f"{values.min():,} min, {np.median(values):,.10g} median, {values.max():,} max"
