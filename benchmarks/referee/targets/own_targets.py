"""DP-FedAvg in twenty lines of numpy, as it should be."""

import numpy as np


def honest(federation):
    """Poisson sampling, clipping, noise on the sum, a declared denominator."""
    draws = np.random.default_rng(federation.seed)
    model, models, sampled = np.zeros(federation.rows.shape[1]), [], []
    for _ in range(federation.rounds):
        ids = np.flatnonzero(draws.random(federation.population) < federation.rate)
        rows = federation.rows[ids]
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        clipped = rows / np.maximum(1.0, norms / federation.clip_norm)
        std = federation.noise_multiplier * federation.clip_norm
        noise = std * draws.standard_normal(len(model))
        model = model + (clipped.sum(0) + noise) / (20 * federation.rate)
        models.append(model)
        sampled.append(ids.tolist())
    return {"models": models, "sampled": sampled}
