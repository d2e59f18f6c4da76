"""Tracebacks of errors in a user's own code: its own frames, and no others."""

from __future__ import annotations

import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim import RunConfig
from fedsim.cli import main
from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.training import ClientData, ExamplePrivacy, Trainer

MODELS = """
import torch
from torch import nn

class Unmade(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.width = parse("three")

class Failing(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.fc = nn.Linear(input_shape[0], num_classes)

    def forward(self, x):
        return self.head(x)

    def head(self, x):
        return self.fc(x[:, :3])

def parse(text):
    return int(text)

def loss(outputs, targets):
    return parse("a loss")
"""
CONFIG = 'rounds = 1\n[partition]\nclients = 4\n[model]\nname = "mymodel:{model}"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mymodel.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mymodel", raising=False)
    return tmp_path


def frames(error: BaseException | None) -> list[tuple[str, str]]:
    if error is None:
        return []
    return [(Path(at.filename).name, at.name) for at in traceback.extract_tb(error.__traceback__)]


def test_what_makes_a_model_raises_with_its_own_frames_from_python(folder: Path) -> None:
    (folder / "run.toml").write_text(CONFIG.format(model="Unmade"))
    with pytest.raises(ValueError, match="three") as raised:
        fedsim.run(RunConfig.load("run.toml"))
    caller, *own = frames(raised.value)
    assert caller[0] == "test_errors.py"
    assert own == [("mymodel.py", "__init__"), ("mymodel.py", "parse")]


def test_a_forward_that_raises_is_a_sentence_whose_cause_has_its_own_frames(folder: Path) -> None:
    (folder / "run.toml").write_text(CONFIG.format(model="Failing"))
    with pytest.raises(FedsimError, match=r"mymodel.py:19; it must take") as raised:
        fedsim.run(RunConfig.load("run.toml"))
    assert [file for file, _ in frames(raised.value)] == ["test_errors.py"]
    cause = raised.value.__cause__
    assert frames(cause) == [("mymodel.py", "forward"), ("mymodel.py", "head")]


def test_a_trainer_shows_the_frames_of_a_users_loss_alone(folder: Path) -> None:
    import mymodel

    data = ClientData(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]), [np.arange(4)])
    model = mymodel.Failing((2,), 3)
    privacy = ExamplePrivacy(Clipping(1.0), 1.0)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        Trainer(model, SGD(), data, loss=mymodel.loss, randomness=Randomness(1), privacy=privacy)
    error: BaseException | None = raised.value
    assert "mymodel.py" in {file for file, _ in frames(error)} | {
        f for f, _ in frames(error.__cause__)
    }
    while error is not None:
        assert {file for file, _ in frames(error)} <= {"test_errors.py", "mymodel.py"}
        error = error.__cause__


def test_the_command_prints_the_users_frames_and_no_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.toml").write_text(CONFIG.format(model="Unmade"))
    with pytest.raises(SystemExit) as ended:
        main(["run", "run.toml"])
    assert ended.value.code == 1
    shown = capsys.readouterr().err
    assert shown.count('File "') == 2
    assert shown.count("mymodel.py") == 2
    assert shown.rstrip().endswith("ValueError: invalid literal for int() with base 10: 'three'")
