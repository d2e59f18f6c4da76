"""Named vectors beside a model's parameters: further entries of a row, after the model's own.

An algorithm may send vectors with its update (a control variate) and receive what the server makes
of them. They lie at the end of a row, so that whatever is done to rows (bounds, exact sums,
transport, refusals) is done to them as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedsim.lazy import Tensor
from fedsim.rows.layout import Layout, Parameter

__all__ = ["Width", "vectors_in", "with_vectors"]

Width = Literal["model", "number"]
"""As many coordinates as the parameters that are sent have, or one."""

PREFIX = "client/"


def with_vectors(layout: Layout, sends: Mapping[str, Width]) -> Layout:
    """The layout of a row that ends in these vectors; they are called ``client/NAME`` there."""
    entries = list(layout.entries)
    for name, width in sends.items():
        start, size = entries[-1].stop, layout.d if width == "model" else 1
        entries.append(Parameter(PREFIX + name, (size,), layout.dtype, start, start + size))
    return Layout(tuple(entries), layout.kept)


def vectors_in(layout: Layout, rows: Tensor) -> dict[str, Tensor]:
    """The named vectors of rows ``[..., d]``, each ``[..., size]``; views."""
    return {
        entry.name.removeprefix(PREFIX): rows[..., entry.start : entry.stop]
        for entry in layout.entries
        if entry.name.startswith(PREFIX)
    }
