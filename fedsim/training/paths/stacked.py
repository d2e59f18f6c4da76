"""The stacked path: dense layers of many clients as batched products, backward by hand.

A weight gradient that only feeds a plain step is never written down: the path hands out its
two factors (`Factored`), and the step folds them into the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.clients.gradients import Factor, Factored
from fedsim.rows.alignment import LINE, aligned_empty
from fedsim.rows.elementwise import sigmoid_
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import IGNORED, CrossEntropy, Loss

__all__ = ["ACTIVATIONS", "DenseLayer", "StackedPath", "covered", "dense_layers", "leaves", "stack"]

# Of a client's parameters, from which on they are worth keeping in the cache; see `alone`.
ALONE_BYTES = 2**19

Backward = Callable[[Tensor, Tensor], Tensor]

# In-place forward, and backward from (gradient of the output, output).
ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Backward]] = {
    nn.ReLU: (torch.relu_, lambda delta, h: torch.ops.aten.threshold_backward.default(delta, h, 0)),
    nn.Tanh: (torch.tanh_, lambda delta, h: torch.ops.aten.tanh_backward(delta, h)),
    nn.Sigmoid: (sigmoid_, lambda delta, h: torch.ops.aten.sigmoid_backward(delta, h)),
}


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer and the activation after it; a slice of None marks frozen parameters."""

    module: nn.Linear
    weight: slice | None
    bias: slice | None
    activation: type[nn.Module] | None

    def parameters(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights ``[n, out, in]`` and biases ``[n, 1, out]`` of the block."""
        n = len(theta)
        outputs, inputs = self.module.weight.shape
        if self.weight is None:
            weight = self.module.weight.detach().expand(n, outputs, inputs)
        else:
            weight = theta[:, self.weight].view(n, outputs, inputs)
        if self.bias is not None:
            return weight, theta[:, self.bias].view(n, 1, outputs)
        frozen: Tensor | None = getattr(self.module, "bias", None)
        return weight, None if frozen is None else frozen.detach().expand(n, 1, outputs)


def stack(model: nn.Module, packing: Packing, loss: Loss, example_dims: int) -> StackedPath | None:
    """The stacked path of a model, or None where there is none.

    There is one for a Sequential whose trainable part is linear layers, each with at most one
    activation (ReLU, tanh, sigmoid) after it. What comes before it may be anything frozen.

    Parameters
    ----------
    model, packing, loss
    example_dims : int
        Dimensions of one input; a model without Flatten takes vectors (1) only.
    """
    if not isinstance(model, nn.Sequential):
        return None
    slices = packing.slices
    modules = list(leaves(model))
    owners = [id(m) for _, m in modules if any(True for _ in m.parameters())]
    if len(set(owners)) != len(owners):
        return None  # a module with parameters is used twice
    trained = [any(p.requires_grad for p in m.parameters()) for _, m in modules]
    first = trained.index(True) if True in trained else 0
    if first and isinstance(modules[first - 1][1], nn.Flatten):
        first -= 1
    stem = [m for _, m in modules[:first]]
    vectors = example_dims == 1 and all(type(m) in {nn.Linear, *ACTIVATIONS} for m in stem)
    flat = vectors or any(isinstance(m, nn.Flatten) for m in stem)
    layers = dense_layers(modules[first:], slices, flat)
    if not layers or covered(layers) != len(slices):
        return None
    return StackedPath(tuple(stem), tuple(layers), packing, loss)


def dense_layers(
    modules: Sequence[tuple[str, nn.Module]], slices: Mapping[str, slice], flat: bool
) -> list[DenseLayer] | None:
    """Layers of modules by name, if they are linear with at most one activation each.

    ``flat``: what they are given are vectors; otherwise a Flatten comes first.
    """
    layers: list[DenseLayer] = []
    for name, module in modules:
        if isinstance(module, nn.Flatten):
            if module.start_dim != 1 or module.end_dim != -1:
                return None
            flat = True
        elif type(module) is nn.Linear and flat:
            weight, bias = slices.get(f"{name}.weight"), slices.get(f"{name}.bias")
            layers.append(DenseLayer(module, weight, bias, None))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = replace(layers[-1], activation=type(module))
        else:
            return None
    return layers


def covered(layers: Sequence[DenseLayer]) -> int:
    """How many trained parameters they have."""
    return sum((s is not None) for layer in layers for s in (layer.weight, layer.bias))


def leaves(model: nn.Sequential, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of a Sequential, those of inner Sequentials in their place."""
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential):
            yield from leaves(child, f"{prefix}{name}.")
        elif not isinstance(child, nn.Identity):
            yield f"{prefix}{name}", child


@dataclass(frozen=True)
class StackedPath:
    """Batched products over ``n`` clients: the same bits for every ``n``."""

    stem: tuple[nn.Module, ...]
    layers: tuple[DenseLayer, ...]
    packing: Packing
    loss: Loss

    name = "stacked"

    @property
    def alone(self) -> bool:
        """Whether clients take their steps one after another: `fedsim.training.paths.alone`."""
        size = self.packing.width * self.packing.layout.dtype.itemsize
        return size >= ALONE_BYTES and not self.layers[0].module.weight.is_cuda

    def _features(self, x: Tensor) -> Tensor:
        """Inputs of the first stacked layer, ``[n, B, in]``."""
        if self.stem:
            # One client at a time: a convolution's bits may depend on how many rows it gets.
            outputs = []
            for features in x:
                for module in self.stem:
                    features = module(features)
                outputs.append(features)
            x = torch.stack(outputs)
        x = x.flatten(2)
        # Gathered batches lie without gaps; where a client's does not end on a line, the next
        # one's would not start on one.
        if x.stride(0) * x.element_size() % LINE:
            x = aligned_empty(x, *x.shape).copy_(x)
        return x

    def _forward(self, theta: Tensor, x: Tensor) -> list[Tensor]:
        """Inputs of every layer, and the outputs, each ``[n, B, width]``."""
        values = [self._features(x)]
        for layer in self.layers:
            weight, bias = layer.parameters(theta)
            # Each client's outputs start on a cache line: the library picks its kernel by where a
            # matrix lies, and a client's bits must not depend on its place in the block.
            h = aligned_empty(x, *x.shape[:2], weight.shape[1])
            if bias is None:
                torch.bmm(values[-1], weight.transpose(1, 2), out=h)
            else:
                torch.baddbmm(bias, values[-1], weight.transpose(1, 2), out=h)
            if layer.activation is not None:
                # In place: backward needs the outputs of these activations, never their inputs.
                h = ACTIVATIONS[layer.activation][0](h)
            values.append(h)
        return values

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, K]`` at ``theta [n, D]``."""
        return self._forward(theta, x)[-1]

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Factored, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        values = self._forward(theta, x)
        delta, losses = self._from_loss(values[-1], y, weight)
        factors: list[Factor] = []
        # Below the first layer that is trained nobody wants a gradient.
        trainable = [i for i, s in enumerate(self.layers) if s.weight or s.bias]
        for i in range(len(self.layers) - 1, trainable[0] - 1, -1):
            layer = self.layers[i]
            if layer.activation is not None:
                delta = self._through(layer.activation, delta, values[i + 1])
            # delta^T x would be the weight gradient. It is left to whoever needs it written down:
            # a plain step folds the two factors into the weights in one product (`Factored`).
            if layer.weight is not None or layer.bias is not None:
                factors.append(Factor(values[i], delta, layer.weight, layer.bias))
            if i > trainable[0]:
                below = aligned_empty(delta, *values[i].shape)
                delta = torch.bmm(delta, layer.parameters(theta)[0], out=below)
        return Factored(factors, self.packing), losses

    @staticmethod
    def _through(activation: type[nn.Module], delta: Tensor, h: Tensor) -> Tensor:
        """Gradient of an activation's input from that of its output ``h``."""
        below = ACTIVATIONS[activation][1](delta, h)
        # Torch gives a new tensor without gaps: the next product wants each client on a line.
        if below.stride(0) * below.element_size() % LINE:
            below = aligned_empty(below, *below.shape).copy_(below)
        return below

    def _from_loss(self, outputs: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted gradient of the loss with respect to the outputs, and each loss."""
        if self.loss == CrossEntropy():
            # softmax - onehot, from the numbers that the loss needs anyway: autograd would keep
            # the outputs, run twice as many kernels and allocate in between.
            log_p = F.log_softmax(outputs, dim=-1)
            counts = y != IGNORED
            classes = torch.where(counts, y, 0).unsqueeze(-1)
            losses = log_p.gather(-1, classes).squeeze(-1).neg_().mul_(counts)
            weight = weight * counts
            delta = torch.exp(log_p, out=aligned_empty(outputs, *outputs.shape))
            # Not `delta[..., y] -= 1`: that takes two kernels, and would wait for a GPU.
            delta.scatter_add_(-1, classes, delta.new_full((), -1.0).expand(classes.shape))
            return delta.mul_(weight.unsqueeze(-1)), losses
        # Any other loss: autograd through the loss alone, on a GPU for the whole block at once. It
        # gives each example a loss of its own, so that no client's gradient has another's part.
        delta, losses = aligned_empty(outputs, *outputs.shape), torch.empty_like(weight)
        runs = [slice(None)] if outputs.is_cuda else [slice(k, k + 1) for k in range(len(y))]
        for clients in runs:
            # Copies, as an exponential's last bit may depend on where in memory its number lies.
            leaf = outputs[clients].flatten(0, 1).clone().requires_grad_()
            with torch.enable_grad():
                example_losses = self.loss(leaf, y[clients].flatten(0, 1))
                (gradient,) = torch.autograd.grad(
                    (example_losses * weight[clients].reshape(-1)).sum(), leaf
                )
            delta[clients] = gradient.view_as(delta[clients])
            losses[clients] = example_losses.detach().view_as(losses[clients])
        return delta, losses
