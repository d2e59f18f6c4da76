"""`python -m benchmarks.ordinary_models`: ordinary models, beside a loop as lean as it can be.

    python -m benchmarks.ordinary_models                          # all, batches of 10 and of 64
    python -m benchmarks.ordinary_models --models lstm --kernel eager --json

What is measured is local training: ten steps of SGD a client, on the path that the rule chooses.
The loop sets parameters in place once a client and takes `torch.autograd.grad` and one
`torch._foreach_add_` a step on the same examples; where there are images it runs with channels
first and with channels last, and the faster counts. The sides take turns; the ratio of a turn is of
CPU time. The median of the turns' ratios is printed with an interval that covers the true median
with at least 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import comb
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.jobs import LR, SEED
from benchmarks.ordinary_networks import TASKS, Task
from fedsim.clients import SGD
from fedsim.federation.engines.process import use_one_thread
from fedsim.randomness import Draws, Randomness
from fedsim.training import ClientData, Trainer
from fedsim.training.paths.choice import KernelName, PathName

STEPS, MOST_CLIENTS, TURN = 10, 8, 0.4
"""Steps a client, clients at most, and about how many CPU seconds a side of a turn should take."""
CONFIDENCE, AIM = 0.95, 1.05


@dataclass(frozen=True)
class Row:
    """What one model took.

    Attributes
    ----------
    model, path, kernel : str
    batch, clients, pairs : int
    fedsim, loop : float
        Median CPU milliseconds a client.
    ratio, low, high : float
        Median of the turns' ratios, and its interval.
    difference : float
        L2 norm of what updates differ by, beside that of the loop's updates.
    """

    model: str
    path: str
    kernel: str
    batch: int
    clients: int
    pairs: int
    fedsim: float
    loop: float
    ratio: float
    low: float
    high: float
    difference: float


Work = Callable[[int, int], list[Tensor]]
"""Updates of so many clients in a round."""


def lean_loop(task: Task, model: nn.Module, data: ClientData, clients: int, t: int) -> list[Tensor]:
    """The updates of the first clients."""
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    start = [parameter.detach().clone() for parameter in parameters]
    updates = []
    for client in range(clients):
        examples = data.indices[client]
        draws = Draws(Randomness(SEED), level="example", amplified=False, client=client)
        order = torch.from_numpy(examples[draws.generator(t).permutation(len(examples))])
        for batch in order.view(STEPS, -1):
            loss = task.mean_loss(model(data.x[batch]), data.y[batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-LR)
        with torch.no_grad():
            pairs = zip(parameters, start, strict=True)
            updates.append(torch.cat([(w - old).flatten() for w, old in pairs]))
            torch._foreach_copy_(parameters, start)
    return updates


def fedsim_loop(trainer: Trainer, clients: int, t: int) -> list[Tensor]:
    """The same updates."""
    blocks = trainer.train(trainer.initial(), np.arange(clients), t)
    return [row for block in blocks if block.rows is not None for row in block.rows]


def loops(task: Task, model: nn.Module, data: ClientData) -> Iterator[Work]:
    """The loop, and where there are images with channels last besides."""
    yield lambda clients, t: lean_loop(task, model, data, clients, t)
    if data.x.dim() == 4:
        place = {"memory_format": torch.channels_last}
        images = ClientData(data.x.contiguous(**place), data.y, data.indices)
        last = task.model().to(**place)
        last.load_state_dict(model.state_dict())
        yield lambda clients, t: lean_loop(task, last, images, clients, t)


def cpu_seconds(work: Work, clients: int, t: int) -> float:
    """Of this process, in which all is done."""
    began = time.process_time()
    work(clients, t)
    return time.process_time() - began


def compare(task: Task, batch: int, pairs: int, kernel: KernelName, path: PathName) -> Row:
    """The trainer beside the loop, turn by turn."""
    torch.manual_seed(SEED)
    model, count = task.model(), MOST_CLIENTS * STEPS * batch
    x, y = task.examples(count, torch.Generator().manual_seed(SEED))
    data = ClientData(x, y, list(np.arange(count).reshape(MOST_CLIENTS, -1)))
    trainer = Trainer(
        model, SGD(lr=LR), data, batch_size=batch, steps=STEPS, loss=task.loss, path=path,
        kernel=kernel, randomness=Randomness(SEED),
    )  # fmt: skip
    plain = list(loops(task, model, data))
    sides = [lambda clients, t: fedsim_loop(trainer, clients, t), *plain]
    ours, *theirs = (torch.stack(side(2, 1)) for side in sides)
    difference = float((ours - theirs[0]).norm() / theirs[0].norm())
    one = min(cpu_seconds(side, 2, 2) for side in plain) / 2
    clients = int(np.clip(TURN / one, 2, MOST_CLIENTS))
    seconds = np.empty((pairs, len(sides)))
    for turn in range(pairs):
        # The side that runs first finds the caches as the other one left them.
        order = range(len(sides)) if turn % 2 else reversed(range(len(sides)))
        for side in order:
            seconds[turn, side] = cpu_seconds(sides[side], clients, 3 + turn) / clients
    fastest = 1 + int(np.argmin(np.median(seconds[:, 1:], axis=0)))
    ratios = sorted((seconds[:, 0] / seconds[:, fastest]).tolist())
    low, high = interval(ratios)
    chosen = trainer.stepper.path
    used = getattr(chosen, "compiled", None)
    ours_ms, loop_ms = (1e3 * float(np.median(seconds[:, side])) for side in (0, fastest))
    return Row(
        task.name, chosen.name, "-" if used is None else "compiled" if used else "eager",
        batch, clients, pairs, ours_ms, loop_ms, median(ratios), low, high, difference,
    )  # fmt: skip


def interval(ordered: list[float]) -> tuple[float, float]:
    """Order statistics between which the true median lies with `CONFIDENCE`, or the outermost."""
    n, rank, outside = len(ordered), 0, 2 / 2 ** len(ordered)
    while rank < (n - 1) // 2 and outside + 2 * comb(n, rank + 1) / 2**n <= 1 - CONFIDENCE:
        rank += 1
        outside += 2 * comb(n, rank) / 2**n
    return ordered[rank], ordered[n - 1 - rank]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [task.name for task in TASKS]
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--batch", type=int, nargs="+", default=[10, 64])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--kernel", choices=("auto", "eager", "compiled"), default="auto")
    paths = ("auto", "plain", "func", "layered")
    parser.add_argument("--path", choices=paths, default="auto", help="the rule's, or another")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    asked = parser.parse_args()
    use_one_thread()
    table = Table(title=f"{STEPS} steps a client, CPU ms, one thread; at most {AIM:g} of the loop")
    for column in ("model", "batch", "path", "kernel", "fedsim", "loop", "ratio", "95 %", "differ"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for task in TASKS:
        for batch in asked.batch if task.name in asked.models else ():
            row = compare(task, batch, asked.pairs, asked.kernel, asked.path)
            if asked.json:
                print(json.dumps(asdict(row)), flush=True)
            table.add_row(
                row.model, str(row.batch), row.path, row.kernel, f"{row.fedsim:.2f}",
                f"{row.loop:.2f}", f"{row.ratio:.2f}", f"{row.low:.2f} to {row.high:.2f}",
                f"{row.difference:.0e}",
            )  # fmt: skip
    if asked.json:
        return
    console = Console(width=110)
    console.print(table)
    load = " ".join(f"{number:.1f}" for number in os.getloadavg())
    console.print(f"{os.cpu_count()} cores, load {load}; {asked.pairs} turns a model.")


if __name__ == "__main__":
    main()
