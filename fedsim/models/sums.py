"""The torch module of a `fedsim.models.statistics_model.Statistics` model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.mechanisms.bounded_values import Moments


class Sums(nn.Module):
    """Outputs ``[B, 1 + targets]``: the inputs' part of the loss, and the sums of targets.

    Parameters
    ----------
    moments : Moments
        Encoding of an input in its sums.
    columns : int
        Number of inputs that have sums of their own.
    targets : int
        Number of sums of targets.
    """

    def __init__(self, moments: Moments, columns: int, targets: int) -> None:
        super().__init__()
        self.moments, self.columns = moments, columns
        self.sums = nn.Parameter(torch.zeros(columns * moments.size + targets))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[B, 1 + targets]`` for inputs ``[B, ...]``."""
        inputs = self.columns * self.moments.size
        added = self.sums.new_zeros(len(x), 1)
        if self.columns:
            rows = self.moments.encoded(x.to(self.sums.dtype).reshape(len(x), self.columns, -1))
            added = rows.flatten(1) @ self.sums[:inputs, None]
        return torch.cat([added, self.sums[inputs:].expand(len(x), -1)], dim=1)
