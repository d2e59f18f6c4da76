"""Small clients to train."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedsim.tasks.losses import CrossEntropy
from fedsim.training import ClientData
from fedsim.training.paths.path_choice import TrainedModel
from fedsim.training.side_effects import HiddenDraws
from fedsim.training.structure.reading import read


def make_data(sizes, features=6, classes=3, seed=0, dtype=torch.float32, shape=None):
    """Clients of the given sizes, with labels that a linear model can mostly learn."""
    generator = torch.Generator().manual_seed(seed)
    total = int(np.sum(sizes))
    x = torch.randn(max(total, 1), features, generator=generator, dtype=torch.float64)
    w = torch.randn(features, classes, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(x), classes, generator=generator, dtype=torch.float64)
    y = (x @ w + 0.3 * noise).argmax(1)
    x = x.to(dtype)
    if shape is not None:
        x = x.reshape(-1, *shape)
    order = np.random.default_rng(seed).permutation(total)
    bounds = np.cumsum(sizes)[:-1]
    return ClientData(x, y, [part.astype(np.int64) for part in np.split(order, bounds)])


def joined(blocks, ids=None):
    """Rows ``[n, d]`` and metrics of all clients in blocks, by client id, or in the order of ids.

    What a client does not report is 0.
    """
    found = list(blocks)
    clients = np.concatenate([block.client_ids for block in found]).tolist()
    order = [clients.index(client) for client in (sorted(clients) if ids is None else ids)]
    rows = [block.rows for block in found if block.rows is not None]
    metrics = {
        name: np.concatenate(
            [block.metrics.get(name, np.zeros(len(block.client_ids))) for block in found]
        )[order]
        for name in {name: None for block in found for name in block.metrics}
    }
    return torch.cat(rows)[order] if rows else None, metrics


def make_mlp(features=6, hidden=5, classes=3, seed=0, dtype=torch.float32, bias=True):
    """Two dense layers with seeded weights."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, hidden, bias=bias),
        nn.ReLU(),
        nn.Linear(hidden, classes, bias=bias),
    ).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def make_cnn(classes=3, seed=0, dtype=torch.float32):
    """One convolution and one dense layer, for inputs ``[1, 6, 6]``."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, classes)
    ).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def reading_of(model, shape, loss=None):
    """What is read of a model for inputs of a shape, and of a loss of classes."""
    dtype = next(model.parameters()).dtype
    x, y = torch.zeros(1, *shape, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    return read(model, loss or CrossEntropy(), x, y)


def as_trained(model, packing, reading, program):
    """A model that draws nothing, without data, of which that is known."""
    quiet = HiddenDraws(training=False, evaluation=False)
    return TrainedModel(model, packing, CrossEntropy(), None, quiet, reading, False, False, program)
