"""Write diabetes.npz: scikit-learn's diabetes data, targets scaled by public numbers."""

import numpy as np
from sklearn.datasets import load_diabetes

CENTRE, SCALE = 150.0, 80.0  # declared, not computed


def main() -> None:
    data = load_diabetes()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = (20 * data.data[order]).astype(np.float32)
    y = ((data.target[order] - CENTRE) / SCALE).astype(np.float32)
    np.savez("diabetes.npz", x_train=x[:342], y_train=y[:342], x_test=x[342:], y_test=y[342:])
    print("diabetes.npz: 342 patients to learn from, 100 to test on")


if __name__ == "__main__":
    main()
