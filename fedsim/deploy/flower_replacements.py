"""All private names of Flower that a deployment replaces, with the reason for each.

Flower has no public interface for any of this. Each function changes the process that calls it,
which runs one of Flower's own programs, and nothing on disk. There are two kinds:

- *Guards* (the operator's token, the check of app bundles, the executor). If a release of Flower
  lacks the name, a guard ends its process, which must not run unguarded.
- *Intervals and timeouts* (how often to poll, how long to wait for a database). If a release lacks
  the name, Flower's own interval is used, and nothing else changes.

If Flower still has a name but no longer *uses* it, replacing it has no effect. Only Flower's source
shows that: `tests/deploy/test_flower_replacements.py` checks the installed release, and
`warn_of_newer_flower` warns of releases newer than those checked.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.supercore.superexec.executor import Executor
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

_log = logging.getLogger("fedsim")

NEWEST = (1, 42)
"""The newest release of Flower in whose source these names were checked."""

FLOWERS_POLL = 3.0
"""Seconds between two polls of Flower's SuperNode for messages."""

_REPLY_POLL = 0.05  # seconds between polls for an app's reply, in the SuperNode's own memory
_RETRY_SECONDS = 0.1
_DATABASE_WAIT = "60000"  # milliseconds

SUPERNODE_LOOP = "flwr.supernode.start_client_internal"
SUPEREXEC_LOOP = "flwr.supercore.superexec.run_superexec"
CLIENT_RUNTIME = "flwr.supernode.runtime.run_clientapp"
SERVER_RUNTIME = "flwr.superlink.runtime.run_serverapp"


def flower_version() -> tuple[int, int]:
    """Major and minor version of the installed Flower."""
    major, minor = importlib.metadata.version("flwr").split(".")[:2]
    return int(major), int(minor)


def speaks_grpc() -> bool:
    """Whether SuperNodes of the installed Flower use gRPC to reach the SuperLink.

    From 1.40 on they use protobuf over HTTPS, on the SuperLink's only port.
    """
    return flower_version() < (1, 40)


@functools.cache
def warn_of_newer_flower() -> None:
    """Log one warning if the installed Flower is newer than `NEWEST`."""
    if flower_version() > NEWEST:
        _log.warning(
            "a deployment replaces private names of Flower, which are known up to Flower %s; this "
            "is %s: a round may be slower, or a process may fail on a name that is missing.",
            _dotted(NEWEST),
            _dotted(flower_version()),
        )


def accept_operator_only(plugin: type[NoOpControlAuthnPlugin]) -> None:
    """Have the SuperLink authenticate calls of its Control API by this plug-in. A guard.

    Flower's community edition has no plug-in that refuses any caller, and loads one only if OpenID
    Connect is enabled.
    """
    module = _module_with("flwr.superlink.config_loader", "get_control_authn_plugins")
    module.get_control_authn_plugins = lambda: {"oidc": plugin}
    os.environ["FLWR_OIDC_ENABLED"] = "1"


def wait_for_database() -> None:
    """Let a request wait a minute for the SuperLink's database, instead of Flower's five seconds.

    On a busy machine a message could be lost with the error "database is locked", and a private
    round, which has no deadline, would wait for its reply for ever.
    """
    module: Any = importlib.import_module("flwr.supercore.sql_mixin")
    module.SQLITE_PRAGMAS = tuple(
        (name, _DATABASE_WAIT if name == "busy_timeout" else value)
        for name, value in module.SQLITE_PRAGMAS
    )


def use_executor(executor: Executor) -> None:
    """Have the SuperExec pass its tasks to this executor. A guard.

    Flower's own executor starts a new Python for each task, with the task's token on the command
    line, and runs the code that was sent with the run.
    """
    _module_with(SUPEREXEC_LOOP, "get_executor").get_executor = lambda *_args, **_options: executor


def check_server_bundles(check: Callable[[bytes], None]) -> None:
    """Have a ServerApp's process check a bundle before extracting any of it. A guard."""
    module = _module_with(SERVER_RUNTIME, "install_from_fab")
    install = module.install_from_fab

    def install_checked(content: bytes, *args: Any, **options: Any) -> Any:
        check(content)
        return install(content, *args, **options)

    module.install_from_fab = install_checked


def run_installed_client(app: ClientApp, check: Callable[[bytes], None]) -> None:
    """Have a ClientApp's process run this app, whatever a bundle contains. A guard.

    A bundle is checked and never extracted, so that no file of a run reaches the node's disk.
    """
    module = _module_with(CLIENT_RUNTIME, "install_from_fab", "get_load_client_app_fn")
    module.install_from_fab = lambda content, *_args, **_options: check(content)
    module.get_load_client_app_fn = lambda *_args, **_options: lambda *_ids: app


def poll_every(seconds: float) -> None:
    """Have the SuperNode poll for messages at this interval, and for its app's reply very often.

    Its loop calls `time.sleep` for both, which only the number of seconds distinguishes. The name
    `time` is replaced in that one module, so that no other code of the process is affected.
    """
    module: Any = importlib.import_module(SUPERNODE_LOOP)

    def sleep(duration: float) -> None:
        time.sleep(min(duration, seconds if duration == FLOWERS_POLL else _REPLY_POLL))

    if getattr(module, "time", None) is time:
        module.time = SimpleNamespace(sleep=sleep)


def await_tasks() -> None:
    """Have the SuperNode await the end of a message's task before it looks for the reply.

    Flower's own SuperNode waits for a reply, for ever if a task's process died before it had read
    the message or while it was sending its reply; the node then takes no other message. Here the
    end of a task without a whole reply becomes an error reply.
    """
    from flwr.common.constant import Status

    module: Any = importlib.import_module(SUPERNODE_LOOP)
    pull_message = getattr(module, "_pull_and_store_message", None)
    push_replies = getattr(module, "_push_messages", None)
    if pull_message is None or push_replies is None:
        return
    run_id: int | None = None

    def pull_and_note_run(**options: Any) -> Any:
        nonlocal run_id
        run_id = pull_message(**options)
        return run_id

    def await_and_push(*, state: Any, object_store: Any, **options: Any) -> Any:
        # Of this run alone: the task of a message whose run has ended meanwhile may never end.
        unfinished = [Status.PENDING, Status.STARTING, Status.RUNNING]
        while state.get_tasks(run_ids=[run_id], statuses=unfinished):
            time.sleep(_REPLY_POLL)
        _answer_for_dead_task(module, state, object_store, run_id)
        return push_replies(state=state, object_store=object_store, **options)

    module._pull_and_store_message = pull_and_note_run
    module._push_messages = await_and_push


def _answer_for_dead_task(module: Any, state: Any, store: Any, run_id: int | None) -> None:
    """Answer a run's message that has no whole reply with an error, now that its task has ended."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    entries = list(state.msg_store.values())
    messages = [entry.message for entry in entries if entry.message.metadata.run_id == run_id]
    reply_of = {m.metadata.reply_to_message_id: m.metadata.message_id for m in messages}
    for message in messages:
        reply = reply_of.get(message.metadata.message_id)
        if message.metadata.reply_to_message_id or (reply and _has_arrived(module, store, reply)):
            continue
        if reply:
            state.delete_messages(message_ids=[reply])
            store.delete(reply)
        tasks = state.get_tasks(run_ids=[message.metadata.run_id], order_by="pending_at")
        reason = tasks[-1].status.details if tasks else ""
        error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason or "its task did not answer")
        module._insert_message(Message(error, reply_to=message), state, store)
        store.delete(message.metadata.message_id)


def _has_arrived(module: Any, store: Any, message_id: str) -> bool:
    """Whether all objects of a message are in the store."""
    tree = store.get_object_tree(message_id)
    return all(store.get(node.object_id) != b"" for node in module.iterate_object_tree(tree))


def fail_task(role: str, reason: str) -> None:
    """Have Flower's program for a task of this role report the task as failed, and end.

    It raises when it begins to send heartbeats, before it reads anything, so that it reports the
    failure as that of an app, by the task's own token.
    """
    module = _module_with(CLIENT_RUNTIME if role == "client" else SERVER_RUNTIME, _HEARTBEATS)

    def fail(*_args: Any, **_options: Any) -> Any:
        raise FedsimError(reason)

    setattr(module, _HEARTBEATS, fail)


_HEARTBEATS = "make_task_heartbeat_fn_http"


def retry_soon() -> None:
    """Have this process retry soon if a part of a message has not arrived yet.

    A message can be visible before all of its parts have arrived. Flower then waits a second, and
    twice as long at each further try; the parts take milliseconds, so that a tenth of a second is
    enough. Other modules have imported the functions by name, so that replacing them here would
    have no effect: their keyword defaults are changed in place.
    """
    module: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        defaults = getattr(getattr(module, name, None), "__kwdefaults__", None) or {}
        if "initial_backoff" in defaults:
            defaults["initial_backoff"] = _RETRY_SECONDS


def replace_dead_actors() -> None:
    """Have Flower's simulation, which runs in this process, replace a Ray actor that has died.

    A client that ends its process (``os._exit``, a crash in C, the system's out-of-memory killer)
    ends the actor that it runs on. Flower returns the dead actor to the top of its pool and gives
    it the next client, so that most other clients would fail too, in all later rounds. Here a new
    actor takes its place, and only the one client fails.
    """
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool
    from ray.exceptions import ActorDiedError

    pool: Any = BasicActorPool
    fetch = pool.fetch_result_and_return_actor_to_pool
    if hasattr(fetch, "__wrapped__"):  # replaced by an earlier run of this process
        return

    @functools.wraps(fetch)
    def fetch_or_replace(self: Any, future: Any) -> Any:
        try:
            return fetch(self, future)
        except ActorDiedError:
            # Flower's handler of this error returns the actor that is stored here to the pool.
            self._future_to_actor[future] = self.create_actor_fn()
            raise

    pool.fetch_result_and_return_actor_to_pool = fetch_or_replace


def _module_with(name: str, *guards: str) -> Any:
    """A module of Flower, after a check that it has the names to be replaced.

    Raises
    ------
    FedsimError
        If one is missing: setting it would guard nothing.
    """
    # Not `import a.b as m`, which gives a function where one shadows the module's name.
    module: Any = importlib.import_module(name)
    for guard in guards:
        if not hasattr(module, guard):
            raise FedsimError(
                f"Flower {_dotted(flower_version())} has no {name}.{guard}, which guards a "
                f"deployment; install a Flower up to {_dotted(NEWEST)}."
            )
    return module


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
