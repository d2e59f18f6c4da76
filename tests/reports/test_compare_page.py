from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from left_runs import left_run

from fedsim.errors import FedsimError
from fedsim.reports.compare_page import compare_page, grouped
from fedsim.runs.record import RunRecord, read_all
from fedsim.runs.run_ledgers import RunLedgers, RunOutcome


def records(tmp_path: Path, *runs: dict) -> list[RunRecord]:
    read = []
    for number, run in enumerate(runs):
        rows = [
            {"round": k, "test-accuracy": run.get("reached", 0.5) * k, "seconds": 1.0}
            for k in range(2)
        ]
        settings = {key: value for key, value in run.items() if key != "reached"}
        directory = left_run(tmp_path / f"run-{number}", rows, **settings)
        read.append(RunRecord.read(directory, RunLedgers()))
    return read


def test_runs_that_differ_in_seeds_and_places_only_stand_together(tmp_path: Path) -> None:
    runs = records(
        tmp_path,
        {"seed": 1, "reached": 0.9},
        {"seed": 2, "reached": 0.7, "data.dir": "elsewhere", "engine.timeout": 9.0},
        {"seed": 1, "reached": 0.3, "client.lr": 0.7},
    )
    both, other = grouped(runs)
    assert (both.label, other.label) == ("client.lr 0.1", "client.lr 0.7")
    line = both.mean_curve("test-accuracy", "x")
    assert line.y[1] == pytest.approx(0.8)
    assert line.high[1] - line.y[1] == pytest.approx(statistics.stdev([0.9, 0.7]))
    page = compare_page(runs)
    assert "80.00 ± 14.14 %" in page
    assert "standard deviation over seeds" in page


def test_settings_are_shown_as_configs_write_them_and_only_those_that_differ(
    tmp_path: Path,
) -> None:
    # A model of the user's own has a table of options, though an empty one.
    runs = records(tmp_path, {"model.fix": True}, {"model.name": "mine:Net"})
    own = {"model.fix": False, "model.name": "mine:Net"}
    points = [dict(group.point) for group in grouped(runs)]
    assert points[0].keys() == {*own, "model.bias"}
    assert points[1] == own
    page = compare_page(runs)
    assert ">true<" in page
    assert "True" not in page


def test_means_are_of_runs_that_have_ended_where_there_are_any(tmp_path: Path) -> None:
    runs = records(
        tmp_path,
        {"seed": 1, "reached": 0.9},
        {"seed": 2, "reached": 0.7},
        {"seed": 3, "reached": 0.1},
        {"seed": 4, "reached": 0.3, "client.lr": 0.7},
    )
    ends = ("finished", "stopped", "failed", "interrupted")
    runs = [
        replace(run, ledgers=replace(run.ledgers, outcome=RunOutcome(end)))
        for run, end in zip(runs, ends, strict=True)
    ]
    page = compare_page(runs)
    results, every_run = page.split("Every run</h2>")
    assert "80.00 ± 14.14 %" in results
    assert "30.00 %" in results, "an unfinished run alone in its config"
    assert "10.00 %" not in results
    assert "1 run that failed" in results
    for shown in ("10.00 %", "finished", "stopped", "failed", "interrupted"):
        assert shown in every_run


def test_runs_of_other_objects_stand_apart_and_are_named(tmp_path: Path) -> None:
    runs = records(
        tmp_path,
        {"seed": 1, "objects": "model=Linear 1f09a2c4"},
        {"seed": 2, "objects": "model=Linear 1f09a2c4"},
        {"seed": 1, "objects": "model=Sequential 00ab12cd"},
        {"seed": 1},
        {"seed": 1},
    )
    for run in runs[3:]:  # of an earlier version: what they had is not known
        (run.path / "summary.json").write_text('{"format": 1, "objects": ["model"]}')
    runs = read_all([run.path for run in runs[:4]])
    linear, other, unknown = grouped(runs)
    assert [len(group.records) for group in (linear, other, unknown)] == [2, 1, 1]
    assert linear.label == "objects model=Linear 1f09a2c4"
    assert len(grouped(read_all([tmp_path]))) == 4
    assert "Objects from Python are compared by class" in compare_page(runs)


def test_runs_of_one_seed_are_called_no_replicates(tmp_path: Path) -> None:
    same = records(tmp_path, {"seed": 1, "reached": 0.9}, {"seed": 1, "reached": 0.7})
    page = compare_page(same)
    assert "are not replicates" in page
    assert "over seeds" not in page
    seeds = records(tmp_path / "other", {"seed": 1}, {"seed": 2})
    assert "not replicates" not in compare_page(seeds)
    private = {"mechanism.name": "clipping", "noise.multiplier": 1.0, "noise.entropy": "system"}
    assert "not replicates" not in compare_page(records(tmp_path / "system", private, private))


def test_a_single_run_has_no_deviation(tmp_path: Path) -> None:
    (group,) = grouped(records(tmp_path, {"seed": 1}))
    assert not group.mean_curve("test-accuracy", "x").low
    assert "±" not in compare_page(group.records)
    assert "1 runs" not in compare_page(group.records[:1])


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    run = left_run(tmp_path / "run", [{"round": 0, "test-loss": 1.0}])
    assert len(read_all([run, tmp_path / "." / "run", tmp_path])) == 1


def test_members_of_a_sweep_are_read(tmp_path: Path) -> None:
    for seed in (1, 2):
        left_run(tmp_path / "sweep" / f"seed={seed}", [{"round": 0, "test-loss": 1.0}], seed=seed)
    assert [record.config["seed"] for record in read_all([tmp_path / "sweep"])] == [1, 2]
    with pytest.raises(FedsimError, match="contains neither a run"):
        read_all([tmp_path / "sweep" / "seed=1" / "nothing"])


def test_runs_of_other_tasks_have_gaps(tmp_path: Path) -> None:
    first = left_run(tmp_path / "a", [{"round": 1, "test-loss": 1.0, "test-accuracy": 0.5}])
    other = left_run(tmp_path / "b", [{"round": 1, "test-loss": "nan", "test-rmse": 2.5}], rounds=3)
    page = compare_page(read_all([first, other]))
    assert "RMSE" in page
    assert "–" in page
    assert "Of rounds 10 alone." in page  # its accuracy
    assert "Of rounds 3 alone." in page  # the other's RMSE


@pytest.mark.slow
def test_two_hundred_runs_make_a_page_of_a_few_curves(tmp_path: Path) -> None:
    runs = records(tmp_path, *({"client.lr": 0.01 * (k + 1), "seed": 1} for k in range(200)))
    page = compare_page(runs)
    assert "The best 8 of 200." in page
    assert page.count("client.lr 0.01<") >= 1
    assert len(page) < 400_000
    assert len({group.label for group in grouped(runs)}) == 200


def test_numbers_that_are_not_finite_have_no_deviation(tmp_path: Path) -> None:
    first = left_run(tmp_path / "a", [{"round": 1, "test-loss": math.nan}], seed=1)
    other = left_run(tmp_path / "b", [{"round": 1, "test-loss": 1.0}], seed=2)
    (group,) = grouped(read_all([first, other]))
    assert all(math.isnan(value) for value in group.mean_curve("test-loss", "x").low)
    spread = group.spread("test-loss")
    assert spread is not None
    assert spread.text("loss") == "–"
    compare_page(group.records)


def test_a_run_that_diverges_is_not_shown_with_an_earlier_value(tmp_path: Path) -> None:
    rows = [{"round": k, "test-loss": value} for k, value in enumerate((0.75, 0.25, math.nan))]
    diverged = left_run(tmp_path / "a", rows, **{"client.lr": 9.0})
    other = left_run(tmp_path / "b", [{"round": 2, "test-loss": 0.5}])
    page = compare_page(read_all([diverged, other]))
    results = page.partition("Results")[2].partition("Curves")[0]
    assert "0.25" not in results
    assert "In 1 run the last value of a metric is not finite" in results
    assert "is not finite" not in compare_page(read_all([other]))


@pytest.mark.parametrize(
    ("simulated", "declared", "marks"),
    [
        (0, 0, ""),
        (1, 0, "(simulated)"),
        (0, 1, "(declared by the user)"),
        (1, 1, "(simulated, declared by the user)"),
    ],
)
def test_every_epsilon_bears_its_marks(
    tmp_path: Path, simulated: int, declared: int, marks: str
) -> None:
    rows = [
        {"round": k, "epsilon": float(k), "simulated": simulated, "declared": declared}
        for k in range(1, 4)
    ]
    directory = left_run(tmp_path / "run", rows)
    page = compare_page([RunRecord.read(directory, RunLedgers())])
    # In the table, the chart's title and the name of its axis.
    assert page.count(marks) >= 3
    for word, marked in (("simulated", simulated), ("declared by the user", declared)):
        assert (word in page) == bool(marked)
