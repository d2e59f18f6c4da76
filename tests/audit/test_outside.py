"""Audits of code that is not fedsim's: planted bugs in small loops, and honest ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from slow_cases import slow_but

from fedsim.audit import (
    SyntheticFederation,
    TargetClaim,
    TargetRelease,
    audit_target,
    open_target,
)
from fedsim.audit import target_audit as outside_audit
from fedsim.audit.adapters import aggregation_target
from fedsim.audit.adapters.flower import strategy_target
from fedsim.audit.attacks import (
    TARGET_WORLDS,
    AttackResult,
    Observations,
    Target,
    even_unit_vector,
)
from fedsim.audit.federation import SHAPES
from fedsim.audit.target_audit import TargetError
from fedsim.errors import FedsimError
from fedsim.privacy.losses import gaussian_mu

DECLARED = 20


def claim_of(rate: float = 1.0, **changes: Any) -> TargetClaim:
    sampling = {1.0: "full"}.get(rate, "fixed" if "adjacency" in changes else "poisson")
    usual = {"noise_multiplier": 1.0, "rounds": 10, "sampling": sampling, "rate": rate}
    return TargetClaim(**{**usual, **changes})


def clipped(rows: np.ndarray, c: float) -> np.ndarray:
    return rows / np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True) / c)


def drawn(bug: str, rng: np.random.Generator, f: SyntheticFederation) -> np.ndarray:
    size = round(f.rate * f.population)
    if bug == "fixed":
        return rng.choice(f.population, size, replace=False)
    if bug == "replacement":
        return rng.integers(0, f.population, size)
    return np.flatnonzero(rng.random(f.population) < f.rate)


def bounded(bug: str, ids: np.ndarray, f: SyntheticFederation) -> np.ndarray:
    rows = f.rows[ids]
    if bug == "no clipping":
        return rows
    if bug == "each array":
        ends = np.cumsum([math.prod(shape) for shape in SHAPES])
        arrays = np.split(rows, ends[:-1], axis=1)
        return np.concatenate([clipped(array, f.clip_norm) for array in arrays], axis=1)
    rows = clipped(rows, f.clip_norm)
    if bug == "weights" and len(ids):
        rows = rows * (f.examples[ids] / f.examples[ids].mean())[:, None]
    return rows


def drawn_noise(bug: str, rng: np.random.Generator, f: SyntheticFederation) -> np.ndarray:
    rng = np.random.default_rng(f.seed) if bug == "repeated" else rng
    noise = f.noise_multiplier * f.clip_norm * rng.standard_normal(f.rows.shape[1])
    if bug == "truncated":
        return np.clip(noise, -2.5, 2.5)
    return 0.8 * noise if bug == "less noise" else noise


def loop(bug: str = "") -> Target:
    """DP-FedAvg as people write it in numpy, with one thing wrong."""

    def target(f: SyntheticFederation) -> TargetRelease:
        rng, model = np.random.default_rng(f.seed), np.zeros(f.rows.shape[1])
        models, sampled = [], []
        for _ in range(f.rounds):
            ids = drawn(bug, rng, f)
            total = max(len(ids), 1) if bug == "counted" else f.rate * DECLARED
            model = model + (bounded(bug, ids, f).sum(0) + drawn_noise(bug, rng, f)) / total
            models.append(model)
            sampled.append(ids.tolist())
        numbers = {}
        if bug == "statistics":
            numbers["mean-norm"] = np.full(f.rounds, np.linalg.norm(f.rows, axis=1).mean())
        return TargetRelease.from_result(
            {"models": models, "sampled": sampled, "statistics": numbers}, f
        )

    return target


BUGS = [
    ("less noise", 1.0, "noise is 1."),
    ("each array", 1.0, "each array is clipped by itself"),
    ("counted", 1.0, "the denominator is counted"),
    ("less noise", 0.5, "noise is 1."),
    ("no clipping", 1.0, "rows longer than C pass"),
    ("no clipping", 0.5, "rows longer than C pass"),
    ("counted", 0.5, "the denominator is counted"),
    ("weights", 1.0, "weighted by numbers that clients report"),
    ("repeated", 1.0, "noise is used again"),
    ("truncated", 1.0, "noise is truncated"),
    ("statistics", 1.0, "statistics are released without noise"),
    ("fixed", 0.5, "cohorts of a fixed size, announced as Poisson"),
    ("replacement", 0.5, "sampling with replacement"),
]


@pytest.mark.parametrize(("bug", "rate", "cause"), slow_but(3, BUGS))
def test_a_bug_is_found_and_named(bug: str, rate: float, cause: str) -> None:
    verdict = audit_target(loop(bug), claim_of(rate), runs=150)
    assert not verdict.accepted
    assert any(cause in finding.cause for finding in verdict.failed), verdict.failed


@pytest.mark.parametrize("seed", slow_but(1, range(1, 6)))
@pytest.mark.parametrize(
    ("rate", "changes"),
    [(1.0, {}), (0.5, {}), (0.3, {"noise_multiplier": 3.0}), (1.0, {"adjacency": "zero-out"})],
)
def test_an_honest_loop_is_accepted(rate: float, changes: dict[str, Any], seed: int) -> None:
    verdict = audit_target(loop(), claim_of(rate, **changes), runs=60, seed=100 * seed)
    assert verdict.accepted, verdict.refuting


@pytest.mark.slow
def test_two_neighbours_of_a_replaced_row_are_two_bounds_apart() -> None:
    """Noise for one bound is too little: a claim of replace-one at z has a sensitivity of 2 C."""
    replaced = claim_of(adjacency="replace-one")
    assert replaced.sensitivity == 2.0
    assert replaced.claim.epsilon > claim_of().claim.epsilon
    assert audit_target(loop(), replaced, runs=60).accepted
    # An epsilon of add-remove, claimed for replaced rows, is too small.
    claimed = claim_of(adjacency="replace-one", epsilon=claim_of().claim.epsilon)
    verdict = audit_target(loop(), claimed, runs=60)
    assert [finding.cause for finding in verdict.failed] == ["the accountant counts too little"]


def quantile_clipping(sign: float, late: bool) -> Target:
    """A clip norm that follows the median norm of rows; right with a sign of 1, and not late."""

    def make(federation: SyntheticFederation) -> Any:
        c = [federation.clip_norm]

        def aggregate(updates: Any, rng: np.random.Generator) -> list[Any]:
            rows = np.array([np.concatenate([a.ravel() for a in u]) for u in updates])
            shorter = (np.linalg.norm(rows, axis=1) <= c[0]).sum() + 10 * rng.standard_normal()
            before = c[0]
            after = before * math.exp(-0.2 * sign * (shorter / DECLARED - 0.5))
            c[0] = after
            of_noise = after if late else before
            mean = clipped(rows, before).sum(0) + of_noise * rng.standard_normal(rows.shape[1])
            return federation.arrays(mean / DECLARED)

        return aggregate

    call = aggregation_target(make)
    return lambda federation: TargetRelease.from_result(call(federation), federation)


@pytest.mark.slow
def test_a_clip_norm_that_adapts_must_follow_the_rows_before_its_noise() -> None:
    claim = claim_of(rounds=5, adaptive=True, adjacency="zero-out")
    assert audit_target(quantile_clipping(1.0, late=False), claim, runs=40).accepted
    wrong = audit_target(quantile_clipping(-1.0, late=False), claim, runs=40)
    assert [finding.cause for finding in wrong.failed] == ["its update has the wrong sign"]
    late = audit_target(quantile_clipping(-1.0, late=True), claim, runs=40)
    assert "rows are clipped to another C than noise has" in {f.cause for f in late.failed}


def test_an_epsilon_alone_has_the_curve_of_randomised_response() -> None:
    curve = TargetClaim(epsilon=math.log(3), delta=1e-3).claim.curve
    for a in (0.0, 0.1, 0.2497, 0.5, 1.0):
        expected = max(0.0, 1 - 1e-3 - 3 * a, (1 - 1e-3 - a) / 3)
        assert float(curve(a)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "accepted"), [(1.0, False), (30.0, True)])
def test_an_epsilon_alone_is_attacked_in_two_worlds(epsilon: float, accepted: bool) -> None:
    claim = TargetClaim(epsilon=epsilon, rounds=10)
    target = loop()

    def with_noise(federation: SyntheticFederation) -> TargetRelease:
        changed = {**vars(federation), "noise_multiplier": 1.0}
        return target(SyntheticFederation(**changed))

    verdict = audit_target(with_noise, claim, runs=300)
    assert verdict.accepted == accepted
    assert verdict.epsilon_bound <= claim.claim.epsilon or not accepted


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "there is nothing to audit"),
        ({"noise-multiplier": 1.0, "rate": 0.5}, "the rate must be 1 for 'full'"),
        ({"noise-multiplier": 1.0, "rate": 0.5, "sampling": "fixed"}, "goes with 'replace-one'"),
        ({"noise-multiplier": 1.0, "sigma": 2.0}, r"claim\.sigma is not a key"),
        ({"noise-multiplier": -1.0}, "greater than 0"),
        # One of 20 rows is five times as many as claimed.
        (
            {
                "noise-multiplier": 1.0,
                "rate": 0.01,
                "sampling": "fixed",
                "adjacency": "replace-one",
            },
            r"gives 0\.2 rows a round; .* must be a whole number",
        ),
    ],
)
def test_a_claim_that_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(FedsimError, match=words):
        TargetClaim.read(None, values)


FILE = """
import os
import time

import numpy as np

print("a line printed when it is imported")

def honest(federation):
    rng = np.random.default_rng(federation.seed)
    model, models = np.zeros(federation.rows.shape[1]), []
    for _ in range(federation.rounds):
        norms = np.linalg.norm(federation.rows, axis=1, keepdims=True)
        rows = federation.rows / np.maximum(1, norms / federation.clip_norm)
        noise = federation.noise_multiplier * federation.clip_norm * rng.normal(size=model.shape)
        model = model + (rows.sum(0) + noise) / 20
        models.append(model)
    print("a line of the target's own")
    return models

def late(federation):
    return honest(federation)[:-1]

def failing(federation):
    raise RuntimeError("no such column")

def asking(federation):
    input("go on?")

def exiting(federation):
    os._exit(0)

def hanging(federation):
    if os.fork() == 0:
        time.sleep(20)
        open(__file__ + ".child", "w").close()
        os._exit(0)
    time.sleep(600)

def with_fedsim(federation):
    from fedsim.audit import TargetRelease
    return TargetRelease(honest(federation), statistics={"loss": [0.0] * federation.rounds})
"""


def test_a_target_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    claim = claim_of(rounds=3)
    with open_target(f"{path}:honest") as target:
        assert audit_target(target, claim, runs=30).accepted
    for name, words in (
        ("late", r"it must be \[3, 64\]"),
        ("failing", "RuntimeError: no such column"),
        ("none", "has no callable 'none'"),
    ):
        with (
            pytest.raises(FedsimError, match=words),
            open_target(f"{path}:{name}") as target,
        ):
            audit_target(target, claim, runs=30)


@pytest.mark.parametrize(
    ("name", "words"),
    [("exiting", "its process has ended"), ("hanging", "has not ended after 4 s")],
)
def test_a_target_that_ends_its_process_or_never_ends_is_an_error(
    tmp_path: Path, name: str, words: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    with (
        pytest.raises(FedsimError, match=words),
        open_target(f"{path}:{name}", seconds=1.2) as target,
    ):
        audit_target(target, claim_of(rounds=3), runs=30)
    assert not (tmp_path / "mine.py.child").exists()  # the audit did not wait for it


def test_a_target_may_release_what_it_imports_from_fedsim(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    with open_target(f"{path}:with_fedsim") as target:
        federation = SyntheticFederation(np.zeros((3, 64)), np.ones(3), rounds=2, seed=1)
        assert target(federation).statistics["loss"].tolist() == [0.0, 0.0]


def test_a_process_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, popen = [], subprocess.Popen

    def opened(*command: Any, **settings: Any) -> Any:
        processes.append(popen(*command, **settings))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", opened)
    monkeypatch.setattr(outside_audit, "SECONDS_TO_END", 0.1)
    path = tmp_path / "mine.py"
    path.write_text(
        "import threading, time\n"
        "def target(federation):\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    return [0 * federation.rows[0]]\n"
    )
    with open_target(f"{path}:target", sys.executable) as target:
        target(SyntheticFederation(np.zeros((3, 64)), np.ones(3), rounds=1, seed=1))
    assert processes[0].returncode is not None


def test_the_reason_is_told_if_a_target_fails_on_rows_of_zeros_only() -> None:
    def failing(federation: SyntheticFederation) -> TargetRelease:
        if not federation.rows.any():
            raise TargetError("mine.py:train", "ZeroDivisionError: by a row's length")
        return loop()(federation)

    verdict = audit_target(failing, claim_of(rounds=2), runs=30)
    (found,) = [finding for finding in verdict.checks if finding.name == "rows of zeros"]
    assert (found.measured, found.p_value) == ("ZeroDivisionError: by a row's length", 0.0)


def test_what_a_target_prints_is_not_in_the_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    rows = np.random.default_rng(1).normal(size=(20, 64))
    with open_target(f"{path}:honest") as target:
        target(SyntheticFederation(rows, np.ones(20), rounds=2, seed=7))
    assert capfd.readouterr().out == ""  # which is the verdict's


def test_the_verdict_is_json_too() -> None:
    verdict = audit_target(loop("no clipping"), claim_of(rounds=2), runs=30)
    printed = json.loads(json.dumps(verdict.to_dict()))
    assert printed["accepted"] is False
    assert {one["likely-cause"] for one in printed["violations"]} >= {"rows longer than C pass"}


def test_the_row_in_all_arrays_is_as_long_in_each() -> None:
    federation = SyntheticFederation(np.zeros((1, 64)), np.ones(1), 1, 1)
    norms = [np.linalg.norm(array) for array in federation.arrays(even_unit_vector())]
    assert norms == pytest.approx([len(SHAPES) ** -0.5] * len(SHAPES))


FLOWER = """
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from fedsim.audit.adapters.flower import strategy_target

def wrapped(wrapper, *mods):
    def make(f):
        return wrapper(FedAvg(fraction_evaluate=0.0), f.noise_multiplier, f.clip_norm, f.population)
    return strategy_target(make, lambda federation: mods)

server = wrapped(DifferentialPrivacyServerSideFixedClipping)
client = wrapped(DifferentialPrivacyClientSideFixedClipping, fixedclipping_mod)
forgotten = wrapped(DifferentialPrivacyClientSideFixedClipping)
"""


def without_noise(path: Path, text: str, name: str) -> np.ndarray:
    """The models that a file's target releases of five rows, some longer than C, and no noise."""
    path.write_text(text)
    with open_target(f"{path}:{name}") as target:
        return target(
            SyntheticFederation(ROWS, np.ones(5), 2, seed=1, clip_norm=0.7, noise_multiplier=0.0)
        ).models


ROWS = np.linspace(0.02, 0.3, 5)[:, None] * np.random.default_rng(2).normal(size=(5, 64))


@pytest.mark.parametrize("name", ["server", "client"])
def test_a_flower_strategy_releases_the_mean_of_clipped_updates(tmp_path: Path, name: str) -> None:
    models = without_noise(tmp_path / "flower_targets.py", FLOWER, name)
    mean = clipped(ROWS, 0.7).mean(0)
    np.testing.assert_allclose(models, [mean, 2 * mean], atol=1e-6)


def test_a_target_of_this_process_may_return_what_one_of_another_may() -> None:
    def make(federation: SyntheticFederation) -> DifferentialPrivacyServerSideFixedClipping:
        strategy = FedAvg(fraction_evaluate=0.0)
        numbers = federation.noise_multiplier, federation.clip_norm, federation.population
        return DifferentialPrivacyServerSideFixedClipping(strategy, *numbers)

    claim = claim_of(rounds=2, adjacency="zero-out")
    verdict = audit_target(strategy_target(make), claim, runs=30)
    causes = {finding.cause for finding in verdict.failed}
    assert "rows are weighted by numbers that clients report" in causes
    assert "a division by the length of a row" in causes  # of rows of zeros
    shape = r"the target <lambda> could not be run: ValueError: released models of shape \[1, 64\]"
    with pytest.raises(FedsimError, match=shape):
        audit_target(lambda f: {"models": [np.zeros(64)]}, claim, runs=30)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["server", "client", "forgotten"])
def test_a_flower_strategy_and_its_mods_are_audited(tmp_path: Path, name: str) -> None:
    path = tmp_path / "flower_targets.py"
    path.write_text(FLOWER)
    with open_target(f"{path}:{name}") as target:
        verdict = audit_target(target, claim_of(rounds=2, adjacency="zero-out"), runs=30)
    causes = {finding.cause for finding in verdict.failed}
    assert "rows are weighted by numbers that clients report" in causes
    assert ("rows longer than C pass" in causes) == (name == "forgotten")


OPACUS = """
from opacus import PrivacyEngine
from fedsim.audit.adapters.opacus import loop_target

def private(**options):
    def make(model, optimizer, loader, f):
        return PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=loader,
            noise_multiplier=f.noise_multiplier, max_grad_norm=f.clip_norm, **options,
        )
    return loop_target(make)

poisson, fixed = private(), private(poisson_sampling=False)
"""


def test_an_opacus_loop_releases_the_mean_of_clipped_gradients(tmp_path: Path) -> None:
    models = without_noise(tmp_path / "opacus_targets.py", OPACUS, "fixed")
    mean = clipped(ROWS, 0.7).mean(0)
    np.testing.assert_allclose(models, [mean, 2 * mean], atol=1e-6)


@pytest.mark.slow
def test_an_opacus_loop_is_audited(tmp_path: Path) -> None:
    path = tmp_path / "opacus_targets.py"
    path.write_text(OPACUS)
    claim = TargetClaim(
        noise_multiplier=1.0, rounds=5, sampling="poisson", rate=0.5, adjacency="zero-out",
        row="example",
    )  # fmt: skip
    with open_target(f"{path}:poisson") as target:
        verdict = audit_target(target, claim, runs=40)
        assert verdict.accepted, verdict.refuting
    with open_target(f"{path}:fixed") as target:
        causes = {finding.cause for finding in audit_target(target, claim, runs=40).failed}
    assert "cohorts of a fixed size, announced as Poisson" in causes


@pytest.mark.parametrize(("epsilon", "part"), [(0.5, 1.0), (3.0, 1.0), (3.0, 0.8)])
def test_gaussian_noise_for_another_epsilon_is_measured(epsilon: float, part: float) -> None:
    """Noise of the exact Gaussian mechanism, or a part of it."""
    mu = gaussian_mu(epsilon, 1e-5)

    def noisy(f: SyntheticFederation) -> TargetRelease:
        draws = np.random.default_rng(f.seed)
        row = clipped(f.rows, f.clip_norm)[-1]
        return TargetRelease.from_result([row + part / mu * draws.standard_normal(len(row))], f)

    claim = TargetClaim(epsilon=epsilon, adjacency="zero-out")
    verdict = audit_target(noisy, claim, runs=60)
    assert verdict.accepted == (part == 1), verdict.refuting


def test_what_a_target_releases_is_refused_in_a_sentence() -> None:
    federation = SyntheticFederation(np.zeros((3, 64)), np.ones(3), rounds=2, seed=1)
    models = np.zeros((2, 64))
    for result, words in (
        (None, "released no models"),
        ("hello", "released no models"),
        (np.zeros((2, 64)) + 1j, "complex numbers"),
        (np.zeros((2, 65)), r"of shape \[2, 65\]; it must be \[2, 64\]"),
        ([np.zeros(64), np.zeros(3)], r"of shape \[2, 3, 64\]"),
        ({"models": models, "weights": 1}, "known: models, sampled, statistics"),
        ({"models": models, "statistics": {"loss": [1.0]}}, "1 of 'loss'; there are 2 rounds"),
        ({"models": models, "sampled": [[0]]}, "sampled in 1 rounds; there are 2"),
    ):
        with pytest.raises(ValueError, match=words):
            TargetRelease.from_result(result, federation)


def test_a_target_that_is_not_finite_or_too_slow_is_not_audited() -> None:
    def infinite(f: SyntheticFederation) -> TargetRelease:
        return TargetRelease(np.full((f.rounds, 64), np.nan))

    with pytest.raises(FedsimError, match="for short rows"):
        audit_target(infinite, claim_of(rounds=2), runs=20)
    with pytest.raises(FedsimError, match=r"one run of the target takes .* s, and an audit"):
        audit_target(loop(), claim_of(rounds=2), seconds=1e-9)


@pytest.mark.parametrize(
    "options",
    [{"confidence": 2.0}, {"confidence": math.nan}, {"confidence": 0.0}, {"runs": 2}, {"runs": -3}],
)
def test_an_audit_that_could_not_tell_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(FedsimError, match=r"confidence is .* between 0 and 1|at least 20"):
        audit_target(loop(), claim_of(rounds=2), **options)


def test_a_target_cannot_read_the_requests_of_its_audit(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    with (
        open_target(f"{path}:asking", sys.executable) as target,
        pytest.raises(FedsimError, match="EOF when reading a line"),
    ):
        target(SyntheticFederation(np.zeros((3, 64)), np.ones(3), rounds=1, seed=1))


def test_a_number_that_is_nan_with_the_canary_shows_it_beside_one_with_noise() -> None:
    honest = loop()

    def reports_nan(f: SyntheticFederation) -> TargetRelease:
        value, released = np.nan if np.abs(f.rows).max() > 1 else 0.0, honest(f)
        numbers = {"loss": np.full(f.rounds, value), "first": released.models[:, 0]}
        return replace(released, statistics=numbers)

    verdict = audit_target(reports_nan, claim_of(rounds=2, adjacency="zero-out"), runs=30)
    assert {one.cause for one in verdict.failed} == {"statistics are released without noise"}


def test_a_number_that_is_released_with_the_canary_alone_shows_it() -> None:
    honest = loop()

    def reports_long_rows(f: SyntheticFederation) -> TargetRelease:
        numbers = {"long": np.ones(f.rounds)} if np.abs(f.rows).max() > 1 else {}
        return replace(honest(f), statistics=numbers)

    verdict = audit_target(reports_long_rows, claim_of(rounds=2, adjacency="zero-out"), runs=30)
    assert {one.cause for one in verdict.failed} == {"statistics are released without noise"}


def test_few_runs_of_a_target_without_a_seed_cause_no_more_false_alarms() -> None:
    claim = claim_of(rounds=1, adjacency="zero-out")
    world, draws = TARGET_WORLDS[0], np.random.default_rng(1)

    def p_value() -> float:
        without = draws.standard_normal((5, 1, 64))
        present = draws.standard_normal((5, 1, 64)) + world.direction
        sides = (Observations(moves, np.zeros((5, 1, 0)), []) for moves in (without, present))
        return AttackResult(world, claim, *sides).finding().p_value

    # With the tails of a normal distribution there would be about 20.
    assert sum(p_value() <= 1e-3 for _ in range(1000)) <= 4
