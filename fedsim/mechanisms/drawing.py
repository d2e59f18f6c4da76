"""Gaussian draws for sums on a grid.

Guarantee: a sum on a grid plus noise rounded to the same grid is the rounding of (sum +
Gaussian noise), that is, post-processing of the Gaussian mechanism; and the bits of the
released number do not tell which sum it came from, as those of an unrounded floating-point
sum do (Mironov 2012).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.compiled.normals import sums_of_normals

__all__ = ["NoiseSource", "normals"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoiseSource:
    """Where Gaussian draws come from; drawing advances the generator.

    Parameters
    ----------
    generator : numpy.random.Generator
        Keyed (`Randomness.generator`) or seeded from the operating system.
    hardened : bool
        Make each value of four draws, halved (Holohan and Braghin 2021, n = 2): recovering
        the generator's output bits from the value then means inverting a sum of four, and the
        attainable values lie denser than the grid. Four times the cost.
    """

    generator: np.random.Generator
    hardened: bool = False

    def normal(self, size: int) -> Array:
        """Standard normal draws, float64 ``[size]``."""
        draws = sums_of_normals(self.generator, size, terms=4 if self.hardened else 1)
        if self.hardened:
            draws *= 0.5
        return draws


def normals(sources: Sequence[NoiseSource], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal draws ``[n, sum of sizes]``, one row from each source.

    They are drawn here, in parts of these sizes as one release after another draws them, so
    that every device gets the same; and go to ``device`` in one copy that nobody waits for.
    """
    # Pinned memory is not used again before the copy from it is done.
    host = torch.empty(
        len(sources), sum(sizes), dtype=torch.float64, pin_memory=device.type == "cuda"
    )
    for row, source in zip(host.numpy(), sources, strict=True):
        np.concatenate([source.normal(size) for size in sizes], out=row)
    return host.to(device, non_blocking=True)
