"""Tensors compared byte for byte."""

from __future__ import annotations

import torch


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """But for which of the many NaNs one is."""
    return a.nan_to_num(nan=-7.0).numpy().tobytes() == b.nan_to_num(nan=-7.0).numpy().tobytes()
