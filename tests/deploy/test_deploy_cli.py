from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from fedsim.cli import deploy as cli
from fedsim.cli.deploy import deploy
from fedsim.config import RunConfig
from fedsim.deploy.federation import Federation
from fedsim.deploy.policy import Policy
from fedsim.deploy.ports import free_ports
from fedsim.errors import FedsimError

CONFIG = """
[partition]
clients = 3
"""


def invoke(*words):
    return CliRunner().invoke(deploy, [str(word) for word in words], catch_exceptions=False)


def test_init_makes_a_federation_for_the_given_hosts(tmp_path):
    done = invoke("init", tmp_path / "fed", "--nodes", 4, "--host", "link", "--host", "10.0.0.1")
    assert done.exit_code == 0
    made = Federation.load(tmp_path / "fed")
    assert (made.nodes, made.hosts, made.insecure) == (4, ("link", "10.0.0.1"), False)


def test_the_next_command_can_be_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "fedsim deploy up 'my fed'" in invoke("init", "my fed").output


def test_init_gives_every_node_its_part_of_a_configs_data(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    invoke("init", tmp_path / "fed", "--split", tmp_path / "run.toml")
    made = Federation.load(tmp_path / "fed")
    assert made.nodes == 3
    for node in range(3):
        policy = Policy.load(made.node(node) / "node.toml")
        assert policy.data_file == str(made.node(node) / "data.npz")
        assert Path(policy.data_file).exists()


def test_nodes_with_parts_of_a_configs_data_accept_the_config_wherever_its_data_are(tmp_path):
    (tmp_path / "run.toml").write_text(f'{CONFIG}[data]\ndir = "{tmp_path}"\n')
    said = invoke("init", tmp_path / "fed", "--split", tmp_path / "run.toml").output
    assert "refuses" not in said
    policy = Policy.load(Federation.load(tmp_path / "fed").node(0) / "node.toml")
    policy.check(RunConfig.load(tmp_path / "run.toml", ["engine.name=deployment"]))


def test_init_says_why_its_nodes_would_refuse_the_config(tmp_path):
    text = f'{CONFIG}[client]\nwork = "{tmp_path / "work.txt"}"\n'
    (tmp_path / "work.txt").write_text("1\n1\n1\n")
    (tmp_path / "run.toml").write_text(text)
    said = invoke("init", tmp_path / "fed", "--split", tmp_path / "run.toml").output
    said = " ".join(said.split())
    assert "policy refuses the run: client.work is" in said
    assert "node.toml says what its node allows" in said


@pytest.mark.parametrize("inside", [True, False])
def test_a_server_writes_runs_where_its_federations_operator_looks(tmp_path, monkeypatch, inside):
    monkeypatch.delenv("FEDSIM_RUNS", raising=False)
    invoke("init", tmp_path / "fed")
    directory = tmp_path / "fed" / "superlink"
    if not inside:
        directory = directory.rename(tmp_path / "superlink")
    started = []
    monkeypatch.setattr(cli, "_run_services", lambda services, *_: started.extend(services))
    invoke("superlink", directory)
    runs = tmp_path / "fed" / "runs" if inside else directory / "state" / "runs"
    assert {service.variables["FEDSIM_RUNS"] for service in started} == {str(runs)}


def test_init_gives_as_many_nodes_as_a_config_has_clients(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    words = ("init", tmp_path / "fed", "--split", tmp_path / "run.toml", "--nodes")
    with pytest.raises(FedsimError, match=r"--nodes 5, but --split .*run.toml has 3 clients"):
        invoke(*words, 5)
    assert not (tmp_path / "fed").exists()
    assert invoke(*words, 3).exit_code == 0


def test_an_insecure_federation_is_said_to_be_one(tmp_path):
    assert "insecure" in invoke("init", tmp_path / "fed", "--insecure").output


def test_init_refuses_a_directory_that_has_one(tmp_path):
    invoke("init", tmp_path / "fed")
    with pytest.raises(FedsimError, match="already contains"):
        invoke("init", tmp_path / "fed")


def test_a_renewed_certificate_is_of_the_same_authority_and_names(tmp_path):
    invoke("init", tmp_path / "fed", "--host", "link", "--days", 3)
    made = Federation.load(tmp_path / "fed")

    def certificate() -> x509.Certificate:
        return x509.load_pem_x509_certificate((made.superlink / "server.pem").read_bytes())

    old, trusted = certificate(), (made.node(0) / "ca.crt").read_bytes()
    output = invoke("renew", tmp_path / "fed", "--days", 30).output
    new = certificate()
    assert new.not_valid_after_utc > old.not_valid_after_utc
    assert f"{new.not_valid_after_utc:%Y-%m-%d}" in output
    new.verify_directly_issued_by(x509.load_pem_x509_certificate(trusted))
    names = x509.SubjectAlternativeName
    assert new.extensions.get_extension_for_class(names) == old.extensions.get_extension_for_class(
        names
    )


@pytest.mark.parametrize("command", ["superlink", "up"])
def test_a_server_whose_certificate_has_expired_does_not_start(tmp_path, monkeypatch, command):
    monkeypatch.setattr("fedsim.deploy.processes.Processes.__init__", pytest.fail)
    invoke("init", tmp_path / "fed")
    made = Federation.load(tmp_path / "fed")
    made.issue(days=-1)
    directory = made.superlink if command == "superlink" else made.directory
    with pytest.raises(FedsimError, match=r"server\.pem expired on .* `fedsim deploy renew`"):
        invoke(command, directory)


def test_a_certificate_that_cannot_be_renewed_is_left(tmp_path):
    invoke("init", tmp_path / "fed", "--days", 4000)
    path = tmp_path / "fed" / "superlink" / "server.pem"
    old = path.read_bytes()
    for days, sentence in ((0, "--days is 0"), (4002, "the authority's own certificate ends on")):
        with pytest.raises(FedsimError, match=sentence):
            invoke("renew", tmp_path / "fed", "--days", days)
    invoke("init", tmp_path / "open", "--insecure")
    with pytest.raises(FedsimError, match="has no 'authority'"):
        invoke("renew", tmp_path / "open")
    assert path.read_bytes() == old


def test_init_with_a_config_that_has_no_data_makes_nothing(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('[data]\nname = "missing.csv"\n[partition]\nclients = 2\n')
    with pytest.raises(FedsimError, match="there are no such data"):
        invoke("init", tmp_path / "fed", "--split", config)
    assert not (tmp_path / "fed").exists()


def test_init_that_cannot_write_a_nodes_data_makes_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fedsim.apps.node.write_client_data", fails)
    (tmp_path / "run.toml").write_text(CONFIG)
    with pytest.raises(OSError, match="No space"):
        invoke("init", tmp_path / "fed", "--split", tmp_path / "run.toml")
    assert not (tmp_path / "fed").exists()


def test_help_teaches():
    for command in ("init", "renew", "up", "superlink", "node"):
        text = invoke(command, "--help").output
        assert "fedsim" in text
        assert len(text.splitlines()) > 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ending"),
    [(signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL), ("superlink", 1), ("supernode", 1)],
)
def test_a_rehearsal_leaves_no_process_and_no_port(tmp_path, number, ending):
    port, fleet_port = free_ports(2)
    Federation.create(tmp_path / "fed", nodes=1, port=port, fleet_port=fleet_port)
    command = [sys.executable, "-m", "fedsim", "deploy", "up", str(tmp_path / "fed")]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert "SuperLink is up" in up.stdout.readline()
        assert listening(port)
        assert listening(fleet_port)
        if number != signal.SIGINT:  # which comes while the nodes are being started
            assert "Up." in up.stdout.readline()
        started = descendants(up.pid)
        if isinstance(number, str):
            os.kill(first_of(started, number), signal.SIGKILL)
        else:
            up.send_signal(number)
        assert up.wait(60) == ending
    finally:
        up.kill()
        said = up.communicate()[0]
    if isinstance(number, str):
        assert f"fedsim: {number}" in said
        assert "was ended by signal 9; its log says" in said
    deadline = time.monotonic() + 30
    while any(map(alive, started)) or listening(port) or listening(fleet_port):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    left = {path.name for path in (tmp_path / "fed").iterdir()}
    assert left <= {
        *("federation.toml", "authority", "superlink", "node-0", "operator", "runs", "logs"),
    }


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def descendants(pid: int) -> list[int]:
    """All that a process has started, and what that has."""
    family = [pid]
    for member in family:
        with suppress(OSError):
            children = Path(f"/proc/{member}/task/{member}/children").read_text()
            family += map(int, children.split())
    return family[1:]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    return command_of(pid) != b""


def first_of(started: list[int], name: str) -> int:
    """The SuperLink, or a process of a node, which is a fork."""
    words = "flower_programs\0superlink" if name == "superlink" else "fork_server"
    server = next(pid for pid in started if words.encode() in command_of(pid))
    return server if name == "superlink" else descendants(server)[0]
