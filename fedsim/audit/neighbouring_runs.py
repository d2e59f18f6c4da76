"""Neighbouring runs of one seed: the same cohorts and noise, with and without a canary.

With noise and cohorts equal, the difference of two releases is exact: it is what the canary
added to the sum. In units of the released noise it may be as long as the ledger says, one over
the noise multiplier, and not longer, whatever the canary sends; and nothing else may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from fedsim.audit.adversarial_clients import (
    REPLIES,
    Behaviour,
    Reply,
    behaviours,
    message_grid,
)
from fedsim.audit.checks import Check, Floats, Subject, invariant
from fedsim.audit.noise_scale import MeasuredNoise, allowed_length, length_check
from fedsim.audit.observation import Observation, Target, observe
from fedsim.audit.side_channels import SEEDS, NoiseOnly, side_channel_checks
from fedsim.audit.worlds import OPPOSED, Canaries, World, longest_row, reach

SEEDS_TRIED = 300
FEW = 3
PAUSE, DEADLINE = 0.5, 0.25


def pair_checks(target: Target, noise: MeasuredNoise, seed: int) -> list[Check]:
    """Try every behaviour, and compare with a federation without the canary.

    Parameters
    ----------
    noise : MeasuredNoise
        Of releases of the same target.
    """
    seed, rounds = _seed_with_canary(target, seed)
    noise_only = NoiseOnly.of(target.with_rounds(rounds + 1), seed)
    stds_of_scalars = noise_only.stds(rounds - 1)
    target = target.with_rounds(rounds)
    faults, lengths = Faults(target, seed), []
    without: dict[str, Observation] = {}
    bounded = longest_row(target.mechanism, target.layout)
    tried = behaviours(target.layers, reach(target.mechanism, target.layout), bounded)
    for behaviour in tried:
        world, culprit = behaviour.world, f"a canary that {behaviour.name}"
        if world.name not in without:
            without[world.name] = faults.observe(_without_canary(target, world))
        absent = without[world.name]
        seen = faults.observe(behaviour.change(target.world(world)))
        faults.compare(culprit, absent, seen)
        if _leaves_no_trace(target, behaviour) and _moved(absent, seen):
            faults.note("traces", f"the release changed with {culprit}")
        # A share includes noise: where it is missing, the noise is another.
        if behaviour.harmless or not target.shares:
            std = noise.of_round(absent, rounds - 1, target)
            lengths.append(_Length.of(behaviour, absent, seen, std, stds_of_scalars))
    faults.lonely_canary()
    faults.slow_client()
    faults.malformed_replies()
    looked = f"{len(tried)} canary behaviours in round {rounds}, each against no canary"
    return [
        *_bounded(lengths, target, noise, looked),
        *faults.checks(looked),
        *side_channel_checks(noise_only),
    ]


def _seed_with_canary(target: Target, seed: int) -> tuple[int, int]:
    """A seed with which the last client is sampled early, and the first round in which it is."""
    few = target.at_most(FEW)
    for tried in range(seed, seed + SEEDS_TRIED):
        seen = observe(few, target.silent_clients(), tried)
        for number, ids in enumerate(seen.asked, start=1):
            if target.population - 1 in ids:
                return tried, number
    return seed, few.rounds


def _without_canary(target: Target, world: World) -> Canaries:
    if not target.shares:
        return target.world(world, present=False)
    # A client that has nothing to add still sends its share of the noise.
    clients = target.world(world)
    rows = clients.rows.clone()
    rows[-1] = 0
    return clients.changed(rows=rows)


def _leaves_no_trace(target: Target, behaviour: Behaviour) -> bool:
    """Whether the release with such a canary must be the same as without one."""
    if target.shares or target.adjacency == "replace-one":
        return False
    # Bounds that learn may center rows, or count them.
    plain = not target.adapts and not target.sides
    return behaviour.adds == "nothing" or (behaviour.adds == "zeros" and plain)


def _moved(before: Observation, after: Observation) -> bool:
    return not np.array_equal(before.moves, after.moves)


@dataclass(frozen=True)
class _Length:
    """How far one behaviour moved the release, in standard deviations of its noise.

    Attributes
    ----------
    behaviour : str
    moves, scalars : float
        Of the parameters, and of the scalars that are released beside.
    without_noise : str or None
        A scalar that moved and has no noise.
    """

    behaviour: str
    moves: float
    scalars: float
    without_noise: str | None

    @classmethod
    def of(
        cls,
        behaviour: Behaviour,
        absent: Observation,
        seen: Observation,
        std: Floats,
        stds_of_scalars: Mapping[str, float],
    ) -> _Length:
        """Of the last round of a run with the canary, against one without it."""
        moved = float(np.linalg.norm((seen.moves[-1] - absent.moves[-1]) / std))
        farthest, without_noise = 0.0, None
        before = absent.shown[-1] if absent.shown else {}
        after = seen.shown[-1] if seen.shown else {}
        for name, scalar_std in stds_of_scalars.items():
            difference = abs(after.get(name, 0.0) - before.get(name, 0.0))
            if difference <= 1e-12 * (1 + abs(before.get(name, 0.0))):
                continue
            if scalar_std == 0:
                without_noise = name
            else:
                farthest = max(farthest, difference / scalar_std)
        return cls(behaviour.name, moved, farthest, without_noise)


def _bounded(
    lengths: Sequence[_Length], target: Target, noise: MeasuredNoise, looked: str
) -> list[Check]:
    """The longest move against what the event allows."""
    allowed = allowed_length(target.event)
    longest = max(lengths, key=lambda length: length.moves)
    whose = f"by one that {longest.behaviour}"
    checks = [length_check("what one client moves", looked, longest.moves, whose, allowed, noise)]
    name = "what one client moves, released scalars included"
    bare = next((length for length in lengths if length.without_noise), None)
    together = max(lengths, key=lambda length: length.moves**2 + length.scalars**2)
    if bare is not None:
        broken = f"'{bare.without_noise}' has no noise, and moves with one that {bare.behaviour}"
        checks.append(invariant("bound", name, looked, broken, "scalars with noise"))
    elif together.scalars:
        shares = (together.moves**2, together.scalars**2)
        checks.append(
            length_check(
                name, looked, math.hypot(together.moves, together.scalars),
                f"by one that {together.behaviour}", allowed, noise, shares, SEEDS - 2,
            )
        )  # fmt: skip
    return checks


class Faults:
    """Compares runs of one seed, and keeps the first thing that is wrong of each kind."""

    KINDS: ClassVar[dict[str, tuple[Subject, str]]] = {
        "releases": ("plan", "every round is released"),
        "other clients": ("sampler", "the same other clients are sampled"),
        "charges": ("ledger", "the same is charged"),
        "earlier rounds": ("noise", "the same in rounds without the canary"),
        "slowness": ("plan", "a slow client excludes no other client"),
        "messages": ("bound", "updates in messages add what blocks of rows add"),
        "traces": ("plan", "a client that adds nothing leaves no trace"),
    }

    def __init__(self, target: Target, seed: int) -> None:
        self._target, self._seed = target, seed
        self._small = target.with_model({name: t[:2] for name, t in target.start.items()})
        self._broken: dict[str, str] = {}

    def checks(self, looked: str) -> list[Check]:
        """One check a kind."""
        return [
            invariant(subject, name, looked, self._broken.get(name), expected)
            for name, (subject, expected) in self.KINDS.items()
        ]

    def note(self, name: str, sentence: str) -> None:
        """Keep what is wrong, if it is the first of its kind."""
        self._broken.setdefault(name, sentence)

    def observe(self, clients: Canaries) -> Observation:
        """A run with these clients."""
        return observe(self._target, clients, self._seed)

    def compare(self, culprit: str, without: Observation, seen: Observation) -> None:
        """Compare a run with a canary to one without."""
        rounds, canary = len(seen.moves), self._target.population - 1
        if seen.ended or seen.released != rounds or len(seen.shown) != rounds:
            reason = f" ({seen.ended})" if seen.ended else ""
            self.note("releases", f"{seen.released} of {rounds} with {culprit}{reason}")
        elif without.released != rounds:
            self.note("releases", f"{without.released} of {rounds} without the canary")
        for before, after in zip(without.asked, seen.asked, strict=True):
            others = np.setdiff1d(before, [canary]), np.setdiff1d(after, [canary])
            if not np.array_equal(*others):
                self.note("other clients", f"other clients were sampled with {culprit}")
        lines = [[(entry.round, entry.event) for entry in run.entries] for run in (without, seen)]
        if lines[0] != lines[1]:
            self.note("charges", f"the ledgers differ with {culprit}")
        if not np.array_equal(without.moves[:-1], seen.moves[:-1]):
            self.note("earlier rounds", f"they differ with {culprit}, which was not sampled yet")

    def lonely_canary(self) -> None:
        """Where all other clients fail too, a round must be released all the same."""
        clients = self._small.world(OPPOSED, neighbour="zero-out", scale=1.0)
        nobody = np.zeros(self._target.population, dtype=np.bool_)
        canary = nobody.copy()
        canary[-1] = True
        without, seen = (
            observe(self._small, clients.changed(ok=ok), self._seed) for ok in (nobody, canary)
        )
        self.compare("a canary where all others fail", without, seen)

    def slow_client(self) -> None:
        """A client that takes longer than the strategy waits must not exclude other clients."""
        single, seed = self._small.with_rounds(1), self._seed
        scale = reach(self._target.mechanism, self._target.layout)
        clients = single.world(OPPOSED, neighbour="zero-out", scale=scale)
        nobody = observe(single, single.silent_clients(), seed)
        slowest = clients.changed(pause=PAUSE, pauses=int(min(nobody.asked[0], default=0)))
        quick = observe(single, clients.changed(), seed, timeout=DEADLINE + PAUSE)
        slow = observe(single, slowest, seed, timeout=DEADLINE)
        # Its own row may be lost; with it the sum changes by one client's, not by all clients'.
        lost = len(quick.asked[0]) - len(slow.asked[0])
        if lost > 1 or slow.released != quick.released or slow.ended:
            self.note("slowness", f"{lost} clients were left out with one that is slow")

    def malformed_replies(self) -> None:
        """Over messages: a reply that cannot be read must be a failure and nothing more."""
        target = self._small
        if target.shares or target.sides:
            return

        def run(last: Reply | Literal["fails"]) -> Observation:
            grid = message_grid(target.population, last=last)
            return observe(target, target.silent_clients(), self._seed, grid=grid)

        failing = run("fails")
        for name, reply in REPLIES.items():
            seen = run(reply)
            self.compare(f"a canary that {name}", failing, seen)
            if _moved(failing, seen):
                self.note("releases", f"the release changed with a canary that {name}")
        self._messages(target.with_rounds(1))

    def _messages(self, single: Target) -> None:
        """Updates that come as messages, once or twice, add what those of blocks add."""
        population, d = single.population, single.layout.d
        signs = np.random.default_rng(1).choice([-1.0, 1.0], (population, d))
        lengths = 0.75 * np.sqrt(2.0) ** (torch.arange(population) % 6)[:, None]
        rows = torch.from_numpy(signs) * lengths * longest_row(single.mechanism, single.layout)
        metrics = {"num-examples": np.ones(population)}
        clients = Canaries(rows, np.ones(population, dtype=np.bool_), metrics)
        blocks = observe(single, clients, self._seed)
        for twice in (False, True):
            grid = message_grid(population, rows, twice=twice)
            seen = observe(single, clients, self._seed, grid=grid)
            # A client's update is a difference of parameters in float64.
            size = np.abs(blocks.moves).max()
            if not np.allclose(blocks.moves, seen.moves, rtol=0, atol=1e-6 * size):
                again = " that come twice" if twice else ""
                self.note("messages", f"replies{again} add something else than blocks of rows")
