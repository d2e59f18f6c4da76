"""Common style of all pictures and pages, with colours that all readers can distinguish.

Within a theme every two series differ by at least 25 in CIE Lab, also for readers with any kind of
colour blindness. Every colour has a contrast of at least 3 with its background, text of at least
4.5 (WCAG 2.2). Series differ by marker and dash as well as by colour.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.privacy.durable import replace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """Colours of a theme, as ``#rrggbb``.

    Attributes
    ----------
    background, surface : str
        Background of the page, and of panels on it.
    ink, muted : str
        Text, and secondary text.
    grid, frame : str
        Grid lines and frames.
    accent : str
        Links and focus.
    series : tuple of str
        Colours of curves, in the order in which they are used.
    """

    background: str
    surface: str
    ink: str
    muted: str
    grid: str
    frame: str
    accent: str
    series: tuple[str, ...]


LIGHT = Theme(
    background="#ffffff",
    surface="#f6f7f9",
    ink="#1f2328",
    muted="#5a6370",
    grid="#e3e6ea",
    frame="#79828c",
    accent="#002da7",
    series=(
        "#002da7",
        "#cd7817",
        "#3d9a60",
        "#623569",
        "#77300a",
        "#151916",
        "#8d7dd8",
        "#b37ca3",
    ),
)

DARK = Theme(
    background="#12161c",
    surface="#1b2129",
    ink="#e8ecf1",
    muted="#a3adb9",
    grid="#2b333d",
    frame="#6b7682",
    accent="#4fb6fa",
    series=(
        "#4fb6fa",
        "#ed8100",
        "#4fffa8",
        "#a9779e",
        "#ffdf6a",
        "#f6fffd",
        "#3b70d0",
        "#c73819",
    ),
)

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Marker of each series, by matplotlib's names; pages draw the same ones."""

DASHES = ("", "6 3", "2 2", "8 3 2 3", "10 4", "4 2 1 2", "1 3", "12 3 3 3")
"""Dash pattern of each series, as lengths of strokes and gaps; empty is a solid line."""

INK = LIGHT.ink
SERIES = LIGHT.series

COLOURS = {
    "normalization": SERIES[0],
    "adaclip": SERIES[0],
    "clipping": SERIES[1],
    "third": SERIES[2],
    "literal": SERIES[3],
    "norm-bound": SERIES[4],
    "fedavg": SERIES[5],
    "neutral": SERIES[5],
    "other": SERIES[6],
}
"""Colour of each method, the same in every picture."""


def curve_style(colour: str) -> dict[str, Any]:
    """Matplotlib settings of a curve, with the dash and marker that belong to its colour."""
    index = SERIES.index(colour)
    lengths = tuple(float(length) / 2 for length in DASHES[index].split())
    return {
        "color": colour,
        "linestyle": (0, lengths) if lengths else "-",
        "marker": MARKERS[index],
        "markersize": 4,
        # A share of the axes' diagonal: long curves get few markers, short ones keep all.
        "markevery": 0.1,
    }


def titled(width: float, height: float, title: str) -> Figure:
    """An empty figure with a title."""
    from matplotlib.figure import Figure  # imported here: pages need only the colours

    figure = Figure(figsize=(width, height), layout="constrained")
    lines = "\n".join(textwrap.fill(line, int(width * 10)) for line in title.splitlines())
    figure.suptitle(lines, fontsize=12, color=INK, x=0.01, ha="left", parse_math=False)
    return figure


def grid(
    rows: int, columns: int, *, title: str, width: float = 10.0, height: float = 4.0
) -> tuple[Figure, list[Axes]]:
    """A figure with a title, and its ``rows * columns`` styled axes, row by row."""
    figure = titled(width, height, title)
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).ravel())
    dress(axes)
    return figure, axes


def dress(axes: Sequence[Axes], *, lines: bool = True) -> None:
    """Style axes: light frames, small ticks and, with ``lines``, a faint grid."""
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(LIGHT.frame)
        panel.tick_params(colors=INK, labelsize=9)
        if lines:
            panel.grid(color=LIGHT.grid, linewidth=0.6)
        panel.set_axisbelow(True)


def save(figure: Figure, path: Path, *, dpi: int = 96) -> None:
    """Write a figure as PNG or PDF, by the path's suffix, atomically; its directory is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn, kind = io.BytesIO(), path.suffix.removeprefix(".")
    dates = {"CreationDate": None} if kind == "pdf" else {}  # the same bytes each time
    figure.savefig(drawn, format=kind, dpi=dpi, metadata=dates)
    replace(path, drawn.getvalue())
