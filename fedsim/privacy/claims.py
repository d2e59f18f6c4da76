"""Valid claims for many clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant, checked_event
from fedsim.privacy.entry import History
from fedsim.privacy.events import Event


@check_arguments
def worst_client(events: Iterable[Event], delta: float) -> Event:
    """The costliest event of clients with disjoint data, at example level.

    Parameters
    ----------
    events : iterable of Event
        One event for each client: all its invocations, at its own rate ``|B| / N_i``. Only those
        on the Pareto front of (noise, rate, count) are accounted for.
    delta : float

    Raises
    ------
    FedsimError
        If there is no client.
    """
    front = _pareto_front({checked_event(event) for event in events})
    if not front:
        raise FedsimError("there are no clients to account for.")
    return max(front, key=lambda event: Accountant([event]).epsilon(delta))


def costliest(histories: Sequence[History], delta: float) -> History:
    """The history with the largest epsilon.

    Of equal histories only one is accounted for, and of those with a single kind of event only the
    Pareto front: there may be one for each of thousands of clients.
    """
    distinct = {frozenset(history.counts.items()): history for history in reversed(histories)}
    single = {
        next(event.times(count) for event, count in counts): counts
        for counts in distinct
        if len(counts) == 1
    }
    candidates = [distinct[single[event]] for event in _pareto_front(single)]
    candidates += [history for counts, history in distinct.items() if len(counts) != 1]
    return max(candidates, key=lambda history: history.accountant.epsilon(delta))


def _pareto_front(events: Iterable[Event]) -> list[Event]:
    """Events that no comparable event dominates, being at least as costly in every respect."""

    def key(event: Event) -> tuple[float, float, int]:
        return (-event.total_noise_multiplier, event.law.rate, event.count)

    front: list[Event] = []
    for event in sorted(events, key=key, reverse=True):
        beaten = any(
            costlier.law.comparable(event.law)
            and (event.private or not costlier.private)
            and all(a >= b for a, b in zip(key(costlier), key(event), strict=True))
            for costlier in front
        )
        if not beaten:
            front.append(event)
    return front
