"""Partial sums: what workers make of their rows merges to the bytes of one sum."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from release_cases import MECHANISMS
from release_helpers import layout_of_rows, plan_of, releaser, shares_of, source, sources
from slow_cases import hypothesis_examples
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.share_sums import add_shares
from fedsim.federation.aggregation.shares import ShareRequest, make_shares, split
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    NoPrivacy,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
    Releaser,
)
from fedsim.privacy import Independent
from fedsim.rows import DenseRows, Layout

LAYOUT = Layout.of(
    {"0.weight": torch.empty(3, 5), "0.bias": torch.empty(3), "2.weight": torch.empty(2, 3)}
)

SOME = {name: MECHANISMS[name] for name in (
    "clipping", "loose clipping", "quantile", "adaclip", "mixed layers", "second phase",
    "scalar of layers", "raw statistics", "no privacy", "weighted",
)}  # fmt: skip
EVERY = pytest.mark.parametrize("mechanism", SOME.values(), ids=SOME.keys())


def rows_of(seed: int, n: int) -> Tensor:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(rng.normal(size=(n, LAYOUT.d)) * 10.0 ** rng.integers(-6, 3, (n, 1)))
    rows[rng.random(n) < 0.1, 4] = torch.nan
    return rows.float()


def given_with(mechanism, rows):
    side_scalars = {name: rows[:, 1].nan_to_num().double() for name in mechanism.side_scalar_names}
    weighted = mechanism.weighting == "num-examples"
    return side_scalars, torch.arange(len(rows)) % 7 * (40.0 if weighted else 1 / 8)


def add(total, mechanism, rows, index):
    side_scalars, weights = given_with(mechanism, rows)
    total.add(
        DenseRows(rows[index]),
        weights=weights[index],
        side_scalars={name: values[index] for name, values in side_scalars.items()},
    )


@EVERY
@hypothesis_examples(10)
@given(
    seed=st.integers(0, 2**31),
    noisy=st.booleans(),
    double=st.booleans(),
    cuts=st.lists(st.integers(0, 23), max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_partial_sums_merge_to_the_bytes_of_one_sum_in_any_order_and_tree(
    mechanism, seed, noisy, double, cuts, order
):
    rows = rows_of(seed, 23).to(torch.float64 if double else torch.float32)
    z = 0.7 if noisy and mechanism.guarantee == "gaussian" else 0.0
    layout = Layout.of({k: v.to(rows.dtype) for k, v in LAYOUT.unflatten(rows[0]).items()})
    releasing, state = releaser(mechanism, layout, z, 20.0), mechanism.init(layout)
    whole = releasing.start(state)
    add(whole, mechanism, rows, slice(None))
    index = list(range(23))
    order.shuffle(index)
    edges = [0, *sorted(cuts), 23]
    parts = []
    for first, last in pairwise(edges):
        part = releasing.start_bounding(mechanism.bounding_state(state, layout))
        add(part, mechanism, rows, index[first:last])
        parts.append(part)
    while len(parts) > 1:  # a tree of any shape
        taken = parts.pop(order.randrange(len(parts)))
        parts[order.randrange(len(parts))].merge(pickle.loads(pickle.dumps(taken.state())))
    merged = releasing.start(state)
    merged.merge(parts[0].state())
    assert merged.state().keys() == whole.state().keys()
    for name, tensor in whole.state().items():
        assert tensor.numpy().tobytes() == merged.state()[name].numpy().tobytes()
    counts = [(total.count, total.rejected, total.clipped) for total in (whole, merged)]
    assert counts[0] == counts[1]
    once, again = (releasing.release(total, source(1)) for total in (whole, merged))
    assert once.mean.numpy().tobytes() == again.mean.numpy().tobytes()
    assert once.side_scalars == again.side_scalars
    assert all(torch.equal(once.state[name], again.state[name]) for name in once.state)


def test_what_travels_is_one_vector_a_part_and_counts_whatever_the_rows():
    releasing = releaser(AdaClip(), layout_of_rows(torch.empty(1, 1000)), 1.0)
    total = releasing.start(AdaClip().init(layout_of_rows(torch.empty(1, 1000))))
    total.add(DenseRows(torch.randn(300, 1000)))
    assert len(pickle.dumps(total.state())) < 8 * 1000 + 3000


@pytest.mark.parametrize(
    "other",
    [
        releaser(Clipping(2.0), LAYOUT, 1.0),
        releaser(Clipping(1.0), Layout.of({"w": torch.empty(3)}), 1.0),
        releaser(QuantileClipping(initial_clip_norm=1.0, bit_noise=9.0), LAYOUT, 1.0, 9.0),
    ],
    ids=["another C", "another layout", "another bound"],
)
def test_sums_of_other_bounds_are_not_merged(other):
    total = releaser(Clipping(1.0), LAYOUT, 1.0).start({})
    with pytest.raises(FedsimError, match="only sums of one round merge"):
        total.merge(other.start(other.mechanism.init(other.layout)).state())


@pytest.mark.slow
def test_a_sum_takes_so_many_rows_as_stay_exact_merged_ones_included():
    layout = layout_of_rows(torch.empty(1, 1))
    for mechanism, most in ((Clipping(1.0), 2**22), (NoPrivacy("uniform"), 2**20)):
        total = releaser(mechanism, layout).start({})
        total.add(DenseRows(torch.zeros(2**20, 1)))
        for _ in range(most // 2**20 - 1):
            total.merge({**total.state(), "rows": torch.tensor(2**20)})
        with pytest.raises(FedsimError, match="rows"):
            total.add(DenseRows(torch.zeros(1, 1)))
        with pytest.raises(FedsimError, match="rows"):
            total.merge({**total.state(), "rows": torch.tensor(1)})


# -- what clients are sent, and what they may send -------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "names"),
    [
        (Clipping(1.0), []),
        (QuantileClipping(), ["clip_norm"]),
        (AdaClip(), ["m", "scale"]),
        (AdaClip(center=False), ["scale"]),
        (AdaptiveNoise(1.0, 1e9, 1.0), ["adaptive"]),
        (AdaptiveNoise(1.0, 0.0, 1.0), ["adaptive", "shrink", "stretch"]),
        (PrivateScalar(PerLayer(AdaClip())), ["0.m", "0.scale", "2.m", "2.scale"]),
    ],
    ids=repr,
)
def test_clients_are_sent_what_bounding_a_row_takes_and_nothing_else(mechanism, names):
    layout = Layout.of({"0.weight": torch.empty(4), "2.weight": torch.empty(3)})
    state = {
        k: v + torch.linspace(0.1, 1, v.numel()).view(v.shape)
        for k, v in mechanism.init(layout).items()
    }
    renamed = [name.replace("2.", "1.") for name in names]
    assert sorted(mechanism.bounding_state(state, layout)) == renamed
    # What a noise keeps of earlier rounds is nobody's to see.
    kept = {**state, "noise.last": torch.zeros(7)}
    assert sorted(mechanism.bounding_state(kept, layout)) == renamed


@pytest.mark.parametrize(
    ("place", "value"),
    [("rows", 1e200), ("rows", -1e5), ("rows", torch.inf), ("unclipped", 1e9)],
)
def test_a_share_that_bound_and_noise_cannot_have_made_is_dropped(place, value):
    mechanism, rows = QuantileClipping(initial_clip_norm=1.0, bit_noise=9.0), torch.ones(4, 6)
    state = mechanism.init(layout_of_rows(rows))
    shares = shares_of(mechanism, state, rows, 1.0, 4.0, sources(0, 4))
    good = releaser(mechanism, layout_of_rows(rows), 1.0, 4.0).start(state)
    assert add_shares(good, shares).all()
    total = releaser(mechanism, layout_of_rows(rows), 1.0, 4.0).start(state)
    name, entry = ("sum", 3) if place == "rows" else (place, 0)
    split(total, shares.units)[name][2, entry] = value / total.grids[name].unit
    assert add_shares(total, shares).tolist() == [True, True, False, True]
    assert bool(torch.isfinite(total.grids["sum"].coarse).all())


# -- noise that is correlated over rounds ----------------------------------------------


class LambdaNoise(Independent):
    """``N_t = Z_t - lam Z_(t-1)``, DP-lambda-CGD."""

    lam = 0.8

    @property
    def correlated(self):
        return True

    def combine(self, draws, state):
        last, fresh = state.get("last"), draws()
        return fresh.clone() if last is None else fresh - self.lam * last, {"last": fresh}


def test_noise_that_is_correlated_over_rounds_is_a_value_and_touches_nothing_else():
    z, d = 1.3, 40
    for mechanism in (Clipping(0.7), PrivateScalar(Clipping(0.7), fraction=0.2)):
        layout = layout_of_rows(torch.empty(1, d))
        releasing = Releaser(plan_of(mechanism, LambdaNoise(z), 8.0), layout)
        state, before = mechanism.init(layout), 0.0
        split = mechanism.noise_multipliers(z, 8.0, layout)
        for t in range(5):
            rows = torch.randn(6, d, generator=torch.Generator().manual_seed(t))
            total = releasing.start(state)
            total.add(DenseRows(rows), side_scalars={"loss": torch.linspace(0, 1, 6)})
            exact = total.grids["sum"].value()
            release = releasing.release(total, source(9, t))
            state = release.state
            fresh = source(9, t).normal(d + len(split) - 1)
            unit = float(total.grids["sum"].unit)
            noise = (fresh - LambdaNoise.lam * before)[:d] * (split["sum"] * 0.7 / unit)
            found = (release.mean * 8.0 - exact) / unit
            # The mean was rounded when it was divided; the noise on the grid was not.
            assert np.array_equal(found.round().numpy(), np.rint(noise))
            before = fresh
        assert set(state) == {"noise.last"}


def test_noise_that_is_correlated_is_refused_where_c_changes_and_with_shares():
    noise, layout = LambdaNoise(1.0), layout_of_rows(torch.empty(1, 4))
    for mechanism in (
        QuantileClipping(bit_noise=9.0),
        AdaClip(),
        AdaptiveNoise(1.0, 1.0, 1.0),
        PerLayer(AdaClip()),
        PrivateScalar(QuantileClipping(bit_noise=9.0)),
    ):
        with pytest.raises(FedsimError, match="correlated over rounds"):
            Releaser(plan_of(mechanism, noise, 5.0), layout)
    with pytest.raises(FedsimError, match="placement"):
        make_shares(
            ShareRequest(Clipping(1.0), noise, 1.0, 1),
            torch.ones(1, 4),
            {},
            layout,
            sources=sources(0, 1),
        )
