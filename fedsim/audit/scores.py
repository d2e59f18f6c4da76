"""Scores: one number for a run, larger where the canary seems to be there.

All of them are fitted on the first half of the runs and used on the other, so a clever score
can only find more, never raise a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["Score", "fitted_scores"]

Floats = npt.NDArray[np.float64]
Score = Callable[[Floats], Floats]


def fitted_scores(without: Floats, present: Floats, direction: Floats) -> dict[str, Score]:
    """Candidates by name.

    Parameters
    ----------
    without, present : float64 ``[runs, rounds, width]``
        What was seen without and with the canary.
    direction : float64 ``[d]``
        Where the canary pulls; ``d <= width``.
    """
    d = len(direction)

    def matched(seen: Floats) -> Floats:
        return np.asarray(seen[:, :, :d].sum(1) @ direction)

    return {
        "matched filter": matched,
        "linear discriminant": _discriminant(without, present, _flat),
        "magnitudes": _discriminant(without, present, _magnitudes),
    }


def _flat(seen: Floats) -> Floats:
    return seen.reshape(len(seen), -1)


def _magnitudes(seen: Floats) -> Floats:
    return np.log(np.abs(_flat(seen)) + 1e-30)


def _discriminant(without: Floats, present: Floats, features: Score) -> Score:
    """Fisher's linear discriminant with a diagonal covariance."""
    x, y = features(without), features(present)
    variance = x.var(0) + y.var(0)
    difference = y.mean(0) - x.mean(0)
    # A feature that is constant in both halves says everything or nothing.
    floor = 1e-12 * max(float(variance.max()), 1e-300)
    weights = difference / np.maximum(variance, floor)

    def score(seen: Floats) -> Floats:
        return np.asarray(features(seen) @ weights)

    return score
