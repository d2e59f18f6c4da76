"""`fedsim tune`."""

from __future__ import annotations

import numpy as np
import pytest
from clients_helpers import make_cnn, make_data, make_mlp
from rich.console import Console

import fedsim
from fedsim import RunConfig
from fedsim.cli.planning import Timing, measure, report_timings, tune
from fedsim.clients import SGD
from fedsim.randomness import Randomness
from fedsim.training import Trainer


def test_every_path_that_takes_the_model_is_measured_in_every_block_size():
    trainer = Trainer(make_mlp(), SGD(lr=0.1), make_data([4, 5, 6]), randomness=Randomness(0))
    found = measure(trainer, np.arange(3), repeats=1)
    assert {(one.path, one.block_size) for one in found} == {
        (path, size) for path in ("layered", "func", "plain") for size in (1, 2, 3)
    }
    assert [one.cpu for one in found] == sorted(one.cpu for one in found)


def test_what_a_run_would_take_by_default_is_measured_too():
    clients = make_data([2] * 9)
    trainer = Trainer(
        make_mlp(), SGD(lr=0.1), clients, block_size=7, batch_size=2, randomness=Randomness(0)
    )
    found = measure(trainer, np.arange(9), repeats=1)
    assert (trainer.path.name, 7) in {(one.path, one.block_size) for one in found}


def test_a_model_with_convolutions_is_offered_every_path():
    data = make_data([4, 5], features=36, shape=(1, 6, 6))
    trainer = Trainer(make_cnn(), SGD(lr=0.1), data, randomness=Randomness(0))
    assert {one.path for one in measure(trainer, np.arange(2), repeats=1)} == {
        "layered",
        "func",
        "plain",
    }


def test_the_proposal_is_written_as_set_options():
    trainer = Trainer(make_mlp(), SGD(lr=0.1), make_data([4, 5, 6]), randomness=Randomness(0))
    console = Console(record=True, width=100)
    report_timings(console, [Timing("func", 2, 0.1, 0.1), Timing("plain", 1, 0.2, 0.2)], trainer)
    assert "--set client.path=func --set client.block-size=2" in console.export_text()


def test_a_run_is_left_as_it_is_where_nothing_is_clearly_faster():
    trainer = Trainer(make_mlp(), SGD(lr=0.1), make_data([4, 5, 6]), randomness=Randomness(0))
    for own, proposes in ((0.102, False), (0.2, True)):
        console = Console(record=True, width=100)
        timings = [Timing("func", 2, 0.1, 0.1), Timing("layered", 2, own, 0.3)]
        report_timings(console, timings, trainer)
        assert ("--set client.path=func" in console.export_text()) == proposes


@pytest.mark.parametrize("state", ["reset", "client"])
def test_what_clients_keep_is_neither_written_nor_spent(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept, path = tmp_path / "kept", tmp_path / "run.toml"
    config = RunConfig.parse(
        {
            "rounds": 1,
            "partition": {"clients": 3, "max-examples": 60},
            "client": {
                "name": "adadp-lr", "lr": 0.1, "batch-size": 30, "state": state,
                "state-dir": str(kept), "mechanism": {"name": "clipping"},
                "noise": {"multiplier": 2.0, "max-epsilon": 30.0},
            },
            "mechanism": {"name": "none"},
            "engine": {"device": "cpu"},
        }
    )  # fmt: skip
    path.write_text(config.to_toml(), encoding="utf-8")
    fedsim.run(config, out=tmp_path / "run")

    def contents():
        files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
        return {str(file.relative_to(tmp_path)): file.read_bytes() for file in files}

    before = contents()
    assert before
    tune(path, None, clients=3, repeats=1)
    assert contents() == before
