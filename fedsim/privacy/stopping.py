"""What may be claimed of a run whose end may follow from what it has released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedsim.privacy.accountant import Accountant, Cost
from fedsim.privacy.events import Event

__all__ = ["FIXED", "Stopping", "shared_cost"]

Figures = Sequence[tuple[Accountant, float]]
"""Compositions, each at its own delta: the least epsilon of all of them may be claimed."""


def shared_cost(spent: Accountant, planned: Accountant, delta: float, times: int) -> Cost:
    """The cost of a composition that releases have chosen among ``times`` possible ones.

    The lesser of epsilon of ``spent`` at ``delta / (2 times)`` and of ``planned`` at ``delta / 2``.

    Guarantee: (epsilon, delta) for whichever outcome came about, over all of them together.
    Proof: let outcome s be claimed at E_s, and L_s be its loss. The whole delta is the sum over s
    of E[1{s} (1 - exp(E_s - L_s))+]. Outcomes claimed by their own figure add at most
    ``delta / (2 times)`` each, ``delta / 2`` together. The others are claimed at one epsilon, that
    of ``planned``, of which every outcome is a post-processing, and add at most ``delta / 2``
    together. (The lesser of two figures that each hold at ``delta`` may add up to twice that.)

    Parameters
    ----------
    spent : Accountant
        What was released.
    planned : Accountant
        The same, and all that would have been released in any outcome.
    delta : float
    times : int
        1 or more.
    """
    return _cost(_shared(spent, planned, delta, times), delta)


@dataclass(frozen=True)
class Stopping:
    """How far a run was to go, and whether what it released may end it before.

    Attributes
    ----------
    times : int
        After how many rounds that may be, as was declared before the first one: all of them with
        ``stop.metric`` or ``stop.callbacks``. 0: it was not declared.
    left : int
        Planned rounds that have not been made; 0 where the number made was fixed in advance.
    max_epsilon : float or None
        The budget of a run all of whose rounds have one event.
    """

    times: int = 0
    left: int = 0
    max_epsilon: float | None = None

    def planned_delta(self, delta: float) -> float:
        """Where all planned rounds are accounted for, and a budget or target is held.

        The other half of delta is for ending earlier, where that was declared.
        """
        return delta / 2 if self.times else delta

    def after(self, made: int) -> Stopping:
        """The same after so many of the planned rounds."""
        return replace(self, left=max(self.left - made, 0))

    def planned(self, spent: Accountant, event: Event | None) -> Accountant:
        """The accountant of all planned rounds; parameters as for `epsilon`."""
        planned = spent.copy()
        if self.left and event is not None:
            planned.add(event, self.left)
        return planned

    def epsilon(self, spent: Accountant, event: Event | None, delta: float) -> float:
        """Epsilon that may be claimed now, whichever round this is.

        Where it was declared that releases may end the run, that is `shared_cost`. Where they have
        ended it and it was not declared, all planned rounds count: what is released of them is a
        post-processing. A budget makes the plan shorter: its check looks at events alone, which
        are the same in every round and known before the first, so the round in which it ends a
        run is fixed in advance, and the rounds until then cost no more than the budget.

        Parameters
        ----------
        spent : Accountant
            What was released.
        event : Event or None
            What one more round costs; None where nothing was released.
        delta : float
        """
        figures = self._figures(spent, event, delta)
        return self._within_budget(spent, delta, min(a.epsilon(at) for a, at in figures))

    def cost(self, spent: Accountant, event: Event | None, delta: float) -> Cost:
        """The same, with how it was found."""
        cost = _cost(self._figures(spent, event, delta), delta)
        epsilon = self._within_budget(spent, delta, cost.epsilon)
        return replace(cost, epsilon=epsilon, releases=spent.releases)

    def _figures(self, spent: Accountant, event: Event | None, delta: float) -> Figures:
        planned = self.planned(spent, event)
        if self.times and self.left:
            return _shared(spent, planned, delta, self.times)
        return [(planned, self.planned_delta(delta))]

    def _within_budget(self, spent: Accountant, delta: float, epsilon: float) -> float:
        if not self.left or self.max_epsilon is None:
            return epsilon
        # A budget that is exceeded already was none of what has been released.
        holds = spent.epsilon(self.planned_delta(delta)) <= self.max_epsilon
        return min(epsilon, self.max_epsilon) if holds else epsilon


FIXED = Stopping()
"""The number of rounds was fixed in advance."""


def _shared(spent: Accountant, planned: Accountant, delta: float, times: int) -> Figures:
    return [(spent, delta / (2 * times)), (planned, delta / 2)]


def _cost(figures: Figures, delta: float) -> Cost:
    accountant, at = min(figures, key=lambda figure: figure[0].epsilon(figure[1]))
    return replace(accountant.cost(at), delta=delta)
