"""Runs that are really killed, in forks of this process, and resumed to the reference's bytes."""

from __future__ import annotations

import os
import random
import resource
import signal
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load_file

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger, durable
from fedsim.runs import checkpoints
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import MetricsFile

CONFIG = RunConfig.parse(
    {
        "rounds": 7,
        "partition": {"clients": 8, "max-examples": 160},
        "model": {"name": "softmax"},
        "client": {"name": "adadp-lr", "state": "client", "batch-size": 5},
        "cohort": {"name": "poisson", "rate": 0.5},
        "mechanism": {"name": "quantile-clipping", "bit-noise": 0.5},
        "noise": {"multiplier": 1.0},
        "server": {"momentum": 0.9},
        "evaluate": {"every": 3},
        "checkpoint": {"every": 2},
        "engine": {"device": "cpu"},
    }
)

BUFFERED = CONFIG.replace(
    **{
        "rounds": 4,
        "client.steps": 2,
        "cohort.name": "buffered",
        "cohort.rate": "",
        "cohort.concurrency": 5,
        "cohort.buffer": 2,
        "cohort.participations": 3,
        "mechanism.name": "clipping",
        "mechanism.bit-noise": "",
        "devices.seconds-per-step": 1.0,
        "devices.spread": 1.0,
        "devices.dropout": 0.2,
        "server.momentum": 0.9,
    }
)


def in_a_fork(do: Callable[[], object]) -> int:
    """Status of a child that does this and nothing else; -9 if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            do()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(directory: Path, resume: bool = True, config: RunConfig = CONFIG) -> None:
    fedsim.run(config, out=directory, resume=resume)


class Steps:
    """Counts what touches the disk, and kills this process before the ``last`` step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int | None = None) -> None:
        self.count = 0
        self.last = last
        for owner, name in (
            (os, "fsync"), (os, "replace"), (os, "link"), (Path, "rename"), (Path, "unlink"),
            (MetricsFile, "append"), (checkpoints.shutil, "rmtree"), (Path, "mkdir"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **options: object) -> object:
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return function(*arguments, **options)

        return counted


def reached(directory: Path, *, but: tuple[str, ...] = ()) -> dict[str, object]:
    run = RunDirectory(directory)
    charged = Ledger.read(run.ledger, delta=1e-5)
    operators = ("seconds", "clients-per-second", *but)
    return {
        "model": {k: v.numpy().tobytes() for k, v in load_file(run.model).items()},
        "rows": [
            {k: v for k, v in row.items() if k not in operators} for row in run.metrics_file.rows()
        ],
        "charged": [(entry.round, entry.event) for entry in charged.entries],
        "spent": charged.epsilon(),
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference") / "run"
    run(directory, resume=False)
    return directory


@pytest.mark.slow
def test_ten_kills_and_kills_of_resumes_end_with_the_references_bytes(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        steps = Steps(patch)
        run(tmp_path / "counted", resume=False)
    chosen = random.Random(1)
    for attempt in range(10):
        directory = tmp_path / str(attempt)
        for _ in range(2):
            last = chosen.randrange(steps.count)

            def killed(directory: Path = directory, last: int = last) -> None:
                with monkeypatch.context() as patch:
                    Steps(patch, last)
                    run(directory)

            assert in_a_fork(killed) in (-signal.SIGKILL, 0)
        run(directory)
        assert reached(directory) == reached(reference), last
        assert RunDirectory(directory).model.read_bytes() == (
            RunDirectory(reference).model.read_bytes()
        )
        # The lines, but for what is noted beside them.
        ledgers = [Ledger.read(RunDirectory(place).ledger) for place in (directory, reference)]
        assert ledgers[0].heads == ledgers[1].heads


@pytest.mark.slow
def test_buffered_rounds_killed_at_any_step_end_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    run(whole, resume=False, config=BUFFERED)
    for last in count():
        directory = tmp_path / str(last)

        def killed(directory: Path = directory, last: int = last) -> None:
            with monkeypatch.context() as patch:
                Steps(patch, last)
                run(directory, config=BUFFERED)

        if in_a_fork(killed) == 0:  # it has no such step
            break
        run(directory, config=BUFFERED)
        assert reached(directory) == reached(whole), last
        assert RunDirectory(directory).model.read_bytes() == RunDirectory(whole).model.read_bytes()
    assert last > 40


def half_then_kill(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Kill this process in the middle of the second write of its sort."""
    seen = []

    def written(path_or_file: object, content: bytes) -> None:
        seen.append(content)
        if len(seen) < 3:
            originals[what](path_or_file, content)
            return
        half = content[: len(content) // 2]
        if isinstance(path_or_file, Path):
            path_or_file.write_bytes(half)
        else:
            path_or_file.seek(0, os.SEEK_END)
            path_or_file.write(half)
            path_or_file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    originals = {"checkpoint": checkpoints._write_synced, "ledger": durable.append}
    if what == "checkpoint":
        monkeypatch.setattr(checkpoints, "_write_synced", written)
    else:
        monkeypatch.setattr(durable, "append", written)


@pytest.mark.parametrize("what", ["checkpoint", "ledger"])
def test_a_run_killed_in_the_middle_of_a_write_goes_on(
    what: str, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        with monkeypatch.context() as patch:
            half_then_kill(patch, what)
            run(tmp_path / "run")

    assert in_a_fork(killed) == -signal.SIGKILL
    run(tmp_path / "run")
    assert_reached(tmp_path / "run", reference)


def assert_reached(directory: Path, reference: Path) -> None:
    """A torn line counts until its release comes again: rows before it may say more, never less."""
    assert reached(directory, but=("epsilon",)) == reached(reference, but=("epsilon",))
    rows = zip(
        RunDirectory(directory).metrics_file.rows(),
        RunDirectory(reference).metrics_file.rows(),
        strict=True,
    )
    assert all(row.get("epsilon", 0) >= expected.get("epsilon", 0) for row, expected in rows)


def test_a_row_that_was_cut_off_is_written_again(reference: Path, tmp_path: Path) -> None:
    def killed() -> None:
        append = MetricsFile.append

        def torn(file: MetricsFile, row: dict[str, float]) -> None:
            append(file, row)
            if row["round"] == 5:
                os.truncate(file.path, file.path.stat().st_size - 9)
                os.kill(os.getpid(), signal.SIGKILL)

        MetricsFile.append = torn
        run(tmp_path / "run")

    assert in_a_fork(killed) == -signal.SIGKILL
    run(tmp_path / "run")
    assert reached(tmp_path / "run") == reached(reference)


@pytest.mark.parametrize("size", [700, 2600, 4000])
def test_a_run_whose_disk_was_full_goes_on(size: int, reference: Path, tmp_path: Path) -> None:
    def starved() -> None:
        # No file may grow beyond: writes come to be short, and then fail, as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with pytest.raises((OSError, FedsimError), match="File too large"):
            run(tmp_path / "run")

    assert in_a_fork(starved) == 0
    run(tmp_path / "run")
    assert_reached(tmp_path / "run", reference)
