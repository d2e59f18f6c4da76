"""A reverse proxy that exposes only the SuperLink's API for nodes.

From Flower 1.40 on, one port serves the operator, the apps and the nodes. The SuperLink therefore
listens on loopback, and this process on the public address: it forwards the ten requests that a
node makes, by their exact paths, and answers 404 to all others. It terminates TLS and has its own
connection to the SuperLink. Nodes sign their requests, so that the proxy is not trusted to identify
them.

Run as ``python -m fedsim.deploy.fleet_proxy HOST PORT SUPERLINK_PORT [DIRECTORY]``; the directory
has the server's certificate and key.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

_PATHS = frozenset(
    f"/v1/fleet/{name}".encode()
    for name in (
        *("activate-node", "deactivate-node", "send-node-heartbeat"),
        *("pull-messages", "push-messages", "get-run", "get-fab"),
        *("push-object", "pull-object", "confirm-message-received"),
    )
)
# Flower cuts arrays into chunks of 20 MiB, so that no honest node sends more than this. Limited,
# because bodies are held in memory.
_MAX_BODY = 1 << 26
# Limit of the bodies of all connections together: only the SuperLink can tell who sent a body.
_MAX_BODIES = 1 << 30
_CONNECTIONS = 256
_SECONDS = 120.0
# Request headers not forwarded: those of a single connection, and those that claim an origin.
_DROPPED = frozenset(
    (
        *(b"host", b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding"),
        *(b"upgrade", b"proxy-authorization", b"proxy-authenticate", b"proxy-connection"),
        *(b"content-length", b"authorization", b"cookie", b"expect"),
        *(b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"),
    )
)
# Response headers that a node needs; others would reveal details of the server.
_KEPT_OF_ANSWER = frozenset((b"content-type", b"retry-after"))

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def is_forwarded(method: str, raw_path: bytes, query: bytes) -> bool:
    """Whether a request is one that a node makes, judged by its undecoded path."""
    return method == "POST" and not query and raw_path in _PATHS


class FleetProxy:
    """ASGI app that forwards nodes' requests (`is_forwarded`) to the SuperLink.

    Parameters
    ----------
    client : httpx.AsyncClient
        Client whose base URL is the SuperLink's.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._body_bytes = 0  # of all bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        # The raw path: several spellings decode to one path, and the SuperLink decodes again, so
        # that a decoded path could pass here and mean another request there.
        elif not is_forwarded(scope["method"], scope.get("raw_path") or b"", scope["query_string"]):
            await _answer(send, 404)
        elif _announced_length(scope) > _MAX_BODY:
            await _answer(send, 413)
        else:
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        import httpx

        headers = [(name, value) for name, value in scope["headers"] if name not in _DROPPED]
        path = scope["raw_path"].decode("ascii")
        body = io.BytesIO()  # whose getvalue does not copy
        try:
            if status := await self._read_body(receive, body):
                await _answer(send, status)
                return
            answer = await self._client.post(path, content=body.getvalue(), headers=headers)
        except httpx.HTTPError:
            # The SuperLink is down; nodes retry.
            await _answer(send, 503)
            return
        finally:
            self._body_bytes -= body.tell()
        headers = [
            (name, value) for name, value in answer.headers.raw if name.lower() in _KEPT_OF_ANSWER
        ]
        await _answer(send, answer.status_code, headers, answer.content)

    async def _read_body(self, receive: Receive, body: io.BytesIO) -> int:
        """Write the request's body to ``body``; return 0, or the status of a refusal.

        After a 503, nodes retry.
        """
        more = True
        while more:
            try:
                message = await asyncio.wait_for(receive(), _SECONDS)
            except TimeoutError:
                return 503
            self._body_bytes += body.write(message.get("body", b""))
            more = message.get("more_body", False)
            # Count the bytes received, since the announced length may be too small or missing.
            if message["type"] != "http.request" or body.tell() > _MAX_BODY:
                return 413
            if self._body_bytes > _MAX_BODIES:
                return 503
        return 0


def _announced_length(scope: Scope) -> int:
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return max((int(value) for value in lengths if value.isdigit()), default=0)


async def _answer(
    send: Send, status: int, headers: list[tuple[bytes, bytes]] | None = None, body: bytes = b""
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [*(headers or []), length]}
    )
    await send({"type": "http.response.body", "body": body})


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def main(host: str, port: int, superlink_port: int, directory: Path | None) -> None:
    """Run the proxy, with TLS if ``directory`` has a certificate."""
    import ssl

    import httpx
    import uvicorn

    secure: dict[str, Any] = {}
    trust: ssl.SSLContext | bool = False
    if directory is not None:
        secure = {
            "ssl_certfile": str(directory / "server.pem"),
            "ssl_keyfile": str(directory / "server.key"),
        }
        # Trust only the federation's own authority: another local process may have bound the port.
        trust = ssl.create_default_context(cafile=str(directory / "ca.crt"))
    client = httpx.AsyncClient(
        base_url=f"{'https' if secure else 'http'}://127.0.0.1:{superlink_port}",
        verify=trust,
        timeout=_SECONDS,
        trust_env=False,  # use no proxy from the environment, which would see nodes' messages
        limits=httpx.Limits(max_connections=_CONNECTIONS),
    )
    uvicorn.run(
        FleetProxy(client),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # clients could forge them: there is no trusted proxy in front
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=30,
        ws="none",
        **secure,
    )


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]) if len(sys.argv) > 4 else None,
    )
