"""Write made-up.npz: noise with a colour for each class, in CIFAR-10's shapes."""

import numpy as np


def main() -> None:
    rng = np.random.default_rng(0)
    arrays = {"classes": 10}
    for split, count in (("train", 40), ("test", 4)):
        y = np.arange(count) % 10
        x = rng.integers(0, 156, (count, 32, 32, 3)) + 10 * y[:, None, None, None]
        arrays |= {f"x_{split}": x.astype(np.uint8), f"y_{split}": y}
    np.savez_compressed("made-up.npz", **arrays)


if __name__ == "__main__":
    main()
