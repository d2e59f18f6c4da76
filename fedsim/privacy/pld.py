"""Privacy loss distributions (PLDs) of dominating pairs, and their composition.

A loss distribution has its support on the grid ``h * integers``. A release is discretised by
the Connect-the-Dots rule (Doroshenko, Ghazi, Kamath, Kumar & Manurangsi 2022), which gives an
upper bound on the true curve for any ``h``. Compositions are products of Fourier transforms, as
in dp-accounting, which the tests compare with. The order of work differs: each *distinct*
release is transformed once, and its transform is cached. Composing 10,000 rounds, or the next
round of a run, then costs one inverse transform. Epsilon needs even less: after many releases all
but a few low frequencies have vanished, and the inverse transform is taken over those alone, so
that it takes as long after 20,000 rounds as after ten.

Both directions (removing a row, adding one) are composed; the larger epsilon counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedsim.array_types import Floats
from fedsim.privacy.losses import DiscretePair, DominatingPair

Complex = npt.NDArray[np.complex128]
Pairs: TypeAlias = tuple[DominatingPair, DominatingPair]
"""Dominating pairs of both directions of one release: a row removed, and a row added."""

# Mass that a composition may have outside of its window, on each side; it counts as an infinite
# loss.
WINDOW_TAIL = 1e-15
# Rounding error of a composition's mass, for each release in it.
FLOAT64_ROUNDING = 2.0**-53
# Steps of the grid in one standard deviation of the loss: relative error of epsilon about
# 1 / (12 * 40^2), far below 1e-4, for any number of rounds.
STEPS_PER_STD = 40
MAX_STEP, MIN_STEP = 0.02, 1e-12
MAX_POINTS = 2**19
MAX_WINDOW_POINTS = 2**22
MAX_PROFILE_POINTS = 2**12


@dataclass(frozen=True)
class _GridLosses:
    """One direction of one release: probability ``probs[i]`` of loss ``(start + i) * h``."""

    start: int
    probs: Floats
    infinite: float


def composed_epsilon(counts: Mapping[Pairs, int], delta: float) -> float:
    """Epsilon at ``delta`` of ``counts[p]`` releases of each pair p."""
    return _composed_epsilon(frozenset(counts.items()), delta)


# Cached, because the budget check before a round and the display after it ask for the same.
@lru_cache(maxsize=64)
def _composed_epsilon(items: frozenset[tuple[Pairs, int]], delta: float) -> float:
    counts = dict(items)
    h = _step(counts)
    # The phase of a transform is rounded, and multiplied by the number of releases: that error is
    # taken off delta, which makes epsilon larger.
    allowed = delta - min(FLOAT64_ROUNDING * sum(counts.values()), delta / 2)
    return max(_epsilon(_composed(counts, h, side), allowed) for side in (0, 1))


def composed_delta(counts: Mapping[Pairs, int], epsilon: float) -> float:
    """Delta at ``epsilon >= 0`` of ``counts[p]`` releases of each pair p."""
    h = _step(counts)
    worst = 0.0
    for side in (0, 1):
        start, probs, infinite = _compose(counts, h, side)
        losses = (start + np.arange(len(probs))) * h
        over = losses > epsilon
        worst = max(worst, infinite - float(probs[over] @ np.expm1(epsilon - losses[over])))
    return min(1.0, worst)


def composed_profile(counts: Mapping[Pairs, int]) -> tuple[Floats, Floats]:
    """Epsilons ascending from 0, and the delta of the worse direction at each: ``[points]``."""
    h = _step(counts)
    composed = [_compose(counts, h, side) for side in (0, 1)]
    points = max(1, *(start + len(probs) for start, probs, _ in composed))
    places = np.arange(0, points, -(-points // MAX_PROFILE_POINTS))
    worst = np.max([_deltas_at(places, *losses, h) for losses in composed], axis=0)
    return h * places.astype(np.float64), np.asarray(np.clip(worst, 0.0, 1.0))


def _deltas_at(
    places: npt.NDArray[np.signedinteger], start: int, probs: Floats, infinite: float, h: float
) -> Floats:
    """Hockey-stick divergence, or more, at ``places * h``."""
    # Far below the least loss of a composition the divergence is 1: nothing is computed there.
    below = max(0, start - MAX_WINDOW_POINTS)
    deltas = _deltas(start - below, probs, infinite, h)
    # Above its last loss a direction keeps the mass at infinity.
    values = deltas[np.clip(places - below, 0, len(deltas) - 1)]
    return np.where(places < below, 1.0, values)


def _deltas(start: int, probs: Floats, infinite: float, h: float) -> Floats:
    """Hockey-stick divergence at ``0, h, 2h, ...`` up to and including the largest loss."""
    if start + len(probs) <= 0:
        return np.array([infinite])
    probs = np.concatenate([np.zeros(max(0, start)), probs[max(0, -start) :]])
    above = infinite + np.cumsum(probs[::-1])[::-1]
    return np.asarray(above - _discounted(probs, h))


def _step(counts: Mapping[Pairs, int]) -> float:
    """Step of the grid for a composition.

    It is a power of 2^(1/4). With so few possible steps, a longer composition of the same releases
    mostly has the same grid, and their cached transforms are reused.
    """
    variance, upper, widest = _spread(counts)
    std = math.sqrt(variance / sum(counts.values()))
    step = min(std / STEPS_PER_STD, MAX_STEP)
    # A composition too wide for the largest grid gets a coarser one, which is still an upper bound.
    min_step = 2 * max(widest / MAX_POINTS, 18 * math.sqrt(upper) / MAX_WINDOW_POINTS)
    return float(2.0 ** (math.floor(4 * math.log2(max(step, min_step, MIN_STEP))) / 4))


def _spread(counts: Mapping[Pairs, int]) -> tuple[float, float, float]:
    """Variance of a composition's loss, an upper estimate of it, and the widest release's range."""
    variance, upper = (
        sum(n * _std(pairs[0], upper=upper) ** 2 for pairs, n in counts.items())
        for upper in (False, True)
    )
    return variance, upper, max(_range(pairs[0]) for pairs in counts)


@lru_cache(maxsize=4096)
def _std(pair: DominatingPair, *, upper: bool = False) -> float:
    return pair.std(upper=upper)


def _range(pair: DominatingPair) -> float:
    low, high = pair.loss_range()
    return high - low


@lru_cache(maxsize=128)
def _release(pair: DominatingPair, h: float) -> _GridLosses:
    """One direction of one release on the grid of step ``h``."""
    low, high = pair.loss_range()
    first, last = math.floor(low / h), math.ceil(high / h)
    grid = np.arange(first, last + 1, dtype=np.float64) * h
    return _trimmed(first, _connect(grid, *pair.masses(grid), h))


def discretised(pair: DominatingPair, most: int = 2**11) -> DiscretePair:
    """Discrete pair of at most about ``most`` losses that dominates the given one."""
    step = max(min(_std(pair) / STEPS_PER_STD, MAX_STEP), _range(pair) / most, MIN_STEP)
    losses = _release(pair, step)
    return DiscretePair(losses.start, step, tuple(losses.probs.tolist()), losses.infinite)


def _connect(grid: Floats, upper: Floats, lower: Floats, h: float) -> Floats:
    """Connect the Dots: masses on ``grid`` and, last, at infinity: ``[len(grid) + 1]``.

    ``upper`` and ``lower`` are the masses of the two distributions below, between and above
    the grid's points. A gap's mass is split between its ends so that both distributions keep
    theirs; mass below the grid is moved to the first point, mass above it to infinity.
    """
    p, q = upper[1:-1], lower[1:-1]
    # A gap has the masses p (upper) and q (lower). A part r of p is moved to its right end x + h
    # and p - r to its left end x, such that r e^-(x+h) + (p - r) e^-x = q. The hockey-stick curve
    # is then exact at the grid's points, and above the true one between them, as a chord of a
    # convex function is. The exponent is capped at e^700, which moves mass to the right: upwards.
    to_right = np.clip((p - q * np.exp(np.minimum(grid[:-1], 700.0))) / -math.expm1(-h), 0.0, p)
    probs = np.zeros(len(grid) + 1)
    probs[:-2] += p - to_right
    probs[1:-1] += to_right
    probs[0] += upper[0]
    probs[-1] = upper[-1]
    return probs


def _trimmed(start: int, masses: Floats) -> _GridLosses:
    probs, infinite = masses[:-1], float(masses[-1])
    support = np.flatnonzero(probs > 0)
    start, probs = start + int(support[0]), probs[support[0] : support[-1] + 1]
    return _GridLosses(start, probs, infinite)


@dataclass(frozen=True)
class _Composed:
    """One direction of a composition, as the Fourier transform of its probabilities.

    The probability of the loss ``(first + j) * h``, j = 0 .. size - 1, is ``1 / size`` times the
    sum over all frequencies k of ``spectrum[k] exp(2 pi i k j / size)``. Only the frequencies that
    have not vanished are stored; the window is the losses with j below ``points``.
    """

    h: float
    first: int
    points: int
    size: int
    frequencies: npt.NDArray[np.int64]  # ascending from 0, of the non-negative half
    spectrum: Complex
    infinite: float

    def probs(self) -> Floats:
        """Probabilities of the window's losses, ``[points]``."""
        spectrum = np.zeros(self.size // 2 + 1, dtype=np.complex128)
        spectrum[self.frequencies] = self.spectrum
        # The transform's rounding leaves values like -1e-18; zero is the upper bound.
        return np.maximum(np.fft.irfft(spectrum, self.size)[: self.points], 0.0)


def _compose(counts: Mapping[Pairs, int], h: float, side: int) -> tuple[int, Floats, float]:
    """Start, probabilities and infinite mass of the composition, in one direction."""
    composed = _composed(counts, h, side)
    return composed.first, composed.probs(), composed.infinite


def _composed(counts: Mapping[Pairs, int], h: float, side: int) -> _Composed:
    """Compose one direction of all releases: multiply the transforms of their distributions.

    Powers are taken of log-magnitudes and phases, so that 10,000 releases cost as much as one.
    """
    factors = [(_release(pairs[side], h), pairs[side], n) for pairs, n in counts.items()]
    low, high = _window(counts, h, side)
    first = max(math.floor(low / h), sum(n * p.start for p, _, n in factors))
    last = min(math.ceil(high / h), sum(n * (p.start + len(p.probs) - 1) for p, _, n in factors))
    points = max(last - first + 1, max(len(p.probs) for p, _, n in factors))
    size = _fast_size(points)
    # Every factor has magnitude at most 1. Where that of the most frequent release has vanished
    # (below e^-50 = 2e-22), so has the product; the other factors are evaluated elsewhere only.
    factors.sort(key=lambda factor: -factor[2])
    frequencies = np.flatnonzero(factors[0][2] * _transform(factors[0][1], h, size)[0] > -50.0)
    exponent = np.zeros(len(frequencies), dtype=np.complex128)
    start, finite = 0, 0.0
    for losses, pair, count in factors:
        log_magnitude, angle = _transform(pair, h, size)
        exponent += count * (log_magnitude[frequencies] + 1j * angle[frequencies])
        start += count * losses.start
        finite += count * math.log1p(-losses.infinite)
    # A shift lets the inverse transform begin with the window's first loss. The product is taken
    # modulo size in integers, since a float of that magnitude would have lost the phase. Mass
    # outside of the window wraps around into it (aliasing): at most `WINDOW_TAIL` on either side,
    # which is also counted as an infinite loss.
    exponent += 2j * math.pi / size * ((frequencies * ((first - start) % size)) % size)
    infinite = 2 * WINDOW_TAIL - math.expm1(finite)
    return _Composed(h, first, last - first + 1, size, frequencies, np.exp(exponent), infinite)


def _window(counts: Mapping[Pairs, int], h: float, side: int) -> tuple[float, float]:
    """Least and largest loss of a window that misses at most `WINDOW_TAIL` on either side.

    By Chernoff's bound, ``P(L > x) <= E exp(s L) / exp(s x)``, at the best of several orders s, in
    powers of 2: from about ``sqrt(2 log(1 / tail)) / std``, the best for a Gaussian loss, down to
    those that suit rare large losses.
    """
    variance, upper, widest = _spread(counts)
    low, high = math.sqrt(variance), math.sqrt(upper)
    low, high = max(low, high * 2.0**-20), max(low, high)
    # For rare large losses the best order is about log(1 / tail) / loss.
    least_order = min(2.0 / high, 4.0 / widest)
    ladder = range(math.floor(math.log2(least_order)), math.ceil(math.log2(16.0 / low)))
    moments = sum(n * _log_moments(pairs[side], h, ladder) for pairs, n in counts.items())
    below, above = np.min((moments - math.log(WINDOW_TAIL)) / 2.0 ** np.array(ladder), axis=1)
    return -float(below), float(above)


@lru_cache(maxsize=1024)
def _log_moments(pair: DominatingPair, h: float, ladder: range) -> Floats:
    """log E exp(-+2^k * loss) of one release's finite losses, k in ladder: ``[2, ladder]``."""
    release = _release(pair, h)
    losses = h * (release.start + np.arange(len(release.probs)))
    log_probs = np.log(np.maximum(release.probs, 1e-300))
    moments = np.empty((2, len(ladder)))
    for row, sign in enumerate((-1.0, 1.0)):
        for column, k in enumerate(ladder):
            exponents = sign * 2.0**k * losses + log_probs
            top = exponents.max()
            moments[row, column] = top + math.log(np.exp(exponents - top).sum())
    return moments


def _fast_size(points: int) -> int:
    """Least size of the form 2^k times 4, 5, 6 or 7 that is large enough.

    These sizes are fast to transform, and few, so that cached transforms are mostly reused.
    """
    power = int(2 ** max(2, math.ceil(math.log2(points)) - 3))
    return next(parts * power for parts in (4, 5, 6, 7, 8) if parts * power >= points)


def _transform(pair: DominatingPair, h: float, size: int) -> tuple[Floats, Floats]:
    """Log-magnitude and phase of one release's transform, cached unless it is large."""
    transformed = _transformed if size <= 2**18 else _transformed.__wrapped__
    return transformed(pair, h, size)


@lru_cache(maxsize=256)
def _transformed(pair: DominatingPair, h: float, size: int) -> tuple[Floats, Floats]:
    spectrum = np.fft.rfft(_release(pair, h).probs, size)
    return np.log(np.maximum(np.abs(spectrum), 1e-300)), np.angle(spectrum)


def _epsilon(composed: _Composed, delta: float) -> float:
    """Smallest epsilon whose hockey-stick divergence is at most ``delta``.

    Let ``mass(i)`` be the sum of ``probs[j]`` over j >= i, and ``rest(i)`` that of
    ``probs[j] (1 - exp((i - j) h))``. The divergence at the i-th loss is ``infinite + rest(i)``;
    between two losses it is linear in exp(epsilon). Inserting the inverse transform for ``probs``
    turns both into sums over the few frequencies, in which j enters by a geometric series that has
    a closed form. They are first evaluated at every ``stride``-th loss, by one short inverse
    transform (a sum of low frequencies is determined by so few of its values), and then by
    bisection between two of these.
    """
    h, size, allowed = composed.h, composed.size, delta - composed.infinite
    if allowed < 0:
        return math.inf
    zero = max(0, -composed.first)  # the smallest loss >= 0
    if zero >= composed.points:
        return 0.0
    # Conjugate frequencies count by twice the real part; the highest has none.
    k = composed.frequencies[1:]
    weight = composed.spectrum[1:] * np.where(2 * k == size, 1.0, 2.0) / size
    constant = composed.spectrum[0].real / size
    angle = 2 * math.pi * k / size
    # ``series`` has the factor 1 / (1 - exp(i angle)) of the geometric series for ``mass``, and
    # ``discounted`` the one for the sum of ``probs[j] exp((i - j) h)``. ``step`` is their
    # difference, in a form without cancellation: the two are nearly equal for small h.
    series = weight * (0.5 + 0.5j / np.tan(angle / 2))
    discounted = weight / -np.expm1(1j * angle - h)
    step = series * np.exp(1j * angle) * -math.expm1(-h) / -np.expm1(1j * angle - h)

    # The geometric series over j = i .. size - 1 end at size, where their terms do not depend on i.
    total, end_total = float(series.sum().real), float(discounted.sum().real)

    def rest(i: Floats, waves: Floats) -> Floats:
        end = size - i
        tail = np.exp(-h * end)
        flat = constant * (end + np.expm1(-h * end) / -math.expm1(-h))
        return np.asarray(flat + waves - total + tail * end_total)

    def waves(i: int, of: Complex) -> float:
        return float((of * np.exp(2j * math.pi * ((k * i) % size) / size)).sum().real)

    def above(i: int) -> bool:
        return bool(rest(np.array(float(i)), np.array(waves(i, step))) > allowed)

    # Sampled at every stride-th loss, frequencies up to the highest one stay below half of the
    # sampling rate: nothing is aliased, and the short transform gives exactly these values.
    stride = 1
    while size % (2 * stride) == 0 and 2 * stride * (2 * int(composed.frequencies[-1]) + 1) <= size:
        stride *= 2
    coarse = size // stride
    spectrum = np.zeros(coarse // 2 + 1, dtype=np.complex128)
    spectrum[k] = np.where(2 * k == size, step, step / 2)
    points = np.arange(0, size, stride, dtype=np.float64)
    over = rest(points, np.fft.irfft(spectrum, coarse) * coarse) > allowed
    if not above(zero):
        low = high = zero
    else:
        later = np.flatnonzero(~over[zero // stride + 1 :])
        high = stride * (zero // stride + 1 + int(later[0])) if len(later) else size
        low = max(zero, high - stride)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if above(middle) else (low, middle)
    # On the last piece, from loss high - 1 to high, the divergence less `infinite` is
    # mass(high) - exp(epsilon) * (mass(high) - rest(high)) / exp(loss): solve it for `allowed`.
    mass = constant * (size - high) + waves(high, series) - total
    if mass <= allowed:
        return 0.0
    remaining = mass - float(rest(np.array(float(high)), np.array(waves(high, step))))
    loss = (composed.first + high) * h
    return float(max(0.0, loss + math.log((mass - allowed) / remaining)))


def _discounted(probs: Floats, h: float) -> Floats:
    """``sum over j >= i of probs[j] * exp(-(j - i) * h)`` for each i.

    By cumulative sums from the end, in blocks short enough for their exponentials not to overflow.
    """
    out = np.empty_like(probs)
    block, carried = max(1, int(600.0 / h)), 0.0
    for stop in range(len(probs), 0, -block):
        begin = max(0, stop - block)
        offset = np.arange(stop - begin) * h
        sums = np.cumsum((probs[begin:stop] * np.exp(-offset))[::-1])[::-1]
        out[begin:stop] = (sums + carried * math.exp(-(stop - begin) * h)) * np.exp(offset)
        carried = float(out[begin])
    return out
