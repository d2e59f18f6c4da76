"""Rows (clients' updates or examples' gradients), dense or factored, and their layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import names_of

if TYPE_CHECKING:
    from fedsim.rows.dense import BlockRows, DenseRows, Rows
    from fedsim.rows.factored import LinearPart, OuterRows
    from fedsim.rows.layout import Layout, Parameter

__all__ = ["BlockRows", "DenseRows", "Layout", "LinearPart", "OuterRows", "Parameter", "Rows"]

__getattr__ = names_of(__name__, __file__)
