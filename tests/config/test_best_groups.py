"""Bands and groups that a config leaves to the least error at its epsilon."""

from __future__ import annotations

import math
from typing import Any

import pytest
from slow_cases import slow_but

from fedsim.config import RunConfig
from fedsim.config.plan import GROUPS, release_plan, resolve_bands
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.banded import Banded
from fedsim.runs.resolve import calibrated

AUTO: dict[str, Any] = {
    "rounds": 1000, "data.name": "digits", "partition.clients": 1000,
    "cohort.name": "cyclic", "cohort.groups": 10, "cohort.rate": 0.1,
    "mechanism.name": "clipping", "noise.name": "banded", "noise.bands": "auto",
    "noise.target-epsilon": 2.0, "noise.delta": 1e-5,
}  # fmt: skip


def config_with(**changes: Any) -> RunConfig:
    changed = {**AUTO, **{key.replace("_", "-"): value for key, value in changes.items()}}
    return RunConfig.from_run_config({k: v for k, v in changed.items() if v is not None})


def error(config: RunConfig) -> float:
    noise = release_plan(config, Clipping(1.0)).noise
    assert isinstance(noise, Banded)
    return noise.error()


@pytest.mark.slow
def test_the_groups_of_the_least_error_are_taken() -> None:
    """Errors at epsilon 2, rate .01 and 1,000 rounds as computed independently (PLD, b = 1 to 20).

    1: 21.457, 2: 18.871, 4: 17.478, 8: 17.024, 20: 17.742.
    """
    best = resolve_bands(config_with())
    assert (best.cohort.make(population=1000, rounds=1000).groups, best.noise.bands) == (8, 8)
    assert error(best) == pytest.approx(17.024, abs=2e-3)
    for groups, expected in ((1, 21.457), (2, 18.871), (4, 17.478), (20, 17.742)):
        changes = {"noise.bands": groups, "cohort.groups": groups, "cohort.rate": groups * 0.01}
        assert error(config_with(**changes)) == pytest.approx(expected, rel=3e-4)


@pytest.mark.parametrize("epsilon", slow_but(1, [0.5, 4.0, 16.0]))
def test_cohorts_stay_as_large_and_no_other_groups_are_better(epsilon: float) -> None:
    config = config_with(rounds=60, **{"noise.target-epsilon": epsilon, "cohort.rate": 0.3})
    best = resolve_bands(config)
    sampler = best.cohort.make(population=1000, rounds=60)
    assert sampler.expected_size == pytest.approx(30.0)
    for groups in GROUPS:
        if groups * 0.03 <= 1:
            other = {"cohort.groups": groups, "cohort.rate": groups * 0.03, "noise.bands": groups}
            assert error(best) <= error(best.replace(**other)) * (1 + 1e-9)


def test_what_was_chosen_stands_in_the_config_and_is_chosen_once() -> None:
    made = calibrated(config_with(rounds=40))
    written = made.to_run_config()
    assert written["noise.bands"] == written["cohort.groups"] in GROUPS
    assert math.isclose(float(written["cohort.rate"]), 0.01 * int(written["cohort.groups"]))
    assert resolve_bands(made) is made


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cohort.name": "poisson", "cohort.groups": None}, "cohort.name 'poisson'"),
        ({"noise.target-epsilon": None, "noise.multiplier": 1.0}, "target-epsilon not set"),
    ],
)
def test_without_groups_or_a_target_nothing_is_chosen(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FedsimError, match=words):
        resolve_bands(config_with(**changes))


@pytest.mark.parametrize("bands", [-1, 2.5, "all", True])
def test_bands_are_a_number_or_auto(bands: object) -> None:
    with pytest.raises(FedsimError, match=r"noise\.bands = .*at least 0, or 'auto'"):
        config_with(**{"noise.bands": bands})


def test_a_plan_in_python_needs_a_number() -> None:
    with pytest.raises(FedsimError, match="only a config"):
        Banded(1.0, bands=-1).fit(Participation(10, 5))
