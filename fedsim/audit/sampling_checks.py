"""Conformance of draws: who was sampled, round by round, against the event that was charged.

The samples are those that clients were asked in, not the sampler's: what is tested is what
happened. Where probabilities differ by client and by round, each row is in independently with one
of its own, so that centred indicators add up to numbers that Bernstein's inequality bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, bdtrc, chdtrc, gammaln

from fedsim.audit.checks import (
    Check,
    Statistic,
    binomial,
    chi_square,
    invariant,
    normal,
    statistical,
)
from fedsim.privacy import Event
from fedsim.privacy.laws import Inclusion

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FEWEST = 25.0
"""Expected counts below this are not approximated by a normal."""

MOST_HEAVY = 104.0
"""So many draws, times the kurtosis, make a sum whose tails are normal at seven standard errors."""


@dataclass(frozen=True)
class _Draws:
    """What the law says of one round's draw: inclusion, of one and of two together."""

    population: int
    rate: float
    both: float
    fixed: int | None

    @classmethod
    def of(cls, inclusion: Inclusion, population: int) -> _Draws:
        return cls(population, inclusion.one, inclusion.two, inclusion.size)

    @property
    def overlap(self) -> float:
        """Expected number of clients that two rounds have in common."""
        return self.population * self.rate**2


def draw_checks(
    draws: Sequence[Sequence[Ids]], event: Event, population: int, members: str = "clients"
) -> list[Check]:
    """Every test of the draws of several runs.

    Parameters
    ----------
    draws : sequence of runs, each a sequence of int64 arrays
        Ids of each round, as they came.
    event : Event
        What each round was charged as.
    population : int
    who : str
        What is drawn, in the plural.
    """
    rounds = [np.asarray(ids, dtype=np.int64) for run in draws for ids in run]
    looked = f"{len(rounds):,} rounds over {population:,} {members}"
    checks = [_each_once(rounds, population, looked)]
    inclusion = event.law.inclusion(population)
    if checks[0].p_value == 0 or not rounds or inclusion is None:
        return checks
    law = _Draws.of(inclusion, population)
    asked = np.zeros((len(rounds), population), dtype=np.float64)
    for row, ids in zip(asked, rounds, strict=True):
        row[ids] = 1
    checks.append(_sizes(asked, law, looked))
    if law.rate == 1:
        return checks
    checks += [_spread(asked, law, looked), _frequencies(asked, law, looked)]
    checks += [_together(asked, law, looked), _overlaps(asked, law, looked)]
    lengths = [len(run) for run in draws]
    checks += [_succession(asked, law, lengths, looked), _rhythm(asked, law, lengths, looked)]
    return checks


def _each_once(rounds: Sequence[Ids], population: int, looked: str) -> Check:
    """Nobody is asked twice in a round, and nobody who is not in the population."""
    broken = None
    for ids in rounds:
        if len(np.unique(ids)) != len(ids):
            broken = "somebody was asked twice in one round"
        elif len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < population:
            broken = "somebody outside the declared population was asked"
    return invariant("sampler", "who is asked", looked, broken, "nobody twice, and no stranger")


def _sizes(asked: Floats, law: _Draws, looked: str) -> Check:
    sizes = asked.sum(1).astype(np.int64)
    if law.fixed is not None:
        broken = f"{sizes.min()} to {sizes.max()} a round" if (sizes != law.fixed).any() else None
        return invariant("sampler", "sizes", looked, broken, f"{law.fixed} in every round")
    n, q = law.population, law.rate
    return statistical(
        "sampler", "sizes", looked,
        [
            binomial("{} in one round", sizes, lambda k: _binomial_p(k, n, q), n * q),
            binomial(
                "{} in all rounds", [sizes.sum()],
                lambda k: _binomial_p(k, n * len(asked), q), n * q * len(asked),
            ),
        ],
    )  # fmt: skip


def _spread(asked: Floats, law: _Draws, looked: str) -> Check:
    """Sizes must vary as those of independent clients do: no less, and no more."""
    if law.fixed is not None:
        return invariant("sampler", "spread of sizes", looked, None, "none")
    n, q = law.population, law.rate
    variance = n * q * (1 - q)
    ratio = float(np.square(asked.sum(1) - n * q).mean() / variance)
    return statistical(
        "sampler", "spread of sizes", looked,
        [_dispersion("a std of {} of a binomial's", ratio, len(asked), variance, q)],
    )  # fmt: skip


def _frequencies(asked: Floats, law: _Draws, looked: str) -> Check:
    counts = asked.sum(0).astype(np.int64)
    T, q = len(asked), law.rate
    variance = T * q * (1 - q)
    ratio = float(np.square(counts - T * q).mean() / variance)
    return statistical(
        "sampler", "how often each is asked", looked,
        [
            binomial("one in {} rounds", counts, lambda k: _binomial_p(k, T, q), T * q),
            _dispersion("a std of {} of binomial counts'", ratio, len(counts), variance, q),
        ],
    )  # fmt: skip


def _together(asked: Floats, law: _Draws, looked: str) -> Check:
    """Pairs that are asked together too often, or never."""
    counts = (asked.T @ asked)[np.triu_indices(asked.shape[1], 1)].astype(np.int64)
    compared = binomial(
        "one pair in {} rounds", counts,
        lambda k: _binomial_p(k, len(asked), law.both), len(asked) * law.both,
    )  # fmt: skip
    return statistical(
        "sampler", "pairs asked together", f"{looked}, {len(counts):,} pairs", [compared]
    )


def _overlaps(asked: Floats, law: _Draws, looked: str) -> Check:
    """What two rounds have in common, of one run or of two: a draw may not be used again."""
    if len(asked) < 2:
        return invariant("sampler", "overlap of rounds", looked, None, "nothing to compare")
    counts = (asked @ asked.T)[np.triu_indices(len(asked), 1)].astype(np.int64)
    population, fixed = law.population, law.fixed

    def p_of(k: Floats) -> Floats:
        if fixed is None:
            return _binomial_p(k, population, law.rate**2)
        return _hypergeometric_p(k.astype(np.int64), population, fixed)

    compared = binomial("two rounds have {} in common", counts, p_of, law.overlap)
    return statistical(
        "sampler", "overlap of rounds", f"{looked}, {len(counts):,} pairs of rounds", [compared]
    )


def _succession(asked: Floats, law: _Draws, lengths: Sequence[int], looked: str) -> Check:
    """Whether being asked now changes the odds of being asked some rounds later."""
    q = law.rate
    centred = (asked - q) / math.sqrt(q * (1 - q))
    totals = np.zeros(max(lengths))
    products = np.zeros(max(lengths))
    start = 0
    for length in lengths:
        run = centred[start : start + length]
        gram = run @ run.T
        for lag in range(1, length):
            totals[lag] += np.trace(gram, lag)
            products[lag] += (length - lag) * law.population
        start += length
    enough = products * q**2 >= FEWEST
    if not enough.any():
        return invariant("sampler", "succession", looked, None, "too few draws to tell")
    # Under a fixed size the clients of a round are slightly dependent: 1 / (n - 1) apart.
    factor = 1.0 if law.fixed is None else law.population / max(law.population - 1, 1)
    scores = totals[enough] / np.sqrt(products[enough] * factor)
    return statistical(
        "sampler", "rounds after being asked", f"{looked}, {int(enough.sum())} lags",
        [normal("{} standard errors", scores)],
    )  # fmt: skip


def _rhythm(asked: Floats, law: _Draws, lengths: Sequence[int], looked: str) -> Check:
    """Whether somebody is asked at a rhythm: every second round, say, at twice the rate."""
    q, length = law.rate, max(lengths)
    variance = q * (1 - q)
    # Sums of few rare draws have heavier tails than normal ones; far out it is the kurtosis' doing.
    if length < MOST_HEAVY * abs(1 - 6 * variance) / variance or length < FEWEST:
        return invariant("sampler", "rhythm of each", looked, None, "too few draws to tell")
    stops = np.cumsum(lengths)
    runs = [asked[stop - length : stop] for stop in stops[np.array(lengths) == length]]
    # Of independent draws a run's spectrum has at each frequency a chi-square of two degrees, at
    # the highest (every second round) of one.
    powers = sum(np.square(np.abs(np.fft.rfft(run - q, axis=0))) for run in runs)
    powers = np.asarray(powers)[1:] / (length * variance)
    degrees = np.full(len(powers), 2.0 * len(runs))
    if length % 2 == 0:
        degrees[-1] /= 2
    sums = powers * (degrees / len(runs))[:, None]
    p_values = chdtrc(degrees[:, None], sums).ravel()
    frequency = int(p_values.argmin()) // law.population
    compared = Statistic(
        f"a power of {{}} at a rhythm of {length / (frequency + 1):.4g} rounds",
        sums.ravel() / np.repeat(degrees, law.population), p_values,
        lambda i, x: _power_p(degrees[i // law.population], x), 0.0,
    )  # fmt: skip
    return statistical(
        "sampler", "rhythm of each", f"{looked}, {len(powers)} frequencies", [compared]
    )


def _power_p(degrees: float, ratio: float) -> float:
    return float(chdtrc(degrees, max(ratio, 0.0) * degrees))


def _binomial_p(counts: npt.ArrayLike, trials: int, rate: float) -> Floats:
    """Two-sided p-values of binomial counts, exact."""
    k = np.asarray(counts)
    if rate <= 0 or rate >= 1:
        return np.where(k == round(rate * trials), 1.0, 0.0)
    possible = np.minimum(k, trials)
    above = np.where(k > 0, bdtrc(np.maximum(possible - 1, 0), trials, rate), 1.0)
    p_values = np.minimum(1.0, 2 * np.minimum(bdtr(possible, trials, rate), above))
    return np.asarray(np.where(k > trials, 0.0, p_values))


def _hypergeometric_p(counts: Counts, n: int, m: int) -> Floats:
    """Two-sided p-values of what two draws of m out of n have in common."""
    k = np.arange(m + 1)
    with np.errstate(all="ignore"):
        possible = (m - k) <= (n - m)
        in_neither = np.where(possible, n - m - (m - k), 0)
        logs = 2 * gammaln(m + 1) + 2 * gammaln(n - m + 1) - gammaln(n + 1)
        logs = logs - gammaln(k + 1) - 2 * gammaln(m - k + 1) - gammaln(in_neither + 1)
    masses = np.where(possible, np.exp(logs), 0.0)
    below, above = np.cumsum(masses), np.cumsum(masses[::-1])[::-1]
    p_values = np.minimum(1.0, 2 * np.minimum(below, above))
    return np.asarray(np.where(counts <= m, p_values[np.clip(counts, 0, m)], 0.0))


def _dispersion(words: str, ratio: float, count: int, variance: float, rate: float) -> Statistic:
    """A mean of ``count`` squared standardised binomials, matched by a chi-square.

    A binomial of small variance has heavier squares than a normal, which costs degrees.
    """
    excess = (1 - 6 * rate * (1 - rate)) / variance
    degrees = 2 * count / (2 + excess) if excess > -2 else float(count)
    return chi_square(words, [ratio * degrees], degrees)


def inclusion_checks(
    draws: Sequence[Sequence[Ids]], probabilities: Floats, event: Event
) -> list[Check]:
    """Sizes, frequencies, pairs and overlaps against what the sampler says of each.

    Parameters
    ----------
    draws : sequence of runs, each a sequence of int64 arrays
    probabilities : float64 ``[rounds, population]``
        Of one run; the same for all.
    event : Event
        What each round was charged as.
    """
    population = probabilities.shape[1]
    rounds = [np.asarray(ids, dtype=np.int64) for run in draws for ids in run]
    looked = f"{len(rounds):,} rounds over {population:,} clients"
    first = _each_once(rounds, population, looked)
    highest = float(probabilities.max())
    charged = invariant(
        "sampler", "charged rate", looked,
        f"a probability of {highest:.4g}" if highest > event.law.rate * (1 + 1e-12) else None,
        f"probabilities of at most {event.law.rate:.4g}",
    )  # fmt: skip
    if not first.p_value:
        return [first, charged]
    asked = np.zeros((len(rounds), population))
    for row, ids in zip(asked, rounds, strict=True):
        row[ids] = 1
    p = np.concatenate([probabilities[: len(run)] for run in draws])
    centred, variances = asked - p, p * (1 - p)

    def compare(name: str, sums: Floats, spread: Floats, of: str) -> Check:
        errors = np.sqrt(np.maximum(spread, 1e-300))
        compared = Statistic(
            "{} standard errors", (sums / errors).ravel(), _bernstein(sums, spread).ravel(),
            lambda i, x: float(_bernstein(x * errors.flat[i], spread.flat[i])[0]), 0.0,
        )  # fmt: skip
        return statistical("sampler", name, f"{looked}, {sums.size:,} {of}", [compared])

    clients, pairs = np.triu_indices(population, 1), np.triu_indices(len(rounds), 1)
    return [
        first,
        charged,
        compare("sizes", centred.sum(1), variances.sum(1), "rounds"),
        compare("how often each is asked", centred.sum(0), variances.sum(0), "clients"),
        compare(
            "pairs asked together",
            (centred.T @ centred)[clients], (variances.T @ variances)[clients], "pairs",
        ),
        compare(
            "overlap of rounds",
            (centred @ centred.T)[pairs], (variances @ variances.T)[pairs], "pairs of rounds",
        ),
    ]  # fmt: skip


def _bernstein(sums: npt.ArrayLike, variances: npt.ArrayLike) -> Floats:
    """Two-sided bounds on the p-values of sums of independent terms, none larger than one."""
    distance = np.abs(np.atleast_1d(sums))
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.square(distance) / (2 * (np.atleast_1d(variances) + distance / 3))
    return np.asarray(np.minimum(1.0, 2 * np.exp(-np.where(distance > 0, exponent, 0.0))))
