"""Processes that are forked end with the process that forked them, and need none of its threads."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedsim import process
from fedsim.process import deferred_signals, thread_pool

PROGRAM = """
import ctypes, os, sys, time
from types import SimpleNamespace
from fedsim import process
if sys.argv[1] == "without the kernel":
    ctypes.CDLL = lambda name: SimpleNamespace()
parent = os.getpid()
child = os.fork()
if child == 0:
    process.die_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["by the kernel", "without the kernel"])
def test_a_forked_process_ends_with_a_parent_that_is_killed(how: str) -> None:
    if how == "by the kernel" and sys.platform != "linux":
        pytest.skip("PR_SET_PDEATHSIG is Linux's")
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_whose_parent_is_gone_already_ends_at_once(monkeypatch) -> None:
    ended = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *args: 0))
    monkeypatch.setattr(os, "_exit", ended.append)
    process.die_with_parent(os.getppid() + 1)
    assert ended == [1]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows the system's threads")
def test_threads_of_a_pool_are_gone_when_it_is_left() -> None:
    def work(_: int) -> int:
        product = torch.ones(32, 32, dtype=torch.float64) @ torch.ones(32, 32, dtype=torch.float64)
        assert product[0, 0] == 32
        return threading.get_native_id()

    for _ in range(200):
        with thread_pool(2) as pool:
            used = set(pool.map(work, range(4)))
            assert os.getpid() not in used
        assert not used & {int(task.name) for task in Path("/proc/self/task").iterdir()}
    with pytest.raises(ZeroDivisionError), thread_pool(1) as pool:
        pool.submit(lambda: 1 / 0).result()


def test_a_signal_handled_from_c_is_left_to_its_handler(monkeypatch) -> None:
    usual, own = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        # What Python says of a handler that it did not install.
        patch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else own)
        with process.end_on_signal(lambda: None):
            pass
    assert signal.getsignal(signal.SIGTERM) is usual
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_handled_at_the_end_of_the_context_and_a_second_at_once(number) -> None:
    handled: list[str] = []

    def handle(_number: int, _frame: object) -> None:
        handled.append("handled")
        raise KeyboardInterrupt

    def interrupted(times: int) -> None:
        with deferred_signals():
            for _ in range(times):
                signal.raise_signal(number)
            handled.append("continued")

    before = signal.signal(number, handle)
    try:
        for times, expected in ((1, ["continued", "handled"]), (2, ["handled"])):
            handled.clear()
            with pytest.raises(KeyboardInterrupt):
                interrupted(times)
            assert handled == expected
        handled.clear()
        interrupted(0)
        assert handled == ["continued"]
        assert signal.getsignal(number) is handle
    finally:
        signal.signal(number, before)
