"""Callbacks of the process that started a run are asked by the one that drives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from fedsim import RunConfig
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import tensors
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.channel import CHANNEL, CallbackServer, RemoteCallback, remote_callback
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.directory import RunDirectory
from fedsim.runs.resolve import resolve
from fedsim.runs.run_ledgers import RunOutcome
from fedsim.runs.runner import drive
from fedsim.runs.session import CALLERS_CALLBACKS

CONFIG = RunConfig.parse(
    {"rounds": 4, "partition": {"clients": 4, "max-examples": 40}, "engine": {"device": "cpu"}}
)


class Watching(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.kept = torch.zeros(2)
        self.arrays: dict[str, torch.Tensor] = {}

    def on_start(self, status: RunStatus) -> None:
        self.seen.append(("start", status.round))

    def on_round(self, status: RunStatus) -> bool:
        self.seen.append(("round", status.round))
        self.arrays = tensors(status.arrays)
        self.kept = self.kept + 1
        return status.round == 2

    def on_end(self, status: RunStatus) -> None:
        self.seen.append((f"end: {status.ended}", status.round))

    def state(self):
        return {"kept": self.kept}

    def restore(self, state) -> None:
        self.kept = state["kept"]


def test_a_distant_callback_sees_stops_and_keeps_as_one_in_the_process():
    watching = Watching()
    with CallbackServer([watching]) as server:
        resolved = resolve(CONFIG)
        distant = RemoteCallback(server.variables[CHANNEL])
        result = drive(resolved, LocalGrid(resolved.trainer), None, {CALLERS_CALLBACKS: distant})
        assert (result.ended, result.why) == ("stopped", "Stopped early: Watching has stopped it.")
        rounds = [("round", number) for number in range(3)]
        assert watching.seen == [("start", 0), *rounds, ("end: stopped", 2)]
        reached = tensors(result.arrays)
        assert all(torch.equal(value, reached[name]) for name, value in watching.arrays.items())
        assert distant.state()["0"]["kept"].tolist() == [3.0, 3.0]
        distant.restore({"0": {"kept": torch.ones(2)}})
        assert watching.kept.tolist() == [1.0, 1.0]


def test_a_run_that_is_asked_to_end_elsewhere_keeps_its_last_round(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    resolved = resolve(CONFIG)

    class EndsInRoundTwo(Callback):
        def on_round(self, status: RunStatus) -> None:
            if status.round == 2:
                server.end()

    with CallbackServer([EndsInRoundTwo()]) as server, directory.claim(resolved.config.to_toml()):
        distant = RemoteCallback(server.variables[CHANNEL])
        result = drive(
            resolved,
            LocalGrid(resolved.trainer),
            directory,
            {CALLERS_CALLBACKS: distant},
            end_request=lambda: distant.asked_to_end,
        )
    assert (result.ended, result.metrics[-1]["round"]) == ("interrupted", 2)
    assert Checkpoints(directory.checkpoint).rounds() == [2]
    assert RunOutcome.read(directory.path)[0] == "interrupted"


def test_a_run_ends_if_the_process_that_has_its_directory_is_killed(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    resolved = resolve(CONFIG)

    class KilledInRoundTwo(Callback):
        def on_round(self, status: RunStatus) -> None:
            if status.round == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    reader, writer = multiprocessing.Pipe(duplex=False)
    if (child := os.fork()) == 0:
        with CallbackServer([KilledInRoundTwo()]) as server:
            writer.send(server.variables[CHANNEL])
            time.sleep(60)
        os._exit(0)
    with directory.claim(resolved.config.to_toml()):
        distant = RemoteCallback(reader.recv())
        with pytest.raises(KeyboardInterrupt):
            drive(resolved, LocalGrid(resolved.trainer), directory, {CALLERS_CALLBACKS: distant})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert RunOutcome.read(directory.path).ended == "interrupted"
    assert [row["round"] for row in directory.metrics_file.rows()] == [0, 1]


def test_a_run_that_nobody_watches_asks_nobody(monkeypatch):
    monkeypatch.delenv(CHANNEL, raising=False)
    assert remote_callback() is None
