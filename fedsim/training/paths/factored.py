"""Per-example gradients as factors, for layers that multiply their inputs by a weight.

A linear layer's gradient of one example is ``delta (x) x``, output gradient times input; that of a
convolution, or of a linear layer on a sequence, is a sum of such products over L positions. Norms
and weighted sums follow from the factors, so that no example's gradient need be formed ("ghost
norms"; Goodfellow 2015, Bu et al. 2022)::

    || sum_l delta_l (x) x_l ||^2  =  sum_lm (delta_l . delta_m) (x_l . x_m)

The right side adds L^2 terms of both signs. If rounding made a norm too small, a row would exceed
its bound. So products are in float64, and each square comes with the size and the number of the
terms that were added (`Squares`), from which the bound takes a margin. A gradient with at most L^2
entries is formed after all, and its norm has no such error.

All of this requires that a parameter is used by one call of one layer: with two calls, the gradient
is a sum of two products, whose norm does not follow from theirs (`product_layers`,
`owned_by_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedsim.models.memory_format import ViewsOfAnyFormat, channels_last, takes_channels_last
from fedsim.models.parameters import call_with
from fedsim.rows import LinearPart, OuterRows
from fedsim.rows.dense import BlockRows
from fedsim.rows.factored import Squares
from fedsim.rows.packing import Packing
from fedsim.training.paths.conv_layers import is_plain
from fedsim.training.paths.examples import BY_STRUCTURE, ExampleBlock, GradientMethod
from fedsim.training.paths.losses import prepare_losses
from fedsim.training.paths.program import Program
from fedsim.training.structure.reading import Structure


def owned_by_layers(structure: Structure, packing: Packing) -> bool:
    """Whether each trained parameter is used only by the module that owns it."""
    model = structure.module
    at = {str(node.target) for node in model.graph.nodes if node.op == "get_attr"}
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return not at & {*names} and {*names} == {e.name for e in packing.layout.entries}


def product_layers(structure: Structure, packing: Packing) -> list[tuple[str, nn.Module]] | None:
    """Layers that own all trained parameters, in the layout's order; None if some do not qualify.

    Each is called once, so that an example's gradient is one product.
    """
    model = structure.module
    calls = [str(node.target) for node in model.graph.nodes if node.op == "call_module"]
    if not owned_by_layers(structure, packing):
        return None
    owners = dict.fromkeys(e.name.rpartition(".")[0] for e in packing.layout.entries)
    names = []
    layers = []
    for owner in owners:
        module = model.get_submodule(owner)
        # With groups, or another padding, weights multiply other windows than `_windows` gathers.
        plain = type(module) is nn.Linear or (
            type(module) is nn.Conv2d and module.groups == 1 and is_plain(module)
        )
        if not plain or not module.weight.requires_grad or calls.count(owner) != 1:
            return None
        prefix = f"{owner}." if owner else ""
        names.append(f"{prefix}weight")
        if module.bias is not None and module.bias.requires_grad:
            names.append(f"{prefix}bias")
        layers.append((owner, module))
    # A row is the layers' parts one after another: their order must be that of the layout.
    return layers if names == [e.name for e in packing.layout.entries] else None


@dataclass(frozen=True, eq=False)
class PositionsPart(LinearPart):
    """Rows of a layer that is applied at ``L`` positions: row k is ``sum_l delta_kl (x) x_kl``.

    Attributes
    ----------
    x : Tensor ``[..., rows, L, inputs]``
    delta : Tensor ``[..., rows, L, outputs]``
    bias : bool
    kernel : tuple of int
        ``(C, kh, kw)`` if inputs are channels last, ``(kh, kw, C)``, which a CPU gathers quickly;
        empty if they are in the row's order.
    """

    kernel: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.x.shape[-3]

    @property
    def is_formed(self) -> bool:
        """Whether rows are formed: a gradient is smaller than the Gram matrix of its positions."""
        return bool(self.size <= self.x.shape[-2] ** 2)

    @property
    def cancels(self) -> bool:
        """Whether terms of a squared norm may cancel; those of a row that is formed cannot."""
        return not self.is_formed

    @property
    def depth(self) -> int:
        """Most numbers that any formula here adds one after another."""
        return 2 * self.x.shape[-2] + self.x.shape[-1] + self.delta.shape[-1]

    def squares(self, scale: Tensor | None, center: Tensor | None) -> Squares:
        """Squared norms of the rows, by Gram matrices of the positions where those are smaller."""
        if scale is not None or center is not None:
            return self._whitened_squares(scale, center)
        if self.is_formed:
            return Squares(self._dense_rows.square().sum(-1))
        x, delta = self._doubles
        inputs = (x @ x.mT).add_(float(self.bias))
        values = (delta @ delta.mT).mul_(inputs).sum(-1).sum(-1).clamp_min(0)
        # No entry of a Gram matrix is larger than the product of two norms (Cauchy-Schwarz).
        lengths = (x.square().sum(-1) + float(self.bias)).sqrt_()
        sizes = (torch.linalg.vector_norm(delta, dim=-1) * lengths).sum(-1).square_()
        return Squares(values, sizes, self.depth)

    def _whitened_squares(self, scale: Tensor | None, center: Tensor | None) -> Squares:
        """Squared norms of centred and scaled rows, which are formed as precisely as in `sums`."""
        x, delta = self._doubles
        rows = self._dense_rows if self.is_formed else self._multiplied_out(x, delta)
        # Rows of the terms' absolute values: rounding errors are relative to these, which may be
        # much larger than their sum.
        magnitudes = rows if self.is_formed else self._multiplied_out(x.abs(), delta.abs())
        factor = rows.new_ones(()) if scale is None else scale.unsqueeze(-2)
        shifted = rows if center is None else rows - center.unsqueeze(-2)
        sizes = (magnitudes * factor).square_().sum(-1)
        if center is not None:
            sizes = sizes + (center.unsqueeze(-2) * factor).square_().sum(-1)
        return Squares((shifted * factor).square_().sum(-1), sizes, self.depth)

    def sums(self, weights: Tensor) -> list[Tensor]:
        """Weighted sums of the rows, for the weight and for a bias."""
        absent = weights == 0
        # Zero times NaN is NaN, so rows of weight 0 are wiped. On a GPU always: reading back
        # whether there are any would wait for it.
        wipe = weights.is_cuda or bool(absent.any())
        if self.is_formed:
            rows = self._dense_rows
            rows = rows.masked_fill(absent[..., None], 0.0) if wipe else rows
            return [(weights.unsqueeze(-2) @ rows).squeeze(-2)]
        x, delta = self._doubles
        if wipe:
            x, delta = (t.masked_fill(absent[..., None, None], 0.0) for t in (x, delta))
        delta = (delta * weights[..., None, None]).flatten(-3, -2)
        weight = self._row(delta.mT @ x.flatten(-3, -2))
        return [weight, delta.sum(-2)] if self.bias else [weight]

    def dense(self) -> Tensor:
        """The rows, multiplied out."""
        return self._multiplied_out(self.x, self.delta)

    def _multiplied_out(self, x: Tensor, delta: Tensor) -> Tensor:
        outer = self._row(delta.mT @ x)
        return torch.cat([outer, delta.sum(-2)], dim=-1) if self.bias else outer

    def _row(self, weight: Tensor) -> Tensor:
        """Weight gradients ``[..., outputs, inputs]``, flattened in the order of a row."""
        if self.kernel:
            channels, kh, kw = self.kernel
            split = weight.reshape(*weight.shape[:-1], kh, kw, channels)
            weight = split.movedim(-1, -3).flatten(-3)
        return weight.flatten(-2)

    @cached_property
    def _dense_rows(self) -> Tensor:
        return self.dense().double()

    @cached_property
    def _doubles(self) -> tuple[Tensor, Tensor]:
        return self.x.double(), self.delta.double()


@dataclass(frozen=True)
class ProgramMethod(GradientMethod):
    """Per-example gradients by the model program, of all clients at once if it is dense."""

    program: Program

    name = "layered"
    evidence = BY_STRUCTURE

    @property
    def takes_blocks(self) -> bool:
        """Whether the layers are dense: convolutions go one client at a time."""
        return not self.program.convolutions

    def of_client(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows and losses of one client."""
        rows, losses = self.block_rows(theta[None], x[None], y[None])
        return rows, losses[0]

    def rows(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        counts: Sequence[int],
        seeds: Sequence[int] | None,
    ) -> Iterator[ExampleBlock]:
        """Per-example gradients of all clients at once, unless there are convolutions."""
        if self.program.convolutions:
            yield from super().rows(theta, x, y, counts, seeds)
            return
        clients: slice | Tensor = slice(None)
        if not all(counts):
            clients = torch.tensor([k for k, c in enumerate(counts) if c], device=theta.device)
            theta, x, y = theta[clients], x[clients], y[clients]
        rows, losses = self.block_rows(theta, x, y)
        counts = [count for count in counts if count]
        # Leaving out examples of weight zero does not change the bits of the products.
        b = x.shape[1] if x.is_cuda else max(counts)
        yield ExampleBlock(clients, counts, rows[:, :b], losses[:, :b])

    def block_rows(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[OuterRows, Tensor]:
        """Rows and losses of several clients, if `takes_blocks`, or of one."""
        losses = prepare_losses(self.program.loss, y, theta.new_ones(x.shape[:2]))
        convolved, dense = self.program.example_factors(theta, x, losses)
        parts: list[LinearPart] = [_convolved_part(m, x[None], d[None]) for m, x, d in convolved]
        parts += [LinearPart(f.x, f.delta, f.bias is not None) for f in dense]
        return OuterRows(tuple(parts)), losses.values()


@dataclass(frozen=True)
class HookMethod(GradientMethod):
    """Per-example factors from hooks, by one forward and one backward pass of autograd.

    For models that were read but are no program: parallel layers, or layers on sequences. The
    backward pass starts from the sum of the losses. As each example's loss depends on that example
    alone, each row of a layer's output gradient belongs to one example.
    """

    layers: Sequence[tuple[str, nn.Module]]
    _shapes: dict[torch.Size, list[torch.Size]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    name = "factored"
    evidence = BY_STRUCTURE
    takes_blocks = True

    def of_client(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows and losses of one client."""
        if theta.is_cuda:  # as in a block of one
            rows, block_losses = self.block_rows(theta[None], x[None], y[None])
            return rows, block_losses[0]
        calls: dict[str, tuple[Tensor, Tensor]] = {}
        # With channels last, windows are gathered in runs of channels.
        if x.dim() == 4 and takes_channels_last(self.model.modules()):
            x = channels_last(x)
        # They need gradients only so that autograd records the layers' outputs: the backward pass
        # ends at these, and no gradient of a parameter is computed.
        leaves = {k: v.requires_grad_() for k, v in self.packing.named(theta).items()}

        def note(name: str, inputs: Tensor, output: Tensor) -> Tensor:
            calls[name] = inputs, output
            return output

        with torch.enable_grad(), self._hooked(note), ViewsOfAnyFormat():
            losses = self.loss(call_with(self.model, leaves, x), y)
            own = [calls[name] for name, _ in self.layers]
            deltas = torch.autograd.grad(losses.sum(), [output for _, output in own])
        parts = [
            _part(module, inputs.detach()[None], delta[None])
            for (_, module), (inputs, _), delta in zip(self.layers, own, deltas, strict=True)
        ]
        return OuterRows(tuple(parts)), losses.detach()

    def block_rows(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[BlockRows, Tensor]:
        """Rows and losses of a block's clients, vectorised over them.

        What is differentiated are zeros that are added to the layers' outputs.
        """
        zeros = [
            torch.zeros(len(x), *shape, dtype=theta.dtype, device=theta.device)
            for shape in self._output_shapes(theta, x)
        ]
        of_clients: Any = vmap(grad(self._summed_loss, has_aux=True))
        deltas, (inputs, losses) = of_clients(zeros, self.packing.named(theta), x, y)
        parts = [
            _part(m, inputs[name], d) for (name, m), d in zip(self.layers, deltas, strict=True)
        ]
        return OuterRows(tuple(parts)), losses

    def _summed_loss(
        self, zeros: Sequence[Tensor], named: Mapping[str, Tensor], x: Tensor, y: Tensor
    ) -> tuple[Tensor, tuple[dict[str, Tensor], Tensor]]:
        calls: dict[str, Tensor] = {}
        added = {name: zero for (name, _), zero in zip(self.layers, zeros, strict=True)}

        def note(name: str, inputs: Tensor, output: Tensor) -> Tensor:
            calls[name] = inputs
            return output + added[name]

        with self._hooked(note):
            losses = self.loss(call_with(self.model, named, x), y)
        return losses.sum(), (calls, losses)

    def _output_shapes(self, theta: Tensor, x: Tensor) -> list[torch.Size]:
        """Shapes of the layers' outputs for one client's batch; found once for each shape of it."""
        if x.shape[1:] not in self._shapes:
            shapes: dict[str, torch.Size] = {}

            def note(name: str, _: Tensor, output: Tensor) -> Tensor:
                shapes[name] = output.shape
                return output

            with self._hooked(note):
                call_with(self.model, self.packing.named(theta[0]), x[0])
            self._shapes[x.shape[1:]] = [shapes[name] for name, _ in self.layers]
        return self._shapes[x.shape[1:]]

    @contextmanager
    def _hooked(self, note: Callable[[str, Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Put ``note(name, inputs, output)`` in the place of the output of each of the layers."""
        with ExitStack() as hooks:
            for name, module in self.layers:

                def hook(_: nn.Module, inputs: Any, output: Tensor, name: str = name) -> Tensor:
                    return note(name, inputs[0], output)

                hooks.enter_context(module.register_forward_hook(hook))
            yield


def _part(module: nn.Module, x: Tensor, delta: Tensor) -> LinearPart:
    """Rows of a layer of ``n`` clients, from its inputs and its outputs' gradients."""
    bias = module.bias is not None and bool(module.bias.requires_grad)
    if isinstance(module, nn.Conv2d):
        return _convolved_part(module, x, delta)
    if x.dim() == 3:
        return LinearPart(x, delta, bias)
    return PositionsPart(x.flatten(2, -2), delta.flatten(2, -2), bias)


def _convolved_part(module: nn.Conv2d, x: Tensor, delta: Tensor) -> PositionsPart:
    bias = module.bias is not None and module.bias.requires_grad
    kernel = (module.in_channels, *module.kernel_size)
    windows = _windows(x.flatten(0, 1), module)
    windows = windows.view(*x.shape[:2], *windows.shape[1:])
    return PositionsPart(windows, delta.flatten(3).transpose(2, 3), bias, kernel)


def _windows(x: Tensor, module: nn.Conv2d) -> Tensor:
    """Patches that a convolution reads at its positions, channels last: ``[B, L, kh * kw * C]``."""
    (kh, kw), (sh, sw), (dh, dw) = module.kernel_size, module.stride, module.dilation
    pad = module.padding
    if any(pad):
        x = F.pad(x, (int(pad[1]), int(pad[1]), int(pad[0]), int(pad[0])))
    # Views by strides; the first flatten copies them, once.
    windows = x.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)
    windows = windows[..., ::dh, ::dw]
    return windows.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
