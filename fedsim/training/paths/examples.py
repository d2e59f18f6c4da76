"""Rows that are examples: each example's gradient, by the fastest way that gives it truly.

A model and a loss that have been read (`fedsim.training.structure`) may go through all examples at
once: all clients of a block by factors, one client by factors (`fedsim.training.paths.factored`),
or by Opacus for recurrent layers (`fedsim.training.paths.recurrent`). What runs is the graph that
was read. Everything else, and what has no factors, goes one example at a time: in parallel by
`torch.func.vmap`, which gives a model one example and never another's, or one after another. The
fastest that `fedsim.training.probe` finds nothing against is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedsim.models.calling import call_with
from fedsim.rows import DenseRows, LinearPart, OuterRows
from fedsim.rows.dense import BlockRows
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.hidden_draws import seeded
from fedsim.training.own_state import OwnState
from fedsim.training.paths.factored import Hooked, owned_by_layers, product_layers
from fedsim.training.paths.recurrent import Unrolled, is_recurrent
from fedsim.training.paths.stacked import StackedPath, stack
from fedsim.training.structure.reading import Reading

__all__ = ["ExampleBlock", "ExampleRows", "OneByOne", "OneClientsRows", "Way", "ways"]


BY_STRUCTURE, ONE_AT_A_TIME = "by structure", "one at a time: user code"
"""How it is known that a row is one example's."""


@dataclass(frozen=True)
class ExampleBlock:
    """Gradients of some clients' examples, each client at its own point.

    Attributes
    ----------
    clients : slice or int64 Tensor ``[k]``
        Whose they are, of the ``n`` asked for: all, or all that have examples, or one.
    counts : sequence of k ints
        How many of their examples are no padding.
    rows : BlockRows ``[k, b, d]``
        Of the first ``b`` examples of each, padding among them.
    losses : Tensor ``[k, b]``
    """

    clients: slice | Tensor
    counts: Sequence[int]
    rows: BlockRows
    losses: Tensor


class OneClientsRows(Protocol):
    """Gradients of one client's examples."""

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """From ``theta [D]``, ``x`` and ``y [B, ...]``: rows ``[1, B, d]`` and losses ``[B]``."""


ExampleRows = Callable[
    [Tensor, Tensor, Tensor, Sequence[int], "Sequence[int] | None"], Iterator[ExampleBlock]
]
"""``(theta [n, D], x [n, B, ...], y [n, B, ...], counts [n], seeds [n])`` to gradients of examples.

Only the first ``counts`` examples of a client are its own; what comes after them is padding,
and may be left out. The seeds are those of what the model draws for each client, if it does.
"""


@dataclass(frozen=True)
class Way:
    """One way to the gradients of single examples.

    Attributes
    ----------
    name : str
    of_client : OneClientsRows
        Of one client.
    rows : ExampleRows
        Of a block.
    known : str
        How it is known that a row is one example's, for ledgers and statements.
    """

    name: str
    of_client: OneClientsRows
    rows: ExampleRows
    known: str


def ways(
    model: nn.Module,
    packing: Packing,
    loss: Loss,
    reading: Reading,
    example_dims: int,
    draws: bool = False,
) -> list[Way]:
    """All ways that a model's make allows, from the fastest to the one that takes everything.

    A model that ``draws`` has no stacked path.
    """
    read, apart = _read_ways(packing, reading, example_dims, draws), OwnState(model, loss)
    vmapped = _client_by_client("vmapped", Vmapped(model, packing, loss, apart))
    last = _client_by_client("one by one", OneByOne(model, packing, loss, apart, draws))
    recurrent = [way for way in read if way.name == "unrolled"]
    return [*(way for way in read if way.name != "unrolled"), vmapped, *recurrent, last]


def _read_ways(packing: Packing, reading: Reading, example_dims: int, draws: bool) -> list[Way]:
    """Those of a model and a loss that look at each example by itself."""
    structure, loss = reading.structure, reading.loss
    if structure is None or loss is None:
        return []
    possible = []
    layers = product_layers(structure, packing)
    if layers is not None:
        stacked = None if draws else stack(structure, packing, loss, example_dims)
        if stacked is not None:
            possible.append(_whole_block(stacked))
        hooked = Hooked(structure.module, packing, loss, layers)
        possible.append(_client_by_client("factored", hooked, BY_STRUCTURE))
    if is_recurrent(structure.module) and owned_by_layers(structure, packing):
        unrolled = Unrolled(structure.module, packing, loss)
        possible.append(_client_by_client("unrolled", unrolled, BY_STRUCTURE))
    return possible


def _client_by_client(name: str, of_client: OneClientsRows, known: str = ONE_AT_A_TIME) -> Way:
    def rows(
        theta: Tensor, x: Tensor, y: Tensor, counts: Sequence[int], seeds: Sequence[int] | None
    ) -> Iterator[ExampleBlock]:
        for k, count in enumerate(counts):
            if count:
                # Copies lie where the allocator puts everything: a client's bits are its own.
                with seeded(seeds[k] if seeds else None, theta.device):
                    gradients, losses = of_client(
                        theta[k].clone(), x[k, :count].clone(), y[k, :count]
                    )
                yield ExampleBlock(slice(k, k + 1), [count], gradients, losses[None])

    return Way(name, of_client, rows, known)


def _whole_block(path: StackedPath) -> Way:
    def of_client(theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        (examples,) = _stacked_rows(path, theta[None], x[None], y[None], [len(x)])
        return examples.rows, examples.losses[0]

    return Way(
        "stacked",
        of_client,
        lambda theta, x, y, counts, seeds: _stacked_rows(path, theta, x, y, counts),
        BY_STRUCTURE,
    )


def _stacked_rows(
    path: StackedPath, theta: Tensor, x: Tensor, y: Tensor, counts: Sequence[int]
) -> Iterator[ExampleBlock]:
    clients: slice | Tensor = slice(None)
    if not all(counts):
        clients = torch.tensor([k for k, c in enumerate(counts) if c], device=theta.device)
        theta, x, y = theta[clients], x[clients], y[clients]
    gradient, losses = path.gradient(theta, x, y, theta.new_ones(x.shape[:2]))
    parts = [LinearPart(f.x, f.delta, f.bias is not None) for f in reversed(gradient.factors)]
    counts = [count for count in counts if count]
    # Products over fewer examples of weight zero have the same bits.
    b = x.shape[1] if x.is_cuda else max(counts)
    yield ExampleBlock(clients, counts, OuterRows(tuple(parts))[:, :b], losses[:, :b])


@dataclass(frozen=True)
class Vmapped:
    """Gradients of single examples by `torch.func`, written out.

    A model and a loss are given one example: what they could mix is not there.
    """

    model: nn.Module
    packing: Packing
    loss: Loss
    state: OwnState

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """See `OneClientsRows`."""
        named = {k: v.detach() for k, v in self.packing.named(theta).items()}
        with self.state.restored():
            gradients, losses = self._all(named, x, y)
        parts = [gradients[e.name].flatten(1) for e in self.packing.layout.entries]
        return DenseRows(torch.cat(parts, dim=1)[None]), losses

    def _all(self, named: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Any, Any]:
        of_examples: Any = vmap(
            grad(self._one, has_aux=True), in_dims=(None, 0, 0), randomness="different"
        )
        gradients, losses = of_examples(named, x, y)
        return gradients, losses

    def _one(self, named: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Any, Any]:
        outputs = call_with(self.model, named, x.unsqueeze(0))
        loss = self.loss(outputs, y.unsqueeze(0))[0]
        return loss, loss


@dataclass(frozen=True)
class OneByOne:
    """Gradients of single examples by autograd on one example after another.

    Nothing that an example is computed with is another's: each call starts from the same buffers
    and attributes, and what the model draws for it is seeded for it alone.
    """

    model: nn.Module
    packing: Packing
    loss: Loss
    state: OwnState
    draws: bool

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """See `OneClientsRows`."""
        rows, losses = [], []
        # Drawn from a generator that is seeded for the client; unused by a model that draws not.
        seeds = torch.randint(2**62, (len(x),)).tolist() if self.draws else [None] * len(x)
        for j, seed in enumerate(seeds):
            leaves = {k: v.detach().requires_grad_() for k, v in self.packing.named(theta).items()}
            with torch.enable_grad(), seeded(seed, theta.device), self.state.restored():
                outputs = call_with(self.model, leaves, x[j : j + 1].clone())
                (loss,) = self.loss(outputs, y[j : j + 1])
                gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
            losses.append(loss.detach())
        return DenseRows(torch.stack(rows)[None]), torch.stack(losses)
