"""Likely causes of findings: one fault shows in many checks, and should have one name.

A cause explains a failed check of noise if the check passes once the cause is removed: arrays
without noise are left out, or each array or round is scaled to one size. It explains a failed check
of sampling if the check passes at the measured rate. Causes do not influence the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedsim.array_types import Floats
from fedsim.audit.attacks import (
    CLIPPED_SUM,
    COUNTED_DENOMINATOR,
    OTHER_CLIP_NORM,
    UNCLIPPED_ROWS,
    AttackResult,
)
from fedsim.audit.catalogue import DRAWS
from fedsim.audit.federation import SHAPES
from fedsim.audit.findings import Check, Finding
from fedsim.audit.noise_checks import NoiseSample, exact_repeats, layer_sizes, round_sizes, shape
from fedsim.audit.sampling_checks import Sampled, frequencies, overlaps, spread, succession
from fedsim.privacy.laws import Inclusion

CHANCE = 1e-4
"""p-value above which a check passes here."""
CLEAR_EXCESS, SAME_SHIFT, RELATIVE_ERROR = 1.05, 1.3, 0.1
"""Factors for "clearly further than claimed" and "about as far"; tolerance for equality."""

REUSED_NOISE = "noise is used again"
NO_NOISE = "an array has no noise"
ARRAY_SIZES = "another size in an array"
ROUND_SIZES = "noise changes its size from round to round"
NOT_GAUSSIAN = "not Gaussian"
OVERSAMPLED, UNDERSAMPLED = "more is sampled than claimed", "less is sampled than claimed"
UNEVEN_SAMPLING = "some are sampled more often"
DEPENDENT_ROUNDS = "rounds are not drawn independently"
LATER_ADDITION = "what a row added is added again in later rounds, without noise"


def absence_cause(moves: Floats) -> str:
    """Cause for releases ``[runs, rounds, d]`` of which some are equal in all runs."""
    repeated = bool(moves[..., 1:].any()) and np.isfinite(moves).all()
    return "noise is the same in every run" if repeated else "noise is left out"


def noise_causes(sample: NoiseSample, checks: Sequence[Check]) -> Iterable[Finding]:
    """Findings of checks of noise, with common causes."""
    results = {check.test: check.find(sample) for check in checks}
    results[layer_sizes] = replace(results[layer_sizes], cause=ARRAY_SIZES)
    failing = {test for test, finding in results.items() if finding.p_value <= CHANCE}
    for cause, reduced in _reduced_samples(sample):
        passing = {test for test in failing if test(reduced).p_value > CHANCE}
        # If the distribution is still wrong after scaling, the scale is not the cause.
        if shape in failing - passing:
            continue
        results |= {test: replace(results[test], cause=cause) for test in passing}
        failing -= passing
    if exact_repeats in failing:
        results |= {test: replace(results[test], cause=REUSED_NOISE) for test in failing}
    elif shape in failing:
        largest = float(np.abs(sample.z).max())
        truncated = largest < math.sqrt(2 * math.log(sample.z.size)) - 0.5
        cause = "noise is truncated" if truncated else NOT_GAUSSIAN
        results |= {test: replace(results[test], cause=cause) for test in failing}
    return results.values()


def _reduced_samples(sample: NoiseSample) -> Iterator[tuple[str, NoiseSample]]:
    """Yield possible causes, each with the noise after removing it."""
    silent = [not sample.z[:, :, columns].any() for columns in sample.layers]
    if any(silent) and not all(silent):
        chosen = [c for c, empty in zip(sample.layers, silent, strict=True) if not empty]
        z = np.concatenate([sample.z[:, :, columns] for columns in chosen], axis=2)
        ends = np.cumsum([columns.stop - columns.start for columns in chosen]).tolist()
        layers = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        yield NO_NOISE, replace(sample, z=scaled(z, (0, 1, 2)), layers=layers)
    if layer_sizes(sample).p_value <= CHANCE:
        parts = [scaled(sample.z[:, :, columns], (0, 1, 2)) for columns in sample.layers]
        yield ARRAY_SIZES, replace(sample, z=np.concatenate(parts, axis=2))
    if round_sizes(sample).p_value <= CHANCE:
        yield ROUND_SIZES, replace(sample, z=scaled(sample.z, (2,)))


def scaled(moves: Floats, axes: tuple[int, ...]) -> Floats:
    """Moves divided by their root mean square over these axes."""
    squares = np.square(moves).mean(axes, keepdims=True)
    return np.asarray(moves / np.sqrt(np.maximum(squares, 1e-300)))


@dataclass(frozen=True)
class RowCauses:
    """Determines why a row moves releases too far.

    Attributes
    ----------
    results : sequence of AttackResult
        Results of all attacks; the first is that of a row of length C.
    oversampling : float
        Measured over claimed sampling rate; 1 if it is not known.
    silent : float
        Share of the model's entries that have no noise.
    """

    results: Sequence[AttackResult]
    oversampling: float = 1.0
    silent: float = 0.0

    def cause(self, result: AttackResult) -> str:
        """Likely cause if this attack's finding is a violation."""
        usual, moved, cause = self.results[0].shift, result.shift, result.world.cause
        # If a row of length C moves it as far, the bound is not the cause.
        if usual > CLEAR_EXCESS * result.claimed_shift and moved < SAME_SHIFT * usual:
            return self._excess_cause(usual / result.claimed_shift)
        unclipped = self._shift(UNCLIPPED_ROWS) > SAME_SHIFT * usual
        if result.world.in_all_arrays:
            arrays = math.sqrt(len(SHAPES))
            if unclipped:
                return UNCLIPPED_ROWS
            if moved < arrays * (1 - RELATIVE_ERROR) * usual:
                return "the norm leaves out a part of the row"
            return (
                cause
                if moved < arrays * (1 + RELATIVE_ERROR) * usual
                else "each entry is clipped by itself"
            )
        if cause == CLIPPED_SUM and moved > 2 * (1 + RELATIVE_ERROR) * usual:
            return UNCLIPPED_ROWS
        return (
            COUNTED_DENOMINATOR
            if cause == CLIPPED_SUM and self._shift(COUNTED_DENOMINATOR) > SAME_SHIFT * usual
            else cause
        )

    def _shift(self, cause: str) -> float:
        return max((one.shift for one in self.results if one.world.cause == cause), default=0.0)

    def _excess_cause(self, factor: float) -> str:
        """Likely cause if a row of length C moves a release too far by this factor."""
        first = self.results[0]
        if first.claim.adjacency == "replace-one" and abs(factor - 2) < RELATIVE_ERROR:
            return "noise is for one row added or removed, and not for one replaced: half as much"
        if (
            self.oversampling > CLEAR_EXCESS
            and abs(factor / self.oversampling - 1) < RELATIVE_ERROR
        ):
            return OVERSAMPLED
        if self.silent and abs(factor * math.sqrt(1 - self.silent) - 1) < RELATIVE_ERROR:
            return NO_NOISE
        if first.grows:
            return OTHER_CLIP_NORM if first.noise_shrinks else LATER_ADDITION
        return f"noise is {factor:.2f} times too small, or more is sampled"


def oversampling(samples: Sampled | None) -> float:
    """Measured over claimed sampling rate; 1 if it is not known."""
    if samples is None or samples.law is None:
        return 1.0
    return float(samples.membership.mean()) / samples.law.single


def sample_causes(samples: Sampled) -> Iterable[Finding]:
    """Findings of checks of sampling, with common causes."""
    results = {check.test: check.find(samples) for check in DRAWS if check.fits(samples)}
    failing = {test for test, finding in results.items() if finding.p_value <= CHANCE}
    law, (rounds, n) = samples.law, samples.membership.shape
    if failing and not samples.fault and law is not None and law.size is None:
        rate = float(samples.membership.mean())
        at_rate = replace(samples, law=Inclusion(rate, rate**2, None))
        explained = {test for test in failing if test(at_rate).p_value > CHANCE}
        variance = rate * (1 - rate)
        uneven = np.square(samples.membership.sum(0) - rounds * rate).mean() > rounds * variance
        cause = OVERSAMPLED if rate > law.single else UNDERSAMPLED
        if frequencies in failing - explained and uneven:
            cause = UNEVEN_SAMPLING
        results |= {test: replace(results[test], cause=cause) for test in explained}
        # Signs of dependent draws: cohort sizes that vary too much, rows that take turns.
        dependent = set() if uneven else {frequencies}
        if samples.membership.sum(1).var() > n * variance:
            dependent.add(spread)
        if succession in failing - explained:
            dependent |= {frequencies, overlaps}
        for test in dependent & (failing - explained):
            results[test] = replace(results[test], cause=DEPENDENT_ROUNDS)
    return results.values()
