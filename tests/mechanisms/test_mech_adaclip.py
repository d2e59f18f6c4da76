from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from release_helpers import layout_of_rows, releaser
from release_helpers import one_round as released
from scipy import stats
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms import AdaClip, Clipping, NoiseSource, Release, State
from fedsim.rows import DenseRows, Layout


class Silent(np.random.Generator):
    """A generator whose normal draws are all zero."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def standard_normal(self, size: int) -> np.ndarray:
        return np.zeros(size)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_round(
    mechanism: AdaClip | Clipping,
    state: State,
    rows: Tensor,
    z: float,
    denominator: float,
    generator: np.random.Generator,
) -> Release:
    return released(mechanism, state, rows, z, denominator, NoiseSource(generator))


def test_one_step_in_closed_form() -> None:
    mechanism = AdaClip(h2=10.0, beta1=0.99, beta2=0.9)
    state = {"m": tensor(1, 1), "s": tensor(4, 1)}
    scale, center = mechanism.whitening(mechanism.round_state(state))
    assert scale is not None
    assert center is state["m"]
    b = 1 / scale
    torch.testing.assert_close(b, tensor(4.4721360, 2.2360680), atol=1e-7, rtol=0)
    assert float((state["s"] ** 2 / b**2).sum()) == pytest.approx(1.0)
    assert float((b**2).sum()) == pytest.approx(25.0)
    row = tensor(9, -1)[None]
    assert DenseRows(row).norms(scale, center).item() == pytest.approx(2.0)
    release = one_round(mechanism, state, row, z=0.1, denominator=1.0, generator=Silent())
    torch.testing.assert_close(release.mean, tensor(5, 0), atol=1e-8, rtol=0)
    torch.testing.assert_close(
        release.state["s"], tensor(3.92428337, 0.99749687), atol=1e-7, rtol=0
    )
    torch.testing.assert_close(release.state["m"], tensor(1.04, 0.99), atol=1e-8, rtol=0)


@pytest.mark.parametrize("clamp", ["pre", "post"])
def test_without_centring_the_square_of_the_mean_counts_as_variance(clamp: str) -> None:
    state = {"m": tensor(0.3, -0.2, 0.0), "s": tensor(1.0, 2.0, 0.5)}
    row, r, z = tensor(0.5, 0.1, -0.2)[None], 4.0, 0.1
    estimates = {}
    for center in (True, False):
        mechanism = AdaClip(h1=1e-9, h2=10.0, beta2=0.0, center=center, clamp=clamp)
        b = mechanism.round_state(state)["b"]
        release = one_round(mechanism, state, row, z=z, denominator=r, generator=Silent())
        # r ((g~ - m)^2 - noise): a row's variance, by which m^2 falls short of its second moment.
        variance = r * ((release.mean - state["m"]) ** 2 - (b * z / r) ** 2)
        second = variance if center else variance + state["m"] ** 2
        torch.testing.assert_close(release.state["s"] ** 2, second.clamp(1e-9, 10.0))
        estimates[center] = second
    assert (estimates[True] != estimates[False]).any()


def test_literal_and_per_example_variance_agree_for_one_row_only() -> None:
    state = {"m": tensor(0, 0), "s": tensor(1, 1)}
    rows = tensor(0.6, 0.2)[None]
    for r, same in ((1.0, True), (4.0, False)):
        a, b = (
            one_round(AdaClip(h2=100.0, variance=variance), state, rows, 0.01, r, Silent())
            for variance in ("per-example", "literal")
        )
        assert torch.equal(a.state["s"], b.state["s"]) == same


def test_it_starts_as_clipping_at_c() -> None:
    rows = torch.randn(8, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bounded = AdaClip(clip_norm=2.0, gamma=0.5).bound(rows)
    torch.testing.assert_close(bounded, Clipping(2.0).bound(rows), atol=1e-8, rtol=0)


def test_without_centre_and_with_constant_b_it_is_abadis_clipping() -> None:
    c, d = 2.0, 50
    adaclip = AdaClip(clip_norm=c, h1=c**2 / d, h2=c**2 / d, center=False)
    state = adaclip.init(Layout.of({"w": torch.empty(d)}))
    for t in range(5):
        rows = torch.from_numpy(np.random.default_rng(t).normal(size=(9, d)))
        a = one_round(adaclip, state, rows, 1.3, 9.0, np.random.default_rng([1, t]))
        b = one_round(Clipping(c), {}, rows, 1.3, 9.0, np.random.default_rng([1, t]))
        torch.testing.assert_close(a.mean, b.mean, atol=1e-8, rtol=0)
        state = a.state


@pytest.mark.parametrize("r", [1.0, 20.0])
@pytest.mark.parametrize("variance", ["per-example", "literal"])
def test_idle_coordinates_keep_half_of_their_noise_variance(r: float, variance: str) -> None:
    d, z, beta2 = 200_000, 1.7, 0.9
    mechanism = AdaClip(h1=1e-30, h2=1e12, beta2=beta2, variance=variance)
    state = {"m": torch.zeros(d, dtype=torch.float64), "s": torch.ones(d, dtype=torch.float64)}
    release = one_round(mechanism, state, torch.zeros(1, d), z, r, np.random.default_rng(0))
    v = (release.state["s"] ** 2 - beta2 * state["s"] ** 2) / (1 - beta2)
    noise_variance = d * (z / r) ** 2 * (r if variance == "per-example" else 1.0)
    exact = 2 * stats.norm.pdf(1)  # E(N^2 - 1)_+
    assert exact == pytest.approx(0.4839, abs=1e-4)
    assert float(v.mean()) / noise_variance == pytest.approx(exact, abs=0.01)


def test_the_variance_estimate_is_of_a_row_not_of_the_mean() -> None:
    d, r = 4000, 60
    spread = torch.linspace(0.1, 2.0, d, dtype=torch.float64)
    mechanism = AdaClip(clip_norm=1e4, h2=1e6, beta2=0.0, beta1=1.0, clamp="post", h1=1e-30)
    state = mechanism.init(Layout.of({"w": torch.empty(d)}))
    estimates = []
    for t in range(30):
        rows = torch.from_numpy(np.random.default_rng(t).normal(size=(r, d))) * spread
        release = one_round(mechanism, state, rows, 0.0, float(r), np.random.default_rng(0))
        estimates.append(release.state["s"] ** 2)
    ratio = torch.stack(estimates).mean(0) / spread**2
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.02)


def test_a_safe_h2_never_adds_more_noise_than_clipping_and_keeps_s_in_its_range() -> None:
    c, d, gamma = 3.0, 300, 0.5
    mechanism = AdaClip(clip_norm=c, gamma=gamma, h1=1e-8)
    state = mechanism.init(Layout.of({"w": torch.empty(d)}))
    h2 = c**2 * gamma / d
    for t in range(20):
        rows = torch.from_numpy(np.random.default_rng(t).normal(size=(10, d))) * 5
        state = one_round(mechanism, state, rows, 1.0, 10.0, np.random.default_rng(t)).state
        s = state["s"]
        assert bool((s >= 1e-4 * (1 - 1e-12)).all())
        assert bool((s <= math.sqrt(h2) * (1 + 1e-12)).all())
        b_square = (s / gamma * s.sum()).sum()
        assert 0 < float(b_square) <= c**2 * d * (1 + 1e-9)


def test_the_literal_form_is_the_papers_and_says_what_it_needs() -> None:
    literal = AdaClip(h1=1e-12, h2=1e-4, literal=True)
    assert literal.variance == "literal"
    start = literal.init(Layout.of({"w": torch.empty(3)}))["s"]
    torch.testing.assert_close(start, tensor(1e-8, 1e-8, 1e-8))
    with pytest.raises(FedsimError, match="h2"):
        AdaClip(literal=True)
    with pytest.raises(FedsimError, match="literal"):
        replace(literal, gamma=0.5)


@pytest.mark.parametrize(
    "changes",
    [{"h2": 1e-13}, {"beta1": 1.1}, {"gamma": 0.0}, {"variance": "x"}, {"clamp": "x"}],
)
def test_impossible_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FedsimError, match=next(iter(changes))):
        AdaClip(**changes)


def test_the_literal_start_is_a_trap_and_the_corrected_one_is_not() -> None:
    rows = torch.randn(20, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    clipped = {}
    for mechanism in (AdaClip(h2=1e-4, literal=True), AdaClip(clip_norm=20.0)):
        state = mechanism.init(Layout.of({"w": rows[0]}))
        for t in range(30):
            state = one_round(mechanism, state, rows, 0.1, 20.0, np.random.default_rng(t)).state
        total = releaser(mechanism, layout_of_rows(rows)).start(state)
        total.add(DenseRows(rows))
        clipped[mechanism.literal] = total.clipped
    assert clipped[True] == 20
    assert clipped[False] < 20


@pytest.mark.parametrize(
    ("d", "clamp", "grows"), [(100, "pre", False), (400, "pre", True), (400, "post", False)]
)
def test_idle_coordinates_run_away_above_the_critical_dimension_unless_clamped_after(
    d: int, clamp: str, grows: bool
) -> None:
    # kappa = .4839 sigma^2 d / gamma with sigma = .1, so the critical d is 207.
    mechanism = AdaClip(h1=1e-30, h2=1e9, clamp=clamp)
    start = torch.ones(d, dtype=torch.float64)
    state: State = {"m": torch.zeros_like(start), "s": start}
    rows = torch.zeros(1, d)
    for t in range(40):
        state = one_round(mechanism, state, rows, 0.1, 1.0, np.random.default_rng(t)).state
    assert (float(state["s"].mean()) > 1.5) == grows
    assert (float(state["s"].mean()) < 0.8) == (not grows)
