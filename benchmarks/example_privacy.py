"""`python -m benchmarks.example_privacy`: DP-SGD in one client, compared with Opacus.

With Poisson batches of 200 expected examples, clipping and noise: CPU milliseconds per step and the
peak memory that the steps add, on the MLP job and on a small CNN.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

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
MODELS = ("mlp", "cnn")


def model_of(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    if name == "mlp":
        return JOBS["mlp"].model(), (784,)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    ), (1, 28, 28)  # fmt: skip


def examples(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(EXAMPLES, *shape, generator=generator)
    return x, torch.randint(10, (EXAMPLES,), generator=generator)


def ours(name: str) -> float:
    """CPU milliseconds per step, through the trainer."""
    model, shape = model_of(name)
    x, y = examples(shape)
    trainer = Trainer(
        model,
        SGD(lr=LR),
        ClientData(x, y, [np.arange(EXAMPLES)]),
        batch_size=BATCH,
        steps=STEPS,
        randomness=Randomness(0),
        privacy=ExamplePrivacy(Clipping(CLIP), NOISE),
    )
    return timed(lambda t: trainer.fit(trainer.initial(), np.array([0]), t))


def theirs(name: str) -> float:
    """CPU milliseconds per step, with Opacus's `GradSampleModule` and `DPOptimizer`."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    warnings.simplefilter("ignore")
    model, shape = model_of(name)
    x, y = examples(shape)
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=LR),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=BATCH,
    )

    def work(t: int) -> None:
        draws = np.random.default_rng(t)
        for _ in range(STEPS):
            batch = torch.from_numpy(np.flatnonzero(draws.random(EXAMPLES) < BATCH / EXAMPLES))
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return timed(work)


def timed(work: Callable[[int], object], repeats: int = 5) -> float:
    best = float("inf")
    for t in range(repeats):
        began = time.process_time()
        work(t)
        if t:
            best = min(best, (time.process_time() - began) / STEPS * 1e3)
    return best


def alone(library: str, name: str) -> tuple[float, float]:
    """(CPU ms per step, peak MiB), measured in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.example_privacy", library, name],
        capture_output=True,
        text=True,
        check=True,
    )
    ms, mib = run.stdout.split()[-2:]
    return float(ms), float(mib)


def main() -> None:
    use_one_thread()
    if len(sys.argv) == 3:
        model_of(sys.argv[2])
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        ms = {"ours": ours, "theirs": theirs}[sys.argv[1]](sys.argv[2])
        print(ms, resident("VmHWM") - before)
        return
    table = Table(title=f"DP-SGD, one client, {BATCH} examples a step, one thread")
    for column in ("model", "fedsim ms", "Opacus ms", "fedsim MiB", "Opacus MiB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in MODELS:
        (a, b), (c, d) = alone("ours", name), alone("theirs", name)
        table.add_row(name, f"{a:.1f}", f"{c:.1f}", f"{b:.0f}", f"{d:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
