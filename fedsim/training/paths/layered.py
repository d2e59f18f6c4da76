"""The layered path: one client at a time, without autograd, by layers written out by hand.

Batched products over clients read every client's parameters in each step. Where those of one client
nearly fill the cache, it takes all its steps by itself instead, by plain products of matrices
(`OneClientPath`), and its row stays in the cache. A weight gradient of a dense layer that only
feeds a plain step is never written down; `fedsim.training.paths.conv_stack` says what convolutions
save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedsim.clients.base import Dense, Gradient
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.gradients import Factored, Parts, distance_between
from fedsim.training.paths.conv_stack import ConvStack, conv_stack
from fedsim.training.paths.dense_layers import DenseLayers, Pass, covered, dense_layers
from fedsim.training.paths.losses import BatchLosses
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.stacked import StackedPath
from fedsim.training.structure.reading import Structure


def layered(structure: Structure, packing: Packing, loss: Loss) -> LayeredPath | None:
    """The layered path of a model, or None where there is none.

    There is one for a chain of convolutions, each followed by ReLU and perhaps max-pooling, and,
    after a Flatten, linear layers with at most one activation each; all convolutions trained.
    """
    modules = structure.chain
    split = None if modules is None else conv_stack(modules)
    if split is None:
        return None
    convolutions, rest = split
    layers = dense_layers(rest, packing.slices, flat=False)
    if not layers or layers[0].weight is None:
        return None
    parameters = sum(len(layer.parameters) for layer in convolutions)
    if covered(layers) + parameters != len(packing.slices):
        return None
    dense = StackedPath((), tuple(layers), packing, loss)
    plain = PlainPath(structure.module, packing, loss)
    return LayeredPath(plain, dense, ConvStack(convolutions))


@dataclass(frozen=True)
class LayeredPath:
    """Client by client: the plain path's numbers.

    Attributes
    ----------
    plain : PlainPath
        Gives outputs.
    dense : StackedPath
        The dense layers.
    convolutions : ConvStack
        Before them.
    """

    plain: PlainPath
    dense: StackedPath
    convolutions: ConvStack

    name = "layered"

    @cached_property
    def one_client(self) -> OneClientPath:
        """Its gradients, for many steps of one client."""
        return OneClientPath(self.dense, self.convolutions)

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``."""
        gradients: list[Gradient] = []
        losses = []
        for k in range(len(theta)):
            client = slice(k, k + 1)
            point = theta if len(theta) == 1 else theta[client]
            batch_losses = self.one_client.losses(y[client], weight[client])
            (features,) = self.one_client.features(x[client])
            gradients.append(self.one_client.gradient(point, features, batch_losses, 0))
            losses.append(batch_losses.values())
        if len(gradients) == 1:
            return gradients[0], losses[0]
        return Dense(torch.cat([gradient.dense() for gradient in gradients])), torch.cat(losses)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model ``[n, B, ...]`` at ``theta [n, D]``."""
        return self.plain.outputs(theta, x)


class OneClientPath:
    """Gradients of one client's dense layers, batch after batch.

    Parameters
    ----------
    path : StackedPath
    convolutions : ConvStack, optional
        Trained convolutions before its layers.
    """

    def __init__(self, path: StackedPath, convolutions: ConvStack | None = None) -> None:
        self.path, self.convolutions = path, convolutions
        self.packing = path.packing
        self.dense = DenseLayers(path.layers)
        self._named: tuple[Tensor, dict[str, Tensor]] | None = None

    def losses(self, y: Tensor, weight: Tensor) -> BatchLosses:
        """Of batches of targets ``y [S, B, ...]`` and weights ``[S, B]``."""
        return self.path.losses(y, weight)

    def features(self, x: Tensor) -> Sequence[Tensor]:
        """Inputs ``[B, ...]`` of what is trained, for each batch of ``x [S, B, ...]``."""
        batches = x.unbind(0)
        for module in self.path.stem:
            batches = tuple(module(features) for features in batches)
        if self.convolutions is not None:
            return batches
        return [batch.flatten(1) for batch in batches]

    def gradient(
        self, theta: Tensor, x: Tensor, losses: BatchLosses, batch: int
    ) -> OneClientGradient:
        """Gradient at ``theta [1, D]`` of the weighted loss of one of the batches.

        ``x`` are its `features`.
        """
        if self.convolutions is None:
            through = self.dense.forward(theta, x)
            through.backward(losses.delta(through.outputs, batch), below=False)
            return OneClientGradient(through, self, {})
        # The dense layers go on from the convolutions' outputs, and back to them.
        features, activations = self.convolutions.forward(self.named(theta), x)
        through = self.dense.forward(theta, features.flatten(1))
        delta = through.backward(losses.delta(through.outputs, batch), below=True)
        assert delta is not None
        convolved = self.convolutions.backward(delta.view(features.shape), activations)
        return OneClientGradient(through, self, convolved)

    def forget(self) -> None:
        """Release the row of the last gradient."""
        self._named = None
        self.dense.forget()

    def __reduce__(self) -> tuple[type[OneClientPath], tuple[StackedPath, ConvStack | None]]:
        # Compiled functions cannot be pickled; the other process compiles its own.
        return OneClientPath, (self.path, self.convolutions)

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        """All parameters at ``theta [1, D]``, by name."""
        if self._named is None or self._named[0] is not theta:
            self._named = theta, self.packing.named(theta[0])
        return self._named[1]


@dataclass(slots=True)
class OneClientGradient:
    """Gradient of one client: the dense layers' factors, and the convolutions' written out.

    Attributes
    ----------
    through : Pass
        The batch's, forward and backward.
    path : OneClientPath
    convolved : mapping of name to Tensor
        Gradients of the convolutions before them.
    """

    through: Pass
    path: OneClientPath
    convolved: Mapping[str, Tensor]
    _known_square: Tensor | None = field(default=None, init=False)

    def __getitem__(self, clients: slice) -> Gradient:
        """Of this client, or of none."""
        return Dense(self.dense())[clients]

    def _parts(self) -> Parts:
        """Of the convolutions, as the gradient of a block of one."""
        return Parts({k: part[None] for k, part in self.convolved.items()}, self.path.packing)

    def dense(self) -> Tensor:
        """Write it out, ``[1, D]``."""
        factors = [factor[None] for factor in self.path.dense.trained(self.through.factors)]
        out = Factored(factors, self.path.packing).dense()
        for name, part in self.convolved.items():
            out[0, self.path.packing.slices[name]].view(part.shape).copy_(part)
        return out

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Fold the factors into ``theta`` without a gradient in between."""
        # A CPU reads a number at no cost, and products take one as a factor.
        number, into = float(rate), theta if out is None else out
        self.through.subtract_from(theta, number, into)
        if self.convolved:
            point, moved = self.path.named(theta), self.path.named(into)
            for name, part in self.convolved.items():
                torch.add(point[name], part, alpha=-number, out=moved[name])

    def distance(self, other: Gradient) -> Tensor:
        """L2 distance, from the factors."""
        if not isinstance(other, OneClientGradient):
            return Dense(self.dense()).distance(other)
        distance = distance_between(self._square, other._square, self._inner(other))
        if self.convolved:
            distance = torch.hypot(distance, self._parts().distance(other._parts()))
        return distance

    def norms(self) -> Tensor:
        """L2 norms, from the factors."""
        norms = self._square.clamp(min=0).sqrt_()
        return torch.hypot(norms, self._parts().norms()) if self.convolved else norms

    def peak(self) -> Tensor:
        """The norm, which is known already: no coordinate is larger."""
        return self.norms()

    @property
    def _square(self) -> Tensor:
        if self._known_square is None:
            self._known_square = self._inner(self)
        return self._known_square

    def _inner(self, other: OneClientGradient) -> Tensor:
        """Inner product of the dense layers' gradients, ``[1]``."""
        return self.through.inner(other.through).flatten().sum(0, keepdim=True)

    def scaled(self, factors: Tensor) -> OneClientGradient:
        """The output gradients times the one factor."""
        convolved = {name: part * factors for name, part in self.convolved.items()}
        return replace(self, through=self.through.scaled(factors), convolved=convolved)
