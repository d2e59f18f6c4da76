from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    QFedAvg,
    Strategy,
)
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as FlowersOwn

from fedsim.clients import SGD, Proximal
from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.randomness import Randomness
from fedsim.strategies import DPFedAvg
from fedsim.training import Trainer


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


class Counting(FedProx):
    """One whose word to clients changes from round to round."""

    asked = 0

    def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
        self.asked += 1
        config["lr"] = 0.1 / self.asked
        return super().configure_train(server_round, arrays, config, grid)


def test_what_a_wrapped_strategy_tells_its_clients_reaches_ours() -> None:
    heard: list[dict[str, object]] = []
    honest = app()

    def train(message: Message, context: Context) -> Message:
        heard.append(dict(message.content.config_records["config"]))
        return honest(message, context)

    made = ClientApp()
    made.train()(train)
    wrapped = Counting(proximal_mu=0.25)
    strategy = DPFedAvg(
        mechanism=NoPrivacy("uniform"), cohort=FullCohort(2), seed=1, server_optimizer=wrapped
    )
    config = ConfigRecord({"mine": 7})
    strategy.start(
        LocalGrid(made, num_nodes=2), array_record({"w": INITIAL}), 3, train_config=config
    )
    assert len(heard) == 6
    assert {entry["proximal-mu"] for entry in heard} == {0.25}
    assert {entry["mine"] for entry in heard} == {7}
    assert [entry["server-round"] for entry in heard] == [1, 1, 2, 2, 3, 3]
    assert [entry["lr"] for entry in heard[::2]] == [0.1, 0.05, 0.1 / 3]
    assert "proximal-mu" not in config


@pytest.mark.parametrize("mu", [0.0, 0.25])
def test_a_pull_that_our_clients_do_not_have_is_refused(mu: float) -> None:
    algorithm = Proximal(SGD(lr=0.1), 0.5)
    trainer = Trainer(make_mlp(), algorithm, make_data([4, 4]), randomness=Randomness(1))
    for sent, refused in ((0.5, False), (mu, True)):
        strategy = DPFedAvg(
            mechanism=NoPrivacy("uniform"),
            cohort=FullCohort(2),
            seed=1,
            server_optimizer=FedProx(proximal_mu=sent),
        )
        initial = array_record(trainer.layout.unflatten(trainer.initial()))
        if refused:
            with pytest.raises(FedsimError, match=r"client\.proximal is 0\.5; they must be"):
                strategy.start(LocalGrid(trainer), initial, 1)
        else:
            strategy.start(LocalGrid(trainer), initial, 1)


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
