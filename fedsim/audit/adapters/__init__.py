"""Targets from other packages' objects, and from a function that aggregates arrays.

Each file needs numpy and the package that it is named after, not fedsim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Aggregate = Callable[[Sequence[list[Any]], np.random.Generator], list[Any]]
"""Function from a round's updates (lists of arrays) and a generator to the noisy mean (a list)."""


def aggregation_target(make: Callable[[Any], Aggregate]) -> Callable[[Any], Any]:
    """Make a target in which all clients take part in every round.

    Parameters
    ----------
    make : callable
        Makes an aggregation for a synthetic federation; it may keep state over rounds.
    """

    def target(federation: Any) -> Any:
        draws, aggregate = np.random.default_rng(federation.seed), make(federation)
        model = federation.initial
        models = []
        for _ in range(federation.rounds):
            updates = [federation.update(client) for client in range(federation.population)]
            moved = aggregate(updates, draws)
            model = [array + move for array, move in zip(model, moved, strict=True)]
            models.append(model)
        return models

    return target
