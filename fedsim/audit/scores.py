"""Scores: one number for a run, larger where the canary seems to be there.

All of them are fitted on the first half of the runs and used on the other, so a clever score
can only find more, never raise a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["Score", "fitted_scores", "is_fitted"]

Floats = npt.NDArray[np.float64]
Score = Callable[[Floats], Floats]

WINDOWS = 10
FITTED = ("linear discriminant", "magnitudes")


def is_fitted(name: str) -> bool:
    """Whether a score looks better on the runs that it was fitted to than on others."""
    return name in FITTED


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
    d, rounds = len(direction), without.shape[1]

    def projected(seen: Floats) -> Floats:
        return np.asarray(seen[:, :, :d] @ direction)

    scores: dict[str, Score] = {
        "matched filter": lambda seen: projected(seen).sum(1),
        "likelihood ratio": _likelihood_ratio(
            projected(without), projected(present), projected, rate
        ),
        "linear discriminant": _discriminant(without, present, _flat),
        "magnitudes": _discriminant(without, present, _magnitudes),
    }
    if rounds > 1:
        scores |= {
            "largest round": lambda seen: projected(seen).max(1),
            "range of rounds": lambda seen: np.ptp(projected(seen), axis=1),
            "alike rounds": lambda seen: -_nearest(seen),
        }
        width = -(-rounds // WINDOWS)
        for first in range(0, rounds, width):
            window = slice(first, min(first + width, rounds))
            scores[f"rounds {first + 1} to {window.stop}"] = _window(projected, window)
    return scores


def _window(projected: Score, window: slice) -> Score:
    return lambda seen: np.asarray(projected(seen)[:, window].sum(1))


def _nearest(seen: Floats) -> Floats:
    """Distance of the two rounds of a run that are nearest to each other."""
    squares = np.square(seen).sum(2)
    inner = np.einsum("rsd,rtd->rst", seen, seen)
    distances = squares[:, :, None] + squares[:, None, :] - 2 * inner
    rounds = seen.shape[1]
    distances[:, np.arange(rounds), np.arange(rounds)] = np.inf
    return np.asarray(distances.min((1, 2)))


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
