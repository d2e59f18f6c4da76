"""One look for every picture, and how a picture is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["COLOURS", "INK", "dress", "grid", "save"]

INK = "#333333"
COLOURS = {
    "clipping": "#c8553d",
    "normalization": "#2a6f97",
    "adaclip": "#2a6f97",
    "literal": "#8d6a9f",
    "norm-bound": "#b08d2e",
    "fedavg": "#6b7280",
    "neutral": "#6b7280",
    "third": "#4f8a5b",
}
"""A colour for each method, the same in every picture."""


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
        panel.spines[["left", "bottom"]].set_color("#999999")
        panel.tick_params(colors=INK, labelsize=9)
        panel.grid(color="#e6e6e6", linewidth=0.6)
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
