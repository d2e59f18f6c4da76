"""Attacks on a target: federations that expose one row, and measurements of what it moved.

A target is a black box. What a row moves is measured as a difference of means over many runs, in
standard deviations of the noise, which is estimated from coordinates that no row moves. So no scale
of the release is assumed. Runs with and without the row have the same seeds: if a seed determines
the target's noise, a few runs measure the difference to a per cent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, gammaln, log_ndtr, stdtr

from fedsim.array_types import Floats
from fedsim.audit.federation import SHAPES, SyntheticFederation, TargetRelease
from fedsim.audit.findings import Finding, Statistic, invariant, statistical, untested
from fedsim.audit.target_claim import ReleaseClaim
from fedsim.audit.two_world import Attack, distinguish

LONG_NORM = 1e3
"""Length, in units of C, of a row that every bound shortens."""
NEARLY_ZERO_NORM = 1e-6
"""Length, in units of C, used instead of 0 for a target that fails on rows of zeros."""
MANY_EXAMPLES = 1e3
"""Number of examples that the canary reports; others report one."""
RESOLUTION = 1e5
"""Values that differ by less than 1 / RESOLUTION standard deviations count as equal."""
GRID_SHARE = 0.03
"""If more than this share of values occur again, the noise is on a grid."""
SHARED_SHARE = 0.75
"""With a canary, at least this part of that share of values must occur again."""

TOO_LITTLE_NOISE = "noise is too small, or more is sampled"
UNCLIPPED_ROWS = "rows longer than C pass"
CLIPPED_ARRAYS = "each array is clipped by itself"
COUNTED_DENOMINATOR = "the denominator is counted"
CLIPPED_SUM = "the sum is clipped instead of each row"
OTHER_CLIP_NORM = "rows are clipped to another C than noise has"

Target = Callable[[SyntheticFederation], TargetRelease]


def absence(
    absent: npt.NDArray[np.bool_], adjacency: str
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """What the absence of these clients, bool ``[n]``, means under an adjacency.

    Returns
    -------
    replaced, ok, exist : bool ``[n]``
        Under "replace-one" a counterpart is in their place; under "zero-out" they are sampled and
        fail; under "add-remove" there are no such clients.
    """
    return (
        absent & (adjacency == "replace-one"),
        ~absent | (adjacency != "zero-out"),
        ~absent | (adjacency != "add-remove"),
    )


def unit_vector(index: int) -> Floats:
    """The unit vector along a coordinate."""
    row = np.zeros(width())
    row[index] = 1.0
    return row


def width() -> int:
    """Number of the model's entries."""
    return sum(math.prod(shape) for shape in SHAPES)


def even_unit_vector() -> Floats:
    """The unit vector whose parts in all arrays have the same length."""
    arrays = [np.full(math.prod(shape), math.prod(shape) ** -0.5) for shape in SHAPES]
    return np.concatenate(arrays) / math.sqrt(len(SHAPES))


@dataclass(frozen=True)
class TargetWorld:
    """A federation with one client, the canary, that takes part or not.

    Attributes
    ----------
    name : str
    direction : float64 ``[d]``
        Unit vector along which all rows lie.
    other_norm, canary_norm : float
        Length of the rows of all other clients and of the canary, in units of C.
    examples : float
        Number of examples that the canary reports; others report one.
    cause : str
        Most likely cause if a target withstands all earlier worlds but not this one.
    in_all_arrays : bool
        Whether the canary's row is as long in all arrays; otherwise it has one entry.
    zero_norm : float
        Length of a row that stands for zero, in units of C.
    other_direction : float64 ``[d]``, optional
        Orthogonal unit vector along which the others' rows lie instead, with alternating signs.
    """

    name: str
    direction: Floats
    other_norm: float
    canary_norm: float
    cause: str
    examples: float = 1.0
    in_all_arrays: bool = False
    zero_norm: float = 0.0
    other_direction: Floats | None = None

    def federation(self, claim: ReleaseClaim, present: bool, seed: int) -> SyntheticFederation:
        """Make the federation with the canary, or its neighbour without."""
        n, c = claim.population, claim.clip_norm
        lengths, examples = np.full(n, self.other_norm), np.ones(n)
        lengths[-1], examples[-1] = self.canary_norm, self.examples if present else 1.0
        replaced, ok, exist = absence((np.arange(n) == n - 1) & (not present), claim.adjacency)
        lengths[replaced] *= -1
        lengths[~ok] = 0.0  # a row of zeros has the same effect as a failure
        lengths = c * np.where(lengths == 0, self.zero_norm, lengths)
        rows = lengths[:, None] * self.direction
        if self.other_direction is not None:
            signs = np.where(np.arange(n - 1) % 2, -1.0, 1.0)
            rows[:-1] = (signs * lengths[:-1])[:, None] * self.other_direction
        return SyntheticFederation(
            rows=rows[exist],
            examples=examples[exist],
            rounds=claim.rounds,
            seed=seed,
            rate=claim.rate,
            clip_norm=claim.clip_norm,
            noise_multiplier=claim.noise_multiplier or 0.0,
        )


TARGET_WORLDS = (
    TargetWorld("a row of length C", unit_vector(0), 0.0, 1.0, TOO_LITTLE_NOISE),
    TargetWorld("a longer row", unit_vector(40), 0.0, LONG_NORM, UNCLIPPED_ROWS),
    TargetWorld(
        "a longer row in all arrays",
        even_unit_vector(),
        0.0,
        LONG_NORM,
        CLIPPED_ARRAYS,
        in_all_arrays=True,
    ),
    TargetWorld("a row of zeros among others", unit_vector(1), 1.0, 0.0, COUNTED_DENOMINATOR),
    TargetWorld("a row against all others", unit_vector(2), 1.0, -1.0, COUNTED_DENOMINATOR),
    TargetWorld("a longer row against all others", unit_vector(6), 1.0, -LONG_NORM, CLIPPED_SUM),
    TargetWorld(
        "a row of many examples",
        unit_vector(3),
        0.0,
        1.0,
        "rows are weighted by numbers that clients report",
        examples=MANY_EXAMPLES,
    ),
)


ADAPTIVE_WORLDS = (
    *(world for world in TARGET_WORLDS if not world.other_norm),
    TargetWorld(
        "a row among long rows",
        unit_vector(4),
        LONG_NORM,
        LONG_NORM,
        OTHER_CLIP_NORM,
        other_direction=unit_vector(5),
    ),
)
"""Worlds for adaptive clip norms, which rise or fall in every round here.

A row may move such a C, which is charged, and thereby scale what the others add. So the others'
rows are zero, or cancel and are orthogonal.
"""


@dataclass(frozen=True, eq=False)
class Observations:
    """Releases of a target's runs.

    Attributes
    ----------
    moves : float64 ``[runs, rounds, d]``
        Change of the model in each round.
    statistics : float64 ``[runs, rounds, k]``
        Numbers that are released in addition.
    sampled : sequence of sequence of sequence of int
        Cohort of each round of each run; empty if cohorts are not visible.
    """

    moves: Floats
    statistics: Floats
    sampled: Sequence[Sequence[Sequence[int]]]

    @classmethod
    def collect(
        cls, target: Target, claim: ReleaseClaim, federations: Sequence[SyntheticFederation]
    ) -> Observations:
        """Run the target on each federation; rounds of claimed correlated noise are made white."""
        released = [target(federation) for federation in federations]
        models = np.stack([run.models for run in released])
        names = sorted({name for run in released for name in run.statistics})
        rounds = models.shape[1]
        numbers = np.zeros((len(released), rounds, len(names)))
        for run, of_run in zip(released, numbers, strict=True):
            for name, values in run.statistics.items():
                of_run[:, names.index(name)] = values
        sampled = [run.sampled for run in released if run.sampled is not None]
        moves = claim.independent_rounds(np.diff(models, axis=1, prepend=0.0))
        return cls(moves, numbers, sampled)

    @property
    def halves(self) -> tuple[Observations, Observations]:
        """The first and the second half of the runs."""
        moves, statistics = np.split(self.moves, 2), np.split(self.statistics, 2)
        middle = len(self.sampled) // 2
        first = Observations(moves[0], statistics[0], self.sampled[:middle])
        return first, Observations(moves[1], statistics[1], self.sampled[middle:])

    @property
    def table(self) -> Floats:
        """Moves and statistics in one table, ``[runs, rounds, d + k]``."""
        return np.concatenate([self.moves, self.statistics], axis=2)


@dataclass(frozen=True, eq=False)
class AttackResult:
    """A world and its runs, without and with the canary."""

    world: TargetWorld
    claim: ReleaseClaim
    without: Observations
    present: Observations

    @property
    def _degrees(self) -> int:
        """Number of orthogonal directions in which a release has noise only."""
        return len(self.world.direction) - 1 - (self.world.other_direction is not None)

    @cached_property
    def _lengths(self) -> tuple[Floats, Floats]:
        """Moves along the direction, in standard deviations of the noise: ``[runs, rounds]``."""
        u = self.world.direction
        along = [side.moves @ u for side in (self.without, self.present)]
        moves = np.concatenate([self.without.moves, self.present.moves])
        across = moves - np.concatenate(along)[..., None] * u
        degrees = self._degrees
        if (v := self.world.other_direction) is not None:
            across -= (across @ v)[..., None] * v
        variances = np.square(across).sum(-1) / degrees
        if self.claim.adaptive:
            # Each release is scaled by its own noise. 1 / (estimated std) is larger than 1 / std on
            # average: corrected by the mean of an inverse chi distribution.
            high = math.exp(gammaln((degrees - 1) / 2) - gammaln(degrees / 2))
            units = np.sqrt(variances) * high * math.sqrt(degrees / 2)
        else:
            # One unit for both sides: noise that grew with the canary would hide what it moved.
            units = np.broadcast_to(np.sqrt(variances.mean(0)), variances.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            without, present = np.split(np.concatenate(along) / units, 2)
        return without, present

    def attack(self, risk: float) -> Attack:
        """The attack that distinguishes runs with the canary from runs without it."""
        world, sides = self.world, (self.without.table, self.present.table)
        return distinguish(world.name, *sides, world.direction, self.claim.claim, risk)

    @property
    def shift(self) -> float:
        """How far the canary moved a round on average, in standard deviations of the noise."""
        without, present = self._lengths
        with np.errstate(invalid="ignore"):
            return abs(float(present.mean() - without.mean()))

    @property
    def claimed_shift(self) -> float:
        """How far the canary may move a round on average, in standard deviations of the noise."""
        assert self.claim.shift is not None
        return self.claim.shift

    def finding(self) -> Finding:
        """Whether the canary moved the model further than the claim allows, on average."""
        without, present = self._lengths
        examined = f"{len(without)} and {len(present)} runs of {self.claim.rounds} rounds"
        if not (np.isfinite(without).all() and np.isfinite(present).all()):
            fault = "releases without any noise, or not finite"
            return invariant(examined, fault, "noise in every release")
        # Paired by seed: noise that both runs of a seed share cancels in the difference.
        runs, values = len(without), without.size * self._degrees
        difference_error = float((present - without).mean(1).std(ddof=1)) / math.sqrt(runs)
        unit_error = self.shift / math.sqrt(2 * values)
        error = math.hypot(difference_error, unit_error) or 1e-12
        # Student's t, since few runs estimate the error badly; degrees of freedom by Satterthwaite.
        shares = (difference_error / error) ** 4 / (runs - 1) + (unit_error / error) ** 4 / values
        degrees = 1 / max(shares, 1 / values)

        def p(moved: Floats, _: object) -> Floats:
            return np.asarray(stdtr(degrees, -(moved - self.claimed_shift) / error))

        words = f"moved by {{}} std of the noise ({self.claimed_shift:.4g} is claimed)"
        statistic = Statistic(words, np.array([self.shift]), p, self.claimed_shift - 3 * error)
        return statistical(examined, statistic)

    @property
    def grows(self) -> bool:
        """Whether the canary moved the last round clearly further than the first."""
        without, present = self._lengths
        moved = (present - without) * np.sign(present.mean() - without.mean())
        later = moved[:, -1] - moved[:, 0]
        error = float(later.std(ddof=1)) / math.sqrt(len(later))
        return float(later.mean()) > max(4 * error, 0.2 * float(moved[:, 0].mean()))

    @property
    def noise_shrinks(self) -> bool:
        """Whether the last round has clearly less noise than the first."""
        sizes = np.square(self.without.moves[..., 1:]).mean((0, 2))
        return bool(sizes[-1] < 0.8 * sizes[0])

    @property
    def without_noise(self) -> bool:
        """Whether a released number without noise changes with the canary."""
        both = np.stack([self.without.statistics, self.present.statistics])
        both = np.nan_to_num(both, nan=-1e300)  # NaN on one side alone shows the canary too
        constant = (both == both[:, :1]).all((0, 1))
        return bool((constant & (both[0, 0] != both[1, 0])).any())

    def grid(self) -> Finding:
        """Whether rows are on the noise's grid, if it has one.

        If noise has few values (in float16, for one) and the sum has more, a release shows the
        sum's low bits: with the canary other values occur than without. If rows are rounded to the
        noise's grid, the same values occur.
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
        examined = f"{len(present):,} values with it, {len(known):,} without"
        if not GRID_SHARE < again < 1:
            return invariant(examined, None, "noise on no grid")
        shared = np.isin(present, known)

        def p(share: Floats, _: object) -> Floats:
            return np.asarray(
                bdtr(np.floor(share * len(shared)), len(shared), SHARED_SHARE * again)
            )

        words = f"a share of {{}} of its values occur without it; {again:.3g} do of others"
        return statistical(examined, Statistic(words, np.array([shared.mean()]), p, again))


def clip_norm_follows_rows(silent: Observations, examined: str) -> Finding:
    """Whether an adaptive clip norm falls while all rows are shorter than it.

    It is measured by the noise, whose size is proportional to the clip norm.
    """
    if silent.moves.shape[1] < 2:
        return untested(examined, "a clip norm that adapts shows it in two rounds or more")
    sizes = np.log(np.sqrt(np.square(silent.moves).mean(-1)))
    rises = sizes[:, -1] - sizes[:, 0]
    error = max(float(rises.std(ddof=1)) / math.sqrt(len(rises)), 1e-12)

    def p(rise: Floats, _: object) -> Floats:
        return np.asarray(np.exp(log_ndtr(-rise / error)))

    words = "the noise of rows of length 0 grew by a factor of exp({}) from first to last round"
    return statistical(examined, Statistic(words, np.array([rises.mean()]), p, -3 * error))
