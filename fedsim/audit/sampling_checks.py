"""Checks of sampling: the clients sampled in each round against the charged event.

The tested cohorts are those that took part in a run, not the sampler's own output. If sampling
probabilities differ by client and round, clients are independent, and Bernstein's inequality
bounds sums of their centred indicators. A sampler that fedsim does not ship is also drawn from
many times on its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc
from scipy.stats import binom, hypergeom

from fedsim.array_types import Floats, Ints
from fedsim.audit.findings import (
    Finding,
    Statistic,
    chi_square,
    counted,
    invariant,
    normal,
    statistical,
    untested,
)
from fedsim.cohorts import Cohort
from fedsim.privacy import Event
from fedsim.privacy.laws import Inclusion
from fedsim.randomness import Draws, Randomness

FEWEST = 25.0
"""Smallest expected count that is approximated by a normal."""

MIN_SHIFTED = 1000.0
"""The same for sums over shifts of ids, of which there are so many that far tails matter."""

MAX_HEAVY = 104.0
"""Rounds per unit of kurtosis from which a sum's tails are normal up to seven std errors."""

REPEATED_DRAWS, REPEATED_ROUNDS = 500, 3
"""Numbers of independent draws, and of rounds of each, of a sampler that fedsim does not ship."""


@dataclass(frozen=True)
class Sampled:
    """Cohorts of all rounds of several runs.

    Attributes
    ----------
    membership : float64 ``[rounds, population]``
        1 if the client was sampled in the round, else 0.
    lengths : sequence of int
        Numbers of rounds of the runs.
    event : Event
        Charged event of a round.
    examined : str
    fault : str or None
        Why a cohort is no sample of the population, if any is not.
    law : Inclusion or None
        Inclusion probabilities of the event's law, if it declares them.
    probabilities : float64 ``[rounds, population]``, optional
        Probabilities of an `InclusionSampler`.
    """

    membership: Floats
    lengths: Sequence[int]
    event: Event
    examined: str
    fault: str | None
    law: Inclusion | None
    probabilities: Floats | None

    @classmethod
    def from_cohorts(
        cls,
        draws: Sequence[Sequence[Ints]],
        event: Event,
        population: int,
        rows: str = "clients",
        probabilities: Floats | None = None,
    ) -> Sampled:
        """Make it from the ids of all runs' rounds, and one run's ``[rounds, population]``.

        Parameters
        ----------
        rows : str
            Plural noun for what is sampled.
        """
        rounds = [np.asarray(ids, dtype=np.int64) for run in draws for ids in run]
        fault, membership = None, np.zeros((len(rounds), population))
        for indicators, ids in zip(membership, rounds, strict=True):
            if len(np.unique(ids)) != len(ids):
                fault = "a client was sampled twice in one round"
            elif len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < population:
                fault = "a client outside the declared population was sampled"
            else:
                indicators[ids] = 1
        lengths = [len(run) for run in draws]
        if probabilities is not None:
            probabilities = np.concatenate([probabilities[:length] for length in lengths])
        examined = f"{len(rounds):,} rounds over {population:,} {rows}"
        law = event.law.inclusion(population)
        return cls(membership, lengths, event, examined, fault, law, probabilities)

    @property
    def client_rates(self) -> bool:
        """Whether each client has its own probability."""
        return self.probabilities is not None

    @property
    def has_law(self) -> bool:
        """Whether there is a law, or there are probabilities, to test."""
        known = self.law is not None or self.client_rates
        return known and not self.fault and len(self.membership) > 0

    @property
    def is_random(self) -> bool:
        """Whether there is a law, and not all clients are sampled in every round."""
        everyone = not self.client_rates and self.law is not None and self.law.single == 1
        return self.has_law and not everyone

    @property
    def equal_rates(self) -> bool:
        """Whether all clients have the same probability."""
        return self.is_random and not self.client_rates

    @property
    def inclusion(self) -> Inclusion:
        """The law, if clients have no probabilities of their own."""
        assert self.law is not None
        return self.law

    def bernstein_finding(self, sums: str, of: str) -> Finding | None:
        """Test sums of centred indicators by Bernstein's inequality; None for equal probabilities.

        Parameters
        ----------
        sums : str
            Subscripts for `numpy.einsum`, of one or two arrays ``[rounds, population]``.
        of : str
            Plural noun for what each sum is about.
        """
        if self.probabilities is None:
            return None
        p = self.probabilities
        arrays = (1 + sums.count(",")) * [self.membership - p]
        # The variance of a product of independent centred terms is the product of variances.
        variances = (1 + sums.count(",")) * [p * (1 - p)]
        of_each, spread = (np.einsum(sums, *terms, optimize=True) for terms in (arrays, variances))
        if of_each.ndim > 1:
            pairs = np.triu_indices(len(of_each), 1)
            of_each, spread = of_each[pairs], spread[pairs]
        errors = np.sqrt(np.maximum(spread, 1e-300))
        compared = Statistic(
            "{} standard errors",
            of_each / errors,
            lambda x, index: _bernstein(x * errors[index], spread[index]),
        )
        return statistical(f"{self.examined}, {of_each.size:,} {of}", compared)


def ids(sampled: Sampled) -> Finding:
    """Whether no client is sampled twice in a round, and none from outside the population."""
    return invariant(sampled.examined, sampled.fault, "none twice, all of the population")


def charged_rate(sampled: Sampled) -> Finding:
    """Whether no probability exceeds the charged rate."""
    assert sampled.probabilities is not None
    highest, rate = float(sampled.probabilities.max()), sampled.event.law.rate
    fault = f"a probability of {highest:.4g}" if highest > rate * (1 + 1e-12) else None
    return invariant(sampled.examined, fault, f"probabilities of at most {rate:.4g}")


def sizes(sampled: Sampled) -> Finding:
    """Whether cohort sizes follow the law."""
    if finding := sampled.bernstein_finding("ij->i", "rounds"):
        return finding
    law, (rounds, n) = sampled.inclusion, sampled.membership.shape
    counts = sampled.membership.sum(1).astype(np.int64)
    if law.size is not None:
        fault = f"{counts.min()} to {counts.max()} a round" if (counts != law.size).any() else None
        return invariant(sampled.examined, fault, f"{law.size} in every round")
    return statistical(
        sampled.examined,
        _binomial("{} in one round", counts, n, law.single),
        _binomial("{} in all rounds", counts.sum(), n * rounds, law.single),
    )


def spread(sampled: Sampled) -> Finding:
    """Whether sizes vary as much as with independently sampled clients, no less and no more."""
    law, (rounds, n) = sampled.inclusion, sampled.membership.shape
    if law.size is not None:
        return invariant(sampled.examined, None, "none")
    variance = n * law.single * (1 - law.single)
    ratio = float(np.square(sampled.membership.sum(1) - n * law.single).mean() / variance)
    compared = _dispersion("a std of {} of a binomial's", ratio, rounds, variance, law.single)
    return statistical(sampled.examined, compared)


def frequencies(sampled: Sampled) -> Finding:
    """Whether each client is sampled as often as the law says."""
    if finding := sampled.bernstein_finding("ij->j", "clients"):
        return finding
    rounds, n = sampled.membership.shape
    counts, q = sampled.membership.sum(0), sampled.inclusion.single
    variance = rounds * q * (1 - q)
    ratio = float(np.square(counts - rounds * q).mean() / variance)
    return statistical(
        sampled.examined,
        _binomial("one in {} rounds", counts, rounds, q),
        _dispersion("a std of {} of binomial counts'", ratio, n, variance, q),
    )


def together(sampled: Sampled) -> Finding:
    """Whether pairs of clients are sampled together as often as the law says."""
    if finding := sampled.bernstein_finding("ij,ik->jk", "pairs"):
        return finding
    rounds, n = sampled.membership.shape
    counts = (sampled.membership.T @ sampled.membership)[np.triu_indices(n, 1)]
    compared = _binomial("one pair in {} rounds", counts, rounds, sampled.inclusion.pair)
    return statistical(f"{sampled.examined}, {len(counts):,} pairs", compared)


def overlaps(sampled: Sampled) -> Finding:
    """Whether any two rounds, of one or two runs, have more clients in common than by chance."""
    rounds, n = sampled.membership.shape
    if rounds < 2:
        return untested(sampled.examined, "only one round")
    if finding := sampled.bernstein_finding("ij,kj->ik", "pairs of rounds"):
        return finding
    law = sampled.inclusion
    counts = (sampled.membership @ sampled.membership.T)[np.triu_indices(rounds, 1)]
    compared = _binomial("two rounds have {} in common", counts, n, law.single**2)
    if law.size is not None:
        m = law.size
        compared = replace(
            compared, p_values_at=lambda k, _: _hypergeometric_p(k.astype(np.int64), n, m)
        )
    return statistical(f"{sampled.examined}, {len(counts):,} pairs of rounds", compared)


def succession(sampled: Sampled) -> Finding:
    """Whether being sampled changes later odds, of the client or of clients some ids away."""
    law, n, longest = sampled.inclusion, sampled.membership.shape[1], max(sampled.lengths)
    q = law.single
    centred = (sampled.membership - q) / math.sqrt(q * (1 - q))
    # Sums of products of rounds a lag apart and clients a shift apart, by the convolution theorem;
    # zero padding keeps the last rounds and ids apart from the first.
    shape, overlap = (2 * longest, 2 * n), np.concatenate([np.arange(n, 0, -1), np.arange(n)])
    totals, products = np.zeros((2, longest, 2 * n))
    start = 0
    for length in sampled.lengths:
        spectrum = np.fft.rfft2(centred[start : start + length], s=shape)
        totals += np.fft.irfft2(np.square(np.abs(spectrum)), s=shape)[:longest]
        products += np.maximum(length - np.arange(longest), 0)[:, None] * overlap
        start += length
    # In cohorts of fixed size clients have a correlation of -1 / (n - 1), which adds variance.
    factor = 1.0 if law.size is None else n / max(n - 1, 1)
    scores = totals / np.sqrt(np.maximum(products, 1) * factor)
    expected = products * min(q, 1 - q) ** 2  # both sampled, or neither, whichever is rarer
    at_lags = scores[1:, 0][expected[1:, 0] >= FEWEST]
    at_shifts = scores[1:, 1:][expected[1:, 1:] >= MIN_SHIFTED]
    return statistical(
        f"{sampled.examined}, {at_lags.size} lags, {at_shifts.size:,} lags and shifts of ids",
        normal("{} standard errors", at_lags),
        normal("{} standard errors, some ids away", at_shifts),
    )


def periodicity(sampled: Sampled) -> Finding:
    """Whether a client is sampled periodically, such as in every second round at twice the rate."""
    q = sampled.inclusion.single
    length, variance = max(sampled.lengths), q * (1 - q)
    # The tails of sums of few rare draws are heavier than normal, depending on kurtosis.
    if length < MAX_HEAVY * abs(1 - 6 * variance) / variance or length < FEWEST:
        return untested(sampled.examined, "too few rounds")
    stops = np.cumsum(sampled.lengths)[np.array(sampled.lengths) == length]
    runs = [sampled.membership[stop - length : stop] for stop in stops]
    # For independent draws, the power at each frequency is a chi-square with two degrees; with one
    # at the highest frequency (every second round).
    spectra = [np.square(np.abs(np.fft.rfft(run - q, axis=0)))[1:] for run in runs]
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
    return statistical(f"{sampled.examined}, {len(powers)} frequencies", named)


def _binomial(words: str, counts: npt.ArrayLike, trials: int, rate: float) -> Statistic:
    """Statistic of binomial counts."""
    return counted(words, counts, lambda k: _binomial_p(k, trials, rate), trials * rate)


def _binomial_p(counts: npt.ArrayLike, trials: int, rate: float) -> Floats:
    """Two-sided p-values of binomial counts, exact."""
    return _two_sided(binom(trials, rate), np.asarray(counts))


def _hypergeometric_p(counts: Ints, n: int, m: int) -> Floats:
    """Two-sided p-values of the overlap of two samples of m out of n."""
    # Computed once for each of the few values: there are many pairs, and each p-value is a sum.
    p_values = _two_sided(hypergeom(n, m, m), np.arange(m + 1))
    return np.asarray(np.where(counts <= m, p_values[np.clip(counts, 0, m)], 0.0))


def _two_sided(law: Any, counts: npt.NDArray[Any]) -> Floats:
    return np.asarray(np.minimum(1.0, 2 * np.minimum(law.cdf(counts), law.sf(counts - 1))))


def _dispersion(words: str, ratio: float, count: int, variance: float, rate: float) -> Statistic:
    """Statistic of a mean of ``count`` squared standardised binomials, as a chi-square.

    Binomials of small variance have heavier squares than normals: the degrees are reduced.
    """
    excess = (1 - 6 * rate * (1 - rate)) / variance
    degrees = 2 * count / (2 + excess) if excess > -2 else float(count)
    return chi_square(words, [ratio * degrees], degrees)


def _bernstein(sums: Floats, variances: Floats) -> Floats:
    """Bounds on two-sided p-values of sums of independent terms of size at most one."""
    distance = np.abs(sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.square(distance) / (2 * (variances + distance / 3))
    return np.asarray(np.minimum(1.0, 2 * np.exp(-np.where(distance > 0, exponent, 0.0))))


def declared_law(sampler: Cohort, event: Event, rounds: int, seed: int) -> Finding:
    """Whether a sampler that fedsim does not ship samples rows as often as its law declares.

    A run has few rounds, which may depend on each other. So the sampler itself is drawn from many
    times, each time from its start and with new random numbers. A law that does not declare
    inclusion probabilities has at least a rate, which no row may exceed.

    Parameters
    ----------
    sampler : Cohort
        The sampler, with a population; its state is not changed.
    event : Event
        Charged event of a round.
    rounds : int
        Rounds of a run, of which the first few are drawn.
    """
    population, rounds = sampler.population or 0, min(rounds, REPEATED_ROUNDS)
    membership = np.zeros((REPEATED_DRAWS, rounds, population))
    for run, indicators in enumerate(membership):
        fresh = copy.deepcopy(sampler)
        draws = Draws(Randomness(seed + run), level="client", amplified=False)
        for index in range(rounds):
            ids = np.asarray(fresh.draw(index + 1, draws), dtype=np.int64)
            indicators[index, ids[(ids >= 0) & (ids < population)]] = 1
    inclusion = event.law.inclusion(population)
    examined = f"{REPEATED_DRAWS} draws of {rounds} rounds over {population:,} clients"
    rate = event.law.rate if inclusion is None else inclusion.single

    def p_of(counts: Floats) -> Floats:
        p_values = _binomial_p(counts, REPEATED_DRAWS, rate)
        # Without declared probabilities the rate is only an upper bound: fewer are no violation.
        return np.where((counts <= rate * REPEATED_DRAWS) & (inclusion is None), 1.0, p_values)

    words = f"one client in {{}} of {REPEATED_DRAWS} draws of a round"
    compared = [counted(words, membership.sum(0), p_of, rate * REPEATED_DRAWS)]
    if inclusion is not None:
        first = membership[:, 0]
        counts = (first.T @ first)[np.triu_indices(population, 1)]
        words = f"one pair in {{}} of {REPEATED_DRAWS} draws of a round"
        compared.append(_binomial(words, counts, REPEATED_DRAWS, inclusion.pair))
    return statistical(examined, *compared)
