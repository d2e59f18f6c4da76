"""The door for nodes passes the ten requests that a node makes, to the byte, and no other."""

from __future__ import annotations

import asyncio
import importlib
import re
import tracemalloc
from pathlib import Path

import httpx
import pytest

from fedsim.deploy import fleet_proxy
from fedsim.deploy.fleet_proxy import FleetProxy, is_forwarded
from fedsim.deploy.flower_replacements import speaks_grpc

OPEN = [
    *("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages"),
    *("push-messages", "get-run", "get-fab", "push-object", "pull-object"),
    "confirm-message-received",
]
CLOSED = [
    *("/", "", "/docs", "/openapi.json", "/health", "/v1/health", "/v1/fleet", "/v1/fleet/"),
    *("/v1/control/list-runs", "/v1/control/start-run", "/v1/control/register-node"),
    *("/v1/runtime/acquire-task", "/v1/runtime/pull-task-input"),
    *("/v1/fleet/register-node", "/v1/fleet/unregister-node"),
    *("/v1/fleet/get-run/", "//v1/fleet/get-run", "/v1//fleet/get-run", "/v1/fleet//get-run"),
    *("/v1/fleet/../control/list-runs", "/v1/fleet/get-run/../../runtime/acquire-task"),
    *("/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet%2Fget-run", "/v1/fleet/get%2Drun"),
    *("/V1/fleet/get-run", "/v1/Fleet/get-run", "/v1/fleet/GET-RUN", "/v1/fleet/get-run%00"),
    *("/v1/fleet/get-run;x=1", "/v1/fleet/get-run#x", "/v1/fleet/get-run ", "/v1/fleet/get-run%20"),
    *("http://superlink/v1/fleet/get-run", "\\v1\\fleet\\get-run", "/./v1/fleet/get-run"),
]


@pytest.mark.parametrize("name", OPEN)
def test_what_a_node_asks_is_passed(name):
    assert is_forwarded("POST", f"/v1/fleet/{name}".encode(), b"")


@pytest.mark.parametrize("path", CLOSED)
def test_every_other_path_is_closed(path):
    assert not is_forwarded("POST", path.encode(), b"")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "CONNECT", "post"])
def test_other_methods_are_closed(method):
    assert not is_forwarded(method, b"/v1/fleet/get-run", b"")


@pytest.mark.parametrize("query", [b"x", b"path=/v1/control/list-runs", b"/../.."])
def test_a_query_string_is_closed(query):
    assert not is_forwarded("POST", b"/v1/fleet/get-run", query)


@pytest.mark.skipif(speaks_grpc(), reason="this Flower's nodes speak gRPC")
def test_the_ten_are_what_flowers_own_node_sends_but_for_registering():
    spec = importlib.util.find_spec("flwr.supernode.fleet_http_client")
    sent = re.findall(r'path="/v1/fleet/([\w-]+)"', Path(spec.origin).read_text())
    assert set(sent) - {"register-node", "unregister-node"} == set(OPEN)


class Superlink:
    """Notes what reaches it, and answers as it is told to."""

    def __init__(self, status=200, broken=False):
        self.status, self.broken, self.heard = status, broken, []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.broken:
            raise httpx.ConnectError("nobody there")
        self.heard.append(request)
        headers = {"content-type": "application/protobuf", "set-cookie": "a=b", "server": "x"}
        return httpx.Response(self.status, content=b"answer", headers=headers)


def ask(superlink, path="/v1/fleet/get-run", body=b"question", **options):
    async def go():
        inner = httpx.AsyncClient(
            base_url="https://inside", transport=httpx.MockTransport(superlink.answer)
        )
        outer = httpx.ASGITransport(app=FleetProxy(inner))
        async with httpx.AsyncClient(base_url="https://outside", transport=outer) as client:
            return await client.post(path, content=body, **options)

    return asyncio.run(go())


def test_a_nodes_request_and_its_answer_go_through_unchanged():
    superlink = Superlink(status=401)
    signed = {"x-flwr-signature": "s", "content-type": "application/protobuf"}
    answer = ask(superlink, headers=signed)
    (request,) = superlink.heard
    assert (request.url.path, request.content) == ("/v1/fleet/get-run", b"question")
    assert {name: request.headers[name] for name in signed} == signed
    assert (answer.status_code, answer.content) == (401, b"answer")
    assert set(answer.headers) == {"content-type", "content-length"}


def test_credentials_and_claims_of_where_one_comes_from_are_dropped():
    superlink = Superlink()
    ask(superlink, headers={"authorization": "Bearer x", "x-forwarded-for": "1", "cookie": "c"})
    (request,) = superlink.heard
    assert not {"authorization", "x-forwarded-for", "cookie"} & set(request.headers)
    assert request.headers["host"] == "inside"


def test_nothing_that_is_closed_reaches_the_superlink():
    superlink = Superlink()
    for path in ("/docs", "/v1/control/list-runs", "/v1/fleet/get-run?x=1", "/v1/fleet/get%2Drun"):
        assert ask(superlink, path).status_code == 404
    assert superlink.heard == []


def test_more_than_a_node_may_send_is_refused():
    superlink = Superlink()
    assert ask(superlink, headers={"content-length": str(1 << 40)}).status_code == 413
    assert ask(superlink, body=b"x" * ((1 << 26) + 1)).status_code == 413
    assert superlink.heard == []


def test_a_superlink_that_is_away_is_said_to_be_so():
    assert ask(Superlink(broken=True)).status_code == 503


def test_bodies_of_all_connections_together_are_limited(monkeypatch):
    """Anybody could have filled the server's memory by 256 bodies that never end."""
    monkeypatch.setattr(fleet_proxy, "_MAX_BODIES", 1000)
    monkeypatch.setattr(fleet_proxy, "_SECONDS", 0.2)
    scope = {"type": "http", "method": "POST", "raw_path": b"/v1/fleet/get-run",
             "query_string": b"", "headers": []}  # fmt: skip
    superlink = Superlink()

    async def go():
        inner = httpx.AsyncClient(
            base_url="https://inside", transport=httpx.MockTransport(superlink.answer)
        )
        proxy = FleetProxy(inner)

        async def request(ends):
            sent, statuses = [], []

            async def receive():
                if sent and not ends:
                    await asyncio.sleep(60)
                sent.append(True)
                return {"type": "http.request", "body": b"x" * 600, "more_body": not ends}

            async def send(message):
                statuses.append(message.get("status"))

            await proxy(scope, receive, send)
            return statuses[0]

        stalled = asyncio.create_task(request(ends=False))
        await asyncio.sleep(0.05)
        beside = await request(ends=True)
        return [await stalled, beside, await request(ends=True)]

    assert asyncio.run(go()) == [503, 503, 200]
    assert len(superlink.heard) == 1


def test_a_body_is_in_memory_once_while_it_is_passed_on():
    """It was there twice, so that bodies could take twice the memory that they are limited to."""
    size, pieces = 1 << 24, 16
    memory = []

    class Inner:
        async def post(self, path, content, headers):
            memory.append(tracemalloc.get_traced_memory()[0])
            assert len(content) == size
            return httpx.Response(200)

    async def go():
        sizes = [size // pieces] * pieces

        async def receive():
            body = b"x" * sizes.pop()
            return {"type": "http.request", "body": body, "more_body": bool(sizes)}

        async def send(message): ...

        scope = {"type": "http", "method": "POST", "raw_path": b"/v1/fleet/push-object",
                 "query_string": b"", "headers": []}  # fmt: skip
        await FleetProxy(Inner())(scope, receive, send)

    tracemalloc.start()
    try:
        asyncio.run(go())
    finally:
        tracemalloc.stop()
    assert size <= memory[0] < 1.5 * size
