"""Blocks of a round: their batches are drawn for many clients at once, and nobody notices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from clients_helpers import make_cnn, make_data, make_mlp
from torch import Tensor
from toy_clients import training

from fedsim.clients import SGD
from fedsim.federation.engines.workers import guarded_blocks, pack, unpack
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.rows.block import Block
from fedsim.tasks import CrossEntropy
from fedsim.training import ClientData, ExamplePrivacy, Trainer, plain_steps
from fedsim.training.paths import program

SIZES = [9, 0, 4, 1, 12, 7, 4, 30]
IDS = np.arange(len(SIZES))
GUILTY = 17
"""A class that there is not."""


@pytest.fixture(autouse=True)
def every_row_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SEQUENTIAL_BYTES", 0)


def made(*, guilty: tuple[int, ...] = (), **changes: object) -> Trainer:
    # Its parameters lie without gaps, so that rows take their place.
    data = make_data(SIZES, features=16)
    y = data.y.clone()
    for client in guilty:
        y[torch.from_numpy(data.indices[client])] = GUILTY
    settings: dict = {
        "algorithm": SGD(lr=0.3),
        "data": ClientData(data.x, y, data.indices),
        "batch_size": 4,
        "epochs": 2,
        "block_size": 2,
        "randomness": Randomness(3),
    } | changes
    return Trainer(make_mlp(features=16, hidden=16), **settings)


def trained(trainer: Trainer, ids: np.ndarray = IDS, rounds: int = 2) -> list[Block]:
    return [
        block
        for t in range(1, rounds + 1)
        for block in guarded_blocks(trainer, training(trainer.initial(), t), ids)
    ]


def bytes_of(blocks: list[Block]) -> list[tuple[int, bytes, bytes] | tuple[int, str]]:
    """Of every client, in order: its row and loss, or why it has none."""
    return [
        (client, block.reasons[client])
        if client in block.reasons
        else (client, block.rows[k].numpy().tobytes(), block.metrics["loss"][k].tobytes())
        for block in blocks
        for k, client in enumerate(block.client_ids.tolist())
    ]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many clients batches were drawn at once."""
    numbers: list[int] = []
    plan = plain_steps.plan_batches

    def noted(work: object, indices: list, *others: object) -> Iterator:
        numbers.append(len(indices))
        return plan(work, indices, *others)

    monkeypatch.setattr(plain_steps, "plan_batches", noted)
    return numbers


@pytest.mark.spanning
@pytest.mark.parametrize("path", ["layered", "plain"])
@pytest.mark.parametrize("changes", [{}, {"counts": [1, 2, 3, 1, 2, 3, 5, 1]}], ids=["", "counts"])
def test_a_client_has_the_same_bytes_however_many_draw_at_once(
    path: str, changes: dict, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = bytes_of(trained(made(path=path, block_size=1, **changes)))
    assert set(drawn) == {len(SIZES)}
    for most, places in ((1, 2**16), (3, 2**16), (5, 2**16), (64, 40), (64, 1)):
        monkeypatch.setattr(plain_steps, "MOST_PREFETCHED", most)
        monkeypatch.setattr(plain_steps, "PREFETCHED_PLACES", places)
        for size in (1, 2, 3):
            drawn.clear()
            assert bytes_of(trained(made(path=path, block_size=size, **changes))) == wanted
            assert max(drawn) == size or max(drawn) <= most


def test_what_is_drawn_at_once_takes_no_more_room_than_is_allowed(
    drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Client 7 takes 16 steps, the others 6 at most: beside it each has room for as many.
    monkeypatch.setattr(plain_steps, "PREFETCHED_PLACES", 4 * 16 * 3)
    trained(made(block_size=1), rounds=1)
    assert drawn == [7, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_client_that_raises_among_those_drawn_with_it_fails_alone(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list = []
    monkeypatch.setattr(Randomness, "watch", staticmethod(addresses.append))
    blocks = trained(made(guilty=(2, 5), block_size=size, loss=strict))
    monkeypatch.setattr(Randomness, "watch", None)
    failed = {2: "raised", 5: "raised"}
    wanted = [
        (row[0], failed[row[0]]) if row[0] in failed else row
        for row in bytes_of(trained(made(loss=strict)))
    ]
    assert bytes_of(blocks) == wanted
    # What is drawn again after somebody raised is no new draw.
    assert len(set(addresses)) == len(addresses) > 0


def strict(outputs: Tensor, targets: Tensor) -> Tensor:
    if bool((targets == GUILTY).any()):
        raise RuntimeError("there is no such class")
    return CrossEntropy()(outputs, targets)


def test_examples_that_are_protected_are_charged_and_drawn_a_block_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses: list = []
    monkeypatch.setattr(Randomness, "watch", staticmethod(addresses.append))
    trainer = made(privacy=ExamplePrivacy(Clipping(0.5), 1.0), epochs=None, steps=2)
    ids = np.array([4, 0, 5, 2, 7])
    blocks = trainer.train(trainer.initial(), ids, 1)
    begun: list[int] = []
    for block in blocks:
        begun += block.client_ids.tolist()
        charged = [i for i in ids.tolist() if trainer.ledgers.of(i).entries]
        assert charged == begun
        assert {address.client for address in addresses} == set(begun)
        if len(begun) == 4:
            break


def test_nothing_is_drawn_before_blocks_are_asked_for(drawn: list[int]) -> None:
    trainer = made()
    blocks = trainer.train(trainer.initial(), IDS, 1)
    assert not drawn
    next(blocks)
    assert drawn == [len(SIZES)]


def test_a_trainer_that_has_trained_can_be_sent_to_workers() -> None:
    for trainer in (made(), cnn()):
        ids = np.arange(2)
        rows = [block.rows for block in trainer.train(trainer.initial(), ids, 1)]
        sent = unpack(pack(trainer, by_value=True), copied=False)
        again = [block.rows for block in sent.train(sent.initial(), ids, 1)]
        assert torch.equal(torch.cat(rows), torch.cat(again))


def cnn() -> Trainer:
    data = make_data([9, 4], features=36, shape=(1, 6, 6))
    return Trainer(make_cnn(), SGD(lr=0.3), data, batch_size=4, randomness=Randomness(3))


@pytest.mark.parametrize("path", ["layered", "plain"])
def test_a_clients_loss_is_the_mean_over_its_steps_of_their_mean_losses(path: str) -> None:
    work = [1, 2, 3, 1, 2, 3, 5, 1]
    losses: list[list[float]] = []

    def noted(outputs: Tensor, targets: Tensor) -> Tensor:
        taken = CrossEntropy()(outputs, targets)
        losses.append(taken.detach().double().tolist())
        return taken

    noted.across_batch = False  # type: ignore[attr-defined]
    trainer = made(path=path, loss=noted, counts=work, batch_size=1, block_size=1)
    (block,) = trainer.train(trainer.initial(), np.array([6]), 1)
    # Of a batch of one the second place is padding.
    steps = losses[-5 * SIZES[6] :]
    assert block.metrics["loss"][0] == pytest.approx(np.mean([step[0] for step in steps]), abs=1e-7)


def test_a_loss_has_the_same_bytes_beside_a_client_of_many_more_steps() -> None:
    counts = [200, 1, 210, 180, 300, 230, 170, 220]
    # Thirds of losses have no exact sums, whose order would not matter.
    changes = {"counts": counts, "epochs": None, "steps": 1, "batch_size": 3}
    alone, together = (
        bytes_of(trained(made(block_size=size, **changes), rounds=1)) for size in (1, 8)
    )
    assert alone == together


class Aliased(SGD):
    """Keeps the very tensor in which its model lies."""

    carried = ("theta",)
    remembers = True


@pytest.mark.parametrize("size", [1, 3])
def test_what_clients_keep_is_not_their_row_where_it_lies_in_their_parameters(size: int) -> None:
    trainer = made(algorithm=Aliased(lr=0.3), state="client", block_size=size)
    start = trainer.initial()
    local = made().fit(start, IDS, 1)
    rows = torch.cat([block.rows for block in trainer.train(start, IDS, 1)])
    kept = trainer.packing.unpack(trainer.state()["theta"])
    there = np.flatnonzero(SIZES)
    assert torch.equal(kept, local.theta[there])
    assert torch.equal(rows, local.theta - start)


@pytest.mark.parametrize("size", [1, 2])
def test_clients_without_data_leave_what_others_start_from_as_it_is(size: int) -> None:
    trainer, ids = made(block_size=size), np.array([1, 0])  # the first one has none
    start = trainer.initial()
    rows = torch.cat([block.rows for block in trainer.train(start, ids, 1)])
    assert torch.equal(rows, made().fit(start, ids, 1).theta - start)
    assert not rows[0].any()
