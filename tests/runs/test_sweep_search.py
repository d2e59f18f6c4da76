from __future__ import annotations

import csv
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from left_runs import left_run

import fedsim
from fedsim import RunConfig
from fedsim.cli import main
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.privacy.claims import Stopping
from fedsim.reports.run_page import run_page
from fedsim.reports.seed_groups import SeedGroup
from fedsim.reports.sweep import best_of, draw, joint_cost, over_seeds, read_runs, seeds_csv, to_csv
from fedsim.runs.callbacks import Measure
from fedsim.runs.directory import RunDirectory
from fedsim.runs.record import RunRecord
from fedsim.runs.run_ledgers import Ending, RunLedgers
from fedsim.runs.sweep import Halving, Span, SweepRun, grid_runs, parse_axes, random_runs, run_sweep
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


def test_sampled_points_follow_from_the_seed_and_more_points_keep_the_first() -> None:
    axes = parse_axes(["client.lr=log(0.01,1)", "client.batch-size=5,10,20", "seed=1,2"])
    points = [member.point for member in random_runs(BASE, axes, 6)]
    assert [member.point for member in random_runs(BASE, axes, 9)][:12] == points
    assert len({point["client.lr"] for point in points}) == 6
    assert all(0.01 <= float(point["client.lr"]) <= 1 for point in points)
    # Both seeds run at each point.
    assert [point["seed"] for point in points] == [1, 2] * 6
    fewer = random_runs(BASE, {"client.lr": axes["client.lr"]}, 6)
    assert [m.point["client.lr"] for m in fewer] == [p["client.lr"] for p in points[::2]]
    other = random_runs(BASE.replace(seed=2), axes, 6)
    assert other[0].point["client.lr"] != points[0]["client.lr"]


def test_a_log_span_gives_every_order_of_magnitude_as_often() -> None:
    generator = np.random.default_rng(1)
    span = Span("log", 1e-4, 1.0)
    decades = [math.floor(math.log10(span.draw(generator))) for _ in range(400)]
    # Each decade has 100 of 400 with a standard deviation of 8.7.
    assert all(60 <= decades.count(decade) <= 140 for decade in (-4, -3, -2, -1))


def test_spans_that_make_no_sense_are_refused() -> None:
    for bad in ("log(0,1)", "uniform(2,1)", "whole(0.5,3)", "log(a,b)", "uniform(1,1)"):
        with pytest.raises(FedsimError, match=r"--over .* is not a range"):
            parse_axes([f"client.lr={bad}"])
    with pytest.raises(FedsimError, match="--random"):
        grid_runs(BASE, parse_axes(["client.lr=log(0.1,1)"]))
    with pytest.raises(FedsimError, match="seed is a range"):
        random_runs(BASE, parse_axes(["seed=whole(1,9)"]), 3)


@pytest.mark.parametrize("over", ["seed=1,2,1", "client.batch-size=5,10,5"])
def test_a_value_that_is_twice_on_a_random_axis_is_refused(over: str) -> None:
    axes = parse_axes(["client.lr=log(0.01,1)", over])
    with pytest.raises(FedsimError, match=f"^--over {over.partition('=')[0]} has a value twice"):
        random_runs(BASE, axes, 6)


RATES = parse_axes(["client.lr=0.001,0.3,0.01,0.1"])


def test_halving_continues_the_best_on_validation_examples_to_the_same_bytes_as_alone(
    tmp_path: Path,
) -> None:
    grid = grid_runs(BASE, RATES)
    outcomes = run_sweep(grid, tmp_path / "halved", halving=Halving(2, 2))
    run_sweep(grid, tmp_path / "all")
    rows = [RunDirectory(tmp_path / "all" / member.label).metrics_file.rows() for member in grid]
    going, expected = list(range(4)), [0] * 4
    for rung in (2, 4, 6):
        for index in going:
            expected[index] = rung
        scores = {
            i: sum(row["validation-accuracy"] for row in rows[i][max(1, rung - 4) : rung + 1])
            / min(rung, 5)
            for i in going
        }
        going = sorted(going, key=lambda i: -scores[i])[: max(len(going) // 2, 1)]
    went = [
        RunDirectory(tmp_path / "halved" / m.label).metrics_file.rows()[-1]["round"] for m in grid
    ]
    assert went == expected
    ended = [outcomes[member.label].ended for member in grid]
    assert sorted(ended) == ["dropped", "dropped", "dropped", "finished"]
    best = grid[ended.index("finished")].label
    models = [RunDirectory(tmp_path / name / best).model for name in ("halved", "all")]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.slow
def test_the_page_of_a_dropped_run_says_so_and_why(tmp_path: Path) -> None:
    grid = grid_runs(BASE, RATES)
    outcomes = run_sweep(grid, tmp_path, halving=Halving(2, 2))
    scores = {}
    for member in grid:
        directory = RunDirectory(tmp_path / member.label)
        outcome = outcomes[member.label]
        if outcome.ended != "dropped":
            continue
        last = int(directory.metrics_file.rows()[-1]["round"])
        scores[last] = np.mean(
            [row["validation-accuracy"] for row in directory.metrics_file.rows()[-min(last, 5) :]]
        )
        told = json.loads(directory.summary.read_text())
        assert (told["ended"], told["why"]) == ("dropped", outcome.why)
        assert f"Dropped after round {last}: its setting had validation-accuracy" in outcome.why
        assert f"{scores[last]:.4g}; " in outcome.why or last == 2
        page = directory.report.read_text()
        assert outcome.why in page
        assert "Interrupted" not in page
    assert set(scores) == {2, 4}
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("report.html")}
    assert run_sweep(grid, tmp_path, halving=Halving(2, 2)) == outcomes
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("report.html")} == before


def test_halving_ends_when_every_run_has_failed(tmp_path: Path) -> None:
    grid = grid_runs(BASE.replace(rounds=12), {"client.lr": [1e6, 2e6]})
    outcomes = run_sweep(grid, tmp_path, halving=Halving(2, 4))
    assert {outcome.ended for outcome in outcomes.values()} == {"failed"}


@pytest.mark.slow
def test_an_interrupted_halving_resumes_to_the_same_outcomes(tmp_path: Path) -> None:
    grid = grid_runs(BASE, parse_axes(["client.lr=0.001,0.3,1e6,0.1", "seed=1,2"]))
    whole = run_sweep(grid, tmp_path / "whole", halving=Halving(2, 3))

    def stop(member, row):
        if row["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(grid, tmp_path / "cut", stop, Halving(2, 3))
    assert run_sweep(grid, tmp_path / "cut", halving=Halving(2, 3)) == whole
    for member in grid:
        cut, other = (RunDirectory(tmp_path / name / member.label) for name in ("cut", "whole"))
        assert cut.model.read_bytes() == other.model.read_bytes()
        assert len(cut.metrics_file.rows()) == len(other.metrics_file.rows())
    # The rate at which every client's update overflows has failed, and is behind all others.
    assert {whole[m.label].ended for m in grid if m.point["client.lr"] == 1e6} == {"failed"}
    # Two settings of four went on, with both of their seeds.
    assert sum(outcome.ended == "finished" for outcome in whole.values()) == 4


@pytest.mark.slow
def test_a_finished_halving_whose_best_run_failed_repeats_nothing(
    tmp_path: Path,
) -> None:
    # From round 5 on its rate is so high that nobody's update is finite.
    schedules = ["staircase(decay=1e30,length=4)", "constant"]
    base = BASE.replace(**{"rounds": 8, "client.lr": 0.3})
    axes = {"client.schedule": schedules, "client.batch-size": [20, 0]}
    grid = grid_runs(base, axes)
    outcomes = run_sweep(grid, tmp_path, halving=Halving(4, 4))
    ended = {label: outcome.ended for label, outcome in outcomes.items()}
    assert ended[grid[0].label] == "failed"
    assert sorted(ended.values()) == ["dropped", "dropped", "dropped", "failed"]
    assert run_sweep(grid, tmp_path, halving=Halving(4, 4)) == outcomes


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


def test_halving_without_validation_or_checkpoints_is_refused(tmp_path: Path) -> None:
    for changes, rung, words in (
        ({"data.validation": 0.0}, 2, r"test examples must not choose|data\.validation"),
        ({"checkpoint.every": 0}, 2, r"checkpoint\.every = 0"),
        ({"evaluate.every": 3}, 2, r"evaluate\.every = 3"),
        ({}, 6, r"--first-rounds = 6"),
    ):
        with pytest.raises(FedsimError, match=words):
            run_sweep(grid_runs(BASE.replace(**changes), RATES), tmp_path, halving=Halving(2, rung))
    with pytest.raises(FedsimError, match="same rounds"):
        run_sweep(grid_runs(BASE, {"rounds": [4, 6]}), tmp_path, halving=Halving(2, 2))
    assert not any(tmp_path.iterdir())


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
    return RunRecord(Path("run"), config, [row], RunLedgers(ending=Ending(ended)))


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
    assert "2 seeds; bands: one standard deviation" in figure.axes[0].get_title("left")


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
    best = best_of(groups(lucky, good), MEASURE)
    assert best is not None
    assert best.point == {"client.lr": 0.1}
    # One of whose seeds some failed, or that has no number, is not chosen.
    bad = [
        record(0.3, 1, 0.9, 0.95),
        record(0.3, 2, 0.9, 0.95, "failed"),
        record(0.4, 1, 0.9, math.nan),
    ]
    best = best_of(groups(lucky, good, *bad), MEASURE)
    assert best is not None
    assert best.point == {"client.lr": 0.1}
    assert best_of(groups(record(0.1, 1, 0.5, None)), MEASURE) is None


def test_a_run_that_failed_without_a_directory_has_a_line_of_its_own(tmp_path: Path) -> None:
    grid = grid_runs(BASE, parse_axes(["client.lr=0.1,0.2"]))
    left_run(tmp_path / grid[0].label, [{"round": 1, "test-accuracy": 0.5}])
    outcomes = {grid[0].label: Ending("finished"), grid[1].label: Ending("failed", "It raised.")}
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
    halving = ("--random", "4", "--halving", "2", "--first-rounds", "1", "--out", "halved")
    assert status("--over", "client.lr=log(0.01,1)", *halving) == 0
    rows = list(csv.DictReader(Path("halved/sweep.csv").read_text().splitlines()))
    assert sorted(int(row["rounds"]) for row in rows) == [1, 1, 2, 4]
    assert status("--over", "client.lr=log(0.01,1)", "--out", "none") == 2
    assert status("--over", "client.lr=0.1,0.2", "--first-rounds", "2", "--out", "none") == 2


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
    released = [len(Ledger.read(path).charged) for path in ledgers]
    assert released == [2, 1]
    told = " ".join(capsys.readouterr().out.split())
    together = joint_cost(dict.fromkeys(ledgers, Stopping(rounds_left=2)), 1e-5)
    assert f"epsilon = {together.epsilon:.4g}" in told


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
    rates = ["client.lr=0.3,0.00001"]
    sentence = "the column that --halving compares = 'validation-hits-2'; this metric"
    with pytest.raises(FedsimError, match=f"{sentence}.*higher_is_better"):
        run_sweep(grid_runs(silent, parse_axes(rates)), tmp_path / "a", halving=Halving(2, 2))
    saying = config.replace(**{"task.metrics": own["hits_said"]})
    grid = grid_runs(saying, parse_axes(rates))
    outcomes = run_sweep(grid, tmp_path / "b", halving=Halving(2, 2))
    assert [outcomes[member.label].ended for member in grid] == ["finished", "dropped"]
    best = {"checkpoint.best": "validation-hits_said-2"}
    fedsim.run(saying.replace(**best), out=tmp_path / "c")
    rows = fedsim.load(tmp_path / "c").metrics
    values = [row["validation-hits_said-2"] for row in rows[1:]]
    assert (tmp_path / "c/checkpoint" / f"best-{1 + values.index(max(values))}").exists()


def test_no_best_setting_is_named_by_a_metric_that_does_not_say_what_is_better() -> None:
    settings = groups(record(0.1, 1, 0.8, 0.9), record(0.2, 1, 0.9, 0.8))
    for measure, best in ((MEASURE, {"client.lr": 0.1}), (Measure("accuracy", None), None)):
        named = best_of(settings, measure)
        assert (named and named.point) == best
