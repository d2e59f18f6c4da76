"""Picture of the map of methods, with a square for each method and federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedsim.reports.plots import COLOURS, grid

DARKEST = 10.0
"""Percentage points behind the best at which the colour scale ends."""


@dataclass(frozen=True)
class Square:
    """Result of one method in one federation.

    Attributes
    ----------
    text : str
        The accuracy, or why there is none.
    behind : float or None
        Percentage points behind the federation's best method; None if it is not compared.
    level : bool
        Whether its difference from the best is within the spread over seeds.
    """

    text: str
    behind: float | None = None
    level: bool = False


def map_picture(
    title: str, methods: Sequence[str], columns: Sequence[str], squares: Sequence[Sequence[Square]]
) -> Figure:
    """Draw methods as rows and federations as columns; darker is further behind the column's best.

    Parameters
    ----------
    squares : sequence of columns
        Each column has one square per method.
    """
    values = np.array(
        [[np.nan if s.behind is None else s.behind for s in column] for column in squares]
    ).T
    figure, (axes,) = grid(
        1, 1, title=title, width=3.2 + 1.15 * len(columns), height=1.6 + 0.62 * len(methods)
    )
    axes.imshow(np.ma.masked_invalid(values), cmap="YlOrBr", vmin=0, vmax=DARKEST, aspect="auto")
    for x, column in enumerate(squares):
        for y, square in enumerate(column):
            compared = square.behind is not None
            text = square.text
            if square.behind:
                text += f"\n−{square.behind:.1f}"
            axes.text(
                x,
                y,
                text,
                ha="center",
                va="center",
                fontsize=9 if compared else 7.5,
                weight="bold" if square.level else "normal",
                color="white" if (square.behind or 0.0) > 0.6 * DARKEST else "black",
            )
            if square.level:
                axes.add_patch(
                    Rectangle(
                        (x - 0.47, y - 0.45), 0.94, 0.9, fill=False, lw=2, ec=COLOURS["clipping"]
                    )
                )
    axes.set_xticks(range(len(columns)), [_lines(name) for name in columns], fontsize=8)
    axes.set_yticks(range(len(methods)), methods, fontsize=9)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_xlabel(
        "test accuracy (%), and points behind the best of its column; framed: best, or not told "
        "from it by the seeds",
        fontsize=8,
    )
    return figure


def _lines(name: str) -> str:
    """A federation's name, with each of its parts on a line of its own."""
    return name.replace(", ", "\n")
