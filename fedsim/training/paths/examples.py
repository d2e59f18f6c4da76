"""Per-example gradients: one row for each example, by the fastest method that gives it exactly.

A bound on a row protects an example only if no other example contributes to the row. There are two
ways to ensure that. A model and a loss that have been read (`fedsim.training.structure`) treat each
example by itself, *by structure*, so that one pass may take all examples at once: by factors
(`fedsim.training.paths.factored`), or by Opacus for recurrent layers (`OpacusMethod`). What runs
then is the graph that was read, never the user's forward. Everything else goes *one at a time*: in
parallel by `torch.func.vmap`, inside which a model sees a single example, or one after another,
each from the same buffers and attributes. The fastest method that passes the tests of
`fedsim.training.probe` is used.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedsim.models.parameters import call_with, with_parameters
from fedsim.rows import DenseRows
from fedsim.rows.dense import BlockRows
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.own_state import MemoryRestored, OwnState
from fedsim.training.side_effects import seeded

BY_STRUCTURE, ONE_AT_A_TIME = "by structure", "one at a time: user code"
"""Why a row is known to depend on one example only."""


@dataclass(frozen=True)
class ExampleBlock:
    """Per-example gradients of some clients, each at its own point.

    Attributes
    ----------
    clients : slice or int64 Tensor ``[k]``
        Positions of these clients among the block's ``n``: all, those with examples, or one.
    counts : sequence of k ints
        Number of each client's real examples.
    rows : BlockRows ``[k, b, d]``
        Rows of the first ``b`` examples of each client, padding included.
    losses : Tensor ``[k, b]``
    """

    clients: slice | Tensor
    counts: Sequence[int]
    rows: BlockRows
    losses: Tensor


@dataclass(frozen=True)
class GradientMethod(ABC):
    """A method of computing per-example gradients.

    ``name`` names it; ``evidence`` says why a row depends on one example only, for ledgers and
    statements.

    Attributes
    ----------
    model : nn.Module
        The module that runs: the graph that was read, or the user's own.
    packing : Packing
    loss : callable
    """

    model: nn.Module
    packing: Packing
    loss: Loss

    name: ClassVar[str]
    evidence: ClassVar[str]

    @property
    def takes_blocks(self) -> bool:
        """Whether `block_rows` exists, which launches the same operations for any values."""
        return False

    def block_rows(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows ``[n, B, d]`` and losses ``[n, B]`` of clients at ``theta [n, D]``, for a GPU."""
        raise NotImplementedError

    @abstractmethod
    def of_client(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows ``[1, B, d]`` and losses ``[B]`` of one client's ``x``, ``y`` at ``theta [D]``."""

    def rows(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        counts: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> Iterator[ExampleBlock]:
        """Per-example gradients of a block's clients: on a GPU at once, if the method can.

        Parameters
        ----------
        theta : Tensor ``[n, D]``, packed
        x, y : Tensor ``[n, B, ...]``
        counts : sequence of n ints
            Number of a client's real examples, which come first; the padding after them may be
            left out.
        seeds : sequence of n ints, optional
            Seeds of the model's own random draws for each client, if it makes any.
        """
        if theta.is_cuda and self.takes_blocks and seeds is None:
            rows, losses = self.block_rows(theta, x, y)
            yield ExampleBlock(slice(None), counts, rows, losses)
            return
        for k, count in enumerate(counts):
            if count:
                # Copies, at aligned addresses: bits must not depend on a row's position.
                with seeded(seeds[k] if seeds else None, theta.device):
                    gradients, losses = self.of_client(
                        theta[k].clone(), x[k, :count].clone(), y[k, :count]
                    )
                yield ExampleBlock(slice(k, k + 1), [count], gradients, losses[None])


@dataclass(frozen=True)
class VmapMethod(GradientMethod):
    """Per-example gradients by `torch.func.vmap`.

    The model and the loss see one example, so that they cannot mix examples.

    Attributes
    ----------
    state : OwnState or None
        What they may change, restored after each call; None for a graph that was read, which
        changes nothing.
    """

    state: OwnState | None

    name = "vmapped"
    evidence = ONE_AT_A_TIME

    @property
    def takes_blocks(self) -> bool:
        """Whether nothing need be restored after a call, which would read it."""
        return self.state is None or self.state.stateless

    def block_rows(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows and losses of a block's clients, for a GPU."""
        gradients, losses = vmap(self._of_examples)(self.packing.named(theta), x, y)
        parts = [gradients[e.name].flatten(2) for e in self.packing.layout.entries]
        return DenseRows(torch.cat(parts, dim=2)), losses

    def of_client(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows and losses of one client."""
        named = {k: v.detach() for k, v in self.packing.named(theta).items()}
        with nullcontext() if self.state is None else self.state.restored():
            gradients, losses = self._of_examples(named, x, y)
        parts = [gradients[e.name].flatten(1) for e in self.packing.layout.entries]
        return DenseRows(torch.cat(parts, dim=1)[None]), losses

    @property
    def _of_examples(self) -> Any:  # not cached: it cannot be pickled
        return vmap(
            grad(self._example_loss, has_aux=True), in_dims=(None, 0, 0), randomness="different"
        )

    def _example_loss(self, named: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Any, Any]:
        outputs = call_with(self.model, named, x.unsqueeze(0))
        loss = self.loss(outputs, y.unsqueeze(0))[0]
        return loss, loss


@dataclass(frozen=True)
class SingleExampleMethod(GradientMethod):
    """Per-example gradients by autograd on one example after another.

    Examples share nothing: each call starts from the same buffers and attributes and leaves no
    tensor of anybody's changed, and the model's own random draws are seeded for each example.
    """

    state: OwnState
    draws: bool

    name = "one by one"
    evidence = ONE_AT_A_TIME

    def of_client(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows and losses of one client."""
        rows, losses = [], []
        # From the generator, which is seeded for the client; none for a model that does not draw.
        seeds = torch.randint(2**62, (len(x),)).tolist() if self.draws else [None] * len(x)
        for j, seed in enumerate(seeds):
            # A copy for each example: a forward may write to its parameters.
            named = self.packing.named(theta.clone())
            leaves = {k: v.detach().requires_grad_() for k, v in named.items()}
            memory = nullcontext() if self.state.stateless else MemoryRestored()
            with (
                torch.enable_grad(),
                seeded(seed, theta.device),
                self.state.restored(),
                memory,
            ):
                example = partial(self._of_leaves, leaves, x[j : j + 1].clone(), y[j : j + 1])
                loss, gradients = with_parameters(self.model, leaves, example)
            # An embedding's gradient may be sparse.
            rows.append(torch.cat([gradient.to_dense().flatten() for gradient in gradients]))
            losses.append(loss)
        return DenseRows(torch.stack(rows)[None]), torch.stack(losses)

    def _of_leaves(
        self, leaves: Mapping[str, Tensor], x: Tensor, y: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        (loss,) = self.loss(self.model(x), y)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return loss.detach(), gradients


RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


def is_recurrent(model: nn.Module) -> bool:
    """Whether a layer of the model is torch's RNN, GRU or LSTM."""
    return any(type(module) in RECURRENT for module in model.modules())


@dataclass(frozen=True)
class OpacusMethod(GradientMethod):
    """Per-example gradients by Opacus, on a copy of the model with Opacus's recurrent layers.

    `torch.func` cannot take an RNN or a GRU, and is slow for a large LSTM. Opacus unrolls them into
    linear layers, whose per-example gradients it computes. It is imported at first use: only models
    with such layers wait for it. `fedsim.training.probe` compares the copy with the model, so that
    Opacus's layers are not merely assumed to compute what torch's do.
    """

    _unused_copies: list[nn.Module] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    name = "unrolled"
    evidence = BY_STRUCTURE

    def of_client(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows and losses of one client."""
        # Returned only after a pass that ended: of one that did not, Opacus's hooks keep inputs
        # and gradients, which they would take for the next client's.
        copied = self._unused_copies.pop() if self._unused_copies else self._copied_model()
        parameters: dict[str, Any] = dict(copied.named_parameters())
        for name, value in self.packing.named(theta).items():
            parameters[name].data.copy_(value)
        self._follow_mode(copied)
        # A hook warns that the inputs need no gradients.
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            losses = self.loss(copied(x), y)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        rows = [_rows(parameters[entry.name], len(x)) for entry in self.packing.layout.entries]
        for parameter in parameters.values():
            parameter.grad, parameter.grad_sample = None, None
        self._unused_copies.append(copied)
        return DenseRows(torch.cat(rows, dim=1)[None]), losses.detach()

    def _copied_model(self) -> nn.Module:
        """A copy of the model with Opacus's recurrent layers, and with its hooks on all layers.

        Raises
        ------
        RuntimeError
            If Opacus would compute something else than the model does, or has no rule for a layer;
            the probe then tries the next method.
        """
        from opacus.grad_sample import GradSampleModule
        from opacus.layers import DPGRU, DPLSTM, DPRNN

        copied = copy.deepcopy(self.model)
        for name, module in list(copied.named_modules()):
            if type(module) in RECURRENT:
                parent, _, child = name.rpartition(".")
                if not child or module is copied:
                    raise RuntimeError("a model that is one recurrent layer gives no tensor")
                setattr(copied.get_submodule(parent), child, _unrolled_layer(module))
        watched = GradSampleModule(copied, loss_reduction="sum")
        for module in watched.iterate_submodules(copied):
            trained = any(p.requires_grad for p in module.parameters(recurse=False))
            has_rule = type(module) in GradSampleModule.GRAD_SAMPLERS
            if trained and not has_rule and not isinstance(module, DPRNN | DPGRU | DPLSTM):
                raise RuntimeError(f"Opacus has no rule for {type(module).__name__}")
        return copied

    def _follow_mode(self, copied: nn.Module) -> None:
        """Set the model's mode; layers with parameters stay in training, for Opacus's hooks."""
        copied.train(self.model.training)
        for module in copied.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.training = True


def _rows(parameter: Any, examples: int) -> Tensor:
    """Per-example gradients of one parameter, ``[B, size]``; zeros if it is not used."""
    rows: Tensor | None = parameter.grad_sample
    if rows is None:
        rows = parameter.new_zeros(examples, parameter.numel())
    return rows.detach().flatten(1)


def _unrolled_layer(layer: Any) -> nn.Module:
    """Opacus's layer in the place of torch's, with its parameters."""
    from opacus import layers

    if layer.dropout:
        raise RuntimeError("Opacus drops out between steps where torch does between layers")
    if layer.proj_size:
        raise RuntimeError("Opacus has no projections in an LSTM")
    settings = {
        name: getattr(layer, name)
        for name in (
            "input_size",
            "hidden_size",
            "num_layers",
            "bias",
            "batch_first",
            "bidirectional",
        )
    }
    if isinstance(layer, nn.RNN):
        settings["nonlinearity"] = layer.nonlinearity
    unrolled: nn.Module = getattr(layers, f"DP{type(layer).__name__}")(**settings)
    first = next(layer.parameters())
    unrolled.to(first)
    parameters = dict(unrolled.named_parameters())
    for name, parameter in layer.named_parameters():
        parameters[name].data.copy_(parameter.data)
        parameters[name].requires_grad_(parameter.requires_grad)
    return unrolled.train(layer.training)
