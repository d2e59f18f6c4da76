"""A target from a training loop with PyTorch and Opacus; a round is one step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

MakePrivate = Callable[[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any], Any]
"""Function from model, optimizer, loader and synthetic federation to the three private ones."""


class Known(nn.Module):
    """A linear model, whose gradient for an example is the example itself."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)
        self.sizes = sizes
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """One number for each example."""
        pieces = torch.split(x, self.sizes, dim=1)
        outputs = [layer(piece) for layer, piece in zip(self.layers, pieces, strict=True)]
        return torch.cat(outputs, 1).sum(1)


def loop_target(make_private: MakePrivate) -> Callable[[Any], Any]:
    """Make a target that trains by the usual loop, with SGD at learning rate 1.

    Parameters
    ----------
    make_private : callable
        Such as ``lambda model, optimizer, loader, federation: PrivacyEngine().make_private(...)``.
    """

    def target(federation: Any) -> Any:
        torch.manual_seed(federation.seed)
        model = Known([int(np.prod(shape)) for shape in federation.shapes])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rows = torch.tensor(federation.rows, dtype=torch.float32)
        batch = max(1, round(federation.rate * len(rows)))
        data = TensorDataset(-rows, torch.arange(len(rows)))
        loader = DataLoader(data, batch_size=batch, shuffle=federation.rate < 1)
        models: list[Any] = []
        sampled: list[list[int]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, batches = make_private(model, optimizer, loader, federation)
            while len(models) < federation.rounds:
                for x, ids in batches:
                    if len(models) == federation.rounds:
                        break
                    optimizer.zero_grad()
                    private(x).mean().backward()
                    optimizer.step()
                    sampled.append([int(index) for index in ids])
                    models.append([p.detach().numpy().copy() for p in model.parameters()])
        return {"models": models, "sampled": sampled}

    return target
