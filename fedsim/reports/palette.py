"""The colours of every picture and page: told apart by everybody, on paper and on a screen.

Within a theme every two series differ by at least 25 in CIE Lab, also as people see them who
have one sort of cone less, and every colour has a contrast of at least 3 with what is behind it,
text of at least 4.5 (WCAG 2.2). Colour is never alone: series differ by marker and dash too.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COLOURS", "DARK", "DASHES", "HATCHES", "INK", "LIGHT", "MARKERS", "SERIES", "Theme"]


@dataclass(frozen=True)
class Theme:
    """Colours as ``#rrggbb``.

    Attributes
    ----------
    background, surface : str
        Of the page, and of what stands on it.
    ink, muted : str
        Text, and text that matters less.
    grid, frame : str
        Lines that are no data.
    accent : str
        Links and focus.
    series : tuple of str
        One curve each, in the order in which they are used.
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
"""Of each series, by matplotlib's names; pages draw the same ones."""

DASHES = ("", "6 3", "2 2", "8 3 2 3", "10 4", "4 2 1 2", "1 3", "12 3 3 3")
"""Of each series, as lengths of strokes and gaps; empty is a whole line."""

HATCHES = ("", "//", "..")
"""Of areas, where there are more of them than colours."""

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
"""A colour for each method, the same in every picture."""
