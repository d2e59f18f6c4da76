"""Losses of batches from a model's outputs, and gradients of the outputs."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fedsim.kernels.classes import ClassBatches
from fedsim.tasks.losses import IGNORED, CrossEntropy, Loss, SquaredError


class BatchLosses(Protocol):
    """Losses of prepared batches, and their gradients; each batch has at most one pass."""

    def deltas(self, outputs: Tensor, first: int) -> Tensor:
        """Gradients of the weighted losses with respect to the outputs ``[n, B, ...]``.

        The outputs are of ``n`` batches, from number ``first`` on.
        """

    def values(self) -> Tensor:
        """Unweighted loss of each example, ``[S, B]``; 0 for batches without a pass."""


def prepare_losses(loss: Loss, y: Tensor, weight: Tensor) -> BatchLosses:
    """Losses of batches of targets ``y [S, B, ...]`` and weights ``[S, B]``."""
    if loss == SquaredError() and y.dim() > 2 and y.dtype == weight.dtype and not y.is_cuda:
        return SquaredErrors(loss, y, weight)
    if loss != CrossEntropy() or y.dim() != 2 or y.is_floating_point():
        return LossesByAutograd(loss, y, weight)
    counts = y != IGNORED
    classes, weight = torch.where(counts, y, 0), torch.where(counts, weight, 0.0)
    if weight.dtype == torch.float32 and not weight.is_cuda:
        return ClassBatches(classes, weight, counts)
    return EagerClassLosses(classes, weight, counts)


class EagerClassLosses:
    """Cross-entropy by torch's own softmax: on a GPU, and in float64.

    Parameters as in `fedsim.kernels.classes.ClassBatches`, which computes float32 on a CPU.
    """

    def __init__(self, classes: Tensor, weight: Tensor, counts: Tensor) -> None:
        self._classes, self._counts = classes.unsqueeze(-1), counts
        self._minus_weight = -weight.unsqueeze(-1)
        self._losses = torch.zeros_like(weight)

    def deltas(self, outputs: Tensor, first: int) -> Tensor:
        """Gradients of the outputs of batches from number ``first`` on."""
        batches = slice(first, first + len(outputs))
        log_p, classes = torch.log_softmax(outputs, -1), self._classes[batches]
        self._losses[batches] = log_p.gather(-1, classes).squeeze(-1).neg_()
        # What autograd would call, from the gradient of ``sum_j weight_j loss_j``.
        weights = torch.zeros_like(log_p).scatter_(-1, classes, self._minus_weight[batches])
        return torch._log_softmax_backward_data(weights, log_p, -1, outputs.dtype)

    def values(self) -> Tensor:
        """Loss of each example, ``[S, B]``."""
        return self._losses.masked_fill_(~self._counts, 0.0)


class LossesByAutograd:
    """Any loss, by autograd. Parameters as in `prepare_losses`."""

    def __init__(self, loss: Loss, y: Tensor, weight: Tensor) -> None:
        self._loss, self._y, self._weight = loss, y, weight
        self._losses = torch.zeros_like(weight)

    def deltas(self, outputs: Tensor, first: int) -> Tensor:
        """Gradients of the outputs of batches from number ``first`` on."""
        # On a GPU the whole block at once: each example has a loss of its own, so that no client's
        # gradient has another's part. On a CPU one by one: the last bit of a sigmoid or a power may
        # depend on its place in a tensor (see `fedsim.rows.packing`).
        n = len(outputs)
        runs = [slice(0, n)] if outputs.is_cuda else [slice(k, k + 1) for k in range(n)]
        copies = ((outputs[run].clone(), first + run.start) for run in runs)
        return torch.cat([self._batch_deltas(*copy) for copy in copies])

    def _batch_deltas(self, outputs: Tensor, first: int) -> Tensor:
        batches, leaf = slice(first, first + len(outputs)), outputs.requires_grad_()
        y, weight = self._y[batches].flatten(0, 1), self._weight[batches].flatten()
        with torch.enable_grad():
            losses = self._loss(leaf.flatten(0, 1), y)
            (delta,) = torch.autograd.grad((losses * weight).sum(), leaf)
        self._losses[batches] = losses.detach().view(-1, self._weight.shape[1])
        return delta

    def values(self) -> Tensor:
        """Loss of each example, ``[S, B]``."""
        return self._losses


class SquaredErrors(LossesByAutograd):
    """Squared errors of several numbers per example, on a CPU: as autograd, but without a graph.

    Masked targets are left to autograd. Parameters as in `prepare_losses`.
    """

    def __init__(self, loss: Loss, y: Tensor, weight: Tensor) -> None:
        super().__init__(loss, y, weight)
        self._all_count = not bool(y.isnan().any())

    def _batch_deltas(self, outputs: Tensor, first: int) -> Tensor:
        batches = slice(first, first + len(outputs))
        y, weight = self._y[batches], self._weight[batches]
        if not self._all_count or outputs.shape != y.shape:
            return super()._batch_deltas(outputs, first)
        gap, size = outputs - y, y[0, 0].numel()
        squares = gap.square().flatten(0, 1).flatten(1).sum(1) / size
        self._losses[batches] = squares.view(weight.shape)
        return gap.mul_(2).mul_((weight / size).view(*weight.shape, *[1] * (y.dim() - 2)))
