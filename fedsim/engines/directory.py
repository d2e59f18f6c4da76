"""Which Flower node is which client.

Node ids are Flower's, random in its simulation runtime; client ids are ours, and draws are
keyed by them. A node says which client it is when asked by a QUERY message, to which
fedsim's client app replies with a `MetricRecord` that has a ``client-id``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedsim.engines.messages import CLIENT_RAISED
from fedsim.errors import FedsimError

__all__ = ["CLIENT_ID_KEY", "ClientDirectory", "client_ids"]

CLIENT_ID_KEY = "client-id"


@runtime_checkable
class KnowsClients(Protocol):
    """A grid that can say which node is which client without asking it."""

    def client_ids(self) -> dict[int, int]:
        """Node id of each client id."""


@dataclass
class ClientDirectory:
    """Client ids of a grid's nodes, asked once for each node.

    Parameters
    ----------
    timeout : float
        Seconds that the first `look` waits for the nodes' answers, and `wait` for clients. A
        node that has not answered is left out until it does; nobody waits for it again.
    """

    timeout: float = 60.0
    _client_of: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _number_of: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _pending: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _looked: bool = field(default=False, init=False, repr=False)

    def look(self, grid: Grid) -> dict[int, int]:
        """Node id of each client id, of the nodes connected now; sorted by client id.

        Nodes whose app has no query handler are known by their node ids: they are numbered in
        sorted order, and those that come later go on from there.

        Raises
        ------
        FedsimError
            If two connected nodes claim one client id, or one claims something that is none.
        """
        if isinstance(grid, KnowsClients):
            return grid.client_ids()
        # Later on a new node must not hold up a round.
        patience = 0.0 if self._looked else self.timeout
        self._looked = True
        return self._look(grid, patience)

    def wait(self, grid: Grid, clients: int, timeout: float | None = None) -> dict[int, int]:
        """`look`, again and again until there are so many clients or the time is up.

        Parameters
        ----------
        clients : int
            How many clients to wait for.
        timeout : float, optional
            Seconds to wait for them; the directory's own by default.

        Raises
        ------
        FedsimError
            If there are fewer clients when the time is up, and as `look` does.
        """
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        self._looked = True
        while len(found := self.look(grid)) < clients:
            if time.monotonic() >= deadline:
                raise FedsimError(
                    f"{len(found)} clients were there after {limit:g} s; the run needs {clients}."
                )
            time.sleep(0.1)
        return found

    def _look(self, grid: Grid, patience: float) -> dict[int, int]:
        nodes = sorted(grid.get_node_ids())
        self._ask(grid, nodes)
        self._listen(grid, patience)
        # A federation whose clients say who they are has no use for the others' numbers,
        # which would collide with somebody's id.
        known = self._client_of or self._number_of
        claims: dict[int, int] = {}
        for node in nodes:
            if (client := known.get(node)) is None:
                continue
            if client in claims:
                raise FedsimError(
                    f"nodes {claims[client]} and {node} both claim client id {client}; each "
                    "client id (the node config's 'partition-id') may be used by one node."
                )
            claims[client] = node
        return dict(sorted(claims.items()))

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        silent = set(self._pending.values())
        known = self._client_of or self._number_of
        new = [node for node in nodes if node not in known and node not in silent]
        if not new:
            return
        asked = [Message(RecordDict(), node, MessageType.QUERY) for node in new]
        for message_id, node in zip(grid.push_messages(asked), new, strict=True):
            if message_id:
                self._pending[message_id] = node

    def _listen(self, grid: Grid, patience: float) -> None:
        deadline = time.monotonic() + patience
        pause = 0.01
        numberless: set[int] = set()
        while self._pending:
            for reply in grid.pull_messages(sorted(self._pending)):
                # An error made on a node's behalf comes from elsewhere: only the message
                # that it answers says whose it is.
                node = self._pending.pop(reply.metadata.reply_to_message_id, None)
                if node is not None and not self._note(node, reply):
                    numberless.add(node)
            if time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        for node in sorted(numberless - set(self._number_of)):
            self._number_of[node] = len(self._number_of)

    def _note(self, node: int, reply: Message) -> bool:
        """Note what a node said; False if its app has no answer to give."""
        if reply.has_error():
            # Flower answers for an app without a query handler as for one that raised;
            # any other error means that the question did not arrive, and is asked again.
            return reply.error.code != CLIENT_RAISED
        for record in reply.content.metric_records.values():
            if CLIENT_ID_KEY in record:
                claimed = record[CLIENT_ID_KEY]
                if not isinstance(claimed, int) or claimed < 0:
                    raise FedsimError(
                        f"node {node} claims client id {claimed!r}; it must be an integer, 0 or "
                        "more."
                    )
                self._client_of[node] = claimed
                return True
        return False


def client_ids(grid: Grid, *, timeout: float = 60.0) -> dict[int, int]:
    """Node id of each client id, of the nodes connected now: a `ClientDirectory`'s first look."""
    return ClientDirectory(timeout).look(grid)
