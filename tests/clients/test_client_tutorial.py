"""The tutorial on an algorithm of one's own."""

from __future__ import annotations

import pathlib
import re
import sys
import tomllib

import numpy as np
import pytest
import torch
from clients_helpers import joined

from fedsim import RunConfig
from fedsim.runs import factories

TUTORIAL = pathlib.Path(__file__).parents[2] / "docs" / "your_own_algorithm.md"


@pytest.fixture
def tutorial(tmp_path, monkeypatch):
    text = TUTORIAL.read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_clients.py").write_text(blocks[0][1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield blocks
    sys.modules.pop("my_clients", None)


def test_the_tutorials_code_runs(tutorial, capsys):
    exec(compile(tutorial[2][1], "tutorial", "exec"), {})
    assert "torch.Size([4, 27])" in capsys.readouterr().out


def test_the_tutorials_module_is_under_40_lines(tutorial):
    assert len(tutorial[0][1].splitlines()) < 40


def test_the_tutorials_config_names_what_its_module_has(tutorial):
    config = RunConfig.parse(tomllib.loads(tutorial[1][1]))
    algorithm = factories.algorithm(config)
    assert (algorithm.beta, algorithm.lr) == (0.8, 0.005)
    loss, metric = factories.loss(config), factories.metrics(config)["among-3"]
    outputs, targets = torch.zeros(4, 3), torch.arange(4) % 3
    np.testing.assert_allclose(loss(outputs, targets), np.log(3) * (2 / 3) ** 1.5, rtol=1e-6)
    assert metric.update(metric.init(), outputs, targets).count == 4


def test_the_tutorials_algorithm_has_the_same_bytes_in_every_block(tutorial):
    from clients_helpers import make_data, make_mlp
    from my_clients import SignMomentum, focal

    from fedsim.randomness import Randomness
    from fedsim.training import Trainer

    rows = []
    for block_size in (1, 3):
        trainer = Trainer(
            make_mlp(), SignMomentum(), make_data([9, 4, 7]), batch_size=4, loss=focal,
            randomness=Randomness(0), block_size=block_size,
        )  # fmt: skip
        rows.append(joined(trainer.train(trainer.initial(), np.arange(3), 1))[0])
    assert torch.equal(*rows)
