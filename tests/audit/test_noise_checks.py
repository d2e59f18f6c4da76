from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from whitebox.catalogue import NOISE

from fedsim.audit.findings import Finding, findings
from fedsim.audit.noise_checks import NoiseSample

Floats = npt.NDArray[np.float64]
LAYERS = (slice(0, 1500), slice(1500, 1900), slice(1900, 2048))
RISK = 1e-4


def white(seed: int = 0, rounds: int = 60, d: int = 2048) -> Floats:
    return np.random.default_rng(seed).standard_normal((2, rounds, d))


def noise_checks(z: Floats, layers: Sequence[slice], sizes: Floats | None = None) -> list[Finding]:
    noise = NoiseSample.from_noise(z, layers, sizes)
    return findings([(lambda: noise, NOISE)])


def refuted(z: Floats, sizes: Floats | None = None) -> set[str]:
    return {check.name for check in noise_checks(z, LAYERS, sizes) if check.p_value <= RISK}


def test_white_noise_raises_no_alarm() -> None:
    sizes = np.random.default_rng(1).binomial(400, 0.2, (2, 60)).astype(float)
    assert not any(refuted(white(seed), sizes) for seed in range(8))


def test_p_values_of_white_noise_are_not_too_small_too_often() -> None:
    layers = (slice(0, 200), slice(200, 256))
    p_values = np.array(
        [
            [check.p_value for check in noise_checks(white(seed, 20, 256), layers)]
            for seed in range(100)
        ]
    )
    # Of 100 runs 2 are 2 %, and 10 are one in ten thousand.
    assert ((p_values <= 0.02).sum(0) <= 10).all()


@pytest.mark.parametrize("d", [2, 8, 24])
def test_pairs_of_rounds_of_few_coordinates_raise_no_alarm(d: int) -> None:
    samples = [np.random.default_rng(seed).standard_normal((4, 100, d)) for seed in range(20)]
    of_pairs = [
        check
        for z in samples
        for check in noise_checks(z, [slice(0, d)])
        if check.name.startswith("pairs of rounds")
    ]
    assert min(check.p_value for check in of_pairs) > RISK


def autoregressive(z: Floats) -> Floats:
    out = z.copy()
    for t in range(1, z.shape[1]):
        out[:, t] = 0.05 * out[:, t - 1] + (1 - 0.05**2) ** 0.5 * z[:, t]
    return out


def one_round_again(z: Floats) -> Floats:
    z[:, 50] = z[:, 20]
    return z


def one_round_negated(z: Floats) -> Floats:
    z[:, 50] = -z[:, 20]
    return z


def one_round_smaller(z: Floats) -> Floats:
    z[0, 50] *= 0.9
    return z


def one_coordinate_without(z: Floats) -> Floats:
    z[:, :, 7] = 0
    return z


def one_layer_smaller(z: Floats) -> Floats:
    z[:, :, LAYERS[2]] *= 0.95
    return z


def layers_alike(z: Floats) -> Floats:
    z[:, :, LAYERS[2]] = z[:, :, :148]
    return z


def streams_that_overlap(z: Floats) -> Floats:
    out = z.copy()
    for t in range(1, z.shape[1]):
        out[:, t, :-1] = out[:, t - 1, 1:]
    return out


def common_to_a_round(z: Floats) -> Floats:
    shared = np.random.default_rng(9).standard_normal((2, z.shape[1], 1))
    return np.asarray(0.98**0.5 * z + 0.02**0.5 * shared)


def cancelling(z: Floats) -> Floats:
    out = z.copy()
    out[:, 1:] -= 0.1 * z[:, :-1]
    return out / 1.01**0.5


def laplace(z: Floats) -> Floats:
    return np.random.default_rng(2).laplace(size=z.shape) / 2**0.5


def truncated(z: Floats) -> Floats:
    return np.where(np.abs(z) > 3, np.roll(z, 1), z)


def seeds_alike(z: Floats) -> Floats:
    z[1] = z[0]
    return z


@pytest.mark.parametrize(
    ("bug", "seen_by"),
    [
        (autoregressive, "shifts in rounds and coordinates"),
        (one_round_again, "exact repeats"),
        (one_round_again, "pairs of rounds"),
        (one_round_negated, "exact repeats"),
        (one_round_negated, "pairs of rounds, without signs"),
        (one_round_smaller, "size in each round"),
        (one_coordinate_without, "size in each coordinate"),
        (one_layer_smaller, "size in each layer"),
        (layers_alike, "exact repeats"),
        (layers_alike, "shifts in rounds and coordinates"),
        (streams_that_overlap, "shifts in rounds and coordinates"),
        (common_to_a_round, "mean"),
        (cancelling, "accumulated over rounds"),
        (laplace, "shape of the distribution"),
        (truncated, "extreme values"),
        (seeds_alike, "pairs of rounds"),
    ],
)
def test_noise_that_is_not_white_is_seen(bug: Callable[[Floats], Floats], seen_by: str) -> None:
    assert seen_by in refuted(bug(white(3)))


def test_noise_that_follows_the_size_of_the_cohort_is_seen() -> None:
    sizes = np.random.default_rng(1).binomial(400, 0.2, (2, 60)).astype(float)
    z = white(4) * np.sqrt(sizes / 80)[:, :, None]
    assert "size against the cohort's" in refuted(z, sizes)


def test_one_round_and_few_coordinates_are_enough_to_run() -> None:
    checks = noise_checks(white(5, 1, 8)[:1], (slice(0, 4), slice(4, 8)))
    assert all(check.p_value > RISK for check in checks)
