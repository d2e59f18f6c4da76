"""RunState: a run that another session takes up ends with the same bytes."""

from __future__ import annotations

import json

import pytest
import torch

from fedsim import RunConfig
from fedsim.engines import LocalGrid
from fedsim.engines.arrays import tensors
from fedsim.runs.build import Build
from fedsim.runs.drive import Session
from fedsim.runs.state import RunState
from fedsim.strategies import run_to_end

BASE = RunConfig.parse(
    {
        "seed": 7,
        "rounds": 6,
        "partition": {"clients": 8, "max-examples": 160},
        "model": {"name": "mlp", "widths": "8"},
        "client": {"batch-size": 5, "epochs": 1},
        "cohort": {"name": "poisson", "rate": 0.5},
        "evaluate": {"every": 0},
        "engine": {"device": "cpu"},
    }
)

PRIVATE = {
    "mechanism.name": "quantile-clipping", "mechanism.bit-noise": 0.5, "noise.multiplier": 1.0
}  # fmt: skip
CASES = {
    "momentum": {**PRIVATE, "server.momentum": 0.9},
    "adam": {**PRIVATE, "server.optimizer": "adam", "server.lr": 0.01},
    "adaclip": {"mechanism.name": "adaclip", "noise.multiplier": 1.0},
    "layers": {**PRIVATE, "mechanism.per-layer": True},
    "clients keep their rate": {"client.name": "adadp-lr", "client.state": "client"},
    "the mean of clients' rates": {"client.name": "adadp-lr", "client.state": "server"},
    "private examples": {
        "client.mechanism.name": "clipping", "client.noise.multiplier": 1.0,
        "client.name": "adadp-lr", "client.state": "client",
    },
}  # fmt: skip


def finish(session: Session) -> dict[str, bytes]:
    grid = LocalGrid(session.build.trainer)
    run_to_end(session.rounds(grid), grid, None)
    arrays = session.result().arrays
    return {name: tensor.numpy().tobytes() for name, tensor in tensors(arrays).items()}


def through_a_file(state: RunState) -> RunState:
    kept, text = state.parted()
    assert all(isinstance(tensor, torch.Tensor) for tensor in kept.values())
    json.loads(text)
    return RunState.joined(kept, text)


@pytest.mark.parametrize("case", CASES)
def test_a_run_taken_up_by_another_session_ends_with_the_same_bytes(case):
    config = BASE.replace(**CASES[case])
    whole = Session(Build(config))
    expected = finish(whole)
    half = Session(Build(config.replace(rounds=3)))
    finish(half)
    state = through_a_file(half.state())
    assert (state.round, state.metrics_length) == (3, 3)
    rest = Session(Build(config), resume=state)
    assert finish(rest) == expected
    assert rest.strategy.privacy_spent() == whole.strategy.privacy_spent()
    ended, other = whole.state(), rest.state()
    assert (other.round, other.ledger_length) == (ended.round, ended.ledger_length)
    assert other.config == ended.config


def test_a_state_of_another_format_is_refused():
    session = Session(Build(BASE))
    kept, text = session.state().parted()
    with pytest.raises(ValueError, match="has format 9; this version reads 1"):
        RunState.joined(kept, text.replace('"format": 1', '"format": 9'))
