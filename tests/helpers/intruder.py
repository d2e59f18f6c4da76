"""Somebody who speaks Flower's protocols and has no business in a federation."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedsim.deploy.flower_replacements import speaks_grpc


class Refused(Exception):  # noqa: N818 - what is hoped for is no error
    """What the other side said: a status, or how the connection failed."""


@dataclass
class Intruder:
    """With a certificate of the authority, and perhaps with a node's key.

    Speaks the Fleet API, by gRPC or HTTP as the installed Flower does.
    """

    address: str
    authority: Path
    key_file: Path | None = None
    insecure: bool = False

    @property
    def key(self) -> Any:
        assert self.key_file is not None
        return serialization.load_ssh_private_key(self.key_file.read_bytes(), None)

    @property
    def public_key(self) -> bytes:
        return public_key_to_bytes(self.key.public_key())

    def fleet(self, method: str, request: Any) -> Any:
        """Call one of the Fleet API's methods; `Refused` with the status if it is."""
        return (self._grpc if speaks_grpc() else self._http)(method, request)

    def _grpc(self, method: str, request: Any) -> Any:
        import grpc
        from flwr.client.grpc_rere_client.node_auth_client_interceptor import (
            NodeAuthClientInterceptor,
        )
        from flwr.proto.fleet_pb2_grpc import FleetStub
        from flwr.supercore.grpc import create_channel

        signing = (
            [NodeAuthClientInterceptor(self.key, self.key.public_key())] if self.key_file else None
        )
        channel = create_channel(
            self.address,
            insecure=self.insecure,
            root_certificates=None if self.insecure else self.authority.read_bytes(),
            interceptors=signing,
        )
        try:
            return getattr(FleetStub(channel), method)(request, timeout=15)
        except grpc.RpcError as error:
            raise Refused(error.code().name) from None
        finally:
            channel.close()

    def _http(self, method: str, request: Any) -> Any:
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        client = FleetHttpClient.from_server_address(
            self.address,
            insecure=self.insecure,
            root_certificates=None if self.insecure else str(self.authority),
            interceptors=(
                [NodeAuthHttpInterceptor(self.key, self.key.public_key())] if self.key_file else []
            ),
        )
        try:
            return getattr(client, method)(request)
        except httpx.HTTPStatusError as error:
            raise Refused(str(error.response.status_code)) from None
        except httpx.HTTPError as error:
            raise Refused(type(error).__name__) from None
        finally:
            client.close()


def post(
    port: int, path: str, authority: Path, headers: dict[str, str] | None = None, body: bytes = b""
) -> int:
    """Status of a protobuf request over HTTPS."""
    context = ssl.create_default_context(cafile=str(authority))
    sent = {"content-type": "application/protobuf", **(headers or {})}
    with httpx.Client(verify=context, trust_env=False, timeout=15) as client:
        return client.post(
            f"https://127.0.0.1:{port}{path}", content=body, headers=sent
        ).status_code


def raw(port: int, request: bytes, authority: Path) -> bytes:
    """First line of the answer to bytes sent as they are over TLS."""
    context = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=15) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(request)
        try:
            return connection.recv(1 << 12).split(b"\r\n")[0]
        except OSError:
            return b""


def handshake(port: int, authority: Path) -> str:
    """How TLS goes with whoever listens: "trusted", or why it does not."""
    context = ssl.create_default_context(cafile=str(authority))
    with socket.create_connection(("127.0.0.1", port), timeout=15) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1"):
                return "trusted"
        except ssl.SSLCertVerificationError as error:
            return str(error.verify_message)
