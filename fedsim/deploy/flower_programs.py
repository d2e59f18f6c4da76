"""Flower's SuperLink, SuperNode and SuperExec, with fedsim's changes for a deployment.

Run as ``python -m fedsim.deploy.flower_programs PROGRAM ...``, which calls one of

- `run_superlink`: its Control API accepts the operator's token only;
- `run_supernode`: it polls for messages as often as the federation's size allows;
- `run_superexec`: it runs the installed app only, in forked processes with all modules imported.

The last arguments are passed to Flower's own program. The changes to Flower's code are in
`fedsim.deploy.flower_replacements`.
"""

from __future__ import annotations

import base64
import functools
import gc
import hashlib
import hmac
import importlib
import json
import math
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fedsim import regular_files
from fedsim.deploy import flower_replacements
from fedsim.process import die_with_parent, ending

if TYPE_CHECKING:
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

# -- the SuperLink and its operator's token -------------------------------------------------------


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def token_digest(token: str) -> str:
    """SHA-256 of a token, in hex; the server stores only this digest."""
    return hashlib.sha256(token.encode()).hexdigest()


def credentials(token: str, address: str) -> bytes:
    """A ``credentials.yaml`` with which the ``flwr`` command sends a token to one address."""
    store = f"flower.account-auth.{address}"
    values = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "-"}
    entries = {
        f"{store}.{key}": base64.b64encode(value.encode()).decode() for key, value in values.items()
    }
    # JSON is valid YAML.
    return json.dumps(entries, indent=1).encode()


def operator_plugin(digest: str) -> type[NoOpControlAuthnPlugin]:
    """An authentication plug-in that accepts only the token with this `token_digest`.

    Flower delegates the check of tokens to a plug-in; its community edition has none that checks.
    """
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    class OperatorToken(NoOpControlAuthnPlugin):
        """Accepts the operator's token only."""

        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, AccountInfo | None]:
            """Whether the operator's token is in the metadata, and the account."""
            for _, value in metadata:
                token = token_digest(value if isinstance(value, str) else value.decode("latin1"))
                if hmac.compare_digest(token, digest):
                    # Flower's community edition has a single account.
                    return super().validate_tokens_in_metadata(metadata)
            return False, None

        def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
            """Refuse: tokens cannot be refreshed."""
            del metadata
            return None, None

    return OperatorToken


def run_superlink(digest_file: Path, arguments: Sequence[str]) -> None:
    """Run a SuperLink whose Control API accepts only the token with the digest in this file."""
    from flwr.superlink.cli.flower_superlink import flower_superlink

    digest = regular_files.read_text(digest_file).strip()
    if len(digest) != 64:
        sys.exit(f"{digest_file} contains no SHA-256 of the operator's token.")
    flower_replacements.accept_operator_only(operator_plugin(digest))
    flower_replacements.wait_for_database()
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


# -- the SuperNode --------------------------------------------------------------------------------

_SHORTEST_POLL = 0.5
_FLOWERS_TASK_POLL = 1.0
_POLLS_PER_SECOND = 20.0  # of all nodes together, which takes little of the SuperLink's CPU time


def poll_seconds(clients: int) -> float:
    """Seconds between a node's polls for messages, in a federation of ``clients`` nodes.

    Examples
    --------
    >>> poll_seconds(10), poll_seconds(60), poll_seconds(1000)
    (0.5, 3.0, 3.0)
    """
    return min(flower_replacements.FLOWERS_POLL, max(_SHORTEST_POLL, clients / _POLLS_PER_SECOND))


def task_poll_seconds(clients: int) -> float:
    """Seconds between the looks of a node's SuperExec for a task, which are on its own machine.

    Flower's own looks once a second, which is most of a small federation's round. A look takes 4 ms
    of a core, so that a rehearsal of many nodes on one machine must not look often.

    Examples
    --------
    >>> task_poll_seconds(10), task_poll_seconds(1000)
    (0.25, 1.0)
    """
    return min(_FLOWERS_TASK_POLL, poll_seconds(clients) / 2)


def run_supernode(seconds: float, arguments: Sequence[str]) -> None:
    """Run a SuperNode that polls for messages every ``seconds``.

    Flower's own polls every three seconds while there is no message, which is most of the time of a
    small federation's round, and every half second for its app's reply.
    """
    from flwr.supernode.cli import flower_supernode

    flower_replacements.poll_every(seconds)
    flower_replacements.await_tasks()
    flower_replacements.retry_soon()
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


# -- the SuperExec, which forks a process for each task ------------------------------------------

_GRACE = 10.0
_REPORTED = 113  # exit status of a task that has told Flower how it ended; no user's code has it
# Written in full, so that a search for a module's name finds it here.
_USED_BY_TASKS = (
    *("fedsim.apps.node", "fedsim.federation.engines.client_app"),
    *("fedsim.federation.engines.packed_messages", "fedsim.models.construction"),
    *("fedsim.models.parameters", "fedsim.tasks.losses"),
)
_KIND_OF_ROLE = {"server": "flwr-serverapp", "client": "flwr-clientapp"}
_PROGRAM_OF_ROLE = {
    "server": "flwr.superlink.cli.flwr_serverapp:flwr_serverapp",
    "client": "flwr.supernode.cli.flwr_clientapp:flwr_clientapp",
}


def run_superexec(role: str, app: str, seconds: float, arguments: Sequence[str]) -> None:
    """Run a SuperExec, and a second process that forks its tasks.

    Flower's own starts a new Python for every message (2.7 CPU seconds with torch), with the task's
    token on its command line, and runs the code that was sent with the run. Here a process with all
    modules imported forks for each task (0.1 CPU seconds), gets the token through a socket, and
    runs only installed code:

    - a bundle with more than a config for the installed ``app`` is refused (`check_bundle`);
    - a node runs the installed app whatever the bundle says, and writes no part of it to disk;
    - other kinds of task (agents, connectors, models, simulations) are refused.

    A task that takes longer than ``seconds`` (0: no limit) is ended: first by an exception in it,
    so that the operator gets the reason, and by SIGKILL if it continues. A task whose process dies
    has failed at once, and so has one that is refused; Flower would wait for its heartbeats.

    Parameters
    ----------
    role : "server" or "client"
    app : str
        The installed app, ``module:name``.
    seconds : float
    arguments : sequence of str
    """
    own_end, child_end = socket.socketpair()
    superexec = os.getpid()
    # Fork before Flower has started a thread or opened a connection, which must not be shared.
    if os.fork() == 0:
        own_end.close()
        die_with_parent(superexec)
        _fork_tasks(role, app, seconds, child_end)
        os._exit(0)
    child_end.close()
    _accept_tasks(role, own_end, arguments)


def _accept_tasks(role: str, forker: socket.socket, arguments: Sequence[str]) -> None:
    """Run Flower's SuperExec, with an executor that sends each task to the forker."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

    class ForkingExecutor(SubprocessExecutor):
        def launch(self, spec: ExecutionSpec) -> LaunchResult:
            refused = str(spec.task_type) != _KIND_OF_ROLE[role]
            refusal = f"a {spec.task_type} is not run here." if refused else ""
            tls = ["--root-certificates", spec.root_certificates_path or ""]
            arguments = [
                *(_KIND_OF_ROLE[role], "--runtime-api-address", spec.runtime_api_address),
                *("--token", spec.token, *(["--insecure"] if spec.insecure else tls)),
            ]
            forker.sendall(json.dumps([refusal, arguments]).encode() + b"\n")
            return LaunchResult.failed(refusal) if refused else LaunchResult.accepted()

    flower_replacements.use_executor(ForkingExecutor())
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


def _fork_tasks(role: str, app: str, seconds: float, superexec: socket.socket) -> None:
    """Fork a process for each task that arrives, until the SuperExec ends; tasks end with this."""
    tasks = _Tasks(role, _guarded_program(role, app), seconds, superexec)
    # Keeps the memory of imported modules shared with forked tasks: the garbage collector would
    # write to its pages, which copies them.
    gc.freeze()
    # The timeout lets the loop look after running tasks also while no new ones arrive.
    superexec.settimeout(0.2)
    unread = b""
    while True:
        try:
            arrived = superexec.recv(1 << 16)
            if not arrived:
                return
            *lines, unread = (unread + arrived).split(b"\n")
            for line in lines:
                refusal, arguments = json.loads(line)
                tasks.fork(arguments, refusal)
        except TimeoutError:
            pass
        tasks.supervise()


@dataclass(eq=False)
class _Tasks:
    """The processes of tasks, each by its pid with its arguments and the time when it is killed."""

    role: str
    program: Callable[[], None]
    seconds: float
    superexec: socket.socket
    _running: dict[int, tuple[list[str], float]] = field(default_factory=dict)
    _reports: set[int] = field(default_factory=set)

    def fork(self, arguments: list[str], failure: str = "") -> None:
        """Run a task in a process of its own, which only reports this failure if there is one."""
        forker = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.superexec.close()
            die_with_parent(forker)
            self._run(arguments, failure)
        limit = self.seconds + _GRACE if self.seconds else math.inf
        self._running[pid] = arguments, time.monotonic() + limit
        if failure:
            self._reports.add(pid)

    def supervise(self) -> None:
        """Kill tasks that are late, and report those whose process has died."""
        for pid, (arguments, deadline) in list(self._running.items()):
            is_late = time.monotonic() > deadline
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == pid:
                del self._running[pid]
                failure = self._limit if is_late else _death_reason(status)
                if pid not in self._reports and status != _REPORTED << 8:
                    self.fork(arguments, failure)
                self._reports.discard(pid)
            elif is_late:
                os.kill(pid, signal.SIGKILL)

    @property
    def _limit(self) -> str:
        return f"this node ends a task after {self.seconds:g} s"

    def _run(self, arguments: list[str], failure: str) -> None:
        """Run one task in this forked process, which exits and never returns."""

        def raise_timeout(_number: int, _frame: FrameType | None) -> None:
            raise TimeoutError(self._limit)

        sys.argv = arguments
        status = 1
        try:
            if self.seconds:
                signal.signal(signal.SIGALRM, raise_timeout)
                signal.setitimer(signal.ITIMER_REAL, self.seconds)
            if failure:
                flower_replacements.fail_task(self.role, failure)
            self.program()
            status = _REPORTED
        except SystemExit:  # after any failure that Flower's program has reported
            status = _REPORTED
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # os._exit, since an exception would unwind into the forker's code.
            os._exit(status)


def _death_reason(status: int) -> str:
    """How a task's process died, by its wait status."""
    return f"the task's process {ending(os.waitstatus_to_exitcode(status))} before it had answered"


def _guarded_program(role: str, app: str) -> Callable[[], None]:
    """Flower's program for a role, with its guards installed and all its modules imported."""
    from fedsim.deploy.bundle import CLIENT_APP, check_bundle

    # A CUDA context does not survive a fork, so that the check for a device must not create one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Flower's HTTP client would import it at its first connection, in every task.
    importlib.import_module("httpcore")
    flower_replacements.retry_soon()
    installed = _object_named(app)
    if role == "client":
        check = functools.partial(check_bundle, component="clientapp", app=app)
        flower_replacements.run_installed_client(installed, check)
        if app == CLIENT_APP:
            _import_kinds()
    else:
        check = functools.partial(check_bundle, component="serverapp", app=app)
        flower_replacements.check_server_bundles(check)
    program: Callable[[], None] = _object_named(_PROGRAM_OF_ROLE[role])
    return program


def _object_named(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _import_kinds() -> None:
    """Import the modules that a task needs for training, once for all forked tasks.

    These are all of fedsim's own kinds, which take a twentieth of a second. Plug-ins are not
    imported until a run that names one has passed the node's policy.
    """
    for module in _USED_BY_TASKS:
        importlib.import_module(module)
    registry: Any = importlib.import_module("fedsim.registry")
    for kind in registry.KINDS:
        for name in sorted({*registry.names(kind)} - {*registry.plugins(kind)}):
            registry.find(kind, name, kind)
    # Parse one config, since the first one in a process creates the classes of its tables.
    importlib.import_module("fedsim.config").RunConfig.parse({"engine": {"name": "deployment"}})


def import_programs_of_nodes() -> None:
    """Import all modules of a node's programs, which processes forked from this one then share."""
    from fedsim.deploy.bundle import CLIENT_APP

    for module in (flower_replacements.SUPERNODE_LOOP, flower_replacements.SUPEREXEC_LOOP):
        importlib.import_module(module)
    for module in ("flwr.supernode.cli", "flwr.supercore.cli.flower_superexec"):
        importlib.import_module(module)
    _guarded_program("client", CLIENT_APP)


def main(program: str, *arguments: str) -> None:
    """Run one of the programs."""
    if program == "superlink":
        run_superlink(Path(arguments[0]), arguments[1:])
    elif program == "supernode":
        run_supernode(float(arguments[0]), arguments[1:])
    else:
        role, app, seconds, *app_arguments = arguments
        run_superexec(role, app, float(seconds), app_arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
