"""The client with a memory: against the recursion worked out by hand, and a plain loop."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim import RunConfig
from fedsim.clients import RunFacts
from fedsim.cohorts import FixedCohort, FullCohort
from fedsim.engines import LocalGrid, array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping, NoPrivacy, Normalization, QuantileClipping
from fedsim.randomness import Randomness
from fedsim.strategies import ClientTraining, DPFedAvg
from fedsim.training import ClientData, Trainer

TARGETS = torch.tensor([[3.0, 4.0], [-1.0, 2.0], [0.5, -2.5]], dtype=torch.float64)


@pytest.fixture
def normec(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "normec"))
    import normec

    yield normec
    sys.modules.pop("normec", None)


def made(normec, targets, mechanism, cohort, rounds, beta=0.5, gamma=1.0, steps=1):
    """Clients with ``f_i = |w - m_i|^2 / 2`` of two weights, whose update is ``lr (m_i - w)``."""
    algorithm = normec.NormEC(lr=1.0, beta=beta).for_run(RunFacts(mechanism=mechanism))
    model = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    x = torch.ones(len(targets), 1, dtype=torch.float64)
    data = ClientData(x, targets, [np.array([i]) for i in range(len(targets))])
    trainer = Trainer(
        model, algorithm, data, steps=steps, batch_size=0, state="client", path="plain", metrics={},
        loss=lambda outputs, y: (outputs - y).square().sum(1) / 2, randomness=Randomness(1),
    )  # fmt: skip
    share = cohort.expected_size / len(targets)
    server = normec.MemoryStep(rate=beta * share, lr=gamma)
    strategy = DPFedAvg(
        mechanism=mechanism or NoPrivacy("uniform"), noise_multiplier=0.0, cohort=cohort, seed=3,
        clients=ClientTraining(algorithm=algorithm), server_optimizer=server, fraction_evaluate=0.0,
    )  # fmt: skip
    arrays = array_record({"weight": torch.zeros(2, 1, dtype=torch.float64)})
    result = strategy.start(LocalGrid(trainer), arrays, num_rounds=rounds)
    kept = trainer.state()
    memories = torch.zeros_like(targets)
    memories[kept["client_ids"]] = trainer.packing.unpack(kept["memory"])
    return tensors(result.arrays)["weight"].flatten(), memories, strategy.server_optimizer.memory


def test_the_memory_goes_as_worked_out_by_hand(normec):
    """g = (3, 4) at a model that stays, a = 1, beta = .5."""
    wanted = [(0.25, 0.333333), (0.496269, 0.661692), (0.738274, 0.984365)]
    for rounds, memory in enumerate(wanted, 1):
        _, memories, mean = made(
            normec, TARGETS[:1], Normalization(1.0, 1.0), FullCohort(1), rounds, gamma=1e-9
        )
        assert memories[0].tolist() == pytest.approx(memory, abs=1e-6)
        assert mean.tolist() == pytest.approx(memory, abs=1e-6)


@pytest.mark.parametrize("mechanism", [Normalization(1.0, 0.5), Clipping(0.3), None], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_it_is_its_recursion(normec, mechanism, size):
    rounds, beta, gamma = 6, 0.4, 0.7
    cohort = FixedCohort(size, 3)
    reached, memories, mean = made(normec, TARGETS, mechanism, cohort, rounds, beta, gamma)
    torch.testing.assert_close(mean, memories.mean(0), rtol=0, atol=1e-8)
    if size < 3:
        return
    w, v = torch.zeros(2, dtype=torch.float64), torch.zeros_like(TARGETS)
    for _ in range(rounds):
        difference = TARGETS - w - v
        v = v + beta * (difference if mechanism is None else mechanism.bound(difference))
        w = w + gamma * v.mean(0)
    torch.testing.assert_close(reached, w, rtol=0, atol=1e-8)
    torch.testing.assert_close(memories, v, rtol=0, atol=1e-8)


def test_a_bound_that_no_client_knows_is_refused(normec):
    with pytest.raises(FedsimError, match=r"clients do not know how .* bounds it"):
        normec.NormEC().for_run(RunFacts(mechanism=QuantileClipping()))


def test_its_config_runs_the_same_on_several_workers(normec, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2] / "examples" / "normec")
    small = {
        "data.name": "digits", "partition.clients": 40, "rounds": 12, "cohort.groups": 4,
        "noise.bands": 4, "evaluate.every": 6,
    }  # fmt: skip
    config = RunConfig.load("normec.toml").replace(**small)
    runs = [
        fedsim.run(config.replace(**{"engine.workers": workers}), out=tmp_path / str(workers))
        for workers in (1, 2)
    ]
    one, two = (run.metrics[-1]["test-loss"] for run in runs)
    assert one == two
    assert np.isfinite(one)
    assert len({(tmp_path / str(n) / "model.safetensors").read_bytes() for n in (1, 2)}) == 1
