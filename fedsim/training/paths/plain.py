"""The plain path: one client at a time, PyTorch's autograd on the model as it was written.

The reference that the other paths are tested against, and the fallback for models that they
cannot take.

On a CPU, where a block has one row, the model's own parameters become views of that row
(`ParameterBinding`): autograd then runs the module itself, a step writes straight into what the
model reads next, and a client's many steps share one binding. Two things must hold: the row
must stay the same tensor in the same memory, or the model would train another one; and the
parameters must be restored however a step ends, since the next client uses the same model. The
filters of most models' convolutions are faster with channels last, which a row does not have: they
are copies, refreshed before each gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fedsim.clients.base import Gradient
from fedsim.models.memory_format import ViewsOfAnyFormat, channels_last, takes_channels_last
from fedsim.models.parameters import call_with, with_parameters
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss, NumberLoss
from fedsim.training.gradients import BlockOfOne, ParameterGradients, RowViews
from fedsim.training.own_state import OwnState
from fedsim.training.side_effects import seeded

Views = dict[str, Tensor]

# Channels from which on torch's GroupNorm is as fast with channels last. With 16 channels its
# backward pass takes 6 times as long, with 32 it takes 4 times: more than convolutions save.
WIDE_NORM = 64


class ParameterBinding:
    """Makes a model's trained parameters views of one client's packed row, for a while.

    ``filters``: names of the parameters that are copies instead of views, with channels last.
    """

    def __init__(self, model: nn.Module, packing: Packing, filters: Sequence[str]) -> None:
        named = dict(model.named_parameters())
        self.parameters = {name: named[name] for name in packing.slices}
        self._packing = packing
        self._filters = {name: channels_last(named[name].detach()) for name in filters}
        self._viewed: tuple[Tensor, Views] | None = None
        self._bound: tuple[Tensor, Views] | None = None

    def at(self, theta: Tensor) -> AbstractContextManager[Views]:
        """Bind the parameters to ``theta [1, D]``; on exit they are what they were before.

        Yields
        ------
        mapping of name to Tensor ``[*shape]``
            Views of the row.
        """
        if self._bound is not None and self._bound[0] is theta:
            return nullcontext(self._bound[1])
        return self._binding(theta)

    def refresh(self, views: Views) -> None:
        """Copy the filters from the row, which may have changed since."""
        if self._filters:
            rows = [views[name] for name in self._filters]
            torch._foreach_copy_(list(self._filters.values()), rows)

    @contextmanager
    def _binding(self, theta: Tensor) -> Iterator[Views]:
        # Views are kept for the next step, as most algorithms step in place: cutting a row into
        # views takes longer than a small step.
        if self._viewed is None or self._viewed[0] is not theta:
            self._viewed = theta, self._packing.named(theta[0])
        bound_before, self._bound = self._bound, self._viewed
        views = self._viewed[1]
        values_before = [parameter.data for parameter in self.parameters.values()]
        try:
            for name, parameter in self.parameters.items():
                parameter.data = self._filters.get(name, views[name])
            yield views
        finally:
            self._bound = bound_before
            for parameter, values in zip(self.parameters.values(), values_before, strict=True):
                parameter.data = values


@dataclass(frozen=True)
class PlainPath:
    """Autograd, client by client: each batch as it is, without padding.

    So it also takes models and losses that look across a batch. State that they keep between calls
    is restored before the next client (`state`): no bound would cover data that it carries over.
    """

    model: nn.Module
    packing: Packing
    loss: Loss

    name = "plain"

    def gradient(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        seeds: Sequence[int | None] | None = None,
    ) -> tuple[Gradient, Tensor]:
        """Gradients of the weighted loss, and the loss of each example ``[n, B]``.

        ``seeds [n]`` are for the model's own random draws, one for each client.
        """
        losses = torch.zeros_like(weight)
        by_name: dict[str, list[Tensor | None]] = {name: [] for name in self.packing.slices}
        for k in range(len(theta)):
            # A leaf for each parameter, cut from the row: the model's own parameters are not
            # touched.
            leaves = {name: leaf.requires_grad_() for name, leaf in self._named(theta[k]).items()}
            seed = seeds[k] if seeds else None
            with (
                torch.enable_grad(),
                seeded(seed, theta.device),
                self.state.restored(),
                self._format(),
            ):
                b = int(torch.count_nonzero(weight[k]))  # padding comes after real examples
                client = partial(self._of_leaves, leaves, x[k, :b], y[k, :b], weight[k, :b])
                losses[k, :b], gradients = with_parameters(self.model, leaves, client)
            for name, gradient in zip(leaves, gradients, strict=True):
                by_name[name].append(gradient)
        parts = {
            name: _rows(one) for name, one in by_name.items() if any(g is not None for g in one)
        }
        return ParameterGradients(parts, self.packing), losses

    def _of_leaves(
        self, leaves: Mapping[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        losses = self.loss(self.model(self._aligned(x)), y)
        gradients = torch.autograd.grad(
            (losses * weight).sum(), list(leaves.values()), allow_unused=True
        )
        return losses.detach(), gradients

    def bound(self, theta: Tensor) -> AbstractContextManager[object]:
        """Bind the parameters to ``theta [1, D]`` once, for many gradients of a client on a CPU."""
        return self._binding.at(theta)

    @cached_property
    def state(self) -> OwnState:
        """State that each client starts from; attributes that cannot be copied are not restored."""
        return OwnState(self.model, self.loss, self.packing.slices, strict=False)

    @cached_property
    def _binding(self) -> ParameterBinding:
        filters = []
        if self._channels_last:
            shapes = {entry.name: entry.shape for entry in self.packing.layout.entries}
            filters = [name for name, shape in shapes.items() if len(shape) == 4]
        return ParameterBinding(self.model, self.packing, filters)

    def gradient_of_one(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor, loss: Loss | None = None
    ) -> tuple[Gradient, Tensor]:
        """`gradient` of one client on a CPU, with the model's parameters bound to its row.

        For a batch ``[B, ...]`` without padding, at ``theta [1, D]``; ``loss`` is from `loss_of`.
        """
        loss, parameters = self.loss if loss is None else loss, self._binding.parameters
        with self._binding.at(theta) as views, torch.enable_grad(), self._format():
            self._binding.refresh(views)
            losses = loss(self.model(self._aligned(x)), y)
            # The weights are the gradient of the weighted sum with respect to the losses.
            gradients = torch.autograd.grad(
                losses, list(parameters.values()), weight, allow_unused=True
            )
        pairs = zip(parameters, gradients, strict=True)
        named = {name: gradient for name, gradient in pairs if gradient is not None}
        row_views = RowViews(theta, [views[name] for name in named], list(named.values()))
        named = {name: _dense(gradient) for name, gradient in named.items()}
        return ParameterGradients(BlockOfOne(named), self.packing, row_views), losses.detach()

    def loss_of(self, y: Tensor) -> Loss:
        """The loss for targets among ``y``: a variant without masks if all of them count."""
        loss = self.loss
        # Not for a subclass that has a `__call__` of its own.
        if not isinstance(loss, NumberLoss) or type(loss).__call__ is not NumberLoss.__call__:
            return loss
        return loss if y.is_floating_point() and bool(y.isnan().any()) else loss.without_mask

    def outputs(
        self,
        theta: Tensor,
        x: Tensor,
        counts: Sequence[int] | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> Tensor:
        """Outputs of the model ``[n, B, ...]`` at ``theta [n, D]``; ``seeds`` as in `gradient`.

        Only the first ``counts [n]`` examples of each client are run; outputs of others are 0.
        """
        outputs: list[Tensor] = []
        for k, (point, inputs) in enumerate(zip(theta, x, strict=True)):
            examples = inputs if counts is None else inputs[: counts[k]]
            # A model that writes to its parameters must not write to those that are evaluated.
            point = point if self.state.stateless else point.clone()
            seed = seeds[k] if seeds else None
            with seeded(seed, theta.device), self.state.restored(), self._format():
                values = call_with(self.model, self._named(point), self._aligned(examples))
            padding = values.new_zeros(len(inputs) - len(examples), *values.shape[1:])
            outputs.append(torch.cat([values, padding]) if len(padding) else values)
        return torch.stack(outputs)

    @cached_property
    def _channels_last(self) -> bool:
        """Whether to use channels last: faster convolutions on a CPU, slower narrow GroupNorm."""
        modules = list(self.model.modules())
        narrow = (isinstance(m, nn.GroupNorm) and m.num_channels < WIDE_NORM for m in modules)
        convolves = any(isinstance(m, nn.Conv2d) for m in modules)
        return convolves and not any(narrow) and takes_channels_last(modules)

    def _format(self) -> AbstractContextManager[object]:
        return ViewsOfAnyFormat() if self._channels_last else nullcontext()

    def _aligned(self, x: Tensor) -> Tensor:
        """One client's inputs, copied to an aligned address: bits must not depend on position."""
        if self._channels_last and x.dim() == 4 and not x.is_cuda:
            return channels_last(x)
        return x.clone()

    def _named(self, point: Tensor) -> dict[str, Tensor]:
        named = {k: v.detach() for k, v in self.packing.named(point).items()}
        if self._channels_last and not point.is_cuda:
            for name, value in named.items():
                if value.dim() == 4:
                    named[name] = value.contiguous(memory_format=torch.channels_last)
        return named


def _rows(gradients: Sequence[Tensor | None]) -> Tensor:
    """Clients' gradients of one parameter, ``[n, *shape]``, of which one at least is not None.

    A client whose batch did not use the parameter gets a row of zeros, and not another's row.
    """
    like = next(gradient for gradient in gradients if gradient is not None)
    rows = [_dense(torch.zeros_like(like) if g is None else g) for g in gradients]
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def _dense(gradient: Tensor) -> Tensor:
    """A gradient that is sparse (of an embedding with ``sparse=True``) as a dense tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient
