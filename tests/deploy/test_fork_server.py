"""Processes of a rehearsal's nodes, which one process forks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsim.deploy.fork_server import Fork, ForkServer
from fedsim.deploy.processes import Processes, StartedProcess, environment
from fedsim.deploy.services import module
from fedsim.errors import FedsimError

EXECUTOR = [
    *("superexec", "client", "fedsim.apps.client_app:app", "0"),
    *("--runtime-api-address", "127.0.0.1:1", "--insecure"),
]
"""Arguments of a program that waits for its SuperNode."""


@pytest.fixture
def started() -> Iterator[tuple[ForkServer, StartedProcess]]:
    with Processes(grace=5.0) as processes, ForkServer() as server:
        end = server.server_end
        command = module("fork_server", str(end.fileno()))
        process = processes.start("fork-server", command, descriptors=[end.fileno()])
        end.close()
        yield server, process


def test_forks_are_programs_of_their_own_and_end_with_the_server(
    started: tuple[ForkServer, StartedProcess], tmp_path: Path
) -> None:
    server, process = started
    log = tmp_path / "log"

    def fork(*arguments: str) -> Fork:
        return server.fork(arguments, {**environment(), "GIVEN": "yes"}, log)

    wrong = fork("supernode", "not a number")
    assert wrong.wait(60) == 1
    assert "could not convert string to float: 'not a number'" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600

    first, second = fork(*EXECUTOR), fork(*EXECUTOR)
    assert first.poll() is None
    # A session of its own, so that its children are ended with it.
    assert os.getsid(first.pid) == os.getpgid(first.pid) == first.pid
    assert b"GIVEN=yes" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.3)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait(60) == -signal.SIGKILL
    assert second.poll() is None

    os.kill(process.pid, signal.SIGKILL)
    assert second.wait(60) == -signal.SIGKILL
    with pytest.raises(FedsimError, match="does not answer"):
        fork(*EXECUTOR)
    assert (
        not os.path.exists(f"/proc/{second.pid}/cmdline")
        or not Path(f"/proc/{second.pid}/cmdline").read_bytes()
    )


def test_a_server_that_is_told_to_end_waits_for_its_forks(
    started: tuple[ForkServer, StartedProcess], tmp_path: Path
) -> None:
    server, process = started
    forked = server.fork(EXECUTOR, environment(), tmp_path / "log")
    os.kill(process.pid, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.process.wait(0.5)
    assert forked.poll() is None
    os.killpg(forked.pid, signal.SIGTERM)
    assert forked.wait(60) in (0, -signal.SIGTERM)
    assert process.process.wait(60) == 0
