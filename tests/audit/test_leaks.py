"""Each blind spot by the one test that looks at it: fast versions of `test_planted`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from bugs import BUGS
from leaks import OF_BUDGETS
from planted import strategies
from slow_cases import slow_but
from whitebox import evidence
from whitebox.clients import ALONE, OPPOSED
from whitebox.config_evidence import ConfigEvidence, own_addresses
from whitebox.evidence import ClientEvidence
from whitebox.local_training import ExampleEvidence, TrainerTarget
from whitebox.neighbouring_runs import ClientNeighbours
from whitebox.plan_checks import (
    NoiseOnly,
    equal_sum_runs,
    nothing_but_sums,
    what_leaves,
)
from whitebox.strategy_audit import audit
from whitebox.target import StrategyTarget, parameters

from fedsim.audit import Finding
from fedsim.audit.findings import findings
from fedsim.audit.verdict import silenced_logs
from fedsim.cohorts import FixedCohort, PoissonCohort
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
from fedsim.mechanisms.releaser import Releaser
from fedsim.privacy.local_work import LocalWork
from fedsim.runs.resolve import resolve
from fedsim.training import ExamplePrivacy

POPULATION = 60
COHORT = PoissonCohort(0.5, POPULATION)
START = parameters(64)
RISK = 1e-5


def target_of(mechanism: Mechanism, rounds: int) -> StrategyTarget:
    return StrategyTarget(strategies(mechanism, COHORT, z=2.0), rounds=rounds, start=START)


NOISE = {
    "equal values",
    "low bits",
    "low bits in pairs of rounds",
    "pairs of coordinates",
    "rounding to the grid",
    "size in any direction",
    "size in each direction",
}


def noise_tests(mechanism: Mechanism, rounds: int = 40) -> list[Finding]:
    """The tests of noise, on runs of clients that send zeros."""
    target = target_of(mechanism, rounds).with_model(parameters(512))
    return findings(ClientEvidence(target, 3).checks(), *NOISE)


def failed(checks: list[Finding]) -> set[str]:
    return {check.name for check in checks if check.refutes(RISK)}


@pytest.mark.parametrize(
    "mechanism",
    slow_but(1, [Normalization(1.0), AdaptiveNoise(clip_norm=1.0)]),
    ids=["normalization", "xu"],
)
def test_honest_noise_passes_down_to_its_last_bit(mechanism: Mechanism) -> None:
    checks = noise_tests(mechanism)
    assert not failed(checks)
    assert {"low bits", "equal values", "rounding to the grid"} <= {c.name for c in checks}


@pytest.mark.parametrize(
    ("name", "detected_by"),
    slow_but(2, [
        ("the exact sum in the twelve lowest bits", "low bits"),
        ("noise that is not rounded to the grid", "rounding to the grid"),
        ("no noise along a secret direction", "size in any direction"),
        ("noise of twelve bits a standard deviation", "equal values"),
        ("the exact sum in the twelve lowest bits, masked alike in every run",
         "low bits in pairs of rounds"),
        ("no noise along the sum of all coordinates", "size in each direction"),
        ("no noise along alternating signs", "size in each direction"),
        ("half of the noise is the other half's, in another order", "pairs of coordinates"),
        ("one value of noise in a thousand left out", "equal values"),
    ]),
)  # fmt: skip
def test_noise_that_shows_the_sum_is_detected(name: str, detected_by: str) -> None:
    with BUGS[name]():
        assert detected_by in failed(noise_tests(Normalization(1.0)))


def bounds_of(rounds: int = 60) -> list[Finding]:
    """The tests of several clients at once."""
    runs = ClientEvidence(target_of(Normalization(1.0), rounds), 3)
    return findings(runs.checks(), "what several clients add", "several fail at once")


def test_honest_bounds_pass_with_several_clients_at_once() -> None:
    assert not failed(bounds_of())


@pytest.mark.parametrize(
    ("name", "detected_by"),
    slow_but(
        1,
        [
            ("of two to five long rows one is not bounded", "what several clients add"),
            ("rows of 1.5 to 2 C are not bounded", "what several clients add"),
            ("rows in float32 are not bounded", "what several clients add"),
            ("a denominator that shrinks when three clients fail", "several fail at once"),
        ],
    ),
)
def test_bounds_that_fail_for_some_lengths_or_numbers_are_detected(
    name: str, detected_by: str
) -> None:
    with BUGS[name]():
        assert detected_by in failed(bounds_of())


def test_short_rows_that_are_bounded_by_more_than_c_are_detected() -> None:
    target = target_of(Normalization(1.0), 1).with_model(parameters(512))
    runs = ClientEvidence(target, 3)
    with BUGS["rows below .01 C are bounded by 2 C"]():
        assert failed(findings(runs.checks(), "what one client moves"))


def test_failures_of_bounds_that_adapt_are_compared_with_each_other() -> None:
    runs = ClientEvidence(target_of(AdaClip(), 3), 3)
    (check,) = findings(runs.checks(), "several fail at once")
    assert check.p_value == 1
    assert "in 3 ways" in check.examined


@pytest.mark.slow
def test_rows_that_count_twice_only_in_messages_are_detected() -> None:
    target = target_of(Normalization(1.0), 1)
    found = []
    for plant in (nullcontext, BUGS["rows that come as messages count twice"]):
        neighbours = ClientNeighbours(target, 3)
        with plant():
            neighbours.send_messages()
        found.append(set(neighbours.faults))
    assert found == [set(), {"messages"}]


def leaving(mechanism: Mechanism) -> set[str]:
    """The tests of what leaves a round beside the parameters."""
    target = target_of(mechanism, 3)
    sums = equal_sum_runs(target, 3)
    return failed(
        [
            replace(what_leaves(NoiseOnly.of(target, 3)), name="what else leaves a round"),
            replace(nothing_but_sums(*sums), name="nothing but the sum"),
        ]
    )


@pytest.mark.parametrize(
    "mechanism",
    slow_but(
        1,
        [
            QuantileClipping(bit_noise=0.5),
            Clipping(1.0),
            AdaClip(),
            PrivateScalar(Clipping(1.0), name="loss", high=4.0, fraction=0.3),
        ],
    ),
    ids=["quantile", "clipping", "adaclip", "scalar"],
)
def test_what_follows_from_releases_may_leave_a_round(mechanism: Mechanism) -> None:
    assert not leaving(mechanism)


@pytest.mark.parametrize(
    "name",
    slow_but(
        1,
        [
            "a metric of training is the exact sum's norm",
            "the update's norm is the exact sum's",
            "the count of clipped rows is shown",
            "the exact sum stays in the mechanism's state",
            "the noise stays in the optimiser's state",
            "clients are sent the exact sum's norm",
        ],
    ),
)
def test_what_else_leaves_a_round_is_detected(name: str) -> None:
    with BUGS[name]():
        assert "what else leaves a round" in leaving(Normalization(1.0))


@pytest.mark.parametrize(
    ("name", "detected_by"),
    slow_but(
        1,
        [
            ("noise from 256 seeds of the system", {"noise with system entropy"}),
            ("cohorts from 256 seeds of the system", {"cohorts with system entropy"}),
            (None, set()),
        ],
    ),
)
@pytest.mark.usefixtures("few_system_rounds")
def test_few_seeds_of_the_system_are_detected(name: str | None, detected_by: set[str]) -> None:
    factory = strategies(Normalization(1.0), PoissonCohort(0.2, 200), z=2.0)
    target = StrategyTarget(factory, rounds=100)

    def checks() -> set[str]:
        names = ("noise with system entropy", "cohorts with system entropy")
        return failed(findings(ClientEvidence(target, 3).checks(), *names))

    if name is None:
        assert not checks()
        return
    with BUGS[name]():
        assert checks() == detected_by


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
            full=StrategyTarget(factory, rounds=2),
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
    with silenced_logs(), BUGS[name]() if name else nullcontext():
        (check,) = findings(ConfigEvidence(resolve(CONFIG), 1).checks(), "budget")
    assert check.p_value == (0 if name else 1)


def test_a_delta_at_which_rounds_cost_no_epsilon_leaves_no_budget_to_test() -> None:
    config = CONFIG.replace(**{"noise.delta": 0.2})
    assert not findings(ConfigEvidence(resolve(config), 1).checks(), "budget")
    privacy = ExamplePrivacy(Clipping(1.0), 4.0, delta=0.2)
    target = TrainerTarget.smaller(privacy, LocalWork(3, epochs=1), 12, 512)
    assert ExampleEvidence(target, 1).budget is None


@pytest.mark.parametrize(
    "name",
    [
        "a resumed run draws the noise of its first rounds again",
        "a resumed run samples the cohorts of its first rounds again",
    ],
)
def test_what_a_resumed_run_draws_again_is_detected(name: str) -> None:
    runs = ClientEvidence(target_of(Normalization(1.0), 6), 3)
    assert runs.runs[0].released == 6
    with BUGS[name]():
        (broken,) = findings(runs.checks(), "resume")
    (honest,) = findings(runs.checks(), "resume")
    assert (broken.p_value, honest.p_value) == (0, 1)


def test_a_line_of_a_seeded_run_that_says_the_systems_entropy_is_detected() -> None:
    name, target = "entropy of a run with a seed", target_of(Normalization(1.0), 2)
    (honest,) = findings(ClientEvidence(target, 3).checks(), name)
    with BUGS["lines of seeded runs say entropy of the system"]():
        (broken,) = findings(ClientEvidence(target, 3).checks(), name)
    assert (broken.p_value, honest.p_value) == (0, 1)
    assert broken.measured == "round 1 says entropy system"


@pytest.mark.parametrize("mechanism", [Clipping(1.0), Normalization(1.0)])
def test_a_norm_of_positive_coordinates_alone_is_detected(mechanism: Mechanism) -> None:
    runs = ClientEvidence(target_of(mechanism, 20), 3)
    assert runs._canary_round is not None
    neighbours = ClientNeighbours(*runs._canary_round)
    noise = runs.measured
    with BUGS["negative coordinates left out of the norm"]():
        neighbours.try_behaviours(noise, {})
    assert neighbours.moved.refutes(RISK)


def test_a_run_that_cannot_be_resumed_is_not_tested_and_ends_no_audit() -> None:
    with BUGS["the exact sum stays in the mechanism's state"]():
        runs = ClientEvidence(target_of(Normalization(1.0), 6), 3)
        (check,) = findings(runs.checks(), "resume")
    assert not check.tested
    assert check.measured.startswith("the run cannot be resumed: state= holds sum")


def test_a_canary_of_a_rare_cohort_is_found_or_its_tests_are_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = StrategyTarget(strategies(Clipping(1.0), FixedCohort(1, 1000), z=2.0), rounds=3)
    together = "what one client moves, released scalars included"
    names = ("traces", "what one client moves", together, "what else leaves a round")
    few, seed = ClientEvidence(target, 64)._canary_round or (target, -1)
    assert 999 in few.observe(few.silent_clients(), seed).sampled[-1]
    monkeypatch.setattr(evidence, "SEEDS_TRIED", 50)
    checks = findings(ClientEvidence(target, 64).checks(), *names)
    assert [check.name for check in checks] == list(names)
    assert not any(check.tested for check in checks)
    assert "is never sampled" in checks[0].measured


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


def test_a_config_whose_own_run_fails_is_audited_all_the_same() -> None:
    def diverging(self: Releaser, *arguments: object, **named: object) -> None:
        raise RuntimeError("diverged")

    private = {"mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.0}}
    config = RunConfig.parse({"partition": {"clients": 20}, "rounds": 3, **private})
    with patch.object(Releaser, "release", diverging):
        addresses, _ = own_addresses(config)
    assert addresses  # those of the first round, until it failed
