from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg, Krum
from toy_clients import ToyTrainer, toy_app, toy_instructions

from fedsim.engines import LocalGrid, array_record, tensors
from fedsim.errors import FedsimError
from fedsim.federation.flower_internals import CLIENT_RAISED, NODE_UNAVAILABLE, empty_run


def ask(grid: LocalGrid, *nodes: int, kind: str = "train") -> list[Message]:
    content = RecordDict({"arrays": array_record({"w": torch.zeros(2)})})
    return [Message(content, node, kind) for node in nodes]


def test_node_ids_are_sorted_stable_and_never_flowers_own():
    ids = LocalGrid(toy_app(), num_nodes=5).get_node_ids()
    assert ids == sorted(set(ids)) == LocalGrid(ToyTrainer(population=5)).get_node_ids()
    assert not {0, 1} & set(ids)
    assert [node.node_id for node in LocalGrid(toy_app(), num_nodes=5).get_nodes()] == ids


def test_replies_name_the_messages_they_answer():
    grid = LocalGrid(toy_app(), num_nodes=3)
    messages = ask(grid, 2, 4)
    replies = list(grid.send_and_receive(messages))
    assert [r.metadata.reply_to_message_id for r in replies] == [
        m.metadata.message_id for m in messages
    ]
    assert [r.metadata.src_node_id for r in replies] == [2, 4]
    assert len({r.metadata.message_id for r in replies} | {""}) == 3


def test_a_client_that_empties_its_payload_does_not_empty_its_neighbours():
    grid = LocalGrid(toy_app(), num_nodes=4)
    messages = ask(grid, 2, 3, 4, 5)
    assert all(len(reply.content["arrays"]) == 1 for reply in grid.send_and_receive(messages))
    assert len(messages[0].content["arrays"]) == 1


def test_a_context_lives_as_long_as_its_node():
    grid = LocalGrid(toy_app(), num_nodes=2, run_config={"lr": 0.1})
    for expected in (1, 2, 3):
        (reply,) = grid.send_and_receive(ask(grid, 3))
        assert reply.content["metrics"]["rounds"] == expected
    (other,) = grid.send_and_receive(ask(grid, 2))
    assert other.content["metrics"]["rounds"] == 1


def test_a_context_tells_partition_and_run_config():
    seen = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append((dict(context.node_config), dict(context.run_config)))
        return Message(RecordDict(), reply_to=message)

    grid = LocalGrid(app, num_nodes=3, run_config={"lr": 0.1}, node_config={"site": "x"})
    list(grid.send_and_receive(ask(grid, 4)))
    assert seen == [({"partition-id": 2, "num-partitions": 3, "site": "x"}, {"lr": 0.1})]


def test_an_exception_in_a_client_becomes_an_error_reply():
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            raise ArithmeticError("overflow")
        return Message(RecordDict(), reply_to=message)

    grid = LocalGrid(app, num_nodes=3)
    first, second, third = grid.send_and_receive(ask(grid, 2, 3, 4))
    assert first.has_content()
    assert third.has_content()
    assert second.error.code == CLIENT_RAISED
    assert "ArithmeticError: overflow" in second.error.reason


def test_a_client_that_returns_no_message_is_an_error_reply():
    app = ClientApp()
    app.train()(lambda message, context: None)
    grid = LocalGrid(app, num_nodes=1)
    (reply,) = grid.send_and_receive(ask(grid, 2))
    assert reply.error.code == CLIENT_RAISED


def test_an_unknown_node_is_unavailable():
    grid = LocalGrid(toy_app(), num_nodes=1)
    (reply,) = grid.send_and_receive(ask(grid, 99))
    assert reply.error.code == NODE_UNAVAILABLE


def test_a_timeout_gives_fewer_replies():
    grid = LocalGrid(toy_app(), num_nodes=4)
    assert list(grid.send_and_receive(ask(grid, 2, 3, 4, 5), timeout=0.0)) == []


def test_clients_of_a_block_are_let_finish_as_they_have_no_times_of_their_own():
    trainer = LocalGrid(ToyTrainer())
    replies = trainer.send_and_receive(toy_instructions([1, 2], trainer), timeout=0.0)
    assert [reply.has_content() for reply in replies] == [True, True]


def test_push_and_pull_work_apart():
    grid = LocalGrid(toy_app(), num_nodes=3)
    ids = grid.push_messages(ask(grid, 2, 3, 4))
    assert len(set(ids)) == 3
    (second,) = grid.pull_messages(ids[1:2])
    assert second.metadata.reply_to_message_id == ids[1]
    rest = grid.pull_messages([ids[0], ids[2]])
    assert [reply.metadata.reply_to_message_id for reply in rest] == [ids[0], ids[2]]
    # As from Flower: it does not keep what it has given.
    assert codes(grid.pull_messages([*ids, "never sent"])) == [MESSAGE_UNAVAILABLE] * 4


MESSAGE_UNAVAILABLE = 3


def codes(replies) -> list[int | None]:
    return [reply.error.code if reply.has_error() else None for reply in replies]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_message_that_has_expired_reaches_no_client_and_is_unavailable(monkeypatch):
    clock, seen = Clock(), []
    monkeypatch.setattr("fedsim.federation.engines.local.time", clock)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(message.metadata.dst_node_id)
        clock.sleep(100.0)
        return Message(RecordDict(), reply_to=message)

    grid = LocalGrid(app, num_nodes=4)
    messages = [
        Message(RecordDict(), node, "train", ttl=ttl)
        for node, ttl in ((2, 10.0), (3, 90.0), (4, 150.0), (5, 150.0))
    ]
    clock.sleep(30.0)
    # Clients run one after another here; what one works is not the time of those that wait.
    replies = list(grid.send_and_receive(messages))
    assert codes(replies) == [MESSAGE_UNAVAILABLE, MESSAGE_UNAVAILABLE, None, None]
    assert [reply.metadata.src_node_id for reply in replies] == [1, 1, 4, 5]
    assert [reply.metadata.reply_to_message_id for reply in replies] == [
        message.metadata.message_id for message in messages
    ]
    assert seen == [3, 4, 5]


def test_a_message_expires_while_nobody_pulls_its_reply(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("fedsim.federation.engines.local.time", clock)
    grid = LocalGrid(toy_app(), num_nodes=2)
    first, second = grid.push_messages(ask(grid, 2, 3))
    assert codes(grid.pull_messages([first])) == [None]
    clock.sleep(10**6)
    assert codes(grid.pull_messages([second])) == [MESSAGE_UNAVAILABLE]


def test_a_message_that_could_never_arrive_is_refused():
    grid = LocalGrid(toy_app(), num_nodes=1)
    message = Message(RecordDict(), 2, "train", ttl=-1.0)
    with pytest.raises(FedsimError, match="ttl"):
        grid.push_messages([message])


def test_messages_replies_and_contexts_have_the_run_of_their_grid():
    seen = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append((message.metadata.run_id, context.run_id))
        return Message(RecordDict(), reply_to=message)

    LocalGrid(app, num_nodes=1, run_id=5)
    grid = LocalGrid(app, num_nodes=1, run_id=6)
    (first,) = grid.send_and_receive(ask(grid, 2))
    grid.set_run(empty_run(7))
    (second,) = grid.send_and_receive(ask(grid, 2))
    assert seen == [(6, 6), (7, 7)]
    assert [first.metadata.run_id, second.metadata.run_id] == [6, 7]


@pytest.mark.parametrize("forged", ["_reply_to_message_id", "_src_node_id", "_run_id"])
def test_a_reply_to_another_message_or_in_anothers_name_is_not_taken(forged):
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = Message(RecordDict(), reply_to=message)
        reply.metadata.__dict__[forged] = "0" * 16 if forged == "_reply_to_message_id" else 3
        return reply

    grid = LocalGrid(app, num_nodes=2)
    (reply,) = grid.send_and_receive(ask(grid, 2))
    assert reply.error.code == CLIENT_RAISED
    assert reply.metadata.src_node_id == 2


def test_a_client_that_exits_ends_nobody_else():
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sys.exit("enough")

    grid = LocalGrid(app, num_nodes=2)
    assert codes(grid.send_and_receive(ask(grid, 2, 3))) == [CLIENT_RAISED] * 2


def test_threads_that_send_at_once_have_their_clients_one_after_another():
    app, at_work, most = ClientApp(), [], []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        at_work.append(context.node_id)
        most.append(len(at_work))
        time.sleep(0.02)  # in which another thread would begin
        at_work.remove(context.node_id)
        return Message(message.content, reply_to=message)

    grid = LocalGrid(app, num_nodes=4)
    with ThreadPoolExecutor(4) as pool:
        sent = pool.map(lambda node: grid.send_and_receive(ask(grid, node)), (2, 3, 4, 5))
        assert [reply.metadata.src_node_id for (reply,) in sent] == [2, 3, 4, 5]
    assert most == [1] * 4


def test_the_run_can_be_set_and_messages_created():
    grid = LocalGrid(toy_app(), num_nodes=1)
    grid.set_run(empty_run(77))
    assert grid.run.run_id == 77
    message = grid.create_message(RecordDict(), "train", 2, "3", ttl=9.0)
    assert (message.metadata.dst_node_id, message.metadata.group_id) == (2, "3")


@pytest.mark.parametrize("num_nodes", [None, 0])
def test_an_app_needs_a_number_of_nodes(num_nodes):
    with pytest.raises(FedsimError, match="num_nodes"):
        LocalGrid(toy_app(), num_nodes=num_nodes)


def test_a_trainer_cannot_have_more_nodes_than_clients():
    with pytest.raises(FedsimError, match="population, 7"):
        LocalGrid(ToyTrainer(), num_nodes=8)


@pytest.mark.parametrize("strategy", [FedAvg, FedAdam, Krum])
def test_flowers_own_strategies_run_unchanged_and_reproducibly(strategy):
    def run() -> list[bytes]:
        random.seed(3)
        grid = LocalGrid(toy_app(), num_nodes=6)
        chosen = strategy(fraction_train=0.5, fraction_evaluate=0.5)
        result = chosen.start(grid, ArrayRecord([np.zeros((2, 2))]), num_rounds=3)
        assert len(result.train_metrics_clientapp) == 3
        return [array.numpy().tobytes() for array in result.arrays.values()]

    # The evaluation handler of the toy app reads "w"; its failures must not end the run.
    assert run() == run()


def test_fedavg_gives_the_weighted_mean_of_its_clients():
    grid = LocalGrid(toy_app(), num_nodes=3)
    start = array_record({"w": torch.zeros(2, dtype=torch.float64)})
    result = FedAvg().start(grid, start, num_rounds=1)
    # Client k of 0, 1, 2 answers k / 2 with weight k + 1: (0 + 2 * 0.5 + 3 * 1) / 6.
    assert result.arrays["w"].numpy() == pytest.approx([4 / 6, 4 / 6])
    assert result.evaluate_metrics_clientapp[1]["loss"] > 0


def test_a_server_app_runs_on_it():
    grid = LocalGrid(toy_app(), num_nodes=3)
    app = ServerApp()
    found = {}

    @app.main()
    def main(grid, context: Context) -> None:
        found["nodes"] = list(grid.get_node_ids())
        found["result"] = FedAvg().start(grid, array_record({"w": torch.zeros(2)}), num_rounds=2)

    app(grid, Context(1, 0, {}, RecordDict(), {}))
    assert found["nodes"] == grid.get_node_ids()
    assert found["result"].arrays["w"].shape == (2,)


def test_instructions_to_a_trainer_come_back_as_lazy_blocks():
    trainer = ToyTrainer()
    grid = LocalGrid(trainer)
    replies = grid.send_and_receive(toy_instructions([0, 2, 4, 5], grid))
    assert trainer.calls == []
    first = next(replies.blocks())
    assert trainer.calls == [[0, 2, 4]]
    assert first.client_ids.tolist() == [0, 2, 4]


@pytest.mark.parametrize("block_size", [1, 2, 100])
def test_the_block_size_does_not_change_a_byte(block_size):
    def rows(size: int) -> bytes:
        grid = LocalGrid(ToyTrainer(block_size=size))
        blocks = grid.send_and_receive(toy_instructions([0, 1, 3, 4, 6], grid)).blocks()
        return torch.cat([block.rows for block in blocks]).numpy().tobytes()

    assert rows(block_size) == rows(3)


def test_what_is_not_consumed_is_finished_before_the_next_send():
    trainer = ToyTrainer()
    grid = LocalGrid(trainer)
    grid.send_and_receive(toy_instructions([0, 1, 2, 3], grid))
    list(grid.send_and_receive(toy_instructions([5], grid, message_type="evaluate")).blocks())
    assert trainer.calls == [[0, 1, 2], [3], [5]]


@pytest.mark.parametrize("raising", [{0}, {2}, {1, 2}, {6}, {0, 1, 2, 3, 4, 5, 6}])
def test_only_the_clients_that_raise_fail_and_the_others_keep_their_bytes(raising):
    trainer = ToyTrainer(raising=frozenset(raising))
    grid = LocalGrid(trainer)
    sent = toy_instructions(list(range(7)), grid)
    got = {}
    for block in grid.send_and_receive(sent).blocks():
        for index, client in enumerate(block.client_ids.tolist()):
            assert block.ok[index] == (client not in raising)
            got[client] = block.rows[index] if block.ok[index] else None
    assert list(got) == list(range(7))
    for client, row in got.items():
        if client not in raising:
            assert torch.equal(row, trainer.row(sent.vector, client, 1))


def test_blocks_read_as_messages_hold_the_clients_own_parameters():
    trainer = ToyTrainer(raising=frozenset({3}))
    grid = LocalGrid(trainer)
    sent = toy_instructions([1, 3], grid)
    good, bad = grid.send_and_receive(sent)
    expected = (sent.vector + trainer.row(sent.vector, 1, 1)).reshape(2, 2)
    assert torch.equal(tensors(good.content["arrays"])["w"], expected)
    assert good.content["metrics"]["num-examples"] == 2
    assert good.metadata.src_node_id == grid.client_ids()[1]
    assert bad.has_error()


def test_instructions_to_an_ordinary_app_are_messages():
    grid = LocalGrid(toy_app(), num_nodes=3)
    replies = grid.send_and_receive(toy_instructions([0, 2], grid))
    assert [reply.content["metrics"]["num-examples"] for reply in replies] == [1, 3]


def test_instructions_stay_lazy_as_messages():
    grid = LocalGrid(ToyTrainer())
    (message,) = toy_instructions([1], grid)
    assert "_data" not in message.content["arrays"]["w"].__dict__


def test_instructions_are_the_same_messages_however_often_they_are_read():
    # Flower's HttpGrid sets the ids in one pass and sends in another.
    instructions = toy_instructions([1, 2], LocalGrid(ToyTrainer()))
    assert [id(m) for m in instructions] == [id(m) for m in instructions]
