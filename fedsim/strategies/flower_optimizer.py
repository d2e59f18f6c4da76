"""Flower's own server optimisers on the noisy mean."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    Bulyan,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from torch import Tensor

from fedsim.engines import LocalGrid
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.server_optimizers import ServerOptimizer

__all__ = ["FlowerOptimizer"]

_NEED_SEPARATE_REPLIES = (
    FedMedian,
    FedTrimmedAvg,
    MultiKrum,
    Bulyan,
    QFedAvg,
    FedXgbBagging,
    FedXgbCyclic,
)
_NAME = "parameters"
_FLOWERS = Path(inspect.getfile(FedAvg)).parent


class FlowerOptimizer(ServerOptimizer):
    """A Flower strategy that is given one synthetic reply a round: the noisy mean.

    What it does with that reply (`FedAdam`, `FedYogi`, `FedAvgM`, ...) is post-processing, and
    what it tells its clients (`FedProx`'s mu) goes along to ours. Where their metrics are shown at
    all, the reply has the means of what they report, so that what it tells them may follow those.
    Its sampling and its evaluation play no part.

    Parameters
    ----------
    strategy : Strategy
        `FedAvg` or one of those that refine its mean.

    Raises
    ------
    FedsimError
        For a strategy that compares or weighs the replies of single clients, and for one
        that is not built on `FedAvg`.
    """

    def __init__(self, strategy: Strategy) -> None:
        name = type(strategy).__name__
        if isinstance(strategy, _NEED_SEPARATE_REPLIES):
            raise FedsimError(
                f"server_optimizer is {name}, which needs the replies of single clients; a private "
                "strategy sees none but their noisy mean, so use one such as FedAdam or FedAvgM."
            )
        if not isinstance(strategy, FedAvg):
            raise FedsimError(
                f"server_optimizer is {name}; of Flower's strategies it must be FedAvg or one "
                "built on it, such as FedAdam or FedAvgM."
            )
        self._strategy = strategy
        nodes = max(strategy.min_available_nodes, strategy.min_train_nodes, 1)
        # Nothing is sent over it: strategies learn the parameters where they choose nodes.
        self._grid = LocalGrid(ClientApp(), num_nodes=nodes)
        self._round = 0
        self._asked: Message | None = None
        self.metrics: MetricRecord | None = None
        """Means of what the clients report whose mean comes next."""

    def __str__(self) -> str:
        return f"Flower's {type(self._strategy).__name__}"

    def told(self, vector: Tensor, config: ConfigRecord) -> ConfigRecord:
        """What the strategy tells clients beside ``vector [d]``, if the caller says ``config``."""
        self._asked = self._ask(vector, config)
        told = self._asked.content.config_records
        return told.get(self._strategy.configrecord_key, config)

    def _ask(self, vector: Tensor, config: ConfigRecord) -> Message:
        """A message to one of its clients in the next round."""
        arrays = array_record({_NAME: vector})
        with _without_its_counts():
            asked = self._strategy.configure_train(
                self._round + 1, arrays, ConfigRecord(dict(config)), self._grid
            )
            return next(iter(asked))

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]`` from the strategy, as if one client had sent the mean."""
        # A strategy may count how often it is asked: once a round.
        asked, self._asked = self._asked or self._ask(vector, ConfigRecord()), None
        self._round += 1
        moved = (vector + update.to(vector.dtype)).cpu()
        content = RecordDict(
            {
                "arrays": _plain(array_record({_NAME: moved})),
                "metrics": MetricRecord(
                    {self._strategy.weighted_by_key: 1.0, **(self.metrics or {})}
                ),
            }
        )
        reply = Message(content, reply_to=asked)
        with _without_its_counts():
            arrays, _ = self._strategy.aggregate_train(self._round, [reply])
        if arrays is None:
            raise FedsimError(
                f"server_optimizer {type(self._strategy).__name__} gave no parameters."
            )
        return tensors(arrays)[_NAME].to(vector)

    def state(self) -> dict[str, Any]:
        """The rounds it has seen, and the numbers, words, arrays and records that it holds."""
        attributes = {name: _told(value) for name, value in vars(self._strategy).items()}
        told = {name: value for name, value in attributes.items() if value is not None}
        return {"rounds": self._round, "strategy": told}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._round = state["rounds"]
        for name, value in state["strategy"].items():
            setattr(self._strategy, name, _taken(value))


@contextmanager
def _without_its_counts() -> Iterator[None]:
    """Leave out of Flower's log how many nodes it samples and replies it gets: they are made up."""

    def is_users(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or Path(record.pathname).parent != _FLOWERS

    log = logging.getLogger("flwr")
    log.addFilter(is_users)
    try:
        yield
    finally:
        log.removeFilter(is_users)


def _told(value: Any) -> dict[str, Any] | None:
    """What a strategy holds, as tensors and JSON; None for functions and the like."""
    match value:
        case np.generic():
            return {"value": value.item()}
        case _ if _is_plain(value):
            return {"value": copy.deepcopy(value)}
        case ArrayRecord():
            return {"record": {k: v.clone() for k, v in tensors(value).items()}}
        case np.ndarray():
            return {"array": torch.from_numpy(value.copy())}
        case dict() if all(isinstance(array, np.ndarray) for array in value.values()):
            return {"dict": {k: torch.from_numpy(v.copy()) for k, v in value.items()}}
        case list() if all(isinstance(array, np.ndarray) for array in value):
            return {"list": {str(i): torch.from_numpy(v.copy()) for i, v in enumerate(value)}}
    return None


def _is_plain(value: Any) -> bool:
    """Whether JSON says it as it is."""
    match value:
        case None | bool() | int() | float() | str():
            return True
        case list():
            return all(map(_is_plain, value))
        case dict():
            return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return False


def _taken(told: Mapping[str, Any]) -> Any:
    """What `_told` was given."""
    ((form, value),) = told.items()
    match form:
        case "record":
            return _plain(array_record(value))
        case "array":
            return value.numpy().copy()
        case "dict":
            return {name: array.numpy().copy() for name, array in value.items()}
        case "list":
            return [value[str(i)].numpy().copy() for i in range(len(value))]
    return copy.deepcopy(value)


def _plain(record: ArrayRecord) -> ArrayRecord:
    """The record with serialised arrays, as a reply from outside would have them."""
    return ArrayRecord(dict(record))
