"""Clients' own state follows their replies: a failed or repeated block leaves no trace."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from toy_clients import training

import fedsim
from fedsim.config import RunConfig
from fedsim.federation.engines.workers import guarded_blocks
from fedsim.rows.block import CLIENT_IDS
from fedsim.runs.callbacks import Callback
from fedsim.runs.directory import RunDirectory
from fedsim.runs.resolve import resolve
from fedsim.training.client_state import MemoryStore

IDS = np.arange(6)


def trainer_with_memory():
    tree = {
        "partition": {"clients": 6},
        "client": {"lr": 0.2, "momentum": 0.9, "state": "client", "batch-size": 40},
        "engine": {"device": "cpu"},
    }
    return resolve(RunConfig.parse(tree)).trainer


def run(trainer, rounds=3):
    rows = {}
    for number in range(1, rounds + 1):
        vector = torch.zeros(trainer.layout.d)
        for block in guarded_blocks(trainer, training(vector, number), IDS):
            for at, client in enumerate(block.client_ids.tolist()):
                rows[number, client] = block.rows[at].numpy().tobytes() if block.ok[at] else None
    return rows


@pytest.fixture(scope="module")
def expected():
    rows = run(trainer_with_memory())
    assert rows[1, 0] != rows[2, 0]  # the velocity is kept
    return rows


def test_a_block_that_fails_after_training_is_run_again_from_the_same_state(expected):
    trainer = trainer_with_memory()
    fit, failed = trainer.rounds.fit_block, []

    def fails_once_a_round(received, entering, numbers):
        result = fit(received, entering, numbers)
        if entering.round not in failed:
            failed.append(entering.round)
            raise RuntimeError("after all its steps")
        return result

    trainer.rounds.fit_block = fails_once_a_round
    assert run(trainer) == expected
    assert failed == [1, 2, 3]


def test_state_that_travels_to_a_worker_and_back_gives_the_same_bytes(expected):
    home, worker = trainer_with_memory(), trainer_with_memory()
    rows = {}
    for number in (1, 2, 3):
        for part in (IDS[3:], IDS[:3]):
            worker.restore(home.state(part, number))
            vector = torch.zeros(home.layout.d)
            for block in guarded_blocks(worker, training(vector, number), part):
                for at, client in enumerate(block.client_ids.tolist()):
                    rows[number, client] = block.rows[at].numpy().tobytes()
            home.store_states(worker.state(part), number)
    assert rows == expected


def test_a_worker_is_lent_no_more_than_its_clients_state():
    home, worker = trainer_with_memory(), trainer_with_memory().copy_for("cpu")
    run(home, 1)
    worker.restore(home.state(IDS[:2], 2))
    worker.restore(home.state(IDS[3:5], 2))
    assert worker.state()["client_ids"].tolist() == [3, 4]
    assert worker.state(IDS)["velocity"].shape == (2, home.packing.width)


def test_what_clients_keep_is_all_there_or_not_at_all():
    columns = MemoryStore(3)
    columns.save({CLIENT_IDS: torch.tensor([1]), "eta": torch.tensor([0.5])}, 1)
    with pytest.raises((RuntimeError, IndexError)):
        columns.save({CLIENT_IDS: torch.tensor([0, 2]), "eta": torch.tensor([0.1, 0.2, 0.3])}, 1)
    columns.save({CLIENT_IDS: torch.tensor([2]), "eta": torch.tensor([0.7])}, 1)
    assert columns.state()["eta"].tolist()[-1] == pytest.approx(0.7)
    assert columns.load(np.array([1]), 2)[1]["eta"].tolist() == [0.5]


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "empty": lambda path: path.write_bytes(b""),
    "random": lambda path: path.write_bytes(np.random.default_rng(0).bytes(400)),
    "no regular file": lambda path: (path.unlink(), os.mkfifo(path)),
    "another model's": lambda path: save_file({"velocity": torch.zeros(3)}, path),
}


@pytest.mark.spanning
@pytest.mark.parametrize("private", [False, True], ids=["open", "examples protected"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_a_clients_state_is_that_clients_failure(
    damage, private, tmp_path, caplog
):
    """Client 2's files are damaged after round 1: it fails from then on, and nobody else does."""

    class Damaging(Callback):
        def on_round(self, status):
            if status.round == 1:
                (path,) = state.rglob("client-2/round-1.safetensors")
                DAMAGES[damage](path)

    client = {"lr": 0.2, "momentum": 0.9, "state": "client", "batch-size": 20}
    if private:
        client |= {"mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.0}}
    found = []
    for workers in (1, 2):
        state = tmp_path / f"state-{workers}"
        config = RunConfig.parse(
            {
                "rounds": 3,
                "partition": {"clients": 6},
                "client": client | {"state-dir": str(state)},
                "engine": {"workers": workers, "device": "cpu"},
            }
        )
        caplog.clear()
        out = tmp_path / f"run-{workers}"
        fedsim.run(config, out=out, callbacks=[Damaging()])
        rows = RunDirectory(out).metrics_file.rows()[1:]
        assert [row["usable"] for row in rows] == [6, 5, 5]
        assert [row["failed-raised"] for row in rows] == [0, 1, 1]
        if damage != "another model's":
            assert "the state of client 2 in" in caplog.text
            assert "is damaged" in caplog.text
        found.append((out / "model.safetensors").read_bytes())
    assert found[0] == found[1]
