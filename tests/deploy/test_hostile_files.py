"""Files of a federation that somebody has damaged, or edited in a hurry: one sentence each."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from fedsim.deploy.bundle import check_bundle
from fedsim.deploy.federation import Federation
from fedsim.deploy.party_files import read_roster
from fedsim.deploy.policy import Policy
from fedsim.deploy.services import Node, SuperLink
from fedsim.errors import FedsimError

NODE = {
    "superlink": '"h:1"', "client": "0", "clients": "3", "insecure": "false", "app": '"a:b"',
    "task-seconds": "60.0",
}  # fmt: skip
READERS = {
    "node.toml": (Node.load, lambda directory: Policy.load(directory / "node.toml")),
    "superlink.toml": (SuperLink.load,),
    "clients.toml": (lambda directory: read_roster(directory / "clients.toml"),),
    "federation.toml": (Federation.load,),
}
NO_TOML = [b"\xff\xfe", b"a = ", b"a = " + b"[" * 5000, b"\x00", b"a = " + b"9" * 5000]


@pytest.mark.parametrize("content", NO_TOML, ids=range(len(NO_TOML)))
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_toml(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for read in READERS[name]:
        with pytest.raises(FedsimError):
            read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in NODE for value in ("[1]", "1979-05-27", "{a = 1}")),
        *((key, value) for key in ("superlink", "app") for value in ("3", "true", '""')),
        *((key, value) for key in ("client", "clients") for value in ("-1", "1.0", "true", '"1"')),
        *(("insecure", value) for value in ('"no"', "0", "1")),
        *(("task-seconds", value) for value in ("nan", "inf", "-1", '"1"', "true")),
        *((key, None) for key in ("superlink", "client", "clients")),
    ],
)
def test_a_nodes_settings_that_are_none(key: str, value: str | None, tmp_path: Path) -> None:
    lines = [f"{name} = {right}" for name, right in NODE.items()]
    (tmp_path / "node.toml").write_text("\n".join(lines))
    assert Node.load(tmp_path).services(tmp_path, port=1)
    changed = {**NODE, key: value}
    lines = [f"{name} = {text}" for name, text in changed.items() if text is not None]
    (tmp_path / "node.toml").write_text("\n".join(lines))
    with pytest.raises(FedsimError, match=key):
        Node.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["policy = 3", "policy = []", "[[policy]]", '[policy]\ndata = ["x"]']
)
def test_a_policy_that_is_none_lets_nothing_in(text: str, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(FedsimError, match="policy"):
        Policy.load(tmp_path / "node.toml")


@pytest.mark.parametrize(
    "line",
    ["x = 1", "A" * 64 + " = 1", "z" * 64 + " = 1"]
    + ["a" * 64 + f" = {value}" for value in ("-1", "1.0", "true", 2**70, "[1]", '"1"')],
)
def test_a_roster_with_a_line_that_says_nothing(line: str, tmp_path: Path) -> None:
    (tmp_path / "clients.toml").write_text(f"[clients]\n{line}\n")
    with pytest.raises(FedsimError, match="64 hex digits in small letters"):
        read_roster(tmp_path / "clients.toml")


def test_what_is_no_bundle_is_a_sentence_whatever_its_bytes() -> None:
    draws = random.Random(5)
    good = _bundle()
    check_bundle(good, "serverapp", "a:b")
    for _ in range(500):
        content = bytearray(good)
        for _ in range(draws.randrange(1, 12)):
            content[draws.randrange(len(content))] = draws.randrange(256)
        with suppress(FedsimError):
            check_bundle(bytes(content[: draws.randrange(len(content) + 1)]), "serverapp", "a:b")


def _bundle() -> bytes:
    import io
    import zipfile

    project = (
        '[project]\nname = "n"\nversion = "1.0.0"\n[tool.flwr.app]\npublisher = "p"\n'
        '[tool.flwr.app.components]\nserverapp = "a:b"\nclientapp = "c:d"\n'
    )
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("pyproject.toml", project)
        archive.writestr(".info/CONTENT", "")
    return content.getvalue()
