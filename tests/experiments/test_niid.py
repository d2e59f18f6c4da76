"""NIID-Bench: Welch's interval, and clients of two classes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.framework.run import find, load
from experiments.niid.federations import FEWEST, CappedDirichlet, TwoClasses
from experiments.niid.niid import welch


def test_welchs_interval_is_that_of_the_test_without_equal_variances() -> None:
    ours, published = [88.1, 87.2, 88.9, 87.7], [88.5, 88.0, 89.4]
    mean, deviation = np.mean(published), np.std(published, ddof=1)
    expected = stats.ttest_ind(ours, published, equal_var=False).confidence_interval(0.95)
    assert welch(ours, mean, deviation, 3) == pytest.approx((expected.low, expected.high))
    assert welch([88.0], 88.0, 0.1, 3) == (-math.inf, math.inf)
    together = stats.ttest_ind(ours, published, equal_var=False).confidence_interval(1 - 0.05 / 4)
    assert welch(ours, mean, deviation, 3, of=4) == pytest.approx((together.low, together.high))


@pytest.mark.parametrize("seed", range(5))
def test_each_client_has_its_class_and_one_other_and_nothing_is_left_over(seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 10, 5003)
    dealt = TwoClasses(10, seed=seed).indices(labels)
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(5003))
    for client, positions in enumerate(dealt):
        classes = np.unique(labels[positions])
        assert len(classes) == 2
        assert client in classes


@pytest.mark.parametrize(
    ("best", "verdict", "text"),
    [
        ([98.9, 98.8, 98.95], True, "-0.01 ["),
        ([97.9, 97.8, 97.95], False, "-1.01 ["),
        ([97.9, 97.8], None, "1 seed missing"),
        ([], None, "not run"),
    ],
)
def test_cell_is_judged_by_its_best_rounds_once_all_its_seeds_are_run(
    best: list[float], verdict: bool | None, text: str
) -> None:
    experiment = load(find("niid-mnist"), data=Path())
    results = {
        f"FedAvg seed={seed}": {"rounds": [0, 1, 2], "accuracy": [0.1, value / 100, 0.5]}
        for seed, value in enumerate(best, 1)
    }
    claim = experiment.report(results).claims[0]
    assert (claim.name, claim.reproduced) == ("FedAvg", verdict)
    assert text in claim.measured


@pytest.mark.parametrize("seed", range(5))
def test_capped_split_deals_every_example_once_and_fills_no_client_twice(seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 10, 5003)
    dealt = CappedDirichlet(clients=10, seed=seed).indices(labels)
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(5003))
    assert min(map(len, dealt)) >= FEWEST
    for positions in dealt:
        counts = np.bincount(labels[positions], minlength=10)
        full = np.cumsum(counts) >= 5003 / 10
        # Once a client has its share of all examples it gets none of the later classes.
        if full.any():
            assert counts[np.argmax(full) + 1 :].sum() == 0
