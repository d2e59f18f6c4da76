from __future__ import annotations

import logging
import math

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
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.optimizers import FlowerOptimizer
from fedsim.federation.state_tree import join_tree, split_tree
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.randomness import Randomness
from fedsim.server_optimizers import AveragedSGD, ServerOptimizer, ServerSGD
from fedsim.strategies import ClientMetrics, DPFedAvg
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
    theirs = kind(fraction_evaluate=0.0, **settings)
    ours = DPFedAvg(
        mechanism=NoPrivacy("uniform"),
        cohort=FullCohort(4),
        seed=1,
        server_optimizer=kind(**settings),
    )
    grid = LocalGrid(app(), num_nodes=4)
    results = [
        tensors(strategy.start(grid, array_record({"w": INITIAL}), 4).arrays)["w"]
        for strategy in (theirs, ours)
    ]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-10)
    assert not torch.equal(results[1], INITIAL)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("resumed_after", [None, 1, 3])
def test_the_released_model_is_the_average_of_iterates_that_clients_train_from(
    momentum: float, resumed_after: int | None
) -> None:
    def strategy(optimizer: ServerOptimizer) -> DPFedAvg:
        return DPFedAvg(
            mechanism=NoPrivacy("uniform"),
            cohort=FullCohort(4),
            seed=1,
            server_optimizer=optimizer,
        )

    def released(server: DPFedAvg, rounds: int, initial: torch.Tensor) -> list[torch.Tensor]:
        """The models of rounds, by the messages that any Flower client gets."""
        models, arrays = [], array_record({"w": initial})
        for number in range(server.rounds_done + 1, server.rounds_done + 1 + rounds):
            messages = server.configure_train(number, arrays, ConfigRecord(), grid)
            arrays, _ = server.aggregate_train(number, grid.send_and_receive(messages))
            models.append(tensors(arrays)["w"].clone())
        return models

    grid, decay = LocalGrid(app(), num_nodes=4), 0.6
    iterates = released(strategy(ServerSGD(momentum=momentum)), 5, INITIAL)
    averaged = strategy(AveragedSGD(momentum=momentum, decay=decay))
    models = released(averaged, resumed_after or 5, INITIAL)
    if resumed_after is not None:
        state, averaged = averaged.state(), strategy(AveragedSGD(momentum=momentum, decay=decay))
        averaged.restore(join_tree(*split_tree(state)))
        models += released(averaged, 5 - resumed_after, models[-1])
    # Of the first two iterates it is the mean, since 1 / (1 - decay) is 2.5.
    expected = [iterates[0], (iterates[0] + iterates[1]) / 2]
    for iterate in iterates[2:]:
        expected.append(decay * expected[-1] + (1 - decay) * iterate)
    torch.testing.assert_close(models, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(models[-1], iterates[-1])


class Counting(FedProx):
    """One whose word to clients changes from round to round."""

    asked = 0

    def configure_train(self, server_round, arrays, config, grid):
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


class AdaFedProx(FedProx):
    """Li et al. 2020: the pull grows where the clients' loss does, and shrinks where it fell."""

    def __init__(self, proximal_mu: float, **settings: int) -> None:
        super().__init__(proximal_mu=proximal_mu, **settings)
        self.loss, self.said = float("inf"), [proximal_mu]

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        loss = float(metrics["loss"])
        self.proximal_mu += 0.25 if loss > self.loss else -0.125
        self.loss = loss
        self.said.append(self.proximal_mu)
        return arrays, metrics


def pulled_app() -> ClientApp:
    """Clients of unlike sizes that overshoot, the less the more they are pulled back."""

    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        mu = float(message.content.config_records["config"]["proximal-mu"])
        w = message.content.array_records["arrays"]["w"].numpy()
        moved = w + 3.2 / (1 + mu) * (client - w)
        metrics = MetricRecord(
            {"num-examples": client + 1, "loss": float(((w - client) ** 2).mean())}
        )
        arrays = ArrayRecord({"w": Array(moved)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    made = ClientApp()
    made.train()(train)
    return made


def test_what_a_strategy_of_ones_own_remembers_outlives_its_process() -> None:
    held = {"losses": [2.5, 1.0], "best": {"loss": 1.0, "round": 2}, "mean": np.float32(0.5),
            "seen": np.int64(7), "sums": [np.ones(2)], "nothing": [], "name": "ada"}  # fmt: skip
    first, second = FedAvg(), FedAvg()
    vars(first).update(held)
    state = FlowerOptimizer(first).state()
    held["losses"].append(9.0)
    FlowerOptimizer(second).restore(join_tree(*split_tree(state)))
    assert vars(second)["losses"] == [2.5, 1.0]
    for name in ("best", "mean", "seen", "nothing", "name"):
        assert vars(second)[name] == held[name]
    np.testing.assert_array_equal(vars(second)["sums"][0], np.ones(2))


def test_a_pull_that_follows_the_clients_loss_is_what_it_is_in_flowers_own_loop() -> None:
    theirs, inside = AdaFedProx(0.75, fraction_evaluate=0), AdaFedProx(0.75)
    ours = DPFedAvg(
        mechanism=NoPrivacy("num-examples"), cohort=FullCohort(4), seed=1, server_optimizer=inside
    )
    results = [
        tensors(
            strategy.start(
                LocalGrid(pulled_app(), num_nodes=4), array_record({"w": INITIAL}), 6
            ).arrays
        )["w"]
        for strategy in (theirs, ours)
    ]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
    assert inside.said == theirs.said
    assert min(np.diff(inside.said)) < 0 < max(np.diff(inside.said))


def pulled_trainer(mu: float) -> Trainer:
    algorithm = Proximal(SGD(lr=0.1), mu) if mu else SGD(lr=0.1)
    return Trainer(make_mlp(), algorithm, make_data([4, 4]), epochs=3, randomness=Randomness(1))


def ends_at(trainer: Trainer, optimizer: FedProx | None, rounds: int = 2) -> torch.Tensor:
    strategy = DPFedAvg(
        mechanism=NoPrivacy("uniform"), cohort=FullCohort(2), seed=1, server_optimizer=optimizer
    )
    initial = array_record(trainer.layout.unflatten(trainer.initial()))
    result = strategy.start(LocalGrid(trainer), initial, rounds)
    return trainer.layout.flatten(tensors(result.arrays))


def test_our_clients_are_pulled_as_strongly_as_the_server_says() -> None:
    told = ends_at(pulled_trainer(0.5), FedProx(proximal_mu=2.0))
    torch.testing.assert_close(told, ends_at(pulled_trainer(2.0), None), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(told, ends_at(pulled_trainer(0.5), None), rtol=1e-3)


@pytest.mark.parametrize(
    ("mu", "sent", "sentence"),
    [
        (0.0, 0.25, r"proximal-mu = 0\.25, and client\.proximal is 0; set it above 0"),
        (0.5, -1.0, r"proximal-mu = -1\.0; it must be a number, 0 or more"),
        (0.5, math.nan, r"proximal-mu = nan; it must be a number, 0 or more"),
    ],
)
def test_a_pull_that_cannot_be_is_refused(mu: float, sent: float, sentence: str) -> None:
    with pytest.raises(FedsimError, match=sentence):
        ends_at(pulled_trainer(mu), FedProx(proximal_mu=sent))


def test_clients_without_a_pull_may_be_told_that_there_is_none() -> None:
    ends_at(pulled_trainer(0.0), FedProx(proximal_mu=0.0), rounds=1)


def test_what_private_clients_report_is_told_to_no_strategy_inside() -> None:
    heard: list[set[str]] = []

    class Listening(FedAvg):
        def aggregate_train(self, server_round, replies):
            heard.extend(set(reply.content["metrics"]) for reply in replies)
            return super().aggregate_train(server_round, replies)

    for shown in (False, True):
        strategy = DPFedAvg(
            mechanism=Clipping(1.0),
            cohort=FullCohort(2),
            noise_multiplier=1.0,
            seed=1,
            metrics=ClientMetrics(unprotected=shown),
            server_optimizer=Listening(),
        )
        trainer = pulled_trainer(0.0)
        initial = array_record(trainer.layout.unflatten(trainer.initial()))
        strategy.start(LocalGrid(trainer), initial, 1)
    assert heard == [{"num-examples"}, {"num-examples", "loss"}]


class Telling(FedProx):
    def aggregate_train(self, server_round, replies):
        logging.getLogger("flwr").info("mu is %s", self.proximal_mu)
        return super().aggregate_train(server_round, replies)


def test_the_log_has_the_rounds_own_counts_and_what_a_strategy_of_ones_own_says(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level(logging.INFO, "flwr"):
        ends_at(pulled_trainer(0.5), Telling(proximal_mu=2.0), rounds=1)
    said = [record.getMessage() for record in caplog.records]
    assert "mu is 2.0" in said
    assert not [line for line in said if "Sampled" in line or "Received" in line]


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
        (FedAdam(fraction_train=0.0), "fraction_train = 0.0, by which it trains no client"),
        (FedAdam(fraction_train=0.4, min_train_nodes=0), "it must be 1.0"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_strategies_that_cannot_step_on_a_mean_are_refused(strategy: Strategy, reason: str) -> None:
    with pytest.raises(FedsimError, match=reason):
        DPFedAvg(
            mechanism=Clipping(1.0),
            noise_multiplier=0.0,
            cohort=FullCohort(4),
            server_optimizer=strategy,
        )
