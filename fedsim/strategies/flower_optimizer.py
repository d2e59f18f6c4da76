"""Flower's own server optimisers on the noisy mean."""

from __future__ import annotations

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


class FlowerOptimizer:
    """A Flower strategy that is given one synthetic reply a round: the noisy mean.

    What it does with that reply (`FedAdam`, `FedYogi`, `FedAvgM`, ...) is post-processing. Its
    sampling and its evaluation play no part.

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

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]`` from the strategy, as if one client had sent the mean."""
        self._round += 1
        asked = self._strategy.configure_train(
            self._round, array_record({_NAME: vector}), ConfigRecord(), self._grid
        )
        moved = (vector + update.to(vector.dtype)).cpu()
        content = RecordDict(
            {
                "arrays": _plain(array_record({_NAME: moved})),
                "metrics": MetricRecord({self._strategy.weighted_by_key: 1.0}),
            }
        )
        reply = Message(content, reply_to=next(iter(asked)))
        arrays, _ = self._strategy.aggregate_train(self._round, [reply])
        if arrays is None:
            raise FedsimError(
                f"server_optimizer {type(self._strategy).__name__} gave no parameters."
            )
        return tensors(arrays)[_NAME].to(vector)


def _plain(record: ArrayRecord) -> ArrayRecord:
    """The record with serialised arrays, as a reply from outside would have them."""
    return ArrayRecord(dict(record))
