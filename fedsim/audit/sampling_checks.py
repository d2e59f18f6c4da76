"""Conformance of draws: who was sampled, round by round, against the event that was charged.

The samples are those that clients were asked in, not the sampler's: what is tested is what
happened. Where probabilities differ by client and by round, each row is in independently with one
of its own, so that centred indicators add up to numbers that Bernstein's inequality bounds. A
sampler that fedsim does not ship is, besides, drawn from many times on its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, bdtrc, chdtrc, gammaln

from fedsim.audit.checks import (
    Check,
    Floats,
    Ids,
    Statistic,
    chi_square,
    counted,
    invariant,
    normal,
    statistical,
)
from fedsim.cohorts import Cohort
from fedsim.privacy import Event
from fedsim.privacy.laws import Inclusion
from fedsim.randomness import Draws, Randomness

FEWEST = 25.0
"""Expected counts below this are not approximated by a normal."""

MOST_HEAVY = 104.0
"""So many draws, times the kurtosis, make a sum whose tails are normal at seven standard errors."""

REPEATED_DRAWS, REPEATED_ROUNDS = 500, 3
"""Of a sampler that fedsim does not ship: independent draws, of so many rounds each."""


@dataclass(frozen=True)
class _Sampled:
    """Who was in: 1 or 0, ``asked [rounds, population]``, of runs of these ``lengths``."""

    asked: Floats
    lengths: Sequence[int]
    looked_at: str
    valid: Check

    @classmethod
    def of(cls, draws: Sequence[Sequence[Ids]], population: int, rows: str) -> _Sampled:
        rounds = [np.asarray(ids, dtype=np.int64) for run in draws for ids in run]
        looked = f"{len(rounds):,} rounds over {population:,} {rows}"
        broken, asked = None, np.zeros((len(rounds), population))
        for indicators, ids in zip(asked, rounds, strict=True):
            if len(np.unique(ids)) != len(ids):
                broken = "a client was sampled twice in one round"
            elif len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < population:
                broken = "a client outside the declared population was sampled"
            else:
                indicators[ids] = 1
        valid = invariant(
            "sampler", "sampled ids", looked, broken, "none twice, all of the population"
        )
        return cls(asked, [len(run) for run in draws], looked, valid)


def draw_checks(
    draws: Sequence[Sequence[Ids]], event: Event, population: int, rows: str = "clients"
) -> list[Check]:
    """Every test of the draws of several runs.

    Parameters
    ----------
    draws : sequence of runs, each a sequence of int64 arrays
        Ids of each round, in the order in which they were asked.
    event : Event
        What each round was charged as.
    population : int
    rows : str
        What is drawn, in the plural.
    """
    sampled = _Sampled.of(draws, population, rows)
    inclusion = event.law.inclusion(population)
    if not sampled.valid.p_value or not len(sampled.asked) or inclusion is None:
        return [sampled.valid]
    checks = [sampled.valid, _sizes(sampled, inclusion)]
    if inclusion.one == 1:
        return checks
    tests = (_spread, _frequencies, _together, _overlaps, _succession, _rhythm)
    return [*checks, *(test(sampled, inclusion) for test in tests)]


def _sizes(sampled: _Sampled, law: Inclusion) -> Check:
    looked = sampled.looked_at
    rounds, n = sampled.asked.shape
    sizes = sampled.asked.sum(1).astype(np.int64)
    if law.size is not None:
        broken = f"{sizes.min()} to {sizes.max()} a round" if (sizes != law.size).any() else None
        return invariant("sampler", "sizes", looked, broken, f"{law.size} in every round")
    q = law.one
    return statistical(
        "sampler", "sizes", looked,
        [
            counted("{} in one round", sizes, lambda k: _binomial_p(k, n, q), n * q),
            counted(
                "{} in all rounds", [sizes.sum()],
                lambda k: _binomial_p(k, n * rounds, q), n * q * rounds,
            ),
        ],
    )  # fmt: skip


def _spread(sampled: _Sampled, law: Inclusion) -> Check:
    """Sizes must vary as those of independent clients do: no less, and no more."""
    if law.size is not None:
        return invariant("sampler", "spread of sizes", sampled.looked_at, None, "none")
    rounds, n = sampled.asked.shape
    variance = n * law.one * (1 - law.one)
    ratio = float(np.square(sampled.asked.sum(1) - n * law.one).mean() / variance)
    compared = _dispersion("a std of {} of a binomial's", ratio, rounds, variance, law.one)
    return statistical("sampler", "spread of sizes", sampled.looked_at, [compared])


def _frequencies(sampled: _Sampled, law: Inclusion) -> Check:
    rounds, n = sampled.asked.shape
    counts, q = sampled.asked.sum(0), law.one
    variance = rounds * q * (1 - q)
    ratio = float(np.square(counts - rounds * q).mean() / variance)
    return statistical(
        "sampler", "inclusion frequencies", sampled.looked_at,
        [
            counted("one in {} rounds", counts, lambda k: _binomial_p(k, rounds, q), rounds * q),
            _dispersion("a std of {} of binomial counts'", ratio, n, variance, q),
        ],
    )  # fmt: skip


def _together(sampled: _Sampled, law: Inclusion) -> Check:
    """Pairs that are sampled together too often, or never."""
    rounds, n = sampled.asked.shape
    counts = (sampled.asked.T @ sampled.asked)[np.triu_indices(n, 1)]
    compared = counted(
        "one pair in {} rounds", counts,
        lambda k: _binomial_p(k, rounds, law.two), rounds * law.two,
    )  # fmt: skip
    looked = f"{sampled.looked_at}, {len(counts):,} pairs"
    return statistical("sampler", "pairs sampled together", looked, [compared])


def _overlaps(sampled: _Sampled, law: Inclusion) -> Check:
    """What two rounds have in common, of one run or of two: a draw may not be used again."""
    rounds, n = sampled.asked.shape
    if rounds < 2:
        return invariant("sampler", "overlap of rounds", sampled.looked_at, None, "only one round")
    counts = (sampled.asked @ sampled.asked.T)[np.triu_indices(rounds, 1)]

    def p_of(k: Floats) -> Floats:
        if law.size is None:
            return _binomial_p(k, n, law.one**2)
        return _hypergeometric_p(k.astype(np.int64), n, law.size)

    compared = counted("two rounds have {} in common", counts, p_of, n * law.one**2)
    looked = f"{sampled.looked_at}, {len(counts):,} pairs of rounds"
    return statistical("sampler", "overlap of rounds", looked, [compared])


def _succession(sampled: _Sampled, law: Inclusion) -> Check:
    """Whether being sampled now changes the odds of being sampled some rounds later."""
    q, n = law.one, sampled.asked.shape[1]
    centred = (sampled.asked - q) / math.sqrt(q * (1 - q))
    totals, products = np.zeros((2, max(sampled.lengths)))
    start = 0
    for length in sampled.lengths:
        run = centred[start : start + length]
        gram = run @ run.T
        for lag in range(1, length):
            totals[lag] += np.trace(gram, lag)
            products[lag] += (length - lag) * n
        start += length
    enough = products * q**2 >= FEWEST
    # Under a fixed size the clients of a round are slightly dependent: 1 / (n - 1) apart.
    factor = 1.0 if law.size is None else n / max(n - 1, 1)
    scores = totals[enough] / np.sqrt(products[enough] * factor)
    looked = f"{sampled.looked_at}, {int(enough.sum())} lags"
    compared = normal("{} standard errors", scores)
    return statistical("sampler", "rounds after being sampled", looked, [compared])


def _rhythm(sampled: _Sampled, law: Inclusion) -> Check:
    """Whether a client is sampled periodically: every second round, say, at twice the rate."""
    length, variance = max(sampled.lengths), law.one * (1 - law.one)
    # Sums of few rare draws have heavier tails than normal ones, by their kurtosis.
    if length < MOST_HEAVY * abs(1 - 6 * variance) / variance or length < FEWEST:
        return invariant("sampler", "periodicity", sampled.looked_at, None, "too few rounds")
    stops = np.cumsum(sampled.lengths)[np.array(sampled.lengths) == length]
    runs = [sampled.asked[stop - length : stop] for stop in stops]
    # Of independent draws a run's spectrum has at each frequency a chi-square of two degrees, at
    # the highest (every second round) of one.
    spectra = [np.square(np.abs(np.fft.rfft(run - law.one, axis=0)))[1:] for run in runs]
    degrees = np.full((len(spectra[0]), 1), 2.0 * len(runs))
    if length % 2 == 0:
        degrees[-1] /= 2
    powers = np.sum(spectra, axis=0) / (length * variance * len(runs))
    n = powers.shape[1]

    def p(ratios: Floats, index: int | slice) -> Floats:
        k = np.repeat(degrees, n)[index]
        return np.asarray(chdtrc(k, np.maximum(ratios, 0.0) * k))

    compared = Statistic("a power of {}", powers.ravel(), p)
    frequency = int(compared.p_values.argmin()) // n + 1
    named = replace(compared, words=f"a power of {{}} every {length / frequency:.4g} rounds")
    looked = f"{sampled.looked_at}, {len(powers)} frequencies"
    return statistical("sampler", "periodicity", looked, [named])


def _binomial_p(counts: npt.ArrayLike, trials: int, rate: float) -> Floats:
    """Two-sided p-values of binomial counts, exact."""
    k = np.asarray(counts)
    if rate <= 0 or rate >= 1:
        return np.where(k == round(rate * trials), 1.0, 0.0)
    possible = np.minimum(k, trials)
    above = np.where(k > 0, bdtrc(np.maximum(possible - 1, 0), trials, rate), 1.0)
    p_values = np.minimum(1.0, 2 * np.minimum(bdtr(possible, trials, rate), above))
    return np.asarray(np.where(k > trials, 0.0, p_values))


def _hypergeometric_p(counts: Ids, n: int, m: int) -> Floats:
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
    """Sizes, frequencies, pairs and overlaps against what an `InclusionSampler` says of each.

    Parameters
    ----------
    draws : sequence of runs, each a sequence of int64 arrays
    probabilities : float64 ``[rounds, population]``
        Of one run; the same for all.
    event : Event
        What each round was charged as.
    """
    population = probabilities.shape[1]
    sampled = _Sampled.of(draws, population, "clients")
    looked, highest = sampled.looked_at, float(probabilities.max())
    charged = invariant(
        "sampler", "charged rate", looked,
        f"a probability of {highest:.4g}" if highest > event.law.rate * (1 + 1e-12) else None,
        f"probabilities of at most {event.law.rate:.4g}",
    )  # fmt: skip
    if not sampled.valid.p_value:
        return [sampled.valid, charged]
    p = np.concatenate([probabilities[:length] for length in sampled.lengths])
    centred, variances = sampled.asked - p, p * (1 - p)

    def compare(name: str, sums: Floats, spread: Floats, of: str) -> Check:
        sums, spread = sums.ravel(), spread.ravel()
        errors = np.sqrt(np.maximum(spread, 1e-300))
        compared = Statistic(
            "{} standard errors", sums / errors,
            lambda x, index: _bernstein(x * errors[index], spread[index]),
        )  # fmt: skip
        return statistical("sampler", name, f"{looked}, {sums.size:,} {of}", [compared])

    clients, pairs = np.triu_indices(population, 1), np.triu_indices(len(p), 1)
    return [
        sampled.valid,
        charged,
        compare("sizes", centred.sum(1), variances.sum(1), "rounds"),
        compare("inclusion frequencies", centred.sum(0), variances.sum(0), "clients"),
        compare(
            "pairs sampled together",
            (centred.T @ centred)[clients], (variances.T @ variances)[clients], "pairs",
        ),
        compare(
            "overlap of rounds",
            (centred @ centred.T)[pairs], (variances @ variances.T)[pairs], "pairs of rounds",
        ),
    ]  # fmt: skip


def _bernstein(sums: Floats, variances: Floats) -> Floats:
    """Two-sided bounds on the p-values of sums of independent terms, none larger than one."""
    distance = np.abs(sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.square(distance) / (2 * (variances + distance / 3))
    return np.asarray(np.minimum(1.0, 2 * np.exp(-np.where(distance > 0, exponent, 0.0))))


def declared_law_check(sampler: Cohort, event: Event, rounds: int, seed: int) -> Check:
    """Whether a sampler that fedsim does not ship draws rows as often as its law declares.

    A run has few rounds, and its rounds may depend on one another: the sampler itself is drawn
    from many times, each from its beginning and with other random numbers. A law that says nothing
    of inclusion says at least its rate, which no row may be above.

    Parameters
    ----------
    sampler : Cohort
        With a population; its own state is left as it is.
    event : Event
        What a round is charged as.
    rounds : int
        Of a run, of which the first few are drawn.
    """
    population, rounds = sampler.population or 0, min(rounds, REPEATED_ROUNDS)
    asked = np.zeros((REPEATED_DRAWS, rounds, population))
    for run, indicators in enumerate(asked):
        fresh = copy.deepcopy(sampler)
        draws = Draws(Randomness(seed + run), level="client", amplified=False)
        for index in range(rounds):
            ids = np.asarray(fresh.draw(index + 1, draws), dtype=np.int64)
            indicators[index, ids[(ids >= 0) & (ids < population)]] = 1
    inclusion = event.law.inclusion(population)
    looked = f"{REPEATED_DRAWS} draws of {rounds} rounds over {population:,} clients"
    rate = event.law.rate if inclusion is None else inclusion.one

    def p_of(counts: Floats) -> Floats:
        p_values = _binomial_p(counts, REPEATED_DRAWS, rate)
        # Without marginals the rate is an upper bound: fewer draws are no violation.
        return np.where((counts <= rate * REPEATED_DRAWS) & (inclusion is None), 1.0, p_values)

    words = f"one client in {{}} of {REPEATED_DRAWS} draws of a round"
    compared = [counted(words, asked.sum(0), p_of, rate * REPEATED_DRAWS)]
    if inclusion is not None:
        first = asked[:, 0]
        compared.append(
            counted(
                f"one pair in {{}} of {REPEATED_DRAWS} draws of a round",
                (first.T @ first)[np.triu_indices(population, 1)],
                lambda k: _binomial_p(k, REPEATED_DRAWS, inclusion.two),
                inclusion.two * REPEATED_DRAWS,
            )
        )
    return statistical("sampler", "declared inclusion probabilities", looked, compared)
