"""Flower's SuperLink, SuperNode and SuperExec, as a deployment runs them.

Run as ``python -m fedsim.deploy.flower_programs PROGRAM ...``, which calls one of

- `run_superlink`: its Control API answers to the operator's token only;
- `run_supernode`: it asks for messages as often as its federation can answer, and wakes its app;
- `run_superexec`: it runs fedsim's apps and nothing else, in processes that are forked warm.

The last arguments are those of Flower's own program. What they replace of Flower is in
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
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fedsim import regular_files
from fedsim.deploy import flower_replacements
from fedsim.process import die_with_parent

if TYPE_CHECKING:
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

# -- the SuperLink and its operator's token -------------------------------------------------------


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def token_digest(token: str) -> str:
    """SHA-256 of a token, in hex: all that the server stores of it."""
    return hashlib.sha256(token.encode()).hexdigest()


def credentials(token: str, address: str) -> bytes:
    """The ``credentials.yaml`` with which the ordinary ``flwr`` presents a token to one address."""
    store = f"flower.account-auth.{address}"
    values = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "-"}
    entries = {
        f"{store}.{key}": base64.b64encode(value.encode()).decode() for key, value in values.items()
    }
    # JSON is YAML.
    return json.dumps(entries, indent=1).encode()


def operator_plugin(digest: str) -> type[NoOpControlAuthnPlugin]:
    """A plug-in that accepts the token with this `token_digest`, and no other.

    Flower asks a plug-in whether a token is good, and has none of its own but for OpenID Connect,
    in another edition.
    """
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    class OperatorToken(NoOpControlAuthnPlugin):
        """Accepts the operator's token only."""

        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, AccountInfo | None]:
            """Whether the operator's token is among what was sent."""
            for _, value in metadata:
                sent = token_digest(value if isinstance(value, str) else value.decode("latin1"))
                if hmac.compare_digest(sent, digest):
                    # Flower's community edition knows one account.
                    return super().validate_tokens_in_metadata(metadata)
            return False, None

        def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
            """No token is made from another."""
            del metadata
            return None, None

    return OperatorToken


def run_superlink(digest_file: Path, arguments: Sequence[str]) -> None:
    """Run a SuperLink whose Control API accepts the token with the digest in this file."""
    from flwr.superlink.cli.flower_superlink import flower_superlink

    digest = regular_files.read_text(digest_file).strip()
    if len(digest) != 64:
        sys.exit(f"{digest_file} holds no SHA-256 of the operator's token.")
    flower_replacements.accept_operator_only(operator_plugin(digest))
    flower_replacements.wait_for_database()
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


# -- the SuperNode, and how it wakes the SuperExec of its app ------------------------------------

_OFTEN = 0.5
_ANSWERED = 20.0  # questions a second that leave a SuperLink's core most of its time
_PIPE = "task.pipe"


def poll_seconds(clients: int) -> float:
    """Seconds from one question of a node to the next, in a federation of so many clients.

    Examples
    --------
    >>> poll_seconds(10), poll_seconds(60), poll_seconds(1000)
    (0.5, 3.0, 3.0)
    """
    return min(flower_replacements.FLOWERS_POLL, max(_OFTEN, clients / _ANSWERED))


def run_supernode(seconds: float, arguments: Sequence[str]) -> None:
    """Run a SuperNode that asks for messages every so many ``seconds``.

    Flower's own asks every three seconds while there is nothing to do, which is most of a small
    federation's round, and every half second whether its app has replied.
    """
    from flwr.supernode.cli import flower_supernode

    flower_replacements.poll_every(seconds)
    flower_replacements.before_reply_wait(lambda: wake(Path(os.environ["FLWR_HOME"])))
    flower_replacements.retry_soon()
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def wake(directory: Path) -> None:
    """Wake the SuperExec that waits at the pipe in this directory, if one does."""
    with suppress(OSError):
        pipe = os.open(directory / _PIPE, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b".")
        finally:
            os.close(pipe)


class WakeupPipe:
    """Where a node's SuperExec waits for its SuperNode to `wake` it.

    A SuperExec asks for a task once a second, and would have to ask far more often for a quick
    round: ten of them that ask four times a second take a seventh of a core all the time. So the
    SuperNode sends one byte when a message has arrived whole, through a named pipe in the directory
    that the two share and no other user can enter. Where no byte is sent or read, the SuperExec
    asks once a second as before.

    Parameters
    ----------
    directory : path
        A pipe is made there, in place of an earlier one's.
    """

    def __init__(self, directory: Path) -> None:
        pipe = directory / _PIPE
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        # For writing too: a pipe that all its writers have left is at its end, and never waits.
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)

    def wait(self, seconds: float) -> None:
        """Sleep until `wake` is called, or has been since the last time; at most so long."""
        if select.select([self._pipe], [], [], seconds)[0]:
            os.read(self._pipe, 1 << 16)


# -- the SuperExec, which forks a process for each task ------------------------------------------

_GRACE = 10.0
# In full, so that a search for a module's name finds it here.
_USED_BY_TASKS = (
    *("fedsim.apps.node", "fedsim.federation.engines.client_app"),
    *("fedsim.federation.engines.packed_messages", "fedsim.models.parameters"),
    *("fedsim.models.making", "fedsim.models.parameters", "fedsim.tasks.losses"),
)
_KIND_OF_ROLE = {"server": "flwr-serverapp", "client": "flwr-clientapp"}
_PROGRAM_OF_ROLE = {
    "server": "flwr.superlink.cli.flwr_serverapp:flwr_serverapp",
    "client": "flwr.supernode.cli.flwr_clientapp:flwr_clientapp",
}


def run_superexec(role: str, app: str, seconds: float, arguments: Sequence[str]) -> None:
    """Run a SuperExec beside the process that forks its tasks.

    Flower's own starts a new Python for every message (2.7 CPU seconds with torch), with the task's
    token on its command line, and runs the code that came with the run. Here a process that has
    everything imported forks for each task (0.1 CPU seconds), the token goes to it through a
    socket, and the guard stands before the code:

    - a bundle with more than a config for ``app``, which is installed, is refused (`check_bundle`);
    - a node's app is that one whatever the bundle says, and nothing of it touches disk;
    - other kinds of task (agents, connectors, models, simulations) are refused.

    A task that takes longer than ``seconds`` (0: for ever) is ended: first by an exception in it,
    so that the reason reaches the operator, and, if it continues, by a signal.

    Parameters
    ----------
    role : "server" or "client"
    app : str
        The installed app, ``module:name``.
    seconds : float
    arguments : sequence of str
    """
    ours, theirs = socket.socketpair()
    superexec = os.getpid()
    # Forked before Flower or torch is imported: no thread, lock or connection is shared.
    if os.fork() == 0:
        ours.close()
        die_with_parent(superexec)
        _fork_tasks(role, app, seconds, theirs)
        os._exit(0)
    theirs.close()
    _accept_tasks(role, ours, arguments)


def _accept_tasks(role: str, forker: socket.socket, arguments: Sequence[str]) -> None:
    """Run Flower's SuperExec, which hands each task to the forker."""
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
    """Fork a process for each task that arrives, until SuperExec is gone; tasks end with this."""
    program = _guarded_program(role, app)
    # What is imported stays shared with the forked tasks: a collection would write to its pages.
    gc.freeze()
    forker = os.getpid()
    deadlines: dict[int, float] = {}
    # Wakes up between tasks to end those that are late.
    superexec.settimeout(0.2)
    unread = b""
    while True:
        try:
            arrived = superexec.recv(1 << 16)
            if not arrived:
                return
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
        for pid, deadline in list(deadlines.items()):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                del deadlines[pid]
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)


def _run_task(program: Callable[[], None], arguments: list[str], seconds: float) -> None:
    """Run one task to its end, in a process of its own that does not return."""

    def raise_timeout(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"this node ends a task after {seconds:g} s")

    sys.argv = arguments
    status = 1
    try:
        if seconds:
            signal.signal(signal.SIGALRM, raise_timeout)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        program()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by an exception: this process would run the forker's own code.
        os._exit(status)


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
    for kind in registry.KINDS:
        for name in sorted({*registry.names(kind)} - {*registry.plugins(kind)}):
            registry.find(kind, name, kind)
    # The first config of a process makes the classes of its tables.
    importlib.import_module("fedsim.config").RunConfig.parse({"engine": {"name": "deployment"}})


def main(program: str, *arguments: str) -> None:
    """Run one of the programs."""
    if program == "superlink":
        run_superlink(Path(arguments[0]), arguments[1:])
    elif program == "supernode":
        run_supernode(float(arguments[0]), arguments[1:])
    else:
        role, app, seconds, *others = arguments
        run_superexec(role, app, float(seconds), others)


if __name__ == "__main__":
    main(*sys.argv[1:])
