"""Examples in docstrings give what they say they give."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import fedsim
from fedsim import RunConfig

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "fedsim").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.fixture(scope="module")
def with_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of two rounds, as in the examples."""
    directory = tmp_path_factory.mktemp("examples")
    config = RunConfig.from_overrides(["rounds=2", "partition.clients=20"])
    fedsim.run(config, out=directory / "runs" / "digits")
    return directory


def test_what_people_call_first_has_an_example() -> None:
    assert {"fedsim.runs.runner", "fedsim.runs.saved", "fedsim.privacy.calibration"} < {*MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(
    name: str, with_a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(with_a_run)
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
