"""The audit of a target: all attacks, tests of its noise and its samples, and a verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from fedsim.audit import noise_checks as noise
from fedsim.audit import sampling_checks as sampling
from fedsim.audit.checks import Finding, Part, invariant
from fedsim.audit.noise_checks import NoiseSample
from fedsim.audit.outside.attacks import (
    ATTACKS,
    FAINT,
    OF_ADAPTIVE,
    Attack,
    Attacked,
    Seen,
    Target,
    follows_rows,
)
from fedsim.audit.outside.claims import TargetClaim
from fedsim.audit.outside.federation import SHAPES, LittleFederation
from fedsim.audit.sampling_checks import Sampled
from fedsim.audit.two_world import TwoWorlds, distinguish
from fedsim.audit.verdict import SHARE_OF_CHECKS, Verdict
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant

FEWEST_RUNS, MOST_RUNS = 60, 1000
MOST_SILENT = 64
"""Rounds of silent federations that tests of noise look at: their pairs are many."""

LOOKS_GAUSSIAN = 0.01
"""P-value of the shape of noise above which it is taken to be Gaussian."""
SAME, CLEARLY = 1.3, 1.05
"""Factors: rows that move a release alike, and further than is claimed."""

_NOISE = (
    ("size in each layer", noise.layer_sizes, "another size in an array"),
    ("size in each coordinate", noise.coordinate_sizes, "a coordinate without noise"),
    ("mean", noise.means, "something is added beside noise"),
    ("exact repeats", noise.exact_repeats, "noise is used again"),
    ("pairs of rounds", noise.round_pairs, "noise is used again"),
    (
        "pairs of rounds, without signs",
        noise.round_pairs_without_signs,
        "noise is used again with other signs",
    ),
    ("pairs of coordinates", noise.coordinate_pairs, "coordinates share noise"),
)
_GAUSSIAN = (
    ("extreme values", noise.extremes, "noise is truncated"),
    ("shape of the distribution", noise.shape, "not Gaussian"),
)
_SAMPLES = (
    ("sampled ids", sampling.ids, "sampling with replacement"),
    ("sizes", sampling.sizes, "another sampler, or rate"),
    ("spread of sizes", sampling.spread, "cohorts of a fixed size, announced as Poisson"),
    ("inclusion frequencies", sampling.frequencies, "some are sampled more often"),
    ("pairs sampled together", sampling.together, "rows are not drawn independently"),
    ("overlap of rounds", sampling.overlaps, "a draw is used again"),
)


@dataclass(eq=False)
class TargetAudit:
    """All runs of a target that an audit makes.

    Parameters
    ----------
    target : callable
        From a `LittleFederation` to what was released.
    claim : TargetClaim
    seconds : float
        How long the runs may take, about.
    runs : int
        Without and with the canary, of each attack; 0 for as many as the seconds allow.
    seed : int
    """

    target: Target
    claim: TargetClaim
    seconds: float
    runs: int
    seed: int
    _silence: float = field(default=0.0, init=False)

    def verdict(self, confidence: float) -> Verdict:
        """Make all runs, and say whether they refute the claim.

        Raises
        ------
        FedsimError
            If the target cannot be run, or releases something else than models.
        """
        of_zeros = self._of_zeros()
        self._silence = 0.0 if of_zeros.p_value else FAINT
        silent = self._silent()
        runs = self.runs or self._affordable()
        attacks = self._attacks()
        risk = (1 - confidence) * (1 - SHARE_OF_CHECKS) / len(attacks)
        attacked: list[Attacked] = []
        two_worlds: list[TwoWorlds] = []
        for number, attack in enumerate(attacks, start=1):
            made = self._run(attack, runs, number)
            attacked.append(made)
            two_worlds.append(
                distinguish(
                    attack.name,
                    made.without.table,
                    made.present.table,
                    attack.direction,
                    self.claim.claim,
                    risk,
                )
            )
        findings = [*self._of_noise(silent), *self._of_rows(attacked, silent)]
        findings += [*self._of_samples([silent, attacked[0].present])]
        findings += [of_zeros, *self._of_epsilon()]
        return Verdict(self.claim.claim, tuple(two_worlds), tuple(findings), confidence)

    def _attacks(self) -> list[Attack]:
        """Where neighbours replace a row or its zeros, a row of zeros is the same in both."""
        whole = self.claim.adjacency == "add-remove"
        chosen = [attack for attack in ATTACKS if attack.canary or whole]
        if self.claim.adaptive:
            chosen = list(OF_ADAPTIVE)
        return [replace(attack, silence=self._silence) for attack in chosen]

    def _federation(self, seed: int) -> LittleFederation:
        """All rows are zero."""
        silent = replace(ATTACKS[0], canary=0.0, silence=self._silence)
        return silent.federation(self.claim, True, seed)

    def _of_zeros(self) -> Finding:
        """Whether rows of zeros are released as any others are."""
        nothing = replace(ATTACKS[0], canary=0.0)
        broken = None
        try:
            released = self.target(nothing.federation(self.claim, True, self.seed))
            if not np.isfinite(released.models).all():
                broken = "a model that is not finite"
        except FedsimError as error:
            broken = str(error).rpartition("could not be run: ")[2]
        finding = invariant("one run of rows of zeros", broken, "a release like any other")
        return _named(finding, "plan", "rows of zeros", "a division by the length of a row")

    def _silent(self) -> Seen:
        runs = max(2, MOST_SILENT // self.claim.rounds)
        return Seen.of(self.target, [self._federation(self.seed + k) for k in range(runs)])

    def _affordable(self) -> int:
        started = time.perf_counter()
        tried = 3
        for k in range(tried):
            self.target(self._federation(self.seed + k))
        taken = (time.perf_counter() - started) / tried
        return int(np.clip(self.seconds / taken / 2 / len(ATTACKS), FEWEST_RUNS, MOST_RUNS))

    def _run(self, attack: Attack, runs: int, number: int) -> Attacked:
        first = self.seed + 10_000_000 * number
        sides = (
            Seen.of(
                self.target,
                [attack.federation(self.claim, present, first + k) for k in range(runs)],
            )
            for present in (False, True)
        )
        return Attacked(attack, self.claim, *sides)

    def _of_noise(self, silent: Seen) -> Iterator[Finding]:
        moves = silent.moves
        # Rows are the same in all runs: what differs is noise.
        present = noise.presence(np.diff(moves, axis=0))
        yield _named(present, "noise", "presence", "noise is left out")
        if not present.p_value:
            return
        sample = self._sample(silent)
        tests = list(_NOISE)
        if self.claim.noise_multiplier is not None:
            tests += _GAUSSIAN if not self.claim.adaptive else ()
            for name, test, cause in tests:
                yield _named(test(sample), "noise", name, cause)
        if self.claim.adaptive:
            falls = follows_rows(silent, sample.looked_at)
            yield _named(falls, "bound", "a clip norm that adapts", "its update has the wrong sign")

    def _sample(self, silent: Seen) -> NoiseSample:
        """The noise of silent federations, whose scale is not known: in units of itself."""
        ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES]).tolist()
        layers = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        axes: tuple[int, ...] = (2,) if self.claim.adaptive else (0, 1, 2)
        squares = np.square(silent.moves).mean(axes, keepdims=True)
        return NoiseSample.of(silent.moves / np.sqrt(np.maximum(squares, 1e-300)), layers)

    def _is_gaussian(self, silent: Seen) -> bool:
        """Whether noise is claimed to be, or where an epsilon alone is claimed, looks like it."""
        if self.claim.noise_multiplier is not None or self.claim.reach is None:
            return self.claim.reach is not None
        return noise.shape(self._sample(silent)).p_value > LOOKS_GAUSSIAN

    def _too_little(self, factor: float) -> str:
        """What it means that a row of length C moves a release so much further than it may."""
        if self.claim.adjacency == "replace-one" and abs(factor - 2) < 0.1:
            return "noise is for one row added or removed, and not for one replaced: half as much"
        return f"noise is {factor:.2f} times too small, or more is sampled"

    def _of_rows(self, attacked: list[Attacked], silent: Seen) -> Iterator[Finding]:
        measured = self._is_gaussian(silent)
        for made in attacked:
            if measured:
                cause = made.attack.cause
                usual = attacked[0].moved
                # Where a row within C moves it as far, the bound is not to blame.
                if usual > CLEARLY * made.allowed and made.moved < SAME * usual:
                    cause = self._too_little(usual / made.allowed)
                yield _named(made.finding(), "bound", made.attack.name, cause)
            if made.present.statistics.shape[-1]:
                broken = "a released number shows it" if made.without_noise else None
                finding = invariant("numbers released beside", broken, "no number shows it")
                cause = "statistics are released without noise"
                yield _named(finding, "plan", f"what else leaves, {made.attack.name}", cause)

    def _of_samples(self, seen: list[Seen]) -> Iterator[Finding]:
        if self.claim.noise_multiplier is None:
            return
        population = self.claim.population
        asked = [
            [np.array(ids, dtype=np.int64) for ids in run] for each in seen for run in each.sampled
        ]
        if not asked:
            return
        event = self.claim.claim.events[0]
        samples = Sampled.of(asked, event, population, self.claim.row + "s")
        for name, test, cause in _SAMPLES:
            evidence = samples if test is sampling.ids else samples.known
            if test in (sampling.frequencies, sampling.together, sampling.overlaps):
                evidence = samples.at_random
            if test is sampling.spread:
                evidence = samples.alike
            if evidence is not None:
                yield _named(test(evidence), "sampler", name, cause)

    def _of_epsilon(self) -> list[Finding]:
        claim = self.claim
        if claim.epsilon is None or claim.noise_multiplier is None:
            return []
        cost = Accountant(claim.claim.events).epsilon(claim.delta)
        broken = None if cost <= claim.epsilon * (1 + 1e-3) else f"epsilon {cost:.4g}"
        finding = invariant(
            f"{claim.rounds} rounds of multiplier {claim.noise_multiplier:g}",
            broken,
            f"epsilon {claim.epsilon:.4g}, as claimed",
        )
        return [_named(finding, "ledger", "epsilon claimed", "the accountant counts too little")]


def _named(finding: Finding, part: Part, name: str, cause: str) -> Finding:
    return replace(finding, part=part, name=name, cause=cause)


def audit_target(
    target: Target,
    claim: TargetClaim,
    *,
    seconds: float = 25.0,
    runs: int = 0,
    confidence: float = 0.99,
    seed: int = 1,
) -> Verdict:
    """Attack a target's claim.

    Raises
    ------
    FedsimError
        If the target cannot be run.
    """
    try:
        return TargetAudit(target, claim, seconds, runs, seed).verdict(confidence)
    except (ValueError, TypeError) as error:
        raise FedsimError(f"the target cannot be audited: {error}") from error
