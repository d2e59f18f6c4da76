"""Metrics as (init, update, merge, finish): the same number however examples are cut into blocks.

A state is a value: `update` gives a new one that has seen more examples, `merge` one that has seen
what two have seen. What is counted is counted in whole numbers, and what is added is added without
rounding (`ExactSum`), so that states merge to the same result in any order and any tree.
"""

from __future__ import annotations

from fedsim.tasks.metrics.base import MeanOf, Metric

__all__ = ["MeanOf", "Metric"]
