"""What a strategy refuses as its state."""

from __future__ import annotations

import pytest
import torch

from fedsim.config import RunConfig
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.runs.resolve import Resolved, make_strategy, resolve

TREE = {
    "seed": 5,
    "rounds": 4,
    "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6, "max-examples": 60},
    "model": {"name": "mlp", "widths": "8"},
    "client": {"name": "adadp-lr", "lr": 0.05, "state": "client", "batch-size": 8, "epochs": 2},
    "cohort": {"name": "poisson", "rate": 0.6},
    "engine": {"device": "cpu"},
}


def build(**settings) -> Resolved:
    return resolve(RunConfig.parse(TREE).replace(**settings))


@pytest.mark.parametrize(
    ("key", "nonsense"),
    [
        ("round", "5"), ("round", -1), ("round", None), ("parameters", 5), ("mechanism", {"a": 1}),
        ("failures", None), ("optimizer", 5), ("cohort", 5), ("stopped", 5), ("ledger", None),
        ("ledger", {"lines": 1}),
    ],
)  # fmt: skip
def test_a_state_of_nonsense_is_one_sentence(key, nonsense):
    made = build()
    first = make_strategy(made)
    reached = first.start(LocalGrid(made.trainer), made.initial_arrays, 1)
    second, state = make_strategy(made), {**first.state(), key: nonsense}
    with pytest.raises(FedsimError, match="state"):
        second.start(LocalGrid(made.trainer), reached.arrays, 2, state=state)


def test_vectors_of_another_size_than_an_algorithm_receives_are_refused():
    scaffold = {"client.name": "scaffold", "client.state": "client"}
    made = build(**scaffold, **{"mechanism.weighting": "uniform"})
    first = make_strategy(made)
    reached = first.start(LocalGrid(made.trainer), made.initial_arrays, 1)
    state = first.state()
    for wrong in (torch.zeros(3), 5):
        with pytest.raises(FedsimError, match="state= "):
            make_strategy(made).start(
                LocalGrid(made.trainer), reached.arrays, 2, state={**state, "vectors": wrong}
            )
    make_strategy(made).start(LocalGrid(made.trainer), reached.arrays, 2, state=state)
