from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    QFedAvg,
    Strategy,
)
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as FlowersOwn

from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.strategies import DPFedAvg


def app() -> ClientApp:
    """Clients that pull the parameters towards their own id."""

    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        w = message.content.array_records["arrays"]["w"].numpy()
        arrays = ArrayRecord({"w": Array(w + 0.5 * (client - w))})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    made = ClientApp()
    made.train()(train)
    return made


INITIAL = torch.tensor([[3.0, -1.0], [0.0, 2.0]], dtype=torch.float64)


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad])
def test_a_flower_optimizer_on_our_mean_is_flowers_own_strategy(kind: type[FedAvg]) -> None:
    settings = {"server_momentum": 0.9} if kind is FedAvgM else {}
    theirs = kind(fraction_evaluate=0.0, **settings)  # type: ignore[arg-type]
    ours = DPFedAvg(
        mechanism=NoPrivacy("uniform"),
        cohort=FullCohort(4),
        seed=1,
        server_optimizer=kind(**settings),  # type: ignore[arg-type]
    )
    grid = LocalGrid(app(), num_nodes=4)
    results = [
        tensors(strategy.start(grid, array_record({"w": INITIAL}), 4).arrays)["w"]
        for strategy in (theirs, ours)
    ]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-10)
    assert not torch.equal(results[1], INITIAL)


def test_sampling_noise_and_accounting_stay_ours() -> None:
    strategy = DPFedAvg(
        mechanism=Clipping(1.0),
        cohort=FullCohort(4),
        noise_multiplier=1.0,
        seed=1,
        server_optimizer=FedAdam(eta=0.1),
    )
    strategy.start(LocalGrid(app(), num_nodes=4), array_record({"w": INITIAL}), 3)
    assert strategy.privacy_spent().num_releases == 3
    assert strategy.report is not None
    assert strategy.report.usable == 4


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (FedMedian(), "replies of single clients"),
        (FedTrimmedAvg(), "replies of single clients"),
        (Krum(), "replies of single clients"),
        (Bulyan(), "replies of single clients"),
        (QFedAvg(client_learning_rate=0.1), "replies of single clients"),
        (FlowersOwn(FedAvg(), 1.0, 1.0, 2), "built on it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_strategies_that_need_separate_replies_are_refused(strategy: Strategy, reason: str) -> None:
    with pytest.raises(FedsimError, match=reason):
        DPFedAvg(mechanism=Clipping(1.0), cohort=FullCohort(4), server_optimizer=strategy)
