"""Workers of a process that has differentiated where torch sees a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cuda_helpers import needs_a_fake_gpu
from run_configs import CLIPPING, EXAMPLES, POISSON

CLIENTS = [*CLIPPING, *POISSON]

# A stand-in that torch's engine takes for a GPU: it begins a thread for it, which no fork has.
PROGRAM = """
import sys
import numpy as np, torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError

if sys.argv[1] == "gpu":
    with FakeTensorMode():
        torch.empty(1, device="cuda").to("cuda")
torch.zeros(1, requires_grad=True).sum().backward()
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
settings = [
    "seed=1", "rounds=2", "data.name=digits", "partition.clients=40", "client.lr=0.5",
    "engine.device=cpu", *sys.argv[3:],
]
for workers in sys.argv[2].split(","):
    config = RunConfig.from_overrides([*settings, f"engine.workers={workers}"])
    try:
        result = fedsim.run(config, model=model)
    except FedsimError as error:
        print(error)
    else:
        print(result.metrics[-1]["usable"] > 0, result.metrics[-1]["test-loss"])
"""


def output_of(device: str, *arguments: str) -> list[str]:
    environment = os.environ if device == "gpu" else os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, device, *arguments],
        capture_output=True, text=True, timeout=200, check=True, env=environment,
    )  # fmt: skip
    return result.stdout.splitlines()


@needs_a_fake_gpu
def test_a_path_without_autograd_trains_in_workers() -> None:
    one, two = output_of("gpu", "1,2", "client.path=layered", *CLIENTS)
    assert one == two
    assert one.startswith("True")


@needs_a_fake_gpu
@pytest.mark.parametrize("settings", [["client.path=plain", *CLIENTS], EXAMPLES])
def test_workers_that_could_not_differentiate_are_refused(settings: list[str]) -> None:
    one, two = output_of("gpu", "1,2", *settings)
    assert one.startswith("True")
    assert two.startswith("engine.workers is 2, and torch cannot compute gradients in processes")


def test_without_a_gpu_workers_differentiate() -> None:
    one, two = output_of("none", "1,2", "client.path=plain", *CLIENTS)
    assert one == two
    assert one.startswith("True")
