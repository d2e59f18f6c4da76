"""A larger cohort whose noise is simulated: its cost is charged, and marked wherever it stands."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim import RunConfig
from fedsim.audit.config_audit import audit_config
from fedsim.cli import main
from fedsim.cohorts import FixedCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Event, Ledger, epsilon
from fedsim.runs.metrics import row_marks
from fedsim.runs.record import RunRecord
from fedsim.runs.resolve import resolve
from fedsim.strategies import DPFedAvg

BASE = RunConfig().replace(
    **{
        "rounds": 2,
        "partition.clients": 100,
        "cohort.name": "poisson",
        "cohort.rate": 0.1,
        "mechanism.name": "clipping",
        "noise.multiplier": 4.0,
        "noise.cohort-size": 40,
        "client.batch-size": 5,
    }
)


def larger(z: float = 4.0, rounds: int = 2) -> float:
    cohort = PoissonCohort(rate=0.4, population=100)
    return epsilon(noise_multiplier=z, cohort=cohort, rounds=rounds, delta=1e-5)


def test_the_larger_cohort_is_charged_and_every_epsilon_is_marked_as_its(tmp_path: Path) -> None:
    result = fedsim.run(BASE, out=tmp_path / "run")
    assert result.privacy.epsilon == pytest.approx(larger(), rel=1e-9)
    entries = Ledger.read(tmp_path / "run" / "ledger.jsonl").entries
    assert {entry.event.total_noise_multiplier for entry in entries} == {4.0}
    assert {entry.public["simulated-cohort"] for entry in entries} == {40}
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert float(rows[-1]["epsilon"]) == pytest.approx(larger(), rel=1e-9)
    mark = " (simulated for a cohort of 40)"
    assert row_marks(read_rows(rows[-1])) == mark
    (statement,) = RunRecord.read(tmp_path / "run").statements
    assert result.privacy.epsilon_label == statement.epsilon_label == f"epsilon{mark}"
    assert statement.to_dict()["simulated-cohort"] == 40
    assert statement.to_dict()["adversary"] == []
    first = (
        f"would be ({larger():.4g}, 1e-05)-differentially private at client level, simulated "
        "for a cohort of 40."
    )
    assert first in str(statement)
    assert "epsilon is no guarantee of this run" in str(statement)
    assert "membership-inference" not in str(statement)
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count(f"epsilon{mark}") > 1


def read_rows(row: dict[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value}


def test_a_target_epsilon_is_the_larger_cohorts() -> None:
    config = BASE.replace(**{"noise.multiplier": "", "noise.target-epsilon": 2.0})
    resolved = resolve(config)
    assert larger(resolved.config.noise.multiplier) == pytest.approx(2.0, rel=1e-3)
    assert resolved.plan.noise.multiplier == pytest.approx(resolved.config.noise.multiplier / 4)
    again = resolve(resolved.config)
    assert again.config.to_run_config() == resolved.config.to_run_config()
    assert again.plan == resolved.plan


def test_the_mean_has_the_noise_of_the_larger_cohorts_mean() -> None:
    alone = BASE.replace(**{"client.lr": 1e-9, "rounds": 1})
    larger = alone.replace(**{"cohort.rate": 0.4, "noise.cohort-size": 0})
    stds = []
    for config in (alone, larger):
        start = torch.cat([t.flatten() for t in _tensors(resolve(config).initial_arrays)])
        end = torch.cat([t.flatten() for t in _tensors(fedsim.run(config).arrays)])
        stds.append(float((end - start).std()))
    # 650 coordinates: the standard error of a standard deviation is 2.8 %.
    assert stds[0] == pytest.approx(4.0 * 1.0 / 40, rel=0.12)
    assert stds[1] == pytest.approx(4.0 * 1.0 / 40, rel=0.12)


def _tensors(arrays) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(array.numpy())) for array in arrays.values()]


def test_a_population_of_its_own_and_fixed_cohorts_are_simulated() -> None:
    plan = resolve(
        BASE.replace(**{"noise.cohort-size": 1000, "noise.cohort-population": 10**6})
    ).plan
    assert plan.event() == Event.of(PoissonCohort(rate=1e-3, population=10**6), 4.0)
    assert (plan.noise.multiplier, plan.denominator, plan.simulated_cohort) == (0.04, 10, 1000)
    fixed = BASE.replace(**{"cohort.name": "fixed", "cohort.size": 10})
    assert resolve(fixed).plan.noise.multiplier == 1.0
    charged = epsilon(
        noise_multiplier=4.0, cohort=FixedCohort(size=40, population=100), rounds=2, delta=1e-5
    )
    assert fedsim.run(fixed).privacy.epsilon == pytest.approx(charged, rel=1e-9)


def test_a_budget_is_the_larger_cohorts_and_an_adaptive_bound_has_its_share_of_its_noise() -> None:
    mechanism = {"mechanism.name": "quantile-clipping", "mechanism.bit-noise": 0.15, "rounds": 30}
    config = BASE.replace(**mechanism)
    stopped = fedsim.run(config.replace(**{"noise.max-epsilon": larger(rounds=3) * 1.001}))
    assert (stopped.ended, stopped.rounds) == ("budget", 3)
    # The bit's share of the noise is of that of 40 clients: of 10 it would need more than there is.
    with pytest.raises(FedsimError, match="bit-noise"):
        fedsim.run(config.replace(**{"noise.cohort-size": 0}))


REFUSALS = (
    ({"noise.cohort-size": 5}, r"noise\.cohort-size is 5; it must be from 10"),
    ({"noise.cohort-size": 101}, r"to 100, the population"),
    ({"noise.multiplier": 0.0}, r"0 in a run without a mechanism and noise"),
    ({"cohort.name": "full"}, r"'poisson' or 'fixed'"),
    ({"noise.name": "blt"}, r"the cost of a larger cohort is known for these only"),
    ({"engine.name": "deployment"}, r"no guarantee of this run"),
    ({"noise.entropy": "system"}, r"no guarantee of this run"),
    ({"noise.cohort-population": 50}, r"noise\.cohort-population is 50"),
    ({"noise.cohort-size": 0, "noise.cohort-population": 500}, r"unless noise\.cohort-size"),
    (
        {
            "evaluate.clients-every": 1,
            "evaluate.private": True,
            "evaluate.multiplier": 1.0,
            "evaluate.ranges": "loss(0,5)",
        },
        r"0 with evaluate\.private = true",
    ),
)


@pytest.mark.parametrize(("changes", "words"), REFUSALS)
def test_where_it_makes_no_sense_it_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(FedsimError, match=words):
        resolve(BASE.replace(**changes))


def test_it_is_no_evidence_and_no_claim_to_audit() -> None:
    plan = resolve(BASE).plan
    with pytest.raises(FedsimError, match="no guarantee of this run"):
        DPFedAvg(plan=plan, delta=1e-5)
    with pytest.raises(FedsimError, match="no guarantee of this run"), Ledger().release(plan, 1):
        pass
    with pytest.raises(FedsimError, match="in an audit"):
        audit_config(BASE)


def test_the_privacy_command_marks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(BASE.to_toml())
    fedsim.run(BASE, out="run")
    for source in ("c.toml", "run"):
        with pytest.raises(SystemExit) as ended:
            main(["privacy", source])
        assert ended.value.code in (0, None)
        assert "for a cohort of 40" in " ".join(capsys.readouterr().out.split())
