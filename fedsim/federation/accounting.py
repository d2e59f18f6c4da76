"""Accounting of a strategy's rounds: their ledger lines, their cost, and the budget."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.privacy import Budget, Cost, Entry, Event, Ledger
from fedsim.privacy.digest import digest_of
from fedsim.privacy.entry import History, Kind
from fedsim.privacy.ledger import LedgerPosition, RunProgress
from fedsim.privacy.plan import MechanismLike, ReleasePlan
from fedsim.privacy.statement import epsilon_marks
from fedsim.randomness import Randomness


def keyed_randomness(
    seed: int | Randomness | None,
    plan: ReleasePlan[MechanismLike],
    others: Mapping[str, object],
) -> Randomness:
    """Randomness of a strategy, keyed by its seed and a digest.

    The digest is the release digest of ``seed`` if it is a `Randomness` with one, and else that of
    the strategy's settings. ``others`` are further settings that affect a release; those that are
    None are left out.
    """
    if isinstance(seed, Randomness):
        if seed.release:
            return seed
        seed = seed.seed
    given = {name: setting for name, setting in others.items() if setting is not None}
    return Randomness(seed, digest_of({"seed": seed, **plan.settings, **given}))


@dataclass
class Accounting:
    """Records each release in the ledger before it is made, and checks the budget.

    Parameters
    ----------
    plan : ReleasePlan
    delta : float
    max_epsilon : float or None
        Budget; None for that of the ledger.
    ledger : Ledger
    randomness : Randomness
    kind : "release" or "evaluation"
        What is released: a round's sum, or clients' metrics.
    run : str
        Random id of the run, in the notes of its lines.
    evaluations : Accounting or None
        Of a run that releases clients' metrics, their accounting.
    evaluations_every : int
        Rounds between two such releases.
    """

    plan: ReleasePlan[MechanismLike]
    delta: float
    max_epsilon: float | None
    ledger: Ledger
    randomness: Randomness
    kind: Kind = "release"
    run: str = field(default_factory=secrets.token_hex)
    evaluations: Accounting | None = None
    evaluations_every: int = 1

    @property
    def _budget(self) -> Budget | None:
        limit = self.ledger.max_epsilon if self.max_epsilon is None else self.max_epsilon
        return None if limit is None else Budget(limit, self.delta)

    @property
    def _progress(self) -> RunProgress:
        return self.ledger.progress(self.run, self.kind)

    def refusal(self, server_round: int) -> str | None:
        """Why this round may not be made; None if it may."""
        plan, budget = self.plan, self._budget
        if plan.closed and self.kind == "release":
            end = self._progress.paid_through or plan.rounds or 0
            if server_round > end:
                if budget is not None and end < (plan.rounds or 0):
                    return budget.message(Entry(round=server_round, event=plan.event()))
                return f"round {server_round} would follow a plan of {plan.rounds} rounds"
        if budget is None:
            return None
        self.ledger.refresh()
        entries = self._entries(server_round)
        return (
            budget.message(entries[-1]) if self.ledger.owners_over_budget(budget, entries) else None
        )

    def _entries(self, server_round: int, clip_norm: float | None = None) -> Sequence[Entry]:
        """The least that is charged before a round."""
        progress = self._progress
        if progress.was_drawn(server_round) and self.randomness.seed is None:
            event = self.plan.charge(server_round, redrawn=True)
        elif progress.is_paid(server_round):
            event = self.plan.event().times(0)
        elif self.plan.may_stop:
            fewest = 1 if self.plan.separable else self.plan.rounds or 1
            return self._plan_entries(server_round, clip_norm, fewest)
        else:
            event = self.plan.charge(server_round)
        return [self._entry(server_round, event, clip_norm)]

    def _plan_entries(
        self, server_round: int, clip_norm: float | None, rounds: int
    ) -> Sequence[Entry]:
        """Entries that charge so many rounds of a plan, and their evaluations, before the first."""
        plan = self.plan
        whole = plan.charge(1) if rounds == plan.rounds else plan.event().times(rounds)
        own = replace(self._entry(server_round, whole, clip_norm), through=rounds)
        return [*self._evaluation_entries(0, rounds), own]

    def _evaluation_entries(self, done: int, rounds: int) -> list[Entry]:
        """An entry that charges the evaluations of rounds ``done + 1`` to ``rounds``, if any."""
        every = self.evaluations_every
        count = rounds // every - done // every
        if self.evaluations is None or not count:
            return []
        event = self.evaluations.plan.event().times(count)
        # Without a round: it is no evaluation's own line.
        return [replace(self.evaluations._entry(None, event), through=rounds, run=self.run)]

    def _entry(
        self, server_round: int | None, event: Event, clip_norm: float | None = None
    ) -> Entry:
        return self.plan.entry(
            event,
            kind=self.kind,
            round=server_round,
            entropy=self.randomness.entropy,
            clip_norm=clip_norm,
            run=self.run,
        )

    def record(self, server_round: int, clip_norm: float) -> str | None:
        """Record a round's release; once this returns None, the line is on disk.

        If releases may end the run, round 1 is charged for all rounds, or for as many as the budget
        affords.

        Returns
        -------
        str or None
            Why this round may not be made: another process has spent the budget since `refusal`.
        """

        def due() -> Sequence[Entry]:
            entries = self._entries(server_round, clip_norm)
            if entries[-1].through is None or not self.plan.separable:
                return entries
            whole = partial(self._plan_entries, server_round, clip_norm)
            return self.ledger.affordable_entries(whole, self.plan.rounds or 1, self._budget)

        try:
            self.ledger.record_due(due, self._budget)
        except BudgetSpentError as error:
            return str(error).removesuffix(".")
        return None

    def check(self) -> None:
        """Refuse a budget that does not allow one round.

        Raises
        ------
        FedsimError
            With the cost of one round, or of all where they are charged together.
        """
        budget = self._budget
        if budget is None or self._progress.last_round:
            return
        cost = History().accountant_with(*self._entries(1)).epsilon(budget.delta)
        if cost > budget.epsilon:
            is_joint = not self.plan.separable
            covered = "rounds that are charged together" if is_joint else "one round"
            raise FedsimError(
                f"max_epsilon = {budget.epsilon} (noise.max-epsilon) at delta = "
                f"{budget.delta}; it must be at least {cost:.4g}, the cost of {covered}."
            )

    def charge_rest(self, rounds_done: int, rounds: int) -> None:
        """Charge the planned rounds that are not made, since what was released has ended the run.

        Without effect if all rounds were charged before the first. Only rounds that the budget
        affords are charged: it would have ended the run in a round that depends on events alone.

        Parameters
        ----------
        rounds_done : int
        rounds : int
            Planned number of rounds.
        """
        if self.plan.closed or not self.plan.private or rounds_done >= rounds:
            return
        if self._progress.paid_through >= rounds or not self._progress.last_round:
            return
        done = max(rounds_done, self._progress.paid_through)

        def entries(count: int) -> Sequence[Entry]:
            event = self.plan.event().further_rounds(count, done)
            rest = replace(self._entry(rounds_done, event), through=done + count)
            return [*self._evaluation_entries(done, done + count), rest]

        with suppress(BudgetSpentError):  # it does not afford a single round more
            self.ledger.record_due(
                lambda: self.ledger.affordable_entries(entries, rounds - done, self._budget),
                self._budget,
            )

    def cost_text(self, rounds_done: int) -> str:
        """The cost so far, as text for a progress line."""
        cost = self.ledger.cost(self.delta)
        simulated = self.plan.simulated_mark(self.randomness.entropy)
        return (
            f"epsilon{epsilon_marks(simulated, self.plan.declared_by_user)} {cost.epsilon:.4g} at "
            f"delta {cost.delta:g} (client level, {cost.adjacency})"
            f"{self._shorter_plan_text(rounds_done, cost)}"
        )

    def _shorter_plan_text(self, rounds_done: int, cost: Cost) -> str:
        """Text for a plan charged as a whole: what it would have cost, planned to end here."""
        if not self.plan.charged_ahead:
            return ""
        so_far = self.plan.epsilon(cost.delta, after_round=rounds_done)
        return f"; planned to end here, {so_far:.4g}" if so_far < cost.epsilon else ""

    def state(self) -> dict[str, Any]:
        """The run's id, and the ledger's end, with its lines if it is in memory only."""
        lines = {} if self.ledger.path is not None else self.ledger.state_dict()
        return {
            "run": self.run,
            "head": self.ledger.head,
            "length": len(self.ledger.heads),
            **lines,
        }

    @property
    def _lines_come_from_state(self) -> bool:
        """Whether the ledger is in memory and empty, so that its lines come from a state."""
        return self.ledger.path is None and not self.ledger.entries

    def check_ledger(self, state: Mapping[str, Any]) -> None:
        """Refuse a state from which `restore` could not continue; nothing is changed.

        Raises
        ------
        FedsimError
            If the ledger lacks releases that the state counts.
        """
        ledger = self.ledger
        if self._lines_come_from_state:
            ledger = Ledger(declared_event=ledger.declared_event)
            ledger.load_state_dict(dict(state))
        if not ledger.extends(LedgerPosition(state["head"], state["length"])):
            raise FedsimError(
                f"ledger {self.ledger.path or '(in memory)'} does not hold the releases that the "
                "state counts; it must be the ledger of the run whose state= this is."
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; a log is cut back to it."""
        if self._lines_come_from_state:
            self.ledger.load_state_dict(dict(state))
        self.run = str(state["run"])
        self.ledger.resume(LedgerPosition(state["head"], state["length"]), self.run)
