"""Which cases of a test wait for the slow run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
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


def spanning(items: Sequence[pytest.Function]) -> Iterator[pytest.Function]:
    """Of a test's cases about the fewest in which each value of each `parametrize` occurs."""
    choices = {item: set(_choices(item)) for item in items}
    uncovered = set().union(*choices.values())
    for fresh in range(max(map(len, choices.values())), 0, -1):
        for item, own in choices.items():
            if len(own & uncovered) == fresh:
                uncovered -= own
                yield item


def _choices(item: pytest.Function) -> Iterator[tuple[int, ...]]:
    """One for each `parametrize`: which it is, and the identities of its values."""
    for number, mark in enumerate(item.iter_markers("parametrize")):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield number, *(id(item.callspec.params[name.strip()]) for name in names)


def hypothesis_examples(count: int) -> settings:
    """For a property that costs more than most: so many examples, and more in the slow run."""
    slow = settings.get_current_profile_name() == "slow"
    return settings(max_examples=count * (SLOW_EXAMPLES if slow else 1))
