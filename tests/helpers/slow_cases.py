"""Which cases of a test wait for the slow run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

SLOW_EXAMPLES = 50
"""How many times as many examples hypothesis makes in the slow run."""


def slow_but(fast: int | Collection[object], cases: Iterable[Any]) -> list[Any]:
    """Cases of a parametrisation, of which some run always and the others in the slow run.

    Parameters
    ----------
    fast : int or collection
        Which run always: so many of the first, or these, a case of several values by its first.

    Raises
    ------
    ValueError
        If one of ``fast`` is no case.
    """
    cases = list(cases)
    names = [_values(case)[0] for case in cases]
    chosen = names[:fast] if isinstance(fast, int) else list(fast)
    if absent := [name for name in chosen if name not in names]:
        raise ValueError(f"{absent} are no cases; there are {names}")
    return [
        case if (k < fast if isinstance(fast, int) else name in chosen) else _slow(case)
        for k, (case, name) in enumerate(zip(cases, names, strict=True))
    ]


def _values(case: Any) -> Sequence[Any]:
    values = getattr(case, "values", None)
    if isinstance(values, tuple):
        return values
    return case if isinstance(case, tuple) else (case,)


def _slow(case: Any) -> Any:
    if isinstance(getattr(case, "values", None), tuple):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
    return pytest.param(*_values(case), marks=pytest.mark.slow)


def spanning(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    """The fewest cases of a test, about, in which each value of each parameter occurs."""
    pairs = {item: set(item.callspec.indices.items()) for item in items}  # type: ignore[attr-defined]
    uncovered = set().union(*pairs.values())
    for news in range(max(map(len, pairs.values())), 0, -1):
        for item, own in pairs.items():
            if len(own & uncovered) == news:
                uncovered -= own
                yield item


def hypothesis_examples(count: int) -> settings:
    """For a property that costs more than most: so many examples, and more in the slow run."""
    slow = settings.get_current_profile_name() == "slow"
    return settings(max_examples=count * (SLOW_EXAMPLES if slow else 1))
