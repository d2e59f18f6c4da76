"""`python -m benchmarks.convolutions [--device cuda]`: ADADP's CIFAR-10 network, five clients.

Compares straightforward loops of SGD and ADADP over the clients with the same algorithms through
the trainer. On a CPU it reports milliseconds of CPU time per gradient step, with the plain loops in
channels-last format. On a GPU, without TF32 and with deterministic sums, it reports rounds per
second. The ways take turns (`benchmarks.turns`). ``--out FILE`` adds a line for each to a table,
with the machine's name.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from benchmarks.turns import in_turns, ratio
from fedsim import models
from fedsim.clients import SGD, AdadpLR
from fedsim.federation.engines.process import use_one_thread
from fedsim.randomness import Draws, Randomness
from fedsim.training import ClientData, Trainer
from fedsim.training.graphs import StepGraphs
from fedsim.training.side_effects import reproducible_arithmetic

CLIENTS, BATCH, LR, TOL = 5, 10, 0.05, 0.1
AIM = 0.65
EXAMPLES = {"cpu": 200, "cuda": 1000}
PAPER_STEPS = 200 * 10_000 // BATCH  # of each of the five clients, one epoch a round
COLUMNS = "| machine | way | ms a step of all clients | rounds/s | the paper's 200 rounds, s |"


def batches(data: ClientData, client: int, t: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One shuffled pass over a client's examples."""
    examples = data.indices[client]
    draws = Draws(Randomness(1), level="example", amplified=False, client=client)
    order = examples[draws.generator(t).permutation(len(examples))]
    for start in range(0, len(order), BATCH):
        batch = torch.from_numpy(order[start : start + BATCH]).to(data.x.device)
        yield images(data.x[batch]), data.y[batch]


def images(x: Tensor) -> Tensor:
    return x if x.is_cuda else x.contiguous(memory_format=torch.channels_last)


def fresh(model: nn.Module, data: ClientData) -> nn.Module:
    local = copy.deepcopy(model).to(data.x.device)
    return local if data.x.is_cuda else local.to(memory_format=torch.channels_last)


def plain_sgd(model: nn.Module, data: ClientData, t: int) -> None:
    """A round of `torch.optim.SGD`."""
    for client in range(CLIENTS):
        local = fresh(model, data)
        optimizer = torch.optim.SGD(local.parameters(), lr=LR)
        for x, y in batches(data, client, t):
            optimizer.zero_grad()
            F.cross_entropy(local(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def plain_adadp(model: nn.Module, data: ClientData, t: int) -> None:
    """A round of ADADP; the model's own parameters hold the point at which gradients are taken."""
    for client in range(CLIENTS):
        local = fresh(model, data)
        weights, eta = list(local.parameters()), LR
        passes = batches(data, client, t)
        for (x1, y1), (x2, y2) in zip(passes, passes, strict=False):
            # err is the distance between a full step on the first batch and half a step on each of
            # two batches. A step with err above TOL is rejected, and err sets the next eta.
            start = [w.detach().clone() for w in weights]
            first = torch.autograd.grad(F.cross_entropy(local(x1), y1), weights)
            with torch.no_grad():
                full = [w - eta * g for w, g in zip(start, first, strict=True)]
                for w, g in zip(weights, first, strict=True):
                    w.sub_(g, alpha=eta / 2)
            second = torch.autograd.grad(F.cross_entropy(local(x2), y2), weights)
            with torch.no_grad():
                square = torch.zeros((), device=data.x.device)
                for w, f, g in zip(weights, full, second, strict=True):
                    w.sub_(g, alpha=eta / 2)
                    square += ((f - w) / f.abs().clamp(min=1)).square().sum()
                err = float(square.sqrt())
                if not err <= TOL:
                    for w, old in zip(weights, start, strict=True):
                        w.copy_(old)
            ratio = TOL / max(err, 1e-12) if np.isfinite(err) else 0.0
            eta = min(eta * min(max(ratio, 0.9), 1.1), 10 * LR)


@dataclass(frozen=True)
class Variant:
    """A way to compute a round: a plain loop, or a trainer."""

    name: str
    work: Callable[[int], object]
    trainer: Trainer | None = None


def variants(device: str) -> list[Variant]:
    """Plain loops and trainers, on the same examples."""
    model = models.build("adadp-cifar", (3, 32, 32), 10)
    generator = torch.Generator().manual_seed(0)
    count = CLIENTS * EXAMPLES[device]
    x = torch.rand(count, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10, (count,), generator=generator).to(device)
    data = ClientData(x, y, list(np.arange(count).reshape(CLIENTS, -1)))
    all_variants = []
    for plain, algorithm in (
        (plain_sgd, SGD(lr=LR)),
        (plain_adadp, AdadpLR(lr=LR, tol=TOL, keep="half", eta_max=10 * LR)),
    ):
        trainer = Trainer(
            model, algorithm, data, batch_size=BATCH, randomness=Randomness(1), device=device
        )
        name = type(algorithm).__name__
        all_variants += [
            Variant(f"{name}, plain loop", partial(plain, model, data)),
            Variant(f"{name}, fedsim", partial(round_of, trainer), trainer),
        ]
    return all_variants


def round_of(trainer: Trainer, t: int) -> None:
    for _ in trainer.train(trainer.initial(), np.arange(CLIENTS), t):
        pass


def measure(device: str, pairs: int) -> dict[str, list[float]]:
    """Seconds of each variant's rounds: CPU time on a CPU, wall time on a GPU."""
    chosen = variants(device)
    sides = {variant.name: partial(finished, variant, device) for variant in chosen}
    clock = time.process_time if device == "cpu" else time.perf_counter
    with reproducible_arithmetic(torch.device(device)):
        in_turns(sides, 1, clock=clock)  # a warm-up, in which steps are captured
        seconds = in_turns(sides, pairs, first=2, clock=clock)
    for variant in chosen:
        steps = None if variant.trainer is None else variant.trainer.stepper.captured_step
        if isinstance(steps, StepGraphs) and not (steps.can_capture and steps.graphs):
            raise SystemExit(f"{variant.name}: its steps were not captured; see the log.")
    return seconds


def finished(variant: Variant, device: str, t: int) -> None:
    """Compute a round, and wait until the GPU has finished it."""
    variant.work(t)
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=tuple(EXAMPLES), default="cpu")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path, help="Markdown file to add lines to")
    asked = parser.parse_args()
    use_one_thread()
    seconds, console = measure(asked.device, asked.pairs), Console()
    steps = EXAMPLES[asked.device] // BATCH
    on_gpu = asked.device == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, one core"
    if not on_gpu:
        console.print(f"Aim: {AIM:g} of the plain loop's time; .50 with AVX-512.")
    lines = []
    for name, turns in seconds.items():
        over = ratio(turns, seconds[f"{name.split(',')[0]}, plain loop"])
        took = median(turns)
        step_seconds = took / steps
        console.print(
            f"{name:22s} {step_seconds / CLIENTS * 1e3:8.3f} ms a client's step   "
            f"{1 / took:8.3f} rounds/s   {over} of plain",
            soft_wrap=True,
        )
        lines.append(
            f"| {machine} | {name} | {step_seconds * 1e3:.3f} | {1 / took:.3f} | "
            f"{step_seconds * PAPER_STEPS:.0f} |"
        )
    if asked.out is not None:
        if not asked.out.exists():
            asked.out.write_text(f"{COLUMNS}\n|{' --- |' * 5}\n")
        with asked.out.open("a") as table:
            table.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
