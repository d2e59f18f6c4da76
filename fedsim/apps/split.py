"""Giving each SuperNode of a rehearsal a file with its own examples, and nobody else's."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsim.config import RunConfig
from fedsim.datasets import Split
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
    images = getattr(config.data, "layout", "auto") == "auto"
    # A client need not have examples of every class or token: the file says how many there are.
    sizes = {"classes": dataset.num_classes, "vocabulary": dataset.vocabulary}
    about: dict[str, Any] = {name: np.array(size) for name, size in sizes.items() if size}
    for name, values in (("mean", dataset.mean), ("std", dataset.std)):
        if values is not None:
            about[name] = np.array(values)
    paths = []
    for client, rows in enumerate(build.parts):
        content = io.BytesIO()
        arrays = _arrays(dataset.train[torch.from_numpy(rows)], "train", images)
        # Its own test examples; or one of somebody's, that says what test examples look like.
        tests = np.zeros(0, np.int64) if build.dealt.test is None else build.dealt.test[client]
        shown = torch.from_numpy(tests) if len(tests) else slice(0, 1)
        arrays |= _arrays(dataset.test[shown], "test", images) | about
        np.savez_compressed(content, **arrays)
        paths.append(path_of(client))
        write_private(paths[-1], content.getvalue())
    return paths


def _arrays(split: Split, part: str, images: bool) -> dict[str, Any]:
    """Arrays of a split by the names that they have in a file."""
    x = split.x.numpy()
    if x.ndim == 4 and (images or x.dtype == np.uint8):
        x = x.transpose(0, 2, 3, 1)  # channels last, as images are written
    arrays = {"x": x, "y": split.y.numpy(), **split.columns}
    if split.mask is not None:
        arrays["mask"] = split.mask.numpy()
    return {f"{name}_{part}": array for name, array in arrays.items()}
