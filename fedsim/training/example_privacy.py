"""Example-level privacy inside a client: sampling, mechanism and noise, and the privacy cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Literal

from fedsim.arguments import check_arguments
from fedsim.array_types import Ints
from fedsim.clients.base import LocalAlgorithm
from fedsim.mechanisms import Mechanism
from fedsim.mechanisms.base import require_mechanism
from fedsim.privacy import (
    Accountant,
    Budget,
    Entropy,
    Entry,
    Event,
    Ledger,
    worst_client,
)
from fedsim.privacy.digest import digest_of
from fedsim.privacy.laws import Sampler
from fedsim.privacy.ledger import OverBudgetError, RunProgress
from fedsim.privacy.local_work import LocalWork
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.settings import Ge, Gt, Lt, check_settings
from fedsim.tasks.losses import Loss
from fedsim.training.batches import (
    MAX_CHUNK,
    Batches,
    batch_width,
    chunk_width,
    plan_batches,
    plan_poisson,
)
from fedsim.training.data import ClientData


@dataclass(frozen=True)
class ExamplePrivacy:
    """Every gradient a local algorithm sees is a noisy sum of bounded per-example gradients.

    Guarantee: for each client on its own, with zero-out adjacency of one of its examples (which
    contributes nothing instead), T Gaussian releases of multiplier z at rate ``|B| / N_i``, where T
    counts every gradient evaluation: two per ADADP iteration, discarded ones included. Clients hold
    disjoint data, so the federation's epsilon is the largest client's.

    The number of examples ``N_i`` of every client is public, since rates, steps and denominators
    follow from it: adding or removing an example is not covered.

    Parameters
    ----------
    mechanism : Mechanism
        Bounds per-example gradients.
    noise_multiplier : float
        z: standard deviation of the noise on a sum, divided by the clip norm.
    hardened : bool
        Whether the noise withstands attacks on floating-point sampling.
    sampling : "poisson" or "shuffle"
        Poisson batches: each example is in a batch with probability ``|B| / N_i``, and batch sizes
        vary. Shuffled passes: each pass is charged as one Gaussian without amplification. Random
        batches of a fixed size are not offered: their guarantee is for replace-one neighbours,
        where that of examples is for zero-out neighbours.
    chunk : int
        Examples that go through the model at once; 0 for a rule by the batch size. A batch of any
        size takes as many chunks as it needs, and is never truncated.
    delta : float
    max_epsilon : float, optional
        Largest epsilon that a client may spend.
    rounds : int, optional
        Planned number of rounds.
    may_stop : bool
        Whether what is released may end the run: each client is then charged for all ``rounds``
        before its first.
    unprotected_metrics : bool
        Whether a client reports its un-noised training loss.
    """

    mechanism: Mechanism
    noise_multiplier: Annotated[float, Ge(0)]
    hardened: bool = True
    sampling: Literal["poisson", "shuffle"] = "poisson"
    chunk: Annotated[int, Ge(0)] = 0
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    max_epsilon: Annotated[float | None, Gt(0)] = None
    rounds: Annotated[int | None, Ge(1)] = None
    may_stop: bool = False
    unprotected_metrics: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        require_mechanism(self.mechanism, "ExamplePrivacy")

    @cached_property
    def noise(self) -> Independent:
        """The noise that is added to the sum of a step's gradients."""
        return Independent(float(self.noise_multiplier), self.hardened)

    def scaled(self, multiplier: float) -> ExamplePrivacy:
        """A copy with noise at another multiplier."""
        return replace(self, noise_multiplier=multiplier)

    @property
    def private(self) -> bool:
        """Whether any client's epsilon is finite."""
        return self.mechanism.guarantee == "gaussian" and self.noise.multiplier > 0

    def plan(self, work: LocalWork, size: int) -> ReleasePlan[Mechanism] | None:
        """Release plan of a client with ``size`` examples; None without any."""
        if size == 0:
            return None
        return ReleasePlan(
            level="example",
            sampler=self._sampler(work, size),
            mechanism=self.mechanism,
            noise=self.noise,
            rounds=self.rounds,
            may_stop=self.may_stop,
            releases=work.steps_of(size),
        )

    def _sampler(self, work: LocalWork, size: int) -> Sampler:
        if self.sampling == "poisson":
            return work.poisson(size)
        return work.passes(size)

    def batches(
        self,
        work: LocalWork,
        indices: Sequence[Ints],
        client_ids: Ints,
        randomness: Sequence[Randomness],
        round: int,
        max_chunk: int = MAX_CHUNK,
    ) -> Batches:
        """Draw a block's batches by the sampler that is charged; parameters as in `plan_batches`.

        Batches have a chunk axis: ``index`` and ``weight`` are ``[n, S, chunks, B]``.
        """
        inputs = (work, indices, client_ids, randomness, round)
        if self.sampling == "poisson":
            width = self.width(work, len(indices[0]), max_chunk)
            return plan_poisson(*inputs, width, amplified=self.private)
        batches = plan_batches(*inputs)
        index, weight = batches.index[:, :, None], batches.weight[:, :, None]
        return replace(batches, index=index, weight=weight)

    def width(self, work: LocalWork, size: int, max_chunk: int = MAX_CHUNK) -> int:
        """Physical batch width of a client with ``size`` examples, 1 or more."""
        if self.sampling == "poisson":
            return self.chunk or chunk_width(work.batch_of(size), max_chunk)
        return batch_width(work.batch_size, size)

    def keyed(
        self,
        randomness: Randomness,
        algorithm: LocalAlgorithm,
        work: LocalWork,
        loss: Loss,
        *,
        on_device: bool,
    ) -> Randomness:
        """Randomness keyed by a digest of known settings, for a run without a release digest.

        ``on_device``: whether noise is drawn on the device that trains, by another formula.
        """
        settings: dict[str, object] = {
            "seed": randomness.seed,
            "algorithm": algorithm,
            "work": work,
            "loss": loss,
            "mechanism": self.mechanism,
            "noise": self.noise,
            "sampling": self.sampling,
        } | ({"noise drawn on": "device"} if on_device else {})
        return Randomness(randomness.seed, digest_of(settings))


@check_arguments
def example_events(
    privacy: ExamplePrivacy, work: LocalWork, sizes: Iterable[int], rounds: int
) -> list[Event]:
    """Privacy events of ``rounds`` rounds, for clients of these sizes that are in all of them."""
    plans = (privacy.plan(work, size) for size in sorted(set(sizes)))
    return [plan.event().times(rounds) for plan in plans if plan is not None]


@check_arguments
def example_epsilon(
    privacy: ExamplePrivacy, work: LocalWork, sizes: Iterable[int], rounds: int
) -> float:
    """Epsilon at ``privacy.delta`` of the client that pays most for ``rounds`` rounds."""
    events = example_events(privacy, work, sizes, rounds)
    worst = [worst_client(events, privacy.delta)] if events else []
    return Accountant(worst).epsilon(privacy.delta)


class ExampleReleases:
    """Records what clients release of their examples, a ledger line for all that are asked at once.

    Parameters
    ----------
    privacy : ExamplePrivacy
    data : ClientData
    work : LocalWork
    entropy : "config" or "system"
        Source of the clients' noise.
    rows : str
        Why each row depends on one example alone, as a ledger says it.

    Attributes
    ----------
    ledger : Ledger
        In memory only, until another one is set.
    run : str or None
        Id of the run; None if it is unknown.
    """

    def __init__(
        self,
        privacy: ExamplePrivacy,
        data: ClientData,
        work: LocalWork,
        *,
        entropy: Entropy,
        rows: str,
    ) -> None:
        self._privacy, self._data, self._work = privacy, data, work
        self.ledger = Ledger(delta=privacy.delta)
        self._entropy, self._rows = entropy, rows
        self.run: str | None = None
        limit, key = privacy.max_epsilon, "client.noise.max-epsilon"
        self._budget = None if limit is None else Budget(limit, privacy.delta, key)
        self._charged: dict[int, int] = {}  # clients that have not begun the round of their charge

    def charge(
        self, round: int, client_ids: Iterable[int], *, begins: bool = False, partly: bool = True
    ) -> dict[int, str]:
        """Record a round of these clients; it is on disk when this returns.

        Parameters
        ----------
        round : int
        client_ids : iterable of int
        begins : bool
            Whether they begin the round now.
        partly : bool
            Whether to charge the others if the budget of some does not allow it.

        Returns
        -------
        dict of int to str
            Clients whose budget does not allow it, and why.
        """
        due = sorted({*client_ids} - {c for c, number in self._charged.items() if number == round})
        refused: dict[int, str] = {}
        while due:
            over = self._record(round, due)
            refused |= over
            if not over or not partly:
                break
            due = [client for client in due if client not in over]
        if partly or not refused:
            self._charged.update(dict.fromkeys(due, round))
        if begins:
            for client in client_ids:
                self._charged.pop(client, None)
        return refused

    def _record(self, round: int, client_ids: Sequence[int]) -> dict[int, str]:
        """Write a line for these clients; those whose budget does not allow it, and why."""
        ended: dict[int, str] = {}
        entries: Sequence[Entry] = []

        def due() -> Sequence[Entry]:
            nonlocal ended, entries
            ended = {
                client: f"round {round} would follow the last one that client {client} was charged "
                "for"
                for client in client_ids
                if self._privacy.may_stop and 0 < self._progress(client).paid_through < round
            }
            entries = [] if ended else self._entries(round, client_ids)
            if any(entry.through for entry in entries):
                of_rounds = partial(self._entries, round, client_ids)
                entries = self.ledger.affordable_entries(
                    of_rounds, self._privacy.rounds or 1, self._budget
                )
            return entries

        try:
            self.ledger.record_due(due, self._budget)
        except OverBudgetError as error:
            assert self._budget is not None
            return {
                client: self._budget.message(entries[0], client)
                for client in error.owners
                if client is not None
            }
        return ended

    def _progress(self, client: int) -> RunProgress:
        return self.ledger.progress(self.run, "release", client)

    def _entries(
        self, round: int, client_ids: Sequence[int], rounds: int | None = None
    ) -> list[Entry]:
        """An entry for each size of clients; ``rounds``: of a plan that is charged as a whole."""
        groups: dict[tuple[Event, int | None, int], list[int]] = {}
        plans: dict[int, ReleasePlan[Mechanism]] = {}
        for client in client_ids:
            size = self._data.size(client)
            plan = plans.get(size) or self._privacy.plan(self._work, size)
            if plan is None:
                continue
            plans[size] = plan
            event, through = self._due(plan, round, self._progress(client), rounds)
            groups.setdefault((event, through, size), []).append(client)
        return [
            self._entry(plans[size], event, round, through, clients, size)
            for (event, through, size), clients in groups.items()
        ]

    def _entry(
        self,
        plan: ReleasePlan[Mechanism],
        event: Event,
        round: int,
        through: int | None,
        clients: Sequence[int],
        size: int,
    ) -> Entry:
        return plan.entry(
            event,
            round=round,
            through=through,
            clients=tuple(clients),
            entropy=self._entropy,
            public={"examples": size, "steps": plan.releases, "rows": self._rows},
            run=self.run,
        )

    def _due(
        self,
        plan: ReleasePlan[Mechanism],
        round: int,
        progress: RunProgress,
        rounds: int | None,
    ) -> tuple[Event, int | None]:
        """What a client is charged for a round, and the last round that this pays for."""
        if progress.was_drawn(round) and self.ledger.keeps == "evidence":
            return plan.charge(round, redrawn=True), None
        if progress.is_paid(round):
            return plan.event().times(0), None
        if plan.may_stop:
            rounds = rounds or plan.rounds or 1
            return plan.event().times(rounds), rounds
        return plan.charge(round), None

    def charge_rest(self, rounds_done: int, rounds: int) -> None:
        """Charge each client that has released anything for the rest of so many planned rounds.

        Without effect if all rounds were charged before the first. A client is charged only for
        rounds that its budget affords: it would have released nothing in the others.
        """
        if not self._privacy.may_stop:
            self.ledger.record_due(partial(self._rest, rounds_done, rounds), self._budget)

    def _rest(self, rounds_done: int, rounds: int) -> list[Entry]:
        """An entry for each size of clients, and number of rounds that are not paid for yet."""
        counts: dict[tuple[int, int, frozenset[tuple[Event, int]]], int] = {}
        groups: dict[tuple[int, int, int], list[int]] = {}
        for client in sorted(client for client in self.ledger.histories if client is not None):
            progress, size = self._progress(client), self._data.size(client)
            done = max(rounds_done, progress.paid_through)
            if not progress.last_round or done >= rounds:
                continue
            # Of clients that have spent the same, it is computed once.
            key = size, done, frozenset(self.ledger.histories[client].counts.items())
            if key not in counts:
                entry_of = partial(self._rest_entry, rounds_done, size, done, [client])
                counts[key] = self._affordable(entry_of, done, rounds)
            if counts[key]:
                groups.setdefault((size, done, counts[key]), []).append(client)
        return [
            self._rest_entry(rounds_done, size, done, clients, count)
            for (size, done, count), clients in groups.items()
        ]

    def _affordable(self, entry_of: Callable[[int], Entry], done: int, rounds: int) -> int:
        """How many of the rounds ``done + 1`` to ``rounds`` a client's budget affords."""
        budget = self._budget
        (entry,) = self.ledger.affordable_entries(
            lambda count: [entry_of(count)], rounds - done, budget
        )
        if budget is not None and self.ledger.owners_over_budget(budget, [entry]):
            return 0
        return (entry.through or done) - done

    def _rest_entry(
        self, rounds_done: int, size: int, done: int, clients: Sequence[int], count: int
    ) -> Entry:
        plan = self._privacy.plan(self._work, size)
        assert plan is not None  # without examples a client has released nothing
        event = plan.event().further_rounds(count, done)
        return self._entry(plan, event, rounds_done, done + count, clients, size)
