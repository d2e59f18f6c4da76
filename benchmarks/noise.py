"""`python -m benchmarks.noise`: CPU ms of a release's noise: ours, and as numpy draws it.

Compiled or not, the draws are the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from fedsim.engines.process import settle
from fedsim.mechanisms import NoiseSource

__all__ = ["main"]

SIZES, REPEATS = (7_850, 269_322, 1_000_000), 8
AIM = {1_000_000: 20.0}


def generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=1))


def numpys(size: int) -> np.ndarray:
    """Hardened noise by numpy alone."""
    source = generator()
    draws = source.standard_normal(size)
    for _ in range(3):
        draws += source.standard_normal(size)
    draws *= 0.5
    return draws


def milliseconds(ways: list[Callable[[], object]]) -> list[float]:
    best = [float("inf")] * len(ways)
    for _ in range(REPEATS):
        for number, way in enumerate(ways):
            began = time.process_time()
            way()
            best[number] = min(best[number], (time.process_time() - began) * 1e3)
    return best


def main() -> None:
    settle()
    table = Table("coordinates", "plain", "hardened", "hardened, numpy alone", "to reach")
    for size in SIZES:
        ways: list[Callable[[], np.ndarray]] = [
            lambda size=size: NoiseSource(generator()).normal(size),
            lambda size=size: NoiseSource(generator(), hardened=True).normal(size),
            lambda size=size: numpys(size),
        ]
        assert np.array_equal(ways[1](), ways[2]())
        aim = f"{AIM[size]:.0f}" if size in AIM else ""
        table.add_row(f"{size:,}", *(f"{ms:.2f}" for ms in milliseconds(ways)), aim)
    Console().print(table)


if __name__ == "__main__":
    main()
