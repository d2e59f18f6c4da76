"""The audit of private evaluations: an honest one passes, and what is planted is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from slow_cases import slow_but
from whitebox import config_evidence
from whitebox.config_audit import audit_config
from whitebox.config_evidence import ConfigEvidence, evaluating, own_addresses
from whitebox.metrics_release import MetricsEvidence

from fedsim import RunConfig
from fedsim.audit.findings import SampleChecks, findings
from fedsim.errors import FedsimError
from fedsim.federation.accounting import Accounting
from fedsim.federation.client_settings import PrivateMetrics
from fedsim.federation.private_metrics import MetricsRelease, PrivateEvaluation
from fedsim.mechanisms import Clipping
from fedsim.randomness import Purpose

CONFIG = RunConfig.parse(
    {
        "rounds": 4,
        "partition": {"clients": 30},
        "cohort": {"name": "poisson", "rate": 0.5},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
        "evaluate": {
            "clients-every": 1,
            "private": True,
            "multiplier": 2.0,
            "ranges": "loss(0,5)",
            "quantiles": True,
        },
    }
)
RISK = 1e-4  # of each of some twenty checks


def violated(seed: int, config: RunConfig = CONFIG) -> set[str]:
    evidence = MetricsEvidence(evaluating(config), seed)
    return {str(one) for one in findings(evidence.checks()) if one.refutes(RISK)}


@pytest.mark.parametrize("seed", slow_but(1, range(5)))
def test_an_honest_evaluation_passes(seed: int) -> None:
    assert violated(seed) == set()


def test_evaluations_that_are_rarer_than_the_rounds_of_an_attack_are_audited() -> None:
    config = CONFIG.replace(**{"rounds": 10, "evaluate.clients-every": 5})
    addresses, rounds = own_addresses(config)
    assert rounds == 2
    # Two rounds, and one evaluation.
    assert len({address for address in addresses if address.purpose is Purpose.NOISE}) == 3
    verdict, _ = audit_config(config, rounds=2, runs=0, canaries=0)
    assert verdict.accepted, verdict.refuting


def test_an_honest_evaluation_of_two_numbers_passes() -> None:
    two = CONFIG.replace(**{"evaluate.quantiles": False, "evaluate.ranges": ""})
    assert violated(6, two) == set()


def test_an_honest_evaluation_on_devices_that_are_often_absent_passes() -> None:
    assert violated(1, CONFIG.replace(**{"devices.availability": 0.5})) == set()


def test_evaluations_of_many_clients_are_audited_with_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(self: MetricsEvidence) -> Iterator[SampleChecks]:
        raise FedsimError(f"{self.strategies(1).plan.sampler.population} clients")

    monkeypatch.setattr(config_evidence, "MAX_CLIENTS", 10)
    monkeypatch.setattr(ConfigEvidence, "checks", lambda self: iter(()))
    monkeypatch.setattr(MetricsEvidence, "checks", end)
    with pytest.raises(FedsimError, match="10 clients"):
        audit_config(CONFIG)


def _less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = MetricsRelease.release
    monkeypatch.setattr(MetricsRelease, "release", lambda self: 0.9 * exact(self))


def _same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = PrivateEvaluation.metrics_sum
    monkeypatch.setattr(
        PrivateEvaluation, "metrics_sum", lambda self, number: exact(self, 1 + number % 50)
    )
    monkeypatch.setattr(Accounting, "record", lambda *_: None)


def _wider_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.federation import private_metrics

    rows = private_metrics.joint_rows
    monkeypatch.setattr(private_metrics, "joint_rows", lambda *given: 3 * rows(*given))
    monkeypatch.setattr(PrivateMetrics, "plan", _planned_with(PrivateMetrics.plan))


def _planned_with(plan: Callable[..., Any]) -> Callable[..., Any]:
    from dataclasses import replace

    def planned(self: object, *given: Any) -> Any:
        made = plan(self, *given)
        noise = made.noise.with_multiplier(made.noise.multiplier / 3)
        return replace(made, mechanism=Clipping(3 * made.mechanism.clip_norm), noise=noise)

    return planned


def _not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accounting, "record", lambda *_: None)


def _many_examples_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    add = MetricsRelease.add

    def add_twice(self: MetricsRelease, reply: Any) -> None:
        add(self, reply)
        if reply.block.metrics["num-examples"].max() > 1:
            add(self, reply)

    monkeypatch.setattr(MetricsRelease, "add", add_twice)


def _everyone_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    def everyone(self: PrivateEvaluation, server_round: int, grid: Any) -> Any:
        reachable = self.participants.reachable
        return self.participants.available_recipients(server_round, np.arange(30), grid, reachable)

    monkeypatch.setattr(PrivateEvaluation, "evaluators", everyone)


def _keyed_by(*parts: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Key the noise of evaluations by these settings alone."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        from fedsim.federation import private_metrics

        digest = private_metrics.digest_of

        def digest_of_parts(settings: Mapping[str, object]) -> str:
            return digest({part: settings[part] for part in parts})

        monkeypatch.setattr(private_metrics, "digest_of", digest_of_parts)

    return plant


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (_keyed_by(), "noise: noise of another run"),
        (_keyed_by("rounds", "evaluation"), "noise: noise of another run"),
        (_less_noise, "noise: size in each layer"),
        (_same_noise, "noise: exact repeats"),
        (_wider_bound, "bound: what one client's metrics move"),
        (_not_charged, "ledger: a line for every evaluation"),
        (_many_examples_count_twice, "bound: what one client's metrics move"),
        (_everyone_evaluates, "sampler: sizes"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert found in violated(1, CONFIG.replace(**{"evaluate.fraction": 0.5}))
