"""The captured path: on a GPU, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp

from fedsim.clients import SGD, AdadpLR, Trainer
from fedsim.clients.graphs import GraphedPath
from fedsim.randomness import Randomness


def test_a_capture_that_fails_leaves_the_path_as_it_was(monkeypatch):
    def fails(self, inputs):
        raise RuntimeError("no device")

    monkeypatch.setattr(GraphedPath, "_capture", fails)
    rows = []
    for wrap in (False, True):
        trainer = Trainer(
            make_mlp(), AdadpLR(lr=0.2), make_data([9, 5, 7]), batch_size=4,
            randomness=Randomness(0),
        )  # fmt: skip
        if wrap:
            trainer.path = GraphedPath(trainer.path)
        rows.append(next(trainer.train(trainer.initial(), np.arange(3), 1)).rows)
    assert torch.equal(*rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("algorithm", [SGD(lr=0.2), AdadpLR(lr=0.2)])
def test_captured_steps_are_those_of_the_plain_path(algorithm):
    rows = []
    for path in ("stacked", "plain"):
        trainer = Trainer(
            make_mlp(dtype=torch.float64), algorithm, make_data([9, 5, 7], dtype=torch.float64),
            batch_size=4, epochs=3, path=path, randomness=Randomness(0), device="cuda",
        )  # fmt: skip
        rows.append(next(trainer.train(trainer.initial(), np.arange(3), 1)).rows)
    torch.testing.assert_close(*rows, rtol=0, atol=1e-10)
