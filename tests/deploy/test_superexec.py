"""Tasks are forked, bounded in time, and gone with whoever asked for them."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsim.deploy import flower_programs

# What Flower's program would do, by the second word of its arguments.
PROGRAM = """
import json, os, signal, socket, sys, time
from fedsim.deploy import flower_programs

failures = []
flower_programs.flower_replacements.fail_task = lambda role, reason: failures.append(reason)

def program():
    what, path = sys.argv[1:]
    def tell(word):
        with open(path, "a") as file:
            file.write(word + "\\n")
    if failures:
        tell(f"failed: {failures[0]}")
        sys.exit(1)
    tell(f"pid {os.getpid()}")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(0)
    if what == "raise":
        raise RuntimeError("before Flower's program has reported anything")
    if what == "reported":
        sys.exit(205)
    if what == "listen":
        try:
            time.sleep(60)
        except TimeoutError as error:
            tell(str(error))
    if what == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})
        time.sleep(60)
    if what == "long":
        time.sleep(60)
    tell("done")

flower_programs._GRACE = 0.3
flower_programs._guarded_program = lambda role, app: program
superexec = socket.socket(fileno=int(sys.argv[2]))
flower_programs._fork_tasks("client", "app", float(sys.argv[1]), superexec)
"""


class Forker:
    def __init__(self, seconds: float) -> None:
        self.socket, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(seconds), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def ask(self, *tasks: tuple[str, Path]) -> None:
        self.send(*(["", ["program", what, str(path)]] for what, path in tasks))

    def send(self, *lines: object) -> None:
        self.socket.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    def __enter__(self) -> Forker:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def wait(condition, limit=20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(line: str) -> bool:
    try:
        status = Path(f"/proc/{line.removeprefix('pid ')}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_tasks_that_come_together_are_each_run_in_a_process_of_its_own(tmp_path):
    paths = [tmp_path / str(number) for number in range(5)]
    with Forker(0) as forker:
        forker.ask(*(("quick", path) for path in paths))
        wait(lambda: all(lines_of(path)[-1:] == ["done"] for path in paths))
    assert len({lines_of(path)[0] for path in paths} | {f"pid {forker.process.pid}"}) == 6


def test_a_task_that_takes_too_long_hears_so_and_can_answer(tmp_path):
    with Forker(0.3) as forker:
        forker.ask(("listen", tmp_path / "said"))
        wait(lambda: lines_of(tmp_path / "said")[-1:] == ["done"])
    assert lines_of(tmp_path / "said")[1] == "this node ends a task after 0.3 s"


def test_a_task_that_does_not_listen_is_killed_and_the_next_is_run(tmp_path):
    with Forker(0.3) as forker:
        forker.ask(("deaf", tmp_path / "deaf"))
        wait(lambda: lines_of(tmp_path / "deaf"))
        wait(lambda: not alive(lines_of(tmp_path / "deaf")[0]))
        forker.ask(("quick", tmp_path / "quick"))
        wait(lambda: lines_of(tmp_path / "quick")[-1:] == ["done"])
        wait(lambda: len(lines_of(tmp_path / "deaf")) == 2)
    assert lines_of(tmp_path / "deaf")[1] == "failed: this node ends a task after 0.3 s"


@pytest.mark.parametrize(
    ("death", "end"),
    [
        ("die", "was ended by signal 9"),
        ("exit", "exited with status 0"),
        ("raise", "exited with status 1"),
    ],
)
def test_a_task_whose_process_dies_is_reported_once_as_failed(tmp_path, death, end):
    with Forker(0) as forker:
        forker.ask((death, tmp_path / "said"))
        wait(lambda: len(lines_of(tmp_path / "said")) == 2)
        forker.ask(("quick", tmp_path / "quick"))
        wait(lambda: lines_of(tmp_path / "quick")[-1:] == ["done"])
    assert lines_of(tmp_path / "said")[1:] == [
        f"failed: the task's process {end} before it had answered"
    ]


def test_a_task_that_flowers_program_has_reported_is_not_reported_again(tmp_path):
    with Forker(0) as forker:
        forker.ask(("reported", tmp_path / "said"))
        wait(lambda: lines_of(tmp_path / "said"))
        wait(lambda: not alive(lines_of(tmp_path / "said")[0]))
        forker.ask(("quick", tmp_path / "quick"))
        wait(lambda: lines_of(tmp_path / "quick")[-1:] == ["done"])
    assert len(lines_of(tmp_path / "said")) == 1


def test_a_task_that_is_refused_is_only_reported(tmp_path):
    with Forker(0) as forker:
        forker.send(["an agent is not run here.", ["program", "quick", str(tmp_path / "said")]])
        wait(lambda: lines_of(tmp_path / "said"))
    assert lines_of(tmp_path / "said") == ["failed: an agent is not run here."]


def test_tasks_end_when_nobody_is_there_to_ask_for_more(tmp_path):
    with Forker(0) as forker:
        forker.ask(("long", tmp_path / "said"))
        wait(lambda: lines_of(tmp_path / "said"))
        forker.socket.close()
        assert forker.process.wait(20) == 0
        wait(lambda: not alive(lines_of(tmp_path / "said")[0]))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_tasks_do_not_outlive_a_forker_that_is_killed(tmp_path):
    with Forker(0) as forker:
        forker.ask(("long", tmp_path / "said"))
        wait(lambda: lines_of(tmp_path / "said"))
        forker.process.kill()
        wait(lambda: not alive(lines_of(tmp_path / "said")[0]))


def test_a_token_is_on_no_command_line_when_flower_hands_a_task_over(monkeypatch):
    # Flower's own executor would start a program with the token among its arguments.
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import ExecutionSpec

    ours, theirs = socket.socketpair()
    made = {}
    module = importlib.import_module("flwr.supercore.superexec.run_superexec")
    monkeypatch.setattr(module, "get_executor", module.get_executor)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(
        importlib.import_module("flwr.supercore.cli.flower_superexec"),
        "flower_superexec",
        lambda: made.update(executor=module.get_executor("subprocess")),
    )
    monkeypatch.setattr(subprocess, "Popen", lambda *_a, **_k: pytest.fail("a program is started"))
    flower_programs._accept_tasks("client", ours, ["--insecure"])

    def spec(kind):
        return ExecutionSpec(
            task_type=kind,
            runtime_api_address="127.0.0.1:1",
            token="hunter2",
            insecure=True,
            root_certificates_path=None,
            runtime_dependency_install=True,
            parent_pid=os.getpid(),
            suppress_output=False,
            task_id=1,
        )

    assert made["executor"].launch(spec(TaskType.CLIENT_APP)).status == "accepted"
    task = ["flwr-clientapp", "--runtime-api-address", "127.0.0.1:1", "--token", "hunter2"]
    task += ["--insecure"]
    assert json.loads(theirs.recv(1 << 16)) == ["", task]
    for kind in set(TaskType) - {TaskType.CLIENT_APP}:
        assert made["executor"].launch(spec(kind)).status == "failed"
        assert json.loads(theirs.recv(1 << 16)) == [f"a {kind} is not run here.", task]


MET = """
import sys
from flwr.app import Context, Message, RecordDict
from fedsim.deploy import flower_programs
from fedsim.deploy.bundle import CLIENT_APP
flower_programs._guarded_program("client", CLIENT_APP)
before = set(sys.modules)
import torch
from fedsim.apps.client_app import app
from fedsim.config import RunConfig
from fedsim.federation.flower_internals import ensure_identity
ensure_identity(1)
tree = {
    "partition": {"clients": 10}, "mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.0},
    "model": {"name": "mlp", "widths": "8"}, "engine": {"name": "deployment", "device": "cpu"},
}
config = RunConfig.parse(tree)
from fedsim.runs.resolve import resolve
arrays = resolve(config).initial_arrays
message = Message(RecordDict({"arrays": arrays}), 2, "train")
reply = app(message, Context(1, 2, {"partition-id": 3}, RecordDict(), config.to_run_config()))
assert reply.has_content(), reply.error
print(*sorted(name for name in set(sys.modules) - before if name.startswith(("fedsim", "flwr"))))
"""


@pytest.mark.slow
def test_a_task_imports_nothing_of_ours_or_flowers_when_it_is_asked_to_train():
    ran = subprocess.run(
        [sys.executable, "-c", MET], check=True, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.split() == []


ONLY_SPEAKS = """
import sys
from fedsim.deploy import flower_programs
import flwr.supernode.cli, flwr.supernode.start_client_internal
import flwr.supercore.cli.flower_superexec, flwr.supercore.superexec.run_superexec
import flwr.superlink.cli.flower_superlink
print(*sorted({"torch", "ray", "scipy", "pandas", "matplotlib"} & set(sys.modules)))
"""


def test_what_only_speaks_to_others_does_not_import_what_trains():
    ran = subprocess.run(
        [sys.executable, "-c", ONLY_SPEAKS], check=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.split() == []
