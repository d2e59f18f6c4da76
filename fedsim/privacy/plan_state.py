"""What a run that is resumed needs of its plan, which may have become longer since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fedsim.errors import FedsimError
from fedsim.privacy.laws.correlated import Extension
from fedsim.privacy.plan import ReleasePlan

Plan = TypeVar("Plan", bound=ReleasePlan[Any])


def state_of(plan: ReleasePlan[Any]) -> dict[str, Any]:
    """The rounds of a plan, and which of them were planned first; as JSON says it."""
    extension = plan.extension
    return {"rounds": plan.rounds, "extension": extension and asdict(extension)}


def resumed_plan(plan: Plan, state: Mapping[str, Any]) -> Plan:
    """The plan of a run that is resumed with ``plan``: it may have more rounds than before.

    The rounds that were made stay the first ones of the longer plan only where they do not depend
    on how many follow: all of fedsim's correlated noise, once its coefficients are found.

    Parameters
    ----------
    plan : ReleasePlan
        As the run is configured now.
    state : mapping
        Of its strategy: ``round``, the last one made, ``plan``, its plan's `state_of`, and
        ``noise``, without which no further round can be made.

    Raises
    ------
    FedsimError
        If the plan is another one, or no more rounds can be made.
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
        # Of an allocation and of a selection the first rounds depend on how many follow.
        or plan.sampler.horizon is not None
        or plan.selection is not None
        or rounds > (plan.rounds or 0)
        or not (ahead or before.law == plan.law)
    ):
        raise FedsimError(
            f"rounds = {plan.rounds}; it must be {rounds}, as it was: these were planned and "
            "charged together, and are not made fewer, nor more where their draws depend on how "
            "many they are (noise.name, cohort.name)."
        )
    if state.get("noise") is None:
        raise FedsimError(
            f"rounds = {plan.rounds}; it must be {rounds}, as it was: noise from the operating "
            "system follows from a secret that was removed after the last round, and further "
            "rounds can be added before that only (noise.entropy)."
        )
    # Without the extension it is charged group by group of rounds, as before.
    return replace(plan, extension=Extension(rounds, state["round"]) if ahead else None)
