from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from release_helpers import one_round as released
from release_helpers import shares_of, source
from scipy import stats
from slow_cases import slow_but
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms import (
    AdaptiveNoise,
    Clipping,
    CoordinateClipping,
    Mechanism,
    Release,
    State,
)
from fedsim.rows import Layout


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_round(
    mechanism: Mechanism, state: State, rows: Tensor, z: float, denominator: float, seed: int = 0
) -> Release:
    return released(mechanism, state, rows, z, denominator, source(seed))


def noise_shape(mechanism: AdaptiveNoise, state: State) -> Tensor:
    return mechanism.round_state(state)["shape"]


def test_xus_worked_numbers() -> None:
    state = {"mean_square": tensor(36, 9)}
    s = tensor(12, 6)
    for shape, sigma, total in (
        ("proportional", tensor(16.970563, 8.485281), 360.0),
        ("optimal", tensor(14.696938, 10.392305), 324.0),
    ):
        mechanism = AdaptiveNoise(1.0, 0.0, beta=2.0, noise_shape=shape)
        found = noise_shape(mechanism, state)
        torch.testing.assert_close(found, sigma, atol=1e-6, rtol=0)
        assert float((s**2 / found**2).sum()) == pytest.approx(1.0)
        assert float((found**2).sum()) == pytest.approx(total)
        bounded = mechanism.bound(tensor(15, -7)[None], state)[0]
        torch.testing.assert_close(bounded, tensor(12, -6), atol=1e-7, rtol=0)


@pytest.mark.parametrize("shape", slow_but(1, ["proportional", "optimal"]))
def test_noise_on_each_coordinate_follows_its_bound(shape: str) -> None:
    d, z = 4, 0.7
    mechanism = AdaptiveNoise(1.0, 0.0, beta=2.0, noise_shape=shape)
    state = {"mean_square": tensor(36, 9, 1, 0.01)}
    s = tensor(12, 6, 2, 0.2)
    expected = s * d**0.5 * z if shape == "proportional" else (s * s.sum()).sqrt() * z
    rows = torch.zeros(1, d)
    noises = torch.stack([one_round(mechanism, state, rows, z, 5.0, t).mean for t in range(800)])
    squares = ((noises * 5 / expected) ** 2).sum(0).numpy()
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 800)
    assert bool(((low < squares) & (squares < high)).all())


def test_with_an_infinite_threshold_it_is_dp_sgd_to_the_byte() -> None:
    mechanism, clipping = AdaptiveNoise(0.9, math.inf, beta=1.0), Clipping(0.9)
    state = mechanism.init(Layout.of({"w": torch.empty(20)}))
    for t in range(5):
        rows = torch.randn(6, 20, generator=torch.Generator().manual_seed(t))
        a = one_round(mechanism, state, rows, 1.1, 6.0, t)
        b = one_round(clipping, {}, rows, 1.1, 6.0, t)
        assert torch.equal(a.mean, b.mean)
        state = a.state


def variance_in_plain_loops(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


@pytest.mark.parametrize("switch", ["mean-square", "root"])
def test_the_switch_is_that_of_a_plain_loop(switch: str) -> None:
    """The two tests differ, so each has to be its own loop's in all of 400 random cases."""
    draws = np.random.default_rng(5)
    phases = []
    for _ in range(400):
        # Debiased estimates of squares may be negative; these count as 0.
        mean_square = draws.gamma(0.5, 2.0, draws.integers(2, 9)) - 0.1
        threshold = float(draws.gamma(0.5, 2.0))
        squares = [max(float(value), 0.0) for value in mean_square]
        both = {
            "mean-square": variance_in_plain_loops(squares) > threshold,
            "root": variance_in_plain_loops([math.sqrt(value) for value in squares]) > threshold,
        }
        mechanism = AdaptiveNoise(1.0, threshold, switch=switch)
        state = {"mean_square": torch.from_numpy(mean_square)}
        assert bool(mechanism.round_state(state)["adaptive"]) == both[switch]
        phases.append((both["mean-square"], both["root"]))
    assert set(phases) == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("mean_square", [(0.0, 0.0), (36.0, 9.0)])
def test_statistics_are_of_the_released_mean_less_its_noise(
    mean_square: tuple[float, float],
) -> None:
    z, r, decay = 1.3, 4.0, 0.8
    mechanism = AdaptiveNoise(2.0, 0.0, beta=2.0, decay=decay)
    state = {"mean_square": tensor(*mean_square)}
    release = one_round(mechanism, state, torch.randn(3, 2), z, r)
    std = tensor(16.970563, 8.485281) if mean_square[0] else tensor(2, 2)
    expected = decay * state["mean_square"] + (1 - decay) * (release.mean**2 - (std * z / r) ** 2)
    torch.testing.assert_close(release.state["mean_square"], expected, atol=1e-5, rtol=1e-6)


def test_a_coordinate_that_one_record_uses_shows_in_raw_statistics_only() -> None:
    d = 50
    others, rare = torch.zeros(5, d), torch.zeros(1, d)
    rare[0, 7] = 0.5
    for raw in (False, True):
        mechanism = AdaptiveNoise(1.0, 0.0, 1.0, unsafe_non_private_raw_statistics=raw)
        state = mechanism.init(Layout.of({"w": rare[0]}))
        with_it = one_round(mechanism, state, torch.cat([others, rare]), 1.0, 6.0)
        without = one_round(mechanism, state, others, 1.0, 6.0)
        assert mechanism.guarantee == ("none" if raw else "gaussian")
        silent = bool((without.state["mean_square"] == 0).all())
        assert silent == raw
        seen = float(with_it.state["mean_square"][7])
        assert (seen == pytest.approx(0.1 * (0.5 / 6) ** 2)) == raw


def test_raw_statistics_are_order_independent() -> None:
    rows = torch.randn(20, 9, generator=torch.Generator().manual_seed(1))
    mechanism = AdaptiveNoise(1.0, 0.0, 1.0, unsafe_non_private_raw_statistics=True)
    state = mechanism.init(Layout.of({"w": rows[0]}))
    a, b = (one_round(mechanism, state, each, 1.0, 6.0) for each in (rows, rows.flip(0)))
    assert torch.equal(a.state["mean_square"], b.state["mean_square"])


def test_raw_statistics_cannot_be_shared_out() -> None:
    mechanism = AdaptiveNoise(1.0, 0.0, 1.0, unsafe_non_private_raw_statistics=True)
    state = mechanism.init(Layout.of({"w": torch.ones(2)}))
    with pytest.raises(FedsimError, match="placement"):
        shares_of(mechanism, state, torch.ones(1, 2), 1.0, 1.0, [source(0)])


def test_coordinate_clipping_in_closed_form() -> None:
    block = tensor(3, -0.1, math.inf, 0.2).reshape(2, 2)
    bounded = CoordinateClipping(0.5).bound(block)
    torch.testing.assert_close(bounded, tensor(0.5, -0.1, 0, 0).reshape(2, 2), atol=1e-8, rtol=0)


def test_coordinate_clipping_has_the_sensitivity_of_its_corner() -> None:
    mechanism, d, z = CoordinateClipping(0.5), 10_000, 1.2
    layout = Layout.of({"w": torch.empty(d)})
    assert mechanism.sensitivity({}, layout) == pytest.approx(50.0)
    noise = one_round(mechanism, {}, torch.zeros(1, d), z, 1.0).mean.numpy() / (z * 50)
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], d)
    assert low < float(np.sum(noise**2)) < high


@pytest.mark.parametrize(
    "changes",
    [{"clip_norm": 0.0}, {"threshold": -1.0}, {"beta": 0.0}, {"noise_shape": "x"}, {"floor": 0.0}],
)
def test_impossible_settings_are_refused(changes: dict[str, object]) -> None:
    settings: dict[str, object] = {"clip_norm": 1.0, "threshold": 0.0, "beta": 1.0, **changes}
    with pytest.raises(FedsimError, match=next(iter(changes)).replace("_", "-")):
        AdaptiveNoise(**settings)
