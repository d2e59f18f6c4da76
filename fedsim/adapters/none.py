"""No adapter: the model unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsim.adapters.base import Adapter
from fedsim.registry import register

if TYPE_CHECKING:
    from torch import nn


@register("adapter", "none")
@dataclass(frozen=True)
class NoAdapter(Adapter):
    """No adapter: the parameters that `model.trainable` names are trained."""

    def __call__(self, model: nn.Module, seed: int) -> nn.Module:
        """Return the model unchanged."""
        return model
