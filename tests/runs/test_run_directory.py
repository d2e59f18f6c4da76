from __future__ import annotations

import csv
import errno
import fcntl
import multiprocessing
import os
import shutil
import threading
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedsim
from fedsim import RunConfig, regular_files
from fedsim.errors import FedsimError
from fedsim.privacy import Entry, Event, Ledger
from fedsim.privacy.manifest import LEDGER_KEY
from fedsim.runs.directory import RunDirectory
from fedsim.runs.run_lock import RunLock

MARKER = ".fedsim-run"
USERS = ("config.toml", "report.html", "metrics.csv", "ledger.jsonl", "clients/mine.txt", "done")


def files(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file()}


def old_run(path: Path) -> RunDirectory:
    """A run's directory in which every file of a run is there."""
    directory = RunDirectory(path)
    with directory.claim("seed = 1\n"):
        for file in (directory.report, directory.done):
            file.write_text("old")
        Ledger(directory.ledger).record(Entry(event=Event(noise_multiplier=1.0), entropy="config"))
        directory.metrics_file.start(["round"])
        directory.save_model({"w": torch.zeros(1)})
        for kept in (directory.clients, directory.checkpoint):
            kept.mkdir()
            (kept / "round-1.safetensors").write_text("old")
    return directory


def test_a_directory_that_holds_a_run_is_refused_unless_it_may_be_overwritten(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.check_available(overwrite=False)
    assert not directory.path.exists()
    old_run(tmp_path / "run")
    before = files(tmp_path)
    with pytest.raises(FedsimError, match="already holds a run"):
        directory.check_available(overwrite=False)
    with pytest.raises(FedsimError, match="already holds a run"), directory.claim("seed = 2\n"):
        pass
    assert files(tmp_path) == before
    directory.check_available(overwrite=True)


def test_the_empty_string_is_not_the_current_directory() -> None:
    for use in (RunDirectory, fedsim.load, lambda out: fedsim.run(RunConfig(), out=out)):
        with pytest.raises(FedsimError, match="directory is ''; it must name one"):
            use("")


def test_overwriting_replaces_the_run_and_touches_no_other_file(tmp_path: Path) -> None:
    old_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    for seed in (2, 3):
        directory = RunDirectory(tmp_path)
        with directory.claim(f"seed = {seed}\n", overwrite=True):
            directory.report.write_text(f"of {seed}")
    kept = {name: text for name, text in files(tmp_path).items() if name != MARKER}
    assert kept == {
        "config.toml": "seed = 3\n",
        "report.html": "of 3",
        "notes.txt": "mine",
    }


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", USERS)
def test_what_no_run_has_written_is_never_touched(
    name: str, overwrite: bool, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    directory = RunDirectory(tmp_path)
    with pytest.raises(FedsimError, match="no run's marker"):
        directory.check_available(overwrite)
    with (
        pytest.raises(FedsimError, match="no run's marker"),
        directory.claim("seed = 1\n", overwrite=overwrite),
    ):
        pass
    assert files(tmp_path) == {name: "mine"}


def test_a_run_is_not_mixed_into_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FedsimError, match=r"holds notes\.txt but no run's marker"):
        RunDirectory(tmp_path).check_available(overwrite=True)
    with (
        pytest.raises(FedsimError, match="choose a new or an empty directory"),
        RunDirectory(tmp_path).claim("seed = 2\n"),
    ):
        pass
    assert files(tmp_path) == {"notes.txt": "mine"}


def test_files_that_a_user_puts_beside_a_run_stay(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("the system's")
    with RunDirectory(tmp_path).claim("seed = 1\n"):
        (tmp_path / "notes.txt").write_text("mine")
    with RunDirectory(tmp_path).claim("seed = 2\n", overwrite=True):
        pass
    assert sorted(files(tmp_path)) == [".DS_Store", MARKER, "config.toml", "notes.txt"]


def test_a_run_removes_what_a_killed_one_left_unfinished_and_no_other_file(tmp_path: Path) -> None:
    for again in (lambda run: run.claim("", overwrite=True), lambda run: run.lock_for_resume("")):
        directory = old_run(tmp_path)
        users = [tmp_path / f".{name}" for name in ("mine.0123456789abcdef", "done.backup")]
        for path in (*users, tmp_path / ".model.safetensors.0123456789abcdef"):
            path.write_text("")
        with again(directory):
            assert {path.name for path in tmp_path.glob(".*.*")} == {path.name for path in users}
        shutil.rmtree(tmp_path)


def test_one_run_at_a_time_has_the_directory(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").claim("seed = 1\n"):
        before = files(tmp_path)
        for overwrite in (False, True):
            second = RunDirectory(tmp_path / "run")
            with pytest.raises(FedsimError, match="another run is writing"):
                second.check_available(overwrite)
            with (
                pytest.raises(FedsimError, match="another run is writing"),
                second.claim("seed = 2\n", overwrite=overwrite),
            ):
                pass
        assert files(tmp_path) == before
    with RunDirectory(tmp_path / "run").claim("seed = 3\n", overwrite=True):
        pass


def _start(path: Path, seed: int, together, outcomes) -> None:
    together.wait()
    try:
        with RunDirectory(path).claim(f"seed = {seed}\n"):
            together.wait()  # until everybody has tried
            outcomes.put(seed)
    except FedsimError:
        together.wait()


def test_of_many_starts_in_one_directory_one_wins_and_the_others_leave_nothing(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    together, outcomes = context.Barrier(6), context.SimpleQueue()
    starts = [
        context.Process(target=_start, args=(tmp_path / "a" / "run", seed, together, outcomes))
        for seed in range(6)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    winner = outcomes.get()
    assert outcomes.empty()
    assert (tmp_path / "a" / "run" / "config.toml").read_text() == f"seed = {winner}\n"
    assert sorted(files(tmp_path)) == [f"a/run/{MARKER}", "a/run/config.toml"]


def test_the_lock_of_a_killed_run_is_no_obstacle(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        ExitStack().enter_context(RunDirectory(tmp_path / "run").claim("seed = 1\n"))
        os._exit(9)
    os.waitpid(pid, 0)
    with RunDirectory(tmp_path / "run").claim("seed = 2\n", overwrite=True):
        pass
    assert (tmp_path / "run" / "config.toml").read_text() == "seed = 2\n"


def test_a_run_that_fails_before_it_begins_leaves_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "b")
    with ExitStack() as claim:
        claim.enter_context(pytest.raises(KeyError))
        claim.enter_context(directory.claim("seed = 1\n"))
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".hidden").write_text("mine")
    with pytest.raises(KeyError), RunDirectory(tmp_path).claim("seed = 1\n"):
        raise KeyError
    assert files(tmp_path) == {".hidden": "mine"}


@pytest.mark.parametrize("setting", [True, False])
def test_a_key_that_is_none_is_refused_before_a_run_is_replaced(setting, tmp_path, monkeypatch):
    config = RunConfig.from_overrides(
        ["rounds=1", "partition.clients=3", "partition.max-examples=30"]
    )
    fedsim.run(config, out=tmp_path / "run")
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    if setting:
        config = config.replace(**{"noise.ledger-key": "none.pem"})
    else:
        monkeypatch.setenv(LEDGER_KEY, "none.pem")
    name = "noise.ledger-key" if setting else LEDGER_KEY
    with pytest.raises(FedsimError, match=f"^{name} = 'none.pem'; it must be the path"):
        fedsim.run(config, out=tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model


def test_a_run_that_fails_later_keeps_what_it_has_left(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with ExitStack() as claim:
        claim.enter_context(pytest.raises(KeyError))
        claim.enter_context(directory.claim("seed = 1\n"))
        directory.metrics_file.start(["round"])
        raise KeyError
    assert sorted(files(tmp_path / "run")) == [MARKER, "config.toml", "metrics.csv"]


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/nobody/run", "/dev/null"])
def test_a_place_where_no_directory_can_be_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    directory = RunDirectory(tmp_path / where)
    with pytest.raises(FedsimError, match="--out"), directory.claim("seed = 1\n", overwrite=True):
        pass
    assert files(tmp_path) == {"file": "mine"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_to_is_refused_and_left_as_it_was(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    old = old_run(tmp_path / "old")
    before = files(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse)
    for opened in (RunDirectory(tmp_path / "run").claim("a = 1\n"), old.lock_for_resume("a = 1\n")):
        with pytest.raises(FedsimError, match=rf"--out .*\({os.strerror(code)}\)"), opened:
            pass
    assert files(tmp_path) == before


def test_a_directory_whose_checkpoints_could_not_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match=r"run-\? is not valid UTF-8; it must be"):
        fedsim.run(RunConfig(), out=tmp_path / os.fsdecode(b"run-\xff"))
    assert not any(tmp_path.iterdir())


def test_a_run_of_a_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text('{"format": 2}')
    with pytest.raises(FedsimError, match="format 2, and this fedsim knows 1"):
        RunDirectory(tmp_path).check_available(overwrite=True)
    for damaged in ("[", '{"format": 9e999}'):
        (tmp_path / MARKER).write_text(damaged)
        with pytest.raises(FedsimError, match="damaged"):
            RunDirectory(tmp_path).check_available(overwrite=True)


def test_a_row_costs_one_line_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    directory.metrics_file.start(["round", "loss", "asked"])
    written: list[int] = []
    opener = regular_files.opener

    def counting(path: Path, flags: int) -> int:
        assert flags & os.O_APPEND
        written.append(Path(path).stat().st_size)
        return opener(path, flags)

    monkeypatch.setattr(regular_files, "opener", counting)
    for number in range(100):
        directory.metrics_file.append({"round": number, "loss": 0.5})
    monkeypatch.undo()
    assert {later - earlier for earlier, later in pairwise(written[10:])} == {len("10,0.5,\r\n")}
    with directory.metrics.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["round"] for row in read] == [str(number) for number in range(100)]
    assert read[7] == {"round": "7", "loss": "0.5", "asked": ""}


def test_rows_are_not_written_to_a_file_without_header_if_theirs_was_removed(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path)
    directory.metrics_file.start(["round"])
    directory.metrics.unlink()
    for write in (directory.metrics_file.sync, lambda: directory.metrics_file.append({"round": 1})):
        with pytest.raises(FileNotFoundError, match=r"metrics\.csv"):
            write()
    assert not any(tmp_path.iterdir())


def test_a_row_makes_no_column(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.metrics_file.start(["round"])
    with pytest.raises(ValueError, match="no column 'evil'"):
        directory.metrics_file.append({"round": 1, "evil": 1.0})
    assert directory.metrics.read_text() == "round\n"


def test_the_model_is_read_back_as_it_was(tmp_path: Path) -> None:
    arrays = {"w": torch.randn(3, 4).t(), "b": torch.arange(3)}
    directory = RunDirectory(tmp_path)
    directory.save_model(arrays)
    read = load_file(directory.model)
    assert all(torch.equal(read[name], arrays[name]) for name in arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_run_begins_while_another_process_looks_whether_the_directory_is_free(tmp_path):
    lock = RunLock(tmp_path)
    (tmp_path / MARKER).write_text("")
    with open(tmp_path / MARKER) as probe:
        fcntl.flock(probe, fcntl.LOCK_SH)
        release = threading.Timer(0.02, fcntl.flock, (probe, fcntl.LOCK_UN))
        release.start()
        assert lock.acquire()
        release.join()
    lock.release()
