from __future__ import annotations

import hashlib

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from toy_clients import ToyTrainer, toy_app

from fedsim.cohorts import CyclicCohort, FullCohort
from fedsim.engines import ClientDirectory, LocalGrid, StreamingGrid, array_record, client_ids
from fedsim.errors import FedsimError
from fedsim.federation.engines.directory import key_digest
from fedsim.federation.flower_internals import NODE_UNAVAILABLE, NodeInfo, error_reply
from fedsim.federation.round_report import failures_in
from fedsim.mechanisms import Clipping
from fedsim.strategies import DPFedAvg


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
    directory = ClientDirectory(asks_nodes=True)
    assert directory.connected_clients(grid) == {0: 4, 1: 7}
    grid.nodes = [7, 9]
    directory.connected_clients(grid)
    assert directory.connected_clients(grid) == {1: 7, 2: 9}
    assert grid.asked == [4, 7, 9]


def test_of_two_nodes_that_claim_one_id_neither_is_believed():
    grid = RandomNodes(app_claiming({4: 1, 7: 1, 9: 0}), nodes=[4, 7, 9])
    directory = ClientDirectory(asks_nodes=True)
    assert directory.connected_clients(grid) == {0: 9}
    assert directory.ignored == {"duplicate claim": 2}


def test_a_node_that_comes_back_under_another_node_id_keeps_its_client_id():
    grid = RandomNodes(app_claiming({4: 0, 7: 1, 9: 1}), nodes=[4, 7])
    directory = ClientDirectory(asks_nodes=True)
    directory.connected_clients(grid)
    grid.nodes = [4, 9]
    directory.connected_clients(grid)
    assert directory.connected_clients(grid) == {0: 4, 1: 9}


@pytest.mark.parametrize("claim", [-3, 0.5, 2**63])
def test_a_claim_that_is_no_client_id_is_ignored_and_counted(claim):
    directory = ClientDirectory(asks_nodes=True)
    assert directory.connected_clients(
        RandomNodes(app_claiming({4: claim, 7: 1}), nodes=[4, 7])
    ) == {1: 7}
    assert directory.ignored == {"bad claim": 1}


class KeyedNodes(RandomNodes):
    """A grid whose nodes have registered keys, and say something else when they are asked."""

    def __init__(self, keys):
        super().__init__(app_claiming(dict.fromkeys(keys, 0)), nodes=list(keys))
        self.keys = keys

    def get_nodes(self):
        return [NodeInfo(node_id=node, public_key=key) for node, key in self.keys.items()]


@pytest.fixture(scope="module")
def keys():
    return [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(4)]


def pem(key):
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_a_registered_key_is_the_client_that_the_roster_says_and_nobody_is_asked(keys):
    grid = KeyedNodes({9: pem(keys[0]), 4: pem(keys[1])})
    directory = ClientDirectory(roster={key_digest(pem(keys[0])): 5, key_digest(pem(keys[1])): 2})
    assert directory.connected_clients(grid) == {2: 4, 5: 9}
    assert grid.asked == []


def test_unlisted_duplicate_and_missing_keys_are_ignored_and_counted(keys):
    listed, twice, unlisted, _ = (pem(key) for key in keys)
    grid = KeyedNodes({4: listed, 5: unlisted, 6: twice, 7: twice, 8: b"", 9: b"garbage"})
    directory = ClientDirectory(roster={key_digest(listed): 0, key_digest(twice): 1})
    assert directory.connected_clients(grid) == {0: 4}
    assert directory.ignored == {"duplicate key": 2, "no key": 2, "unlisted key": 1}


def test_a_key_has_one_digest_however_it_is_written(keys):
    ssh = keys[0].public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    der = keys[0].public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert key_digest(ssh) == key_digest(pem(keys[0])) == hashlib.sha256(der).hexdigest()


def test_apps_without_a_query_handler_are_known_by_sorted_node_id():
    grid = RandomNodes(toy_app(), nodes=[9, 4, 7])
    directory = ClientDirectory(asks_nodes=True)
    assert directory.connected_clients(grid) == {0: 4, 1: 7, 2: 9}
    grid.nodes = [9, 4, 7, 3]
    directory.connected_clients(grid)
    assert directory.connected_clients(grid) == {0: 4, 1: 7, 2: 9, 3: 3}


def test_apps_of_other_people_are_numbered_and_never_asked():
    grid = RandomNodes(app_claiming({4: 9, 7: 9, 9: 9}), nodes=[9, 4, 7])
    directory = ClientDirectory()
    assert directory.connected_clients(grid) == {0: 4, 1: 7, 2: 9}
    grid.nodes = [9, 7, 3]
    assert directory.connected_clients(grid) == {1: 7, 2: 9, 3: 3}
    assert grid.asked == []


def test_a_silent_node_costs_one_wait_and_is_left_out():
    grid = RandomNodes(app_claiming({4: 0, 7: 1}), nodes=[4, 7], silent=[7])
    directory = ClientDirectory(timeout=0.2, asks_nodes=True)
    assert directory.connected_clients(grid) == {0: 4}
    directory.timeout = 1e9  # nobody waits for it again, or this would never end
    assert directory.connected_clients(grid) == {0: 4}
    grid.silent.clear()
    assert directory.connected_clients(grid) == {0: 4, 1: 7}
    assert grid.asked == [4, 7]


def test_an_unavailable_node_is_asked_again():
    grid = RandomNodes(app_claiming({4: 0, 7: 1}), nodes=[4, 7], unavailable=[7])
    directory = ClientDirectory(timeout=0.2, asks_nodes=True)
    assert directory.connected_clients(grid) == {0: 4}
    grid.unavailable.clear()
    directory.connected_clients(grid)
    assert directory.connected_clients(grid) == {0: 4, 1: 7}


def test_waiting_for_clients_is_bounded():
    grid = RandomNodes(app_claiming({4: 0}), nodes=[4])
    directory = ClientDirectory(timeout=0.3, asks_nodes=True)
    assert directory.wait(grid, 1) == {0: 4}
    with pytest.raises(
        FedsimError,
        match=r"1 of the 2 clients .* 0\.3 s \(1 nodes .*; engine\.node-timeout",
    ):
        directory.wait(grid, 2)


def test_ignored_nodes_stand_in_the_report_and_end_no_run(keys):
    listed, unlisted, *_ = (pem(key) for key in keys)
    grid = KeyedNodes({4: listed, 5: unlisted, 6: b""})
    made = DPFedAvg(mechanism=Clipping(1.0), cohort=FullCohort(1), noise_multiplier=1.0)
    roster = {key_digest(listed): 0}
    made.start(StreamingGrid(grid, roster=roster), array_record({"w": torch.zeros(2)}), 1)
    assert made.report.row()["ignored-nodes"] == 2
    assert failures_in([made.report.row()]).endswith(
        "Up to 2 nodes at once were ignored (ignored-nodes in metrics.csv); the log says why."
    )


def test_who_claims_an_id_beyond_the_population_is_ignored_and_ends_no_run():
    grid = RandomNodes(app_claiming({4: 0, 7: 5, 9: 2**40}), nodes=[4, 7, 9])
    made = DPFedAvg(mechanism=Clipping(1.0), cohort=FullCohort(2), noise_multiplier=1.0)
    streaming = StreamingGrid(grid, clients=2, patience=0.0)
    made.start(streaming, array_record({"w": torch.zeros(2)}), 1)
    assert streaming.ignored == {"bad claim": 2}
    assert made.report.row()["ignored-nodes"] == 2


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("cohort", "again"), [(CyclicCohort(2, population=4), False), (FullCohort(4), True)]
)
def test_a_restarted_node_gets_no_rounds_of_a_second_client_where_they_are_limited(
    cohort, again, streams, caplog
):
    """It was sampled in both groups of a cycle, and charged for one."""
    trained: list[int] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained.append(context.node_id)
        return Message(message.content, reply_to=message)

    grid = RandomNodes(app, nodes=[3, 4, 5])
    strategy = DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=1.0, cohort=cohort, seed=3)

    def restart(server_round: int, _) -> None:
        grid.nodes = [6, 4, 5]

    used = StreamingGrid(grid, clients=3) if streams else grid
    strategy.start(used, array_record({"w": torch.zeros(2)}), 4, on_round=restart)
    assert (6 in trained) == again
    assert ("1 for late arrival" in caplog.text) != again
