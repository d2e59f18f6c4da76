from __future__ import annotations

import ast
import importlib
import inspect
import time

import pytest

from fedsim.deploy import looking
from fedsim.deploy.looking import FLOWERS, look_seconds, retry_soon


def test_flowers_supernode_waits_by_the_clock_that_is_replaced_and_no_longer_than_is_said():
    loop = importlib.import_module(looking._LOOP)
    waits = [
        ast.literal_eval(call.args[0])
        for call in ast.walk(ast.parse(inspect.getsource(loop)))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "time.sleep"
    ]
    assert loop.time is time
    assert max(waits) == FLOWERS
    used = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(loop)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "time"
    }
    assert used == {"sleep"}


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Runs `looking.main` with a stand-in for Flower's program, which is given Flower's loop."""
    loop = importlib.import_module(looking._LOOP)
    command = importlib.import_module("flwr.supernode.cli")
    monkeypatch.setattr(loop, "time", loop.time)
    monkeypatch.setattr(loop, "_push_messages", loop._push_messages)
    monkeypatch.setattr(looking.sys, "argv", [])
    monkeypatch.setattr(looking, "retry_soon", lambda: None)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))

    def start(program):
        monkeypatch.setattr(command, "flower_supernode", lambda: program(loop))
        looking.main(0.2, ["--insecure"])
        assert looking.sys.argv == ["flower-supernode", "--insecure"]

    return start


@pytest.mark.parametrize(("wanted", "waited"), [(3, 0.2), (0.5, 0.05), (0.01, 0.01)])
def test_a_supernode_looks_again_after_so_many_seconds(monkeypatch, started, wanted, waited):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    started(lambda loop: loop.time.sleep(wanted))
    assert slept == [waited]


def test_a_supernode_rings_before_it_waits_for_its_apps_reply(monkeypatch, started, tmp_path):
    loop = importlib.import_module(looking._LOOP)
    done = []
    monkeypatch.setattr(looking, "ring", lambda directory: done.append(directory))
    monkeypatch.setattr(loop, "_push_messages", lambda **options: done.append(options))
    started(lambda loop: loop._push_messages(state=1))
    assert done == [tmp_path, {"state": 1}]


def test_flowers_supernode_waits_for_its_apps_reply_when_all_of_a_message_is_there():
    body = inspect.getsource(importlib.import_module(looking._LOOP).start_client_internal)
    assert body.index("_pull_and_store_message(") < body.index("_push_messages(")


def test_what_is_on_its_way_is_asked_for_again_soon(monkeypatch):
    module = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    pulls = [module.pull_objects, module.pull_and_inflate_object_from_tree]
    for pull in pulls:
        monkeypatch.setattr(pull, "__kwdefaults__", dict(pull.__kwdefaults__))
    retry_soon()
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


@pytest.mark.parametrize("clients", [1, 10, 100, 10_000])
def test_no_federation_looks_more_than_twenty_times_a_second_or_less_than_flower(clients):
    seconds = look_seconds(clients)
    assert seconds <= FLOWERS
    assert seconds == FLOWERS or clients / seconds <= 20 + 1e-9
