"""Write labels.npz: handwritten digits, each with the labels even, prime, above 4 and round."""

import numpy as np

from fedsim.datasets import load

LABELS = {
    "even": {0, 2, 4, 6, 8},
    "prime": {2, 3, 5, 7},
    "large": {5, 6, 7, 8, 9},
    "round": {0, 6, 8, 9},
}


def main() -> None:
    digits = load("digits")
    arrays = {}
    for split, examples in (("train", digits.train), ("test", digits.test)):
        classes = examples.y.tolist()
        labels = [[digit in having for having in LABELS.values()] for digit in classes]
        arrays |= {f"x_{split}": examples.x.numpy(), f"y_{split}": np.array(labels)}
    np.savez_compressed("labels.npz", **arrays)
    print(f"labels.npz: {', '.join(LABELS)}")


if __name__ == "__main__":
    main()
