"""Rows that are examples: each example's gradient, by the fastest way that gives it truly.

From the fastest on: all clients of a block by factors, one client by factors
(`fedsim.training.paths.factored`), `torch.func.vmap` over a client's examples, Opacus for
recurrent layers (`fedsim.training.paths.recurrent`), and one example after another. Which of them
a model can have is found out by `fedsim.training.probe`.
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
from fedsim.training.paths.factored import Hooked, product_layers
from fedsim.training.paths.recurrent import Unrolled, is_recurrent
from fedsim.training.paths.stacked import StackedPath

__all__ = ["ExampleBlock", "ExampleRows", "OneByOne", "OneClientsRows", "Way", "ways"]


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
    """

    name: str
    of_client: OneClientsRows
    rows: ExampleRows


def ways(
    model: nn.Module, packing: Packing, loss: Loss, stacked: StackedPath | None, draws: bool = False
) -> list[Way]:
    """All ways that a model's make allows, from the fastest to the one that takes everything.

    A model that ``draws`` has no stacked path.
    """
    possible = []
    layers = product_layers(model, packing)
    if layers is not None:
        if stacked is not None:
            possible.append(_whole_block(stacked))
        possible.append(_client_by_client("factored", Hooked(model, packing, loss, layers)))
    possible.append(_client_by_client("vmapped", Vmapped(model, packing, loss)))
    if is_recurrent(model):
        possible.append(_client_by_client("unrolled", Unrolled(model, packing, loss)))
    possible.append(_client_by_client("one by one", OneByOne(model, packing, loss, draws)))
    return possible


def _client_by_client(name: str, of_client: OneClientsRows) -> Way:
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

    return Way(name, of_client, rows)


def _whole_block(path: StackedPath) -> Way:
    def of_client(theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        (examples,) = _stacked_rows(path, theta[None], x[None], y[None], [len(x)])
        return examples.rows, examples.losses[0]

    return Way(
        "stacked",
        of_client,
        lambda theta, x, y, counts, seeds: _stacked_rows(path, theta, x, y, counts),
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
    """Gradients of single examples by `torch.func`, written out."""

    model: nn.Module
    packing: Packing
    loss: Loss

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        named = {k: v.detach() for k, v in self.packing.named(theta).items()}
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

    Nothing that an example is computed with is another's, and what the model draws for it is
    seeded for it alone.
    """

    model: nn.Module
    packing: Packing
    loss: Loss
    draws: bool

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """See `OneClientsRows`."""
        rows, losses = [], []
        # Drawn from a generator that is seeded for the client; unused by a model that draws not.
        seeds = torch.randint(2**62, (len(x),)).tolist() if self.draws else [None] * len(x)
        for j, seed in enumerate(seeds):
            leaves = {k: v.detach().requires_grad_() for k, v in self.packing.named(theta).items()}
            with torch.enable_grad(), seeded(seed, theta.device):
                outputs = call_with(self.model, leaves, x[j : j + 1].clone())
                (loss,) = self.loss(outputs, y[j : j + 1])
                gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
            losses.append(loss.detach())
        return DenseRows(torch.stack(rows)[None]), torch.stack(losses)
