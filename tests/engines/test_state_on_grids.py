"""Clients' own state follows their replies: a failed or repeated block leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.config import RunConfig
from fedsim.engines.blocks import guarded_blocks
from fedsim.runs.build import Build
from fedsim.training.memory import ProcessMemory

IDS = np.arange(6)


def trainer_with_memory():
    tree = {
        "partition": {"clients": 6},
        "client": {"lr": 0.2, "momentum": 0.9, "state": "client", "batch-size": 40},
        "engine": {"device": "cpu"},
    }
    return Build(RunConfig.parse(tree)).trainer


def run(trainer, rounds=3):
    rows = {}
    for number in range(1, rounds + 1):
        vector = torch.zeros(trainer.layout.d)
        for block in guarded_blocks(trainer, "train", vector, IDS, number):
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
    fit, failed = trainer.rounds.fit, []

    def fails_once_a_round(received, entering, numbers):
        result = fit(received, entering, numbers)
        if entering.round not in failed:
            failed.append(entering.round)
            raise RuntimeError("after all its steps")
        return result

    trainer.rounds.fit = fails_once_a_round
    assert run(trainer) == expected
    assert failed == [1, 2, 3]


def test_state_that_travels_to_a_worker_and_back_gives_the_same_bytes(expected):
    home, worker = trainer_with_memory(), trainer_with_memory()
    rows = {}
    for number in (1, 2, 3):
        for part in (IDS[3:], IDS[:3]):
            worker.restore(home.state(part, number))
            vector = torch.zeros(home.layout.d)
            for block in guarded_blocks(worker, "train", vector, part, number):
                for at, client in enumerate(block.client_ids.tolist()):
                    rows[number, client] = block.rows[at].numpy().tobytes()
            home.keep(worker.state(part), number)
    assert rows == expected


def test_a_worker_is_lent_no_more_than_its_clients_state():
    home, worker = trainer_with_memory(), trainer_with_memory().copy_for("cpu")
    run(home, 1)
    worker.restore(home.state(IDS[:2], 2))
    worker.restore(home.state(IDS[3:5], 2))
    assert worker.state()["client_ids"].tolist() == [3, 4]
    assert worker.state(IDS)["velocity"].shape == (2, home.packing.width)


def test_what_clients_keep_is_all_there_or_not_at_all():
    columns = ProcessMemory(3)
    ids, state = np.array([1]), {"eta": torch.tensor([0.5])}
    columns.store(ids, 1, state)
    with pytest.raises((RuntimeError, IndexError)):
        columns.store(np.array([0, 2]), 1, {"eta": torch.tensor([0.1, 0.2, 0.3])})
    columns.store(np.array([2]), 1, {"eta": torch.tensor([0.7])})
    assert columns.state()["eta"].tolist()[-1] == pytest.approx(0.7)
    assert columns.load(ids, 2)[1]["eta"].tolist() == [0.5]
