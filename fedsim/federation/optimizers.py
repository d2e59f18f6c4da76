"""Server optimisers around others: a Flower strategy on the noisy mean, a schedule of the rate."""

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

    def client_config(self, vector: Tensor, config: ConfigRecord) -> ConfigRecord:
        """What the strategy tells clients beside ``vector [d]``, given the caller's ``config``."""
        self._asked = self._ask(vector, config)
        records = self._asked.content.config_records
        return records.get(self._strategy.configrecord_key, config)

    def _ask(self, vector: Tensor, config: ConfigRecord) -> Message:
        """A message to one of its clients in the next round."""
        arrays = array_record({_NAME: vector})
        with _without_its_counts():
            messages = self._strategy.configure_train(
                self._round + 1, arrays, ConfigRecord(dict(config)), self._grid
            )
            return next(iter(messages))

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]`` from the strategy, as if one client had sent the mean."""
        # A strategy may count how often it is asked: once a round.
        request, self._asked = self._asked or self._ask(vector, ConfigRecord()), None
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
        reply = Message(content, reply_to=request)
        with _without_its_counts():
            arrays, _ = self._strategy.aggregate_train(self._round, [reply])
        if arrays is None:
            raise FedsimError(
                f"server_optimizer {type(self._strategy).__name__} gave no parameters."
            )
        return tensors(arrays)[_NAME].to(vector)

    def state(self) -> dict[str, Any]:
        """The rounds it has seen, and the numbers, words, arrays and records that it holds."""
        attributes = {name: _encoded(value) for name, value in vars(self._strategy).items()}
        held = {name: value for name, value in attributes.items() if value is not None}
        return {"rounds": self._round, "strategy": held}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume what `state` gave."""
        self._round = state["rounds"]
        for name, value in state["strategy"].items():
            setattr(self._strategy, name, _decoded(value))


class StrategyConfig(Extra):
    """What a Flower strategy sends its clients goes to ours; it gets the means of their metrics.

    Parameters
    ----------
    optimizer : FlowerOptimizer
        Of that strategy.
    """

    def __init__(self, optimizer: FlowerOptimizer) -> None:
        self._optimizer = optimizer

    def send(self, instructions: Instructions) -> Instructions:
        """With what the strategy makes of the config entries."""
        config = self._optimizer.client_config(instructions.vector, instructions.config)
        return replace(instructions, config=config)

    def finish(self, result: RoundResult) -> RoundResult:
        """Unchanged; the strategy is given its metrics in the step that follows."""
        self._optimizer.metrics = result.metrics
        return result


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


def _encoded(value: Any) -> dict[str, Any] | None:
    """What a strategy holds, as tensors and JSON; None for functions and the like."""
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
    """Whether a state tree can hold the value: JSON, and arrays that are no list's."""
    match value:
        case None | bool() | int() | float() | str() | np.ndarray():
            return True
        case list():
            return all(_is_plain(entry) and not isinstance(entry, np.ndarray) for entry in value)
        case dict():
            return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return False


def _decoded(encoded: Mapping[str, Any]) -> Any:
    """What `_encoded` was given."""
    ((form, value),) = encoded.items()
    match form:
        case "record":
            return _plain(array_record(value))
        case "list":
            return [value[str(i)].copy() for i in range(len(value))]
    return copy.deepcopy(value)


def _plain(record: ArrayRecord) -> ArrayRecord:
    """The record with serialised arrays, as a reply from outside would have them."""
    return ArrayRecord(dict(record))


@dataclass
class Scheduled(ServerOptimizer):
    """``optimizer`` with its ``lr`` multiplied by ``schedule``, release by release.

    Parameters
    ----------
    optimizer : ServerOptimizer
        With an ``lr``.
    schedule : Schedule
        Of rounds; a round without a release does not count.
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
        # A copy: its rate is changed from step to step, and the given one's is not.
        self._rate, self._stepping = self.optimizer.lr, copy.deepcopy(self.optimizer)
        self._set_rate(self._rate)

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]`` by a step at this release's rate."""
        self.releases += 1
        self._set_rate(self._rate * self.schedule(Step(round=self.releases, index=0)))
        moved: Tensor = self._stepping.step(vector, update)
        return moved

    def _set_rate(self, rate: float) -> None:
        try:
            # Not by its own way of setting, which in a frozen dataclass refuses everything.
            object.__setattr__(self._stepping, "lr", rate)
        except AttributeError as error:
            raise FedsimError(
                f"server.schedule is '{self.schedule}', but the lr of {self.optimizer} "
                "(server.optimizer) cannot be set; it must be an attribute."
            ) from error

    def state(self) -> dict[str, Any]:
        """That of the optimiser inside, and ``releases``."""
        return {**self._stepping.state(), "releases": self.releases} if self.releases else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume what `state` gave."""
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
