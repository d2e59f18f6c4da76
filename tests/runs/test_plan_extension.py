"""Runs whose plan of correlated noise is made longer on resume."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from killed_runs import killed_in
from safetensors.numpy import load_file

import fedsim
from fedsim import RunConfig
from fedsim.cli.privacy_question import read_source
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.privacy.verification import verify
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.checkpoints import Checkpoints

CONFIG = RunConfig.parse(
    {
        "seed": 5,
        "rounds": 5,
        "partition": {"clients": 9, "max-examples": 90},
        "client": {"batch-size": 5},
        "cohort": {"name": "cyclic", "groups": 3},
        "mechanism": {"name": "clipping"},
        "noise": {"name": "banded", "multiplier": 6.0},
        "checkpoint": {"every": 2},
        "engine": {"device": "cpu"},
    }
)
DELTA = CONFIG.noise.delta
ALLOCATION = {
    "cohort.name": "allocation",
    "cohort.participations": 2,
    "cohort.groups": "",
    "cohort.rate": "",
}


def resumed(out: Path, **changes: object):
    return fedsim.run(RunConfig.load(out / "config.toml").replace(**changes), out=out, resume=True)


def model(out: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_file(out / "model.safetensors").items()}


@pytest.mark.spanning
@pytest.mark.parametrize("noise", ["banded", "blt", "lambda-cgd", "tree"])
@pytest.mark.parametrize("finished", [True, False])
def test_an_extended_run_is_the_run_that_was_planned_longer(noise, finished, tmp_path) -> None:
    config = CONFIG.replace(**{"noise.name": noise})
    if finished:
        fedsim.run(config, out=tmp_path / "run")
    else:
        with killed_in(4):
            fedsim.run(config, out=tmp_path / "run")
    began = RunConfig.load(tmp_path / "run" / "config.toml")
    longer = resumed(tmp_path / "run", rounds=8)
    # Its coefficients are those of the plan that it began with.
    planned = fedsim.run(began.replace(rounds=8), out=tmp_path / "planned")
    assert model(tmp_path / "run") == model(tmp_path / "planned")
    assert longer.privacy.epsilon == pytest.approx(planned.privacy.epsilon, rel=1e-9)
    assert longer.metrics[-1]["epsilon"] == longer.privacy.epsilon
    assert longer.metrics[-1]["epsilon-so-far"] == pytest.approx(longer.privacy.epsilon, rel=1e-9)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").epsilon(DELTA) == longer.privacy.epsilon
    source = read_source(tmp_path / "run", [], None)
    assert all(c.passed for c in verify(tmp_path / "run", DELTA, stopping=source.question.stopping))


@pytest.mark.parametrize("entropy", ["config", "system"])
def test_an_extended_run_that_is_killed_resumes_exactly(entropy, tmp_path) -> None:
    config = CONFIG.replace(**{"noise.entropy": entropy})
    for name in ("whole", "killed"):
        with killed_in(4):
            fedsim.run(config, out=tmp_path / name)
        if name == "whole":
            resumed(tmp_path / name, rounds=9)
            continue
        for round_number in (3, 6):  # the first round of the extension is made again, too
            with killed_in(round_number):
                resumed(tmp_path / name, rounds=9)
        resumed(tmp_path / name, rounds=9)
    ledgers = [Ledger.read(tmp_path / name / "ledger.jsonl") for name in ("whole", "killed")]
    if entropy == "config":
        assert model(tmp_path / "whole") == model(tmp_path / "killed")
        assert ledgers[0].heads == ledgers[1].heads
        return
    charged = [[entry.event for entry in ledger.charged if entry.event.count] for ledger in ledgers]
    # The plan, its extension once, and each round that was drawn again: 3 and 4 of the plan's own.
    names = [[event.law.name for event in events] for events in charged]
    assert names[0].count("extended") == names[1].count("extended") == 1
    assert len(charged[0]) < len(charged[1])
    assert all(set(events) == set(charged[0]) for events in charged)


def test_another_extension_of_a_round_that_was_lost_is_charged_beside(tmp_path) -> None:
    config = CONFIG.replace(**{"noise.entropy": "system"})
    with killed_in(4):
        fedsim.run(config, out=tmp_path)
    with killed_in(5):
        resumed(tmp_path, rounds=7)
    result = fedsim.run(
        RunConfig.load(tmp_path / "config.toml").replace(rounds=9), out=tmp_path, resume=True
    )
    assert result.ended == "finished"
    extensions = [
        entry.event.law.rounds
        for entry in Ledger.read(tmp_path / "ledger.jsonl").charged
        if entry.event.law.name == "extended" and entry.event.count
    ]
    assert extensions == [7, 9]


def test_a_run_with_private_evaluations_and_a_budget_is_extended_by_workers(tmp_path) -> None:
    evaluated = {
        "evaluate.private": True,
        "evaluate.multiplier": 6.0,
        "evaluate.clients-every": 2,
        "noise.max-epsilon": 6.0,
    }
    config = CONFIG.replace(**evaluated)
    fedsim.run(config, out=tmp_path / "run")
    began = RunConfig.load(tmp_path / "run" / "config.toml")
    longer = resumed(tmp_path / "run", **{"rounds": 8, "engine.workers": 2})
    planned = fedsim.run(began.replace(rounds=8), out=tmp_path / "planned")
    assert model(tmp_path / "run") == model(tmp_path / "planned")
    assert longer.privacy.epsilon == pytest.approx(planned.privacy.epsilon, rel=1e-9)
    with pytest.raises(FedsimError, match="it must be at least"):
        resumed(tmp_path / "run", **{"rounds": 30, "noise.max-epsilon": 1.0})


class Stops(Callback):
    def on_round(self, status: RunStatus) -> str | None:
        return "enough" if status.round == 3 else None


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"rounds": 6, "noise.max-epsilon": 0.1}, "it must be at least"),
        ({"noise.entropy": "system"}, {"rounds": 6}, "a secret that was removed after the last r"),
        ({"stop.callbacks": True}, {"rounds": 6}, "what it has released may decide when it ends"),
        ({}, {"rounds": 4}, "at least 5, the last round of the run"),
        (ALLOCATION, {"rounds": 6}, "rounds = 6; it must be 5, as it was"),
    ],
)
def test_what_cannot_be_extended_is_refused_and_left(before, now, said, tmp_path) -> None:
    fedsim.run(CONFIG.replace(**before), out=tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(FedsimError, match=said):
        resumed(tmp_path, **now)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    "cohort", [{}, {"cohort.name": "separated", "cohort.separation": 3, "cohort.groups": ""}]
)
def test_groups_in_turn_with_independent_noise_go_on_after_their_last_turn(cohort, tmp_path):
    independent = {"noise.name": "independent", "noise.bands": "", "rounds": 3, **cohort}
    config = CONFIG.replace(**independent)
    fedsim.run(config, out=tmp_path / "run")
    longer = resumed(tmp_path / "run", rounds=7)
    planned = fedsim.run(config.replace(rounds=7), out=tmp_path / "planned")
    assert model(tmp_path / "run") == model(tmp_path / "planned")
    assert longer.privacy.epsilon == planned.privacy.epsilon
    assert all(check.passed for check in verify(tmp_path / "run", DELTA))


def test_a_run_in_progress_is_not_made_shorter(tmp_path) -> None:
    with killed_in(4):
        fedsim.run(CONFIG, out=tmp_path)
    with pytest.raises(FedsimError, match="rounds = 3; it must be 5, as it was"):
        resumed(tmp_path, rounds=3)


def test_a_run_that_releases_have_ended_keeps_its_plan(tmp_path) -> None:
    fedsim.run(CONFIG, out=tmp_path, callbacks=[Stops()])
    with pytest.raises(FedsimError, match="what it has released may decide when it ends"):
        resumed(tmp_path, rounds=7)


def test_a_run_without_a_checkpoint_keeps_its_plan(tmp_path) -> None:
    with killed_in(1):
        fedsim.run(CONFIG, out=tmp_path)
    assert not Checkpoints(tmp_path / "checkpoint").rounds()
    with pytest.raises(FedsimError, match="before it had a checkpoint"):
        resumed(tmp_path, rounds=7)


def test_rounds_sampled_within_groups_are_added_group_by_group(tmp_path) -> None:
    config = CONFIG.replace(**{"cohort.rate": 0.5})
    fedsim.run(config, out=tmp_path / "run")
    began = RunConfig.load(tmp_path / "run" / "config.toml")
    longer = resumed(tmp_path / "run", rounds=8)
    planned = fedsim.run(began.replace(rounds=8), out=tmp_path / "planned")
    assert model(tmp_path / "run") == model(tmp_path / "planned")
    assert longer.privacy.epsilon == planned.privacy.epsilon
    rows = [list(csv.DictReader((tmp_path / n / "metrics.csv").open())) for n in ("run", "planned")]
    assert [row["epsilon"] for row in rows[0]] == [row["epsilon"] for row in rows[1]]


@pytest.mark.parametrize("more", [{}, {"rounds": 7}])
def test_a_run_whose_bands_were_chosen_resumes_from_the_config_that_left_them_to_a_rule(
    more: dict[str, int], tmp_path: Path
) -> None:
    left = {"noise.bands": "auto", "noise.multiplier": "", "noise.target-epsilon": 4.0}
    config = CONFIG.replace(**left)
    fedsim.run(config, out=tmp_path / "whole")
    with killed_in(3):
        fedsim.run(config, out=tmp_path / "run")
    result = fedsim.run(config.replace(**more), out=tmp_path / "run", resume=True)
    assert result.rounds == more.get("rounds", 5)
    if not more:
        assert model(tmp_path / "run") == model(tmp_path / "whole")
