"""Blocks of a round: clients of one batch width, which may draw before their block begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_cnn, make_data, make_mlp
from flwr.app import ConfigRecord
from torch import Tensor
from toy_clients import training

from fedsim.clients import SGD
from fedsim.clients.base import DenseGradient, Gradient, State, Step
from fedsim.engines import LocalGrid, array_record
from fedsim.federation.engines.workers import guarded_blocks, pack, unpack
from fedsim.federation.exchange import Instructions, Recipients
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.rows.block import Block
from fedsim.rows.layout import Width
from fedsim.tasks import CrossEntropy
from fedsim.training import ClientData, ExamplePrivacy, Trainer, batches, local_rounds
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
    """Of every client, by id and round: its row and loss, or why it has none."""
    found = [
        (client, block.reasons[client])
        if client in block.reasons
        else (client, block.rows[k].numpy().tobytes(), block.metrics["loss"][k].tobytes())
        for block in blocks
        for k, client in enumerate(block.client_ids.tolist())
    ]
    return sorted(found, key=lambda client: client[0])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many clients batches were drawn at once."""
    numbers: list[int] = []
    plan = local_rounds.plan_batches

    def noted(work: object, indices: list, *others: object) -> Iterator:
        numbers.append(len(indices))
        return plan(work, indices, *others)

    monkeypatch.setattr(local_rounds, "plan_batches", noted)
    return numbers


@pytest.mark.spanning
@pytest.mark.parametrize("path", ["layered", "plain"])
@pytest.mark.parametrize("changes", [{}, {"counts": [1, 2, 3, 1, 2, 3, 5, 1]}], ids=["", "counts"])
def test_a_client_has_the_same_bytes_however_many_draw_at_once(
    path: str, changes: dict, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = bytes_of(trained(made(path=path, block_size=1, **changes)))
    assert drawn == [1, 6] * 2  # the widths 2 and 4; client 1 has no data
    for most, entries in ((1, 2**16), (3, 2**16), (5, 2**16), (64, 40), (64, 1)):
        monkeypatch.setattr(local_rounds, "DRAWN_TOGETHER", most)
        monkeypatch.setattr(batches, "DRAWN_ENTRIES", entries)
        for size in (1, 2, 3):
            drawn.clear()
            assert bytes_of(trained(made(path=path, block_size=size, **changes))) == wanted
            assert max(drawn) == size or max(drawn) <= most


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("privacy", [None, ExamplePrivacy(Clipping(0.5), 1.0)], ids=["", "private"])
def test_a_block_has_clients_of_one_width_with_most_steps_first(size: int, privacy: object) -> None:
    trainer, ids = made(block_size=size, privacy=privacy), IDS[::-1].copy()
    found = []
    for positions, clients in trainer.rounds.blocks(ids, 1, [Randomness(3)] * len(ids), size):
        assert clients.client_ids.tolist() == ids[positions].tolist()
        assert 0 < len(clients) <= size
        sizes = [SIZES[client] for client in clients.client_ids]
        steps = trainer.workload.steps(clients.client_ids).tolist()
        assert steps == sorted(steps, reverse=True)
        assert all(sizes) or not any(sizes)
        assert (clients.batches is None) == (privacy is not None or not any(sizes))
        assert len({trainer.rounds._width(size) for size in sizes}) == 1
        found += positions.tolist()
    assert sorted(found) == [*range(len(ids))]


@pytest.mark.spanning
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("private", [False, True])
def test_clients_fail_alone_and_bytes_are_the_same_for_any_blocks_and_workers(
    workers: int, size: int, private: bool
) -> None:
    """Uneven clients, one without data, two that raise, and budgets that two rounds exceed."""
    privacy = ExamplePrivacy(Clipping(0.5), 1.0, max_epsilon=9.0) if private else None
    changes: dict = {"guilty": (2, 5), "loss": strict, "privacy": privacy}
    ids = IDS[::-1].copy()
    reasons, rows = summed(made(**changes, block_size=size), ids, workers)
    wanted_reasons, wanted = summed(made(**changes, block_size=2), IDS, 1)
    assert reasons == wanted_reasons
    assert rows == wanted
    assert reasons[0] == {2: "raised", 5: "raised"}
    assert any("budget" in of_round.values() for of_round in reasons) == private


def summed(trainer: Trainer, ids: np.ndarray, workers: int) -> tuple[list[dict], list[dict]]:
    """Of each of some rounds: why clients failed, and the others' rows."""
    reasons: list[dict] = []
    rows: list[dict] = []
    with LocalGrid(trainer, workers=workers) as grid:
        for t in (1, 2, 3):
            vector = trainer.initial()
            arrays = array_record(trainer.layout.unflatten(vector))
            recipients = Recipients(ids, ids + 2)
            config = ConfigRecord({"server-round": t})
            asked = Instructions("train", t, arrays, vector, recipients, config, trainer.layout)
            blocks = list(grid.send_and_receive(asked).blocks())
            reasons.append({k: v for block in blocks for k, v in block.reasons.items()})
            rows.append(
                {
                    client: block.rows[k].numpy().tobytes()
                    for block in blocks
                    for k, client in enumerate(block.client_ids.tolist())
                    if block.ok[k]
                }
            )
    return reasons, rows


def test_what_is_drawn_at_once_takes_no_more_room_than_is_allowed(
    drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Client 7 takes 16 steps, the others 6, 6, 4, 2 and 2: beside it each has room for as many.
    monkeypatch.setattr(batches, "DRAWN_ENTRIES", 4 * 16 * 2)
    trained(made(block_size=1), rounds=1)
    assert drawn == [1, 2, 4]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_client_that_raises_among_those_drawn_with_it_fails_alone(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list = []
    monkeypatch.setattr(Randomness, "address_observer", staticmethod(addresses.append))
    blocks = trained(made(guilty=(2, 5), block_size=size, loss=strict))
    monkeypatch.setattr(Randomness, "address_observer", None)
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
    monkeypatch.setattr(Randomness, "address_observer", staticmethod(addresses.append))
    trainer = made(privacy=ExamplePrivacy(Clipping(0.5), 1.0), epochs=None, steps=2)
    ids = np.array([4, 0, 5, 2, 7])
    blocks = trainer.train(trainer.initial(), ids, 1)
    begun: list[int] = []
    for block in blocks:
        begun += block.client_ids.tolist()
        assert sorted(trainer.ledger.histories) == sorted(begun)
        assert {address.client for address in addresses} == set(begun)
        if len(begun) == 4:
            break


def test_nothing_is_drawn_before_blocks_are_asked_for(drawn: list[int]) -> None:
    trainer = made()
    blocks = trainer.train(trainer.initial(), IDS, 1)
    assert not drawn
    assert next(blocks).client_ids.tolist() == [1]
    assert not drawn
    next(blocks)
    assert drawn == [1]


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
    requires_client_state = True


@pytest.mark.parametrize("size", [1, 3])
def test_what_clients_keep_is_not_their_row_where_it_lies_in_their_parameters(size: int) -> None:
    trainer = made(algorithm=Aliased(lr=0.3), state="client", block_size=size)
    start = trainer.initial()
    local = made().fit(start, IDS, 1)
    rows = joined(trainer.train(start, IDS, 1))[0]
    kept = trainer.packing.unpack(trainer.state()["theta"])
    there = np.flatnonzero(SIZES)
    assert torch.equal(kept, local.theta[there])
    assert torch.equal(rows, local.theta - start)


@pytest.mark.parametrize("size", [1, 2])
def test_clients_without_data_leave_what_others_start_from_as_it_is(size: int) -> None:
    trainer, ids = made(block_size=size), np.array([1, 0])  # the first one has none
    start = trainer.initial()
    rows = joined(trainer.train(start, ids, 1), ids)[0]
    assert torch.equal(rows, made().fit(start, ids, 1).theta - start)
    assert not rows[0].any()


class SentMomentum(SGD):
    """Continues the momentum that the server sends, in place."""

    sends: ClassVar[Mapping[str, Width]] = {"average": "model"}

    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        average = state["average"].mul_(0.5).add_(gradient.dense())
        super().step(state, DenseGradient(average.clone()), at)

    def send(self, state: State) -> dict[str, Tensor]:
        return {"average": state["average"]}


@pytest.mark.parametrize("path", ["plain", "func", "layered"])
def test_a_client_may_change_received_vectors_in_place_for_itself_alone(path: str) -> None:
    trainer = made(algorithm=SentMomentum(lr=0.3), path=path)
    vector = trainer.initial()
    blocks = list(trainer.train(vector, IDS, 1))
    alone = [block for client in IDS for block in trainer.train(vector, IDS[[client]], 1)]
    assert bytes_of(blocks) == bytes_of(alone)
    assert torch.equal(vector, trainer.initial())
