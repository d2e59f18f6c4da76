from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from fedsim.errors import FedsimError
from fedsim.privacy.records import read_record, to_json


@dataclass(frozen=True)
class Inner:
    numbers: tuple[float, ...]
    name: str = "a"


@dataclass(frozen=True)
class Outer:
    some_number: float
    count: int | None
    way: Literal["in", "out"]
    inner: Inner | None
    more: Mapping[str, Inner] = field(default_factory=dict)
    apart: str = ""


RECORD = Outer(math.inf, None, "in", Inner((1.0, math.inf)), {"x": Inner(())})


def test_a_record_is_read_as_it_was_written():
    data = json.loads(json.dumps(to_json(RECORD, without=["apart"]), allow_nan=False))
    assert data["some-number"] == "inf"
    assert read_record(Outer, data, "a record", apart="") == RECORD


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"some-number": "1"}, "a record's some-number is '1'; it must be a number"),
        ({"some-number": True}, "it must be a number"),
        ({"count": 1.5}, "a record's count is 1.5; it must be a whole number"),
        ({"way": "on"}, "it must be 'in' or 'out'"),
        ({"inner": [1]}, "a record's inner is .*; it must be a table"),
        ({"inner": {"numbers": [], "name": None}}, "a record's inner's name is None"),
        ({"inner": {"numbers": 3, "name": "b"}}, "a record's inner's numbers is 3"),
        ({"more": {"x": 1}}, "a record's more x is 1"),
        ({"more": []}, "a record's more is"),
        ({"others": 1}, "a record has the fields"),
    ],
)
def test_what_is_no_such_record_is_refused_by_the_name_of_its_field(change, sentence):
    data = to_json(RECORD, without=["apart"])
    with pytest.raises(FedsimError, match=sentence):
        read_record(Outer, {**data, **change}, "a record", apart="")
    for wrong in (None, [], "text"):
        with pytest.raises(FedsimError, match=r"a record is .*; it must be a table"):
            read_record(Outer, wrong, "a record", apart="")
