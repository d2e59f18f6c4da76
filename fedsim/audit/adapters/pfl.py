"""A target from a mechanism and a user sampler of pfl, with numpy statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pfl.context import CentralContext, UserContext
from pfl.data.sampling import get_user_sampler
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics


def mechanism_target(make: Callable[[Any], Any], sampler: str = "") -> Callable[[Any], Any]:
    """Make a target that sums, adds noise and averages as pfl's simulation does.

    Parameters
    ----------
    make : callable
        Makes a fresh `CentralPrivacyMechanism` for a synthetic federation.
    sampler : str
        Name for ``get_user_sampler``; empty for all users in every round.
    """

    def target(federation: Any) -> Any:
        np.random.seed(federation.seed % 2**32)  # noqa: NPY002
        mechanism, users = make(federation), list(range(federation.population))
        draw = get_user_sampler(sampler, users) if sampler else None
        size = round(federation.rate * len(users))
        model, models, sampled = federation.initial, [], []
        for number in range(federation.rounds):
            cohort = [draw() for _ in range(size)] if draw else users
            total = None
            for user in cohort:
                arrays = enumerate(federation.update(user))
                statistics = MappedVectorStatistics({str(k): array for k, array in arrays})
                context = UserContext(num_datapoints=1, seed=None, user_id=str(user))
                bounded, _ = mechanism.postprocess_one_user(stats=statistics, user_context=context)
                total = bounded if total is None else total + bounded
            central = CentralContext(
                current_central_iteration=number,
                do_evaluation=False,
                cohort_size=len(cohort),
                population=None,
                model_train_params=None,
                model_eval_params=None,
                algorithm_params=None,
                seed=int(np.random.randint(2**31)),  # noqa: NPY002
            )
            noisy, _ = mechanism.postprocess_server(
                stats=total, central_context=central, aggregate_metrics=Metrics()
            )
            noisy.average()
            model = [array + noisy[str(k)] for k, array in enumerate(model)]
            models.append(model)
            sampled.append(cohort)
        return {"models": models, "sampled": sampled}

    return target
