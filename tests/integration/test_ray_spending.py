"""What clients spend where Ray workers train them: lines are the driver's, before they begin."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim import RunConfig
from fedsim.privacy import Ledger

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_runtime")]

CONFIG = RunConfig().replace(
    **{
        "rounds": 2,
        "partition.clients": 5,
        "client.batch-size": 41,
        "client.mechanism.name": "clipping",
        "client.noise.multiplier": 1.5,
        "evaluate.every": 0,
    }
)


def test_on_ray_clients_spend_what_they_spend_in_one_process(tmp_path):
    local = fedsim.run(CONFIG)
    ray = CONFIG.replace(**{"engine.name": "ray", "engine.workers": 2})
    in_memory = fedsim.run(ray.replace(**{"engine.workers": 1}))
    on_disk = fedsim.run(ray, out=tmp_path / "run")
    assert in_memory.privacy.epsilon == on_disk.privacy.epsilon == local.privacy.epsilon
    log = Ledger.read(tmp_path / "run" / "ledger-examples.jsonl")
    asked = {1: set[int](), 2: set[int]()}
    for entry in log.entries:
        asked[entry.round] |= set(entry.clients)
    assert asked == {1: set(range(5)), 2: set(range(5))}
    for result in (in_memory, on_disk):
        for name, value in result.arrays.to_torch_state_dict().items():
            assert torch.equal(value, local.arrays.to_torch_state_dict()[name])


def test_on_ray_a_clients_budget_ends_the_run_before_it_is_exceeded():
    ray = CONFIG.replace(**{"engine.name": "ray", "engine.workers": 1, "rounds": 5})
    spent = fedsim.run(CONFIG).metrics[0]["example-epsilon"]
    result = fedsim.run(ray.replace(**{"client.noise.max-epsilon": spent * 1.001}))
    assert result.ended == "budget"
    assert result.privacy.epsilon == spent
