"""Means of what clients report."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from flwr.app import MetricRecord, RecordDict

from fedsim.rows.exchange import Block

__all__ = ["MetricMeans", "MetricsAggregator"]

MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]
"""As Flower's ``train_metrics_aggr_fn``: from one record a client to the aggregate."""


class MetricMeans:
    """Weighted means of metrics over blocks; the number of examples itself is summed.

    A metric is averaged over the clients that report a finite value for it.

    Parameters
    ----------
    weighted_by_key : str
        Metric that weighs the others; clients without it count one each.
    aggregate : callable, optional
        A user's own, in Flower's form: it is given one `RecordDict` a client instead.
    """

    def __init__(
        self,
        weighted_by_key: str,
        aggregate: MetricsAggregator | None = None,
    ) -> None:
        self._key = weighted_by_key
        self._aggregate = aggregate
        self._records: list[RecordDict] = []
        self._reports: dict[str, list[tuple[float, float]]] = {}

    def add(self, block: Block) -> None:
        """Take in the metrics of a block."""
        if self._aggregate is not None:
            self._records += [
                RecordDict(
                    {"metrics": MetricRecord({k: float(v[i]) for k, v in block.metrics.items()})}
                )
                for i in range(len(block.client_ids))
            ]
            return
        weights = block.metrics.get(self._key, np.ones(len(block.client_ids)))
        for key, values in block.metrics.items():
            self._reports.setdefault(key, []).extend(
                zip(weights.tolist(), values.tolist(), strict=True)
            )

    def record(self) -> MetricRecord | None:
        """The means; None if nobody reported."""
        if self._aggregate is not None:
            return self._aggregate(self._records, self._key) if self._records else None
        if not self._reports:
            return None
        return MetricRecord({key: self._mean(key) for key in sorted(self._reports)})

    def _mean(self, key: str) -> float:
        reports = [(w, v) for w, v in self._reports[key] if math.isfinite(v)]
        # fsum: the same bytes in whatever order clients report.
        if key == self._key:
            return math.fsum(value for _, value in reports)
        weight = math.fsum(w for w, _ in reports)
        return math.fsum(w * v for w, v in reports) / weight if weight else math.nan
