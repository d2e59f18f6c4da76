"""`fedsim sweep --select`: one run is published, and its ledger has what the selection costs."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import fedsim
from fedsim import RunConfig
from fedsim.cli.app import app
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Ledger
from fedsim.privacy.laws.selection import Selection
from fedsim.runs.directory import RunDirectory
from fedsim.runs.factories import release_plan
from fedsim.runs.sweep import RandomStopping, SweepRun, grid_runs, parse_axes

BASE = RunConfig.parse(
    {
        "rounds": 3,
        "partition": {"clients": 12, "max-examples": 240},
        "client": {"batch-size": 5},
        "cohort": {"name": "poisson", "rate": 0.5},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 2.0, "entropy": "system"},
        "data": {"validation": 0.2},
        "engine": {"device": "cpu"},
    }
)
TEXTS = (".html", ".json", ".jsonl", ".toml", ".csv")
RATES = ["client.lr=0.01,0.1,0.5"]


def runs(*axes: str, config: RunConfig = BASE) -> list[SweepRun]:
    return grid_runs(config, parse_axes(list(axes) or RATES))


class Drawn(Selection):
    """Makes so many runs."""

    def draw(self, generator) -> int:
        return int(self.mean)


def test_the_best_run_is_there_alone_and_charged_for_the_selection(tmp_path) -> None:
    selected = RandomStopping(Drawn("logarithmic", 4.0)).run(runs(), tmp_path / "sweep")
    assert selected is not None
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["selected"]
    config = RunConfig.load(selected / "config.toml")
    event = release_plan(config).event()
    assert (event.law.name, event.law.rounds, event.count) == ("selection", 3, 1)
    ledger = Ledger.read(selected / "ledger.jsonl")
    assert [entry.event.count for entry in ledger.entries] == [1, 0, 0]
    delta = config.noise.delta
    assert ledger.epsilon(delta) == pytest.approx(Accountant([event]).epsilon(delta))
    alone = release_plan(BASE).epsilon(delta)
    four = Accountant([release_plan(BASE).event().times(12)]).epsilon(delta)
    assert alone < ledger.epsilon(delta)
    assert "the best of a random number of such runs was published, 4 on average" in str(
        ledger.statement(delta)
    )
    assert four > alone
    result = CliRunner().invoke(app, ["privacy", str(selected), "--verify"])
    assert result.exit_code == 0, result.output
    # Which of the draws it was is no part of what the selection's cost covers.
    texts = [path.read_text() for path in selected.rglob("*") if path.suffix in TEXTS]
    assert not any("draw=" in text or "/.selection" in text for text in texts)
    assert str(selected / "ledger.jsonl") in (selected / "report.html").read_text()
    with pytest.raises(FedsimError, match="cannot be resumed"):
        RandomStopping(Drawn("logarithmic", 4.0)).run(runs(), tmp_path / "sweep")


def test_the_best_by_validation_is_kept(tmp_path, monkeypatch) -> None:
    seen: list[float] = []
    rows = type(RunDirectory(tmp_path).metrics_file).rows

    def watched(file):
        found = rows(file)
        seen.append(found[-1]["validation-accuracy"])
        return found

    monkeypatch.setattr("fedsim.runs.metrics.MetricsFile.rows", watched)
    selected = RandomStopping(Drawn("poisson", 5.0)).run(runs(), tmp_path / "sweep")
    best = rows(RunDirectory(selected).metrics_file)[-1]["validation-accuracy"]
    assert len(seen) >= 5
    assert best == max(seen)


def test_no_run_publishes_nothing(tmp_path) -> None:
    class Nothing(Selection):
        def draw(self, generator) -> int:
            return 0

    assert RandomStopping(Nothing("poisson", 2.0)).run(runs(), tmp_path / "sweep") is None
    assert list((tmp_path / "sweep").iterdir()) == []


def test_an_interrupted_selection_leaves_nothing(tmp_path, monkeypatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsim.runs.sweep.selection.run_sweep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RandomStopping(Drawn("geometric", 3.0)).run(runs(), tmp_path / "sweep")
    assert list((tmp_path / "sweep").iterdir()) == []


@pytest.mark.parametrize(
    ("axes", "changes", "said"),
    [
        (RATES, {"noise.entropy": "config"}, "noise.entropy = 'config'"),
        (RATES, {"noise.multiplier": 0.0}, "private at client level only"),
        (RATES, {"data.validation": 0.0}, r"--select compares runs by .* set data\.validation"),
        (["noise.multiplier=1,2"], {}, "runs that cost the same"),
        (["seed=1,2"], {}, "runs that cost the same and have the same clients"),
        (["rounds=2,3"], {}, "runs that cost the same"),
        (["partition.name=iid,shards"], {}, "have the same clients"),
        (["data.validation=0.1,0.2"], {}, "have the same clients"),
        (RATES, {"log.to": "tensorboard,mlflow"}, "trackers show all runs"),
    ],
)
def test_runs_that_cannot_be_selected_among_are_refused(axes, changes, said, tmp_path) -> None:
    selection = RandomStopping(Selection("geometric", 3.0))
    with pytest.raises(FedsimError, match=said):
        selection.run(runs(*axes, config=BASE.replace(**changes)), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_the_command_says_nothing_of_how_many_there_were(tmp_path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(BASE.to_toml())
    command = ["sweep", str(path), "--over", RATES[0], "--select", "random-stopping"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "A Poisson number of runs, 3 on average" in " ".join(result.output.split())
    alone = [path for path in command if path not in ("--select", "random-stopping")]
    for wrong, said in (
        ([*command, "--halving", "2"], "--halving is 2; it must be left out with --select"),
        ([*command[:-1], "foo"], "--select is 'foo'; it must be 'random-stopping'."),
        ([*command, "--select-mean", "0"], "--select-mean"),
        ([*alone, "--select-mean", "3"], "--select-mean = 3.0; it belongs to --select."),
        ([*alone, "--select-number", "poisson"], "--select-number = poisson; it belongs to"),
        ([*command, "--set", "noise.entropy=config"], "noise.entropy = 'config'; with --select"),
    ):
        result = CliRunner().invoke(app, [*wrong, "--out", str(tmp_path / "no")])
        assert said in str(result.exception)
        assert result.output == ""


def test_a_resumed_run_keeps_the_selection_that_it_was_charged_for(tmp_path) -> None:
    config = BASE.replace(**{"privacy.selection": "geometric", "privacy.selection-mean": 3.0})
    fedsim.run(config, out=tmp_path / "run")
    for change in ({"privacy.selection": ""}, {"privacy.selection-mean": 2.0}):
        with pytest.raises(FedsimError, match=f"{next(iter(change))} = "):
            fedsim.run(config.replace(**change), out=tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_target_holds_for_the_run_that_is_selected() -> None:
    target = {"noise.multiplier": "", "noise.target-epsilon": 4.0}
    selected = {"privacy.selection": "logarithmic", "privacy.selection-mean": 10.0}
    alone, best = (release_plan(BASE.replace(**target, **keys)) for keys in ({}, selected))
    assert best.noise.multiplier > 1.1 * alone.noise.multiplier
    assert 3.99 < best.epsilon(BASE.noise.delta) <= 4.0
