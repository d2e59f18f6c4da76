"""Write writers.npz: handwritten digits of twenty made-up writers, each with few classes."""

import numpy as np

from fedsim.datasets import load
from fedsim.partitions import Dirichlet

WRITERS = 20


def main() -> None:
    digits = load("digits")
    arrays = {"classes": 10}
    owners = np.zeros(len(digits.train), dtype=np.int64)
    for writer, examples in enumerate(Dirichlet(0.2, WRITERS, seed=1).indices(digits.train.y)):
        owners[examples] = writer
    # Every fourth example of a writer is for testing what the writer has.
    test = np.zeros(len(owners), dtype=bool)
    for writer in range(WRITERS):
        test[np.flatnonzero(owners == writer)[3::4]] = True
    for split, rows in (("train", ~test), ("test", test)):
        arrays |= {
            f"x_{split}": digits.train.x.numpy()[rows],
            f"y_{split}": digits.train.y.numpy()[rows],
            f"owner_{split}": owners[rows],
        }
    np.savez_compressed("writers.npz", **arrays)
    print(f"writers.npz: {np.bincount(owners[~test]).tolist()} digits of {WRITERS} writers")


if __name__ == "__main__":
    main()
