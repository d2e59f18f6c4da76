from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsim.deploy.ports import free_ports
from fedsim.deploy.processes import Processes, Service, wait_for_port
from fedsim.errors import FedsimError

# A child that has a child of its own, as the SuperLink has its apps.
FAMILY = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; "
    "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print(c.pid, flush=True); time.sleep(600)",
]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('deaf', flush=True); time.sleep(600)",
]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def wait(condition, limit=20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def printed(running) -> str:
    wait(lambda: running.log.read_text().strip())
    return running.log.read_text().strip()


def test_everything_ends_with_close_grandchildren_and_files_included():
    with Processes() as processes:
        directory = processes.directory
        parent = processes.start("family", FAMILY)
        child = int(printed(parent))
        assert alive(child)
    assert not alive(parent.pid)
    assert not alive(child)
    assert not directory.exists()


def test_a_process_that_ignores_sigterm_is_killed():
    with Processes(grace=0.2) as processes:
        running = processes.start("stubborn", STUBBORN)
        printed(running)
    assert not running.alive()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_parent_that_dies(number):
    program = (
        "import time; from fedsim.deploy.processes import Processes; p = Processes(); "
        f"r = p.start('family', {FAMILY!r}); print(p.directory, r.pid, p._janitor.pid, "
        "flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    directory, pid, janitor = parent.stdout.readline().split()
    log = Path(directory) / "family.log"
    wait(lambda: log.exists() and log.read_text().strip())
    grandchild = int(log.read_text())
    os.kill(parent.pid, number)
    parent.wait()
    wait(lambda: not (alive(int(pid)) or alive(grandchild) or alive(int(janitor))))
    assert not Path(directory).exists()


def test_a_server_that_ends_before_it_listens_is_reported_with_its_log():
    (port,) = free_ports(1)
    with Processes() as processes:
        running = processes.start("broken", [sys.executable, "-c", "print('no such key')"])
        with pytest.raises(FedsimError, match=r"before it listened on port \d+:\nno such key"):
            wait_for_port(running, port)


def test_a_line_break_in_a_directorys_name_removes_no_other_directory(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x\ny").mkdir()
    with Processes(tmp_path / "logs") as processes:
        processes.remove_at_end(tmp_path / "x\ny")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "x"]


def test_a_service_whose_port_another_process_has_is_refused():
    with socket.socket() as other, Processes() as processes:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        sleeping = Service("late", (sys.executable, "-c", "import time; time.sleep(60)"), port=port)
        with pytest.raises(FedsimError, match=f"port {port} of late is in use"):
            processes.start_service(sleeping)


LISTENING = (
    "import socket, sys; "
    "s = socket.create_server((sys.argv[1], int(sys.argv[2]))); s.accept(); s.accept()"
)


def test_a_service_is_awaited_at_its_own_address():
    """On another than 127.0.0.1 it was waited for in vain."""
    (port,) = free_ports(1)
    command = (sys.executable, "-c", LISTENING, "127.0.0.2", str(port))
    with Processes() as processes:
        assert processes.start_service(
            Service("here", command, port=port, host="127.0.0.2")
        ).alive()
        elsewhere = Service("there", command, port=port, host="192.0.2.250")
        with pytest.raises(FedsimError, match=r"no address 192\.0\.2\.250 \(--host\)"):
            processes.start_service(elsewhere)


def test_a_process_is_told_nothing_that_this_one_was_given_beside_where_things_are(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hunter2@proxy")
    with Processes() as processes:
        program = "import os; print(sorted(os.environ.items()))"
        running = processes.start("tell", [sys.executable, "-c", program], {"GIVEN": "yes"})
        told = printed(running)
    assert "GIVEN" in told
    assert not any(word in told for word in ("hunter2", "GRPC_CONTROL", "PROXY"))


def test_what_a_process_writes_is_for_its_owner_only(tmp_path):
    with Processes(tmp_path) as processes:
        path = tmp_path / "written"
        program = f"open({str(path)!r}, 'w')"
        processes.start("write", [sys.executable, "-c", program]).process.wait(20)
        for file in (path, tmp_path / "write.log"):
            assert file.stat().st_mode & 0o777 == 0o600


SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")
FLOWERS = """
import sys
print("\\x1b[92mINFO \\x1b[0m:      Starting")
print("\\x1b[91mERROR \\x1b[0m:     Exit Code: 305\\nFailed to activate SuperNode.\\n")
print("For more information, visit: <https://flower.ai>\\nINFO:     Finished server process")
sys.exit(1)
"""


@pytest.fixture
def processes():
    with Processes(grace=0.2) as started:
        yield started


def service_that_ended(processes, program: str):
    running = processes.start_service(Service("broken", (sys.executable, "-S", "-c", program)))
    running.process.wait(20)
    return running


def test_services_that_run_are_left_alone(processes):
    first = processes.start_service(Service("sleeper", SLEEPER))
    processes.check()
    assert first.alive()
    assert processes.running == {"sleeper": first}


def test_a_service_that_was_killed_is_named_and_not_started_again(processes):
    processes.start_service(Service("other", SLEEPER))
    killed = processes.start_service(Service("sleeper", SLEEPER))
    killed.process.kill()
    killed.process.wait(20)
    for _ in range(2):
        with pytest.raises(
            ChildProcessError, match=r"^sleeper was ended by signal 9; its log says: nothing"
        ):
            processes.check()
    assert processes.running["sleeper"] is killed


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('first'); print('last')", r"exited with status 0; its log says: last"),
        ("1 / 0", r"exited with status 1; .*: ZeroDivisionError: .* by zero"),
        (FLOWERS, r"status 1; .*: ERROR : Exit Code: 305 Failed to activate SuperNode"),
    ],
)
def test_a_service_that_ended_is_named_with_the_last_error_in_its_log(processes, program, said):
    service_that_ended(processes, program)
    with pytest.raises(ChildProcessError, match=f"^broken .*{said}$"):
        processes.check()


def test_an_error_of_an_earlier_process_with_the_same_log_is_not_a_services_own(processes):
    service_that_ended(processes, "1 / 0")
    service_that_ended(processes, "print('ended early')")
    with pytest.raises(ChildProcessError, match=r"status 0; .*: ended early$"):
        processes.check()
