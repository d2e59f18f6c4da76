"""Opacus's `PrivacyEngine`, with each of its ways to sample and to clip."""

import math

from opacus import PrivacyEngine

from fedsim.audit.adapters.opacus import loop_target


def _loop(*, per_layer=False, **options):
    def make(model, optimizer, loader, f):
        count = len(list(model.parameters()))
        bound = [f.clip_norm / math.sqrt(count)] * count if per_layer else f.clip_norm
        return PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=f.noise_multiplier,
            max_grad_norm=bound,
            **options,
        )

    return loop_target(make)


poisson = _loop()
fixed = _loop(poisson_sampling=False)
per_layer = _loop(per_layer=True, clipping="per_layer")
adaptive = _loop(
    clipping="adaptive",
    target_unclipped_quantile=0.5,
    clipbound_learning_rate=0.2,
    max_clipbound=1e3,
    min_clipbound=1e-3,
    unclipped_num_std=2.0,
)
