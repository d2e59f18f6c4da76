"""What holds for every mechanism, in its first round and after some."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from release_helpers import numbers_in, releaser, shares_of, source, sources
from release_helpers import one_round as released
from scipy import stats
from slow_cases import hypothesis_examples
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.share_sums import add_shares
from fedsim.federation.aggregation.shares import missing_share, share_multiplier
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    CoordinateClipping,
    Mechanism,
    NoPrivacy,
    Normalization,
    NormBound,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
    Release,
    State,
)
from fedsim.rows import DenseRows, Layout

NAN = float("nan")
MECHANISMS: list[Mechanism] = [
    Clipping(0.8),
    NormBound(2.0),
    Normalization(0.8),
    Normalization(0.8, smoothing=0.1),
    CoordinateClipping(0.3),
    QuantileClipping(initial_clip_norm=0.5, bit_noise=1.0),
    AdaClip(clip_norm=0.8),
    AdaClip(clip_norm=0.8, gamma=0.5, clamp="post", beta2=0.999, center=False, h2=4.0),
    AdaClip(h2=1e-2, literal=True),
    AdaptiveNoise(clip_norm=0.8, threshold=0.0, beta=3.0),
    AdaptiveNoise(clip_norm=0.8, threshold=0.0, beta=3.0, noise_shape="optimal"),
    PerLayer(Clipping(0.5)),
    PerLayer((("0.*", QuantileClipping(bit_noise=1.0)), ("*", AdaClip(0.5))), shares=(0.25, 0.75)),
    PrivateScalar(AdaClip(clip_norm=0.8), name="loss", high=4.0, fraction=0.2),
    PrivateScalar(PerLayer(Normalization(0.5)), name="accuracy"),
]
EVERY = pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)


def layout_of(d: int, dtype: torch.dtype = torch.float32) -> Layout:
    cut = d // 3
    return Layout.of(
        {
            "0.weight": torch.empty(cut, dtype=dtype),
            "0.bias": torch.empty(1, dtype=dtype),
            "2.weight": torch.empty(d - cut - 1, dtype=dtype),
        }
    )


def row_scalars(mechanism: Mechanism, rows: Tensor) -> dict[str, Tensor]:
    return {name: rows[:, 0].abs().double() for name in mechanism.side_scalar_names}


def one_round(
    mechanism: Mechanism,
    state: State,
    rows: Tensor,
    *,
    z: float = 1.0,
    denominator: float = 10.0,
    seed: int = 0,
    splits: tuple[int, ...] | None = None,
) -> Release:
    return released(
        mechanism, state, rows, z, denominator, source(seed), blocks=splits,
        layout=layout_of(rows.shape[1], rows.dtype), side_scalars=row_scalars(mechanism, rows),
    )  # fmt: skip


def state_after(mechanism: Mechanism, layout: Layout, rounds: int) -> State:
    state = mechanism.init(layout)
    for t in range(rounds):
        rows = torch.from_numpy(np.random.default_rng([7, t]).normal(size=(10, layout.d)))
        rows = rows.to(layout.dtype) * torch.linspace(0.01, 1, layout.d)
        state = one_round(mechanism, state, rows.to(layout.dtype), z=0.3, seed=t).state
    return state


def in_the_ball(mechanism: Mechanism, state: State, rows: Tensor) -> Tensor:
    """Bounded rows in the mechanism's coordinates: shares without noise."""
    layout = layout_of(rows.shape[1])
    shares = shares_of(
        mechanism, state, rows, 0.0, 10.0, sources(0, len(rows)), layout=layout,
        side_scalars=row_scalars(mechanism, rows),
    )  # fmt: skip
    return numbers_in(shares, releaser(mechanism, layout, 0.0, 10.0).start(state))[0]


def ball_bounds(mechanism: Mechanism, state: State, layout: Layout) -> list[tuple[slice, float]]:
    """Radius of each part that has noise of its own."""
    return [
        (
            part.columns[0] if part.columns else slice(0, layout.d),
            part.mechanism.sensitivity(part.select(state), part.layout),
        )
        for part in mechanism.segments(layout)
    ]


@EVERY
@pytest.mark.parametrize("rounds", [0, 4])
@hypothesis_examples(10)
@given(
    rows=st.lists(
        st.lists(
            st.one_of(
                st.floats(width=32),
                st.sampled_from([0.0, 1e-45, -1e-38, 1e30, 3e38, NAN, float("inf")]),
            ),
            min_size=6,
            max_size=6,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_no_row_leaves_the_ball(mechanism: Mechanism, rounds: int, rows: list[list[float]]) -> None:
    layout = layout_of(6)
    state = state_after(mechanism, layout, rounds)
    block = torch.tensor(rows, dtype=torch.float32)
    bounded = in_the_ball(mechanism, state, block)
    assert bool(torch.isfinite(bounded).all())
    for columns, radius in ball_bounds(mechanism, state, layout):
        norms = torch.linalg.vector_norm(bounded[:, columns] / radius, dim=1)
        assert bool((norms <= 1.0).all())
    finite = torch.isfinite(block).all(1)
    assert bool((mechanism.bound(block, state, layout)[~finite] == 0).all())


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("z", [0.0, 0.7])
def test_a_release_has_the_same_bytes_for_any_order_and_blocking(
    mechanism: Mechanism, dtype: torch.dtype, z: float
) -> None:
    layout = layout_of(40, dtype)
    state = state_after(mechanism, layout, 2)
    rng = np.random.default_rng(1)
    rows = torch.from_numpy(rng.normal(size=(23, 40)) * 10.0 ** rng.integers(-6, 3, (23, 1)))
    rows = rows.to(dtype)
    once = one_round(mechanism, state, rows, z=z)
    order = torch.from_numpy(rng.permutation(23))
    for splits in ((23,), (1, 22), (5, 5, 5, 5, 3)):
        again = one_round(mechanism, state, rows[order], z=z, splits=splits)
        assert once.mean.numpy().tobytes() == again.mean.numpy().tobytes()
        assert once.side_scalars == again.side_scalars
        for name, tensor in once.state.items():
            assert tensor.numpy().tobytes() == again.state[name].numpy().tobytes()


@EVERY
def test_a_saved_and_restored_state_goes_on_with_the_same_bytes(mechanism: Mechanism) -> None:
    layout = layout_of(12)
    state = state_after(mechanism, layout, 3)
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    restored = torch.load(file, weights_only=True)
    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    a, b = (one_round(mechanism, each, rows) for each in (state, restored))
    assert torch.equal(a.mean, b.mean)
    assert a.state.keys() == b.state.keys() == state.keys()
    assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)


@EVERY
def test_a_release_leaves_the_state_it_was_given_alone(mechanism: Mechanism) -> None:
    layout = layout_of(12)
    state = state_after(mechanism, layout, 1)
    before = {name: tensor.clone() for name, tensor in state.items()}
    one_round(mechanism, state, torch.randn(5, 12, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(before[name], tensor) for name, tensor in state.items())


@EVERY
@pytest.mark.parametrize("rounds", [0, 3])
def test_noise_free_releases_are_the_mean_of_bounded_rows(
    mechanism: Mechanism, rounds: int
) -> None:
    layout = layout_of(12, torch.float64)
    state = state_after(mechanism, layout, rounds)
    rows = torch.randn(10, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    release = one_round(mechanism, state, rows, z=0.0, denominator=10.0)
    expected = mechanism.bound(rows, state, layout).mean(0)
    torch.testing.assert_close(release.mean, expected, atol=2e-8, rtol=0)


@EVERY
def test_a_non_finite_row_contributes_to_no_sum(mechanism: Mechanism) -> None:
    layout = layout_of(12)
    state = state_after(mechanism, layout, 2)
    rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(5))
    with_bad = torch.cat(
        [rows, torch.full((1, 12), NAN), rows[:1].index_fill(1, torch.tensor([11]), NAN)]
    )
    a, b = (one_round(mechanism, state, each) for each in (rows, with_bad))
    assert torch.equal(a.mean, b.mean)
    assert a.side_scalars == b.side_scalars
    total = releaser(mechanism, layout).start(state)
    usable = total.add(DenseRows(with_bad), side_scalars=row_scalars(mechanism, with_bad))
    assert usable.tolist() == [True] * 4 + [False] * 2
    assert (total.count, total.rejected) == (4, 2)


@EVERY
def test_a_masked_row_contributes_to_no_sum(mechanism: Mechanism) -> None:
    layout = layout_of(12)
    state = state_after(mechanism, layout, 2)
    rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(6))
    releasing = releaser(mechanism, layout, 1.0, 10.0)
    total = releasing.start(state)
    mask = np.array([True, False, True, True])
    total.add(DenseRows(rows), weights=mask, side_scalars=row_scalars(mechanism, rows))
    masked = releasing.release(total, source(0))
    without = one_round(mechanism, state, rows[[0, 2, 3]], seed=0)
    assert total.count == 3
    assert torch.equal(masked.mean, without.mean)
    assert masked.side_scalars == without.side_scalars


@EVERY
@pytest.mark.parametrize("z", [0.3, 1.7])
def test_parts_of_a_release_cost_what_one_gaussian_does(mechanism: Mechanism, z: float) -> None:
    split = mechanism.noise_multipliers(z, 10.0, layout_of(12))
    assert sum(part**-2 for part in split.values()) == pytest.approx(z**-2, rel=1e-12)


def expected_std(mechanism: Mechanism, state: State, layout: Layout, z: float) -> Tensor:
    """Standard deviation of the released sum's noise in each coordinate."""
    split = mechanism.noise_multipliers(z, 10.0, layout)
    out = torch.empty(layout.d, dtype=torch.float64)
    for part in mechanism.segments(layout):
        columns = part.columns[0] if part.columns else slice(0, layout.d)
        shape = shape_of(part.mechanism, part.select(state), part.layout.d)
        out[columns] = shape * split[part.prefix + "sum"]
    return out


def shape_of(mechanism: Mechanism, state: State, d: int) -> Tensor:
    """Noise of multiplier one, from the papers' formulas."""
    if isinstance(mechanism, AdaClip):
        return (state["s"] / mechanism.gamma * state["s"].sum()).sqrt()
    if isinstance(mechanism, AdaptiveNoise) and float(state["mean_square"].abs().sum()) > 0:
        s = mechanism.beta * state["mean_square"].clamp_min(mechanism.floor).sqrt()
        return s * d**0.5 if mechanism.noise_shape == "proportional" else (s * s.sum()).sqrt()
    c = mechanism.sensitivity(state, Layout.of({"w": torch.empty(d)}))
    return torch.full((d,), c, dtype=torch.float64)


@EVERY
@pytest.mark.parametrize("placement", ["server", "client", "client with drop-outs", "empty"])
def test_noise_has_the_stated_variance_wherever_it_is_drawn(
    mechanism: Mechanism, placement: str
) -> None:
    d, z, asked = 6000, 1.3, 7
    layout = layout_of(d)
    state = state_after(mechanism, layout, 2)
    std = expected_std(mechanism, state, layout, z)
    rows = torch.randn(asked, d, generator=torch.Generator().manual_seed(8)) * 0.01
    releasing = releaser(mechanism, layout, z, 10.0)
    total = releasing.start(state)
    arrived = {"server": asked, "client": asked, "client with drop-outs": 4, "empty": 0}[placement]
    if placement == "server":
        total.add(DenseRows(rows), side_scalars=row_scalars(mechanism, rows))
    elif arrived:
        add_shares(total, 
            shares_of(
                mechanism, state, rows[:arrived], z, 10.0, sources(3, arrived), layout=layout,
                asked=asked, side_scalars=row_scalars(mechanism, rows[:arrived]),
            )
        )  # fmt: skip
    release = releasing.release(
        total, source(99), missing=1 if placement == "server" else 1 - total.count / asked
    )
    clean = one_round(mechanism, state, rows[:arrived], z=0.0)
    residual = ((release.mean - clean.mean) * 10 / std).numpy()
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], d)
    assert low < float(np.sum(residual**2)) < high
    assert stats.kstest(residual, "norm").pvalue > 1e-4
    for name, value in release.side_scalars.items():
        bit = mechanism.noise_multipliers(z, 10.0, layout)[name]
        half = mechanism.high / 2 if isinstance(mechanism, PrivateScalar) else 0.5
        assert abs(value - clean.side_scalars[name]) < 6 * bit * half / 10


def test_a_scalars_noise_has_the_stated_variance_on_both_placements() -> None:
    mechanism, z, n = PrivateScalar(Clipping(1.0), high=4.0, fraction=0.3), 1.1, 5
    rows = torch.zeros(n, 3)
    side_scalars = {"loss": torch.linspace(-1, 6, n)}
    clean = 2 + (side_scalars["loss"].clamp(0, 4) - 2).sum().item() / 8
    releasing = releaser(mechanism, Layout.of({"w": rows[0]}), z, 8.0)
    found: dict[str, list[float]] = {"server": [], "client": []}
    for t in range(300):
        for placement, values in found.items():
            total = releasing.start({})
            if placement == "server":
                total.add(DenseRows(rows), side_scalars=side_scalars)
            else:
                add_shares(
                    total,
                    shares_of(
                        mechanism, {}, rows, z, 8.0, sources(t, n), side_scalars=side_scalars
                    ),
                )
            missing = 1 if placement == "server" else missing_share(n, total.count)
            release = releasing.release(total, source(1, t), missing=missing)
            values.append((release.side_scalars["loss"] - clean) * 8 / (z / 0.3**0.5 * 2))
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 300)
    assert all(low < float(np.sum(np.square(values))) < high for values in found.values())
    assert stats.ks_2samp(found["server"], found["client"]).pvalue > 1e-4


def test_under_full_participation_a_share_is_das_own() -> None:
    """z C / sqrt(r) for each of r clients, and nothing from the server."""
    assert share_multiplier(3.0, 100) == pytest.approx(0.3)
    assert missing_share(100, 100) == 0


def test_without_privacy_there_is_nothing_to_share() -> None:
    with pytest.raises(FedsimError, match="placement"):
        shares_of(NoPrivacy("uniform"), {}, torch.ones(1, 2), 0.0, 1.0, sources(0, 1))


def test_a_client_that_sends_a_malformed_share_is_dropped_and_topped_up_for() -> None:
    mechanism, layout = Clipping(1.0), Layout.of({"w": torch.empty(5000)})
    shares = shares_of(mechanism, {}, torch.zeros(4, 5000), 2.0, 4.0, sources(0, 4))
    shares.units[1, 17] = NAN
    releasing = releaser(mechanism, layout, 2.0, 4.0)
    total = releasing.start({})
    add_shares(total, shares)
    assert (total.count, total.rejected) == (3, 1)
    release = releasing.release(total, source(5), missing=missing_share(4, total.count))
    assert release.mean.std().item() * 4 == pytest.approx(2.0, rel=0.06)


@EVERY
def test_a_release_shows_what_was_declared_before_the_first(mechanism: Mechanism) -> None:
    layout = layout_of(12)
    for rounds in (0, 2):
        release = one_round(mechanism, state_after(mechanism, layout, rounds), torch.ones(3, 12))
        assert {*release.info, *release.side_scalars} == set(mechanism.released_names(layout))
