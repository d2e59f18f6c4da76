"""A map of methods: a square for each of them and each federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedsim.reports.plots import COLOURS, grid

DARKEST = 10.0
"""Points behind the best at which the colour ends."""


@dataclass(frozen=True)
class Square:
    """What one method reaches in one federation.

    Attributes
    ----------
    text : str
        The accuracy, or why there is none.
    behind : float or None
        Points behind the best of the federation; None where nothing is compared.
    level : bool
        Whether the seeds cannot tell it from the best.
    """

    text: str
    behind: float | None = None
    level: bool = False


def map_picture(
    title: str, methods: Sequence[str], columns: Sequence[str], squares: Sequence[Sequence[Square]]
) -> Figure:
    """Methods downwards, federations to the right: darker is further behind the column's best.

    Parameters
    ----------
    squares : sequence of columns
        Each with a square a method.
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
    """A federation's name with a line for each of its parts."""
    return name.replace(", ", "\n")
