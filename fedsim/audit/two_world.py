"""Attack in two worlds: many runs with the canary, as many without, and a test between them.

Scores are fitted to the first half of the runs and errors counted on the second. So a better score
detects more, and no score causes false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from fedsim.array_types import Floats, Ints
from fedsim.audit.claim import (
    Box,
    Claim,
    box_p_value,
    epsilon_bound,
    missed_statistic,
)
from fedsim.audit.findings import Finding, statistical
from fedsim.errors import FedsimError
from fedsim.privacy import Event
from fedsim.privacy.losses import gaussian_mu
from fedsim.randomness import Purpose, Randomness

Score = Callable[[Floats], Floats]
"""Function from releases ``[runs, rounds, width]`` to one number for each run, ``[runs]``."""

MAX_THRESHOLDS = 64
HANDICAP = 5.0
FITTED = ("linear discriminant", "magnitudes")
WINDOWS = 10
FACTORS = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
TRIALS = 3


@dataclass(frozen=True)
class Attack:
    """An attack on a claim, and how well it did.

    Attributes
    ----------
    finding : Finding
        The attack's name, its errors, and whether the claim allows them.
    claim : Claim
        Claim of each of its runs.
    epsilon_bound : float
        Lower bound on epsilon at the claim's delta, from a test chosen for it.
    box : Box or None
        Error rates, if the attack makes runs with and runs without a canary.
    score : str
        Name of the score that was best on the first half of these runs.
    moves : float64 ``[runs, rounds, d]``
        Releases of all these runs.
    """

    finding: Finding
    claim: Claim
    epsilon_bound: float
    box: Box | None = None
    score: str = ""
    moves: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)), repr=False, compare=False)

    @property
    def errors_in_words(self) -> tuple[str, str]:
        """False positives and false negatives, in words; in one run all errors are the latter."""
        if (box := self.box) is None:
            return "", self.finding.measured
        return f"{box.false_positives} of {box.trials}", f"{box.false_negatives} of {box.trials}"


def distinguish(
    name: str, without: Floats, present: Floats, direction: Floats, claim: Claim, risk: float
) -> Attack:
    """Choose score and thresholds on the first half of the runs, and count errors on the second.

    Parameters
    ----------
    without, present : float64 ``[runs, rounds, width]``
    direction : float64 ``[d]``
        Direction of the canary's row.
    """
    half = len(without) // 2
    if half < 1 or len(without) != len(present):
        raise FedsimError(f"runs is {len(without)} and {len(present)}; each needs at least 2.")
    rate = claim.events[0].law.rate if claim.events else 1.0
    scores = fitted_scores(without[:half], present[:half], direction, rate)
    against_curve, for_epsilon = _choose_tests(scores, without[:half], present[:half], claim, risk)
    fresh = len(without) - half

    def count(test: _Test) -> tuple[Ints, Ints]:
        score = scores[test.score]
        return _errors(score(without[half:]), score(present[half:]), np.array([test.threshold]))

    fp, fn = count(against_curve)
    best = against_curve.score
    finding = statistical(
        f"{fresh:,} runs without and {fresh:,} with the canary",
        missed_statistic(fp, fn, fresh, claim, f", by {best}"),
    )
    bound = float(epsilon_bound(*count(for_epsilon), fresh, risk, claim.delta)[0])
    box = Box(int(fp[0]), int(fn[0]), fresh, risk)
    return Attack(replace(finding, name=name), claim, bound, box, best)


@dataclass(frozen=True)
class _Test:
    score: str
    threshold: float


def _choose_tests(
    scores: Mapping[str, Score], without: Floats, present: Floats, claim: Claim, risk: float
) -> tuple[_Test, _Test]:
    """The test that refutes the claim best, and the one with the largest bound on epsilon."""
    trials = len(without)
    by_p_value, by_epsilon = [], []
    for name, score in scores.items():
        x, y = score(without), score(present)
        thresholds = _thresholds(x, y)
        fp, fn = _errors(x, y, thresholds)
        p_values = box_p_value(fp, fn, trials, claim)
        bounds = epsilon_bound(fp, fn, trials, risk, claim.delta)
        # A fitted score separates the runs that it was fitted to better than new ones.
        handicap = HANDICAP if name in FITTED else 0.0
        # By p-value; equal ones, as at `MIN_P`, by the number of errors.
        best = int(np.lexsort((fp + fn, p_values))[0])
        most = int(bounds.argmax())
        evidence = math.log(p_values[best]) + handicap
        by_p_value.append((evidence, _Test(name, float(thresholds[best]))))
        by_epsilon.append((handicap / 10 - bounds[most], _Test(name, float(thresholds[most]))))
    first = itemgetter(0)
    return min(by_p_value, key=first)[1], min(by_epsilon, key=first)[1]


def _thresholds(x: Floats, y: Floats) -> Floats:
    """Thresholds half way between neighbouring scores; at most `MAX_THRESHOLDS` of them."""
    values = np.unique(np.concatenate([x, y]))
    middles = (values[1:] + values[:-1]) / 2 if len(values) > 1 else values
    if len(middles) <= MAX_THRESHOLDS:
        return np.asarray(middles)
    return np.asarray(middles[np.linspace(0, len(middles) - 1, MAX_THRESHOLDS).astype(int)])


def _errors(x: Floats, y: Floats, thresholds: Floats) -> tuple[Ints, Ints]:
    """False positives among ``x`` and false negatives among ``y``, ``[thresholds]`` each."""
    fp = len(x) - np.searchsorted(np.sort(x), thresholds, side="right")
    fn = np.searchsorted(np.sort(y), thresholds, side="right")
    return fp.astype(np.int64), fn.astype(np.int64)


def noticeable(claim: Claim, runs: int, risk: float, seed: int) -> float | None:
    """Smallest of `FACTORS` such that noise too small by this factor is always detected.

    Found by auditing an ideal canary on the claimed Gaussians with less noise, a few times; on the
    one that is just private enough, if only epsilon is claimed. None if even the largest factor is
    not detected.
    """
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run", part=9)
    return next(
        (
            factor
            for factor in FACTORS
            if all(_is_detected(claim, factor, runs, risk, draws) for _ in range(TRIALS))
        ),
        None,
    )


def _is_detected(
    claim: Claim, factor: float, runs: int, risk: float, draws: np.random.Generator
) -> bool:
    shifts, rates = np.array(_gaussians(claim)).T
    without = draws.standard_normal((runs, len(shifts)))
    takes_part = draws.random(without.shape) < rates
    present = factor * shifts * takes_part + draws.standard_normal(without.shape)
    result = distinguish("", without[:, :, None], present[:, :, None], np.ones(1), claim, risk)
    return result.finding.refutes(risk)


def _gaussians(claim: Claim) -> list[tuple[float, float]]:
    """How far a sampled row moves each release, in stds of the noise, and its sampling rate."""
    if claim.declared_epsilon is not None:
        return [(gaussian_mu(claim.declared_epsilon, claim.delta), 1.0)]
    return [
        (_sensitivity(event), event.law.rate) for event in claim.events for _ in range(event.count)
    ]


def _sensitivity(event: Event) -> float:
    """How far a sampled row moves a release, in standard deviations of the noise."""
    z = event.total_noise_multiplier
    mu: float | None = event.law.gaussian(z)
    return (2.0 if event.adjacency == "replace-one" else 1.0) / z if mu is None else mu


def fitted_scores(
    without: Floats, present: Floats, direction: Floats, rate: float
) -> dict[str, Score]:
    """Candidate scores by name, fitted to these runs.

    Parameters
    ----------
    without, present : float64 ``[runs, rounds, width]``
        Releases without and with the canary.
    direction : float64 ``[d]``
        Direction of the canary's row; ``d <= width``.
    rate : float
        Probability that the canary takes part in a round.
    """
    d, rounds = len(direction), without.shape[1]

    def projected(moves: Floats) -> Floats:
        return np.asarray(moves[:, :, :d] @ direction)

    scores: dict[str, Score] = {
        "matched filter": lambda moves: projected(moves).sum(1),
        "likelihood ratio": _likelihood_ratio(
            projected(without), projected(present), projected, rate
        ),
        "linear discriminant": _discriminant(without, present, _flat),
        "magnitudes": _discriminant(without, present, _magnitudes),
    }
    if rounds > 1:
        scores |= {
            "largest round": lambda moves: projected(moves).max(1),
            "range of rounds": lambda moves: np.ptp(projected(moves), axis=1),
            "most similar rounds": lambda moves: -_nearest(moves),
        }
        width = -(-rounds // WINDOWS)
        for first in range(0, rounds, width):
            window = slice(first, min(first + width, rounds))
            scores[f"rounds {first + 1} to {window.stop}"] = _window(projected, window)
    return scores


def _window(projected: Score, window: slice) -> Score:
    return lambda moves: np.asarray(projected(moves)[:, window].sum(1))


def _nearest(moves: Floats) -> Floats:
    """Smallest squared distance between two rounds of each run."""
    squares = np.square(moves).sum(2)
    inner = np.einsum("rsd,rtd->rst", moves, moves)
    distances = squares[:, :, None] + squares[:, None, :] - 2 * inner
    rounds = moves.shape[1]
    distances[:, np.arange(rounds), np.arange(rounds)] = np.inf
    return np.asarray(distances.min((1, 2)))


def _likelihood_ratio(without: Floats, present: Floats, projected: Score, rate: float) -> Score:
    """Log likelihood ratio for Gaussians that the canary shifts in a round at this rate."""
    mean, std = without.mean(0), np.maximum(without.std(0), 1e-300)
    shift = np.clip((present.mean(0) - mean) / std / rate, -30.0, 30.0)

    def score(moves: Floats) -> Floats:
        u = np.clip((projected(moves) - mean) / std, -100.0, 100.0)
        # log(1 - rate + rate * exp(...)) in each round.
        terms = np.logaddexp(
            np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + shift * (u - shift / 2)
        )
        return np.asarray(terms.sum(1))

    return score


def _flat(moves: Floats) -> Floats:
    return moves.reshape(len(moves), -1)


def _magnitudes(moves: Floats) -> Floats:
    return np.log(np.abs(_flat(moves)) + 1e-30)


def _discriminant(without: Floats, present: Floats, features: Score) -> Score:
    """Fisher's linear discriminant with a diagonal covariance."""
    x, y = features(without), features(present)
    variance = x.var(0) + y.var(0)
    difference = y.mean(0) - x.mean(0)
    # Without a floor, features that are constant in both worlds would have infinite weights.
    floor = max(1e-12 * float(variance.max()), 1e-24 * float((difference**2).max()), 1e-300)
    weights = difference / np.maximum(variance, floor)

    def score(moves: Floats) -> Floats:
        return np.asarray(features(moves) @ weights)

    return score
