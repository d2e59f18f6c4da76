"""Each private name of Flower's that a deployment replaces: there, used, replaced to effect."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.simulation.ray_transport import ray_actor
from flwr.supercore import sql_mixin
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink import config_loader
from flwr.supernode.nodestate import NodeStateFactory

from fedsim.deploy import flower_replacements
from fedsim.deploy.flower_programs import new_token, operator_plugin, token_digest
from fedsim.deploy.flower_replacements import (
    CLIENT_RUNTIME,
    FLOWERS_POLL,
    NEWEST,
    SERVER_RUNTIME,
    SUPEREXEC_LOOP,
    SUPERNODE_LOOP,
    flower_version,
)
from fedsim.deploy.services import TASK_POLL
from fedsim.errors import FedsimError
from fedsim.federation.flower_internals import CLIENT_RAISED, ensure_identity


@pytest.fixture
def module(monkeypatch):
    """A module of Flower's, some of whose names are put back when the test ends."""

    def found(name, *names):
        module = importlib.import_module(name)
        for replaced in names:
            monkeypatch.setattr(module, replaced, getattr(module, replaced))
        return module

    return found


def uses_of_time(module) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "time"
    }


# -- what this Flower is ------------------------------------------------------------------


@pytest.fixture
def warnings(caplog):
    flower_replacements.warn_of_newer_flower.cache_clear()
    caplog.set_level(logging.WARNING, logger="fedsim")
    yield lambda: [record.getMessage() for record in caplog.records]
    flower_replacements.warn_of_newer_flower.cache_clear()


def test_a_newer_flower_is_one_warning(monkeypatch, warnings):
    monkeypatch.setattr(flower_replacements, "flower_version", lambda: (1, NEWEST[1] + 1))
    for _ in range(3):
        flower_replacements.warn_of_newer_flower()
    (sentence,) = warnings()
    assert f"1.{NEWEST[1] + 1}" in sentence


def test_a_flower_that_was_looked_up_is_no_warning(monkeypatch, warnings):
    for version in ((1, 38), NEWEST):
        monkeypatch.setattr(flower_replacements, "flower_version", lambda version=version: version)
        flower_replacements.warn_of_newer_flower.cache_clear()
        flower_replacements.warn_of_newer_flower()
    assert warnings() == []


def test_the_installed_flower_is_one_whose_names_were_looked_up():
    # A newer one: run this file against it, then raise NEWEST.
    assert (1, 38) <= flower_version() <= NEWEST


@pytest.mark.parametrize(
    ("name", "guard", "replace"),
    [
        (
            "flwr.superlink.config_loader",
            "get_control_authn_plugins",
            lambda: flower_replacements.accept_operator_only(object),
        ),
        (SUPEREXEC_LOOP, "get_executor", lambda: flower_replacements.use_executor(None)),
        (
            SERVER_RUNTIME,
            "install_from_fab",
            lambda: flower_replacements.check_server_bundles(lambda content: None),
        ),
        (
            CLIENT_RUNTIME,
            "install_from_fab",
            lambda: flower_replacements.run_installed_client(None, lambda content: None),
        ),
        (
            CLIENT_RUNTIME,
            "get_load_client_app_fn",
            lambda: flower_replacements.run_installed_client(None, lambda content: None),
        ),
        (
            CLIENT_RUNTIME,
            "make_task_heartbeat_fn_http",
            lambda: flower_replacements.fail_task("client", "died"),
        ),
        (
            SERVER_RUNTIME,
            "make_task_heartbeat_fn_http",
            lambda: flower_replacements.fail_task("server", "died"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_guard_whose_name_is_gone_ends_its_process(monkeypatch, module, name, guard, replace):
    monkeypatch.setenv("FLWR_OIDC_ENABLED", "0")
    monkeypatch.delattr(module(name), guard)
    with pytest.raises(FedsimError, match=f"has no {name}.{guard}, which guards"):
        replace()


# -- the server ---------------------------------------------------------------------------


def test_flower_asks_the_plugin_that_it_is_given(monkeypatch, module):
    module("flwr.superlink.config_loader", "get_control_authn_plugins")
    monkeypatch.setenv("FLWR_OIDC_ENABLED", "0")
    token = new_token()
    flower_replacements.accept_operator_only(operator_plugin(token_digest(token)))
    plugin = config_loader.load_control_authn_plugin()
    assert plugin.validate_tokens_in_metadata([("t", token)])[0]
    assert plugin.validate_tokens_in_metadata([("t", "x")]) == (False, None)


def test_a_request_waits_a_minute_for_the_superlinks_database(module, tmp_path):
    module("flwr.supercore.sql_mixin", "SQLITE_PRAGMAS")
    flower_replacements.wait_for_database()
    with sqlite3.connect(tmp_path / "superlink.db") as connection:
        sql_mixin._set_sqlite_pragmas(connection, None)
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (60_000,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# -- apps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        (CLIENT_RUNTIME, ("install_from_fab(", "get_load_client_app_fn(")),
        (SERVER_RUNTIME, ("install_from_fab(", "get_project_dir(")),
        (SUPEREXEC_LOOP, ("get_executor(",)),
    ],
)
def test_the_names_that_guard_are_called_where_flower_runs_code(name, calls):
    # A release that loads code by another way must be looked at before it is let in.
    text = Path(importlib.util.find_spec(name).origin).read_text()
    assert all(call in text for call in calls)


def test_a_server_checks_a_bundle_before_it_is_extracted(monkeypatch):
    runtime = importlib.import_module(SERVER_RUNTIME)
    done = []
    monkeypatch.setattr(runtime, "install_from_fab", lambda *_, **__: done.append("extracted"))
    flower_replacements.check_server_bundles(done.append)
    runtime.install_from_fab(b"bundle", skip_prompt=True)
    assert done == [b"bundle", "extracted"]


def test_a_node_checks_a_bundle_and_runs_the_installed_app(module):
    runtime = module(CLIENT_RUNTIME, "install_from_fab", "get_load_client_app_fn")
    checked, app = [], object()
    flower_replacements.run_installed_client(app, checked.append)
    runtime.install_from_fab(b"bundle", skip_prompt=True)
    assert checked == [b"bundle"]
    load = runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    assert load("evil/app", "9", "0" * 64) is app


def test_a_superexec_uses_the_executor_that_it_is_given(module):
    superexec = module(SUPEREXEC_LOOP, "get_executor")
    executor = object()
    flower_replacements.use_executor(executor)
    assert superexec.get_executor("subprocess") is executor


def test_a_superexec_looks_for_tasks_as_often_as_its_variable_says(monkeypatch):
    monkeypatch.setenv(TASK_POLL, "0.25")
    assert importlib.import_module(SUPEREXEC_LOOP)._get_task_poll_interval() == 0.25


# -- a node -------------------------------------------------------------------------------


def test_flowers_supernode_waits_by_the_name_that_is_replaced_and_no_longer_than_is_said():
    loop = importlib.import_module(SUPERNODE_LOOP)
    waits = [
        ast.literal_eval(call.args[0])
        for call in ast.walk(ast.parse(inspect.getsource(loop)))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "time.sleep"
    ]
    assert loop.time is time
    assert max(waits) == FLOWERS_POLL
    assert uses_of_time(loop) == {"sleep"}


@pytest.mark.parametrize(("wanted", "waited"), [(3, 0.2), (0.5, 0.05), (0.01, 0.01)])
def test_a_supernode_asks_again_after_so_many_seconds(monkeypatch, module, wanted, waited):
    loop = module(SUPERNODE_LOOP, "time")
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    flower_replacements.poll_every(0.2)
    loop.time.sleep(wanted)
    assert slept == [waited]


class NodeWithMessage:
    """Flower's own state of a SuperNode that has received a message, and created its task."""

    def __init__(self) -> None:
        ensure_identity(7)
        self.message = Message(RecordDict(), 2, "train")
        self.message.metadata.__dict__["_message_id"] = self.message.object_id
        self.run = self.message.metadata.run_id  # another if another test has set it before
        factory = ObjectStoreFactory()
        self.store = factory.store()
        self.state = NodeStateFactory(factory).state()
        self.task = self.state.create_task("flwr-clientapp", self.run, fab_hash="0")
        self.state.claim_task(self.task)
        self.state.store_message(self.message)

    def reply(self, content: RecordDict) -> Message:
        reply = Message(content, reply_to=self.message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.state.store_message(reply)
        self.store.preregister(self.run, get_object_tree(reply))
        return reply


@pytest.fixture
def node(module):
    """Such a node, with a function that returns the replies that its loop would send."""
    loop = module(SUPERNODE_LOOP, "_push_messages", "_pull_and_store_message")
    node, sent = NodeWithMessage(), []
    loop._push_messages = lambda **options: sent.append(
        [
            entry.message
            for entry in node.state.msg_store.values()
            if entry.message.metadata.reply_to_message_id
        ]
    )
    loop._pull_and_store_message = lambda **options: node.run
    flower_replacements.await_tasks()

    def push() -> list[Message]:
        assert loop._pull_and_store_message(state=node.state) == node.run
        loop._push_messages(state=node.state, object_store=node.store, send=None, push_object=None)
        (replies,) = sent
        return replies

    node.push = push
    return node


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_task_that_ends_without_a_reply_is_answered_by_its_node(node, begun, read):
    if begun:
        node.state.activate_task(node.task)
    if read:
        # Flower 1.42 has renamed it.
        get_messages = getattr(node.state, "get_messages_legacy", node.state.get_messages)
        assert get_messages(is_reply=False) == [node.message]
    node.state.finish_task(node.task, "failed", "the process was ended by signal 9")
    (reply,) = node.push()
    assert reply.metadata.reply_to_message_id == node.message.metadata.message_id
    assert (reply.error.code, reply.error.reason) == (
        CLIENT_RAISED,
        "the process was ended by signal 9",
    )
    assert node.store.get_object_tree(reply.metadata.message_id).object_id


def test_a_task_of_a_run_that_has_ended_holds_up_no_other(node):
    node.state.create_task("flwr-clientapp", node.run + 1, fab_hash="0")
    node.state.finish_task(node.task, "failed", "the process was ended by signal 9")
    (reply,) = node.push()
    assert reply.has_error()


def test_a_task_that_ends_while_it_sends_its_reply_is_answered_by_its_node(node):
    record = RecordDict({"metrics": MetricRecord({"loss": 1.0})})
    partial = node.reply(record)
    node.state.activate_task(node.task)
    node.state.finish_task(node.task, "failed", "the process was ended by signal 9")
    (reply,) = node.push()
    assert reply.has_error()
    assert reply.metadata.message_id != partial.metadata.message_id


def test_a_reply_that_has_arrived_is_sent_once_its_task_has_ended(node):
    reply = node.reply(RecordDict({"metrics": MetricRecord({"loss": 1.0})}))
    for object_id, part in get_all_nested_objects(reply).items():
        node.store.put(object_id, part.deflate())
    node.state.activate_task(node.task)
    threading.Timer(0.3, node.state.finish_task, [node.task, "completed", ""]).start()
    assert node.push() == [reply]
    assert not node.state.get_tasks(statuses=["running"])


def test_flowers_supernode_waits_for_its_apps_reply_when_all_of_a_message_is_there():
    body = inspect.getsource(importlib.import_module(SUPERNODE_LOOP).start_client_internal)
    assert body.index("_pull_and_store_message(") < body.index("_push_messages(")


def test_what_is_on_its_way_is_asked_for_again_soon(monkeypatch):
    module = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    pulls = [module.pull_objects, module.pull_and_inflate_object_from_tree]
    for pull in pulls:
        monkeypatch.setattr(pull, "__kwdefaults__", dict(pull.__kwdefaults__))
    flower_replacements.retry_soon()
    assert {pull.__kwdefaults__["initial_backoff"] for pull in pulls} == {0.1}
    # Flower's own grid and node use these.
    asked = []

    def unready(object_id: str) -> bytes:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise module.ObjectUnavailableError(object_id)
        return b"here"

    assert module.pull_objects(["a"], unready) == {"a": b"here"}
    assert asked[2] - asked[0] < 1.0


@pytest.mark.parametrize(
    ("name", "gone", "replace"),
    [
        (SUPERNODE_LOOP, "time", lambda: flower_replacements.poll_every(0.2)),
        (SUPERNODE_LOOP, "_push_messages", lambda: flower_replacements.await_tasks()),
        (
            "flwr.supercore.inflatable.inflatable_utils",
            "pull_objects",
            flower_replacements.retry_soon,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_name_that_only_makes_a_round_quicker_may_be_gone(monkeypatch, name, gone, replace):
    module = importlib.import_module(name)
    for pull in ("pull_objects", "pull_and_inflate_object_from_tree"):
        if hasattr(module, pull):
            function = getattr(module, pull)
            monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    monkeypatch.delattr(module, gone)
    replace()
    assert not hasattr(module, gone)


# -- the simulation -----------------------------------------------------------------------


class Pool(ray_actor.BasicActorPool):
    """Of actors that are names."""

    def __init__(self, actors: list[str]) -> None:
        self.pool, self._future_to_actor = list(actors), {}
        self.create_actor_fn = lambda: "new"


def test_an_actor_that_died_is_replaced_and_one_that_raised_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray")
    fetch = ray_actor.BasicActorPool.fetch_result_and_return_actor_to_pool
    # Put back when the test ends, whatever replaces it.
    monkeypatch.setattr(ray_actor.BasicActorPool, "fetch_result_and_return_actor_to_pool", fetch)
    flower_replacements.replace_dead_actors()
    flower_replacements.replace_dead_actors()
    results = {
        "fine": ("0", "reply", "context"),
        "raised": ValueError("the client's own"),
        "died": ray.exceptions.ActorDiedError(),
    }

    def get(future: str) -> tuple[str, str, str]:
        result = results[future]
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(ray_actor.ray, "get", get)
    for outcome, left in [("fine", "actor"), ("raised", "actor"), ("died", "new")]:
        pool = Pool(["other", "actor"])
        future = pool.submit(lambda actor, *job, outcome=outcome: outcome, (None, None, "0", None))
        try:
            pool.fetch_result_and_return_actor_to_pool(future)
        except Exception:  # as Flower's backend does it
            pool.add_actor_back_to_pool(future)
        assert pool.pool == ["other", left]
