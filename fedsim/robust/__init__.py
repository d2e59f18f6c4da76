"""Robust means: what a few clients, whatever they send, cannot move far. Without privacy.

A config names them where it names a mechanism; a strategy keeps a round's rows for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import names_of

if TYPE_CHECKING:
    from fedsim.robust.base import RobustMean
    from fedsim.robust.krum import Krum
    from fedsim.robust.median import Median
    from fedsim.robust.trimmed_mean import TrimmedMean

__all__ = ["Krum", "Median", "RobustMean", "TrimmedMean"]

__getattr__ = names_of(__name__, __file__)
