"""Write tabular.npz: scikit-learn's breast cancer data, split among five sites of unequal sizes."""

import numpy as np
from sklearn.datasets import load_breast_cancer

SHARES = (0.5, 0.25, 0.15, 0.07, 0.03)


def main() -> None:
    data = load_breast_cancer()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(data.target))
    x, y = data.data[order].astype(np.float32), data.target[order]
    # Larger tumours go to some sites rather than to others.
    site = np.searchsorted(np.cumsum(SHARES), rng.random(len(y)) * 0.9 + 0.1 * y)
    site = site.clip(max=len(SHARES) - 1)
    # Normalised by the first 100 patients, who are public and train nobody.
    public, test = slice(100), slice(100, 240)
    arrays = {
        "x_train": x[240:], "y_train": y[240:], "owner_train": site[240:],
        "x_test": x[test], "y_test": y[test], "owner_test": site[test],
        "mean": x[public].mean(0), "std": x[public].std(0), "classes": 2,
    }  # fmt: skip
    np.savez("tabular.npz", **arrays)
    print(f"tabular.npz: sites of {np.bincount(site[240:]).tolist()} patients")


if __name__ == "__main__":
    main()
