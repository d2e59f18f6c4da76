"""The config's own run and model, in an audit."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from whitebox.config_evidence import ConfigEvidence
from whitebox.evidence import ClientEvidence

from fedsim import RunConfig
from fedsim.audit.findings import Finding, findings
from fedsim.mechanisms.partial import PartialSum
from fedsim.randomness import Purpose, Randomness
from fedsim.runs.resolve import resolve

CONFIG = RunConfig().replace(
    **{
        "partition.clients": 5,
        "cohort.name": "poisson",
        "cohort.rate": 0.8,
        "mechanism.name": "clipping",
        "noise.multiplier": 1.0,
        "client.batch-size": 20,
        "client.mechanism.name": "clipping",
        "client.noise.multiplier": 1.0,
        "evaluate.every": 0,
    }
)


def changed(**changes: str | bool) -> RunConfig:
    return CONFIG.replace(**{k.replace("__", ".").replace("_", "-"): v for k, v in changes.items()})


def found(config: RunConfig, name: str) -> Finding:
    (finding,) = findings(ConfigEvidence(resolve(config), 1).checks(), name)
    return finding


ADDRESSES, MODEL = "addresses of draws", "what one example moves in the model itself"


def test_a_run_that_is_as_it_should_be_uses_each_number_once() -> None:
    check = found(CONFIG, ADDRESSES)
    assert check.p_value == 1
    assert check.measured == "each used once"


@pytest.mark.parametrize("purpose", [Purpose.NOISE, Purpose.AMPLIFIED_SAMPLE])
def test_an_address_that_leaves_the_round_out_is_seen(purpose: Purpose) -> None:
    generators = Randomness.generators

    def of_round_one(self, asked, *, round=0, **rest):
        return generators(self, asked, round=1 if asked == purpose else round, **rest)

    with patch.object(Randomness, "generators", of_round_one):
        check = found(CONFIG, ADDRESSES)
    assert check.p_value == 0
    assert purpose.name.lower() in check.measured


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__name": "mlp", "model__widths": "8"},
        {"client__mechanism__per_layer": True},
        {"task__class_weights": "1000" + ",10" * 9},
    ],
    ids=["softmax", "mlp", "layers", "weighted classes"],
)
def test_an_example_moves_the_real_sum_by_its_bound_at_most(changes: dict[str, str | bool]) -> None:
    check = found(changed(**changes), MODEL)
    assert check.p_value == 1, check.measured


def test_an_example_that_counts_twice_is_seen_through_the_model_itself() -> None:
    add = PartialSum.add_owners

    def added(self, rows, weights, counts, owners=slice(None), **rest):
        add(self, rows, weights, counts, owners, **rest)
        add(self, rows, weights, counts, owners, **rest)

    with patch.object(PartialSum, "add_owners", added):
        check = found(CONFIG, MODEL)
    assert check.p_value == 0
    assert np.isclose(float(check.measured.split()[0]), 2.0, atol=0.05)


@pytest.mark.parametrize("rounds", [1, 2])
def test_short_runs_are_as_noisy_in_any_direction(rounds: int) -> None:
    short = ConfigEvidence(resolve(CONFIG.replace(rounds=rounds)), 1).full
    (finding,) = findings(ClientEvidence(short, 1).checks(), "size in any direction")
    assert finding.tested
    assert finding.p_value > 1e-3
