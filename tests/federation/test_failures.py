"""Clients that fail: nothing that their data may cause decides what a private run does."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fixed_clients import Fixed
from flwr.app import ConfigRecord
from toy_clients import toy_app

import fedsim
from fedsim.array_types import Ints
from fedsim.cohorts import FullCohort, PoissonCohort
from fedsim.config import RunConfig
from fedsim.engines import LocalGrid, StreamingGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.rows.block import REASONS, Block
from fedsim.runs.resolve import resolve
from fedsim.runs.runner import drive
from fedsim.strategies import Availability, ClientTraining, DPFedAvg, RunFailedError

EVERYBODY = tuple(range(40))


class Raising(Fixed):
    """Clients whose code raises."""

    def train(self, vector: torch.Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        raise ArithmeticError("overflow")
        yield


def nan_trainer(d: int) -> Fixed:
    return Fixed(torch.full((40, d), torch.nan))


def strategy(placement: str = "server", **settings) -> DPFedAvg:
    private = {"mechanism": Clipping(2.0), "noise_multiplier": 1.5, "seed": 5}
    return DPFedAvg(**{"cohort": FullCohort(40), "placement": placement, **private, **settings})


@pytest.mark.parametrize("placement", ["server", "client"])
@pytest.mark.parametrize("fault", ["fails", "raises", "sends NaN"])
def test_a_private_round_is_released_and_charged_when_everybody_fails(placement, fault):
    d = 4000
    trainer = {
        "fails": Fixed(torch.ones(40, d), failing=EVERYBODY),
        "raises": Raising(torch.ones(40, d)),
        "sends NaN": nan_trainer(d),
    }[fault]
    private = strategy(placement)
    result = private.start(LocalGrid(trainer), array_record({"w": torch.zeros(d).double()}), 1)
    total = tensors(result.arrays)["w"] * 40
    # Chi-square with 4000 degrees of freedom: five standard errors are 5.6 %.
    assert total.std().item() == pytest.approx(3.0, rel=0.056)
    assert private.privacy_spent().num_releases == 1
    assert private.report is not None
    assert (private.report.asked, private.report.usable, private.report.failed) == (40, 0, 40)


def test_a_client_that_poisons_its_update_does_not_decide_whether_noise_is_released():
    # Alone in its cohort, client 0 used to keep the model as it was: seen in 1.6 % of the
    # rounds with it, and never without it.
    updates = torch.zeros(20, 8)
    updates[0] = torch.nan
    poisoned = strategy(cohort=PoissonCohort(0.05, 20))
    grid = LocalGrid(Fixed(updates))
    initial = array_record({"w": torch.zeros(8)})
    alone = 0
    for server_round in range(1, 301):
        asked = list_of(poisoned, server_round, initial, grid)
        alone += asked.recipients.client_ids.tolist() == [0]
        arrays, _ = poisoned.aggregate_train(server_round, grid.send_and_receive(asked))
        assert arrays is not None
        assert (tensors(arrays)["w"] != 0).all()
    assert alone > 0


def list_of(strategy, server_round, initial, grid):
    return strategy.configure_train(server_round, initial, ConfigRecord(), grid)


def test_failures_never_end_a_private_run_and_are_said(caplog):
    private = strategy(availability=Availability(max_failed_rounds=1))
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        private.start(LocalGrid(nan_trainer(3)), array_record({"w": torch.zeros(3)}), 7)
    assert private.privacy_spent().num_releases == 7
    assert "every client that was asked failed in 7 rounds in a row" in caplog.text


@pytest.mark.parametrize(
    "settings", [{"noise_multiplier": 0.0}, {"mechanism": NoPrivacy("uniform")}]
)
def test_a_run_without_privacy_ends_after_so_many_failed_rounds_and_keeps_the_model(settings):
    plain = strategy(**{"noise_multiplier": 0.0, **settings})
    with pytest.raises(RunFailedError, match="3 rounds in a row"):
        plain.start(LocalGrid(nan_trainer(2)), array_record({"w": torch.ones(2)}), 10)
    assert plain.result is not None
    assert tensors(plain.result.arrays)["w"].tolist() == [1.0, 1.0]


def test_nodes_that_leave_a_private_run_later_on_do_not_end_it():
    class Leaving(LocalGrid):
        left = 0

        def client_ids(self) -> dict[int, int]:
            nodes = super().client_ids()
            return {k: nodes[k] for k in range(self.left, len(nodes))}

    at_once = Availability(node_timeout=0.0)
    grid = Leaving(Fixed(torch.ones(40, 2)))
    initial = array_record({"w": torch.zeros(2)})
    private = strategy(min_available_nodes=40, availability=at_once)
    private.start(grid, initial, 3, on_round=lambda t, _: setattr(grid, "left", 39))
    assert private.report is not None
    assert (private.report.round, private.report.usable, private.report.failed) == (3, 1, 39)
    plain = strategy(min_available_nodes=40, availability=at_once, noise_multiplier=0.0)
    with pytest.raises(FedsimError, match="1 of the 40 clients"):
        plain.start(grid, initial, 1)


def test_nobody_waits_for_nodes_that_a_grid_of_one_process_will_never_have():
    waiting = strategy(min_available_nodes=41)
    began = time.monotonic()
    with pytest.raises(FedsimError, match=r"has 40 nodes.*min_available_nodes = 41.*at most 40"):
        waiting.start(LocalGrid(nan_trainer(2)), array_record({"w": torch.ones(2)}), 1)
    assert time.monotonic() - began < 60  # of the 180 that others' nodes have to connect


def test_a_run_whose_clients_protect_their_examples_goes_on_too():
    clients = ClientTraining(private_examples=True)
    plain = strategy(mechanism=NoPrivacy("uniform"), noise_multiplier=0.0, clients=clients)
    result = plain.start(LocalGrid(nan_trainer(2)), array_record({"w": torch.ones(2)}), 10)
    assert tensors(result.arrays)["w"].tolist() == [1.0, 1.0]
    assert plain.report is not None
    assert plain.report.round == 10


class Spent(Fixed):
    """Clients of which the first so many say that their own budget is spent."""

    spent = 1

    def train(self, vector, client_ids, round):
        for client in client_ids.tolist():
            if client < self.spent:
                yield Block.failed(np.array([client]), "budget")
            else:
                yield from super().train(vector, np.array([client]), round)


@pytest.mark.parametrize(
    ("spent", "population", "rounds"),
    [
        (1, 4, 3),  # a stranger may say so: it is left out alone
        (3, 4, 3),
        (1, 1, 3),
        (4, 4, 0),  # nobody is left who would go on
    ],
)
def test_no_single_client_ends_a_federation_by_saying_that_its_budget_is_spent(
    spent, population, rounds
):
    run = strategy(
        mechanism=NoPrivacy("uniform"),
        noise_multiplier=0.0,
        clients=ClientTraining(private_examples=True),
        cohort=FullCohort(population),
    )
    trainer = Spent(torch.ones(population, 2))
    trainer.spent = spent
    run.start(LocalGrid(trainer), array_record({"w": torch.zeros(2)}), 3)
    assert run.rounds_done == rounds
    assert (run.stopped is None) == (rounds == 3)
    assert run.report is not None
    assert run.report.reasons["budget"] == run.report.failed == spent


class OneByOne(LocalGrid):
    """Passes on messages in place of blocks, as a wrapper that looks at each reply does."""

    def send_and_receive(self, messages, *, timeout=None):
        return list(super().send_and_receive(messages, timeout=timeout))


def test_a_client_fails_for_the_same_reason_in_a_block_and_in_a_message():
    class Failing(Fixed):
        def train(self, vector, client_ids, round):
            for client, reason in zip(client_ids, REASONS, strict=False):
                yield Block.failed(np.array([client]), reason)

    reasons = []
    for grid in (LocalGrid, OneByOne):
        run = strategy(cohort=FullCohort(6))
        run.start(grid(Failing(torch.ones(6, 2))), array_record({"w": torch.zeros(2)}), 1)
        assert run.report is not None
        reasons.append(run.report.reasons)
    assert (
        reasons[0] == reasons[1] == dict.fromkeys(REASONS[:6], 1) | {"duplicate": 0, "unknown": 0}
    )


class Watched(LocalGrid):
    """Notes the time that it is given."""

    seen: list[float | None]

    def send_and_receive(self, messages, *, timeout=None):
        self.seen = [*getattr(self, "seen", []), timeout]
        return super().send_and_receive(messages, timeout=timeout)


class OneDeadline(Watched):
    """As Flower's runtimes: one deadline for all of a round."""

    times_each_client = False


@pytest.mark.parametrize(
    ("grid", "private", "given"),
    [(OneDeadline, True, None), (OneDeadline, False, 7.0), (Watched, True, 7.0)],
)
def test_a_private_run_has_no_deadline_that_its_clients_share(grid, private, given):
    clients = grid(Fixed(torch.ones(40, 2)))
    initial = array_record({"w": torch.zeros(2)})
    strategy(noise_multiplier=1.0 if private else 0.0).start(clients, initial, 2, timeout=7.0)
    assert set(clients.seen) == {given}


def test_flowers_runtimes_know_one_deadline_only():
    grid = LocalGrid(toy_app(), num_nodes=2)
    assert grid.times_each_client
    assert not getattr(StreamingGrid(grid), "times_each_client", False)


EXAMPLE_PRIVATE = {
    "rounds": 2,
    "partition": {"clients": 3, "max-examples": 20},
    "model": {"name": "softmax"},
    "client": {
        "batch-size": 5,
        "steps": 2,
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
    },
    "engine": {"device": "cpu"},
}


def test_clients_do_not_evaluate_on_private_examples_unless_that_is_said():
    asks = {**EXAMPLE_PRIVATE, "evaluate": {"clients-every": 1}}
    with pytest.raises(FedsimError, match=r"evaluate\.unprotected = true"):
        RunConfig.parse(asks)
    with pytest.raises(FedsimError, match=r"metrics\.unprotected"):
        DPFedAvg(
            mechanism=NoPrivacy("uniform"),
            cohort=FullCohort(3),
            clients=ClientTraining(private_examples=True),
            fraction_evaluate=1.0,
        )


def rows(**settings) -> list[dict[str, float | int]]:
    resolved = resolve(RunConfig.parse(EXAMPLE_PRIVATE).replace(**settings))
    return drive(resolved, LocalGrid(resolved.trainer)).metrics


def test_what_clients_report_does_not_stand_in_the_metrics_of_a_private_run():
    for settings in (
        {},
        {"client.name": "adadp-lr", "client.state": "client"},
        {"mechanism.name": "clipping", "noise.multiplier": 1.0},
    ):
        row = rows(**settings)[-1]
        assert not [key for key in row if key.startswith(("train-", "clients-l", "clients-n"))]
        assert (row["asked"], row["usable"], row["failed"]) == (3, 3, 0)
    shown = rows(**{"evaluate.unprotected": True, "evaluate.clients-every": 1})[-1]
    assert shown["train-num-examples"] == 60
    assert np.isfinite(shown["clients-loss"])


def test_a_short_run_in_which_nobody_ever_replied_has_failed():
    config = RunConfig().replace(**{"rounds": 2, "partition.clients": 40})
    resolved = resolve(config)
    with pytest.raises(RunFailedError, match="every client that was asked failed in 2 rounds"):
        drive(resolved, LocalGrid(nan_trainer(650)))


def test_a_round_whose_clients_have_no_examples_says_so():
    data = {f"{name}_{split}": values for split in ("train", "test") for name, values in {
        "x": np.ones((4, 3), np.float32), "y": np.arange(4) % 2, "owner": np.arange(4) % 2
    }.items()}  # fmt: skip
    config = RunConfig().replace(
        **{
            "rounds": 2,
            "seed": 2,
            "partition.name": "by-owner",
            "partition.clients": 1000,
            "cohort.name": "fixed",
            "cohort.size": 1,
        }
    )
    with pytest.raises(RunFailedError, match="no client that was asked has an example to train on"):
        fedsim.run(config, data=data)
