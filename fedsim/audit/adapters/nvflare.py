"""A target from a filter of NVFlare: the filtered output of one client, the last."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable


def filter_target(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a target that releases a client's filtered weight differences in each round.

    Parameters
    ----------
    make : callable
        Makes a fresh `DXOFilter` for a synthetic federation.
    """

    def target(federation: Any) -> Any:
        np.random.seed(federation.seed % 2**32)  # noqa: NPY002
        logging.disable(logging.CRITICAL)
        applied, model, models = make(federation), federation.initial, []
        for _ in range(federation.rounds):
            arrays = enumerate(federation.update(federation.population - 1))
            sent = DXO(DataKind.WEIGHT_DIFF, data={f"{k:03}": array for k, array in arrays})
            left = applied.process_dxo(sent, Shareable(), FLContext()).data
            model = [array + left[f"{k:03}"] for k, array in enumerate(model)]
            models.append(model)
        logging.disable(logging.NOTSET)
        return models

    return target
