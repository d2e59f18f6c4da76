"""Who gets into a federation: nodes with a registered key that trust its authority."""

from __future__ import annotations

import time

import pytest

from fedsim.deploy.certificates import Authority
from fedsim.deploy.processes import free_ports
from fedsim.deploy.rehearsal import Rehearsal

pytestmark = pytest.mark.slow

REGISTERED, STRANGER, KEYLESS, ASTRAY, PLAIN = range(5)


@pytest.fixture(scope="module")
def rehearsal():
    with Rehearsal.temporary(5) as made:
        made.register([REGISTERED])
        yield made


def command(rehearsal, node):
    return rehearsal.federation.supernode_command(node, port=free_ports(1)[0])


def without(words, flag):
    at = words.index(flag)
    return words[:at] + words[at + 2 :]


def refused(running, reason, limit=90.0):
    """The process ends by itself, with an error, saying why."""
    deadline = time.monotonic() + limit
    while running.alive():
        assert time.monotonic() < deadline, f"still trying:\n{running.tail()}"
        time.sleep(0.2)
    assert running.process.returncode != 0
    assert reason in running.log.read_text()


def online(rehearsal):
    return [node for node in rehearsal.operator.nodes() if node["status"] == "online"]


def wait_online(rehearsal, count, limit=60.0):
    deadline = time.monotonic() + limit
    while len(online(rehearsal)) != count:
        assert time.monotonic() < deadline, rehearsal.superlink.tail()
        time.sleep(0.5)


def test_a_registered_node_gets_in(rehearsal):
    rehearsal.start_node(REGISTERED)
    wait_online(rehearsal, 1)


def test_a_node_with_an_unregistered_key_is_refused(rehearsal):
    refused(rehearsal.start_node(STRANGER), "Failed to activate SuperNode")


def test_a_node_without_a_key_is_refused(rehearsal):
    words = without(command(rehearsal, KEYLESS), "--auth-supernode-private-key")
    refused(rehearsal.start("keyless", words), "must be registered")


def test_a_node_does_not_talk_to_a_server_of_another_authority(rehearsal, tmp_path):
    Authority.create().save(tmp_path)
    words = command(rehearsal, ASTRAY)
    words[words.index("--root-certificates") + 1] = str(tmp_path / "ca.crt")
    refused(rehearsal.start("astray", words), "CERTIFICATE_VERIFY_FAILED")


def test_a_node_in_plaintext_is_refused(rehearsal):
    words = without(command(rehearsal, PLAIN), "--auth-supernode-private-key")
    # It would go on trying; nobody answers it.
    words = [*without(words, "--root-certificates"), "--insecure", "--max-retries", "2"]
    refused(rehearsal.start("plain", words), "could not establish a connection")


def test_nobody_else_has_got_in(rehearsal):
    # After all the attempts, which ran against the same SuperLink.
    assert len(online(rehearsal)) == 1


def test_a_server_with_an_expired_certificate_is_refused_and_a_new_one_accepted(rehearsal):
    rehearsal.stop(rehearsal.supernodes[REGISTERED])
    rehearsal.stop(rehearsal.superlink)
    rehearsal.federation.issue(days=-1)
    rehearsal.start_superlink()
    refused(rehearsal.start_node(REGISTERED), "CERTIFICATE_VERIFY_FAILED")
    rehearsal.stop(rehearsal.superlink)
    rehearsal.federation.issue(days=1)
    rehearsal.start_superlink()
    rehearsal.register([REGISTERED])
    rehearsal.start_node(REGISTERED)
    wait_online(rehearsal, 1)
