"""A partition's class counts per client: a table for the terminal and a picture."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedsim.array_types import Ints
from fedsim.partitions.base import class_counts, class_shares
from fedsim.reports.charts import distribution_charts
from fedsim.reports.pictures import picture
from fedsim.runs.summary import distribution

_ROWS = 12  # most clients in the table before it is abbreviated
_WIDTH = 80  # columns of a terminal; if a column per class needs more, classes are listed


def summary(counts: Ints) -> dict[str, str]:
    """Short texts with facts about ``counts [n, K]``, by name."""
    sizes = counts.sum(1)
    has = sizes > 0
    facts = {"clients": f"{len(counts):,}" + (f", {(~has).sum():,} empty" * bool((~has).any()))}
    facts["examples"] = f"{sizes.sum():,}"
    facts["examples a client"] = _spread(sizes)
    facts["classes a client"] = _spread((counts > 0).sum(1))
    if has.any():
        shares = class_shares(counts[has])
        facts["largest class's share"] = f"{100 * np.median(shares.max(1)):.0f} % (median)"
        facts["distance from the overall mix"] = (
            f"{_distance(counts):.2f} (total variation, mean), "
            f"{_distance(_shuffled(counts)):.2f} at random"
        )
    return facts


def _distance(counts: Ints) -> float:
    """Mean total variation distance between a client's class distribution and the overall one.

    The mean is over clients that have examples.
    """
    overall = counts.sum(0) / counts.sum()
    shares = class_shares(counts[counts.sum(1) > 0])
    return float(np.abs(shares - overall).sum(1).mean() / 2)


def _shuffled(counts: Ints) -> Ints:
    """Class counts of clients with the same sizes, if examples were assigned at random."""
    num_classes = counts.shape[1]
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), counts.sum(0)))
    return class_counts(
        labels, np.split(np.arange(len(labels)), counts.sum(1).cumsum()[:-1]), num_classes
    )


def tabulate(counts: Ints, title: str) -> RenderableType:
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


def _by_client(counts: Ints) -> Table:
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


def _largest(row: Ints) -> str:
    order = np.argsort(-row, kind="stable")[: int((row > 0).sum())]
    text = ", ".join(f"{label} ({row[label]})" for label in order[:4])
    return f"{text}, and {len(order) - 4} more" if len(order) > 4 else text


def draw(counts: Ints, title: str) -> Figure:
    """Draw clients' numbers of examples and of classes, and each client's mix of classes.

    Parameters
    ----------
    counts : int64 ``[n, K]``
        Class counts per client, from `class_counts`.
    title : str
    """
    names = [str(label) for label in range(counts.shape[1])]
    return picture(distribution_charts(distribution(counts.sum(1), counts, names)), title)


def _spread(values: Ints) -> str:
    return f"{values.min():,} min, {np.median(values):,.10g} median, {values.max():,} max"
