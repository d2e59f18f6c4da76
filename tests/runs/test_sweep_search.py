from __future__ import annotations

import csv
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from left_runs import left_run

import fedsim
from fedsim import RunConfig
from fedsim.cli import main
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Ledger
from fedsim.reports.run_page import run_page
from fedsim.reports.seed_groups import SeedGroup
from fedsim.reports.sweep import best_setting, draw, over_seeds, read_runs, seeds_csv, to_csv
from fedsim.runs.callbacks import Measure
from fedsim.runs.directory import RunDirectory
from fedsim.runs.record import RunRecord
from fedsim.runs.resolve import resolve
from fedsim.runs.run_ledgers import RunLedgers, RunOutcome
from fedsim.runs.sweep import SweepRun, grid_runs, parse_axes, run_sweep
from fedsim.tasks.named_metrics import Accuracy

BASE = RunConfig().replace(
    **{"rounds": 6, "partition.clients": 10, "client.batch-size": 20, "data.validation": 0.2}
)
TOML = """
name = "small"
rounds = 4
[data]
validation = 0.2
[partition]
clients = 10
[client]
batch-size = 20
"""


def test_an_interrupted_sweep_writes_the_pages_of_finished_runs(
    tmp_path: Path,
) -> None:
    def ask(member, row):
        if row["round"] == member.point["rounds"] == 2:
            signal.raise_signal(signal.SIGINT)

    grid = grid_runs(BASE, parse_axes(["rounds=2,4", "client.batch-size=20,0"]))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(grid, tmp_path, ask)
    for member in grid:
        there = RunDirectory(tmp_path / member.label)
        begun, done = member.point["client.batch-size"] == 20, member.point["rounds"] == 2
        assert there.config.exists() == begun
        assert there.done.exists() == there.report.exists() == (begun and done)


def failing_at(number: int) -> Callable[..., object]:
    """`Accuracy.finish`, which raises when it is called for the ``number``-th time."""
    honest, calls = Accuracy.finish, 0

    def finish(self, state):
        nonlocal calls
        calls += 1
        if calls == number:
            raise ArithmeticError("no number")
        return honest(self, state)

    return finish


def test_a_run_whose_code_raises_fails_alone_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = grid_runs(BASE, parse_axes(["seed=1,2"]))
    with monkeypatch.context() as patched:
        patched.setattr(Accuracy, "finish", failing_at(4))
        outcomes = run_sweep(grid, tmp_path)
    assert sorted(outcome.ended for outcome in outcomes.values()) == ["failed", "finished"]
    assert "ArithmeticError: no number" in {outcome.why for outcome in outcomes.values()}
    again = run_sweep(grid, tmp_path)
    assert {outcome.ended for outcome in again.values()} == {"finished"}
    for number, member in enumerate(grid):
        fedsim.run(member.config, out=tmp_path / f"alone-{number}")
        models = [
            tmp_path / name / "model.safetensors" for name in (member.label, f"alone-{number}")
        ]
        assert models[0].read_bytes() == models[1].read_bytes()


MEASURE = Measure("accuracy", higher_is_better=True)


def record(
    lr: float, seed: int, test: float, validation: float | None, ended: Any = "finished"
) -> RunRecord:
    row = {"round": 4, "test-accuracy": test, "test-loss": 1 - test}
    row |= {} if validation is None else {"validation-accuracy": validation}
    config = {"client.lr": lr, "seed": seed}
    return RunRecord(Path("run"), config, [row], RunLedgers(outcome=RunOutcome(ended)))


def groups(*records: RunRecord) -> list[SeedGroup]:
    grid = [SweepRun(dict(each.config), BASE) for each in records]
    return over_seeds(grid, records)


def test_seeds_are_a_mean_and_the_standard_deviation_of_one_seed() -> None:
    settings = groups(record(0.1, 1, 0.5, 0.6), record(0.1, 2, 0.7, 0.8), record(0.2, 1, 0.9, 0.1))
    assert [setting.point for setting in settings] == [{"client.lr": 0.1}, {"client.lr": 0.2}]
    spread = settings[0].spread("test-accuracy", recent=True)
    assert spread is not None
    assert (spread.mean, spread.count) == (pytest.approx(0.6), 2)
    assert spread.std == pytest.approx(math.sqrt(0.02))
    alone = settings[1].spread("test-accuracy", recent=True)
    assert alone is not None
    assert alone.std is None
    assert (spread.text("accuracy"), alone.text("accuracy")) == ("60.00 ± 14.14 %", "90.00 %")
    rows = list(csv.DictReader(seeds_csv(settings, MEASURE).splitlines()))
    assert float(rows[0]["test-accuracy-last-five-std"]) == pytest.approx(math.sqrt(0.02))
    assert rows[1]["test-accuracy-last-five-std"] == ""
    figure = draw(settings, MEASURE, "client.lr", "picture")
    assert "2 seeds, one standard deviation to either side" in figure.axes[0].get_title("left")


def test_a_key_that_the_config_lacks_may_be_an_axis_of_quoted_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(
        f'{TOML}\n[model]\nname = "mlp"\n'.replace("rounds = 4", "rounds = 1")
    )
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "c.toml", "--over", "model.widths='16,8','4'", "--out", "out"])
    assert ended.value.code in (0, None)
    rows = list(csv.DictReader(Path("out/sweep.csv").read_text().splitlines()))
    assert [row["model.widths"] for row in rows] == ["16,8", "4"]


def test_the_untrained_model_is_not_among_the_last_five_evaluations(tmp_path: Path) -> None:
    accuracies = [0.1, 0.9, 0.9, 0.5, 0.5, 0.5]
    directory = left_run(
        tmp_path / "run",
        [{"round": k, "test-accuracy": value} for k, value in enumerate(accuracies[:3])],
    )

    def recent() -> float | None:
        return RunRecord.read(directory).recent("test-accuracy")

    assert recent() == pytest.approx(0.9)
    rows = [{"round": k, "test-accuracy": value} for k, value in enumerate(accuracies)]
    left_run(directory, rows)
    assert recent() == pytest.approx(0.66)
    page = run_page(RunRecord.read(directory))
    assert "last five 66.00 %" in page
    left_run(directory, rows[:5])
    assert "last five" not in run_page(RunRecord.read(directory))


@pytest.mark.parametrize("rounds", [4, 5])
def test_a_sweep_says_where_its_last_five_are_fewer(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(TOML.replace("rounds = 4", f"rounds = {rounds}"))
    with pytest.raises(SystemExit):
        main(["sweep", "c.toml", "--over", "client.lr=0.1,0.2", "--out", "out"])
    note = "last five: mean of five evaluations, or of all if there are fewer"
    assert (note in " ".join(capsys.readouterr().out.split())) is (rounds < 5)


def test_the_best_setting_is_chosen_by_validation_and_never_by_the_test_set() -> None:
    good, lucky = record(0.1, 1, 0.5, 0.9), record(0.2, 1, 0.99, 0.2)
    best = best_setting(groups(lucky, good), MEASURE)
    assert best is not None
    assert best.point == {"client.lr": 0.1}
    # One of whose seeds some failed, or that has no number, is not chosen.
    bad = [
        record(0.3, 1, 0.9, 0.95),
        record(0.3, 2, 0.9, 0.95, "failed"),
        record(0.4, 1, 0.9, math.nan),
    ]
    best = best_setting(groups(lucky, good, *bad), MEASURE)
    assert best is not None
    assert best.point == {"client.lr": 0.1}
    assert best_setting(groups(record(0.1, 1, 0.5, None)), MEASURE) is None


def test_a_run_that_failed_without_a_directory_has_a_line_of_its_own(tmp_path: Path) -> None:
    grid = grid_runs(BASE, parse_axes(["client.lr=0.1,0.2"]))
    left_run(tmp_path / grid[0].label, [{"round": 1, "test-accuracy": 0.5}])
    outcomes = {
        grid[0].label: RunOutcome("finished"),
        grid[1].label: RunOutcome("failed", "It raised."),
    }
    rows = csv.DictReader(to_csv(grid, read_runs(grid, tmp_path, outcomes), MEASURE).splitlines())
    ends = [(row["outcome"], row["reason"], row["rounds"], row["test-accuracy"]) for row in rows]
    assert ends == [("finished", "", "1", "0.5"), ("failed", "It raised.", "0", "nan")]


def test_a_sweep_with_failed_runs_exits_with_status_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(TOML)

    def status(*overs: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["sweep", "c.toml", *overs])
        return int(str(ended.value.code))

    assert status("--over", "client.lr=0.1,0.3", "--over", "seed=1,2") == 0
    told = capsys.readouterr().out
    assert "±" in told
    assert "Best by validation-accuracy" in told
    assert status("--over", "client.lr=0.1,1e6", "--out", "some") == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 runs failed" in told
    assert "3 rounds in a row" in told
    rows = list(csv.DictReader(Path("some/sweep.csv").read_text().splitlines()))
    assert [row["outcome"] for row in rows] == ["finished", "failed"]
    assert status("--over", "client.lr=log(0.01,1)", "--out", "none") == 2


def test_the_cost_of_choosing_counts_releases_of_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    private = 'rounds = 2\n[partition]\nclients = 10\n[mechanism]\nname = "clipping"\n'
    Path("c.toml").write_text(f"{private}[noise]\nmultiplier = 2.0\n")
    # Each tried out and at its start, the first one's round 1, and then the second one's.
    monkeypatch.setattr(Accuracy, "finish", failing_at(6))
    with pytest.raises(SystemExit):
        main(["sweep", "c.toml", "--over", "client.lr=0.1,0.2", "--out", "out"])
    ledgers = sorted(Path("out").glob("*/ledger.jsonl"))
    released = [len(Ledger.read(path).entries) for path in ledgers]
    assert released == [2, 1]
    told = " ".join(capsys.readouterr().out.split())
    # Both plans of two rounds count, whatever was made of them.
    event = resolve(RunConfig.load(Path("c.toml"))).plan.event()
    assert f"epsilon = {Accountant([event.times(4)]).epsilon(1e-5):.4g}" in told


def test_a_function_of_the_users_decides_only_if_it_says_what_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a mean nobody can tell whether it is an error or a score: the worst run was chosen.
    monkeypatch.chdir(tmp_path)
    score = "def hits{0}(z, y, k=1):\n    return (z.topk(k).indices == y[:, None]).any(1).float()\n"
    (tmp_path / "scores_of_mine.py").write_text(
        score.format("") + score.format("_said") + "hits_said.higher_is_better = True\n"
    )
    config = BASE.replace(**{"checkpoint.every": 1, "client.lr": 0.3})
    own = {name: f"scores_of_mine:{name}(k=2)" for name in ("hits", "hits_said")}
    silent = config.replace(**{"task.metrics": own["hits"]})
    for key in ("checkpoint.best", "stop.metric"):
        with pytest.raises(FedsimError, match=f"{key} = 'validation-hits-2'.*higher_is_better"):
            fedsim.run(silent.replace(**{key: "validation-hits-2"}))
    saying = config.replace(**{"task.metrics": own["hits_said"]})
    best = {"checkpoint.best": "validation-hits_said-2"}
    fedsim.run(saying.replace(**best), out=tmp_path / "c")
    rows = fedsim.load(tmp_path / "c").metrics
    values = [row["validation-hits_said-2"] for row in rows[1:]]
    assert (tmp_path / "c/checkpoint" / f"best-{1 + values.index(max(values))}").exists()


def test_no_best_setting_is_named_by_a_metric_that_does_not_say_what_is_better() -> None:
    settings = groups(record(0.1, 1, 0.8, 0.9), record(0.2, 1, 0.9, 0.8))
    for measure, best in ((MEASURE, {"client.lr": 0.1}), (Measure("accuracy", None), None)):
        named = best_setting(settings, measure)
        assert (named and named.point) == best


def test_a_best_setting_within_the_spread_over_seeds_is_doubted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(
        "rounds = 2\ndata.validation = 0.2\npartition.clients = 4\ntask.metrics = 'accuracy'\n"
    )
    monkeypatch.chdir(tmp_path)
    same, far = "client.lr=0.1,0.1001", "client.lr=0.001,0.5"
    for over, seeds, expected in (
        (same, "seed=1,2", "Within one standard deviation of the difference: client.lr"),
        (same, "seed=1", "One seed each"),
        (far, "seed=1,2", ""),
    ):
        with pytest.raises(SystemExit):
            main(["sweep", "config.toml", "--over", over, "--over", seeds, "--out", over + seeds])
        said = " ".join(capsys.readouterr().out.split())
        assert "Best by validation-accuracy" in said
        assert expected in said
        assert expected or "deviation of the difference" not in said
        assert (tmp_path / f"{over}{seeds}" / "sweep.pdf").read_bytes().startswith(b"%PDF")
        page = (tmp_path / f"{over}{seeds}" / "sweep.html").read_text()
        assert all(f"client.lr = {value}" in page for value in over.partition("=")[2].split(","))
