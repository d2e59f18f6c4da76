"""Neighbouring runs of one seed: the same draws and the same noise, but for what a canary does.

With noise and cohorts equal, the difference of two releases is exact: it is what the canary
added to the sum. In units of the released noise it may be as long as the ledger says, one over
the noise multiplier, and not longer, whatever the canary sends; and nothing else may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy.special import chdtr

from fedsim.audit.adversarial_clients import (
    REPLIES,
    Behaviour,
    Reply,
    behaviours,
    message_grid,
)
from fedsim.audit.checks import Check, Statistic, Subject, invariant, statistical
from fedsim.audit.noise_scale import MeasuredNoise
from fedsim.audit.observation import Observation, Parameters, Target, observe
from fedsim.audit.side_channels import SEEDS, NoiseOnly, longest_row, side_channel_checks
from fedsim.audit.worlds import OPPOSED, Canaries, World, reach, silent_clients
from fedsim.privacy import Event
from fedsim.rows import Layout

SLACK = 1e-6
"""Rounding to the grid, and of differences of parameters."""
SEEDS_TRIED = 300
FEW = 3
PAUSE, DEADLINE = 0.5, 0.25


def pair_checks(target: Target, start: Parameters, noise: MeasuredNoise, seed: int) -> list[Check]:
    """Try every behaviour, and compare with a federation without the canary.

    Parameters
    ----------
    start : mapping of name to Tensor
        The parameters that ``noise`` speaks of.
    noise : MeasuredNoise
        Of releases of the same target.
    """
    seed, rounds = _seed_with_canary(target, start, seed)
    last = target.with_rounds(rounds + 1)
    channels = NoiseOnly.of(last, start, seed)
    numbers = channels.stds(rounds - 1)
    faults, lengths = Faults(target.with_rounds(rounds), start, seed), []
    without: dict[str, Observation] = {}
    layout = Layout.of(start)
    tried = behaviours(start, reach(target.mechanism, layout), longest_row(target, layout))
    for behaviour in tried:
        world, culprit = behaviour.world, f"a canary that {behaviour.name}"
        if world.name not in without:
            without[world.name] = faults.observe(_without_canary(target, world, start))
        absent = without[world.name]
        seen = faults.observe(behaviour.change(target.world(world, start)))
        faults.compare(culprit, absent, seen)
        if _leaves_no_trace(target, start, behaviour) and _moved(absent, seen):
            faults.note("traces", f"the release changed with {culprit}")
        # A share takes its noise along: without it the noise is another.
        if behaviour.harmless or not target.shares:
            lengths.append(_length(behaviour, absent, seen, noise, numbers))
    faults.lonely_canary()
    faults.slow_client()
    faults.malformed_replies()
    looked = f"{len(tried)} canary behaviours in round {rounds}, each against no canary"
    return [
        *_bounded(lengths, target.event, noise, looked),
        *faults.checks(looked),
        *side_channel_checks(last, channels, _allowed(target.event)),
    ]


def _seed_with_canary(target: Target, start: Parameters, seed: int) -> tuple[int, int]:
    """A seed with which the last client is asked early, and the first round in which it is."""
    few = target.with_rounds(min(FEW, target.rounds))
    for tried in range(seed, seed + SEEDS_TRIED):
        seen = observe(few, target.silent_clients(start), start, tried)
        for number, ids in enumerate(seen.asked, start=1):
            if target.population - 1 in ids:
                return tried, number
    return seed, few.rounds


def _without_canary(target: Target, world: World, start: Parameters) -> Canaries:
    if not target.shares:
        return target.world(world, start, present=False)
    # A client that has nothing to add still sends its share of the noise.
    clients = target.world(world, start)
    rows = clients.rows.clone()
    rows[-1] = 0
    return clients.changed(rows=rows)


def _leaves_no_trace(target: Target, start: Parameters, behaviour: Behaviour) -> bool:
    """Whether a canary that does it is as good as none."""
    if target.shares or target.adjacency == "replace-one":
        return False
    # Bounds that learn may center rows, or count them.
    plain = not target.adapts(start) and not target.sides
    return behaviour.adds == "nothing" or (behaviour.adds == "zeros" and plain)


def _moved(before: Observation, after: Observation) -> bool:
    return not np.array_equal(before.moves, after.moves)


@dataclass(frozen=True)
class _Length:
    """How far one behaviour moved the release, in standard deviations of its noise."""

    behaviour: str
    moves: float
    numbers: float
    bare: str | None


def _length(
    behaviour: Behaviour,
    without: Observation,
    seen: Observation,
    noise: MeasuredNoise,
    numbers: dict[str, float],
) -> _Length:
    std = noise.of_round(without, len(without.moves) - 1)
    moved = float(np.linalg.norm((seen.moves[-1] - without.moves[-1]) / std))
    farthest, bare = 0.0, None
    before = without.shown[-1] if without.shown else {}
    after = seen.shown[-1] if seen.shown else {}
    for name, std_of_number in numbers.items():
        difference = abs(after.get(name, 0.0) - before.get(name, 0.0))
        if difference > 1e-12 * (1 + abs(before.get(name, 0.0))):
            if std_of_number == 0:
                bare = name
            else:
                farthest = max(farthest, difference / std_of_number)
    return _Length(behaviour.name, moved, farthest, bare)


def _bounded(
    lengths: Sequence[_Length], event: Event, noise: MeasuredNoise, looked: str
) -> list[Check]:
    """The longest move against what the event allows; noise is known by estimates only."""
    allowed = _allowed(event)
    longest = max(lengths, key=lambda length: length.moves)
    checks = [
        size_check(
            "what one client moves", looked, longest.moves, allowed, noise,
            f"by one that {longest.behaviour}",
        )
    ]  # fmt: skip
    name = "what one client moves, numbers beside included"
    bare = next((length for length in lengths if length.bare), None)
    together = max(lengths, key=lambda length: length.moves**2 + length.numbers**2)
    if bare is not None:
        broken = f"'{bare.bare}' has no noise, and moves with one that {bare.behaviour}"
        checks.append(invariant("bound", name, looked, broken, "numbers with noise"))
    elif together.numbers:
        checks.append(
            size_check(
                name, looked, float(np.hypot(together.moves, together.numbers)), allowed, noise,
                f"by one that {together.behaviour}",
                shares=(together.moves**2, together.numbers**2),
            )
        )  # fmt: skip
    return checks


def _allowed(event: Event) -> float:
    """Standard deviations of the noise by which the event lets one client move a release."""
    return (2.0 if event.adjacency == "replace-one" else 1.0) / event.total_noise_multiplier


def size_check(
    name: str,
    looked: str,
    most: float,
    allowed: float,
    noise: MeasuredNoise,
    whose: str,
    shares: tuple[float, float] = (1.0, 0.0),
) -> Check:
    """Whether something is longer than allowed, in standard deviations that are estimates.

    Parameters
    ----------
    most, allowed : float
    shares : tuple of float
        Parts of its square that are moves of parameters, and of numbers beside.
    """
    total = sum(shares) or 1.0

    def p(length: float) -> float:
        squares = length**2 * np.array(shares) / total
        return _length_p(float(squares[0]), float(squares[1]), allowed, noise)

    compared = Statistic(
        f"{{}} std of the noise, {whose} ({allowed:.5g} is claimed)", np.array([most]),
        np.array([p(most)]), lambda _, length: p(max(length, 0.0)), allowed,
    )  # fmt: skip
    return statistical("bound", name, looked, [compared])


def _length_p(moves: float, numbers: float, allowed: float, noise: MeasuredNoise) -> float:
    """P-value of a squared length in estimated standard deviations.

    A variance from N values is a chi-square with N degrees over N; of a sum of two terms, the
    degrees are those of the mixture (Satterthwaite).
    """
    total = moves + numbers
    if not total < np.inf:
        return 0.0
    if total == 0:
        return 1.0
    shares = np.array([moves / total, numbers / total])
    degrees = 1 / float((np.square(shares) / [noise.values, SEEDS - 2]).sum())
    p = float(chdtr(degrees, degrees * allowed**2 * (1 + SLACK) ** 2 / total))
    # The longest move is along the layer whose noise happens to be estimated as smallest.
    return min(1.0, noise.layers * p)


class Faults:
    """Compares runs of one seed, and keeps the first thing that is wrong of each kind."""

    KINDS: ClassVar[dict[str, tuple[Subject, str]]] = {
        "releases": ("plan", "every round is released"),
        "others asked": ("sampler", "the others asked are the same"),
        "charges": ("ledger", "the same is charged"),
        "earlier rounds": ("noise", "rounds without the canary are the same"),
        "slowness": ("plan", "a slow client shuts nobody out"),
        "messages": ("bound", "updates in messages add what blocks of rows add"),
        "traces": ("plan", "a client that adds nothing leaves no trace"),
    }

    def __init__(self, target: Target, start: Parameters, seed: int) -> None:
        self._target, self._start, self._seed = target, start, seed
        self._small = {name: tensor[:2] for name, tensor in start.items()}
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
        return observe(self._target, clients, self._start, self._seed)

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
                self.note("others asked", f"others were asked beside {culprit}")
        lines = [[(entry.round, entry.event) for entry in run.entries] for run in (without, seen)]
        if lines[0] != lines[1]:
            self.note("charges", f"the ledgers differ with {culprit}")
        if not np.array_equal(without.moves[:-1], seen.moves[:-1]):
            self.note("earlier rounds", f"they differ with {culprit}, who was not asked yet")

    def lonely_canary(self) -> None:
        """Where everybody else fails, too, a round must come all the same."""
        clients = self._target.world(OPPOSED, self._small, neighbour="zero-out", scale=1.0)
        nobody = np.zeros(self._target.population, dtype=np.bool_)
        canary = nobody.copy()
        canary[-1] = True
        without, seen = (
            observe(self._target, clients.changed(ok=ok), self._small, self._seed)
            for ok in (nobody, canary)
        )
        self.compare("a canary where all others fail", without, seen)

    def slow_client(self) -> None:
        """A client that takes longer than the strategy waits must not cost others their turn."""
        single, small, seed = self._target.with_rounds(1), self._small, self._seed
        scale = reach(single.mechanism, Layout.of(self._start))
        clients = single.world(OPPOSED, small, neighbour="zero-out", scale=scale)
        nobody = observe(single, single.silent_clients(small), small, seed)
        slowest = clients.changed(pause=PAUSE, pauses=int(min(nobody.asked[0], default=0)))
        quick = observe(single, clients.changed(), small, seed, timeout=DEADLINE + PAUSE)
        slow = observe(single, slowest, small, seed, timeout=DEADLINE)
        # Its own row may be lost; with it the sum changes by one client's, not by everybody's.
        lost = len(quick.asked[0]) - len(slow.asked[0])
        if lost > 1 or slow.released != quick.released or slow.ended:
            self.note("slowness", f"{lost} clients were left out with one that is slow")

    def malformed_replies(self) -> None:
        """Over messages: an answer that is none at all must be a failure and nothing more."""
        target, small = self._target, self._small
        if target.shares or target.sides:
            return
        clients = silent_clients(target.population, Layout.of(small).d, ())

        def run(last: Reply | Literal["fails"]) -> Observation:
            grid = message_grid(target.population, last=last)
            return observe(target, clients, small, self._seed, grid=grid)

        failing = run("fails")
        for name, reply in REPLIES.items():
            seen = run(reply)
            self.compare(f"a canary that {name}", failing, seen)
            if _moved(failing, seen):
                self.note("releases", f"the release changed with a canary that {name}")
        self._messages(target.with_rounds(1))

    def _messages(self, single: Target) -> None:
        """Updates that come as messages, once or twice, add what those of blocks add."""
        population, layout = single.population, Layout.of(self._small)
        signs = np.random.default_rng(1).choice([-1.0, 1.0], (population, layout.d))
        lengths = 0.75 * np.sqrt(2.0) ** (torch.arange(population) % 6)[:, None]
        rows = torch.from_numpy(signs) * lengths * longest_row(single, layout)
        metrics = {"num-examples": np.ones(population)}
        clients = Canaries(rows, np.ones(population, dtype=np.bool_), metrics)
        blocks = observe(single, clients, self._small, self._seed)
        for twice in (False, True):
            grid = message_grid(population, rows, twice=twice)
            seen = observe(single, clients, self._small, self._seed, grid=grid)
            # A client's update is a difference of parameters in float64.
            size = np.abs(blocks.moves).max()
            if not np.allclose(blocks.moves, seen.moves, rtol=0, atol=1e-6 * size):
                again = " that come twice" if twice else ""
                self.note("messages", f"replies{again} add something else than blocks of rows")
