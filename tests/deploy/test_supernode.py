from __future__ import annotations

import importlib
import sys
import time
from types import SimpleNamespace

import pytest

from fedsim.deploy import flower_programs, flower_replacements
from fedsim.deploy.flower_programs import poll_seconds
from fedsim.deploy.flower_replacements import FLOWERS_POLL, SUPERNODE_LOOP


def test_a_supernode_asks_often_and_is_given_its_arguments(monkeypatch):
    loop = importlib.import_module(SUPERNODE_LOOP)
    command = importlib.import_module("flwr.supernode.cli")
    done = []
    state = SimpleNamespace(get_tasks=lambda **_: [], msg_store={})
    monkeypatch.setattr(loop, "time", loop.time)
    monkeypatch.setattr(loop, "_push_messages", lambda **_: done.append("sends"))
    monkeypatch.setattr(loop, "_pull_and_store_message", loop._pull_and_store_message)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(flower_replacements, "retry_soon", lambda: done.append("retries soon"))
    monkeypatch.setattr(time, "sleep", done.append)

    def program():
        loop.time.sleep(FLOWERS_POLL)
        loop._push_messages(state=state, object_store=None)

    monkeypatch.setattr(command, "flower_supernode", program)
    flower_programs.run_supernode(0.2, ["--insecure"])
    assert sys.argv == ["flower-supernode", "--insecure"]
    assert done == ["retries soon", 0.2, "sends"]


@pytest.mark.parametrize("clients", [1, 10, 100, 10_000])
def test_no_federation_asks_more_than_twenty_times_a_second_or_less_than_flower(clients):
    seconds = poll_seconds(clients)
    assert seconds <= FLOWERS_POLL
    assert seconds == FLOWERS_POLL or clients / seconds <= 20 + 1e-9
