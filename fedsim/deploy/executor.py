"""A SuperExec that runs fedsim's apps and nothing else, in processes that are forked warm.

Run as ``python -m fedsim.deploy.executor server|client APP SECONDS ARGUMENTS``, the last as for
Flower's ``flower-superexec``. Flower's own executor starts a new Python for every message (2.7 CPU
seconds with torch), with the task's token on its command line, and runs the code that came
with the run. Here a process that has everything imported forks for each task (0.1 CPU
seconds); a token goes to it through a socket; and the guard stands before the code:

- a bundle with more than a config for APP, which is installed, is refused (`check_bundle`);
- a node's app is that one whatever the bundle says, and nothing of it touches disk;
- other kinds of task (agents, connectors, models, simulations) are refused.

A task that takes longer than SECONDS (0: for ever) is ended: first by an exception in it, so
that the reason reaches the operator, and, if that is not heard, by a signal.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fedsim.closing import die_with_parent
from fedsim.deploy import flower_replacements
from fedsim.deploy.supernode_poll import WakeupPipe

_GRACE = 10.0
# In full, as whoever moves a module looks for it.
_USED_BY_TASKS = (
    *("fedsim.apps.node", "fedsim.federation.engines.client_app"),
    *("fedsim.federation.engines.packed_messages", "fedsim.models.checks"),
    *("fedsim.models.making", "fedsim.models.trainable", "fedsim.tasks.names"),
)
_KIND_OF_ROLE = {"server": "flwr-serverapp", "client": "flwr-clientapp"}
_PROGRAM_OF_ROLE = {
    "server": "flwr.superlink.cli.flwr_serverapp:flwr_serverapp",
    "client": "flwr.supernode.cli.flwr_clientapp:flwr_clientapp",
}


def main(role: str, app: str, seconds: float, arguments: Sequence[str]) -> None:
    """Run a SuperExec beside the process that forks its tasks."""
    ours, theirs = socket.socketpair()
    superexec = os.getpid()
    # Forked before anything is imported: no thread, lock or connection is shared.
    if os.fork() == 0:
        ours.close()
        die_with_parent(superexec)
        _fork_tasks(role, app, seconds, theirs)
        os._exit(0)
    theirs.close()
    _run_superexec(role, ours, arguments)


def _run_superexec(role: str, forker: socket.socket, arguments: Sequence[str]) -> None:
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

    class ForkingExecutor(SubprocessExecutor):
        def launch(self, spec: ExecutionSpec) -> LaunchResult:
            if str(spec.task_type) != _KIND_OF_ROLE[role]:
                return LaunchResult.failed(f"a {spec.task_type} is not run here.")
            tls = ["--root-certificates", spec.root_certificates_path or ""]
            task = [
                *(_KIND_OF_ROLE[role], "--runtime-api-address", spec.runtime_api_address),
                *("--token", spec.token, *(["--insecure"] if spec.insecure else tls)),
            ]
            forker.sendall(json.dumps(task).encode() + b"\n")
            return LaunchResult.accepted()

    flower_replacements.use_executor(ForkingExecutor())
    if role == "client":
        with suppress(OSError):  # a file system without pipes: it asks once a second
            pipe = WakeupPipe(Path(os.environ["FLWR_HOME"]))
            flower_replacements.use_task_wait(pipe.wait)
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


def _fork_tasks(role: str, app: str, seconds: float, superexec: socket.socket) -> None:
    """Fork a process for each task that arrives, until SuperExec is gone."""
    program = _guarded_program(role, app)
    gc.freeze()
    forker = os.getpid()
    deadlines: dict[int, float] = {}
    superexec.settimeout(0.2)
    unread = b""
    while True:
        try:
            arrived = superexec.recv(1 << 16)
            if not arrived:
                break
            *tasks, unread = (unread + arrived).split(b"\n")
            for task in tasks:
                pid = os.fork()
                if pid == 0:
                    superexec.close()
                    die_with_parent(forker)
                    _run_task(program, json.loads(task), seconds)
                deadlines[pid] = time.monotonic() + (seconds + _GRACE if seconds else math.inf)
        except TimeoutError:
            pass
        _reap(deadlines)
    for pid in deadlines:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _reap(deadlines: dict[int, float]) -> None:
    """Forget the tasks that have ended, and end those that do not listen."""
    for pid, deadline in list(deadlines.items()):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            del deadlines[pid]
        elif time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)


def _run_task(program: Callable[[], None], arguments: list[str], seconds: float) -> None:
    """Run one task to its end, in a process of its own that does not return."""
    sys.argv = arguments
    status = 1
    try:
        if seconds:
            signal.signal(signal.SIGALRM, _too_long(seconds))
            signal.setitimer(signal.ITIMER_REAL, seconds)
        program()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _too_long(seconds: float) -> Callable[[int, FrameType | None], None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"this node ends a task after {seconds:g} s")

    return ring


def _guarded_program(role: str, app: str) -> Callable[[], None]:
    """Flower's own program for a role, imported with all that it will need, and guarded."""
    from fedsim.deploy.bundle import CLIENT_APP, check_bundle

    # A CUDA context does not survive a fork; asking whether there is a device must not make one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # What Flower's HTTP client imports with its first connection.
    importlib.import_module("httpcore")
    flower_replacements.retry_soon()
    installed = _named(app)
    if role == "client":
        check = functools.partial(check_bundle, component="clientapp", app=app)
        flower_replacements.run_installed_client(installed, check)
        if app == CLIENT_APP:
            _import_kinds()
    else:
        check = functools.partial(check_bundle, component="serverapp", app=app)
        flower_replacements.check_server_bundles(check)
    program: Callable[[], None] = _named(_PROGRAM_OF_ROLE[role])
    return program


def _named(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _import_kinds() -> None:
    """Import what a task needs when it is first asked to train, once for all that are forked.

    All of fedsim's own kinds, which take a twentieth of a second; plug-ins are not imported
    before a run that names one has been let in.
    """
    for module in _USED_BY_TASKS:
        importlib.import_module(module)
    registry: Any = importlib.import_module("fedsim.registry")
    for kind in registry.PACKAGES:
        for name in sorted({*registry.names(kind)} - {*registry.plugins(kind)}):
            registry.find(kind, name, kind)
    # The first config of a process makes the classes of its tables.
    importlib.import_module("fedsim.config").RunConfig.parse({"engine": {"name": "deployment"}})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:])
