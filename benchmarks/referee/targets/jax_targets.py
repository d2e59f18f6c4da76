"""jax_privacy: sums of clipped gradients, its Gaussian privatizer, and its batch selection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy import batch_selection, clipped_grad, noise_addition


def _loss(model, row):
    """A linear loss, whose gradient for an example is minus that example."""
    return -sum(jnp.vdot(array, piece) for array, piece in zip(model, row, strict=True))


@functools.cache
def _gradient(clip_norm):
    return jax.jit(clipped_grad(_loss, l2_clip_norm=clip_norm, keep_batch_dim=False))


def _trained(batches):
    def target(federation):
        sizes = np.cumsum([int(np.prod(shape)) for shape in federation.shapes])[:-1]
        pieces = np.split(federation.rows.astype(np.float32), sizes, axis=1)
        rows = [p.reshape(-1, *s) for p, s in zip(pieces, federation.shapes, strict=True)]
        model = [jnp.zeros(shape) for shape in federation.shapes]
        privatizer = noise_addition.gaussian_privatizer(
            stddev=federation.noise_multiplier * federation.clip_norm, prng_key=federation.seed
        )
        state, models, sampled = privatizer.init(model), [], []
        gradient, draws = _gradient(federation.clip_norm), np.random.default_rng(federation.seed)
        for ids in batches(federation).batch_iterator(federation.population, draws):
            # Rows not drawn are zeroed, which adds nothing and keeps the compiled shapes.
            drawn = np.isin(np.arange(federation.population), ids)
            batch = [r * drawn.reshape(-1, *[1] * (r.ndim - 1)) for r in rows]
            noisy, state = privatizer.update(gradient(model, batch), state, model)
            scale = federation.rate * federation.population
            model = [array - move / scale for array, move in zip(model, noisy, strict=True)]
            models.append([np.asarray(array) for array in model])
            sampled.append([int(index) for index in ids])
        return {"models": models, "sampled": sampled}

    return target


poisson = _trained(lambda f: batch_selection.CyclicPoissonSampling(f.rate, f.rounds))
fixed = _trained(
    lambda f: batch_selection.FixedBatchSampling(round(f.rate * f.population), f.rounds)
)
