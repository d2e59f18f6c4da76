from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fedsim.deploy.federation import Federation
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.deploy.services import Node


@pytest.mark.parametrize(
    ("written", "used"),
    [("superlink.example.org:9092", "127.0.0.1:9092"), ("127.0.0.1:7777", "127.0.0.1:7777")],
)
def test_nodes_of_a_rehearsal_reach_the_superlink_of_this_machine(
    tmp_path, monkeypatch, written, used
):
    """They waited for the machine of that name."""
    rehearsal = object.__new__(Rehearsal)
    rehearsal.federation = Federation.create(
        tmp_path / "fed", hosts=["superlink.example.org"], nodes=1
    )
    rehearsal._homes = tmp_path
    start_service = MagicMock()
    monkeypatch.setattr(rehearsal, "start_service", start_service)
    directory = rehearsal.federation.node(0)
    replace(Node.load(directory), superlink=written).save()
    rehearsal.start_node(0)
    command = start_service.call_args_list[0].args[0].command
    assert command[command.index("--superlink") + 1] == used


def test_keys_of_a_temporary_federation_are_removed_if_its_start_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        assert [path.name for path in tmp_path.rglob("ca.key")] == ["ca.key"]
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Rehearsal, "_start_server", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Rehearsal.temporary(1)
    assert not any(tmp_path.iterdir())
