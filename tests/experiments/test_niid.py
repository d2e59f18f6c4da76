"""NIID-Bench: Welch's interval, and clients of two classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from experiments.niid.federations import TwoClasses
from experiments.niid.niid import welch


def test_welchs_interval_is_that_of_the_test_without_equal_variances() -> None:
    ours, published = [88.1, 87.2, 88.9, 87.7], [88.5, 88.0, 89.4]
    mean, deviation = np.mean(published), np.std(published, ddof=1)
    expected = stats.ttest_ind(ours, published, equal_var=False).confidence_interval(0.95)
    assert welch(ours, mean, deviation, 3) == pytest.approx((expected.low, expected.high))
    assert welch([88.0], 88.0, 0.1, 3) == (-math.inf, math.inf)


@pytest.mark.parametrize("seed", range(5))
def test_each_client_has_its_class_and_one_other_and_nothing_is_left_over(seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 10, 5003)
    dealt = TwoClasses(10, seed=seed).indices(labels)
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(5003))
    for client, positions in enumerate(dealt):
        classes = np.unique(labels[positions])
        assert len(classes) == 2
        assert client in classes
