"""`python -m benchmarks.example_privacy [--device cuda]`: DP-SGD, compared with Opacus.

With Poisson batches of 200 expected examples, clipping and noise, on the MLP job and on a small
CNN: milliseconds per client's step (of CPU time on a CPU, of wall time on a GPU) and the peak
memory that the steps add. fedsim trains one client, or a block of sixteen; Opacus one client, with
gradients per example (`GradSampleModule`) or with ghost clipping. fedsim's noise is the sum of four
draws for each coordinate, Opacus's a single one unless it says so (`secure_mode`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.jobs import JOBS
from benchmarks.memory import resident
from fedsim.clients import SGD
from fedsim.federation.engines.process import use_one_thread
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.training import ClientData, ExamplePrivacy, Trainer

EXAMPLES, BATCH, STEPS, LR, CLIP, NOISE = 2000, 200, 5, 0.1, 1.0, 1.0
MODELS, CLIENTS = ("mlp", "cnn"), 16


def model_of(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    if name == "mlp":
        return JOBS["mlp"].model(), (784,)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    ), (1, 28, 28)  # fmt: skip


def examples(
    shape: tuple[int, ...], device: str = "cpu", clients: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    generator, count = torch.Generator().manual_seed(0), clients * EXAMPLES
    x = torch.rand(count, *shape, generator=generator)
    return x.to(device), torch.randint(10, (count,), generator=generator).to(device)


def ours(name: str, device: str, clients: int = 1) -> float:
    """Milliseconds per client's step, through the trainer."""
    model, shape = model_of(name)
    x, y = examples(shape, device, clients)
    trainer = Trainer(
        model,
        SGD(lr=LR),
        ClientData(x, y, list(np.arange(len(y)).reshape(clients, EXAMPLES))),
        batch_size=BATCH,
        steps=STEPS,
        device=device,
        randomness=Randomness(0),
        privacy=ExamplePrivacy(Clipping(CLIP), NOISE),
    )

    def work(t: int) -> None:
        for _ in trainer.train(trainer.initial(), np.arange(clients), t):
            pass

    return timed(work, device) / clients


def theirs(name: str, device: str, ghost: bool = False, secure: bool = False) -> float:
    """Milliseconds per step, with Opacus's wrappers of a model and an optimiser."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    warnings.simplefilter("ignore")
    model, shape = model_of(name)
    model = model.to(device)
    x, y = examples(shape, device)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    private: dict[str, Any] = {
        "noise_multiplier": NOISE,
        "max_grad_norm": CLIP,
        "expected_batch_size": BATCH,
        "secure_mode": secure,
    }
    loss: Callable[..., Any] = F.cross_entropy
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)
        optimizer = DPOptimizerFastGradientClipping(sgd, **private)
        loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    else:
        wrapped, optimizer = GradSampleModule(model), DPOptimizer(sgd, **private)

    def work(t: int) -> None:
        draws = np.random.default_rng(t)
        for _ in range(STEPS):
            batch = torch.from_numpy(np.flatnonzero(draws.random(EXAMPLES) < BATCH / EXAMPLES))
            optimizer.zero_grad()
            loss(wrapped(x[batch]), y[batch]).backward()
            optimizer.step()

    return timed(work, device)


WAYS: dict[str, Callable[[str, str], float]] = {
    "fedsim": ours,
    f"fedsim, {CLIENTS} clients": partial(ours, clients=CLIENTS),
    "Opacus": theirs,
    "Opacus, ghost clipping": partial(theirs, ghost=True),
    "Opacus, ghost clipping, four draws": partial(theirs, ghost=True, secure=True),
}


def timed(work: Callable[[int], object], device: str, repeats: int = 5) -> float:
    """Least milliseconds per step; the first repeat, which captures steps, is not counted."""
    best = float("inf")
    for t in range(repeats):
        began = clock(device)
        work(t)
        if t:
            best = min(best, (clock(device) - began) / STEPS * 1e3)
    return best


def clock(device: str) -> float:
    """CPU seconds, or on a GPU wall seconds when it has finished its work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def alone(way: str, name: str, device: str) -> tuple[float, float] | str:
    """(ms per step, peak MiB), measured in a process of its own; or why there are none."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.example_privacy",
            "--device",
            device,
            "--one",
            way,
            name,
        ],
        capture_output=True,
        text=True,
    )
    if run.returncode:
        return (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
    ms, mib = run.stdout.split()[-2:]
    return float(ms), float(mib)


def measure(way: str, name: str, device: str) -> tuple[float, float]:
    """As `alone`, but in this process; call it once per process."""
    if device == "cuda":
        ms = WAYS[way](name, device)
        return ms, torch.cuda.max_memory_allocated() / 2**20
    model_of(name)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    ms = WAYS[way](name, device)
    return ms, resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "MODEL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    use_one_thread()
    if given.one:
        way, name = given.one
        print(*measure(way, name, given.device))
        return
    place = torch.cuda.get_device_name() if given.device == "cuda" else "one thread"
    table = Table(title=f"DP-SGD, {BATCH} examples a step, {place}")
    for column in ("model", "way", "ms a client's step", "of Opacus", "MiB"):
        table.add_column(column, justify="left" if column in ("model", "way") else "right")
    for name in given.models:
        found: dict[str, tuple[float, float]] = {}
        for way in WAYS:
            figures = alone(way, name, given.device)
            text = figures if isinstance(figures, str) else "{:.3g} ms, {:.0f} MiB".format(*figures)
            # At once: what is stopped by its time has said what it has found.
            print(f"{name}, {way}: {text}", flush=True)
            if not isinstance(figures, str):
                found[way] = figures
        for way, (ms, mib) in found.items():
            share = f"{ms / found['Opacus'][0]:.2f}" if "Opacus" in found else ""
            table.add_row(name, way, f"{ms:.3g}", share, f"{mib:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
