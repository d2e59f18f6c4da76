"""Gradients of one client's dense layers by hand, and of trained convolutions before them.

Batched products over clients go through every client's parameters in each step; where one
client's nearly fill the cache, it takes its steps alone, by plain products of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsim.clients.gradients import Dense, Factored, Gradient, Parts, apart
from fedsim.training.paths.front import ConvFront
from fedsim.training.paths.layers import DenseLayer
from fedsim.training.paths.losses import BatchLosses
from fedsim.training.paths.passes import DenseLayers, Pass
from fedsim.training.paths.stacked import StackedPath

__all__ = ["AlonePath", "OneFactored"]


@dataclass(slots=True)
class OneFactored:
    """Gradient of one client's dense layers, as factors; see `Factored`.

    Attributes
    ----------
    way : Pass
        The batch's, there and back.
    path : AlonePath
        Where it is from.
    convolved : mapping of name to Tensor
        Gradients of the convolutions before them, written out.
    """

    way: Pass
    path: AlonePath
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
        factors = [factor[None] for factor in self.path.dense.trained(self.way.factors)]
        out = Factored(factors, self.path.packing).dense()
        for name, part in self.convolved.items():
            out[0, self.path.packing.slices[name]].view(part.shape).copy_(part)
        return out

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Fold the factors into ``theta`` without a gradient in between."""
        number, ended = float(rate), theta if out is None else out
        self.way.subtract_from(theta, number, ended)
        if self.convolved:
            point, moved = self.path.named(theta), self.path.named(ended)
            for name, part in self.convolved.items():
                torch.add(point[name], part, alpha=-number, out=moved[name])

    def distance(self, other: Gradient) -> Tensor:
        """See `Factored`."""
        if not isinstance(other, OneFactored):
            return Dense(self.dense()).distance(other)
        distance = apart(self._square, other._square, self._inner(other))
        if self.convolved:
            distance = torch.hypot(distance, self._parts().distance(other._parts()))
        return distance

    def norms(self) -> Tensor:
        """See `Factored`."""
        norms = self._square.clamp(min=0).sqrt_()
        return torch.hypot(norms, self._parts().norms()) if self.convolved else norms

    def peak(self) -> Tensor:
        """The norm, which is at hand: no coordinate is larger."""
        return self.norms()

    @property
    def _square(self) -> Tensor:
        if self._known_square is None:
            self._known_square = self._inner(self)
        return self._known_square

    def _inner(self, other: OneFactored) -> Tensor:
        """Inner product of the dense layers' gradients, ``[1]``."""
        return self.way.inner(other.way).flatten().sum(0, keepdim=True)

    def scaled(self, factors: Tensor) -> OneFactored:
        """The output gradients times the one factor."""
        convolved = {name: part * factors for name, part in self.convolved.items()}
        return replace(self, way=self.way.scaled(factors), convolved=convolved)


class AlonePath:
    """Gradients of one client, batch after batch.

    Parameters
    ----------
    path : StackedPath
    front : ConvFront, optional
        Trained convolutions before its layers.
    """

    def __init__(self, path: StackedPath, front: ConvFront | None = None) -> None:
        self.layers: Sequence[DenseLayer] = path.layers
        self.packing = path.packing
        self._path, self._front = path, front
        self._stem = path.stem
        self.dense = DenseLayers(path.layers)
        self._named: tuple[Tensor, dict[str, Tensor]] | None = None

    def losses(self, y: Tensor, weight: Tensor) -> BatchLosses:
        """See `StackedPath`."""
        return self._path.losses(y, weight)

    def features(self, x: Tensor) -> Sequence[Tensor]:
        """Inputs ``[B, ...]`` of what is trained, for each batch of ``x [S, B, ...]``."""
        batches = x.unbind(0)
        for module in self._stem:
            batches = tuple(module(features) for features in batches)
        return batches if self._front is not None else [batch.flatten(1) for batch in batches]

    def gradient(self, theta: Tensor, x: Tensor, losses: BatchLosses, batch: int) -> OneFactored:
        """Gradient at ``theta [1, D]`` of the weighted loss of one of the batches.

        ``x`` are its `features`.
        """
        if self._front is None:
            way = self.dense.forward(theta, x)
            way.backward(losses.delta(way.outputs, batch), below=False)
            return OneFactored(way, self, {})
        features, passed = self._front.forward(self.named(theta), x)
        way = self.dense.forward(theta, features.flatten(1))
        delta = way.backward(losses.delta(way.outputs, batch), below=True)
        assert delta is not None
        return OneFactored(way, self, self._front.backward(delta.view(features.shape), passed))

    def leave(self) -> None:
        """Let go of where it has been last."""
        self._named = None
        self.dense.leave()

    def __reduce__(self) -> tuple[type[AlonePath], tuple[StackedPath, ConvFront | None]]:
        # What is compiled stays in its process.
        return AlonePath, (self._path, self._front)

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        """All parameters at ``theta [1, D]``, by name."""
        if self._named is None or self._named[0] is not theta:
            self._named = theta, self.packing.named(theta[0])
        return self._named[1]
