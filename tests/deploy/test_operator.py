"""What an operator is shown of a run, and what is left of it when the operator is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedsim.deploy import operator as module
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.operator import Operator
from fedsim.errors import FedsimError

FLWR = """#!/bin/sh
echo "$@" >> "$FLWR_HOME/calls"
case "$1" in
run) sleep 1; echo '{"success": true, "run-id": "7"}' ;;
log) for part in "$FLWR_HOME"/line*; do cat "$part"; sleep 0.3; done ;;
list) cat "$FLWR_HOME/list" ;;
stop) [ ! -e "$FLWR_HOME/deaf" ] || exec sleep 60 ;;
esac
"""


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    program = tmp_path / "flwr"
    program.write_text(FLWR)
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(module, "program", lambda name: os.fspath(program))
    return Operator(tmp_path, "federation")


def calls(operator: Operator) -> list[str]:
    return (operator.home / "calls").read_text().splitlines()


def write_status(operator: Operator, status: str) -> None:
    (operator.home / "list").write_text(
        f'{{"success": true, "runs": [{{"run-id": "7", "status": "{status}",'
        ' "status-details": "because"}]}'
    )


def test_a_runs_lines_are_shown_when_they_come_and_once(operator: Operator) -> None:
    (operator.home / "line0").write_text("first\nsec")
    (operator.home / "line1").write_text("ond\nfirst\n")
    write_status(operator, "finished:completed")
    shown: list[tuple[str, int]] = []
    status = operator.follow(7, show=lambda line: shown.append((line, len(calls(operator)))))
    assert status == "finished:completed"
    assert operator.details(7) == "because"
    # While the stream lasts, before anything else is asked.
    assert shown == [("first", 1), ("second", 1)]


def test_a_stream_that_is_lost_is_opened_again_and_shows_what_is_new(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds, sleep=time.sleep: sleep(0.01))
    (operator.home / "line0").write_text("first\n")
    write_status(operator, "running")
    shown: list[str] = []
    status = operator.status

    def next_status(run_id: int) -> str:
        answer = status(run_id)
        (operator.home / "line0").write_text("first\nsecond\n")
        write_status(operator, "finished:failed")
        return answer

    monkeypatch.setattr(operator, "status", next_status)
    assert operator.follow(7, show=shown.append) == "finished:failed"
    assert shown == ["first", "second"]


def interrupt_in(seconds: float, group: bool) -> Any:
    """Ctrl-C after some seconds, as a terminal sends it or to this process alone."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(seconds)
        (os.killpg if group else os.kill)(os.getppid(), signal.SIGINT)
        os._exit(0)
    return pid


@pytest.mark.parametrize("group", [False, True])
def test_a_run_whose_submission_is_interrupted_is_stopped(operator: Operator, group: bool) -> None:
    # In a process group of its own, which gets the signal.
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sender = interrupt_in(0.5, group)
        status = 1
        try:
            operator.submit(operator.home)
        except KeyboardInterrupt:
            status = 0
        finally:
            os.waitpid(sender, 0)
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [line.split()[:2] for line in calls(operator)] == [
        ["run", os.fspath(operator.home)],
        ["stop", "7"],
    ]


def test_a_run_that_could_not_be_stopped_is_said_to_continue_and_how_it_is_stopped(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_STOP_SECONDS", 0.2)
    (operator.home / "deaf").touch()
    operator.stop(7)
    command = f"FLWR_HOME={operator.home} flwr stop 7 federation"
    assert "run 7 was not stopped (flwr stop has not ended in 0.2 s.), and continues" in caplog.text
    assert command in caplog.text
    caplog.clear()
    (operator.home / "deaf").unlink()
    operator.stop(7)
    assert not caplog.text


@pytest.mark.parametrize("days", [-1, 1])
def test_an_expired_certificate_is_named_where_flower_says_that_there_is_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        federation = Federation.create(tmp_path / "fed", nodes=1, port=port)
        federation.issue(days)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            federation.superlink / "server.pem", federation.superlink / "server.key"
        )

        def answer() -> None:
            with suppress(OSError), server.accept()[0] as plain:
                context.wrap_socket(plain, server_side=True).close()

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setattr(module, "program", lambda name: "/bin/false")
        with pytest.raises(FedsimError, match="flwr list failed") as raised:
            Operator(federation.operator, CONNECTION).status(7)
    named = "(certificate has expired); `fedsim deploy renew` makes a new one."
    assert (named in str(raised.value)) == (days < 0)
