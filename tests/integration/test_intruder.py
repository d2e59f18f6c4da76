"""What strangers can do in a federation, with what a bystander has and with what a node has.

A bystander has the authority's certificate, which is public. A node has its key besides, and
its own files. The statuses are the evidence; "404" and UNIMPLEMENTED mean that nothing was
there to ask.
"""

from __future__ import annotations

import functools
import re
import shutil
import time

import httpx
import intruder
import pytest
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from intruder import Intruder, Refused

from fedsim.deploy.certificates import Authority
from fedsim.deploy.federation import Federation
from fedsim.deploy.flower_programs import credentials, new_token
from fedsim.deploy.flower_replacements import speaks_grpc
from fedsim.deploy.operator import Operator
from fedsim.deploy.ports import free_ports
from fedsim.deploy.processes import wait_for_port
from fedsim.deploy.rehearsal import Rehearsal
from fedsim.deploy.services import Node as NodeParty
from fedsim.errors import FedsimError

pytestmark = pytest.mark.slow

MEMBER, OTHER, HOST, STRANGER = range(4)
UNAUTHENTICATED = {"UNAUTHENTICATED", "401"}
ABSENT = {"UNIMPLEMENTED", "404"}


@pytest.fixture(scope="module")
def rehearsal():
    with Rehearsal.temporary(4) as made:
        made.register([MEMBER, OTHER, HOST])
        yield made


@pytest.fixture(scope="module")
def authority(rehearsal):
    return rehearsal.federation.operator / "ca.crt"


def nodes_of(operator):
    """The registered SuperNodes."""
    return operator._json("supernode", "list", operator.connection)["nodes"]


def with_key(rehearsal, node):
    federation = rehearsal.federation
    address = f"127.0.0.1:{federation.fleet_port}"
    return Intruder(address, federation.node(node) / "ca.crt", federation.node(node) / "node.key")


@pytest.fixture(scope="module")
def bystander(rehearsal, authority):
    return Intruder(f"127.0.0.1:{rehearsal.federation.fleet_port}", authority)


@pytest.fixture(scope="module")
def member(rehearsal):
    return with_key(rehearsal, MEMBER)


@pytest.fixture(scope="module")
def node_ids(rehearsal):
    """Node ids of the two members, who have activated themselves as they may."""
    ids = []
    for node in (MEMBER, OTHER):
        this = with_key(rehearsal, node)
        request = ActivateNodeRequest(public_key=this.public_key, heartbeat_interval=300)
        ids.append(this.fleet("ActivateNode", request).node_id)
    return ids


def as_node(node_id):
    """What a node may ask, in the name of a node id."""
    node = Node(node_id=node_id)
    return {
        "PullMessages": PullMessagesRequest(node=node),
        "SendNodeHeartbeat": SendNodeHeartbeatRequest(node=node, heartbeat_interval=30),
        "GetRun": GetRunRequest(node=node, run_id=1),
        "GetFab": GetFabRequest(node=node, hash_str="0" * 64, run_id=1),
        "PullObject": PullObjectRequest(node=node, run_id=1, object_id="0" * 64),
        "PushMessages": PushMessagesRequest(node=node),
        "DeactivateNode": DeactivateNodeRequest(node_id=node_id),
    }


def status(call, *arguments) -> str:
    try:
        call(*arguments)
    except Refused as refusal:
        return str(refusal)
    return "let in"


# Where nodes are heard


@pytest.mark.parametrize("method", as_node(1))
def test_a_bystander_is_no_node(bystander, node_ids, method):
    assert status(bystander.fleet, method, as_node(node_ids[1])[method]) in UNAUTHENTICATED


def test_nobody_registers_a_key_of_their_own(rehearsal, bystander):
    stranger = with_key(rehearsal, STRANGER)
    for who in (bystander, stranger, with_key(rehearsal, MEMBER)):
        key = RegisterNodeFleetRequest(public_key=stranger.public_key)
        assert status(who.fleet, "RegisterNode", key) in UNAUTHENTICATED | ABSENT | {
            "FAILED_PRECONDITION",
            "PERMISSION_DENIED",
        }
    known = [node["node-id"] for node in nodes_of(rehearsal.operator)]
    assert len(known) == 3


def test_an_unregistered_key_activates_nothing(rehearsal):
    stranger = with_key(rehearsal, STRANGER)
    request = ActivateNodeRequest(public_key=stranger.public_key, heartbeat_interval=30)
    assert status(stranger.fleet, "ActivateNode", request) != "let in"
    online = [node for node in nodes_of(rehearsal.operator) if node["status"] == "online"]
    assert len(online) <= 2


@pytest.mark.parametrize("method", as_node(1))
def test_a_member_cannot_speak_for_another_node(member, node_ids, method):
    assert status(member.fleet, method, as_node(node_ids[1])[method]) in UNAUTHENTICATED


def test_a_member_cannot_activate_with_anothers_key(rehearsal, member):
    if speaks_grpc():
        pytest.skip("there the key in the request, not the signature's, says who is activated")
    theirs = ActivateNodeRequest(
        public_key=with_key(rehearsal, OTHER).public_key, heartbeat_interval=30
    )
    assert status(member.fleet, "ActivateNode", theirs) in UNAUTHENTICATED


def test_a_member_may_ask_in_its_own_name(member, node_ids):
    assert status(member.fleet, "PullMessages", as_node(node_ids[0])["PullMessages"]) == "let in"


def test_a_forged_reply_to_a_message_that_one_was_not_sent_is_not_taken(member, node_ids):
    message_id = "ab" * 32
    metadata = Metadata(
        run_id=7,
        message_id=message_id,
        src_node_id=node_ids[0],
        dst_node_id=1,
        reply_to_message_id="cd" * 32,
        created_at=time.time(),
        ttl=600.0,
        message_type="train",
    )
    request = PushMessagesRequest(
        node=Node(node_id=node_ids[0]),
        messages_list=[Message(metadata=metadata)],
        message_object_trees=[ObjectTree(object_id=message_id)],
    )
    try:
        answer = member.fleet("PushMessages", request)
    except Refused:
        return
    assert not answer.objects_to_push
    assert answer.results
    assert 0 not in answer.results.values()


def test_what_is_no_request_of_a_node_is_not_there(rehearsal, authority):
    port = rehearsal.federation.fleet_port
    if speaks_grpc():
        # Another service's methods, at the nodes' address.
        import grpc

        channel = grpc.secure_channel(
            f"127.0.0.1:{port}", grpc.ssl_channel_credentials(authority.read_bytes())
        )
        for method in ("Control/ListRuns", "Control/StartRun", "Runtime/AcquireTask"):
            with pytest.raises(grpc.RpcError) as refusal:
                channel.unary_unary(f"/flwr.proto.{method}")(b"", timeout=15)
            assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED
        return
    for path in everything_there_is(rehearsal, authority):
        if path not in PASSED:
            assert intruder.post(port, path, authority) == 404, path


PASSED = {
    f"/v1/fleet/{name}"
    for name in (
        *("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages"),
        *("push-messages", "get-run", "get-fab", "push-object", "pull-object"),
        "confirm-message-received",
    )
}


def everything_there_is(rehearsal, authority) -> list[str]:
    """Paths of the SuperLink's HTTP API, as it describes itself on loopback."""
    address = f"https://127.0.0.1:{rehearsal.federation.port}/openapi.json"
    with httpx.Client(verify=str(authority), trust_env=False) as client:
        paths = list(client.get(address).json()["paths"])
    assert len(paths) > 30
    return [*paths, "/docs", "/openapi.json"]


@pytest.mark.skipif(speaks_grpc(), reason="there is no HTTP where nodes are heard")
@pytest.mark.parametrize(
    "line",
    [
        b"POST //v1/control/list-runs HTTP/1.1",
        b"POST /v1/fleet/../control/list-runs HTTP/1.1",
        b"POST /v1/fleet/%2e%2e/control/list-runs HTTP/1.1",
        b"POST /v1/fleet%2f..%2fcontrol/list-runs HTTP/1.1",
        b"POST /v1/fleet/get-run?x=/v1/control/list-runs HTTP/1.1",
        b"POST /v1/fleet/get-run/../../runtime/acquire-task HTTP/1.1",
        b"POST /V1/FLEET/GET-RUN HTTP/1.1",
        b"POST /v1/fleet/get%2drun HTTP/1.1",
        b"POST https://127.0.0.1/v1/fleet/get-run HTTP/1.1",
        b"GET /v1/fleet/get-run HTTP/1.1",
        b"GET /docs HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"POST /v1/fleet/get-run\x00 HTTP/1.1",
        b"POST /v1/fleet/get-run HTTP/1.1\r\nX: a\r\n b",
        b"CONNECT 127.0.0.1:22 HTTP/1.1",
        b"PRI * HTTP/2.0",
    ],
)
def test_no_trick_with_a_path_opens_another_door(rehearsal, authority, line):
    head = line + b"\r\nHost: x\r\nContent-Length: 0\r\nContent-Type: application/protobuf\r\n\r\n"
    answer = intruder.raw(rehearsal.federation.fleet_port, head, authority)
    assert re.match(rb"HTTP/1\.1 (404|400|401) ", answer) or answer == b"", answer


@pytest.mark.skipif(speaks_grpc(), reason="there is no HTTP where nodes are heard")
def test_a_second_request_smuggled_behind_the_first_is_judged_by_itself(rehearsal, authority):
    first = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    second = b"0\r\n\r\nPOST /v1/control/list-runs HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    request = first + b"Transfer-Encoding: chunked\r\n\r\n" + second
    answer = intruder.raw(rehearsal.federation.fleet_port, request, authority)
    assert not answer.startswith(b"HTTP/1.1 2"), answer


# On the server's own machine


def test_every_request_on_the_servers_own_machine_needs_a_credential(rehearsal, authority):
    port = rehearsal.federation.port
    statuses = {
        path: intruder.post(port, path, authority)
        for path in everything_there_is(rehearsal, authority)
    }
    # 405: a page for browsers, which describes Flower's API and nothing of this federation.
    open_to_all = {path for path, code in statuses.items() if code not in (401, 403, 405)}
    # How to log in, by a way that does not exist here.
    assert open_to_all <= {
        *("/v1/control/get-login-details", "/v1/control/get-auth-tokens"),
        "/v1/control/refresh-auth-tokens",
    }


@pytest.fixture(scope="module")
def a_nodes_own_port(rehearsal):
    """Where a SuperNode answers its app, on the node's machine."""
    (port,) = free_ports(1)
    rehearsal.start_node(HOST, port=port)
    wait_for_port(rehearsal.running[f"supernode-{HOST}"], port)
    return port


@pytest.mark.parametrize("path", ["acquire-task", "pull-pending-tasks", "claim-task"])
@pytest.mark.parametrize("where", ["superlink", "supernode"])
def test_a_local_user_gets_no_task(rehearsal, authority, a_nodes_own_port, path, where):
    if where == "superlink":
        port = rehearsal.federation.port
        answered = intruder.post(port, f"/v1/runtime/{path}", authority)
    else:
        port = a_nodes_own_port
        answered = httpx.post(
            f"http://127.0.0.1:{port}/v1/runtime/{path}",
            headers={"content-type": "application/protobuf"},
            trust_env=False,
        ).status_code
    assert answered in (401, 403, 404), answered


@pytest.fixture
def impostor(rehearsal, tmp_path):
    """A local user with a copy of the operator's connection, and a token that is made up."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(rehearsal.federation.operator / "config.toml", home)

    def go(token: str | None):
        if token is not None:
            address = f"127.0.0.1:{rehearsal.federation.port}"
            (home / "credentials.yaml").write_bytes(credentials(token, address))
        return Operator(home, rehearsal.operator.connection)

    return go


@pytest.mark.parametrize("token", [None, "", new_token()], ids=["no token", "empty", "made up"])
def test_flowers_own_command_line_does_nothing_without_the_operators_token(
    rehearsal, impostor, token, tmp_path
):
    from fedsim.config import RunConfig
    from fedsim.deploy.bundle import write_app

    operator = impostor(token)
    app = write_app(tmp_path / "app", RunConfig().to_tree())
    for attempt in (
        functools.partial(nodes_of, operator),
        lambda: operator.status(1),
        lambda: operator.submit(app),
        lambda: operator.register([rehearsal.federation.public_key(STRANGER)]),
    ):
        with pytest.raises(FedsimError):
            attempt()
    assert len(nodes_of(rehearsal.operator)) == 3


# The operator's token lets nobody bring code


def test_a_bundle_with_code_is_refused_by_the_server(rehearsal, tmp_path):
    from fedsim.config import RunConfig
    from fedsim.deploy.bundle import write_app

    app = write_app(tmp_path / "app", RunConfig().to_tree())
    mark = tmp_path / "was here"
    (app / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')")
    run_id = rehearsal.operator.submit(app)
    assert rehearsal.operator.follow(run_id) != "finished:completed"
    assert "may contain no code" in rehearsal.operator.log(run_id)
    assert not mark.exists()


# TLS


def test_a_server_of_another_authority_is_not_trusted(rehearsal, tmp_path):
    Authority.create().save(tmp_path)
    for port in (rehearsal.federation.port, rehearsal.federation.fleet_port):
        assert intruder.handshake(port, rehearsal.federation.operator / "ca.crt") == "trusted"
        assert "self-signed" in intruder.handshake(port, tmp_path / "ca.crt") or (
            "unable to get local issuer" in intruder.handshake(port, tmp_path / "ca.crt")
        )


def test_plaintext_is_not_answered(rehearsal, authority):
    address = f"127.0.0.1:{rehearsal.federation.fleet_port}"
    plain = Intruder(address, authority, insecure=True)
    said = status(plain.fleet, "PullMessages", as_node(1)["PullMessages"])
    assert said in {"UNAVAILABLE", "RemoteProtocolError", "ReadError", "ConnectError"}


def test_a_node_with_an_unregistered_key_ends_by_itself(rehearsal):
    (port,) = free_ports(1)
    party = NodeParty.load(rehearsal.federation.node(STRANGER))
    supernode, _app = party.services(rehearsal._homes / "stranger", port=port)
    running = rehearsal.start("stranger", supernode.command, supernode.variables)
    assert running.process.wait(90) != 0


def test_a_server_with_an_expired_certificate_is_not_trusted(tmp_path):
    port, fleet_port = free_ports(2)
    federation = Federation.create(tmp_path / "fed", nodes=1, port=port, fleet_port=fleet_port)
    authority = federation.operator / "ca.crt"
    federation.issue(days=-1)
    with Rehearsal(federation):
        assert "expired" in intruder.handshake(fleet_port, authority)
    federation.issue(days=1)
    with Rehearsal(federation):
        assert intruder.handshake(fleet_port, authority) == "trusted"
