"""A client that fails contributes nothing and changes nobody else's fate, on every engine alike."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from torch import nn
from toy_clients import ToyTrainer, toy_instructions, training

from fedsim.clients import SGD
from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid, RayGrid, array_record, tensors
from fedsim.federation.engines.workers import guarded_blocks
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.rows.block import Block, MalformedBlockError
from fedsim.strategies import DPFedAvg
from fedsim.tasks.losses import CrossEntropy
from fedsim.training import ClientData, ExamplePrivacy, Trainer

SIZES = [5, 9, 4, 12, 7, 6]
EVERYBODY = tuple(range(len(SIZES)))
WHO = {"none": (), "one": (2,), "several": (0, 2, 5), "all": EVERYBODY}
FAULTS = ("raises", "exits", "nan", "inf", "shape", "out of range")


class Treacherous(nn.Module):
    """A linear model whose examples' first feature says whose they are, and that does what a
    file says it does to these clients."""

    def __init__(self, orders: Path):
        super().__init__()
        self.orders = orders
        self.linear = nn.Linear(5, 3)
        nn.init.constant_(self.linear.weight, 0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        outputs = self.linear(x[:, 1:])
        orders = json.loads(self.orders.read_text())
        if int(x[0, 0]) not in orders["who"]:
            return outputs
        fault = orders["fault"]
        if fault == "raises":
            raise ArithmeticError("out of luck")
        if fault == "exits":
            sys.exit(3)
        if fault == "dies":
            os._exit(1)
        if fault == "shape":
            return outputs[:-1]
        if fault == "out of range":
            return outputs[:, :0]
        return outputs * float(fault)


def marked_data():
    data = make_data(SIZES)
    x = data.x.clone()
    for client, examples in enumerate(data.indices):
        x[torch.from_numpy(examples), 0] = client
    return ClientData(x, data.y, data.indices)


def treacherous(orders, **settings) -> Trainer:
    settings = {"batch_size": 4, "path": "plain", "randomness": Randomness(3)} | settings
    return Trainer(Treacherous(orders), SGD(lr=0.1), marked_data(), **settings)


def run(grid, initial, *, rounds=2):
    """Counts of each round, and the model's bytes."""
    strategy = DPFedAvg(
        mechanism=Clipping(0.5), cohort=FullCohort(len(SIZES)), noise_multiplier=0.5, seed=1
    )
    counts = []

    def note(*_):
        report = strategy.report
        counts.append((report.asked, report.usable, report.failed))

    result = strategy.start(grid, initial, rounds, on_round=note)
    return counts, {k: v.numpy().tobytes() for k, v in tensors(result.arrays).items()}


def initial_of(trainer):
    return array_record(trainer.layout.unflatten(trainer.initial()))


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    return tmp_path_factory.mktemp("orders") / "orders.json"


@pytest.fixture(scope="module")
def handler_before_ray():
    return signal.getsignal(signal.SIGTERM)


@pytest.fixture(scope="module")
def grids(orders):
    """The same clients in blocks of several sizes."""
    give(orders, "raises", ())
    return {
        "local": LocalGrid(treacherous(orders)),
        "local, alone": LocalGrid(treacherous(orders, block_size=1)),
        "local, by four": LocalGrid(treacherous(orders, block_size=4)),
    }


@pytest.fixture(scope="module")
def ray_grid(orders, handler_before_ray):
    """The same clients on Ray."""
    import ray.cloudpickle as cloudpickle

    cloudpickle.register_pickle_by_value(__import__(__name__))
    give(orders, "raises", ())
    with RayGrid(treacherous(orders), workers=2, cpus_per_worker=0.1, retries=1) as grid:
        yield grid


def give(orders, fault, who):
    orders.write_text(json.dumps({"fault": fault, "who": who}))


def test_clients_that_fail_alike_are_one_warning_with_the_place_in_the_users_code(orders, caplog):
    trainer = treacherous(orders, block_size=4)
    give(orders, "raises", (1, 3, 4))
    call = training(trainer.initial(), 7)
    assert sum(len(b.reasons) for b in guarded_blocks(trainer, call, np.arange(6))) == 3
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert warning.startswith("clients 1, 3, 4 failed in round 7: ArithmeticError: out of luck (at")
    assert "test_faults.py:" in warning


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("fault", FAULTS)
def test_counts_and_bytes_are_the_same_in_all_blocks_for_any_failure(grids, orders, fault, who):
    failing = WHO[who]
    expected = without(failing, grids, orders)
    usable = len(SIZES) - len(failing)
    assert expected[0] == [(len(SIZES), usable, len(failing))] * 2
    give(orders, fault, failing)
    for name, grid in grids.items():
        assert run(grid, initial_of(treacherous(orders))) == expected, name


def without(failing, grids, orders):
    """Counts and bytes of a run in which these clients raise."""
    give(orders, "raises", failing)
    return run(grids["local"], initial_of(treacherous(orders)))


@pytest.mark.slow
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("fault", FAULTS)
def test_counts_and_bytes_are_the_same_on_ray_for_any_failure(grids, ray_grid, orders, fault, who):
    expected = without(WHO[who], grids, orders)
    give(orders, fault, WHO[who])
    assert run(ray_grid, initial_of(treacherous(orders))) == expected


@pytest.mark.slow
def test_ray_leaves_sigterm_to_its_earlier_handler(ray_grid, handler_before_ray):
    assert signal.getsignal(signal.SIGTERM) is handler_before_ray


@pytest.mark.slow
def test_a_client_that_kills_its_worker_contributes_as_little(grids, ray_grid, orders):
    initial = initial_of(treacherous(orders))
    give(orders, "raises", (2,))
    expected = run(grids["local"], initial, rounds=1)
    give(orders, "dies", (2,))
    assert run(ray_grid, initial, rounds=1) == expected


@pytest.mark.parametrize(
    "engine", ["local", "local, by four", pytest.param("ray", marks=pytest.mark.slow)]
)
def test_clients_that_do_not_fail_have_the_bytes_of_a_round_in_which_nobody_does(
    grids, orders, engine, request
):
    give(orders, "raises", ())
    expected = rows_of(grids["local"])
    assert set(expected) == set(EVERYBODY)
    give(orders, "raises", (0, 3))
    grid = request.getfixturevalue("ray_grid") if engine == "ray" else grids[engine]
    assert rows_of(grid) == {k: v for k, v in expected.items() if k not in (0, 3)}


def rows_of(grid):
    instructions = toy_instructions(list(EVERYBODY), grid, d=18)
    rows = {}
    for block in grid.send_and_receive(instructions, timeout=100.0).blocks():
        for index, client in enumerate(block.client_ids.tolist()):
            if block.ok[index]:
                rows[client] = block.rows[index].numpy().tobytes()
            else:
                assert block.reasons[client] == "raised"
    return rows


@pytest.mark.parametrize("who", WHO)
def test_a_client_without_data_sends_zero_on_every_path_and_block_size(who):
    sizes = [0 if k in WHO[who] else size for k, size in enumerate(SIZES)]
    seen = []
    for path in ("layered", "plain"):
        for block_size in (0, 1, 4):
            trainer = Trainer(
                make_mlp(dtype=torch.float64), SGD(lr=0.1), make_data(sizes, dtype=torch.float64),
                path=path, block_size=block_size, randomness=Randomness(3),
            )  # fmt: skip
            counts, model = run(LocalGrid(trainer), initial_of(trainer))
            assert counts == [(len(SIZES), len(SIZES), 0)] * 2
            seen.append((path, model))
    for path in ("layered", "plain"):
        models = [model for name, model in seen if name == path]
        assert models == models[:1] * 3


@pytest.mark.parametrize("block_size", [0, 1, 4])
@pytest.mark.parametrize("fault", ["raises", "exits", "shape", "nan"])
def test_a_block_trained_at_once_loses_only_those_at_fault(fault, block_size):
    guilty = 7

    def loss(outputs, y):
        if bool((y == guilty).any()) and fault != "nan":
            if fault == "exits":
                sys.exit(1)
            if fault == "shape":
                return outputs.sum(1)[:-1]
            raise ValueError("a class that is not there")
        each = CrossEntropy()(outputs, y.clamp(max=2))
        return each * torch.where(y == guilty, torch.nan, 1.0)

    def clamped(outputs, y):
        return CrossEntropy()(outputs, y.clamp(max=2))

    loss.across_batch = clamped.across_batch = False
    data = make_data(SIZES)
    y = data.y.clone()
    for client in (1, 4):
        y[torch.from_numpy(data.indices[client])] = guilty
    trainer = Trainer(
        make_mlp(), SGD(lr=0.1), ClientData(data.x, y, data.indices),
        loss=loss, path="layered", block_size=block_size, randomness=Randomness(3),
    )  # fmt: skip
    counts, _ = run(LocalGrid(trainer), initial_of(trainer))
    assert counts == [(6, 4, 2)] * 2
    alone = Trainer(
        make_mlp(), SGD(lr=0.1), data, loss=clamped,
        path="layered", block_size=1, randomness=Randomness(3),
    )  # fmt: skip
    for block in guarded_blocks(trainer, training(trainer.initial(), 1), np.arange(6)):
        for index, client in enumerate(block.client_ids.tolist()):
            if client not in (1, 4):
                (own,) = alone.train(trainer.initial(), np.array([client]), 1)
                assert torch.equal(block.rows[index], own.rows[0])


def test_a_client_that_is_run_again_after_its_neighbour_raised_draws_and_is_charged_once(
    orders, monkeypatch
):
    addresses = []
    monkeypatch.setattr(Randomness, "address_observer", staticmethod(addresses.append))
    privacy = ExamplePrivacy(Clipping(0.5), 1.0)
    for randomness in (Randomness(3), Randomness(None)):
        addresses.clear()
        give(orders, "raises", (3,))
        trainer = treacherous(orders, privacy=privacy, randomness=randomness)
        for server_round in (1, 2):
            for _ in guarded_blocks(
                trainer, training(trainer.initial(), server_round), np.arange(6)
            ):
                pass
        for client in EVERYBODY:
            entries = trainer.ledger.entries
            assert sum(client in entry.clients for entry in entries) == 2
    assert len(set(addresses)) == len(addresses) > 0


class Misbehaving(ToyTrainer):
    """A trainer whose blocks are not what was asked for where client 2 is in them."""

    def __init__(self, how):
        super().__init__(block_size=3)
        self.how = how

    def train(self, vector, client_ids, round):
        for block in super().train(vector, client_ids, round):
            yield self.how(block) if 2 in block.client_ids else block


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (lambda b: Block.sent(b.client_ids, b.rows[:, :-1], b.metrics), "malformed"),
        (lambda b: Block.sent(b.client_ids, None, b.metrics), "malformed"),
        (lambda b: Block.sent(b.client_ids + 5, b.rows, b.metrics), "malformed"),
        (lambda b: Block.sent(b.client_ids, b.rows[:-1], b.metrics), "malformed"),
        (lambda b: Block.sent(b.client_ids, b.rows.long(), b.metrics), "malformed"),
        (lambda b: b.select(b.client_ids < 0), "malformed"),
        (lambda b: None, "raised"),
    ],
)
def test_a_block_that_is_not_what_was_asked_for_costs_its_client_alone(how, reason):
    vector = torch.arange(4.0)
    good = {k: ToyTrainer().row(vector, k, 1) for k in range(7)}
    reasons = {}
    for block in guarded_blocks(Misbehaving(how), training(vector, 1), np.arange(7)):
        reasons |= block.reasons
        for index, client in enumerate(block.client_ids.tolist()):
            assert not block.ok[index] or torch.equal(block.rows[index], good.pop(client))
    assert reasons == {2: reason}
    assert set(good) == {2}


def test_clients_that_a_trainer_leaves_out_are_missing():
    class Forgetful(ToyTrainer):
        def train(self, vector, client_ids, round):
            return super().train(vector, client_ids[client_ids != 2], round)

    got = list(guarded_blocks(Forgetful(), training(torch.zeros(4), 1), np.arange(7)))
    assert {k: v for block in got for k, v in block.reasons.items()} == {2: "missing"}
    assert sorted(k for block in got for k in block.client_ids.tolist()) == list(range(7))


def test_what_a_trainer_raises_after_a_block_costs_nobody_in_it():
    class Untidy(ToyTrainer):
        def train(self, vector, client_ids, round):
            yield from super().train(vector, client_ids, round)
            raise RuntimeError("while tidying up")

    got = list(guarded_blocks(Untidy(), training(torch.zeros(4), 1), np.arange(7)))
    assert [k for block in got for k in block.client_ids.tolist()] == list(range(7))
    assert all(block.ok.all() for block in got)


IDS, ROWS = np.arange(3), torch.ones(3, 2)
OK, SOME = np.ones(3, dtype=bool), np.array([True, False, True])
ONE_LOST = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    "fields",
    [
        (IDS.astype(np.int32), ROWS, {}, OK),
        ([0, 1, 2], ROWS, {}, OK),
        (np.array([0, 1, 1]), ROWS, {}, OK),
        (IDS, ROWS[:2], {}, OK),
        (IDS, ROWS[0], {}, OK),
        (IDS, ROWS.int(), {}, OK),
        (IDS, ROWS, {"loss": np.ones(2)}, OK),
        (IDS, ROWS, {"loss": np.ones((3, 1))}, OK),
        (IDS, ROWS, {"loss": [1.0, 2.0, 3.0]}, OK),
        (IDS, ROWS, {}, OK[:2]),
        (IDS, ROWS, {}, OK.astype(int)),
        (IDS, ONE_LOST, {}, SOME),
        (IDS, ONE_LOST, {}, SOME, {0: "raised"}),
        (IDS, ONE_LOST, {}, SOME, {1: "tired"}),
        (IDS, ONE_LOST, {}, SOME, {1: "raised", 2: "raised"}),
        (IDS, ROWS, {}, OK, {1: "raised"}),
        (IDS, ROWS, {}, SOME, {1: "raised"}),
    ],
)
def test_an_inconsistent_block_cannot_be_built(fields):
    with pytest.raises(MalformedBlockError):
        Block(*fields)


def test_a_part_of_a_block_has_the_reasons_of_its_clients():
    block = Block(IDS, ONE_LOST, {"loss": np.arange(3.0)}, SOME, {1: "non-finite"})
    assert block.select(np.array([False, True, True])).reasons == {1: "non-finite"}
    assert block.select(SOME).reasons == {}
    assert Block.failed(IDS, "timeout").reasons == dict.fromkeys(range(3), "timeout")
