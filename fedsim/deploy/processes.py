"""Starting programs that cannot outlive the process that started them.

Run as ``python -m fedsim.deploy.processes SECONDS``, this module is the janitor of a `Processes`: a
process that waits for its parent to end, and then ends all that the parent has started. The
kernel's signal to a child (`fedsim.process.die_with_parent`) is not enough for programs like the
SuperLink or a SuperNode, which have children of their own and need time to end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import IO, Protocol

from fedsim import regular_files
from fedsim.deploy.ports import is_busy
from fedsim.errors import FedsimError
from fedsim.process import Closed, ending

_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Child(Protocol):
    """A process that this one has started, or had started: the methods of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it to end, and return its exit code."""


@dataclass(frozen=True, eq=False)
class StartedProcess:
    """A started process, with its log.

    Attributes
    ----------
    name : str
    process : Child
    log : Path
        File with its standard output and error, after those of earlier processes.
    log_start : int
        Byte of that file at which its own output begins.
    """

    name: str
    process: Child
    log: Path
    log_start: int

    @property
    def pid(self) -> int:
        """Process id, and the id of the process group that it leads."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether it is still running."""
        return self.process.poll() is None

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        return "\n".join(self._lines()[-lines:])

    def last_error(self) -> str:
        """The last error in its log up to an empty line; if there is none, the last line."""
        lines = self._lines()
        errors = [n for n, line in enumerate(lines) if re.search(r"(Error|ERROR)\b", line)]
        paragraph = takewhile(str.strip, lines[errors[-1] if errors else -1 :])
        return " ".join(" ".join(paragraph).split())

    def _lines(self) -> list[str]:
        text = regular_files.read_bytes(self.log)[self.log_start :].decode(errors="replace")
        return _COLOURS.sub("", text).rstrip().splitlines()


@dataclass(frozen=True)
class Service:
    """Description of a process that should run until the others are ended too.

    Attributes
    ----------
    name : str
    command : tuple of str
        Command line, without secrets: all users of the machine can read it.
    variables : mapping
        Environment variables in addition to those of `fedsim.deploy.processes.environment`.
    port, host : int, str
        Port and address on which it listens once it has started; port 0 for none.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    host: str = "127.0.0.1"

    def among(self, variables: Mapping[str, str]) -> Service:
        """A copy with further environment variables."""
        return replace(self, variables={**self.variables, **variables})


class Processes(Closed):
    """A set of processes that end with this one: by `close`, by Ctrl-C, or by its death.

    Some of them are services (`start_service`): `check` says which of them has ended. Nothing is
    restarted.

    Each process leads a process group of its own, so that its children are ended with it. A janitor
    process (`run_janitor`) has a list of all of them, and ends them when this process closes its
    pipe or dies.

    Parameters
    ----------
    directory : path, optional
        Directory for logs; by default a temporary one that is removed at the end.
    grace : float
        Seconds from SIGTERM to SIGKILL.

    Attributes
    ----------
    running : dict of str to StartedProcess
        The services' processes, by name.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, grace: float = 8.0
    ) -> None:
        self.directory = Path(directory or tempfile.mkdtemp(prefix="fedsim-"))
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.running: dict[str, StartedProcess] = {}
        self._janitor = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedsim.deploy.processes", str(grace)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        if directory is None:
            self.remove_at_end(self.directory)

    def start(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        descriptors: Sequence[int] = (),
    ) -> StartedProcess:
        """Start a process, with output to ``NAME.log``.

        Parameters
        ----------
        command : sequence of str
        variables : mapping, optional
            Environment variables in addition to those of `environment`.
        descriptors : sequence of int
            Open file descriptors to pass on.
        """
        log = self.directory / f"{name}.log"
        start = log.stat().st_size if log.exists() else 0
        process = self.launch(command, {**environment(), **(variables or {})}, log, descriptors)
        self._command(f"start {process.pid}")
        return StartedProcess(name, process, log, start)

    def launch(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        descriptors: Sequence[int],
    ) -> Child:
        """Start a process in a session of its own, with its output appended to ``log``.

        Parameters
        ----------
        variables : mapping
            All its environment variables.
        """
        with open(log, "ab", opener=partial(regular_files.opener, mode=0o600)) as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                umask=0o077,
                start_new_session=True,
                pass_fds=descriptors,
            )

    def remove_at_end(self, directory: Path) -> None:
        """Have the janitor remove a directory after the processes have ended."""
        # As JSON, since a path may contain line breaks, and its first line name another directory.
        self._command(f"remove {json.dumps(str(directory.absolute()))}")

    def close(self) -> None:
        """End all processes, and wait until they have ended."""
        if self._janitor.poll() is None:
            _stream(self._janitor.stdin).close()
            self._janitor.wait()

    def start_service(self, service: Service, *, wait: bool = True) -> StartedProcess:
        """Start a service, and wait until it listens.

        Raises
        ------
        FedsimError
            If its port is in use, or if it ends before it listens, with the end of its log.
        """
        # Otherwise `wait_for_port` would take another process that listens there for the service.
        if service.port and is_busy(service.port, service.host):
            raise FedsimError(
                f"port {service.port} of {service.name} is in use; end what listens there."
            )
        running = self.start(service.name, service.command, service.variables)
        self.running[service.name] = running
        if wait and service.port:
            wait_for_port(running, service.port, service.host)
        return running

    def check(self) -> None:
        """Check that all services are running.

        Raises
        ------
        ChildProcessError
            If one has ended: which, how, and the last error in its log.
        """
        for name, running in self.running.items():
            code = running.process.poll()
            if code is not None:
                said = (running.last_error() or "nothing").rstrip(".")
                raise ChildProcessError(f"{name} {ending(code)}; its log says: {said}")

    def _command(self, line: str) -> None:
        pipe = _stream(self._janitor.stdin)
        pipe.write(f"{line}\n")
        pipe.flush()


def _stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def run_janitor(grace: float) -> None:
    """Run the janitor: read lines from standard input until the parent closes it, then clean up.

    The lines are ``start PID`` and ``remove "DIRECTORY"``. At the end, every process group that was
    started gets SIGTERM, and SIGKILL if it still exists ``grace`` seconds later; then the
    directories are removed.
    """
    # Signals for the parent may reach this process too, but only the parent's end counts here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    groups: list[int] = []
    directories: list[str] = []
    for line in sys.stdin:
        verb, _, argument = line.rstrip("\n").partition(" ")
        if verb == "start":
            groups.append(int(argument))
        elif verb == "remove":
            directories.append(json.loads(argument))
    end_groups(groups, grace)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def end_groups(groups: Iterable[int], grace: float) -> None:
    """End process groups: SIGTERM, and SIGKILL for those left after ``grace`` seconds."""
    alive = _signal(groups, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = _signal(alive, 0)
    alive = _signal(alive, signal.SIGKILL)
    while alive:
        time.sleep(0.01)
        alive = _signal(alive, 0)


def _signal(groups: Iterable[int], number: int) -> list[int]:
    """Signal process groups; return those in which processes are left."""
    reached = []
    for group in groups:
        with suppress(ProcessLookupError):
            with suppress(PermissionError):
                os.killpg(group, number)
            reached.append(group)
    ended = _groups_of_zombies() if reached else set()
    return [group for group in reached if group not in ended]


def _groups_of_zombies() -> set[int]:
    """Process groups that only dead processes are left in, as their parents do not wait for them.

    All are found in one pass over the process table, since a rehearsal has hundreds of groups.
    """
    living, dead = set[int](), set[int]()
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8") as file:
                state, _parent, group = file.read().rpartition(")")[2].split()[:3]
                (dead if state in ("Z", "X") else living).add(int(group))
    return dead - living


# Environment variables that a program inherits: paths, locale, devices and threads.
_INHERITED = (
    *("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"),
    *("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
)


def environment() -> dict[str, str]:
    """Environment variables of Flower's processes: no telemetry, update checks or installations.

    Other variables of this process (passwords, tokens of other services) are not passed on.
    """
    programs = str(Path(sys.executable).parent)
    return {
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        # Ray and Flower's simulation runtime start further programs by name.
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }


def program(name: str) -> str:
    """Path of one of Flower's programs, from this interpreter's installation if possible.

    Raises
    ------
    FedsimError
        If it is not installed.
    """
    sibling = Path(sys.executable).with_name(name)
    location = str(sibling) if sibling.exists() else shutil.which(name)
    if location is None:
        raise FedsimError(f"the program '{name}' is not installed; it comes with flwr.")
    return location


def wait_for_port(running: StartedProcess, port: int, host: str = "127.0.0.1") -> None:
    """Wait until a process accepts connections, at most a minute.

    Raises
    ------
    FedsimError
        If it ends or does not listen in time, with the end of its log.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and running.alive():
        try:
            with socket.create_connection((host, port), timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    status = running.process.poll()
    fault = "did not listen" if status is None else f"ended (status {status}) before it listened"
    raise FedsimError(f"{running.name} {fault} on port {port}:\n{running.tail()}")


if __name__ == "__main__":
    run_janitor(float(sys.argv[1]))
