"""Conformance of draws: who was asked, round by round, against the event that was charged.

Whoever was asked is seen at the clients, not at the sampler: what is tested is what happened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, bdtrc, chdtr, chdtrc, gammaln

from fedsim.audit.checks import Check, invariant, normal_p, smallest
from fedsim.privacy import Event

__all__ = ["draw_checks", "each_once"]

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FEWEST = 25.0
"""Expected counts below this are not approximated by a normal."""

MOST_HEAVY = 104.0
"""So many draws, times the kurtosis, make a sum whose tails are normal at seven standard errors."""


@dataclass(frozen=True)
class _Law:
    """What the event says of one round's draw: inclusion, of one and of two together."""

    population: int
    rate: float
    both: float
    fixed: int | None

    @classmethod
    def of(cls, event: Event, population: int) -> _Law:
        if event.sampler == "fixed":
            assert event.size is not None
            m, n = event.size, population
            return cls(n, m / n, m * (m - 1) / (n * max(n - 1, 1)), m)
        return cls(population, event.rate, event.rate**2, None if event.rate < 1 else population)

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
    law = _Law.of(event, population)
    rounds = [np.asarray(ids, dtype=np.int64) for run in draws for ids in run]
    looked = f"{len(rounds):,} rounds over {population:,} {members}"
    checks = [each_once(rounds, population, looked)]
    if checks[0].p_value == 0 or not rounds:
        return checks
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


def each_once(rounds: Sequence[Ids], population: int, looked: str) -> Check:
    """Nobody is asked twice in a round, and nobody who is not in the population."""
    broken = None
    for ids in rounds:
        if len(np.unique(ids)) != len(ids):
            broken = "somebody was asked twice in one round"
        elif len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < population:
            broken = "somebody outside the declared population was asked"
    return invariant("sampler", "who is asked", looked, broken, "nobody twice, and no stranger")


def _sizes(asked: Floats, law: _Law, looked: str) -> Check:
    sizes = asked.sum(1).astype(np.int64)
    spoken = f"{sizes.mean():.2f} a round, from {sizes.min()} to {sizes.max()}"
    if law.fixed is not None:
        broken = None if (sizes == law.fixed).all() else spoken
        return invariant("sampler", "sizes", looked, broken, f"{law.fixed} in every round")
    n = law.population
    p_total = float(_binomial_p(sizes.sum(), n * len(asked), law.rate))
    p = [smallest(_binomial_p(sizes, n, law.rate)), p_total]
    return Check(
        "sampler", "sizes", looked, spoken, f"binomial, {n * law.rate:.2f} a round", smallest(p)
    )


def _spread(asked: Floats, law: _Law, looked: str) -> Check:
    """Sizes must vary as those of independent clients do: no less, and no more."""
    if law.fixed is not None:
        return invariant("sampler", "spread of sizes", looked, None, "none")
    n, q = law.population, law.rate
    variance = n * q * (1 - q)
    ratio = float(np.square(asked.sum(1) - n * q).mean() / variance)
    return Check(
        "sampler", "spread of sizes", looked, f"{math.sqrt(ratio):.3f} of a binomial's std",
        "1, within chi-square bounds", _dispersion_p(ratio, len(asked), variance, q),
    )  # fmt: skip


def _frequencies(asked: Floats, law: _Law, looked: str) -> Check:
    counts = asked.sum(0).astype(np.int64)
    T, q = len(asked), law.rate
    variance = T * q * (1 - q)
    ratio = float(np.square(counts - T * q).mean() / variance)
    p = [smallest(_binomial_p(counts, T, q)), _dispersion_p(ratio, len(counts), variance, q)]
    return Check(
        "sampler", "how often each is asked", looked,
        f"between {counts.min() / T:.4f} and {counts.max() / T:.4f} of the rounds",
        f"{q:.4g}, within binomial bounds", smallest(p),
    )  # fmt: skip


def _together(asked: Floats, law: _Law, looked: str) -> Check:
    """Pairs that are asked together too often, or never."""
    counts = (asked.T @ asked)[np.triu_indices(asked.shape[1], 1)].astype(np.int64)
    p_values = _binomial_p(counts, len(asked), law.both)
    odd = int(p_values.argmin())
    return Check(
        "sampler", "pairs asked together", f"{looked}, {len(counts):,} pairs",
        f"the oddest pair in {counts[odd]} of {len(asked)} rounds",
        f"{len(asked) * law.both:.4g}, within binomial bounds", smallest(p_values),
    )  # fmt: skip


def _overlaps(asked: Floats, law: _Law, looked: str) -> Check:
    """What two rounds have in common, of one run or of two: a draw may not be used again."""
    if len(asked) < 2:
        return invariant("sampler", "overlap of rounds", looked, None, "nothing to compare")
    counts = (asked @ asked.T)[np.triu_indices(len(asked), 1)].astype(np.int64)
    if law.fixed is None:
        p_values = _binomial_p(counts, law.population, law.rate**2)
    else:
        p_values = _hypergeometric_p(counts, law.population, law.fixed)
    odd = int(p_values.argmin())
    return Check(
        "sampler", "overlap of rounds", f"{looked}, {len(counts):,} pairs of rounds",
        f"the oddest two have {counts[odd]} in common",
        f"{law.overlap:.4g}, within what independent draws give", smallest(p_values),
    )  # fmt: skip


def _succession(asked: Floats, law: _Law, lengths: Sequence[int], looked: str) -> Check:
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
    return Check(
        "sampler", "rounds after being asked", f"{looked}, {int(enough.sum())} lags",
        f"{np.abs(scores).max():.2f} standard errors", "0, within normal bounds",
        smallest(normal_p(scores)),
    )  # fmt: skip


def _rhythm(asked: Floats, law: _Law, lengths: Sequence[int], looked: str) -> Check:
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
    p_values = chdtrc(degrees[:, None], sums)
    odd = int(p_values.argmin()) // law.population + 1
    return Check(
        "sampler", "rhythm of each", f"{looked}, {len(powers)} frequencies",
        f"the oddest rhythm is one of {length / odd:.4g} rounds", "none, within chi-square bounds",
        smallest(p_values),
    )  # fmt: skip


def _binomial_p(counts: npt.ArrayLike, trials: int, rate: float) -> Floats:
    """Two-sided p-values of binomial counts, exact."""
    k = np.asarray(counts)
    if rate <= 0 or rate >= 1:
        return np.where(k == round(rate * trials), 1.0, 0.0)
    above = np.where(k > 0, bdtrc(np.maximum(k - 1, 0), trials, rate), 1.0)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(bdtr(k, trials, rate), above)))


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
    return np.asarray(np.minimum(1.0, 2 * np.minimum(below, above)[counts]))


def _dispersion_p(ratio: float, count: int, variance: float, rate: float) -> float:
    """Of a mean of ``count`` squared standardised binomials; matched by a chi-square.

    A binomial of small variance has heavier squares than a normal, which costs degrees.
    """
    excess = (1 - 6 * rate * (1 - rate)) / variance
    degrees = 2 * count / (2 + excess) if excess > -2 else float(count)
    x = ratio * degrees
    return float(min(1.0, 2 * min(chdtr(degrees, x), chdtrc(degrees, x))))
