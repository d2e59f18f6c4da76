"""The model and the data: logistic regression on two Gaussian clouds, float64 throughout."""

import numpy as np

FEATURES = 6


def load(partition: int, examples: int = 80):
    """One client's examples: the clouds are everybody's, their sizes its own."""
    random = np.random.default_rng([7, partition])
    labels = random.random(examples) < random.uniform(0.3, 0.7)
    centre = np.where(np.arange(FEATURES) % 2, 1.0, -0.5)
    features = random.normal(size=(examples, FEATURES)) + np.where(labels[:, None], centre, -centre)
    return features, labels.astype(np.float64)


def initial():
    """The model that everybody starts from."""
    return {"weight": np.zeros(FEATURES), "bias": np.zeros(())}


def predict(model, features):
    return 1 / (1 + np.exp(-(features @ model["weight"] + model["bias"])))


def fit(model, features, labels, steps: int = 20, lr: float = 0.1):
    """A few steps of gradient descent."""
    for _ in range(steps):
        error = predict(model, features) - labels
        gradient = {"weight": features.T @ error / len(labels), "bias": np.mean(error)}
        model = {name: value - lr * gradient[name] for name, value in model.items()}
    return model


def accuracy(model, features, labels) -> float:
    return float(np.mean((predict(model, features) > 0.5) == labels))
