"""Aggregation by a robust mean: a function of all rows of a round and not of their sum."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.federation.aggregation.base import AggregationSettings, PendingRound
from fedsim.federation.aggregation.robust_mean import RobustMean
from fedsim.federation.aggregation.server_sum import ServerSum
from fedsim.federation.replies import Reply
from fedsim.mechanisms import Release


class RobustAggregation(ServerSum):
    """Keeps the usable rows of a round, and releases their centre in place of their mean.

    Which rows are usable the plain sum says: what may enter a robust mean may enter a mean.
    """

    on_workers: ClassVar[bool] = False

    def __init__(
        self, mean: RobustMean, settings: AggregationSettings, pending: PendingRound
    ) -> None:
        super().__init__(settings, pending)
        self._mean = mean
        self._client_ids: list[int] = []
        self._rows: list[Tensor] = []

    def add(self, reply: Reply) -> Tensor:
        """Keep the rows of those who are usable, bool ``[n]``."""
        usable = super().add(reply)
        block = reply.block
        assert block.rows is not None
        self._client_ids += block.client_ids[usable.cpu().numpy()].tolist()
        self._rows.append(block.rows[usable.to(block.rows.device)])
        return usable

    def release(self) -> Release:
        """The robust mean, in the order of client ids; without rows the mean of none, zero."""
        release = super().release()
        if not self._client_ids:
            return release
        order = torch.tensor(self._client_ids).argsort()
        rows = torch.cat(self._rows)
        return replace(release, mean=self._mean.center(rows[order.to(rows.device)]))
