"""The model program: a chain of layers, lowered once from the graph that was read of a model.

Its parts come in one order: frozen layers (the stem), convolutions with ReLU and perhaps
max-pooling, linear layers with at most one activation each. Every layer knows its slices of a
client's row. Two executors run it, without autograd: the eager one operation by operation, on any
device, the compiled one by C kernels for the layers that have them (`dense_layers`, `conv_layers`).
Per-example gradients come from the same program (`Program.example_factors`).

By default the clients of a block take each step together, which reads every client's parameters in
each step. With convolutions, or with compiled kernels and parameters that nearly fill the cache, a
client takes all its steps before the next one begins, and its row stays in the cache
(`Program.sequential`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fedsim.clients.base import DenseGradient, Gradient
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.gradients import BlockOfOne, FactoredGradient, LayerFactors, ParameterGradients
from fedsim.training.paths.conv_layers import (
    ConvActivations,
    ConvFactor,
    ConvLayer,
    backward,
    conv_factor,
    forward,
    gradients_by_name,
    is_plain,
)
from fedsim.training.paths.dense_layers import (
    ACTIVATIONS,
    CompiledGradient,
    DenseLayer,
    DenseLayers,
)
from fedsim.training.paths.losses import BatchLosses, prepare_losses
from fedsim.training.structure.reading import Reading, Structure

# Bytes of a row from which on a client takes all its steps before the next one begins.
SEQUENTIAL_BYTES = 2**19

Result = TypeVar("Result")


def lowered(reading: Reading, packing: Packing, kernel: str = "eager") -> Program | None:
    """The program of a model; None if its graph is no such chain of layers.

    Parameters
    ----------
    reading : Reading
    packing : Packing
        Packing of all parameters that are trained.
    kernel : "eager" or "compiled"
        Which executor runs it.
    """
    structure, loss = reading.structure, reading.loss
    if structure is None or loss is None:
        return None
    chain = _module_chain(structure)
    trained = [any(p.requires_grad for p in call.module.parameters()) for call in chain]
    first = trained.index(True) if True in trained else 0
    # Flattening inputs costs nothing; as a part of the stem it would go client by client.
    if first and isinstance(chain[first - 1].module, nn.Flatten):
        first -= 1
    layers = _layers(chain[first:], packing)
    convolutions = tuple(layer for layer in layers if isinstance(layer, ConvLayer))
    dense = tuple(layer for layer in layers if isinstance(layer, DenseLayer))
    places = [place for layer in layers for place in (layer.weight, layer.bias) if place]
    # Only ReLU commutes with pooling, and the layer above the convolutions must be trained.
    fits = all(layer.activation is nn.ReLU for layer in convolutions)
    fits = fits and not (convolutions and dense and dense[0].weight is None)
    if not (fits and dense and len(places) == len(packing.slices)):
        return None
    stem = tuple(call.module for call in chain[:first])
    return Program(structure.module, stem, convolutions, dense, packing, loss, kernel == "compiled")


class _ModuleCall(NamedTuple):
    """A module that a graph calls, and how many dimensions a batch of its inputs has."""

    name: str
    module: nn.Module
    rank: int


def _module_chain(structure: Structure) -> list[_ModuleCall]:
    """A model's modules in order, if each is called on the output of the one before; else none."""
    calls = []
    nodes = list(structure.module.graph.nodes)
    for before, node in pairwise(nodes):
        if node.args != (before,) or node.kwargs:
            return []
        if node.op == "call_module":
            module = structure.module.get_submodule(str(node.target))
            calls.append(_ModuleCall(str(node.target), module, before.meta["value"].like.dim()))
    parameters = [id(p) for call in calls for p in call.module.parameters()]
    # No function is called in between, and no parameter is used twice (a row has it once).
    is_chain = len(calls) == len(nodes) - 2 and len({*parameters}) == len(parameters)
    return [call for call in calls if not isinstance(call.module, nn.Identity)] if is_chain else []


def _layers(chain: Sequence[_ModuleCall], packing: Packing) -> list[ConvLayer | DenseLayer]:
    """Group the modules of a chain into layers; none if one of them fits into no layer.

    A layer's activation and pooling may come in either order.
    """
    layers: list[ConvLayer | DenseLayer] = []
    for name, module, rank in chain:
        weight, bias = (packing.slices.get(f"{name}.{entry}") for entry in ("weight", "bias"))
        last = layers[-1] if layers else None
        if type(module) is nn.Linear and rank == 2:
            layers.append(DenseLayer(module, weight, bias, None))
        elif (
            type(module) is nn.Conv2d
            and is_plain(module)
            and weight
            and (bias or module.bias is None)
        ):
            layers.append(ConvLayer(name, module, weight, bias))
        elif type(module) in ACTIVATIONS and last and last.activation is None:
            layers[-1] = replace(last, activation=type(module))
        elif type(module) is nn.MaxPool2d and isinstance(last, ConvLayer) and last.pool is None:
            layers[-1] = replace(last, pool=module)
        elif not isinstance(module, nn.Flatten) or (module.start_dim, module.end_dim) != (1, -1):
            return []
    return layers


@dataclass(frozen=True)
class Program:
    """A chain of layers and its executor: the same bits for every number of clients.

    It is the layered path (`fedsim.training.paths.path_choice.Path`).

    Attributes
    ----------
    model : nn.Module
        The graph that was read.
    stem : tuple of nn.Module
        Frozen modules before the layers.
    convolutions : tuple of ConvLayer
    layers : tuple of DenseLayer
        Linear layers, after the convolutions.
    packing : Packing
    loss : callable
    compiled : bool
        Whether compiled kernels are used.
    """

    model: nn.Module
    stem: tuple[nn.Module, ...]
    convolutions: tuple[ConvLayer, ...]
    layers: tuple[DenseLayer, ...]
    packing: Packing
    loss: Loss
    compiled: bool

    name = "layered"

    @property
    def sequential(self) -> bool:
        """Whether a client takes all its steps before the next one begins."""
        size = self.packing.width * self.packing.layout.dtype.itemsize
        # With the eager executor, dispatch costs more than a row that leaves the cache.
        large = self.compiled and size >= SEQUENTIAL_BYTES
        on_gpu = self.layers[0].module.weight.is_cuda
        return not on_gpu and (bool(self.convolutions) or large)

    @property
    def has_example_rows(self) -> bool:
        """Whether the layers' factors, in order, make up per-example rows.

        They do if every trained layer trains its weight, layers are in the layout's order, and no
        convolution has groups.
        """
        layers: list[ConvLayer | DenseLayer] = [*self.convolutions, *self.layers]
        starts = [layer.weight.start for layer in layers if layer.weight is not None]
        has_lone_bias = any(layer.bias is not None and layer.weight is None for layer in layers)
        grouped = any(layer.module.groups > 1 for layer in self.convolutions)
        return starts == sorted(starts) and not has_lone_bias and not grouped

    @cached_property
    def dense(self) -> DenseLayers:
        """The linear layers, ready for a pass."""
        return DenseLayers(self.layers, self.packing, compiled=self.compiled)

    def __getstate__(self) -> dict[str, Any]:
        # Compiled functions cannot be pickled; the other process compiles its own.
        return {name: value for name, value in vars(self).items() if name != "dense"}

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, K]`` at ``theta [n, D]``."""
        x = self._stem_outputs(x)
        if self.convolutions:
            passes = (
                forward(self.convolutions, row, images, compiled=self.compiled)
                for row, images in zip(theta, x, strict=True)
            )
            x = torch.stack([activations[-1].outputs for activations in passes])
        return self.dense.values(theta, x.flatten(2))[-1]

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        losses = prepare_losses(self.loss, y, weight)
        return self.batch_gradient(theta, x, losses, 0), losses.values()

    def batch_gradient(
        self, theta: Tensor, x: Tensor, losses: BatchLosses, first: int
    ) -> ProgramGradient:
        """Gradients of ``n`` batches of these losses, from number ``first`` on: one per client."""
        x = self._stem_outputs(x)
        if not self.convolutions:
            return self.dense.gradient(theta, x.flatten(2), partial(losses.deltas, first=first))[0]
        of_layer = partial(gradients_by_name, compiled=self.compiled)
        rows = []
        # One client at a time, for the same reason as in the stem (`_stem_outputs`).
        for k in range(len(theta)):
            dense, convolved = self._convolved(theta[k : k + 1], x[k], losses, first + k, of_layer)
            by_name = {name: part for layer in convolved for name, part in layer.items()}
            rows.append(
                ConvolvedGradient(dense, ParameterGradients(BlockOfOne(by_name), self.packing))
            )
        return (
            rows[0] if len(rows) == 1 else DenseGradient(torch.cat([row.dense() for row in rows]))
        )

    def example_factors(
        self, theta: Tensor, x: Tensor, losses: BatchLosses
    ) -> tuple[Sequence[ConvFactor], Sequence[LayerFactors]]:
        """Factors of per-example gradients, layer by layer; `has_example_rows` must be true.

        They are of the first ``n`` batches of these losses, whose weights are 1; with convolutions
        ``n`` is 1.
        """
        x = self._stem_outputs(x)
        if not self.convolutions:
            deltas = partial(losses.deltas, first=0)
            return [], self.dense.gradient(theta, x.flatten(2), deltas)[0].factors[::-1]
        dense, convolved = self._convolved(theta, x[0], losses, 0, conv_factor)
        return convolved[::-1], dense.factors[::-1]

    def _convolved(
        self,
        theta: Tensor,
        x: Tensor,
        losses: BatchLosses,
        batch: int,
        of_layer: Callable[[ConvActivations, Tensor, bool], tuple[Tensor | None, Result]],
    ) -> tuple[CompiledGradient | FactoredGradient, list[Result]]:
        """Forward and backward pass of one batch, ``x [B, C, H, W]``, at ``theta [1, D]``.

        Returns the dense layers' gradient, and the results of ``of_layer``, last convolution first.
        """
        activations = forward(self.convolutions, theta[0], x, compiled=self.compiled)
        features = activations[-1].outputs
        deltas = partial(losses.deltas, first=batch)
        dense, delta = self.dense.gradient(
            theta, features.flatten(1)[None], deltas, with_inputs=True
        )
        assert delta is not None
        return dense, backward(activations, delta.view(features.shape), of_layer)

    def _stem_outputs(self, x: Tensor) -> Tensor:
        """Inputs of the first layer that is trained."""
        if not self.stem:
            return x
        # One client at a time: a convolution's bits may depend on how many rows it gets.
        outputs = []
        for features in x:
            for module in self.stem:
                features = module(features)
            outputs.append(features)
        return torch.stack(outputs)


@dataclass(frozen=True)
class ConvolvedGradient:
    """Gradient of one client: factors for its linear layers, tensors for its convolutions.

    Attributes
    ----------
    dense_part : CompiledGradient or Factored
    convolved : Parts
    """

    dense_part: CompiledGradient | FactoredGradient
    convolved: ParameterGradients

    def __getitem__(self, clients: slice) -> Gradient:
        """The gradient of this client, or of none."""
        return DenseGradient(self.dense())[clients]

    def dense(self) -> Tensor:
        """The packed gradient, ``[1, D]``."""
        out = self.dense_part.dense()
        for name, part in self.convolved.by_name.items():
            out[:, self.convolved.packing.slices[name]].view(part.shape).copy_(part)
        return out

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Subtract ``rate`` times the gradient, without forming that of the linear layers."""
        # On a CPU reading a number costs nothing, and a multiply-add takes one as its factor.
        number, into = float(rate), theta if out is None else out
        self.dense_part.subtract_from(theta, rate, out)
        for name, part in self.convolved.by_name.items():
            place = self.convolved.packing.slices[name]
            old, new = (rows[:, place].view(part.shape) for rows in (theta, into))
            torch.add(old, part, alpha=-number, out=new)

    def distance(self, other: Gradient) -> Tensor:
        """L2 distance ``[1]``, from the factors."""
        if not isinstance(other, ConvolvedGradient):
            return DenseGradient(self.dense()).distance(other)
        distance = self.dense_part.distance(other.dense_part)
        return torch.hypot(distance, self.convolved.distance(other.convolved))

    def norms(self) -> Tensor:
        """L2 norm ``[1]``, from the factors."""
        return torch.hypot(self.dense_part.norms(), self.convolved.norms())

    def max_abs(self) -> Tensor:
        """The L2 norm, which bounds every coordinate."""
        return self.norms()

    def scaled(self, factors: Tensor) -> ConvolvedGradient:
        """The gradient times its factor."""
        return ConvolvedGradient(self.dense_part.scaled(factors), self.convolved.scaled(factors))


ProgramGradient = CompiledGradient | FactoredGradient | ConvolvedGradient | DenseGradient
