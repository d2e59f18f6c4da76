from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from release_helpers import one_round, releaser, shares_of, source, sources
from scipy import special, stats

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.share_sums import add_shares
from fedsim.federation.aggregation.shares import missing_share, share_multiplier
from fedsim.mechanisms import Clipping, Mechanism, NoiseSource, Normalization
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout
from fedsim.rows.exact import grid_unit


@pytest.mark.parametrize("hardened", [False, True])
def test_draws_are_standard_normal(hardened: bool) -> None:
    draws = NoiseSource(np.random.default_rng(0), hardened).normal(50_000)
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], len(draws))
    assert low < np.sum(draws**2) < high


def test_keyed_noise_repeats_and_differs_by_round_while_system_noise_never_repeats() -> None:
    def draw(randomness: Randomness, t: int) -> np.ndarray:
        return NoiseSource(randomness.generator(Purpose.NOISE, level="client", round=t)).normal(8)

    keyed = Randomness(5)
    assert np.array_equal(draw(keyed, 1), draw(keyed, 1))
    assert not np.array_equal(draw(keyed, 1), draw(keyed, 2))
    system = Randomness(None)
    assert not np.array_equal(draw(system, 1), draw(system, 1))


def test_the_global_generators_are_neither_read_nor_moved() -> None:
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())  # noqa: NPY002
    one_round(Clipping(1.0), {}, torch.ones(2, 5), 1.0, 1.0, source(1))
    assert np.array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(before[1], torch.get_rng_state())


@pytest.mark.parametrize("asked", [1, 3, 1000])
def test_shares_and_top_up_add_up_whoever_drops_out(asked: int) -> None:
    for usable in {0, 1, asked // 2, asked}:
        shares = usable * share_multiplier(1.7, asked) ** 2
        assert shares + 1.7**2 * missing_share(asked, usable) == pytest.approx(1.7**2)
    assert missing_share(0, 0) == 1


@pytest.mark.parametrize(("asked", "usable"), [(3, 4), (0, 1), (3, -1)])
def test_more_shares_than_were_asked_for_are_refused(asked: int, usable: int) -> None:
    with pytest.raises(FedsimError, match="usable"):
        missing_share(asked, usable)


def test_the_means_noise_is_alike_on_both_placements() -> None:
    n, d, z = 8, 20_000, 1.4
    mechanism, layout = Normalization(2.0), Layout.of({"w": torch.empty(d)})
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    clean = mechanism.bound(rows).double().sum(0)
    client = releaser(mechanism, layout, z)
    total = client.start({})
    add_shares(total, shares_of(mechanism, {}, rows, z, 8.0, sources(1, n)))
    residuals = [
        one_round(mechanism, {}, rows, z, 1.0, source(2)).mean - clean,
        client.release(total, source(2), missing=1 - total.count / n).mean - clean,
    ]
    assert stats.ks_2samp(*(r.numpy() for r in residuals)).pvalue > 1e-4
    assert residuals[0].std().item() == pytest.approx(2 * z, rel=0.03)


def test_the_signal_to_noise_ratio_of_normalisation_is_das_constant() -> None:
    # Quadratic problem: d = 200 parameters, all of n = r = 100 clients, z = 21.91456.
    d, n, z = 200, 100, 21.91456
    expected_length = math.sqrt(2) * math.exp(special.gammaln((d + 1) / 2) - special.gammaln(d / 2))
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows *= torch.logspace(-6, 3, n, dtype=torch.float64)[:, None]

    def ratio(mechanism: Mechanism, c: float) -> float:
        bounded = mechanism.bound(rows).norm(dim=1).mean().item()
        return bounded / (share_multiplier(z, n) * c * expected_length)

    for c in (0.1, 1.0, 50.0):
        assert ratio(Normalization(c), c) == pytest.approx(0.032307, abs=5e-7)
        assert ratio(Clipping(c), c) <= ratio(Normalization(c), c)
    shares = shares_of(Normalization(1.0), {}, torch.zeros(n, d), z, 100.0, sources(4, n))
    measured = shares.units.norm(dim=1).mean().item() * grid_unit(1.0)
    assert 1 / measured == pytest.approx(0.032307, rel=0.02)
