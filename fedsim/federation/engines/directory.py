"""The mapping between client ids and Flower nodes.

Flower assigns node ids, at random in its simulation runtime; fedsim's random draws are keyed by
client ids. In a deployment the operator's roster maps registered keys to client ids, and nodes are
not asked. fedsim's own client app (virtual clients, a federation without keys) answers a QUERY
message with a `MetricRecord` that has its ``client-id``. Other apps cannot answer, and each query
puts a traceback into their log. A directory that does not know the app therefore sends no queries,
and numbers the nodes in the order of their node ids; so does one whose queries end in such errors.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cryptography.hazmat.primitives import serialization
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.federation.flower_internals import CLIENT_RAISED, NodeInfo

_log = logging.getLogger("fedsim")

CLIENT_ID_KEY = "client-id"


class FedsimGrid(Grid):
    """Base of grids outside Flower, with the method that Flower's older grid interface requires."""

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; Flower now prefers ``Message(...)`` itself."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


@dataclass(frozen=True, eq=False)
class ConsecutiveNodes(Mapping[int, int]):
    """Consecutive node ids of clients 0, 1, ..., without memory for each client.

    Attributes
    ----------
    first : int
        Node id of client 0.
    count : int
        Number of clients.

    Examples
    --------
    >>> dict(ConsecutiveNodes(2, 3))
    {0: 2, 1: 3, 2: 4}
    """

    first: int
    count: int

    def __getitem__(self, client: int) -> int:
        if client not in range(self.count):
            raise KeyError(client)
        return self.first + client

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


@runtime_checkable
class ClientIdSource(Protocol):
    """A grid that knows the client ids of its nodes without asking them."""

    def client_ids(self) -> Mapping[int, int]:
        """Node id of each client id."""


@dataclass
class ClientDirectory:
    """Client ids of a grid's nodes: from registered keys, from the nodes' answers, or by number.

    No node can end a run: one with an invalid or duplicate id is ignored and counted.

    Parameters
    ----------
    timeout : float
        Seconds that the first `connected_clients` waits for the nodes' answers, and `wait` for
        clients. A node that has not answered is left out until it does; later calls do not wait
        for it.
    roster : mapping of str to int, optional
        Client id of each registered key, by its `key_digest`. If given, nodes are not asked.
    asks_nodes : bool
        Whether nodes are asked for their client ids, which fedsim's app answers. Nodes that are not
        asked, or whose app cannot answer, are numbered in the order of their node ids, and later
        ones get the next numbers.
    population : int
        Claimed client ids must be below this number.

    Attributes
    ----------
    ignored : Counter of str
        Number of nodes at the last look that are no clients, by reason: ``no key``,
        ``unlisted key``, ``duplicate key``; without a roster ``bad claim``, ``duplicate claim``,
        and ``late arrival`` where ``assigns_new_ids`` is False.
    assigns_new_ids : bool
        Whether a node that joins now gets a number, if nodes are numbered. It may be a client that
        had another number before its SuperNode was restarted.
    """

    timeout: float = 60.0
    roster: Mapping[str, int] | None = None
    asks_nodes: bool = False
    population: int = 2**63
    ignored: Counter[str] = field(default_factory=Counter, init=False)
    assigns_new_ids: bool = field(default=True, init=False)
    _client_of: dict[int, int | str] = field(default_factory=dict, init=False, repr=False)
    _number_of: dict[int, int | str] = field(default_factory=dict, init=False, repr=False)
    _pending: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _has_asked: bool = field(default=False, init=False, repr=False)

    def connected_clients(self, grid: Grid) -> Mapping[int, int]:
        """Node id of each client id, for the nodes connected now; sorted by client id.

        Nodes that share one client id are all ignored, since any of them may be an impostor.
        """
        if isinstance(grid, ClientIdSource):
            node_of = grid.client_ids()
            self.ignored = Counter(getattr(grid, "ignored", {}))
            return node_of
        if self.roster is not None:
            return self._node_of_client(
                (node.node_id, _by_key(node, self.roster)) for node in grid.get_nodes()
            )
        nodes = sorted(grid.get_node_ids())
        if self.asks_nodes:
            # In later rounds a new node must not delay a round.
            patience = 0.0 if self._has_asked else self.timeout
            self._has_asked = True
            self._ask(grid, nodes)
            self._listen(grid, patience)
        else:
            self._number(nodes)
        # If any node claims a client id, numbers of other nodes are not used: they would collide
        # with claimed ids.
        claims = self._client_of or self._number_of
        return self._node_of_client((node, claims[node]) for node in nodes if node in claims)

    def wait(self, grid: Grid, clients: int) -> Mapping[int, int]:
        """Repeat `connected_clients` until there are enough clients or ``timeout`` has passed.

        Parameters
        ----------
        clients : int
            Number of clients to wait for.

        Raises
        ------
        FedsimError
            If there are fewer clients at the timeout, or at once on a grid of one process, which no
            other node joins.
        """
        deadline = time.monotonic() + self.timeout
        self._has_asked = True
        while len(present := self.connected_clients(grid)) < clients:
            if isinstance(present, ConsecutiveNodes):
                raise FedsimError(
                    f"the grid has {len(present)} nodes, and min_available_nodes = {clients} waits "
                    f"for more, which it will never have; it must be at most {len(present)}."
                )
            if time.monotonic() >= deadline:
                connected = len(list(grid.get_node_ids()))
                raise FedsimError(
                    f"{len(present)} of the {clients} clients have identified themselves after "
                    f"{self.timeout:g} s ({connected} nodes are connected); engine.node-timeout "
                    "(Availability.node_timeout of DPFedAvg) says how long to wait."
                )
            time.sleep(0.1)
        return present

    def _node_of_client(self, ids_or_reasons: Iterable[tuple[int, int | str]]) -> dict[int, int]:
        """Node of each client, given each node's client id or the reason why it has none."""
        nodes_of: dict[int, list[int]] = {}
        ignored: Counter[str] = Counter()
        for node, id_or_reason in ids_or_reasons:
            if isinstance(id_or_reason, str):
                ignored[id_or_reason] += 1
            else:
                nodes_of.setdefault(id_or_reason, []).append(node)
        node_of = {
            client: nodes[0] for client, nodes in sorted(nodes_of.items()) if len(nodes) == 1
        }
        doubtful = sum(len(nodes) for nodes in nodes_of.values()) - len(node_of)
        if doubtful:
            ignored["duplicate claim" if self.roster is None else "duplicate key"] = doubtful
        if ignored != self.ignored:
            reasons = ", ".join(
                f"{count} for {reason}" for reason, count in sorted(ignored.items())
            )
            _log.warning("nodes ignored: %s", reasons or "none any more")
        self.ignored = ignored
        return node_of

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        silent = set(self._pending.values())
        claims = self._client_of or self._number_of
        new_nodes = [node for node in nodes if node not in claims and node not in silent]
        if not new_nodes:
            return
        queries = [Message(RecordDict(), node, MessageType.QUERY) for node in new_nodes]
        for message_id, node in zip(grid.push_messages(queries), new_nodes, strict=True):
            if message_id:
                self._pending[message_id] = node

    def _listen(self, grid: Grid, patience: float) -> None:
        deadline = time.monotonic() + patience
        pause = 0.01
        numberless: set[int] = set()
        while self._pending:
            for reply in grid.pull_messages(sorted(self._pending)):
                # Flower sends errors on a node's behalf from another node id: identify the node by
                # the query that the reply answers.
                node = self._pending.pop(reply.metadata.reply_to_message_id, None)
                if node is not None and not self._record_claim(node, reply):
                    numberless.add(node)
            if time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        self._number(sorted(numberless))

    def _number(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            number = len(self._number_of) if self.assigns_new_ids else "late arrival"
            self._number_of.setdefault(node, number)

    def _record_claim(self, node: int, reply: Message) -> bool:
        """Record the client id that a node claims; False if its app does not answer queries."""
        if reply.has_error():
            # Flower's error for an app without a query handler is that of one that raised. Any
            # other error means that the query did not arrive, and is sent again.
            return reply.error.code != CLIENT_RAISED
        for record in reply.content.metric_records.values():
            if CLIENT_ID_KEY in record:
                claimed = record[CLIENT_ID_KEY]
                if isinstance(claimed, int) and 0 <= claimed < self.population:
                    self._client_of[node] = claimed
                else:
                    self._client_of[node] = "bad claim"
                return True
        return False


def key_digest(public_key: bytes) -> str | None:
    """SHA-256 of a public key's SubjectPublicKeyInfo, in hex; None if it is not a key.

    Parameters
    ----------
    public_key : bytes
        In PEM format, as Flower provides registered keys, or OpenSSH, as in node key files.
    """
    loaders = (serialization.load_pem_public_key, serialization.load_ssh_public_key)
    for load in loaders:
        try:
            key = load(public_key)
        except Exception:  # untrusted bytes may make a parser raise any exception
            continue
        der = key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return hashlib.sha256(der).hexdigest()
    return None


def _by_key(node: NodeInfo, roster: Mapping[str, int]) -> int | str:
    digest = key_digest(node.public_key)
    if digest is None:
        return "no key"
    return roster.get(digest, "unlisted key")


@check_arguments
def client_ids(grid: Grid, *, timeout: float = 60.0) -> Mapping[int, int]:
    """Node id of each client id, for the connected nodes, which must run fedsim's client app."""
    return ClientDirectory(timeout, asks_nodes=True).connected_clients(grid)
