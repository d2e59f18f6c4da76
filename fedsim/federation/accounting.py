"""What a strategy's rounds cost, and when a budget ends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.privacy import Accountant, Cost, Entry, Ledger
from fedsim.privacy.claims import Stopping
from fedsim.privacy.digest import digest_of
from fedsim.privacy.entry import Fact, Kind
from fedsim.privacy.events import Event
from fedsim.privacy.ledger_lines import GENESIS
from fedsim.privacy.noise import Correlated
from fedsim.privacy.plan import Bounded, ReleasePlan
from fedsim.randomness import Randomness

Placement = Literal["server", "client"]
"""Where noise is drawn: once on the sum, or in the shares of the clients asked."""


def keyed(
    seed: int | Randomness | None,
    plan: ReleasePlan[Bounded],
    placement: Placement,
    others: Mapping[str, object],
) -> Randomness:
    """Where a strategy's draws come from: keyed by its release digest, or by its own settings.

    ``others`` are settings that bear on what is released, where they are set.
    """
    if isinstance(seed, Randomness):
        if seed.release:
            return seed
        seed = seed.seed
    noise = plan.noise
    if isinstance(noise, Correlated):
        noise = replace(noise, participation=None)  # of a plan that may be extended
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
    """Writes each release down before it is made, and knows when the budget is spent.

    Parameters
    ----------
    plan : ReleasePlan
    delta : float
    max_epsilon : float or None
        Budget.
    stopping : Stopping
        Whether what is released may end the run, and how far it was to go.
    ledger : Ledger
    release : str or None
        The config's digest; without one a release that was made before is known by an HMAC of the
        strategy's own (`keyed`), which is not written: a user's objects may hold clients' data.
    placement, randomness
        What else the ledger's lines say.
    public : mapping of str to str, number or bool
        What else is public of every release, besides the plan's own facts.
    kind : "release" or "evaluation"
        What is released: a round, or the clients' metrics in it.
    known : int or None
        Entries of the ledger that the state had which the strategy resumed; None where it did not.
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
    known: int | None = None

    @property
    def _budget_delta(self) -> float:
        return self.stopping.planned_delta(self.delta)

    def stops(self, server_round: int) -> str | None:
        """Why this round may not be made, if so."""
        if self.plan.closed and server_round > (self.plan.rounds or 0):
            return f"round {server_round} would follow a plan of {self.plan.rounds} rounds"
        if self.max_epsilon is None or not self.ledger.would_exceed(
            self._entry(server_round), self.max_epsilon, delta=self._budget_delta
        ):
            return None
        return self._exceeds(server_round)

    def attempt(self, server_round: int) -> int:
        """How often this round was recorded since the state that was resumed, of other draws.

        A round whose noise follows from the seed is made again of the same data, or refused.
        """
        if self.known is None or self.randomness.seed is not None:
            return 0
        since = self.ledger.entries[self.known :]
        return sum((e.kind, e.round) == (self.kind, server_round) for e in since)

    def _charge(self, server_round: int) -> Event:
        """What a round's line charges."""
        event = self.plan.charge(server_round, self.attempt(server_round))
        extended = self.plan.extension is not None
        if extended and not event.count and not self.ledger.history.counts[event.once]:
            return event.once  # its round was made again, as one of another extension
        return event

    def _entry(self, server_round: int) -> Entry:
        """A round's line, without what only its releases say."""
        own = str(self.randomness.release).encode()
        return Entry(
            kind=self.kind,
            round=server_round,
            event=self._charge(server_round),
            entropy=self.randomness.entropy,
            mechanism=str(self.plan.bound),
            release=self.release,
            placement=self.placement,
            declared_by_user=self.plan.declared_by_user,
            public={**self.plan.public, **self.public},
            run=None if self.release else self.ledger.fingerprint([own]),
        )

    def _exceeds(self, server_round: int) -> str:
        what = "round" if self.kind == "release" else "the evaluation of round"
        return (
            f"{what} {server_round} would exceed max-epsilon = {self.max_epsilon} "
            f"at delta = {self._budget_delta}"
        )

    def record(
        self, server_round: int, clip_norm: float, summed: Iterable[bytes] | None
    ) -> str | None:
        """Write a round's release down; when this returns None it is on the disk, and may be made.

        Parameters
        ----------
        server_round : int
        clip_norm : float
        summed : iterable of bytes or None
            The exact sum, of which the ledger keeps a keyed hash; None where nothing is protected.

        Returns
        -------
        str or None
            Why this round may not be made, if another process has spent the budget since `stops`.

        Raises
        ------
        FedsimError
            If this round of the run was recorded with another sum, and its noise follows from the
            seed.
        """
        keyed_hash = None if summed is None else self.ledger.fingerprint(summed)
        entry = replace(self._entry(server_round), clip_norm=clip_norm, sum=keyed_hash)
        try:
            self.ledger.record(entry, max_epsilon=self.max_epsilon, delta=self._budget_delta)
        except BudgetSpentError:
            return self._exceeds(server_round)
        return None

    def check(self) -> None:
        """Refuse a budget that does not allow one round.

        Raises
        ------
        FedsimError
            Saying what one costs.
        """
        if self.max_epsilon is None:
            return
        least = Accountant([self.plan.charge(1)]).epsilon(self._budget_delta)
        if least > self.max_epsilon:
            together = self.plan.event().law.rounds > 1
            covered = "rounds that are charged together cost" if together else "one round costs"
            raise FedsimError(
                f"max_epsilon = {self.max_epsilon} (noise.max-epsilon) at delta = "
                f"{self._budget_delta}; it must be at least {least:.4g}, what {covered}."
            )

    def cost(self, rounds_done: int) -> Cost:
        """What may be claimed after so many rounds."""
        return self.stopping.after(rounds_done).cost(self.ledger.history, self.delta)

    def spent(self, rounds_done: int) -> str:
        """The cost so far as a progress line has it."""
        cost = self.cost(rounds_done)
        simulated = "simulated " if self.randomness.entropy == "config" else ""
        declared = ", declared by the user" if self.plan.declared_by_user else ""
        return (
            f"{simulated}epsilon {cost.epsilon:.4g} at delta {cost.delta:g} "
            f"(client level, {cost.adjacency}{declared}){self._so_far(rounds_done, cost)}"
        )

    def _so_far(self, rounds_done: int, cost: Cost) -> str:
        """What a plan charged as a whole would have cost, had it been planned to end here."""
        if not self.plan.charged_ahead:
            return ""
        so_far = self.plan.epsilon(cost.delta, after=rounds_done)
        return f"; planned to end here, {so_far:.4g}" if so_far < cost.epsilon else ""

    def state(self) -> dict[str, Any]:
        """Where the ledger stands; and its lines, if it is in memory only."""
        lines = {} if self.ledger.path is not None else self.ledger.state_dict()
        return {"head": self.ledger.head, **lines}

    def restore(self, state: Mapping[str, Any], plan: ReleasePlan[Bounded]) -> None:
        """Resume what `state` gave, with the plan as it is now.

        Raises
        ------
        FedsimError
            If the ledger does not hold the releases that were made until then.
        """
        if self.ledger.path is None and not self.ledger.entries:
            self.ledger.load_state_dict(dict(state))
        if state["head"] not in (GENESIS, *self.ledger.heads):
            raise FedsimError(
                f"ledger {self.ledger.path or '(in memory)'} does not hold the releases that the "
                "state counts; it must be the ledger of the run whose state= this is."
            )
        # The first line is the header, which is no entry.
        heads, self.plan = self.ledger.heads, plan
        self.known = heads.index(state["head"]) if state["head"] in heads else 0
