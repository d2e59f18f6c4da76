"""Accounting of a strategy's rounds: their ledger lines, their cost, and the budget."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.privacy import Accountant, Cost, Entry, Ledger
from fedsim.privacy.claims import Budget, Stopping
from fedsim.privacy.digest import digest_of
from fedsim.privacy.entry import Fact, Kind
from fedsim.privacy.ledger_lines import GENESIS
from fedsim.privacy.noise import Correlated
from fedsim.privacy.plan import Bounded, ReleasePlan
from fedsim.randomness import Randomness

Placement = Literal["server", "client"]
"""Where noise is drawn: once on the sum, or in the shares of the sampled clients."""


def keyed(
    seed: int | Randomness | None,
    plan: ReleasePlan[Bounded],
    placement: Placement,
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
    noise = plan.noise
    if isinstance(noise, Correlated):
        # A plan extended by more rounds changes the participation, and must keep its noise.
        noise = replace(noise, participation=None)
    settings = {
        "seed": seed,
        "mechanism": plan.bound,
        "cohort": plan.sampler,
        "noise": noise,
        "placement": placement,
    } | {name: setting for name, setting in others.items() if setting is not None}
    return Randomness(seed, digest_of(settings))


@dataclass
class Accounting:
    """Records each release in the ledger before it is made, and checks the budget.

    Parameters
    ----------
    plan : ReleasePlan
    delta : float
    max_epsilon : float or None
        Budget; None for that of the ledger.
    stopping : Stopping
        Whether released values may end the run, and its planned number of rounds.
    ledger : Ledger
    release : str or None
        Digest of the config. Without one, lines have an HMAC of the strategy's own digest (`keyed`)
        instead of the digest itself: a user's objects may hold clients' data.
    placement, randomness
        Further contents of the ledger's lines.
    public : mapping of str to str, number or bool
        Public facts of every release, in addition to those of the plan.
    kind : "release" or "evaluation"
        What is released: a round's sum, or clients' metrics.
    entries_in_state : int or None
        Number of ledger entries that the resumed state counts; None if nothing was resumed.
    nonce : str
        Identifies a run with system entropy in a ledger that strategies of equal settings share;
        empty where the release digest or the seed does.
    """

    plan: ReleasePlan[Bounded]
    delta: float
    max_epsilon: float | None
    stopping: Stopping
    ledger: Ledger
    release: str | None
    placement: Placement
    randomness: Randomness
    public: Mapping[str, Fact] = field(default_factory=dict)
    kind: Kind = "release"
    entries_in_state: int | None = None
    nonce: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.release is None and self.randomness.seed is None:
            self.nonce = secrets.token_hex()

    @property
    def _budget(self) -> Budget | None:
        limit = self.ledger.max_epsilon if self.max_epsilon is None else self.max_epsilon
        return None if limit is None else Budget(limit, self.stopping.planned_delta(self.delta))

    def stops(self, server_round: int) -> str | None:
        """Why this round may not be made; None if it may."""
        if self.plan.closed and server_round > (self.plan.rounds or 0):
            return f"round {server_round} would follow a plan of {self.plan.rounds} rounds"
        if (budget := self._budget) is None:
            return None
        entry = self._entry(server_round)
        return budget.message(entry) if self.ledger.would_exceed(entry, budget=budget) else None

    def attempt(self, server_round: int) -> int:
        """How often this round was recorded after the resumed state, with other draws.

        0 with a seed: the repeated round has the same draws, and is charged once; a repetition with
        another sum is refused.
        """
        if self.entries_in_state is None or self.randomness.seed is not None:
            return 0
        later_entries = self.ledger.entries[self.entries_in_state :]
        return sum((e.kind, e.round) == (self.kind, server_round) for e in later_entries)

    def _entry(self, server_round: int) -> Entry:
        """A round's line, without its clip norm and the hash of its sum."""
        event = self.plan.charge(server_round, self.attempt(server_round))
        extended = self.plan.extension is not None
        if extended and not event.count and not self.ledger.history.counts[event.once]:
            # The extension's first round was recorded under another extension, so that no line has
            # charged this one yet.
            event = event.once
        return Entry(
            kind=self.kind,
            round=server_round,
            event=event,
            entropy=self.randomness.entropy,
            mechanism=str(self.plan.bound),
            release=self.release,
            placement=self.placement,
            declared_by_user=self.plan.declared_by_user,
            public={**self.plan.public, **self.public},
            run=self._run,
        )

    @property
    def _run(self) -> str | None:
        """The run's id in the ledger's lines, which a release digest makes unnecessary."""
        if self.release:
            return None
        parts = (str(self.randomness.release), self.nonce)
        return self.ledger.fingerprint([part.encode() for part in parts if part])

    def record(
        self, server_round: int, clip_norm: float, summed: Iterable[bytes] | None
    ) -> str | None:
        """Record a round's release; once this returns None, the line is on disk.

        Parameters
        ----------
        server_round : int
        clip_norm : float
        summed : iterable of bytes or None
            Bytes of the exact sum, of which the ledger keeps a keyed hash; None where nothing is
            protected.

        Returns
        -------
        str or None
            Why this round may not be made: another process has spent the budget since `stops`.

        Raises
        ------
        FedsimError
            If this round of the run was recorded with another sum, and its noise follows from the
            seed.
        """
        keyed_hash = None if summed is None else self.ledger.fingerprint(summed)
        entry = replace(self._entry(server_round), clip_norm=clip_norm, sum=keyed_hash)
        try:
            self.ledger.record(entry, budget=self._budget)
        except BudgetSpentError as error:
            return str(error).removesuffix(".")
        return None

    def check(self) -> None:
        """Refuse a budget that does not allow one round.

        Raises
        ------
        FedsimError
            With the cost of one round.
        """
        budget = self._budget
        if budget is None:
            return
        round_cost = Accountant([self.plan.charge(1)]).epsilon(budget.delta)
        if round_cost > budget.epsilon:
            is_joint = self.plan.event().law.rounds > 1
            covered = "rounds that are charged together" if is_joint else "one round"
            raise FedsimError(
                f"max_epsilon = {budget.epsilon} (noise.max-epsilon) at delta = "
                f"{budget.delta}; it must be at least {round_cost:.4g}, the cost of "
                f"{covered}."
            )

    def stopping_after(self, rounds_done: int) -> Stopping:
        """`Stopping` after so many rounds, with the run's id in the ledger."""
        stopping = self.stopping.after(rounds_done)
        return replace(stopping, run=self._run) if stopping.rounds_left else stopping

    def charge_planned(self, rounds_done: int) -> None:
        """Charge planned rounds that are not made; a resumed run makes them at no further cost."""
        stopping, budget = self.stopping_after(rounds_done), self._budget
        if budget is not None and stopping.max_epsilon is None:
            stopping = replace(stopping, max_epsilon=budget.epsilon, budget_delta=self.delta)
        if stopping.rounds_left:
            self.ledger.charge_planned(stopping)

    def cost(self, rounds_done: int) -> Cost:
        """Privacy cost that may be claimed after so many rounds."""
        return self.stopping_after(rounds_done).cost(self.ledger.history, self.delta)

    def spent(self, rounds_done: int) -> str:
        """The cost so far, as text for a progress line."""
        cost = self.cost(rounds_done)
        simulated = "simulated " if self.randomness.entropy == "config" else ""
        declared = ", declared by the user" if self.plan.declared_by_user else ""
        return (
            f"{simulated}epsilon {cost.epsilon:.4g} at delta {cost.delta:g} "
            f"(client level, {cost.adjacency}{declared}){self._so_far(rounds_done, cost)}"
        )

    def _so_far(self, rounds_done: int, cost: Cost) -> str:
        """Text for a plan charged as a whole: what it would have cost, planned to end here."""
        if not self.plan.charged_ahead:
            return ""
        so_far = self.plan.epsilon(cost.delta, after=rounds_done)
        return f"; planned to end here, {so_far:.4g}" if so_far < cost.epsilon else ""

    def state(self) -> dict[str, Any]:
        """The ledger's head, its lines if it is in memory only, and the run's nonce, if any."""
        lines = {} if self.ledger.path is not None else self.ledger.state_dict()
        nonce = {"nonce": self.nonce} if self.nonce else {}
        return {"head": self.ledger.head, **lines, **nonce}

    @property
    def _empty(self) -> bool:
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
        if self._empty:
            ledger = Ledger(declared=ledger.declared)
            ledger.load_state_dict(dict(state))
        if state["head"] not in (GENESIS, *ledger.heads):
            raise FedsimError(
                f"ledger {self.ledger.path or '(in memory)'} does not hold the releases that the "
                "state counts; it must be the ledger of the run whose state= this is."
            )

    def restore(self, state: Mapping[str, Any], plan: ReleasePlan[Bounded]) -> None:
        """Continue from `state`, with the plan as it is now."""
        if self._empty:
            self.ledger.load_state_dict(dict(state))
        # The first line is the header, which is no entry.
        heads, self.plan = self.ledger.heads, plan
        self.nonce = str(state.get("nonce", self.nonce))
        self.entries_in_state = heads.index(state["head"]) if state["head"] in heads else 0
