from __future__ import annotations

import numpy as np
import pytest
import torch
from release_helpers import one_round as released
from release_helpers import source
from scipy import stats
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms import QuantileClipping, Release, State
from fedsim.rows import Layout


def one_round(
    mechanism: QuantileClipping,
    state: State,
    rows: Tensor,
    z: float,
    denominator: float,
    seed: int = 0,
) -> Release:
    return released(mechanism, state, rows, z, denominator, source(seed))


def rows_of_norms(norms: np.ndarray, d: int = 3) -> Tensor:
    directions = np.random.default_rng(0).normal(size=(len(norms), d))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return torch.from_numpy(directions * norms[:, None])


@pytest.mark.spanning
@pytest.mark.parametrize("z", [0.0, 1.0])
@pytest.mark.parametrize("start", [0.1, 0.9, 1.1, 3.0])
@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
def test_the_fixed_point_is_the_true_quantile_from_both_sides(
    z: float, start: float, target: float
) -> None:
    mechanism = QuantileClipping(target, initial_clip_norm=start)
    state = mechanism.init(Layout.of({"w": torch.empty(3)}))
    found = []
    for t in range(120):
        norms = np.random.default_rng(t).uniform(0.5, 1.5, size=200)
        state = one_round(mechanism, state, rows_of_norms(norms), z, 200.0, t).state
        found.append(float(state["clip_norm"]))
    assert np.mean(found[-50:]) == pytest.approx(0.5 + target, abs=0.04)


def test_one_step_in_closed_form() -> None:
    mechanism = QuantileClipping(0.5, learning_rate=0.2, initial_clip_norm=1.0)
    state = mechanism.init(Layout.of({"w": torch.empty(3)}))
    rows = rows_of_norms(np.array([0.5, 0.7, 0.9, 2.0]))
    release = one_round(mechanism, state, rows, 0.0, 4.0)
    assert release.side_scalars["unclipped"] == 0.75
    assert float(release.state["clip_norm"]) == pytest.approx(np.exp(-0.2 * 0.25))
    # A fixed denominator: four rows of an expected eight pull half as far.
    assert one_round(mechanism, state, rows, 0.0, 8.0).side_scalars["unclipped"] == 0.625


def test_a_row_of_norm_exactly_c_counts_as_unclipped() -> None:
    mechanism = QuantileClipping(initial_clip_norm=5.0)
    state = mechanism.init(Layout.of({"w": torch.empty(2)}))
    release = one_round(mechanism, state, torch.tensor([[3.0, 4.0]]), 0.0, 1.0)
    assert release.side_scalars["unclipped"] == 1.0


def test_noise_uses_the_c_that_rows_were_clipped_at() -> None:
    d, z = 20_000, 0.8
    mechanism = QuantileClipping(0.0, learning_rate=1.0, initial_clip_norm=1.0, bit_noise=1.0)
    state = mechanism.init(Layout.of({"w": torch.empty(d)}))
    release = one_round(mechanism, state, torch.zeros(10, d), z, 10.0)
    assert release.info["clip-norm"] == 1.0
    assert float(release.state["clip_norm"]) < 0.8
    split = mechanism.split(z, 10.0)
    residual = release.mean.numpy() * 10 / split["sum"]
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], d)
    assert low < float(np.sum(residual**2)) < high


def test_the_bits_noise_has_its_stated_deviation_and_the_vector_the_rest() -> None:
    mechanism, z, r = QuantileClipping(bit_noise=0.05), 1.1, 100.0
    split = mechanism.split(z, r)
    sigma_b = r / 20
    assert split["unclipped"] == 2 * sigma_b
    assert split["sum"] == pytest.approx((z**-2 - (2 * sigma_b) ** -2) ** -0.5)
    state = mechanism.init(Layout.of({"w": torch.empty(1)}))
    bits = [
        one_round(mechanism, state, torch.empty(0, 1), z, r, t).side_scalars["unclipped"]
        for t in range(400)
    ]
    squares = np.sum(((np.array(bits) - 0.5) * r / sigma_b) ** 2)
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 400)
    assert low < squares < high


def test_a_split_that_would_need_negative_noise_is_refused() -> None:
    with pytest.raises(FedsimError, match="bit-noise"):
        QuantileClipping(bit_noise=0.05).split(1.1, 10.0)


def test_a_small_cohorts_noisy_bits_keep_c_in_range() -> None:
    mechanism = QuantileClipping(bit_noise=1e5, learning_rate=100.0)
    state = mechanism.init(Layout.of({"w": torch.empty(1)}))
    for t in range(20):
        state = one_round(mechanism, state, torch.empty(0, 1), 1.0, 1.0, t).state
        assert 1e-30 <= float(state["clip_norm"]) <= 1e9


@pytest.mark.parametrize(
    ("key", "value"), [("target_quantile", 1.5), ("learning_rate", -1.0), ("bit_noise", 0.0)]
)
def test_impossible_settings_are_refused(key: str, value: float) -> None:
    with pytest.raises(FedsimError, match=key.replace("_", "-")):
        QuantileClipping(**{key: value})
