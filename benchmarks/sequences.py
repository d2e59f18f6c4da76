"""`python -m benchmarks.sequences`: recurrent and attention models, which go client by client.

Beside a lean loop: parameters set in place once a client, `torch.autograd.grad`, one
`torch._foreach_add_` a step, and the update put together at the end. CPU milliseconds a client of
six steps; the two take turns, and the fastest of each counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from benchmarks.jobs import BATCH, EXAMPLES, LR, SEED
from fedsim.clients import SGD
from fedsim.federation.engines.process import use_one_thread
from fedsim.randomness import Draws, Randomness
from fedsim.training import ClientData, Trainer

__all__ = ["main"]

CLIENTS, REPEATS, LENGTH, WORDS, CLASSES, AIM = 10, 12, 20, 100, 10, 1.0


class Recurrent(nn.Module):
    """Two LSTM layers over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.layers = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.layers(self.words(x))[0][:, -1])
        return outputs


class Attention(nn.Module):
    """One block of a transformer over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.last = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.block(self.words(x)).mean(1))
        return outputs


def lean_loop(model: nn.Module, data: ClientData, t: int) -> list[Tensor]:
    """The updates of all clients."""
    parameters: list[Tensor] = list(model.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    updates = []
    for client in range(CLIENTS):
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        draws = Draws(Randomness(SEED), level="example", amplified=False, client=client)
        order = data.indices[client][draws.generator(t).permutation(EXAMPLES)]
        for batch in torch.from_numpy(order).view(-1, BATCH):
            loss = F.cross_entropy(model(data.x[batch]), data.y[batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-LR)
        with torch.no_grad():
            pairs = zip(parameters, start, strict=True)
            updates.append(torch.cat([(w - old).flatten() for w, old in pairs]))
    with torch.no_grad():
        torch._foreach_copy_(parameters, start)
    return updates


def fedsim_loop(trainer: Trainer, t: int) -> list[Tensor]:
    blocks = trainer.train(trainer.initial(), np.arange(CLIENTS), t)
    return [row for block in blocks if block.rows is not None for row in block.rows]


def compare(model: nn.Module) -> tuple[float, float, float]:
    """CPU ms a client of fedsim and of the lean loop, and by how much updates differ at most."""
    count = CLIENTS * EXAMPLES
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randint(WORDS, (count, LENGTH), generator=generator)
    y = torch.randint(CLASSES, (count,), generator=generator)
    data = ClientData(x, y, list(np.arange(count).reshape(CLIENTS, -1)))
    trainer = Trainer(
        model, SGD(lr=LR), data, batch_size=BATCH, epochs=1, randomness=Randomness(SEED)
    )
    ways: list[Callable[[int], list[Tensor]]] = [
        lambda t: fedsim_loop(trainer, t),
        lambda t: lean_loop(model, data, t),
    ]
    ours, theirs = (torch.stack(way(1)) for way in ways)
    best = [float("inf")] * len(ways)
    for t in range(2, REPEATS + 2):
        for number, way in enumerate(ways):
            began = time.process_time()
            way(t)
            best[number] = min(best[number], (time.process_time() - began) / CLIENTS * 1e3)
    return best[0], best[1], float((ours - theirs).abs().max())


def main() -> None:
    use_one_thread()
    for name, model in (("two LSTM layers", Recurrent()), ("attention block", Attention())):
        torch.manual_seed(SEED)
        ours, theirs, difference = compare(model)
        Console().print(
            f"{name}: {ours:.2f} ms a client, a lean loop {theirs:.2f}: {ours / theirs:.2f}x "
            f"(to reach: {AIM:.2f}x); updates differ by {difference:.1e}",
            soft_wrap=True,
        )


if __name__ == "__main__":
    main()
