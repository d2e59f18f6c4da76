"""Each blind spot by the one test that looks at it: fast versions of `test_planted`."""

from __future__ import annotations

import numpy as np
import pytest
from bugs import BUGS
from leaks import OF_BUDGETS
from planted import strategies

from fedsim.audit import ALONE, OPPOSED, Plan, audit, conformance
from fedsim.audit.checks import Check
from fedsim.audit.conformance import _failures, _resumed, _several, _system
from fedsim.audit.from_config import _budget
from fedsim.audit.low_bits import grid_checks
from fedsim.audit.neighbouring_runs import Faults
from fedsim.audit.noise_checks import covariance_check, noise_checks
from fedsim.audit.noise_scale import MeasuredNoise, in_units
from fedsim.audit.observe import columns, observe, parameters
from fedsim.audit.side_channels import NoiseOnly, side_channel_checks
from fedsim.audit.verdict import quiet
from fedsim.audit.worlds import still
from fedsim.cohorts import PoissonCohort
from fedsim.config import RunConfig
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    Mechanism,
    Normalization,
    PrivateScalar,
    QuantileClipping,
)
from fedsim.rows import Layout

POPULATION = 60
COHORT = PoissonCohort(0.5, POPULATION)
START = parameters(64)
RISK = 1e-5


def plan_of(mechanism: Mechanism, rounds: int) -> Plan:
    return Plan(strategies(mechanism, COHORT, z=2.0), rounds)


def noise_tests(mechanism: Mechanism, rounds: int = 40) -> list[Check]:
    """The tests of noise, on one run of clients that send zeros."""
    plan = plan_of(mechanism, rounds)
    strategy, found = plan.strategy(3), []
    for d in (512, 8):
        start = parameters(d)
        nobody = still(POPULATION, d, strategy.mechanism.side_names)
        denominator = strategy.cohort.expected_size
        seen = [observe(plan, nobody, start, 3 + k) for k in range(1 if d > 8 else 4)]
        both = [in_units(run, strategy.mechanism, Layout.of(start), denominator) for run in seen]
        units, steps = (np.stack(parts) for parts in zip(*both, strict=True))
        if d == 8:
            found.append(covariance_check(units.reshape(-1, d), columns(start)))
        else:
            found += noise_checks(units / units.std(), columns(start))
            found += grid_checks(steps, columns(start))
    return found


def failed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.refutes(RISK)}


@pytest.mark.parametrize(
    "mechanism", [Normalization(1.0), AdaptiveNoise(clip_norm=1.0)], ids=["normalization", "xu"]
)
def test_honest_noise_passes_down_to_its_last_bit(mechanism: Mechanism) -> None:
    checks = noise_tests(mechanism)
    assert not failed(checks)
    assert {"low bits", "equal values", "rounding to the grid"} <= {c.name for c in checks}


@pytest.mark.parametrize(
    ("name", "detected_by"),
    [
        ("noise of twelve bits a standard deviation", "equal values"),
        ("the exact sum in the twelve lowest bits", "low bits"),
        ("the exact sum in the twelve lowest bits, masked alike in every run",
         "low bits in pairs of rounds"),
        ("noise that is not rounded to the grid", "rounding to the grid"),
        ("no noise along the sum of all coordinates", "size in each direction"),
        ("no noise along alternating signs", "size in each direction"),
        ("no noise along a secret direction", "size in any direction"),
        ("half of the noise is the other half's, in another order", "pairs of coordinates"),
        ("one value of noise in a thousand left out", "equal values"),
    ],
)  # fmt: skip
def test_noise_that_shows_the_sum_is_detected(name: str, detected_by: str) -> None:
    with BUGS[name]():
        assert detected_by in failed(noise_tests(Normalization(1.0)))


def bounds_of(rounds: int = 20) -> list[Check]:
    """The tests of several clients at once."""
    plan = plan_of(Normalization(1.0), rounds)
    strategy, layout = plan.strategy(3), Layout.of(START)
    nobody = observe(plan, still(POPULATION, layout.d, ()), START, 3)
    units = in_units(nobody, strategy.mechanism, layout, strategy.cohort.expected_size)[0]
    noise = MeasuredNoise.of(
        units[None], [slice(0, 64)], strategy.mechanism, layout, strategy.cohort.expected_size
    )
    return _several(plan, strategy, START, 3, nobody, noise)


def test_honest_bounds_pass_with_several_clients_at_once() -> None:
    assert not failed(bounds_of())


@pytest.mark.parametrize(
    ("name", "detected_by"),
    [
        ("rows of 1.5 to 2 C are not bounded", "what several clients add"),
        ("of two to five long rows one is not bounded", "what several clients add"),
        ("rows in float32 are not bounded", "what several clients add"),
        ("a denominator that shrinks when three clients fail", "several fail at once"),
    ],
)
def test_bounds_that_fail_for_some_lengths_or_numbers_are_detected(
    name: str, detected_by: str
) -> None:
    with BUGS[name]():
        assert detected_by in failed(bounds_of())


def test_failures_of_bounds_that_adapt_are_compared_with_each_other() -> None:
    plan = plan_of(AdaClip(), 3)
    check = _failures(plan, plan.strategy(3), 3)
    assert check.p_value == 1
    assert "in 3 ways" in check.looked_at


def test_rows_that_count_twice_only_in_messages_are_detected() -> None:
    plan = plan_of(Normalization(1.0), 1)
    found = []
    for name in (None, "rows that come as messages count twice"):
        faults = Faults()
        if name is None:
            faults.malformed(plan, START, plan.strategy(3), 3)
        else:
            with BUGS[name]():
                faults.malformed(plan, START, plan.strategy(3), 3)
        found.append(failed(faults.checks("")))
    assert found == [set(), {"messages"}]


def leaving(mechanism: Mechanism) -> set[str]:
    """The tests of what leaves a round beside the parameters."""
    plan = plan_of(mechanism, 3)
    strategy = plan.strategy(3)
    channels = NoiseOnly.of(plan, strategy, START, 3)
    return failed(side_channel_checks(plan, strategy, channels, 0.5))


@pytest.mark.parametrize(
    "mechanism",
    [
        Clipping(1.0),
        QuantileClipping(bit_noise=0.5),
        AdaClip(),
        PrivateScalar(Clipping(1.0), name="loss", high=4.0, fraction=0.3),
    ],
    ids=["clipping", "quantile", "adaclip", "scalar"],
)
def test_what_follows_from_releases_may_leave_a_round(mechanism: Mechanism) -> None:
    assert not leaving(mechanism)


@pytest.mark.parametrize(
    "name",
    [
        "a metric of training is the exact sum's norm",
        "the update's norm is the exact sum's",
        "the count of clipped rows is shown",
        "the exact sum stays in the mechanism's state",
        "the noise stays in the optimiser's state",
        "clients are sent the exact sum's norm",
    ],
)
def test_what_else_leaves_a_round_is_detected(name: str) -> None:
    with BUGS[name]():
        assert "what else leaves a round" in leaving(Normalization(1.0))


@pytest.mark.parametrize(
    ("name", "detected_by"),
    [
        (None, set()),
        ("noise from 256 seeds of the system", {"noise of the system's"}),
        ("cohorts from 256 seeds of the system", {"samples of the system's"}),
    ],
)
def test_few_seeds_of_the_system_are_detected(
    name: str | None, detected_by: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "SYSTEM_ROUNDS", 100)
    plan = Plan(strategies(Normalization(1.0), PoissonCohort(0.2, 200), z=2.0), 100)
    if name is None:
        assert not failed(_system(plan, plan.strategy(3), deep=False))
        return
    with BUGS[name]():
        assert failed(_system(plan, plan.strategy(3), deep=False)) == detected_by


@pytest.mark.slow
def test_noise_of_few_seeds_of_a_config_is_detected_among_the_attacks_runs() -> None:
    def found() -> bool:
        factory = strategies(Normalization(1.0), PoissonCohort(0.5, 10), z=2.0)
        verdict = audit(
            factory, rounds=2, runs=300, worlds=(ALONE, OPPOSED), canaries=0, full=Plan(factory, 2)
        )
        return "noise: noise of many seeds" in verdict.refuting

    with BUGS["noise from 65,536 seeds of the config"]():
        assert found()
    assert not found()


CONFIG = RunConfig.parse(
    {
        "rounds": 20,
        "partition": {"clients": 40},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 4.0},
    }
)


@pytest.mark.parametrize("name", [None, *sorted(OF_BUDGETS)])
def test_a_budget_that_lets_a_round_through_is_detected(name: str | None) -> None:
    with quiet():
        if name is None:
            assert _budget(CONFIG, 4.0, 1e-5, 1).p_value == 1
            return
        with BUGS[name]():
            assert _budget(CONFIG, 4.0, 1e-5, 1).p_value == 0


def test_noise_that_a_resumed_run_draws_again_is_detected() -> None:
    plan = plan_of(Normalization(1.0), 6)
    strategy = plan.strategy(3)
    whole = observe(plan, still(POPULATION, 64, ()), START, 3)
    assert _resumed(plan, strategy, START, 3, whole).p_value == 1
    with BUGS["a resumed run draws the noise of its first rounds again"]():
        assert _resumed(plan, strategy, START, 3, whole).p_value == 0


def test_a_limit_is_the_value_beyond_which_a_test_detects() -> None:
    checks = noise_tests(Normalization(1.0), 20)
    for check in checks:
        if 0 < check.p_value < 1:
            value = float(next(w for w in check.measured.split() if _is_number(w)))
            for risk, inside in (
                (check.p_value * 0.99, True),
                (min(check.p_value * 1.01, 1), False),
            ):
                words = [float(w) for w in check.limit(risk).split() if _is_number(w)]
                high = words[-1]
                low = words[0] if len(words) == 2 else -np.inf
                slack = 1e-3 * (abs(value) + 1e-3)
                within = low - slack <= value <= high + slack
                beyond = not low + slack < value < high - slack
                assert within if inside else beyond, (check, check.limit(risk))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
