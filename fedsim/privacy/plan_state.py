"""A plan's part of a checkpoint, and resuming with a plan that may have become longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fedsim.errors import FedsimError
from fedsim.privacy.laws.correlated import Extension
from fedsim.privacy.plan import ReleasePlan

Plan = TypeVar("Plan", bound=ReleasePlan[Any])


def state_of(plan: ReleasePlan[Any]) -> dict[str, Any]:
    """A plan's number of rounds and its extension, as JSON values."""
    extension = plan.extension
    return {"rounds": plan.rounds, "extension": extension and asdict(extension)}


def resumed_plan(plan: Plan, state: Mapping[str, Any]) -> Plan:
    """The plan of a resumed run, which may have more rounds than before.

    The rounds released so far can be the first ones of a longer plan only if they do not depend on
    how many rounds follow. This is true of all correlated noise in fedsim, once its coefficients
    are fixed.

    Parameters
    ----------
    plan : ReleasePlan
        The plan of the current config.
    state : mapping
        The strategy's checkpoint: ``round``, the last one released; ``plan``, from `state_of`;
        and ``noise``, without which no further round can be released.

    Raises
    ------
    FedsimError
        If the plans differ in more than the number of rounds, or no further round is possible.
    """
    if "plan" not in state or state["round"] == 0 or not plan.closed:
        return plan
    rounds, extension = state["plan"]["rounds"], state["plan"]["extension"]
    if rounds == plan.rounds:
        return replace(plan, extension=extension and Extension(**extension))
    before = replace(plan, rounds=rounds)
    ahead = plan.charged_ahead and before.charged_ahead
    if (
        not plan.noise.correlated
        # With an allocation or a selection, the first rounds depend on how many follow.
        or plan.sampler.horizon is not None
        or plan.selection is not None
        or rounds > (plan.rounds or 0)
        or not (ahead or before.law == plan.law)
    ):
        raise FedsimError(
            f"rounds = {plan.rounds}; it must be {rounds}, as it was: these were planned and "
            "charged together, so that there cannot be fewer, nor more if their draws depend on "
            "their number (noise.name, cohort.name)."
        )
    if state.get("noise") is None:
        raise FedsimError(
            f"rounds = {plan.rounds}; it must be {rounds}, as it was: noise from the operating "
            "system follows from a secret that was removed after the last round; rounds can be "
            "added only before that (noise.entropy)."
        )
    # A plan that is charged in groups of rounds needs no extension: further groups are charged as
    # they begin.
    return replace(plan, extension=Extension(rounds, state["round"]) if ahead else None)
