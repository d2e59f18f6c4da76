from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
import stat
import tomllib

import pytest
import yaml
from cryptography import x509

from fedsim.deploy import certificates
from fedsim.deploy import services as module
from fedsim.deploy.federation import CONNECTION, Federation
from fedsim.deploy.services import Node, SuperLink
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
        "node-0/node.toml": 0o644,
        "node-0/superexec.secret": 0o600,
        "node-1/ca.crt": 0o644,
        "node-1/node.key": 0o600,
        "node-1/node.toml": 0o644,
        "node-1/superexec.secret": 0o600,
        "operator/ca.crt": 0o644,
        "operator/config.toml": 0o644,
        "operator/credentials.yaml": 0o600,
        "operator/ledger.pub": 0o644,
        "operator/node-0.pub": 0o644,
        "operator/node-1.pub": 0o644,
        "superlink/ca.crt": 0o644,
        "superlink/clients.toml": 0o644,
        "superlink/ledger.key": 0o600,
        "superlink/operator.sha256": 0o644,
        "superlink/server.key": 0o600,
        "superlink/server.pem": 0o644,
        "superlink/superexec.secret": 0o600,
        "superlink/superlink.toml": 0o644,
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


def test_the_operator_reaches_the_superlink_on_loopback_and_knows_its_authority(made):
    home = tomllib.loads((made.operator / "config.toml").read_text())["superlink"]
    assert home["default"] == CONNECTION
    assert home[CONNECTION] == {
        "address": "127.0.0.1:8000",
        "root-certificates": str(made.operator / "ca.crt"),
    }


def test_a_directory_is_made_into_a_federation_once(made):
    with pytest.raises(FedsimError, match="already contains a federation"):
        Federation.create(made.directory)


def test_what_is_no_federation_is_refused(tmp_path):
    with pytest.raises(FedsimError, match="fedsim deploy init"):
        Federation.load(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        ({"hosts": []}, "--host is missing"),
        ({"hosts": ["a", "b:9092"]}, "--host is 'b:9092'; it must be"),
        ({"hosts": ["https://a"]}, "--host is 'https://a'"),
        ({"hosts": ["\u00fcber"]}, "--host is '\u00fcber'"),
        ({"hosts": [""]}, "--host is ''"),
        ({"port": 70000}, "--port is 70000"),
        ({"fleet_port": 0}, "--fleet-port is 0"),
        ({"port": 9092}, "both 9092"),
        ({"days": 0}, "--days is 0"),
        ({"days": 10**8}, "--days is 100000000"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(tmp_path, wrong, sentence):
    with pytest.raises(FedsimError, match=re.escape(sentence)):
        Federation.create(tmp_path / "x", **wrong)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["runs", "node-1", "operator"])
def test_a_directory_with_files_of_a_federations_names_is_left_alone(tmp_path, name):
    """It was made into half a federation, which could be neither used nor completed."""
    (tmp_path / name).mkdir()
    mode = tmp_path.stat().st_mode
    with pytest.raises(FedsimError, match=f"contains '{name}'"):
        Federation.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert tmp_path.stat().st_mode == mode


@pytest.mark.parametrize("is_new", [True, False])
def test_a_disk_that_is_full_at_any_file_leaves_nothing_of_a_federation(
    tmp_path, monkeypatch, is_new
):
    directory = tmp_path / "fed"
    replace, written = certificates.durable.replace, []

    def fill(federation):
        certificates.write_private(federation.node(1) / "data.npz", b"examples")

    def counted(path, *arguments, **options):
        if len(written) == capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
        written.append(path)
        replace(path, *arguments, **options)

    monkeypatch.setattr(certificates.durable, "replace", counted)
    if not is_new:
        directory.mkdir()
        (directory / "mine").touch()
    capacity = 0
    while True:
        written.clear()
        try:
            Federation.create(directory, nodes=2, fill=fill)
        except OSError:
            assert directory.exists() is not is_new
            assert is_new or [path.name for path in directory.iterdir()] == ["mine"]
            capacity += 1
        else:
            break
    assert written[-2:] == [directory / "node-1" / "data.npz", directory / "federation.toml"]


def test_a_directory_that_no_toml_file_can_name_is_refused(tmp_path):
    with pytest.raises(FedsimError, match="is not valid UTF-8"):
        Federation.create(tmp_path / "fed\udcff")
    assert not list(tmp_path.iterdir())


def test_a_certificate_may_be_for_a_long_name_or_an_address(tmp_path):
    long = f"{'a' * 60}.{'b' * 60}.example.org"
    for number, host in enumerate((long, "::1", "10.0.0.1")):
        federation = Federation.create(tmp_path / str(number), hosts=[host], nodes=1)
        assert (federation.superlink / "server.pem").is_file()


def test_the_server_knows_the_operators_token_by_its_digest_only(made):
    store = yaml.safe_load((made.operator / "credentials.yaml").read_text())
    token = base64.b64decode(store["flower.account-auth.127.0.0.1:8000.oidc-access-token"]).decode()
    digest = (made.superlink / "operator.sha256").read_text()
    assert digest == hashlib.sha256(token.encode()).hexdigest()
    assert len(token) >= 32


def services(federation, state):
    link = SuperLink.load(federation.superlink).services(state / "s", host="0.0.0.0")
    return link, Node.load(federation.node(1)).services(state / "n")


def words(services, name):
    (service,) = (service for service in services if service.name == name)
    return list(service.command)


def test_tls_authentication_and_isolation_are_on_unless_switched_off(made, tmp_path):
    link, node = services(made, tmp_path)
    assert {"--enable-supernode-auth", "--ssl-certfile"} <= set(words(link, "superlink"))
    assert "fedsim.deploy.flower_programs" in words(link, "superlink")
    supernode = words(node, "supernode-1")
    assert {"--root-certificates", "--auth-supernode-private-key"} <= set(supernode)
    for command in (words(link, "superlink"), supernode):
        assert command[command.index("--isolation") + 1] == "process"
        assert "--superexec-auth-secret-file" in command
        assert "--insecure" not in command
    open_ = Federation.create(tmp_path / "open", insecure=True)
    assert not (open_.directory / "authority").exists()
    for service in [*services(open_, tmp_path)[0][:2], services(open_, tmp_path)[1][0]]:
        assert "--insecure" in service.command
        assert not any("ssl" in word or "auth-supernode" in word for word in service.command)


@pytest.mark.parametrize("grpc", [True, False])
def test_only_what_nodes_need_listens_outside_whatever_the_installed_flower(
    made, tmp_path, monkeypatch, grpc
):
    monkeypatch.setattr(module, "speaks_grpc", lambda: grpc)
    link, node = services(made, tmp_path)
    superlink = words(link, "superlink")
    assert superlink[superlink.index("--host") + 1] == "127.0.0.1"
    outside = [service.name for service in link if any("0.0.0.0" in w for w in service.command)]
    assert outside == (["superlink"] if grpc else ["fleet-proxy"])
    if grpc:
        assert superlink[superlink.index("--fleet-api-address") + 1] == "0.0.0.0:9092"
    supernode = words(node, "supernode-1")
    assert ("--grpc-rere" in supernode) == grpc
    assert supernode[supernode.index("--superlink") + 1] == "superlink:9092"
    assert supernode[supernode.index("--host") + 1] == "127.0.0.1"


def test_no_secret_is_among_the_words_that_everybody_on_a_machine_can_read(made, tmp_path):
    link, node = services(made, tmp_path)
    store = yaml.safe_load((made.operator / "credentials.yaml").read_text())
    secrets = [path.read_text().strip() for path in made.directory.rglob("superexec.secret")]
    secrets += [base64.b64decode(value).decode() for value in store.values()]
    secrets = [secret for secret in secrets if len(secret) > 16]
    assert len(secrets) == 4
    for service in [*link, *node]:
        said = " ".join([*service.command, *service.variables.values()])
        assert not any(secret in said for secret in secrets)


def test_a_party_that_was_edited_wrongly_is_refused(made):
    path = made.node(0) / "node.toml"
    path.write_text(path.read_text() + "sekure = true\n")
    with pytest.raises(FedsimError, match="'sekure'"):
        Node.load(made.node(0))
    with pytest.raises(FedsimError, match="fedsim deploy init"):
        SuperLink.load(made.node(0))
