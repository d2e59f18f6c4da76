"""Rows (clients' updates or examples' gradients), dense or factored, and their layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import lazy_names

if TYPE_CHECKING:
    from fedsim.rows.dense import BlockRows, DenseRows, Rows
    from fedsim.rows.factored import LinearPart, OuterRows
    from fedsim.rows.layout import Layout, Parameter

__all__ = ["BlockRows", "DenseRows", "Layout", "LinearPart", "OuterRows", "Parameter", "Rows"]

__getattr__ = lazy_names(__name__, __file__)
