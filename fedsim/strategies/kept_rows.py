"""The rows of a round, where their mean is a function of all of them and not of their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.robust import RobustMean
from fedsim.rows.block import Block

__all__ = ["KeptRows"]


class KeptRows:
    """Usable rows of one round, in whatever order they come.

    Parameters
    ----------
    mechanism : RobustMean
    """

    def __init__(self, mechanism: RobustMean) -> None:
        self._mechanism = mechanism
        self._client_ids: list[int] = []
        self._rows: list[Tensor] = []

    def take(self, block: Block, usable: Tensor) -> None:
        """Keep the rows of those of a block's clients that are ``usable [n]``."""
        assert block.rows is not None
        self._client_ids += block.client_ids[usable.cpu().numpy()].tolist()
        self._rows.append(block.rows[usable.to(block.rows.device)])

    def center(self) -> Tensor:
        """The mechanism's mean of them, float64 ``[d]``."""
        order = torch.tensor(self._client_ids).argsort()
        rows = torch.cat(self._rows)
        return self._mechanism.center(rows[order.to(rows.device)])
