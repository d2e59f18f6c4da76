"""Checks of released noise: over a whole run it must be white, normal and never repeated.

Tests do not look for a particular bug. They ask whether rounds, coordinates, directions, layers
and runs are independent, of the same size, and of the right distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.fft import dct
from scipy.special import log_ndtr, ndtr, ndtri

from fedsim.array_types import Floats
from fedsim.audit.findings import (
    Finding,
    Statistic,
    chi_square,
    correlations,
    counts_in_bins,
    invariant,
    normal,
    statistical,
    untested,
)

MIN_PRODUCTS = 4096
"""Sums of fewer products are not normal enough for tails of 1e-9."""
REPEAT_RESOLUTION = 1e8
MIN_VALUES = 16
"""Correlations of fewer values are not tested."""


@dataclass(frozen=True)
class NoiseSample:
    """Releases that consist of noise only.

    Attributes
    ----------
    z : float64 ``[runs, rounds, d]``
        Noise, standard normal if the claim is true.
    layers : sequence of slice
        Columns of each layer.
    examined : str
    sizes : float64 ``[runs, rounds]``, optional
        Cohort sizes, on which the noise must not depend.
    """

    z: Floats
    layers: Sequence[slice]
    examined: str
    sizes: Floats | None = None

    @classmethod
    def from_noise(
        cls, z: Floats, layers: Sequence[slice], sizes: Floats | None = None
    ) -> NoiseSample:
        """Make a sample with a description of its size."""
        runs, rounds, d = z.shape
        return cls(z, layers, f"{runs} x {rounds} rounds of {d:,} coordinates", sizes)

    @property
    def rows(self) -> Floats:
        """Rounds of all runs, ``[n, d]``."""
        return self.z.reshape(-1, self.z.shape[-1])


def presence(units: Floats) -> Finding:
    """Whether every round has noise: ``units [runs, rounds, d]``."""
    runs, rounds, _ = units.shape
    without = (units == 0).all(2)
    fault = None if np.isfinite(units).all() else "a number that is not finite"
    if without.any():
        first = int(np.nonzero(without.any(0))[0][0]) + 1
        fault = fault or (
            f"{int(without.sum())} releases without any noise, the first of them in round {first}"
        )
    return invariant(f"{runs} x {rounds} releases", fault, "noise in every release")


def round_sizes(noise: NoiseSample) -> Finding:
    """Whether noise has the claimed size in every round."""
    return statistical(noise.examined, _size(noise.z, -1))


def coordinate_sizes(noise: NoiseSample) -> Finding:
    """Whether noise has the claimed size in every coordinate."""
    return statistical(noise.examined, _size(noise.z, (0, 1)))


def _size(z: Floats, axes: int | tuple[int, int]) -> Statistic:
    sums = np.square(z).sum(axes)
    return chi_square("a std of {} of the claimed", sums, z.size / sums.size)


def layer_sizes(noise: NoiseSample) -> Finding:
    """Whether noise has the claimed size in every layer."""
    z, layers = noise.z, noise.layers
    sums = np.stack([np.square(z[:, :, columns]).sum(-1) for columns in layers])
    counts = np.array([columns.stop - columns.start for columns in layers], dtype=np.float64)
    degrees = np.broadcast_to(counts[:, None, None], sums.shape)
    in_all = counts * z.shape[0] * z.shape[1]
    return statistical(
        f"{noise.examined}, {len(layers)} layers",
        chi_square("a std of {} of the claimed in one round", sums, degrees),
        chi_square("a std of {} of the claimed over all rounds", sums.sum((1, 2)), in_all),
    )


def direction_sizes(noise: NoiseSample) -> Finding:
    """Whether noise has the claimed size along directions that mix coordinates.

    The directions are those of the cosine transform of all coordinates and of each layer's, and
    of the Hadamard transform: sums, differences, alternating signs, blocks.
    """
    rows, layers = noise.rows, noise.layers
    transformed = [dct(rows, norm="ortho", axis=-1), _hadamard(rows)]
    if len(layers) > 1:
        transformed += [dct(rows[:, columns], norm="ortho", axis=-1) for columns in layers]
    sums = np.concatenate([np.square(values).sum(0) for values in transformed])
    compared = chi_square("a std of {} of the claimed along one", sums, len(rows))
    return statistical(f"{noise.examined}, {len(sums):,} projections", compared)


def _hadamard(rows: Floats) -> Floats:
    """Orthonormal Walsh-Hadamard transform of the first ``2^k`` columns."""
    width = 1 << (rows.shape[1].bit_length() - 1)
    values = rows[:, :width].copy()
    half = 1
    while half < width:
        pairs = values.reshape(len(rows), -1, 2, half)
        values = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    return np.asarray(values.reshape(len(rows), width) / math.sqrt(width))


def means(noise: NoiseSample) -> Finding:
    """Whether the noise has mean zero."""
    runs, rounds, d = noise.z.shape
    scores = noise.z.sum((0, 1)) / math.sqrt(runs * rounds)
    return statistical(
        noise.examined,
        normal("{} standard errors in one coordinate", scores),
        normal("{} standard errors in one round", noise.z.sum(-1) / math.sqrt(d)),
        normal("{} standard errors over all", [scores.sum() / math.sqrt(d)]),
    )


def accumulated(noise: NoiseSample) -> Finding:
    """Whether sums over rounds grow as with independent rounds: nothing cancels or repeats."""
    _, rounds, d = noise.z.shape
    sums = np.square(np.cumsum(noise.z, axis=1)).sum(-1) / np.arange(1, rounds + 1)
    words = "a sum with a std of {} of that of independent rounds"
    return statistical(noise.examined, chi_square(words, sums, d))


def extremes(noise: NoiseSample) -> Finding:
    """Whether the largest values are neither too large nor too small for N normals."""
    z = noise.z

    def p(largest: Floats, _: object) -> Floats:
        expected = z.size * np.exp(log_ndtr(-largest))
        too_large, too_small = -np.expm1(-expected), np.exp(-expected)
        return np.asarray(np.minimum(1.0, 2 * np.minimum(too_large, too_small)))

    largest, usual = np.array([z.max(), -z.min()]), -float(ndtri(0.7 / z.size))
    words = "the largest value on one side is {} std"
    return statistical(noise.examined, Statistic(words, largest, p, usual))


def shape(noise: NoiseSample) -> Finding:
    """Whether counts of values in bins, finer in the tails, fit a normal."""
    z = noise.z
    tails = np.array([1e-5, 1e-4, 1e-3, 5e-3, 1e-2])
    edges = np.concatenate([tails, np.linspace(0.02, 0.98, 49), 1 - tails[::-1]])
    # Bins with small expected counts are left out, as Pearson's statistic needs normal counts.
    edges = edges[np.minimum(edges, 1 - edges) * z.size >= 20]
    expected = np.diff(np.concatenate([[0.0], edges, [1.0]])) * z.size
    counts = np.bincount(np.searchsorted(ndtri(edges), z.ravel()), minlength=len(expected))
    compared = [counts_in_bins(counts, expected)] if len(expected) > 2 else []
    return statistical(f"{noise.examined}, {len(expected)} bins", *compared)


def repeats(values: Floats, examined: str) -> Finding:
    """Whether no three neighbouring values occur again, up to their signs."""
    # Mantissas are compared, to find noise that is reused at half or twice the size too.
    mantissas = np.round(np.frexp(np.abs(values))[0] * REPEAT_RESOLUTION).astype(np.uint64)
    if mantissas.shape[-1] < 3:
        mantissas = mantissas.reshape(*mantissas.shape[:-2], -1)
    # A hash of each triple: products with odd constants, modulo 2^64.
    factors = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
    width = mantissas.shape[-1] - 2
    keys = np.zeros(1, dtype=np.uint64)
    for offset, factor in enumerate(factors):
        keys = keys + mantissas[..., offset : offset + width] * np.uint64(factor)
    again = keys.size - np.unique(keys).size
    fault = f"{again:,} values occur again" if again else None
    return invariant(examined, fault, "no value occurs again")


def exact_repeats(noise: NoiseSample) -> Finding:
    """Whether no three neighbouring values of noise occur again."""
    return repeats(noise.z, noise.examined)


def round_pairs(noise: NoiseSample) -> Finding:
    """Whether all pairs of rounds are uncorrelated, each and together."""
    return pairs(noise.rows, noise.examined)


def round_pairs_without_signs(noise: NoiseSample) -> Finding:
    """Whether absolute values are uncorrelated: finds reuse with other signs, or a common scale.

    They are made normal scores first: correlations of skewed values have another distribution.
    """
    scores = ndtri(1 - 2 * ndtr(-np.abs(noise.rows)))
    return pairs(np.clip(scores, -9.0, 9.0), noise.examined)  # none infinite


def coordinate_pairs(noise: NoiseSample) -> Finding:
    """Whether all pairs of coordinates are uncorrelated; finds coordinates that share noise."""
    return pairs(noise.rows.T, noise.examined, "rounds to compare coordinates")


def pairs(rows: Floats, examined: str, few: str = "coordinates to compare rounds") -> Finding:
    """Whether all pairs of ``rows [n, d]`` are uncorrelated, each and together."""
    if rows.shape[1] < MIN_VALUES:
        return untested(examined, f"too few {few}")
    count = len(rows) * (len(rows) - 1) // 2
    return statistical(f"{examined}, {count:,} pairs", *correlations_of_rows(rows))


def correlations_of_rows(rows: Floats) -> list[Statistic]:
    """Correlations of all pairs of ``rows [n, d]``: the largest, the sum of squares, the sum."""
    n, d = rows.shape
    pairs = n * (n - 1) // 2
    if not pairs:
        return []
    norms = np.maximum(np.linalg.norm(rows, axis=1), 1e-300)
    r = rows @ rows.T
    r /= norms[:, None]
    r /= norms
    np.fill_diagonal(r, 0.0)
    worst = float(r.flat[int(np.abs(r).argmax())])
    largest = correlations("correlation {} of one pair", [worst], d)
    squares = d * float(np.square(r).sum()) / 2
    mean = r.sum() / 2 * math.sqrt(d / pairs)
    return [
        replace(largest, count=pairs),
        chi_square("correlations of {} times the size of independent ones", [squares], pairs),
        normal("{} standard errors of the mean correlation", [mean]),
    ]


def shifts(noise: NoiseSample) -> Finding:
    """Whether noise is uncorrelated with itself at every shift of rounds and coordinates."""
    runs, rounds, d = noise.z.shape
    # Convolution theorem, with zero padding to twice the size: otherwise shifts would wrap around
    # and mix the last rounds with the first.
    total = np.zeros((rounds, 2 * d))
    for run in noise.z:
        spectrum = np.fft.rfft2(run, s=(2 * rounds, 2 * d))
        total += np.fft.irfft2(np.square(np.abs(spectrum)), s=(2 * rounds, 2 * d))[:rounds]
    shift = np.arange(2 * d)
    overlap = np.maximum(d - np.minimum(shift, 2 * d - shift), 0)
    products = runs * (rounds - np.arange(rounds))[:, None] * overlap
    scores = total / np.sqrt(np.maximum(products, 1))
    scores[0, d:] = 0  # within a round, a negative shift gives the same products as a positive one
    enough = products >= MIN_PRODUCTS
    enough[0, 0] = enough[0, d:] = False
    scores[~enough] = 0
    lag, step = np.unravel_index(int(np.abs(scores).argmax()), scores.shape)
    signed, count = int(step) - 2 * d * (step > d), int(enough.sum())
    words = f"{{}} standard errors at a shift of {lag} rounds and {signed} coordinates"
    one = replace(normal(words, [scores[lag, step]]), count=count)
    # A value that is the same in every round shows at all shifts of rounds, weakly at each.
    by_round = normal("{} standard errors at a shift of rounds", scores[1:, 0][enough[1:, 0]])
    return statistical(f"{noise.examined}, {count:,} shifts", *[one, by_round][: 2 * count])


def against_sizes(noise: NoiseSample) -> Finding:
    """Whether rounds with larger cohorts have more or less noise."""
    sizes = noise.sizes
    if sizes is None or noise.z.shape[1] <= 9 or sizes.std() == 0:
        return untested(noise.examined, "too few cohorts, or all of one size")
    power = np.square(noise.z).sum(-1).ravel()
    power = (power - power.mean()) / max(float(power.std()), 1e-300)
    cohort = (sizes.ravel() - sizes.mean()) / sizes.std()
    # Both means are estimated, so the degrees are those of n - 1 pairs with known means.
    compared = correlations("correlation {}", [float((power * cohort).mean())], power.size - 1)
    return statistical(noise.examined, compared)
