"""Attacks on a target: federations in which one row shows most, and what the row moved.

A target is a black box. What a row moves is a difference of means over many runs, in standard
deviations of the noise, which the coordinates show that no row moves. Runs with and without the row
have the same seeds: where these decide the noise, a few runs measure it to a per cent. No scale of
the release is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import bdtr, gammaln, log_ndtr

from fedsim.audit.checks import Finding, Floats, Statistic, invariant, statistical, untested
from fedsim.audit.outside.claims import TargetClaim
from fedsim.audit.outside.federation import SHAPES, SyntheticFederation, TargetRelease

LONG_NORM = 1e3
"""Length of a row that every bound shortens, in C."""
NEARLY_ZERO_NORM = 1e-6
"""Length in C of a row that adds nothing, to a target that fails where it is zero."""
MANY_EXAMPLES = 1e3
"""Examples that a client says to have, where others have one."""
RESOLUTION = 1e5
"""Values are the same that differ by less than one over this, in standard deviations."""
GRID_SHARE = 0.03
"""Of values that occur again, the share above which noise lies on a grid."""
SHARED_SHARE = 0.75
"""Of these values, the share that occur again where the canary is added, at least."""

TOO_LITTLE_NOISE = "noise is too small, or more is sampled"
UNCLIPPED_ROWS = "rows longer than C pass"
CLIPPED_ARRAYS = "each array is clipped by itself"
COUNTED_DENOMINATOR = "the denominator is counted"
CLIPPED_SUM = "the sum is clipped, and not each row"
OTHER_CLIP_NORM = "rows are clipped to another C than noise has"

Target = Callable[[SyntheticFederation], TargetRelease]


def unit_vector(index: int) -> Floats:
    """The unit vector along a coordinate."""
    row = np.zeros(width())
    row[index] = 1.0
    return row


def width() -> int:
    """Number of the model's entries."""
    return sum(math.prod(shape) for shape in SHAPES)


def even_unit_vector() -> Floats:
    """The unit vector that has the same length in every array."""
    arrays = [np.full(math.prod(shape), math.prod(shape) ** -0.5) for shape in SHAPES]
    return np.concatenate(arrays) / math.sqrt(len(SHAPES))


@dataclass(frozen=True)
class Attack:
    """A federation, and one client of it that is in it or not.

    Attributes
    ----------
    name : str
    direction : float64 ``[d]``
        A unit vector, along which the canary's row lies, and all others.
    other_norm, canary_norm : float
        Length of the rows of all other clients and of the canary, in C.
    examples : float
        How many the canary says to have; others have one.
    cause : str
        What it most likely means that a target withstands the attacks before it, but not this.
    zero_norm : float
        Length of a row that adds nothing, in C.
    other_direction : float64 ``[d]``, optional
        A unit vector at a right angle, along which others' rows lie, every second one backwards.
    """

    name: str
    direction: Floats
    other_norm: float
    canary_norm: float
    cause: str
    examples: float = 1.0
    zero_norm: float = 0.0
    other_direction: Floats | None = None

    def federation(self, claim: TargetClaim, present: bool, seed: int) -> SyntheticFederation:
        """The federation with the canary, or its neighbour without."""
        n, c = claim.population, claim.clip_norm
        lengths, examples = np.full(n, self.other_norm), np.ones(n)
        lengths[-1], examples[-1] = self.canary_norm, self.examples
        if not present and claim.adjacency == "replace-one":
            lengths[-1], examples[-1] = -self.canary_norm, 1.0
        elif not present and claim.adjacency == "zero-out":
            lengths[-1], examples[-1] = 0.0, 1.0
        lengths = c * np.where(lengths == 0, self.zero_norm, lengths)
        rows = lengths[:, None] * self.direction
        if self.other_direction is not None:
            signs = np.where(np.arange(n - 1) % 2, -1.0, 1.0)
            rows[:-1] = (signs * lengths[:-1])[:, None] * self.other_direction
        count = n - (not present and claim.adjacency == "add-remove")
        return SyntheticFederation(
            rows=rows[:count],
            examples=examples[:count],
            rounds=claim.rounds,
            seed=seed,
            rate=claim.rate,
            clip_norm=claim.clip_norm,
            noise_multiplier=claim.noise_multiplier or 0.0,
        )


ATTACKS = (
    Attack("a row of length C", unit_vector(0), 0.0, 1.0, TOO_LITTLE_NOISE),
    Attack("a longer row", unit_vector(40), 0.0, LONG_NORM, UNCLIPPED_ROWS),
    Attack("a longer row in all arrays", even_unit_vector(), 0.0, LONG_NORM, CLIPPED_ARRAYS),
    Attack("a row of zeros among others", unit_vector(1), 1.0, 0.0, COUNTED_DENOMINATOR),
    Attack("a row against all others", unit_vector(2), 1.0, -1.0, COUNTED_DENOMINATOR),
    Attack("a longer row against all others", unit_vector(6), 1.0, -LONG_NORM, CLIPPED_SUM),
    Attack(
        "a row of many examples", unit_vector(3), 0.0, 1.0,
        "rows are weighted by numbers that clients report", examples=MANY_EXAMPLES,
    ),
)  # fmt: skip


ADAPTIVE_ATTACKS = (
    *(attack for attack in ATTACKS if not attack.other_norm),
    Attack(
        "a row among long rows",
        unit_vector(4),
        LONG_NORM,
        LONG_NORM,
        OTHER_CLIP_NORM,
        other_direction=unit_vector(5),
    ),
)
"""Of clip norms that follow the rows, which rise or fall here in every round.

One row more moves such a C, as is charged, and with it all that others add: they add nothing.
"""


@dataclass(frozen=True, eq=False)
class Observations:
    """What runs of a target released.

    Attributes
    ----------
    moves : float64 ``[runs, rounds, d]``
        By how much each round moved the model.
    statistics : float64 ``[runs, rounds, k]``
        Numbers released beside.
    sampled : sequence of sequence of sequence of int
        Who was in each round of each run; empty where that is not seen.
    """

    moves: Floats
    statistics: Floats
    sampled: Sequence[Sequence[Sequence[int]]]

    @classmethod
    def of(cls, target: Target, federations: Sequence[SyntheticFederation]) -> Observations:
        """Run the target on each."""
        released = [target(federation) for federation in federations]
        models = np.stack([run.models for run in released])
        names = sorted({name for run in released for name in run.statistics})
        rounds = models.shape[1]
        numbers = np.zeros((len(released), rounds, len(names)))
        for run, of_run in zip(released, numbers, strict=True):
            for name, values in run.statistics.items():
                of_run[:, names.index(name)] = values
        sampled = [run.sampled for run in released if run.sampled is not None]
        return cls(np.diff(models, axis=1, prepend=0.0), numbers, sampled)

    @property
    def table(self) -> Floats:
        """Moves and statistics side by side."""
        return np.concatenate([self.moves, self.statistics], axis=2)


@dataclass(frozen=True, eq=False)
class AttackResult:
    """An attack and its runs, without and with the canary."""

    attack: Attack
    claim: TargetClaim
    without: Observations
    present: Observations

    @cached_property
    def _lengths(self) -> tuple[Floats, Floats]:
        """Moves along the direction, in standard deviations of the noise: ``[runs, rounds]``."""
        u = self.attack.direction
        along = [side.moves @ u for side in (self.without, self.present)]
        moves = np.concatenate([self.without.moves, self.present.moves])
        across = moves - np.concatenate(along)[..., None] * u
        degrees = len(u) - 1
        if (v := self.attack.other_direction) is not None:
            across -= (across @ v)[..., None] * v
            degrees -= 1
        variances = np.square(across).sum(-1) / degrees
        if self.claim.adaptive:
            # Each release's own C is its unit. The mean of one over an estimate of a standard
            # deviation is above that of the true one.
            high = math.exp(gammaln((degrees - 1) / 2) - gammaln(degrees / 2))
            units = np.sqrt(variances) * high * math.sqrt(degrees / 2)
        else:
            # One for both sides: one that differs with the canary would hide what it moved.
            units = np.broadcast_to(np.sqrt(variances.mean(0)), variances.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            without, present = np.split(np.concatenate(along) / units, 2)
        return without, present

    @property
    def shift(self) -> float:
        """By how many standard deviations of the noise the canary moved a round, on average."""
        without, present = self._lengths
        with np.errstate(invalid="ignore"):
            return abs(float(present.mean() - without.mean()))

    @property
    def claimed_shift(self) -> float:
        """By how many it may."""
        assert self.claim.shift is not None
        return self.claim.shift

    def finding(self) -> Finding:
        """Whether the canary moved the model further than the claim allows, on average."""
        without, present = self._lengths
        looked = f"{len(without)} and {len(present)} runs of {self.claim.rounds} rounds"
        if not (np.isfinite(without).all() and np.isfinite(present).all()):
            broken = "releases without any noise, or not finite"
            return invariant(looked, broken, "noise in every release")
        # Runs of one seed: what of their noise is the same is not in their difference.
        difference_error = (present - without).mean(1).std(ddof=1) / math.sqrt(len(without))
        values = self.without.moves[..., 1:].size
        error = math.hypot(difference_error, self.shift / math.sqrt(2 * values)) or 1e-12

        def p(moved: Floats, _: object) -> Floats:
            return np.asarray(np.exp(log_ndtr(-(moved - self.claimed_shift) / error)))

        words = f"moved by {{}} std of the noise ({self.claimed_shift:.4g} is claimed)"
        statistic = Statistic(words, np.array([self.shift]), p, self.claimed_shift - 3 * error)
        return statistical(looked, statistic)

    @property
    def grows(self) -> bool:
        """Whether it moved the last round clearly further than the first."""
        without, present = self._lengths
        moved = (present - without) * np.sign(present.mean() - without.mean())
        later = moved[:, -1] - moved[:, 0]
        error = float(later.std(ddof=1)) / math.sqrt(len(later))
        return float(later.mean()) > max(4 * error, 0.2 * float(moved[:, 0].mean()))

    @property
    def noise_falls(self) -> bool:
        """Whether the last round has clearly less noise than the first."""
        sizes = np.square(self.without.moves[..., 1:]).mean((0, 2))
        return bool(sizes[-1] < 0.8 * sizes[0])

    @property
    def without_noise(self) -> bool:
        """Whether a released number shows the canary, and is the same in all runs otherwise."""
        sides = [side.statistics for side in (self.without, self.present)]
        constant = [np.ptp(side, axis=0).max(initial=0.0) == 0 for side in sides]
        return all(constant) and bool((sides[0][0] != sides[1][0]).any())

    def grid(self) -> Finding:
        """Whether rows lie on the grid of the noise, where it has one.

        Noise of few values (in float16, say) that is added to a sum of many shows its low bits:
        with the canary other values are released than without. A grid that rows are rounded to is
        shared by both.
        """
        noisy = self.without.moves.any((0, 1))
        if not noisy.any():
            return invariant("no value with noise", None, "noise on no grid")
        moves, present = self.without.moves[..., noisy], self.present.moves[..., noisy]
        scale = np.sqrt(np.square(moves).mean((0, 2), keepdims=True))
        half = len(moves) // 2
        sides = [moves[:half], moves[half:], present[half:]]
        with np.errstate(divide="ignore", invalid="ignore"):
            known, without, present = (np.rint(side / scale * RESOLUTION).ravel() for side in sides)
        again = float(np.isin(without, known).mean())
        looked = f"{len(present):,} values with it, {len(known):,} without"
        if not GRID_SHARE < again < 1:
            return invariant(looked, None, "noise on no grid")
        shared = np.isin(present, known)

        def p(share: Floats, _: object) -> Floats:
            return np.asarray(
                bdtr(np.floor(share * len(shared)), len(shared), SHARED_SHARE * again)
            )

        words = f"a share of {{}} of its values occur without it; {again:.3g} do of others"
        return statistical(looked, Statistic(words, np.array([shared.mean()]), p, again))


def follows_rows(silent: Observations, looked: str) -> Finding:
    """Whether a clip norm that adapts falls while all rows are shorter than it.

    The noise, which is in proportion to it, shows it.
    """
    if silent.moves.shape[1] < 2:
        return untested(looked, "a clip norm that adapts shows it in two rounds or more")
    sizes = np.log(np.sqrt(np.square(silent.moves).mean(-1)))
    rises = sizes[:, -1] - sizes[:, 0]
    error = max(float(rises.std(ddof=1)) / math.sqrt(len(rises)), 1e-12)

    def p(rise: Floats, _: object) -> Floats:
        return np.asarray(np.exp(log_ndtr(-rise / error)))

    words = "the noise of rows of length 0 grew by a factor of exp({}) from first to last round"
    return statistical(looked, Statistic(words, np.array([rises.mean()]), p, -3 * error))
