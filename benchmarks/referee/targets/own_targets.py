"""A correct DP-FedAvg in thirty lines of numpy, with each way to sample and to bound."""

import numpy as np


def _loop(cohort, bounded, noise):
    def target(federation):
        draws = np.random.default_rng(federation.seed)
        model, models, sampled = np.zeros(federation.rows.shape[1]), [], []
        for _ in range(federation.rounds):
            ids = cohort(federation, draws)
            rows = bounded(federation.rows[ids], federation.clip_norm)
            std = federation.noise_multiplier * federation.clip_norm
            total = rows.sum(0) + noise(draws, std, len(ids), len(model))
            model = model + total / (20 * federation.rate)
            models.append(model)
            sampled.append(ids.tolist())
        return {"models": models, "sampled": sampled}

    return target


def _poisson(f, draws):
    return np.flatnonzero(draws.random(f.population) < f.rate)


def _fixed(f, draws):
    return draws.choice(f.population, round(f.rate * f.population), replace=False)


def _all(f, _):
    return np.arange(f.population)


def _clipped(rows, bound):
    return rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True) / bound)


def _normalized(rows, bound):
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return bound * np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)


def _of_server(draws, std, _, size):
    return std * draws.standard_normal(size)


def _of_clients(draws, std, count, size):
    return (std / np.sqrt(count) * draws.standard_normal((count, size))).sum(0)


honest = _loop(_poisson, _clipped, _of_server)
everyone = _loop(_all, _clipped, _of_server)
fixed = _loop(_fixed, _clipped, _of_server)
normalized = _loop(_poisson, _normalized, _of_server)
shares = _loop(_all, _clipped, _of_clients)
