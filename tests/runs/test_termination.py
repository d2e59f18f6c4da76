"""A scheduler that sends SIGTERM finds the model and the checkpoint saved before anything else."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.cli import main
from fedsim.privacy import Accountant, Statement
from fedsim.reports.run_page import run_page
from fedsim.runs import session
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import MetricsFile, Row
from fedsim.runs.summary import complete_record

CONFIG = RunConfig.parse(
    {
        "rounds": 9,
        "partition": {"clients": 6, "max-examples": 60},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
        "checkpoint": {"every": 100},
        "engine": {"device": "cpu"},
    }
)


class Terminated(fedsim.Callback):
    """Sends this process SIGTERM in the middle of the second round."""

    def on_round(self, status: fedsim.RunStatus) -> None:
        if status.round == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def interrupted(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        result = fedsim.run(CONFIG, out=directory.path, callbacks=[Terminated()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (result.ended, result.metrics[-1]["round"]) == ("interrupted", 2)
    return directory


def test_a_terminated_run_saves_its_model_and_a_checkpoint_and_waits_for_nothing_else(
    interrupted: RunDirectory, tmp_path: Path
) -> None:
    state = Checkpoints(interrupted.checkpoint).newest()
    assert state is not None
    assert state.round == 2
    assert interrupted.model.exists()
    assert not interrupted.report.exists()
    resumed = fedsim.run(CONFIG, out=interrupted.path, resume=True)
    whole = fedsim.run(CONFIG, out=tmp_path / "whole")
    assert interrupted.model.read_bytes() == RunDirectory(tmp_path / "whole").model.read_bytes()
    assert [row["round"] for row in resumed.metrics] == [row["round"] for row in whole.metrics]
    assert interrupted.report.exists()


def test_the_page_of_a_terminated_run_is_made_whole_when_it_is_asked_for(
    interrupted: RunDirectory,
) -> None:
    record = complete_record(interrupted.path)
    assert sum(map(sum, record.summary["test"]["counts"])) == 360
    page = run_page(record)
    assert "It reached round 2 of 9. It was interrupted" in page
    assert "Mistakes on test examples" in page
    # The model of an earlier end says nothing of the rounds that were made since.
    interrupted.metrics.write_text(interrupted.metrics.read_text() + "3\n")
    assert complete_record(interrupted.path).summary == {}


def test_going_on_removes_what_was_said_of_the_end_that_is_none_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "run")
    fedsim.run(CONFIG.replace(rounds=2), out=directory.path)
    assert directory.report.exists()

    of_ending = (directory.done, directory.summary, directory.report)
    kept: list[bool] = []

    def here(*_: object) -> None:
        kept.extend(path.exists() for path in of_ending)
        raise SystemExit

    # A process that is killed in the rounds that follow leaves none of them.
    monkeypatch.setattr(session, "run_to_end", here)
    with pytest.raises(SystemExit):
        fedsim.run(CONFIG, out=directory.path, resume=True)
    assert kept == [False] * len(of_ending)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "command",
    [
        ("run", "c.toml", "--out", "r"),
        ("run", "c.toml", "--out", "r", "--json"),
        ("sweep", "c.toml", "--over", "seed=1,2", "--out", "r"),
    ],
)
def test_a_command_that_is_asked_to_end_accounts_for_nothing_after_the_round(
    command: tuple[str, ...],
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG.to_toml(), encoding="utf-8")
    append = MetricsFile.append
    signalled = []

    def fails(*_: object) -> None:
        raise AssertionError("the run had been asked to end")

    def then_signal(file: MetricsFile, row: Row) -> None:
        append(file, row)
        if row["round"] == 2 and not signalled:
            signalled.append(file.path.parent)
            monkeypatch.setattr(Statement, "from_history", fails)
            monkeypatch.setattr(Accountant, "cost", fails)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(MetricsFile, "append", then_signal)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 128 + number
    if "--json" in command:
        *_, last = map(json.loads, capsys.readouterr().out.splitlines())
        assert (last["ended"], "privacy" in last) == ("interrupted", False)
    runs = [path.parent for path in Path("r").glob("**/metrics.csv")]
    states = [Checkpoints(RunDirectory(path).checkpoint).newest() for path in runs]
    assert {state.round for state in states if state is not None} <= {2, 3}
    assert None not in states
