"""The part of a test's cases that is in the fast run."""

from __future__ import annotations

import pytest
from slow_cases import slow_but, spanning

pytest_plugins = ["pytester"]
CASES = """
import pytest

@pytest.mark.parametrize("a", [[1], [1], [2]])
@pytest.mark.parametrize(("b", "c"), [(1, 1), (1, 2), (2, 2), (2, 1), (1, 3)])
def test_product(a, b, c):
    pass
"""


def test_a_spanning_part_has_every_value_of_every_parametrisation(
    pytester: pytest.Pytester,
) -> None:
    cases = pytester.getitems(CASES)
    assert len(cases) == 15
    part = [item.callspec.params for item in spanning(cases)]
    assert len(part) == 5
    assert {(p["b"], p["c"]) for p in part} == {(1, 1), (1, 2), (2, 2), (2, 1), (1, 3)}
    assert len({id(p["a"]) for p in part}) == 3  # equal values are cases of their own


def test_cases_that_are_fast_are_named_or_counted() -> None:
    named = slow_but(("b",), ["a", "b", ("c", 1)])
    assert [getattr(case, "values", case) for case in named] == [("a",), "b", ("c", 1)]
    assert [bool(getattr(case, "marks", ())) for case in named] == [True, False, True]
    counted = slow_but(2, [1, pytest.param(2, id="two"), pytest.param(3, id="three")])
    assert [getattr(case, "id", None) for case in counted] == [None, "two", "three"]
    assert [len(getattr(case, "marks", ())) for case in counted] == [0, 0, 1]
    with pytest.raises(ValueError, match="are no cases"):
        slow_but(("d",), ["a", "b"])
