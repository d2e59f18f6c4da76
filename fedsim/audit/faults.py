"""What a client's misdeeds may not change: releases, cohorts, charges, and other rounds."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsim.audit.checks import Check, Subject, invariant
from fedsim.audit.messages import SILENCES, message_grid
from fedsim.audit.observe import Observation, Parameters, Plan, observe
from fedsim.audit.worlds import OPPOSED, Canaries, still
from fedsim.rows import Layout
from fedsim.strategies import DPFedAvg

__all__ = ["Faults"]

PAUSE, DEADLINE = 0.5, 0.25


class Faults:
    """Compares runs of one seed, and keeps the first thing that is wrong of each kind."""

    KINDS: ClassVar[dict[str, tuple[Subject, str]]] = {
        "releases": ("plan", "every round is released"),
        "others asked": ("sampler", "the others asked are the same"),
        "charges": ("ledger", "the same is charged"),
        "earlier rounds": ("noise", "rounds without the canary are the same"),
        "slowness": ("plan", "a slow client shuts nobody out"),
        "traces": ("plan", "who adds nothing leaves no trace"),
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
        nobody: Canaries = still(population, d, ())

        def run(answer: str | None) -> Observation:
            grid = message_grid(population, None if answer is None else SILENCES[answer])
            return observe(plan, nobody, small, seed, grid=grid)

        failing = run(None)
        for answer in SILENCES:
            seen = run(answer)
            self.compare(f"a canary that {answer}", failing, seen, population - 1)
            if not np.array_equal(failing.moves, seen.moves):
                self._note("releases", f"the release changed with a canary that {answer}")

    def _note(self, name: str, sentence: str) -> None:
        self._broken.setdefault(name, sentence)
