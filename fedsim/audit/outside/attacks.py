"""Attacks on a target: federations in which one row shows most, and what it moves in them.

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
from scipy.special import gammaln, log_ndtr

from fedsim.audit.checks import Finding, Floats, Statistic, invariant, statistical, untested
from fedsim.audit.outside.claims import TargetClaim
from fedsim.audit.outside.federation import SHAPES, LittleFederation, TargetRelease

LONG = 1e3
"""Length of a row that every bound shortens, in C."""
FAINT = 1e-6
"""Length in C of a row that adds nothing, to a target that fails where it is zero."""
MANY = 1e3
"""Examples that a client says to have, where others have one."""

Target = Callable[[LittleFederation], TargetRelease]


def along(index: int) -> Floats:
    """The unit vector along a coordinate."""
    row = np.zeros(width())
    row[index] = 1.0
    return row


def width() -> int:
    """Number of the model's entries."""
    return sum(math.prod(shape) for shape in SHAPES)


def spread() -> Floats:
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
    others, canary : float
        Length of the rows of all other clients and of the canary, in C.
    examples : float
        How many the canary says to have; others have one.
    cause : str
        What it most likely means that a target withstands the attacks before it, but not this.
    silence : float
        Length of a row that adds nothing, in C.
    beside : float64 ``[d]``, optional
        A unit vector at a right angle, along which others' rows lie, every second one backwards.
    """

    name: str
    direction: Floats
    others: float
    canary: float
    cause: str
    examples: float = 1.0
    silence: float = 0.0
    beside: Floats | None = None

    def federation(self, claim: TargetClaim, present: bool, seed: int) -> LittleFederation:
        """The federation with the canary, or its neighbour without."""
        n, c = claim.population, claim.clip_norm
        lengths, examples = np.full(n, self.others), np.ones(n)
        lengths[-1], examples[-1] = self.canary, self.examples
        if not present and claim.adjacency == "replace-one":
            lengths[-1], examples[-1] = -self.canary, 1.0
        elif not present and claim.adjacency == "zero-out":
            lengths[-1], examples[-1] = 0.0, 1.0
        lengths = c * np.where(lengths == 0, self.silence, lengths)
        rows = lengths[:, None] * self.direction
        if self.beside is not None:
            signs = np.where(np.arange(n - 1) % 2, -1.0, 1.0)
            rows[:-1] = (signs * lengths[:-1])[:, None] * self.beside
        kept = n - (not present and claim.adjacency == "add-remove")
        return LittleFederation(
            rows=rows[:kept],
            examples=examples[:kept],
            rounds=claim.rounds,
            seed=seed,
            rate=claim.rate,
            clip_norm=claim.clip_norm,
            noise_multiplier=claim.noise_multiplier or 0.0,
        )


ATTACKS = (
    Attack("a row of length C", along(0), 0.0, 1.0, "noise is too small, or more is sampled"),
    Attack("a longer row", along(40), 0.0, LONG, "rows longer than C pass"),
    Attack("a longer row in all arrays", spread(), 0.0, LONG, "each array is clipped by itself"),
    Attack("a row of zeros among others", along(1), 1.0, 0.0, "the denominator is counted"),
    Attack("a row against all others", along(2), 1.0, -1.0, "the denominator is counted"),
    Attack(
        "a row of many examples", along(3), 0.0, 1.0,
        "rows are weighted by numbers that clients report", examples=MANY,
    ),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Seen:
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
    def of(cls, target: Target, federations: Sequence[LittleFederation]) -> Seen:
        """Run the target on each."""
        released = [target(federation) for federation in federations]
        models = np.stack([run.models for run in released])
        names = sorted({name for run in released for name in run.statistics})
        rounds = models.shape[1]
        numbers = [
            np.stack([run.statistics.get(name, np.zeros(rounds)) for name in names], axis=-1)
            if names
            else np.zeros((rounds, 0))
            for run in released
        ]
        sampled = [run.sampled for run in released if run.sampled is not None]
        return cls(np.diff(models, axis=1, prepend=0.0), np.stack(numbers), sampled)

    @property
    def table(self) -> Floats:
        """Moves and statistics side by side."""
        return np.concatenate([self.moves, self.statistics], axis=2)


@dataclass(frozen=True, eq=False)
class Attacked:
    """An attack and its runs, without and with the canary."""

    attack: Attack
    claim: TargetClaim
    without: Seen
    present: Seen

    @cached_property
    def _lengths(self) -> tuple[Floats, Floats]:
        """Moves along the direction, in standard deviations of the noise: a mean for each run."""
        u = self.attack.direction
        along = [seen.moves @ u for seen in (self.without, self.present)]
        moves = np.concatenate([self.without.moves, self.present.moves])
        across = moves - np.concatenate(along)[..., None] * u
        degrees = len(u) - 1
        if (v := self.attack.beside) is not None:
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
            without, present = np.split((np.concatenate(along) / units).mean(1), 2)
        return without, present

    @property
    def moved(self) -> float:
        """By how many standard deviations of the noise the canary moved a round, on average."""
        without, present = self._lengths
        with np.errstate(invalid="ignore"):
            return abs(float(present.mean() - without.mean()))

    @property
    def allowed(self) -> float:
        """By how many it may."""
        assert self.claim.reach is not None
        return self.claim.reach

    def finding(self) -> Finding:
        """Whether the canary moved the model further than the claim allows, on average."""
        without, present = self._lengths
        looked = f"{len(without)} and {len(present)} runs of {self.claim.rounds} rounds"
        if not (np.isfinite(without).all() and np.isfinite(present).all()):
            return invariant(looked, "releases without any noise", "noise in every release")
        # Runs of one seed: what of their noise is the same is not in their difference.
        of_difference = (present - without).std(ddof=1) / math.sqrt(len(without))
        values = self.without.moves[..., 1:].size
        error = math.hypot(of_difference, self.moved / math.sqrt(2 * values)) or 1e-12

        def p(moved: Floats, _: object) -> Floats:
            return np.asarray(np.exp(log_ndtr(-(moved - self.allowed) / error)))

        words = f"moved by {{}} std of the noise ({self.allowed:.4g} is claimed)"
        statistic = Statistic(words, np.array([self.moved]), p, self.allowed - 3 * error)
        return statistical(looked, statistic)

    @property
    def without_noise(self) -> bool:
        """Whether a released number shows the canary, and is the same in all runs otherwise."""
        sides = [seen.statistics for seen in (self.without, self.present)]
        constant = [np.ptp(side, axis=0).max(initial=0.0) == 0 for side in sides]
        return all(constant) and bool((sides[0][0] != sides[1][0]).any())


OF_ADAPTIVE = (
    *(attack for attack in ATTACKS if not attack.others),
    Attack(
        "a row among long rows", along(4), LONG, LONG,
        "rows are clipped to another C than noise has", beside=along(5),
    ),
)  # fmt: skip
"""Of clip norms that follow the rows, which rise or fall here in every round.

One row more moves such a C, as is charged, and with it all that others add: they add nothing.
"""


def follows_rows(silent: Seen, looked: str) -> Finding:
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
