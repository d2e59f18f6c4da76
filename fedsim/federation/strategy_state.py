"""The state of a strategy: its plan, and checks before a resume."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.optimizers import Scheduled
from fedsim.federation.state_tree import Tree
from fedsim.mechanisms import Mechanism
from fedsim.mechanisms.base import without_noise
from fedsim.privacy.noise.correlated import Correlated
from fedsim.privacy.plan import MechanismLike, ReleasePlan, is_user_code
from fedsim.rows import Layout
from fedsim.rows.layout import PREFIX
from fedsim.server_optimizers import ServerOptimizer
from fedsim.server_optimizers.base import StatefulOptimizer

_FORM = {
    "round": int,
    "parameters": list | None,
    "mechanism": Mapping,
    "stopped": str | None,
    "ledger": Mapping,
}
"""Entries that every state of a strategy has, and their types."""


@contextmanager
def as_state_error(strategy: str) -> Iterator[None]:
    """Turn errors that another strategy's state causes into one sentence."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        if isinstance(error, FedsimError):
            raise
        raise FedsimError(
            f"state= is not what {strategy}.state() gave after a round, with the settings of this "
            f"strategy ({type(error).__name__}: {error})."
        ) from error


def check_form(state: Tree, strategy: str) -> None:
    """Refuse a tree that is not the state of any strategy.

    Raises
    ------
    FedsimError
    """
    bad_keys = [key for key, kinds in _FORM.items() if not isinstance(state.get(key, 0.0), kinds)]
    if not bad_keys and state["round"] < 0:
        bad_keys = ["round"]
    if not bad_keys and state["round"] and state["parameters"] is None:
        bad_keys = ["parameters"]
    if bad_keys:
        raise FedsimError(
            f"state= has no valid '{bad_keys[0]}'; state= must be what {strategy}.state() "
            "gave after a round."
        )


def plan_state(plan: ReleasePlan[Any]) -> dict[str, Any]:
    """A plan's number of rounds and its noise's coefficients, as JSON values."""
    return {"rounds": plan.rounds, "coefficients": _coefficients(plan)}


def check_plan(plan: ReleasePlan[Any], state: Mapping[str, Any]) -> None:
    """Refuse another number of rounds, or another noise, than a closed plan began with.

    Parameters
    ----------
    plan : ReleasePlan
        The plan of the current config.
    state : mapping
        The strategy's checkpoint, with ``plan`` from `plan_state` if its rounds were fixed.

    Raises
    ------
    FedsimError
    """
    before = state.get("plan")
    if (before is not None) != plan.closed:
        raise FedsimError(
            "state= is of a run whose rounds were "
            f"{'' if before is not None else 'not '}fixed before the first; with the settings of "
            f"this strategy they are{' not' if before is not None else ''} (may_stop, rounds)."
        )
    if before is None:
        return
    if before["rounds"] != plan.rounds:
        raise FedsimError(
            f"rounds = {plan.rounds}; it must be {before['rounds']}, as it was: these were planned "
            "and charged together before the first, and nothing extends them."
        )
    if before["coefficients"] != (coefficients := _coefficients(plan)):
        raise FedsimError(
            f"noise.coefficients is {coefficients!r}; it must be {before['coefficients']!r}, as it "
            "was: the noise of earlier rounds was drawn with these, and further rounds cancel a "
            "part of it."
        )


def _coefficients(plan: ReleasePlan[Any]) -> str | None:
    """The coefficients of fedsim's correlated noise; None if the noise has none."""
    return plan.noise.coefficients if isinstance(plan.noise, Correlated) else None


def check_noise(state: Tree, plan: ReleasePlan[MechanismLike], *, seeded: bool) -> None:
    """Refuse the state of a run whose noise this plan could not continue.

    Raises
    ------
    FedsimError
    """
    noise, needed = state.get("noise"), plan.noise.correlated
    has_ended = state["round"] >= (plan.rounds or math.inf)  # no further round needs it
    if not has_ended and (noise is not None) != needed:
        raise FedsimError(
            f"state= is of a run whose rounds {'do not ' if needed else ''}share draws of noise; "
            f"with the settings of this strategy they must{'' if needed else ' not'}."
        )
    if noise is not None and bool(noise["secrets"]) == seeded:
        sources = "the seed", "the operating system"
        raise FedsimError(
            f"state= is of a run whose noise comes from {sources[seeded]}; with the settings of "
            f"this strategy it must come from {sources[not seeded]}."
        )


def check_shapes(state: Tree, mechanism: Mechanism, optimizer: ServerOptimizer) -> None:
    """Refuse tensors of another mechanism or server optimiser; only fedsim's own are checked.

    Raises
    ------
    FedsimError
    """
    if state["parameters"] is None:
        return
    entries = {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
        for name, shape, dtype in state["parameters"]
    }
    if not is_user_code(mechanism):
        expected = mechanism.init(Layout.of(entries))
        _compare("mechanism", without_noise(state["mechanism"]), expected)
    optimizer_state = state["optimizer"]
    if isinstance(optimizer, Scheduled):
        optimizer, optimizer_state = (
            optimizer.optimizer,
            {k: v for k, v in optimizer_state.items() if k != "releases"},
        )
    if optimizer_state and isinstance(optimizer, StatefulOptimizer) and not is_user_code(optimizer):
        trained = {name: like for name, like in entries.items() if not name.startswith(PREFIX)}
        _compare("server optimiser", optimizer_state, optimizer.after_a_step(Layout.of(trained).d))


def _compare(part: str, state: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    shapes, expected_shapes = (
        {name: list(getattr(value, "shape", ())) for name, value in tree.items()}
        for tree in (state, expected)
    )
    if shapes != expected_shapes:
        raise FedsimError(
            f"state= holds {_listed(shapes)} of the {part}; with the settings of this strategy it "
            f"must hold {_listed(expected_shapes)}."
        )


def _listed(shapes: Mapping[str, list[int]]) -> str:
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return f"{listed:.300}" or "nothing"


def restore_parts(parts: Mapping[str, Any], state: Tree) -> None:
    """Restore the state of all parts; if one raises, put all of them back."""
    saved_states = {name: part.state() for name, part in parts.items()}
    try:
        for name, part in parts.items():
            part.restore(state.get(name))
    except BaseException:
        for name, part in parts.items():
            part.restore(saved_states[name])
        raise
