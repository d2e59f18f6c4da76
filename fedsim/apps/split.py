"""Giving each SuperNode of a rehearsal a file with its own examples, and nobody else's."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.config import RunConfig
from fedsim.deploy.certificates import write_private
from fedsim.runs.build import Build

__all__ = ["split_data"]


def split_data(config: RunConfig, path_of: Callable[[int], Path]) -> list[Path]:
    """Write each client's part of a config's data set to a file of its own.

    Parameters
    ----------
    path_of : callable
        Where the ``.npz`` of a client goes.

    Returns
    -------
    list of Path
        One a client, readable by their owner only.
    """
    build = Build(config.replace(**{"engine.device": "cpu"}))
    dataset = build.dataset
    x, y = dataset.x_train.numpy(), dataset.y_train.numpy()
    statistics: dict[str, Any] = {
        name: np.array(values)
        for name, values in (("mean", dataset.mean), ("std", dataset.std))
        if values is not None
    }
    # A client need not have examples of every class: a test example of the last one tells it
    # how many there are.
    last = int(np.flatnonzero(dataset.y_test.numpy() == dataset.num_classes - 1)[0])
    witness = slice(last, last + 1)
    paths = []
    for client, rows in enumerate(build.parts):
        content = io.BytesIO()
        np.savez_compressed(
            content,
            x_train=x[rows],
            y_train=y[rows],
            x_test=dataset.x_test.numpy()[witness],
            y_test=dataset.y_test.numpy()[witness],
            **statistics,
        )
        paths.append(path_of(client))
        write_private(paths[-1], content.getvalue())
    return paths
