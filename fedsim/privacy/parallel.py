"""Parallel composition: over owners of disjoint data, the dearest stands for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, Cost
from fedsim.privacy.events import Event
from fedsim.privacy.stopping import FIXED, Stopping

__all__ = ["Spending", "WorstClient", "dearest", "worst_client"]


@dataclass(frozen=True)
class WorstClient:
    """The client that an example-level statement over all clients is about."""

    cost: Cost
    event: Event


def worst_client(events: Iterable[Event], delta: float) -> WorstClient:
    """Largest example-level cost over clients that hold disjoint data.

    Parameters
    ----------
    events : iterable of Event
        One a client: all its invocations at its own rate ``|B| / N_i``. Only those on the
        Pareto front of (noise, rate, count) are accounted for.
    delta : float

    Raises
    ------
    FedsimError
        If there is no client.
    """
    front = _pareto_front(set(events))
    if not front:
        raise FedsimError("there are no clients to account for.")
    costs = [WorstClient(Accountant([event]).cost(delta), event) for event in front]
    return max(costs, key=lambda worst: worst.cost.epsilon)


class Spending(Protocol):
    """What has a cost: a ledger."""

    @property
    def counts(self) -> Counter[Event]:
        """How often each event is charged."""

    @property
    def last_event(self) -> Event | None:
        """What the release charged last has cost; None without any."""

    def accountant(self) -> Accountant:
        """All that is charged, to ask and to add to."""


Spender = TypeVar("Spender", bound=Spending)


def dearest(ledgers: Sequence[Spender], delta: float, stopping: Stopping = FIXED) -> Spender:
    """The ledger with the largest epsilon that may be claimed.

    Only one of those that say the same is accounted for, and of those with one kind of event
    only the Pareto front.
    """
    distinct = {frozenset(ledger.counts.items()): ledger for ledger in reversed(ledgers)}
    single = {
        next(event.times(count) for event, count in counts): counts
        for counts in distinct
        if len(counts) == 1
    }
    front = _pareto_front(single)
    candidates = [distinct[single[event]] for event in front]
    candidates += [ledger for counts, ledger in distinct.items() if len(counts) != 1]

    def epsilon(ledger: Spender) -> float:
        return stopping.epsilon(ledger.accountant(), ledger.last_event, delta)

    return max(candidates, key=epsilon)


def _pareto_front(events: Iterable[Event]) -> list[Event]:
    """Events that no other of their kind is at least as costly as in every respect."""

    def key(event: Event) -> tuple[float, float, int]:
        return (-event.total_noise_multiplier, event.rate, event.count)

    front: list[Event] = []
    for event in sorted(events, key=key, reverse=True):
        beaten = any(
            dearer.sampler == event.sampler
            and dearer.relation == event.relation
            and (event.private or not dearer.private)
            and all(a >= b for a, b in zip(key(dearer), key(event), strict=True))
            for dearer in front
        )
        if not beaten:
            front.append(event)
    return front
