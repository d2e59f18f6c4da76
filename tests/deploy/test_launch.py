"""What is said of a run that failed on one of Flower's runtimes."""

from __future__ import annotations

import errno
import logging
import signal
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedsim.apps.server_app import LOG_FORMAT, _StopRequest
from fedsim.config import RunConfig
from fedsim.deploy import launch
from fedsim.deploy.launch import _directory, _follow, _interruptible_by
from fedsim.errors import FedsimError
from fedsim.runs.callbacks import Callback, Callbacks, RunStatus
from fedsim.runs.channel import CallbackServer
from fedsim.runs.directory import RunDirectory
from fedsim.runs.record import ArtefactsElsewhere, RunRecord
from fedsim.runs.run_ledgers import RunOutcome
from fedsim.strategies import RunFailedError

LOG = """
ray.exceptions.OutOfMemoryError: the node ran out of memory
  File "vce_api.py", line 270, in run_api
The above exception was the direct cause of the following exception:
RuntimeError: Simulation Runtime crashed.
The above exception was the direct cause of the following exception:
RuntimeError: An error was encountered. Ending simulation.
"""


class Failing:
    """An operator whose run has failed."""

    def __init__(self, log: str) -> None:
        self._log = log

    def follow(self, run_id: int, poll: Any, show: Any) -> str:
        for line in self._log.splitlines():
            show(line)
        return "finished:failed"

    def details(self, run_id: int) -> str:
        return "No heartbeat received from the task"

    def log(self, run_id: int) -> str:
        return self._log


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG, "OutOfMemoryError: the node ran out of memory"),
        ("RuntimeError: An error was encountered. Ending simulation.", "Ending simulation"),
        ("round 1  usable 2\nround 2  usable 2\n", "not reached its SuperLink for a minute"),
    ],
)
def test_a_run_that_failed_says_its_cause(log: str, reason: str) -> None:
    with pytest.raises(RunFailedError, match=rf"for run 7: .*{reason}\.$"):
        _follow(Failing(log), 7, lambda: None, None)


def test_a_run_that_failed_says_how_it_is_resumed(tmp_path: Path) -> None:
    elsewhere = "If it has a checkpoint, the same command with --resume continues from there."
    here = "The same command with --resume continues from its checkpoint of round 3."
    directory = RunDirectory(tmp_path / "run")

    def message() -> str:
        with pytest.raises(RunFailedError) as failure:
            _follow(Failing(""), 7, lambda: None, directory)
        return str(failure.value)

    assert message().endswith(f"minute. {elsewhere}")
    directory.path.mkdir()
    assert message().endswith("minute.")
    for number in (2, 3):
        (directory.checkpoint / f"round-{number}").mkdir(parents=True)
    assert message().endswith(f"minute. {here}")


def test_a_run_one_of_whose_processes_ended_says_which_and_how_it_is_resumed(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    (directory.checkpoint / "round-3").mkdir(parents=True)

    def ended() -> None:
        raise ChildProcessError("supernode-2 was ended by signal 9; its log says: nothing")

    class Polled(Failing):
        def follow(self, run_id: int, poll: Any, show: Any) -> str:
            poll()
            return "finished:failed"

    with pytest.raises(RunFailedError) as failure:
        _follow(Polled(""), 7, ended, directory)
    assert str(failure.value) == (
        "supernode-2 was ended by signal 9; its log says: nothing. "
        "The same command with --resume continues from its checkpoint of round 3."
    )


def test_warnings_of_the_server_reach_the_operators_screen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = "a node answered with an error: this node's policy refuses the run: data.dir is '/d'"
    lines = [
        logging.Formatter(LOG_FORMAT).format(logging.LogRecord("", level, "", 0, text, None, None))
        for level, text in ((logging.INFO, "round 1"), (logging.WARNING, refusal))
    ]
    with caplog.at_level(logging.INFO, "fedsim"), pytest.raises(RunFailedError):
        _follow(Failing("\n".join(lines)), 7, lambda: None, None)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", refusal)
    ]


def lose_the_superlink(*, asked: bool) -> None:
    with CallbackServer([]) as server, _interruptible_by(server):
        if asked:
            signal.raise_signal(signal.SIGINT)
        raise FedsimError("the SuperLink ended")


def test_a_run_whose_flower_a_scheduler_has_ended_too_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        lose_the_superlink(asked=True)
    with pytest.raises(FedsimError):
        lose_the_superlink(asked=False)


class Watcher(Callback):
    """Notes every call, and asks to stop after round 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str | None]] = []

    def on_start(self, status: RunStatus) -> None:
        self.calls.append(("start", status.round, status.ended))

    def on_round(self, status: RunStatus) -> bool:
        self.calls.append(("round", status.round, status.ended))
        return status.round == 1

    def on_end(self, status: RunStatus) -> None:
        self.calls.append(("end", status.round, status.ended))


@pytest.mark.parametrize("resumed", [False, True])
def test_callbacks_of_a_federations_run_are_called_and_ask_its_server_to_stop(
    resumed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = RunDirectory(tmp_path / "fedsim-run-7")
    directory.path.mkdir()
    requests: list[str | None] = []
    file, first = directory.metrics_file, 0
    if resumed:  # it has a checkpoint of round 1 and a row of round 2, which is made again
        (directory.checkpoint / "round-1").mkdir(parents=True)
        file.start(["round"], [{"round": k} for k in range(3)])
        first = 2

    class Finishing:
        def __init__(self, home: Path, connection: str) -> None: ...

        def submit(self, app: Path) -> int:
            return 7

        def follow(self, run_id: int, poll: Any, show: Any) -> str:
            poll()
            file.start(["round"], [{"round": k} for k in range(first)])
            poll()
            for number in range(first, 4):
                file.append({"round": number})
                poll()
                requests.append(_StopRequest(directory.stop_request(7)).on_round(MagicMock()))
            directory.finish(RunOutcome("finished"))
            return "finished:completed"

    monkeypatch.setattr(launch, "Operator", Finishing)
    monkeypatch.setattr(launch, "latest_run", lambda runs, name: directory)
    monkeypatch.setattr(launch, "_read", lambda resolved, directory: directory)
    federation = MagicMock(runs=tmp_path)
    config = RunConfig().replace(**{"checkpoint.resume": resumed})
    watcher = Watcher()
    launch._submit(MagicMock(config=config, uncovered=()), federation, None, [watcher])
    rounds = [("round", number, None) for number in range(first, 4)]
    start = ("start", 1 if resumed else 0, None)
    assert watcher.calls == [start, *rounds, ("end", 3, "finished")]
    stopped = "Watcher has stopped it"
    assert requests == ([None, None] if resumed else [None, stopped, stopped, stopped])
    assert not directory.stop_request(7).exists()
    assert "asked to stop" not in caplog.text


class Impatient(Watcher):
    def on_start(self, status: RunStatus) -> bool:
        return True


def test_a_stop_that_cannot_reach_the_server_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = Callbacks.numbered([Impatient()])
    rows = launch._MetricsWatcher(MagicMock(config=RunConfig(), uncovered=()), callbacks, None)
    with rows.watch(RunDirectory(tmp_path / "elsewhere"), 7) as poll:
        poll()
    assert caplog.text.count("asked to stop the run (Impatient has stopped it)") == 1


def test_a_stop_on_a_file_system_that_is_only_read_is_warned_of_and_the_run_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(launch.durable, "replace", refuses)
    monkeypatch.setattr(Path, "unlink", refuses)
    watcher = Impatient()
    resolved = MagicMock(config=RunConfig(), uncovered=())
    rows = launch._MetricsWatcher(resolved, Callbacks.numbered([watcher]), None)
    with rows.watch(RunDirectory(tmp_path), 7) as poll:
        poll()
        poll()
    assert caplog.text.count("Read-only file system") == 1
    assert watcher.calls == [("end", 0, None)]


def test_callbacks_of_a_run_that_fails_when_it_is_resumed_get_no_earlier_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "fedsim-run-7")
    directory.path.mkdir()
    directory.metrics_file.start(["round"], [{"round": 0}])
    directory.finish(RunOutcome("finished"))

    class Refusing(Failing):
        def __init__(self, home: Path, connection: str) -> None:
            super().__init__(LOG)

        def submit(self, app: Path) -> int:
            return 7

    monkeypatch.setattr(launch, "Operator", Refusing)
    monkeypatch.setattr(launch, "latest_run", lambda runs, name: directory)
    watcher = Watcher()
    config = RunConfig().replace(**{"checkpoint.resume": True})
    resolved = MagicMock(config=config, uncovered=())
    with pytest.raises(RunFailedError):
        launch._submit(resolved, MagicMock(runs=tmp_path), None, [watcher])
    assert watcher.calls == [("start", 0, None), ("end", 0, None)]


@pytest.mark.parametrize("here", [True, False])
def test_a_run_that_another_directory_of_this_machine_has_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    place = RunDirectory(tmp_path / "state" / "fedsim-run-7")
    copied: list[RunDirectory] = []

    class Elsewhere:
        def __init__(self, home: Path, connection: str) -> None: ...

        def submit(self, app: Path) -> int:
            return 7

        def follow(self, run_id: int, poll: Any, show: Any) -> str:
            if here:
                place.path.mkdir(parents=True)
                place.config.write_text("")
            return "finished:completed"

        def log(self, run_id: int) -> str:
            return f"fedsim: INFO: the artefacts of run 7 are in {place.path}\n"

    monkeypatch.setattr(launch, "Operator", Elsewhere)
    monkeypatch.setattr(launch, "_read", lambda resolved, directory: directory)
    monkeypatch.setattr(RunDirectory, "copy_from", lambda self, other: copied.append(other))
    resolved, federation = MagicMock(config=RunConfig(), uncovered=()), MagicMock(runs=tmp_path)
    if here:
        launch._submit(resolved, federation, tmp_path / "out", [])
        assert [directory.path for directory in copied] == [place.path]
    else:
        with pytest.raises(ArtefactsElsewhere, match=str(place.path)):
            launch._submit(resolved, federation, tmp_path / "out", [])


def test_a_run_without_a_directory_of_the_users_has_one_with_its_config() -> None:
    """Without it no report of the run can be written, which was said to be an error."""
    with _directory(None, RunConfig.from_overrides(["rounds=3"])) as path:
        assert RunRecord.read(path).config["rounds"] == 3
    assert not path.exists()
