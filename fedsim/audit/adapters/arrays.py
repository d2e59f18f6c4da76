"""A target from one round of arithmetic: what an aggregation of arrays releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Aggregate = Callable[[Sequence[list[Any]], np.random.Generator], list[Any]]
"""From the updates of a round, as lists of arrays, and a generator to the noisy mean, a list."""


def aggregation_target(make: Callable[[Any], Aggregate]) -> Callable[[Any], Any]:
    """A target in which all clients take part in every round.

    Parameters
    ----------
    make : callable
        From a synthetic federation to the aggregation of all its rounds, which may keep state.
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
