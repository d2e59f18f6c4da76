from __future__ import annotations

import ast
import importlib
import inspect
import time

import pytest

from fedsim.deploy import looking
from fedsim.deploy.looking import FLOWERS, look_seconds


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


@pytest.mark.parametrize(("wanted", "waited"), [(3, 0.2), (0.1, 0.1)])
def test_a_supernode_looks_again_after_so_many_seconds(monkeypatch, wanted, waited):
    loop = importlib.import_module(looking._LOOP)
    command = importlib.import_module("flwr.supernode.cli")
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(loop, "time", loop.time)
    monkeypatch.setattr(looking.sys, "argv", [])
    monkeypatch.setattr(command, "flower_supernode", lambda: loop.time.sleep(wanted))
    looking.main(0.2, ["--insecure"])
    assert slept == [waited]
    assert looking.sys.argv == ["flower-supernode", "--insecure"]


@pytest.mark.parametrize("clients", [1, 10, 100, 10_000])
def test_no_federation_looks_more_than_twenty_times_a_second_or_less_than_flower(clients):
    seconds = look_seconds(clients)
    assert seconds <= FLOWERS
    assert seconds == FLOWERS or clients / seconds <= 20 + 1e-9
