"""A linear model, whose gradient of an example is the example, and a recorder of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedsim.clients import LocalAlgorithm
from fedsim.clients.base import Gradient, Step
from fedsim.clients.base import State as ClientState


class LinearLayers(nn.Module):
    """Sum of linear layers, each of its own part of the inputs."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.ModuleList(linear_layer(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Sum of the layers' outputs, ``[B, 1]``."""
        parts = zip(self.layers, torch.split(x, self.sizes, -1), strict=True)
        return torch.stack([layer(part) for layer, part in parts]).sum(0)


def linear_layer(size: int) -> nn.Module:
    """A linear layer with one output."""
    return nn.Linear(size, 1, bias=False, dtype=torch.float64)


def first_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is the output, so that the gradient of an example is the example."""
    del targets
    return outputs[:, 0]


@dataclass(frozen=True)
class GradientRecorder(LocalAlgorithm):
    """Client algorithm that records every gradient and leaves the parameters unchanged."""

    gradients: list[tuple[int, int, Tensor]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def step(self, state: ClientState, gradient: Gradient, step: Step) -> None:
        """Record the round, the step and the gradient."""
        self.gradients.append((step.round, step.index, gradient.dense().clone()))
