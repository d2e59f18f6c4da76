"""Random mechanisms, rows, blocks and trees: a release has the bytes of its rows, whatever else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from release_helpers import plan_of

from fedsim.federation.aggregation.shares import ShareRequest, make_shares
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    CoordinateClipping,
    NoiseSource,
    NoPrivacy,
    Normalization,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
    Releaser,
)
from fedsim.privacy import Independent
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import DenseRows, Layout

MECHANISMS = [
    Clipping(0.7),
    Clipping(1e-30),
    Normalization(2.0, smoothing=0.5),
    AdaClip(h1=1e-20),
    AdaptiveNoise(1.0, threshold=0.0, beta=3.0),
    AdaptiveNoise(1.0, threshold=np.inf, beta=3.0, noise_shape="optimal"),
    CoordinateClipping(0.3),
    QuantileClipping(initial_clip_norm=0.5, bit_noise=5.0),
    NoPrivacy("uniform"),
    NoPrivacy("num-examples"),
    PerLayer(Clipping(0.4)),
    PerLayer(AdaClip()),
    PerLayer((("a.*", Normalization(1.0)), ("*", QuantileClipping(bit_noise=50.0)))),
    PrivateScalar(PerLayer(Clipping(0.4)), "loss", high=3.0),
    PrivateScalar(PrivateScalar(AdaClip(), "loss"), "accuracy", fraction=0.3),
]
SHAPES = [
    {"a.weight": (1,)},
    {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (0, 4), "b.bias": (2,)},
    {"a.weight": (1, 1), "b.weight": (17,), "c.weight": (0, 5)},
]


def hostile(rng: np.random.Generator, count: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all lengths, some of them zero, huge, tiny, not finite, or just of a bound's norm."""
    rows = torch.from_numpy(rng.standard_normal((count, d))).to(dtype)
    for row in rows:
        match rng.integers(9):
            case 0:
                row.zero_()
            case 1:
                row[rng.integers(d)] = float(rng.choice([np.nan, np.inf, -np.inf]))
            case 2:
                row.mul_(1e30)
            case 3:
                row.mul_(1e-30)
            case 4:
                row.mul_(0.7 / torch.linalg.vector_norm(row.double()).to(dtype))
            case 5:
                row.fill_(torch.finfo(dtype).max)
    return rows


def release_of(case, cuts, rng):
    """One round, its rows in blocks that end at ``cuts``, their sums merged in a random tree."""
    releaser, state, rows, weights, side_scalars, server_round = case
    sums = []
    for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        total = releaser.start(state)
        block = slice(first, last)
        total.add(
            DenseRows(rows[block]),
            weights=weights[block],
            side_scalars={name: values[block] for name, values in side_scalars.items()},
        )
        sums.append(total)
    while len(sums) > 1:
        first, second = rng.choice(len(sums), 2, replace=False)
        sums[first].merge({name: t.clone() for name, t in sums[second].state().items()})
        del sums[second]
    source = Randomness(11, "matrix").generator(Purpose.NOISE, level="client", round=server_round)
    counts = sums[0].count, sums[0].rejected, sums[0].clipped
    return releaser.release(sums[0], NoiseSource(source)), counts


def same_bytes(first, second) -> bool:
    pairs = [(first.mean, second.mean), *((first.state[k], second.state[k]) for k in first.state)]
    return (
        all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs)
        and first.state.keys() == second.state.keys()
        and (first.info, first.side_scalars) == (second.info, second.side_scalars)
    )


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_and_trees_change_no_byte_of_three_rounds_of_hostile_rows(mechanism, dtype):
    rng = np.random.default_rng([MECHANISMS.index(mechanism), dtype == torch.float64])
    shapes = SHAPES[1:] if isinstance(mechanism, PerLayer) and "b." in str(mechanism) else SHAPES
    for shape in shapes:
        if "('*'" in str(mechanism) and len(shape) == 1:
            continue  # a pattern that no parameter is left for is refused
        layout = Layout.of({k: torch.zeros(v, dtype=dtype) for k, v in shape.items()})
        noise = Independent(0.0 if mechanism.guarantee == "none" else 1.3, hardened=False)
        releaser = Releaser(plan_of(mechanism, noise, 9.0), layout)
        state = mechanism.init(layout)
        for server_round, count in enumerate([0, 1, int(rng.integers(2, 40))]):
            rows = hostile(rng, count, layout.d, dtype)
            weights = rng.integers(0, 2, count).astype(np.float64)
            if mechanism.weighting == "num-examples":
                weights *= rng.integers(1, 50, count)
            side_scalars = {
                name: rng.choice([np.nan, -1.0, 0.5, 1e300], count)
                for name in mechanism.side_scalar_names
            }
            case = releaser, state, rows, weights, side_scalars, server_round
            once, counts = release_of(case, [], rng)
            cuts = np.sort(rng.integers(0, count + 1, 4)).tolist()
            again, counted = release_of(case, cuts, rng)
            assert same_bytes(once, again)
            assert counts == counted
            assert bool(torch.isfinite(once.mean).all())
            state = once.state


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.guarantee == "gaussian"], ids=str)
def test_shares_of_hostile_rows_are_the_same_in_any_blocks(mechanism):
    rng = np.random.default_rng(77)
    layout = Layout.of({k: torch.zeros(v) for k, v in SHAPES[1].items()})
    state, n = mechanism.init(layout), 11
    rows = hostile(rng, n, layout.d, torch.float32)
    side_scalars = {name: torch.from_numpy(rng.random(n)) for name in mechanism.side_scalar_names}
    bounding = mechanism.bounding_state(state, layout)

    def made(members: slice):
        return make_shares(
            ShareRequest(mechanism, Independent(1.3), 9.0, n),
            rows[members],
            bounding,
            layout,
            sources=[
                NoiseSource(Randomness(5, "x").generator(Purpose.SHARE, level="client", client=k))
                for k in range(n)[members]
            ],
            side_scalars={name: values[members] for name, values in side_scalars.items()},
        )

    everybody = made(slice(None))
    for k in range(n):
        alone = made(slice(k, k + 1))
        assert alone.units.numpy().tobytes() == everybody.units[k : k + 1].numpy().tobytes()
        assert bool(alone.usable[0]) == bool(everybody.usable[k])


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_a_round_whose_rows_are_all_rejected_is_that_of_nobody(mechanism):
    layout = Layout.of({k: torch.zeros(v) for k, v in SHAPES[1].items()})
    noise = Independent(0.0 if mechanism.guarantee == "none" else 1.3, hardened=False)
    releaser = Releaser(plan_of(mechanism, noise, 9.0), layout)
    state, rng = mechanism.init(layout), np.random.default_rng(0)
    rows = torch.full((6, layout.d), torch.nan)
    side_scalars = {name: np.ones(6) for name in mechanism.side_scalar_names}
    rejected, counts = release_of((releaser, state, rows, np.ones(6), side_scalars, 1), [2, 2], rng)
    none = {name: np.ones(0) for name in mechanism.side_scalar_names}
    nobody, _ = release_of((releaser, state, rows[:0], np.ones(0), none, 1), [], rng)
    assert counts == (0, 6, 0)
    assert same_bytes(rejected, nobody)


@pytest.mark.parametrize("mechanism", [Clipping(1.0), AdaClip(), CoordinateClipping(1.0)], ids=str)
def test_a_layer_without_coordinates_takes_no_share_of_the_budget(mechanism):
    shapes = {"a.weight": (2, 3), "empty.weight": (0, 3), "empty.bias": (0,)}
    layout = Layout.of({name: torch.zeros(shape) for name, shape in shapes.items()})
    assert PerLayer(mechanism).noise_multipliers(1.3, 9.0, layout) == {"0.sum": 1.3}


def test_a_model_without_coordinates_has_no_layout():
    with pytest.raises(ValueError, match="no floating-point parameter"):
        Layout.of({"w": torch.zeros(0, 3)})
