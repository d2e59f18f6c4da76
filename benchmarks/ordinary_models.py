"""`python -m benchmarks.ordinary_models`: ordinary models, compared with a minimal PyTorch loop.

    python -m benchmarks.ordinary_models                          # all, batches of 10 and of 64
    python -m benchmarks.ordinary_models --models lstm --kernel eager --json

It measures local training: ten steps of SGD per client, on the path that fedsim's rule chooses.
The loop resets parameters in place once per client, and for each step calls `torch.autograd.grad`
and one `torch._foreach_add_` on the same examples; with images, it runs with channels first and
with channels last, and the faster one counts. CPU times are compared (`benchmarks.turns`), or wall
times on a GPU (`--device cuda`), where sixteen clients train in a block and the loop is exact too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.jobs import LR, SEED
from benchmarks.ordinary_networks import TASKS, Task
from benchmarks.turns import Ratio, TurnWork, in_turns, ratio
from fedsim.clients import SGD
from fedsim.federation.engines.process import use_one_thread
from fedsim.randomness import Draws, Randomness
from fedsim.training import ClientData, Trainer
from fedsim.training.paths.path_choice import KernelName, PathName
from fedsim.training.side_effects import reproducible_arithmetic

STEPS, MAX_CLIENTS, TURN = 10, {"cpu": 8, "cuda": 16}, 0.4
"""Steps per client, most clients, and approximate seconds of one side's turn on a CPU."""
AIM = 1.05


@dataclass(frozen=True)
class Row:
    """Result of one model.

    Attributes
    ----------
    model, path, kernel : str
    batch, clients, pairs : int
        Batch size, clients per turn, and number of turns.
    fedsim, loop : float
        Median CPU milliseconds per client.
    ratio : Ratio
        fedsim's time over the loop's.
    difference : float
        L2 norm of the difference of the updates, over that of the loop's updates.
    """

    model: str
    path: str
    kernel: str
    batch: int
    clients: int
    pairs: int
    fedsim: float
    loop: float
    ratio: Ratio
    difference: float


Work = Callable[[int, int], list[Tensor]]
"""Computes the updates of a number of clients in a round."""


def lean_loop(task: Task, model: nn.Module, data: ClientData, clients: int, t: int) -> list[Tensor]:
    """Updates of the first ``clients``, by a minimal loop."""
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    start = [parameter.detach().clone() for parameter in parameters]
    updates = []
    for client in range(clients):
        examples = data.indices[client]
        draws = Draws(Randomness(SEED), level="example", amplified=False, client=client)
        order = torch.from_numpy(examples[draws.generator(t).permutation(len(examples))])
        order = order.to(data.x.device)
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
    """The same updates, through fedsim's trainer."""
    blocks = trainer.train(trainer.initial(), np.arange(clients), t)
    return [row for block in blocks if block.rows is not None for row in block.rows]


def loops(task: Task, model: nn.Module, data: ClientData) -> Iterator[Work]:
    """The minimal loop, and with images also one in channels-last format."""
    yield lambda clients, t: lean_loop(task, model, data, clients, t)
    if data.x.dim() == 4:
        place: dict[str, Any] = {"memory_format": torch.channels_last}
        images = ClientData(data.x.contiguous(**place), data.y, data.indices)
        last = task.model().to(data.x.device, **place)
        last.load_state_dict(model.state_dict())
        yield lambda clients, t: lean_loop(task, last, images, clients, t)


def compare(
    task: Task, batch: int, pairs: int, kernel: KernelName, path: PathName, device: str
) -> Row:
    """Compare the trainer with the loop, turn by turn."""
    torch.manual_seed(SEED)
    most = MAX_CLIENTS[device]
    model, count = task.model().to(device), most * STEPS * batch
    x, y = task.examples(count, torch.Generator().manual_seed(SEED))
    data = ClientData(x, y, list(np.arange(count).reshape(most, -1))).to(torch.device(device))
    trainer = Trainer(
        model, SGD(lr=LR), data, batch_size=batch, steps=STEPS, loss=task.loss, path=path,
        kernel=kernel, randomness=Randomness(SEED), device=device,
    )  # fmt: skip
    timed = partial(in_turns, clock=partial(clock, device))
    works: dict[str, Work] = {"fedsim": lambda clients, t: fedsim_loop(trainer, clients, t)}
    works |= {f"loop {number}": loop for number, loop in enumerate(loops(task, model, data))}
    ours, theirs = (torch.stack(works[name](2, 1)) for name in ("fedsim", "loop 0"))
    difference = float((ours - theirs).norm() / theirs.norm())
    once = timed({name: partial(work, 2) for name, work in works.items()}, 1)
    one = min(once[name][0] for name in works if name != "fedsim") / 2
    clients = most if device == "cuda" else int(np.clip(TURN / one, 2, most))
    sides: dict[str, TurnWork] = {name: partial(work, clients) for name, work in works.items()}
    timed(sides, 1, first=2)  # steps of such a block are captured
    seconds = timed(sides, pairs, first=3)
    took = {name: median(turns) / clients for name, turns in seconds.items()}
    fastest = min((name for name in works if name != "fedsim"), key=took.__getitem__)
    over = ratio(seconds["fedsim"], seconds[fastest])
    chosen = trainer.stepper.path
    used = getattr(chosen, "compiled", None)
    return Row(
        task.name, chosen.name, "-" if used is None else "compiled" if used else "eager",
        batch, clients, pairs, 1e3 * took["fedsim"], 1e3 * took[fastest], over, difference,
    )  # fmt: skip


def clock(device: str) -> float:
    """CPU seconds, or on a GPU wall seconds when it has finished its work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    use_one_thread()
    aim = f"CPU ms, one thread; at most {AIM:g} of the loop"
    if asked.device == "cuda":
        aim = (
            f"ms, {torch.cuda.get_device_name()}; at most .3 of the loop in batches of 10, else .5"
        )
    table = Table(title=f"{STEPS} steps a client, {aim}")
    for column in ("model", "batch", "path", "kernel", "fedsim", "loop", "ratio (95 %)", "differ"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for task in TASKS:
        for batch in asked.batch if task.name in asked.models else ():
            with reproducible_arithmetic(torch.device(asked.device)):
                row = compare(task, batch, asked.pairs, asked.kernel, asked.path, asked.device)
            if asked.json:
                print(json.dumps(asdict(row)), flush=True)
            table.add_row(
                row.model, str(row.batch), row.path, row.kernel, f"{row.fedsim:.2f}",
                f"{row.loop:.2f}", str(row.ratio), f"{row.difference:.0e}",
            )  # fmt: skip
    if asked.json:
        return
    console = Console(width=110)
    console.print(table)
    load = " ".join(f"{number:.1f}" for number in os.getloadavg())
    console.print(f"{os.cpu_count()} cores, load {load}; {asked.pairs} turns a model.")


if __name__ == "__main__":
    main()
