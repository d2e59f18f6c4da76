"""Noise that is drawn while workers train."""

from __future__ import annotations

import numpy as np
import pytest

from fedsim.mechanisms import NoiseSource
from fedsim.mechanisms.releaser import prefetched


@pytest.mark.parametrize("hardened", [False, True])
def test_draws_made_ahead_in_a_thread_are_those_made_when_asked_for(hardened: bool) -> None:
    sizes = [7, 100_000, 1]
    here, ahead = (NoiseSource(np.random.default_rng(3), hardened) for _ in range(2))
    made = prefetched(ahead, sizes)
    for size in sizes:
        assert np.array_equal(made.normal(size), here.normal(size))
