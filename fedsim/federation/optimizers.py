"""Server optimisers that wrap others: a Flower strategy on the noisy mean, and a rate schedule."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
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

from fedsim.arguments import check_arguments
from fedsim.clients.base import Step
from fedsim.clients.schedules import Schedule
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.engines.local import LocalGrid
from fedsim.federation.exchange import Instructions
from fedsim.federation.extras import Extra, RoundResult
from fedsim.server_optimizers import ServerAdam, ServerOptimizer, ServerSGD

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
    """Server optimiser that passes the noisy mean to a Flower strategy, as one synthetic reply.

    The strategy's step (`FedAdam`, `FedYogi`, `FedAvgM`, ...) is post-processing, and the config
    that it sends to clients (`FedProx`'s mu) is sent to fedsim's clients too. Where clients'
    metrics are shown, the reply has their means, so that the strategy's config may depend on them.
    The strategy's sampling and evaluation are not used.

    Parameters
    ----------
    strategy : Strategy
        `FedAvg` or one of those that refine its mean.

    Raises
    ------
    FedsimError
        For a strategy that compares or weights the replies of single clients, for one that is
        not a subclass of `FedAvg`, and for one that trains no client (``fraction_train=0.0``).
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
        nodes = max(strategy.min_available_nodes, strategy.min_train_nodes, 1)
        if max(strategy.min_train_nodes, int(strategy.fraction_train * nodes)) < 1:
            raise FedsimError(
                f"server_optimizer is {name} with fraction_train = {strategy.fraction_train}, by "
                "which it trains no client; it must be 1.0 (the cohort alone samples clients)."
            )
        self._strategy = strategy
        # Nothing is sent over this grid. A strategy must be made to configure each round, since it
        # stores the current parameters there, and it then needs nodes to choose from.
        self._grid = LocalGrid(ClientApp(), num_nodes=nodes)
        self._round = 0
        self._request: Message | None = None
        self.metrics: MetricRecord | None = None
        """Means of the round's client metrics, for the next `step`."""

    def __str__(self) -> str:
        return f"Flower's {type(self._strategy).__name__}"

    def client_config(self, vector: Tensor, config: ConfigRecord) -> ConfigRecord:
        """The strategy's config entries for clients, given ``vector [d]`` and the caller's."""
        self._request = self._configured_message(vector, config)
        records = self._request.content.config_records
        return records.get(self._strategy.configrecord_key, config)

    def _configured_message(self, vector: Tensor, config: ConfigRecord) -> Message:
        """One of the messages that the strategy sends in the next round."""
        arrays = array_record({_NAME: vector})
        with _flower_logs_muted():
            messages = self._strategy.configure_train(
                self._round + 1, arrays, ConfigRecord(dict(config)), self._grid
            )
            return next(iter(messages))

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]`` from the strategy, as if one client had sent the mean."""
        # Configure at most once a round, since a strategy may count its calls.
        request, self._request = (
            self._request or self._configured_message(vector, ConfigRecord()),
            None,
        )
        self._round += 1
        parameters = (vector + update.to(vector.dtype)).cpu()
        content = RecordDict(
            {
                "arrays": _plain(array_record({_NAME: parameters})),
                "metrics": MetricRecord(
                    {self._strategy.weighted_by_key: 1.0, **(self.metrics or {})}
                ),
            }
        )
        reply = Message(content, reply_to=request)
        with _flower_logs_muted():
            arrays, _ = self._strategy.aggregate_train(self._round, [reply])
        if arrays is None:
            raise FedsimError(
                f"server_optimizer {type(self._strategy).__name__} gave no parameters."
            )
        return tensors(arrays)[_NAME].to(vector)

    def state(self) -> dict[str, Any]:
        """Number of rounds, and the strategy's attributes except functions and the like."""
        attributes = {name: _encoded(value) for name, value in vars(self._strategy).items()}
        values = {name: value for name, value in attributes.items() if value is not None}
        return {"rounds": self._round, "strategy": values}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._round = state["rounds"]
        for name, value in state["strategy"].items():
            setattr(self._strategy, name, _decoded(value))


class StrategyConfig(Extra):
    """Sends a Flower strategy's config to the clients, and passes it the means of their metrics.

    Parameters
    ----------
    optimizer : FlowerOptimizer
        Server optimiser that wraps the strategy.
    """

    def __init__(self, optimizer: FlowerOptimizer) -> None:
        self._optimizer = optimizer

    def send(self, instructions: Instructions) -> Instructions:
        """The instructions, with the strategy's config entries."""
        config = self._optimizer.client_config(instructions.vector, instructions.config)
        return replace(instructions, config=config)

    def finish(self, result: RoundResult) -> RoundResult:
        """The result, unchanged; its metrics are passed on for the step that follows."""
        self._optimizer.metrics = result.metrics
        return result


@contextmanager
def _flower_logs_muted() -> Iterator[None]:
    """Drop Flower's log lines on sampled nodes and replies: the numbers here are synthetic."""

    def is_users(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or Path(record.pathname).parent != _FLOWERS

    log = logging.getLogger("flwr")
    log.addFilter(is_users)
    try:
        yield
    finally:
        log.removeFilter(is_users)


def _encoded(value: Any) -> dict[str, Any] | None:
    """An attribute of a strategy as tensors and JSON values; None for other types (functions)."""
    match value:
        case np.generic():
            return {"value": value.item()}
        case _ if _is_plain(value):
            return {"value": copy.deepcopy(value)}
        case ArrayRecord():
            return {"record": {k: v.clone() for k, v in tensors(value).items()}}
        case list() if all(isinstance(array, np.ndarray) for array in value):
            return {"list": {str(i): array.copy() for i, array in enumerate(value)}}
    return None


def _is_plain(value: Any) -> bool:
    """Whether a state tree can hold the value: JSON values, and arrays outside of lists."""
    match value:
        case None | bool() | int() | float() | str() | np.ndarray():
            return True
        case list():
            return all(_is_plain(entry) and not isinstance(entry, np.ndarray) for entry in value)
        case dict():
            return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return False


def _decoded(encoded: Mapping[str, Any]) -> Any:
    """Inverse of `_encoded`."""
    ((form, value),) = encoded.items()
    match form:
        case "record":
            return _plain(array_record(value))
        case "list":
            return [value[str(i)].copy() for i in range(len(value))]
    return copy.deepcopy(value)


def _plain(record: ArrayRecord) -> ArrayRecord:
    """The record with serialised arrays, as in a reply from another process."""
    return ArrayRecord(dict(record))


@dataclass
class Scheduled(ServerOptimizer):
    """``optimizer`` with its ``lr`` multiplied by ``schedule``, which advances at each release.

    Parameters
    ----------
    optimizer : ServerOptimizer
        Must have an attribute ``lr``.
    schedule : Schedule
        Schedule over rounds; a round without a release does not count.
    """

    optimizer: Any
    schedule: Schedule
    releases: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "lr"):
            raise FedsimError(
                f"server.schedule is '{self.schedule}', but {self.optimizer} (server.optimizer) "
                "has no lr for it to multiply."
            )
        if self.schedule.over != "round":
            raise FedsimError(
                f"server.schedule is '{self.schedule}'; a server has rounds and no local steps, so "
                "it must be over=round."
            )
        # A copy, since its rate changes from step to step and the caller's must not.
        self._rate, self._stepping = self.optimizer.lr, copy.deepcopy(self.optimizer)
        self._set_rate(self._rate)

    def starting_point(self, vector: Tensor) -> Tensor:
        """That of the wrapped optimiser."""
        start: Tensor = self._stepping.starting_point(vector)
        return start

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]`` by a step at this release's rate."""
        self.releases += 1
        self._set_rate(self._rate * self.schedule(Step(round=self.releases, index=0)))
        parameters: Tensor = self._stepping.step(vector, update)
        return parameters

    def _set_rate(self, rate: float) -> None:
        try:
            # By way of `object`, since a frozen dataclass's own `__setattr__` always raises.
            object.__setattr__(self._stepping, "lr", rate)
        except AttributeError as error:
            raise FedsimError(
                f"server.schedule is '{self.schedule}', but the lr of {self.optimizer} "
                "(server.optimizer) cannot be set; it must be an attribute."
            ) from error

    def state(self) -> dict[str, Any]:
        """The wrapped optimiser's state, and ``releases``."""
        return {**self._stepping.state(), "releases": self.releases} if self.releases else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.releases = state["releases"] if state else 0
        self._stepping.restore({k: v for k, v in state.items() if k != "releases"})


@check_arguments
def sgd(lr: float = 1.0, momentum: float = 0.0) -> ServerSGD:
    """Server SGD; the default ``lr = 1`` adds the mean update unchanged (FedAvg)."""
    return ServerSGD(lr, momentum)


@check_arguments
def adam(
    lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> ServerAdam:
    """Server Adam (FedAdam of Reddi et al. 2021 on the noisy mean)."""
    return ServerAdam(lr, *betas, eps)
