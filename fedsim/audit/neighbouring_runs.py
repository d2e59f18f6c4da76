"""Neighbouring runs of one seed: the same draws and the same noise, but for what a canary does.

With noise and cohorts equal, the difference of two releases is exact: it is what the canary
added to the sum. In units of the released noise it may be as long as the ledger says, one over
the noise multiplier, and not longer, whatever the canary sends; and nothing else may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import chdtr

from fedsim.audit.adversarial_clients import REPLIES, Behaviour, behaviours, message_grid
from fedsim.audit.checks import Check, Statistic, Subject, invariant, statistical
from fedsim.audit.noise_scale import MeasuredNoise
from fedsim.audit.observe import Observation, Parameters, Plan, observe
from fedsim.audit.side_channels import SEEDS, NoiseOnly, longest_rows, side_channel_checks
from fedsim.audit.worlds import OPPOSED, Canaries, World, reach, still
from fedsim.privacy import Event
from fedsim.rows import Layout
from fedsim.strategies import DPFedAvg

__all__ = ["pair_checks", "size_check"]

Floats = npt.NDArray[np.float64]

SLACK = 1e-6
"""Rounding to the grid, and of differences of parameters."""
SEEDS_TRIED = 300
FEW = 3
PAUSE, DEADLINE = 0.5, 0.25


@dataclass(frozen=True)
class _Length:
    """How far one behaviour moved the release, in standard deviations of its noise."""

    behaviour: str
    moves: float
    numbers: float
    bare: str | None


def pair_checks(plan: Plan, start: Parameters, noise: MeasuredNoise, seed: int) -> list[Check]:
    """Try every behaviour, and compare with a federation without the canary.

    Parameters
    ----------
    start : mapping of name to Tensor
        The parameters that ``noise`` speaks of.
    noise : MeasuredNoise
        Of releases of the same plan.
    """
    strategy = plan.strategy(seed)
    scale = reach(strategy.mechanism, Layout.of(start))
    seed, rounds = _seed_with_canary(plan, strategy, start, seed)
    pairs = _Pairs(Plan(plan.strategy, rounds), strategy, start, scale, seed)
    last = Plan(plan.strategy, rounds + 1)
    channels = NoiseOnly.of(last, strategy, start, seed)
    numbers = channels.stds(rounds - 1)
    faults, lengths = Faults(), []
    tried = behaviours(start, scale, longest_rows(strategy, Layout.of(start)))
    for behaviour in tried:
        without, seen = pairs.of(behaviour)
        faults.compare(f"a canary that {behaviour.name}", without, seen, pairs.canary)
        if pairs.traceless(behaviour):
            faults.traceless(f"a canary that {behaviour.name}", without, seen)
        if pairs.exact(behaviour):
            lengths.append(_length(behaviour, without, seen, noise, numbers))
    faults.lonely(pairs.plan, start, strategy, seed)
    faults.slow(pairs.plan, start, strategy, scale, seed)
    faults.malformed(pairs.plan, start, strategy, seed)
    looked = f"{len(tried)} canary behaviours in round {rounds}, each against no canary"
    event = strategy.plan.event()
    return [
        *_bounded(lengths, event, noise, looked),
        *faults.checks(looked),
        *side_channel_checks(last, strategy, channels, _allowed(event)),
    ]


class _Pairs:
    """Runs with and without the canary, the latter once a world."""

    def __init__(
        self, plan: Plan, strategy: DPFedAvg, start: Parameters, scale: float, seed: int
    ) -> None:
        self.plan, self.start, self.seed = plan, start, seed
        self.strategy, self._scale = strategy, scale
        self._without: dict[str, Observation] = {}
        population = strategy.cohort.population
        assert population is not None
        self.population, self.canary = population, population - 1

    def exact(self, behaviour: Behaviour) -> bool:
        """Whether noise is the same with and without: a share takes its noise along."""
        return self.strategy.placement == "server" or behaviour.harmless

    def traceless(self, behaviour: Behaviour) -> bool:
        """Whether a canary that does it is as good as none."""
        strategy = self.strategy
        if strategy.placement == "client" or strategy.cohort.adjacency == "replace-one":
            return False
        # Bounds that learn may center rows, or count them.
        plain = not strategy.mechanism.init(Layout.of(self.start))
        plain = plain and not strategy.mechanism.side_names
        return behaviour.adds == "nothing" or (behaviour.adds == "zeros" and plain)

    def of(self, behaviour: Behaviour) -> tuple[Observation, Observation]:
        """Without and with the canary."""
        if behaviour.world.name not in self._without:
            self._without[behaviour.world.name] = self._observe(self._absent(behaviour.world))
        return self._without[behaviour.world.name], self._observe(
            behaviour.change(self._there(behaviour.world))
        )

    def _there(self, world: World, present: bool = True) -> Canaries:
        return world.trainer(
            self.population,
            sum(tensor.numel() for tensor in self.start.values()),
            self._scale,
            present=present,
            neighbour=self.strategy.cohort.adjacency,
            sides=self.strategy.mechanism.side_names,
        )

    def _absent(self, world: World) -> Canaries:
        if self.strategy.placement == "server":
            return self._there(world, present=False)
        # A client that has nothing to add still sends its share of the noise.
        canaries = self._there(world)
        rows = canaries.rows.clone()
        rows[-1] = 0
        return canaries.but(rows=rows)

    def _observe(self, trainer: Canaries) -> Observation:
        return observe(self.plan, trainer, self.start, self.seed)


def _seed_with_canary(
    plan: Plan, strategy: DPFedAvg, start: Parameters, seed: int
) -> tuple[int, int]:
    """A seed with which the last client is asked early, and the first round in which it is."""
    population = strategy.cohort.population
    assert population is not None
    d = Layout.of(start).d
    nobody = still(population, d, strategy.mechanism.side_names)
    for tried in range(seed, seed + SEEDS_TRIED):
        seen = observe(Plan(plan.strategy, min(FEW, plan.rounds)), nobody, start, tried)
        for number, ids in enumerate(seen.asked, start=1):
            if population - 1 in ids:
                return tried, number
    return seed, min(FEW, plan.rounds)


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
    return (2.0 if event.relation == "replace-one" else 1.0) / event.total_noise_multiplier


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

    def __init__(self) -> None:
        self._broken: dict[str, str] = {}

    def checks(self, looked: str) -> list[Check]:
        """One check a kind."""
        return [
            invariant(subject, name, looked, self._broken.get(name), holds)
            for name, (subject, holds) in self.KINDS.items()
        ]

    def compare(self, culprit: str, without: Observation, seen: Observation, canary: int) -> None:
        """Compare a run with a canary to one without."""
        rounds = len(seen.moves)
        if seen.ended or seen.released != rounds or len(seen.shown) != rounds:
            reason = f" ({seen.ended})" if seen.ended else ""
            self._note("releases", f"{seen.released} of {rounds} with {culprit}{reason}")
        elif without.released != rounds:
            self._note("releases", f"{without.released} of {rounds} without the canary")
        for before, after in zip(without.asked, seen.asked, strict=True):
            others = np.setdiff1d(before, [canary]), np.setdiff1d(after, [canary])
            if not np.array_equal(*others):
                self._note("others asked", f"others were asked beside {culprit}")
        lines = [[(entry.round, entry.event) for entry in run.entries] for run in (without, seen)]
        if lines[0] != lines[1]:
            self._note("charges", f"the ledgers differ with {culprit}")
        if not np.array_equal(without.moves[:-1], seen.moves[:-1]):
            self._note("earlier rounds", f"they differ with {culprit}, who was not asked yet")

    def traceless(self, culprit: str, without: Observation, seen: Observation) -> None:
        """A client that contributes nothing changes no bit of what is released."""
        if not np.array_equal(without.moves, seen.moves):
            self._note("traces", f"the release changed with {culprit}")

    def lonely(self, plan: Plan, start: Parameters, strategy: DPFedAvg, seed: int) -> None:
        """Where everybody else fails, too, a round must come all the same."""
        population = strategy.cohort.population
        assert population is not None
        small = {name: tensor[:2] for name, tensor in start.items()}
        d, sides = Layout.of(small).d, strategy.mechanism.side_names
        canaries = OPPOSED.trainer(
            population, d, 1.0, present=True, neighbour="zero-out", sides=sides
        )
        ok = np.zeros(population, dtype=np.bool_)
        nobody = observe(plan, canaries.but(ok=ok), small, seed)
        ok = ok.copy()
        ok[-1] = True
        alone = observe(plan, canaries.but(ok=ok), small, seed)
        self.compare("a canary where all others fail", nobody, alone, population - 1)

    def slow(
        self, plan: Plan, start: Parameters, strategy: DPFedAvg, scale: float, seed: int
    ) -> None:
        """A client that takes longer than the strategy waits must not cost others their turn."""
        population = strategy.cohort.population
        assert population is not None
        small = {name: tensor[:2] for name, tensor in start.items()}
        d, sides = Layout.of(small).d, strategy.mechanism.side_names
        canaries = OPPOSED.trainer(
            population, d, scale, present=True, neighbour="zero-out", sides=sides
        )
        single = Plan(plan.strategy, 1)
        first = int(
            min(observe(single, still(population, d, sides), small, seed).asked[0], default=0)
        )
        quick = observe(single, canaries.but(), small, seed, timeout=DEADLINE + PAUSE)
        slow = observe(
            single, canaries.but(pause=PAUSE, pauses=first), small, seed, timeout=DEADLINE
        )
        # Its own row may be lost; with it the sum changes by one client's, not by everybody's.
        lost = len(quick.asked[0]) - len(slow.asked[0])
        if lost > 1 or slow.released != quick.released or slow.ended:
            self._note("slowness", f"{lost} clients were left out with one that is slow")

    def malformed(self, plan: Plan, start: Parameters, strategy: DPFedAvg, seed: int) -> None:
        """Over messages: an answer that is none at all must be a failure and nothing more."""
        if strategy.placement != "server" or strategy.mechanism.side_names:
            return
        population = strategy.cohort.population
        assert population is not None
        small = {name: tensor[:2] for name, tensor in start.items()}
        d = Layout.of(small).d
        nobody = still(population, d, ())

        def run(**settings: Any) -> Observation:
            return observe(plan, nobody, small, seed, grid=message_grid(population, **settings))

        failing = run(last="fails")
        for name, reply in REPLIES.items():
            seen = run(last=reply)
            self.compare(f"a canary that {name}", failing, seen, population - 1)
            if not np.array_equal(failing.moves, seen.moves):
                self._note("releases", f"the release changed with a canary that {name}")
        self._messages(Plan(plan.strategy, 1), strategy, small, seed)

    def _messages(self, plan: Plan, strategy: DPFedAvg, start: Parameters, seed: int) -> None:
        """Updates that come as messages, once or twice, add what those of blocks add."""
        population, layout = strategy.cohort.population, Layout.of(start)
        assert population is not None
        rows = torch.from_numpy(
            np.random.default_rng(1).choice([-1.0, 1.0], (population, layout.d))
        )
        rows *= 0.75 * np.sqrt(2.0) ** (torch.arange(population) % 6)[:, None]
        rows *= longest_rows(strategy, layout)
        metrics = {"num-examples": np.ones(population)}
        clients = Canaries(rows, np.ones(population, dtype=np.bool_), metrics)
        blocks = observe(plan, clients, start, seed)
        for twice in (False, True):
            grid = message_grid(population, rows, twice=twice)
            seen = observe(plan, clients, start, seed, grid=grid)
            # A client's update is a difference of parameters in float64.
            size = np.abs(blocks.moves).max()
            if not np.allclose(blocks.moves, seen.moves, rtol=0, atol=1e-6 * size):
                again = " that come twice" if twice else ""
                self._note("messages", f"replies{again} add something else than blocks of rows")

    def _note(self, name: str, sentence: str) -> None:
        self._broken.setdefault(name, sentence)
