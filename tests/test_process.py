"""Processes that are forked end with the process that forked them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fedsim import process

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
