"""Robust means against numpy, scipy and a plain loop, alone and in a strategy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data, make_mlp
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

import fedsim
from fedsim.clients import SGD
from fedsim.cohorts import FullCohort
from fedsim.config import RunConfig
from fedsim.engines import LocalGrid, array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import PerLayer, PrivateScalar
from fedsim.randomness import Randomness
from fedsim.strategies import DPFedAvg, Krum, Median, TrimmedMean
from fedsim.training import ExamplePrivacy, Trainer

ROBUST = [Median(), TrimmedMean(0.2), Krum(1), Krum(1, keep=3)]


def rows_of(n: int, d: int = 7, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def krum(rows: np.ndarray, f: int, keep: int) -> np.ndarray:
    """Blanchard et al. 2017 by loops."""
    scores = []
    for i in range(len(rows)):
        distances = sorted(
            float(((rows[i] - rows[j]) ** 2).sum()) for j in range(len(rows)) if j != i
        )
        scores.append(sum(distances[: len(rows) - f - 2]))
    return rows[np.argsort(scores, kind="stable")[:keep]].mean(0)


@given(n=st.integers(1, 12), seed=st.integers(0, 100), percent=st.integers(0, 49))
def test_median_and_trimmed_mean_are_numpys_and_scipys(n: int, seed: int, percent: int) -> None:
    rows, trim = rows_of(n, seed=seed), percent / 100
    exact = rows.double().numpy()
    np.testing.assert_allclose(Median().center(rows), np.median(exact, axis=0), atol=1e-12)
    np.testing.assert_allclose(
        TrimmedMean(trim).center(rows), trim_mean(exact, trim, axis=0), atol=1e-12
    )


def test_as_many_rows_are_trimmed_as_the_share_says() -> None:
    rows = torch.zeros(100, 1, dtype=torch.float64)
    rows[:29] = 1e6
    assert TrimmedMean(0.29).center(rows) == 0
    assert TrimmedMean(0.5 - 1e-12).center(rows[:30]) == 1e6


@pytest.mark.parametrize(("n", "f", "keep"), [(3, 0, 1), (5, 1, 1), (9, 2, 1), (9, 2, 4)])
def test_krum_is_the_loop_of_its_paper(n: int, f: int, keep: int) -> None:
    for seed in range(5):
        rows = rows_of(n, seed=seed, dtype=torch.float64)
        np.testing.assert_allclose(
            Krum(f, keep).center(rows), krum(rows.numpy(), f, keep), rtol=1e-12
        )


@pytest.mark.parametrize("chunk", [1, 40, 2**22])
def test_krum_of_rows_far_from_zero_loses_no_small_distance(chunk: int, monkeypatch) -> None:
    """Distances of 1e-3 at 1e4: norms and products in float64 would leave four digits of them."""
    monkeypatch.setattr("fedsim.federation.aggregation.robust.CHUNK", chunk)
    base = torch.full((8, 50), 1e4, dtype=torch.float64) + 1e-5 * rows_of(
        8, 50, dtype=torch.float64
    )
    np.testing.assert_array_equal(Krum(2, keep=3).center(base), krum(base.numpy(), 2, 3))
    equal = base.clone()
    equal[[1, 4, 6]] = equal[4].clone()
    # Three at distance 0 from each other; of equals the first counts.
    assert torch.equal(Krum(3).center(equal), equal[1])


def test_krum_of_one_row_is_that_row() -> None:
    rows = rows_of(1)
    assert torch.equal(Krum(1).center(rows), rows[0].double())


def test_columns_are_sorted_a_few_at_a_time(monkeypatch) -> None:
    rows = rows_of(5, d=11)
    expected = Median().center(rows), TrimmedMean(0.2).center(rows)
    monkeypatch.setattr("fedsim.federation.aggregation.robust.CHUNK", 10)
    assert torch.equal(Median().center(rows), expected[0])
    assert torch.equal(TrimmedMean(0.2).center(rows), expected[1])


@pytest.mark.parametrize("mechanism", ROBUST, ids=str)
def test_one_client_of_any_row_moves_a_robust_mean_no_further_than_the_others_lie(
    mechanism,
) -> None:
    rows = rows_of(7)
    for wild in (1e6, -1e6):
        rows[3] = wild
        assert mechanism.center(rows).abs().max() < 4


def train(mechanism, spoil=None, block_size=0):
    data = make_data([5, 6, 4, 7, 5, 6])
    if spoil is not None:
        data.x[data.indices[2]] = spoil
    trainer = Trainer(
        make_mlp(), SGD(lr=0.2), data, batch_size=3, randomness=Randomness(1), path="plain",
        block_size=block_size,
    )  # fmt: skip
    strategy = DPFedAvg(mechanism=mechanism, cohort=FullCohort(6), seed=1, fraction_evaluate=0.0)
    initial = array_record(trainer.layout.unflatten(trainer.initial()))
    result = strategy.start(LocalGrid(trainer), initial, num_rounds=1)
    rows = joined(trainer.train(trainer.initial(), np.arange(6), 1))[0]
    return trainer.layout.flatten(tensors(result.arrays)) - trainer.initial(), rows, strategy


@pytest.mark.parametrize("mechanism", ROBUST, ids=str)
def test_a_strategy_steps_along_the_robust_mean_of_usable_rows(mechanism) -> None:
    update, rows, _ = train(mechanism)
    torch.testing.assert_close(update, mechanism.center(rows).float(), rtol=0, atol=1e-6)
    again, _, _ = train(mechanism, block_size=2)
    assert torch.equal(again, update)


@pytest.mark.parametrize("mechanism", ROBUST, ids=str)
def test_a_client_of_nan_is_no_row_of_a_robust_mean(mechanism) -> None:
    update, rows, strategy = train(mechanism, spoil=torch.nan)
    assert strategy.report.reasons["non-finite"] == 1
    sound = rows[torch.isfinite(rows).all(1)]
    assert len(sound) == 5
    torch.testing.assert_close(update, mechanism.center(sound).float(), rtol=0, atol=1e-6)


def test_noise_on_a_robust_mean_is_refused_with_the_reason() -> None:
    with pytest.raises(FedsimError, match=r"moves a robust mean depends on all other updates"):
        DPFedAvg(mechanism=Median(), cohort=FullCohort(5), noise_multiplier=1.0)
    with pytest.raises(FedsimError, match=r"noise\.multiplier is 1\.0; it must be unset with Krum"):
        RunConfig.parse({"mechanism": {"name": "krum"}, "noise": {"multiplier": 1.0}})
    with pytest.raises(FedsimError, match=r"noise\.target-epsilon is 3\.0; it must be unset with"):
        RunConfig.parse({"mechanism": {"name": "median"}, "noise": {"target-epsilon": 3.0}})
    with pytest.raises(FedsimError, match=r"client\.mechanism is given Median\(\)"):
        RunConfig.parse({"client": {"mechanism": {"name": "median"}, "noise": {"multiplier": 1.0}}})
    assert not RunConfig.parse({"mechanism": {"name": "trimmed-mean", "trim": 0.2}}).private


@pytest.mark.parametrize(
    "wrap", [PerLayer, lambda mechanism: PrivateScalar(mechanism, "loss", 1.0)]
)
def test_a_robust_mean_is_part_of_nothing_else(wrap) -> None:
    with pytest.raises(FedsimError, match=r"mechanism\.per-layer and mechanism\.private-scalar"):
        train(wrap(Median()))


def test_a_robust_mean_of_clients_is_none_of_a_clients_examples() -> None:
    with pytest.raises(FedsimError, match=r"client\.mechanism\.name another"):
        ExamplePrivacy(Median(), noise_multiplier=0.0)


def test_krum_keeps_no_byzantine_row_if_clients_fail() -> None:
    # 7 of 10 rows are left, 3 of them arbitrary.
    few = rows_of(7, 3)
    few[:3] = torch.tensor([[1e6], [-1e7], [1e8]])
    assert Krum(3, keep=7).center(few).abs().max() < 4


def test_krum_wants_a_cohort_that_it_can_protect() -> None:
    with pytest.raises(FedsimError, match="byzantine plus keep, must both be at most"):
        DPFedAvg(mechanism=Krum(2, keep=9), cohort=FullCohort(10))
    with pytest.raises(FedsimError, match=r"mechanism\.byzantine is 2 and mechanism\.keep 1"):
        DPFedAvg(mechanism=Krum(2), cohort=FullCohort(6))


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "none"])
def test_a_round_that_draws_nobody_changes_nothing_but_goes_by(name: str, tmp_path) -> None:
    config = RunConfig.parse(
        {
            "seed": 3,
            "rounds": 6,
            "data": {"name": "digits"},
            "partition": {"clients": 7},
            "model": {"name": "softmax"},
            "cohort": {"name": "poisson", "rate": 0.1},
            "mechanism": {"name": name},
        }
    )
    rows = fedsim.run(config, out=tmp_path / "run").metrics
    empty = [row for row in rows if row.get("asked") == 0]
    assert len(rows) == 7
    assert empty
    assert all(row["update-norm"] == 0 for row in empty)
