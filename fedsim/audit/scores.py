"""Scores: one number for a run, larger where the canary seems to be there.

All of them are fitted on the first half of the runs and used on the other, so a clever score
can only find more, never raise a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["PLAIN", "Score", "fitted_scores"]

Floats = npt.NDArray[np.float64]
Score = Callable[[Floats], Floats]

PLAIN = ("matched filter", "likelihood ratio")
"""Scores with hardly anything to fit: they are as good as they look on the first half."""


def fitted_scores(
    without: Floats, present: Floats, direction: Floats, rate: float
) -> dict[str, Score]:
    """Candidates by name.

    Parameters
    ----------
    without, present : float64 ``[runs, rounds, width]``
        What was seen without and with the canary.
    direction : float64 ``[d]``
        Where the canary pulls; ``d <= width``.
    rate : float
        Probability of the canary taking part in a round.
    """
    d = len(direction)

    def projected(seen: Floats) -> Floats:
        return np.asarray(seen[:, :, :d] @ direction)

    def matched(seen: Floats) -> Floats:
        return np.asarray(projected(seen).sum(1))

    fitted: list[Score] = [
        matched,
        _likelihood_ratio(projected(without), projected(present), projected, rate),
        _discriminant(without, present, _flat),
        _discriminant(without, present, _magnitudes),
    ]
    return dict(zip((*PLAIN, "linear discriminant", "magnitudes"), fitted, strict=True))


def _likelihood_ratio(without: Floats, present: Floats, projected: Score, rate: float) -> Score:
    """Of Gaussians that the canary shifts in a round with probability ``rate``."""
    mean, std = without.mean(0), np.maximum(without.std(0), 1e-300)
    shift = np.clip((present.mean(0) - mean) / std / rate, -30.0, 30.0)

    def score(seen: Floats) -> Floats:
        u = np.clip((projected(seen) - mean) / std, -100.0, 100.0)
        # log(1 - rate + rate * exp(...)), each round.
        terms = np.logaddexp(
            np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + shift * (u - shift / 2)
        )
        return np.asarray(terms.sum(1))

    return score


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
