"""Adapters: a few weights that are trained inside a frozen model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import lazy_names

if TYPE_CHECKING:
    from fedsim.adapters.base import Adapter, adapted
    from fedsim.adapters.layers import LowRankLinear
    from fedsim.adapters.lora import LoRA

__all__ = ["Adapter", "LoRA", "LowRankLinear", "adapted"]

__getattr__ = lazy_names(__name__, __file__)
