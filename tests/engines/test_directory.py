from __future__ import annotations

import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from toy_clients import ToyTrainer, toy_app

from fedsim.engines import ClientDirectory, LocalGrid, client_ids
from fedsim.engines.messages import NODE_UNAVAILABLE, error_reply
from fedsim.errors import FedsimError


class RandomNodes(LocalGrid):
    """A grid that does not know its clients: node ids are shuffled, some nodes are silent."""

    client_ids = None  # it must be asked

    def __init__(self, app, *, nodes, silent=(), unavailable=()):
        super().__init__(app, num_nodes=max(nodes) + 1)
        self.nodes = list(nodes)
        self.silent = set(silent)
        self.unavailable = set(unavailable)
        self.asked = []

    def get_node_ids(self):
        return self.nodes

    def push_messages(self, messages):
        messages = list(messages)
        self.asked += [message.metadata.dst_node_id for message in messages]
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        heard = []
        for message_id in message_ids:
            message = self._pushed.get(message_id)
            if message is None or message.metadata.dst_node_id in self.silent:
                continue
            if message.metadata.dst_node_id in self.unavailable:
                heard.append(error_reply(self._pushed.pop(message_id), NODE_UNAVAILABLE, "gone"))
            else:
                heard += super().pull_messages([message_id])
        return heard


def app_claiming(claims) -> ClientApp:
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        record = MetricRecord({"client-id": claims[context.node_id]})
        return Message(RecordDict({"client": record}), reply_to=message)

    return app


def test_nodes_say_which_clients_they_are():
    grid = RandomNodes(app_claiming({9: 2, 4: 0, 7: 1}), nodes=[9, 4, 7])
    assert client_ids(grid) == {0: 4, 1: 7, 2: 9}


def test_a_local_grid_answers_without_messages():
    assert client_ids(LocalGrid(ToyTrainer(population=3))) == {0: 2, 1: 3, 2: 4}
    assert client_ids(LocalGrid(toy_app(), num_nodes=2)) == {0: 2, 1: 3}


def test_a_node_is_asked_once():
    grid = RandomNodes(app_claiming({4: 0, 7: 1, 9: 2}), nodes=[4, 7])
    directory = ClientDirectory()
    assert directory.look(grid) == {0: 4, 1: 7}
    grid.nodes = [7, 9]
    directory.look(grid)
    assert directory.look(grid) == {1: 7, 2: 9}
    assert grid.asked == [4, 7, 9]


def test_two_nodes_that_claim_one_id_are_refused():
    grid = RandomNodes(app_claiming({4: 1, 7: 1}), nodes=[4, 7])
    with pytest.raises(FedsimError, match="nodes 4 and 7 both claim client id 1"):
        client_ids(grid)


def test_a_node_that_comes_back_under_another_node_id_keeps_its_client_id():
    grid = RandomNodes(app_claiming({4: 0, 7: 1, 9: 1}), nodes=[4, 7])
    directory = ClientDirectory()
    directory.look(grid)
    grid.nodes = [4, 9]
    directory.look(grid)
    assert directory.look(grid) == {0: 4, 1: 9}


def test_a_negative_claim_is_refused():
    with pytest.raises(FedsimError, match="client id -3"):
        client_ids(RandomNodes(app_claiming({4: -3}), nodes=[4]))


def test_apps_without_a_query_handler_are_known_by_sorted_node_id():
    grid = RandomNodes(toy_app(), nodes=[9, 4, 7])
    directory = ClientDirectory()
    assert directory.look(grid) == {0: 4, 1: 7, 2: 9}
    grid.nodes = [9, 4, 7, 3]
    directory.look(grid)
    assert directory.look(grid) == {0: 4, 1: 7, 2: 9, 3: 3}


def test_a_silent_node_costs_one_wait_and_is_left_out():
    grid = RandomNodes(app_claiming({4: 0, 7: 1}), nodes=[4, 7], silent=[7])
    directory = ClientDirectory(timeout=0.2)
    assert directory.look(grid) == {0: 4}
    directory.timeout = 1e9  # nobody waits for it again, or this would never end
    assert directory.look(grid) == {0: 4}
    grid.silent.clear()
    assert directory.look(grid) == {0: 4, 1: 7}
    assert grid.asked == [4, 7]


def test_an_unavailable_node_is_asked_again():
    grid = RandomNodes(app_claiming({4: 0, 7: 1}), nodes=[4, 7], unavailable=[7])
    directory = ClientDirectory(timeout=0.2)
    assert directory.look(grid) == {0: 4}
    grid.unavailable.clear()
    directory.look(grid)
    assert directory.look(grid) == {0: 4, 1: 7}


def test_waiting_for_clients_is_bounded():
    grid = RandomNodes(app_claiming({4: 0}), nodes=[4])
    directory = ClientDirectory(timeout=0.3)
    assert directory.wait(grid, 1) == {0: 4}
    with pytest.raises(FedsimError, match=r"1 clients were there after 0\.3 s; the run needs 2"):
        directory.wait(grid, 2)
