from __future__ import annotations

import time

import httpx
import pytest
import torch
from flwr.app import RecordDict
from flwr.server.utils.validator import validate_message
from flwr.serverapp.strategy import FedAvg
from test_directory import RandomNodes, app_claiming
from toy_clients import toy_app, toy_instructions

from fedsim.engines import LocalGrid, StreamingGrid, array_record, client_ids
from fedsim.federation.flower_internals import ObjectPushError, empty_run
from fedsim.strategies import round_timeout


class LateGrid(LocalGrid):
    """Replies one at a time, some of them never."""

    def __init__(self, app, *, num_nodes, never=()):
        super().__init__(app, num_nodes=num_nodes)
        self.never = set(never)
        self.ttls = []

    def push_messages(self, messages):
        assert isinstance(messages, list)
        self.ttls += [message.metadata.ttl for message in messages]
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        for message_id in message_ids:
            message = self._pushed.get(message_id)
            if message and message.metadata.dst_node_id not in self.never:
                return super().pull_messages([message_id])
        return []


def test_replies_are_given_one_by_one_as_they_come():
    grid = LateGrid(toy_app(), num_nodes=4)
    replies = StreamingGrid(grid).send_and_receive(toy_instructions([0, 1, 2, 3], grid))
    next(iter(replies))
    assert len(grid._pushed) == 3
    assert len(list(replies)) == 3


class ForgetfulGrid(LocalGrid):
    """Fails as Flower's do whose SuperLink has begun anew while it was being sent messages."""

    left = 0

    def push_messages(self, messages):
        self.sent = [*getattr(self, "sent", []), messages]
        if self.left:
            self.left -= 1
            raise ObjectPushError("1170", 1, "session")
        return super().push_messages(messages)


def test_messages_that_a_superlink_forgets_are_sent_once_more(caplog):
    forgetful = ForgetfulGrid(toy_app(), num_nodes=3)
    grid, forgetful.left = StreamingGrid(forgetful), 1
    with caplog.at_level("WARNING", "fedsim"):
        replies = list(grid.send_and_receive(toy_instructions([0, 1, 2], grid), timeout=5.0))
    assert sorted(reply.metadata.src_node_id for reply in replies) == [2, 3, 4]
    assert "3 messages did not reach their nodes; they are sent once more" in caplog.text
    # The same ones, whose ids are hashes of what they are: the SuperLink knows them again.
    first, second = forgetful.sent
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_messages_that_a_superlink_forgets_twice_are_clients_that_do_not_answer(caplog):
    forgetful = ForgetfulGrid(toy_app(), num_nodes=3)
    grid, forgetful.left = StreamingGrid(forgetful), 2
    with caplog.at_level("WARNING", "fedsim"):
        assert list(grid.send_and_receive(toy_instructions([0, 1, 2], grid), timeout=5.0)) == []
    assert "3 messages did not reach their nodes; these do not answer" in caplog.text
    replies = list(grid.send_and_receive(toy_instructions([0, 1, 2], grid), timeout=5.0))
    assert len(replies) == 3


class UnreachableGrid(LocalGrid):
    """Its SuperLink comes back after some seconds, and refuses messages as Flower's does."""

    outages: tuple[float, ...] = ()
    fault = ""

    def push_messages(self, messages):
        self.pushed = [*getattr(self, "pushed", []), [message.object_id for message in messages]]
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
        if self.outages:
            time.sleep(self.outages[0])
            self.outages = self.outages[1:]
        faults = [
            fault
            for message in messages
            for fault in validate_message(message, is_reply_message=False)
        ]
        if self.fault or faults:
            request = httpx.Request("POST", "http://127.0.0.1/v1/runtime/push-messages")
            answer = httpx.Response(400, request=request, text=self.fault or faults[0])
            raise httpx.HTTPStatusError(answer.text, request=request, response=answer)
        return super().push_messages(messages)


def test_messages_that_expire_while_the_superlink_is_away_are_renewed(caplog):
    unreachable = UnreachableGrid(toy_app(), num_nodes=3)
    grid, unreachable.outages = StreamingGrid(unreachable), (1.2,)
    with caplog.at_level("WARNING", "fedsim"):
        replies = list(grid.send_and_receive(toy_instructions([0, 1, 2], grid), timeout=1.0))
    assert sorted(reply.metadata.src_node_id for reply in replies) == [2, 3, 4]
    assert "they are sent once more: they have expired (engine.timeout)" in caplog.text
    # Under new ids: the SuperLink may have the others, and never gives them to a node.
    first, second = unreachable.pushed
    assert not {*first} & {*second}


def test_messages_that_expire_twice_are_clients_that_do_not_answer(caplog):
    unreachable = UnreachableGrid(toy_app(), num_nodes=3)
    grid, unreachable.outages = StreamingGrid(unreachable), (1.2, 1.2)
    with caplog.at_level("WARNING", "fedsim"):
        assert list(grid.send_and_receive(toy_instructions([0, 1, 2], grid), timeout=1.0)) == []
    assert "3 messages did not reach their nodes; these do not answer" in caplog.text
    assert len(list(grid.send_and_receive(toy_instructions([0, 1, 2], grid), timeout=1.0))) == 3


def test_messages_that_a_superlink_refuses_for_another_reason_end_the_run():
    unreachable = UnreachableGrid(toy_app(), num_nodes=3)
    grid, unreachable.fault = StreamingGrid(unreachable), "mismatched run_id"
    with pytest.raises(httpx.HTTPStatusError, match="mismatched run_id"):
        list(grid.send_and_receive(toy_instructions([0, 1, 2], grid), timeout=60.0))
    assert len(unreachable.pushed) == 1


def test_a_timeout_ends_the_wait_for_a_silent_node():
    grid = LateGrid(toy_app(), num_nodes=3, never={3})
    streaming = StreamingGrid(grid)
    replies = list(streaming.send_and_receive(toy_instructions([0, 1, 2], grid), timeout=0.5))
    assert sorted(reply.metadata.src_node_id for reply in replies) == [2, 4]


def test_what_has_come_in_time_is_taken_however_long_the_others_take_to_be_used():
    class Together(LocalGrid):
        """All replies are there from the first look on, and handed out one a look."""

        def pull_messages(self, message_ids):
            return super().pull_messages(list(message_ids)[:2])

    grid = Together(toy_app(), num_nodes=4)
    replies = StreamingGrid(grid).send_and_receive(
        toy_instructions([0, 1, 2, 3], grid), timeout=0.2
    )
    used = []
    for reply in replies:
        time.sleep(0.15)
        used.append(reply)
    assert len(used) == 4


def test_a_deadline_is_each_nodes_own_only_where_nodes_work_by_themselves():
    grid = LocalGrid(toy_app(), num_nodes=2)
    assert round_timeout(StreamingGrid(grid), 5.0, private=True) is None
    by_itself = StreamingGrid(grid, times_each_client=True)
    assert round_timeout(by_itself, 5.0, private=True) == 5.0


def test_messages_expire_with_the_round():
    grid = LateGrid(toy_app(), num_nodes=2)
    list(StreamingGrid(grid).send_and_receive(toy_instructions([0, 1], grid), timeout=7.0))
    assert grid.ttls == [7.0, 7.0]


def test_large_cohorts_are_sent_in_parts():
    grid = LocalGrid(toy_app(), num_nodes=150)
    replies = StreamingGrid(grid).send_and_receive(toy_instructions(list(range(150)), grid))
    assert len(list(replies)) == 150


def test_clients_are_known_through_it_and_waited_for():
    inner = RandomNodes(app_claiming({9: 1, 4: 0, 7: 2}), nodes=[9, 4])
    streaming = StreamingGrid(inner, clients=3, patience=0.3)
    assert client_ids(streaming) == {0: 4, 1: 9}
    inner.nodes = [9, 4, 7]
    streaming.client_ids()
    assert streaming.client_ids() == {0: 4, 1: 9, 2: 7}


def test_flowers_strategies_run_over_it():
    grid = StreamingGrid(LocalGrid(toy_app(), num_nodes=3))
    result = FedAvg().start(grid, array_record({"w": torch.zeros(2)}), num_rounds=2)
    assert len(result.train_metrics_clientapp) == 2


def test_the_rest_is_the_inner_grids():
    inner = LocalGrid(toy_app(), num_nodes=2)
    streaming = StreamingGrid(inner)
    streaming.set_run(empty_run(5))
    assert streaming.run.run_id == inner.run.run_id == 5
    assert streaming.get_node_ids() == inner.get_node_ids()
    assert list(streaming.get_nodes()) == inner.get_nodes()
    message = streaming.create_message(RecordDict(), "train", 2, "g")
    (message_id,) = streaming.push_messages(iter([message]))
    assert streaming.pull_messages([message_id])
