from __future__ import annotations

import importlib
import os
import stat
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from fedsim.deploy import flower_programs, flower_replacements
from fedsim.deploy.flower_programs import WakeupPipe, poll_seconds, wake
from fedsim.deploy.flower_replacements import FLOWERS_POLL, SUPERNODE_LOOP


def test_a_supernode_asks_often_wakes_its_app_and_is_given_its_arguments(monkeypatch, tmp_path):
    loop = importlib.import_module(SUPERNODE_LOOP)
    command = importlib.import_module("flwr.supernode.cli")
    done = []
    state = SimpleNamespace(get_tasks=lambda **_: [], msg_store={})
    monkeypatch.setattr(loop, "time", loop.time)
    monkeypatch.setattr(loop, "_push_messages", lambda **_: done.append("sends"))
    monkeypatch.setattr(loop, "_pull_and_store_message", loop._pull_and_store_message)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(flower_replacements, "retry_soon", lambda: done.append("retries soon"))
    monkeypatch.setattr(flower_programs, "wake", done.append)
    monkeypatch.setattr(time, "sleep", done.append)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))

    def program():
        loop.time.sleep(FLOWERS_POLL)
        loop._push_messages(state=state, object_store=None)

    monkeypatch.setattr(command, "flower_supernode", program)
    flower_programs.run_supernode(0.2, ["--insecure"])
    assert sys.argv == ["flower-supernode", "--insecure"]
    assert done == ["retries soon", 0.2, tmp_path, "sends"]


@pytest.mark.parametrize("clients", [1, 10, 100, 10_000])
def test_no_federation_asks_more_than_twenty_times_a_second_or_less_than_flower(clients):
    seconds = poll_seconds(clients)
    assert seconds <= FLOWERS_POLL
    assert seconds == FLOWERS_POLL or clients / seconds <= 20 + 1e-9


def test_wake_ends_a_wait(tmp_path):
    pipe = WakeupPipe(tmp_path)
    threading.Timer(0.1, wake, [tmp_path]).start()
    began = time.monotonic()
    pipe.wait(60)
    assert time.monotonic() - began < 50


def test_a_wake_before_the_wait_ends_one_wait_and_not_two(tmp_path):
    pipe = WakeupPipe(tmp_path)
    for _ in range(3):
        wake(tmp_path)
    pipe.wait(60)
    began = time.monotonic()
    pipe.wait(0.05)
    assert time.monotonic() - began >= 0.05


def test_a_wake_where_nobody_waits_does_nothing(tmp_path):
    wake(tmp_path)
    os.mkfifo(tmp_path / "task.pipe")
    wake(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["task.pipe"]


def test_a_pipe_takes_the_place_of_what_lies_there_and_is_its_owners(tmp_path):
    (tmp_path / "task.pipe").write_text("left")
    WakeupPipe(tmp_path)
    wake(tmp_path)
    mode = (tmp_path / "task.pipe").stat().st_mode
    assert stat.S_ISFIFO(mode)
    assert mode & 0o777 == 0o600


def test_a_pipe_that_is_full_does_not_block_a_wake(tmp_path):
    pipe = WakeupPipe(tmp_path)
    for _ in range(70_000):
        wake(tmp_path)
    pipe.wait(60)
