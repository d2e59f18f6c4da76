from __future__ import annotations

import pytest

from fedsim.apps.server_app import roster_for
from fedsim.config import RunConfig
from fedsim.deploy.federation import Federation
from fedsim.deploy.party_files import read_roster, write_roster
from fedsim.deploy.services import CLIENTS, TASK_POLL, Node, SuperLink
from fedsim.errors import FedsimError
from fedsim.federation.engines.directory import key_digest


def test_a_federation_lists_each_nodes_key_as_its_client(tmp_path):
    made = Federation.create(tmp_path / "fed", nodes=3)
    digests = [key_digest(made.public_key(node).read_bytes()) for node in range(3)]
    assert read_roster(made.roster) == {digest: node for node, digest in enumerate(digests)}


@pytest.mark.parametrize(
    "text",
    ["", "[clients]\nabc = 0", f'[clients]\n{"a" * 64} = "0"', f"[clients]\n{'a' * 64} = true"],
)
def test_what_is_no_roster_is_refused(tmp_path, text):
    path = tmp_path / "clients.toml"
    path.write_text(text)
    with pytest.raises(FedsimError):
        read_roster(path)


def test_two_keys_of_one_client_are_refused(tmp_path):
    write_roster(tmp_path / "clients.toml", {"a" * 64: 1, "b" * 64: 1})
    with pytest.raises(FedsimError, match="two keys the same client id"):
        read_roster(tmp_path / "clients.toml")


def config(engine):
    return RunConfig.parse({"engine": {"name": engine}})


@pytest.mark.parametrize("engine", ["deployment", "simulation", "local"])
def test_a_server_with_a_roster_asks_no_node_whatever_the_config_says(
    tmp_path, monkeypatch, engine
):
    write_roster(tmp_path / "clients.toml", {"a" * 64: 1})
    monkeypatch.setenv(CLIENTS, str(tmp_path / "clients.toml"))
    assert roster_for(config(engine)) == {"a" * 64: 1}


def test_a_deployment_without_a_roster_is_refused_unless_it_is_insecure(monkeypatch):
    monkeypatch.delenv(CLIENTS, raising=False)
    with pytest.raises(FedsimError, match="fedsim deploy superlink"):
        roster_for(config("deployment"))
    assert roster_for(config("simulation")) is None
    monkeypatch.setenv(CLIENTS, "")
    assert roster_for(config("deployment")) is None


def test_the_proxy_of_nodes_listens_where_they_are_told(tmp_path, monkeypatch):
    made = Federation.create(tmp_path / "fed", nodes=1)
    monkeypatch.setattr("fedsim.deploy.services.speaks_grpc", lambda: False)
    services = SuperLink.load(made.superlink).services(tmp_path / "state", host="192.0.2.7")
    assert [(s.host, s.port) for s in services if s.port] == [
        ("127.0.0.1", 8000),
        ("192.0.2.7", 9092),
    ]


def test_a_mistake_in_a_policy_or_a_roster_is_told_at_the_start(tmp_path):
    """The processes were up, and every task or run failed."""
    made = Federation.create(tmp_path / "fed", nodes=1)
    path = made.node(0) / "node.toml"
    path.write_text(path.read_text().replace("# [policy]", "[policy]\nleast-noise = 1.0"))
    with pytest.raises(FedsimError, match="policy has the key 'least-noise'"):
        Node.load(made.node(0))
    made.roster.write_text("clients = 3")
    with pytest.raises(FedsimError, match=r"clients\.toml is not a list of clients"):
        SuperLink.load(made.superlink).services(tmp_path / "state")
    made.roster.unlink()
    with pytest.raises(FedsimError, match=r"clients\.toml is not a list of clients"):
        SuperLink.load(made.superlink).services(tmp_path / "state")


@pytest.mark.parametrize("name", ["what?", "a%41b"])
def test_a_path_that_would_move_the_database_is_refused(tmp_path, name):
    made = Federation.create(tmp_path / name, nodes=1)
    with pytest.raises(FedsimError, match=r"must have no '\?' and no '%' in its path"):
        SuperLink.load(made.superlink).services(tmp_path / name / "state")
    assert SuperLink.load(made.superlink).services(tmp_path / "state")


@pytest.mark.parametrize(
    ("clients", "seconds"), [(2, "0.25"), (10, "0.25"), (20, "0.5"), (99, "1")]
)
def test_a_nodes_executor_looks_for_tasks_as_often_as_the_federations_size_allows(
    tmp_path, clients, seconds
):
    _, app = Node(tmp_path, "127.0.0.1:9092", 0, clients, insecure=True).services(tmp_path)
    assert app.variables[TASK_POLL] == seconds
