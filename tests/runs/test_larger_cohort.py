"""A larger cohort's noise: what is really added is charged, the other figure has its name."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim import RunConfig
from fedsim.cli import main
from fedsim.cohorts import FixedCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger, epsilon
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.record import RunRecord
from fedsim.runs.resolve import resolve, strategy_of
from fedsim.runs.run_ledgers import RunLedgers

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


def test_the_noise_really_added_is_charged_and_the_larger_cohorts_epsilon_stands_beside_it(
    tmp_path: Path,
) -> None:
    result = fedsim.run(BASE, out=tmp_path / "run")
    # 10 clients are drawn in the place of 40: a quarter of the noise on their sum.
    real = epsilon(
        noise_multiplier=1.0, cohort=PoissonCohort(rate=0.1, population=100), rounds=2, delta=1e-5
    )
    larger = epsilon(
        noise_multiplier=4.0, cohort=PoissonCohort(rate=0.4, population=100), rounds=2, delta=1e-5
    )
    assert real > 2 * larger
    assert result.privacy.epsilon == pytest.approx(real, rel=1e-6)
    entries = Ledger.read(tmp_path / "run" / "ledger.jsonl").entries
    assert {entry.event.total_noise_multiplier for entry in entries} == {1.0}
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert float(rows[-1]["epsilon"]) == pytest.approx(real, rel=1e-6)
    extrapolated = result.privacy.extrapolated
    assert extrapolated is not None
    assert extrapolated.epsilon == pytest.approx(larger, rel=1e-6)
    assert f"Extrapolated epsilon: {larger:.4g}" in str(result.privacy)
    assert f"({real:.4g}, 1e-05)-differentially private" in str(result.privacy)
    assert "Extrapolated epsilon" in (tmp_path / "run" / "report.html").read_text()
    (statement,) = RunRecord.read(tmp_path / "run").statements
    assert statement.extrapolated == extrapolated
    assert json.loads(json.dumps(statement.to_dict()))["extrapolated-epsilon"] == pytest.approx(
        larger, rel=1e-6
    )


@pytest.mark.parametrize("declared", [False, True])
def test_what_a_larger_cohort_would_cost_is_of_all_planned_rounds_once_releases_end_a_run(
    declared: bool,
) -> None:
    class Stop(Callback):
        def on_round(self, status: RunStatus) -> bool:
            return status.round == 2

    config = BASE.replace(**{"rounds": 20, "stop.callbacks": declared})
    stopped = fedsim.run(config, callbacks=[Stop()])
    larger = epsilon(
        noise_multiplier=4.0,
        cohort=PoissonCohort(rate=0.4, population=100),
        rounds=20,
        delta=1e-5,
    )
    assert (stopped.rounds, stopped.privacy.cost.releases) == (2, 20)
    assert stopped.privacy.extrapolated.epsilon == pytest.approx(larger, rel=1e-6)
    assert stopped.privacy.extrapolated.delta == 1e-5


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


def test_a_population_of_its_own_and_fixed_cohorts_are_extrapolated_from() -> None:
    config = BASE.replace(**{"noise.cohort-size": 1000, "noise.cohort-population": 10**6})
    ledger = strategy_of(resolve(config)).ledger
    figure = RunLedgers(config.to_run_config(), ledger).statements[0].extrapolated
    assert figure is not None
    assert (figure.size, figure.population, figure.epsilon) == (1000, 10**6, 0.0)
    fixed = BASE.replace(**{"cohort.name": "fixed", "cohort.size": 10})
    assert resolve(fixed).plan.noise.multiplier == 1.0
    result = fedsim.run(fixed)
    larger = epsilon(
        noise_multiplier=4.0, cohort=FixedCohort(size=40, population=100), rounds=2, delta=1e-5
    )
    assert result.privacy.extrapolated is not None
    assert result.privacy.extrapolated.epsilon == pytest.approx(larger, rel=1e-6)


def test_the_budget_and_an_adaptive_bound_follow_the_noise_really_added() -> None:
    mechanism = {"mechanism.name": "quantile-clipping", "mechanism.bit-noise": 0.15, "rounds": 30}
    config = BASE.replace(**mechanism)
    one = fedsim.run(config.replace(rounds=1)).privacy.epsilon
    assert one == pytest.approx(
        epsilon(
            noise_multiplier=1.0,
            cohort=PoissonCohort(rate=0.1, population=100),
            rounds=1,
            delta=1e-5,
        ),
        rel=1e-6,
    )
    budget = 1.5 * one
    stopped = fedsim.run(config.replace(**{"noise.max-epsilon": budget}))
    assert stopped.ended == "budget"
    assert one < stopped.privacy.epsilon <= budget
    # The bit's share of the noise is of that too: at a multiplier of 4 there would be none for it.
    with pytest.raises(FedsimError, match="bit-noise"):
        fedsim.run(config.replace(**{"noise.cohort-size": 0}))


def test_where_it_makes_no_sense_it_is_refused() -> None:
    for changes, words in (
        ({"noise.cohort-size": 5}, r"noise\.cohort-size = 5; it must be from 10"),
        ({"noise.cohort-size": 101}, r"to 100, the clients"),
        ({"noise.multiplier": 0.0}, r"unless noise\.multiplier is above 0"),
        ({"noise.multiplier": "", "noise.target-epsilon": 2.0}, r"target epsilon is for the noise"),
        ({"cohort.name": "full"}, r"'poisson' or 'fixed'"),
        ({"engine.name": "deployment"}, r"the real cohort"),
        ({"noise.cohort-population": 50}, r"noise\.cohort-population = 50"),
        ({"noise.cohort-size": 0, "noise.cohort-population": 500}, r"unless noise\.cohort-size"),
    ):
        with pytest.raises(FedsimError, match=words):
            BASE.replace(**changes)


def test_the_privacy_command_says_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(BASE.to_toml())
    fedsim.run(BASE, out="run")
    for source in ("c.toml", "run"):
        with pytest.raises(SystemExit) as ended:
            main(["privacy", source])
        assert ended.value.code in (0, None)
        assert "Extrapolated epsilon" in capsys.readouterr().out


def test_what_a_larger_cohort_costs_is_not_guessed() -> None:
    with pytest.raises(FedsimError, match="the cost of a larger cohort is known for these only"):
        BASE.replace(**{"noise.name": "blt"})
