"""Each blind spot by the one test that looks at it: fast versions of `test_planted`."""

from __future__ import annotations

import numpy as np
import pytest
from bugs import BUGS
from leaks import OF_BUDGETS
from planted import strategies

from fedsim.audit import ALONE, OPPOSED, Target, audit
from fedsim.audit.checks import Check
from fedsim.audit.config_audit import run_budget_check
from fedsim.audit.conformance import (
    failures_check,
    resume_check,
    several_check,
    system_checks,
)
from fedsim.audit.neighbouring_runs import Faults
from fedsim.audit.noise_checks import covariance_check, grid_checks, noise_checks
from fedsim.audit.noise_scale import MeasuredNoise, in_units
from fedsim.audit.observation import observe, parameters
from fedsim.audit.side_channels import NoiseOnly, side_channel_checks
from fedsim.audit.verdict import silenced_logs
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

POPULATION = 60
COHORT = PoissonCohort(0.5, POPULATION)
START = parameters(64)
RISK = 1e-5


def target_of(mechanism: Mechanism, rounds: int) -> Target:
    return Target(strategies(mechanism, COHORT, z=2.0), rounds, START)


def noise_tests(mechanism: Mechanism, rounds: int = 40) -> list[Check]:
    """The tests of noise, on one run of clients that send zeros."""
    found: list[Check] = []
    for d in (512, 8):
        target = target_of(mechanism, rounds).with_model(parameters(d))
        nobody, layers = target.silent_clients(), list(target.layers.values())
        seen = [observe(target, nobody, 3 + k) for k in range(1 if d > 8 else 4)]
        both = [in_units(run, target) for run in seen]
        units, steps = (np.stack(parts) for parts in zip(*both, strict=True))
        if d == 8:
            found.append(covariance_check(units.reshape(-1, d), layers))
        else:
            found += noise_checks(units / units.std(), layers)
            found += grid_checks(steps, layers)
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


def bounds_of(rounds: int = 60) -> list[Check]:
    """The tests of several clients at once."""
    target = target_of(Normalization(1.0), rounds)
    nobody = observe(target, target.silent_clients(), 3)
    noise = MeasuredNoise.of(in_units(nobody, target)[0], list(target.layers.values()))
    return [several_check(target, 3, nobody, noise), failures_check(target, 3)]


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
    target = target_of(AdaClip(), 3)
    check = failures_check(target, 3)
    assert check.p_value == 1
    assert "in 3 ways" in check.looked_at


def test_rows_that_count_twice_only_in_messages_are_detected() -> None:
    target = target_of(Normalization(1.0), 1)
    found = []
    for name in (None, "rows that come as messages count twice"):
        faults = Faults(target, 3)
        if name is None:
            faults.malformed_replies()
        else:
            with BUGS[name]():
                faults.malformed_replies()
        found.append(failed(faults.checks("")))
    assert found == [set(), {"messages"}]


def leaving(mechanism: Mechanism) -> set[str]:
    """The tests of what leaves a round beside the parameters."""
    return failed(side_channel_checks(NoiseOnly.of(target_of(mechanism, 3), 3)))


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
        ("noise from 256 seeds of the system", {"noise with system entropy"}),
        ("cohorts from 256 seeds of the system", {"cohorts with system entropy"}),
    ],
)
@pytest.mark.usefixtures("few_system_rounds")
def test_few_seeds_of_the_system_are_detected(name: str | None, detected_by: set[str]) -> None:
    target = Target(strategies(Normalization(1.0), PoissonCohort(0.2, 200), z=2.0), 100)
    if name is None:
        assert not failed(system_checks(target, deep=False))
        return
    with BUGS[name]():
        assert failed(system_checks(target, deep=False)) == detected_by


@pytest.mark.slow
def test_noise_of_few_seeds_of_a_config_is_detected_among_the_attacks_runs() -> None:
    def found() -> bool:
        factory = strategies(Normalization(1.0), PoissonCohort(0.5, 10), z=2.0)
        verdict = audit(
            factory,
            rounds=2,
            runs=300,
            worlds=(ALONE, OPPOSED),
            canaries=0,
            full=Target(factory, 2),
        )
        return "noise: noise of different seeds" in verdict.refuting

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
    with silenced_logs():
        if name is None:
            assert run_budget_check(CONFIG, 4.0, 1e-5, 1).p_value == 1
            return
        with BUGS[name]():
            assert run_budget_check(CONFIG, 4.0, 1e-5, 1).p_value == 0


def test_noise_that_a_resumed_run_draws_again_is_detected() -> None:
    target = target_of(Normalization(1.0), 6)
    whole = observe(target, target.silent_clients(), 3)
    assert resume_check(target, 3, whole).p_value == 1
    with BUGS["a resumed run draws the noise of its first rounds again"]():
        assert resume_check(target, 3, whole).p_value == 0


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
