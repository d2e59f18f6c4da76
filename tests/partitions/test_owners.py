"""Examples that have owners, and examples that are held out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.errors import FedsimError
from fedsim.partitions import IID, ByOwner, hold_out


@given(st.lists(st.sampled_from(["Ann", "Bo", "Cem", "Ängström"]), min_size=1, max_size=40))
def test_every_owner_is_the_client_of_all_its_examples(names: list[str]) -> None:
    owner = np.array(names)
    parts = ByOwner(clients=5).indices(np.zeros((len(names), 3)), {"owner": owner})
    assert len(parts) == 5
    for name, part in zip(sorted(set(names)), parts, strict=False):
        assert owner[part].tolist() == [name] * names.count(name)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(names)))


def test_test_examples_go_to_their_owner_or_to_nobody() -> None:
    columns = {"site": np.array([30, 10, 10, 20])}
    tests = {"site": np.array([20, 40, 10, 20, 5])}
    parts = ByOwner(clients=3, column="site").test_indices(columns, tests)
    assert parts is not None
    assert [part.tolist() for part in parts] == [[2], [0, 3], []]
    assert ByOwner(clients=3, column="site").test_indices(columns, {}) is None
    assert IID(3).test_indices(columns, tests) is None


def test_owners_that_cannot_be_clients_end_with_a_sentence() -> None:
    owner = np.array([1, 2, 3])
    with pytest.raises(FedsimError, match=r"clients is 2, but .* 3 owners .* must be 3"):
        ByOwner(clients=2).indices(owner, {"owner": owner})
    with pytest.raises(FedsimError, match=r"column is 'site', but .* have owner; .* site_train"):
        ByOwner(clients=3, column="site").indices(owner, {"owner": owner})
    with pytest.raises(FedsimError, match="holds NaN"):
        ByOwner(clients=3).indices(owner, {"owner": np.array([1, np.nan, 2])})
    with pytest.raises(FedsimError, match="numbers in both, or strings in both"):
        ByOwner(clients=3).test_indices({"owner": owner}, {"owner": np.array(["1"])})
    with pytest.raises(FedsimError, match="one value for each of the 3 examples"):
        ByOwner(clients=3).indices(owner, {"owner": owner[:2]})
    with pytest.raises(FedsimError, match="in a private run the number of clients is declared"):
        ByOwner(clients=4).require_every_client_an_owner({"owner": owner})
    ByOwner(clients=3).require_every_client_an_owner({"owner": owner})


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=60),
    st.floats(0.01, 0.99),
    st.booleans(),
)
def test_holding_out_leaves_every_owner_an_example(
    owners: list[int], share: float, owned: bool
) -> None:
    owner = np.array(owners)
    n = len(owner)
    count = int(share * n + 1e-9)
    most = n - (len(set(owners)) if owned else 1)
    column = owner if owned else None
    if not 1 <= count <= most:
        with pytest.raises(FedsimError, match=r"data\.validation is"):
            hold_out(share, n, column, seed=1)
        return
    rest, held = hold_out(share, n, column, seed=1)
    assert len(held) == count
    np.testing.assert_array_equal(np.sort(np.concatenate([rest, held])), np.arange(n))
    if owned:
        assert set(owner[rest]) == set(owners)
    again = hold_out(count, n, column, seed=1)
    np.testing.assert_array_equal(again[1], held)


def test_every_example_is_as_likely_to_be_held_out() -> None:
    owner = np.repeat(np.arange(10), 10)
    times = sum(np.bincount(hold_out(20, 100, owner, seed=s)[1], minlength=100) for s in range(500))
    # Each of 100 with probability 0.2 in 500 draws: a standard deviation is 9.
    assert np.abs(times - 100).max() < 45
