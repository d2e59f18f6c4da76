"""`python -m benchmarks.noise`: CPU ms to draw a release's noise, by fedsim and by numpy alone.

Both give the same numbers.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from fedsim.federation.engines.process import use_one_thread
from fedsim.mechanisms import NoiseSource

Floats = npt.NDArray[np.float64]

SIZES, REPEATS = (7_850, 269_322, 1_000_000), 8
AIM = {1_000_000: 20.0}


def generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=1))


def plain(size: int) -> Floats:
    return NoiseSource(generator()).normal(size)


def hardened(size: int) -> Floats:
    return NoiseSource(generator(), hardened=True).normal(size)


def numpys(size: int) -> Floats:
    """Hardened noise drawn by numpy alone."""
    source = generator()
    draws = source.standard_normal(size)
    for _ in range(3):
        draws += source.standard_normal(size)
    draws *= 0.5
    return draws


def milliseconds(size: int) -> list[float]:
    """Least CPU milliseconds of each way, over a few turns."""
    best = [float("inf")] * len(WAYS)
    for _ in range(REPEATS):
        for number, way in enumerate(WAYS):
            began = time.process_time()
            way(size)
            best[number] = min(best[number], (time.process_time() - began) * 1e3)
    return best


WAYS = (plain, hardened, numpys)


def main() -> None:
    use_one_thread()
    table = Table("coordinates", "plain", "hardened", "hardened, numpy alone", "to reach")
    for size in SIZES:
        assert np.array_equal(hardened(size), numpys(size))
        aim = f"{AIM[size]:.0f}" if size in AIM else ""
        table.add_row(f"{size:,}", *(f"{ms:.2f}" for ms in milliseconds(size)), aim)
    Console().print(table)


if __name__ == "__main__":
    main()
