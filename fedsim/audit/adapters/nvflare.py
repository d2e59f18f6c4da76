"""A target from a filter of NVFlare: what leaves one client, the last of the federation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable


def filter_target(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A target that releases a client's filtered weight differences, round after round.

    Parameters
    ----------
    make : callable
        From a synthetic federation to a fresh `DXOFilter`.
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
