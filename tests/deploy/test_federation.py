from __future__ import annotations

import stat
import tomllib

import pytest
from cryptography import x509

from fedsim.deploy import federation as module
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.errors import FedsimError


@pytest.fixture
def made(tmp_path):
    return Federation.create(tmp_path / "fed", hosts=["superlink", "10.0.0.1"], nodes=2)


def modes(federation):
    return {
        str(path.relative_to(federation.directory)): stat.S_IMODE(path.stat().st_mode)
        for path in sorted(federation.directory.rglob("*"))
        if path.is_file()
    }


def test_each_party_gets_its_own_files_with_the_right_permissions(made):
    assert modes(made) == {
        "authority/ca.crt": 0o644,
        "authority/ca.key": 0o600,
        "federation.toml": 0o644,
        "node-0/ca.crt": 0o644,
        "node-0/node.key": 0o600,
        "node-1/ca.crt": 0o644,
        "node-1/node.key": 0o600,
        "operator/ca.crt": 0o644,
        "operator/config.toml": 0o644,
        "operator/node-0.pub": 0o644,
        "operator/node-1.pub": 0o644,
        "superlink/ca.crt": 0o644,
        "superlink/clients.toml": 0o644,
        "superlink/server.key": 0o600,
        "superlink/server.pem": 0o644,
    }


def test_a_federation_is_read_back_as_it_was_made(made):
    assert Federation.load(made.directory) == made


def test_the_server_is_known_under_its_names_and_to_its_own_apps_on_loopback(made):
    pem = (made.directory / "superlink" / "server.pem").read_bytes()
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["superlink", "localhost"]
    assert [str(ip) for ip in names.value.get_values_for_type(x509.IPAddress)] == [
        *("10.0.0.1", "127.0.0.1"),
    ]


def test_the_operator_knows_the_superlink_and_its_authority(made):
    home = tomllib.loads((made.operator / "config.toml").read_text())["superlink"]
    assert home["default"] == CONNECTION
    assert home[CONNECTION] == {
        "address": "superlink:8000",
        "root-certificates": str(made.operator / "ca.crt"),
    }


def test_a_directory_is_made_into_a_federation_once(made):
    with pytest.raises(FedsimError, match="already holds a federation"):
        Federation.create(made.directory)


def test_what_is_no_federation_is_refused(tmp_path):
    with pytest.raises(FedsimError, match="fedsim deploy init"):
        Federation.load(tmp_path)


@pytest.mark.parametrize(("nodes", "hosts"), [(0, ["a"]), (2, [])])
def test_a_federation_needs_nodes_and_a_name(tmp_path, nodes, hosts):
    with pytest.raises(FedsimError, match=r"--nodes|--host"):
        Federation.create(tmp_path / "x", nodes=nodes, hosts=hosts)
    assert not (tmp_path / "x").exists()


def test_tls_and_authentication_are_on_unless_switched_off(made, tmp_path):
    link, node = made.superlink_command(), made.supernode_command(1)
    assert {"--enable-supernode-auth", "--ssl-certfile", "--ssl-keyfile"} <= set(link)
    assert {"--root-certificates", "--auth-supernode-private-key"} <= set(node)
    assert "--insecure" not in [*link, *node]
    open_ = Federation.create(tmp_path / "open", insecure=True)
    assert not (open_.directory / "authority").exists()
    for command in (open_.superlink_command(), open_.supernode_command(0)):
        assert "--insecure" in command
        assert not any("ssl" in word or "auth" in word for word in command)


@pytest.mark.parametrize(("grpc", "port"), [(True, 9092), (False, 8000)])
def test_the_transport_follows_the_installed_flower(made, monkeypatch, grpc, port):
    monkeypatch.setattr(module, "speaks_grpc", lambda: grpc)
    link, node = made.superlink_command(), made.supernode_command(0)
    assert ("--fleet-api-address" in link) == grpc
    assert ("--grpc-rere" in node) == grpc
    assert node[node.index("--superlink") + 1] == f"superlink:{port}"


def test_a_node_with_a_file_of_its_own_loads_that(made):
    def node_config(node):
        command = made.supernode_command(node)
        return command[command.index("--node-config") + 1]

    (made.node(1) / "data.npz").write_bytes(b"")
    assert node_config(0) == "partition-id=0 num-partitions=2"
    assert node_config(1) == f'partition-id=1 num-partitions=2 data="{made.node(1)}/data.npz"'
