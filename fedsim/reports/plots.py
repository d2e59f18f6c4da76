"""One look for every picture, and how a picture is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.reports.palette import DASHES, INK, LIGHT, MARKERS, SERIES

__all__ = ["curve_style", "dress", "grid", "save"]


def curve_style(colour: str) -> dict[str, Any]:
    """How a curve of a colour of the palette is drawn: with the dash and marker of its own."""
    index = SERIES.index(colour)
    lengths = tuple(float(length) / 2 for length in DASHES[index].split())
    return {
        "color": colour,
        "linestyle": (0, lengths) if lengths else "-",
        "marker": MARKERS[index],
        "markersize": 4,
        # As a share of the picture: long curves have few markers, short ones all of theirs.
        "markevery": 0.1,
    }


def grid(
    rows: int, columns: int, *, title: str, width: float = 10.0, height: float = 4.0
) -> tuple[Figure, list[Axes]]:
    """A figure with a title and ``rows * columns`` axes, dressed, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).ravel())
    dress(axes)
    return figure, axes


def dress(axes: Sequence[Axes]) -> None:
    """Light frames, small ticks, a faint grid."""
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(LIGHT.frame)
        panel.tick_params(colors=INK, labelsize=9)
        panel.grid(color=LIGHT.grid, linewidth=0.6)
        panel.set_axisbelow(True)


def save(figure: Figure, path: Path, *, dpi: int = 96) -> None:
    """Write a figure as a PNG, whole or not at all; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(part, format="png", dpi=dpi)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
