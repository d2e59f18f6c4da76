"""Flower's own grids, with each reply given when it arrives."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from flwr.app import Message
from flwr.serverapp import Grid

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError, printable
from fedsim.federation.engines.directory import ClientDirectory, OwnGrid
from fedsim.federation.engines.packed_messages import is_packed, pack_messages, unpack
from fedsim.federation.flower_internals import NodeInfo, ObjectPushError, Run, deliver

_log = logging.getLogger("fedsim")

_PUSH_AT_ONCE = 64
_REASONS_LOGGED = 20
_LONGEST_REASON = 300


class StreamingGrid(OwnGrid):
    """A Flower grid whose `send_and_receive` gives each reply when it arrives.

    Flower's own collects a list and sleeps three seconds between looks; this one looks after
    20 ms, and then less and less often. It also knows which node is which client, and bounds
    Flower's wait for nodes.

    Parameters
    ----------
    grid : Grid
        Flower's, of its simulation or its deployment runtime.
    clients : int
        The run's population, for which the first round waits.
    patience : float
        Seconds that it waits for them, before the run begins with those that are connected.
    roster : mapping of str to int, optional
        Client id of each registered key, as for `ClientDirectory`.
    times_each_client : bool
        Whether each node works by itself, as in a deployment, so that the time from when a
        message is sent is that node's own, and no client can make another late.
    packs : bool
        Whether the nodes run fedsim's app, which unpacks messages (`packed_messages`).
    slowest_look : float
        Seconds between two looks, at most.
    """

    @check_arguments
    def __init__(
        self,
        grid: Grid,
        *,
        clients: int = 1,
        patience: float = 60.0,
        roster: Mapping[str, int] | None = None,
        times_each_client: bool = False,
        packs: bool = False,
        slowest_look: float = 0.5,
    ) -> None:
        self.times_each_client = times_each_client
        self._grid = grid
        self._clients = clients
        self._packs = packs
        self._slowest_look = slowest_look
        self._directory = ClientDirectory(
            timeout=patience, roster=roster, asks=True, population=clients
        )
        self._waited = False
        self._logged: set[str] = set()

    def set_run(self, run: Run) -> None:
        """Set the run that this grid belongs to."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that this grid belongs to."""
        return self._grid.run

    def get_node_ids(self) -> list[int]:
        """Ids of the nodes connected now, sorted."""
        return sorted(self._grid.get_node_ids())

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Flower's description of each node."""
        return self._grid.get_nodes()

    def client_ids(self) -> Mapping[int, int]:
        """Node id of each client id, of the nodes connected now.

        The first call waits for the clients that the run needs, for as long as ``patience``.
        """
        if not self._waited:
            self._waited = True
            try:
                return self._directory.wait(self._grid, self._clients)
            except FedsimError as error:
                _log.warning("the run begins with the clients that are connected: %s", error)
        return self._directory.look(self._grid)

    @property
    def ignored(self) -> Counter[str]:
        """Nodes connected at the last look that are no client, by reason."""
        return self._directory.ignored

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and give their ids: none if the SuperLink restarts in the middle.

        It then knows of these messages and has lost their contents, so that no node can answer.
        """
        messages = list(messages)
        if self._packs:
            messages = list(pack_messages(messages))
        try:
            return self._grid.push_messages(messages)
        except ObjectPushError as error:
            _log.warning("%d messages did not reach their nodes: %s", len(messages), error)
            return []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Take the replies that have arrived."""
        return [_unpacked(reply) for reply in self._grid.pull_messages(message_ids)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages at once, and give the replies as they come, in any order.

        Parameters
        ----------
        messages : iterable of Message
        timeout : float, optional
            Seconds to wait for replies. Messages expire with it: a node that is late does not
            work for nothing, and its reply is not taken for one of another round.
        """
        waiting: set[str] = set()
        todo = iter(messages)
        while batch := list(itertools.islice(todo, _PUSH_AT_ONCE)):
            if timeout is not None:
                for message in batch:
                    message.metadata.ttl = min(message.metadata.ttl, timeout)
            waiting |= {pushed for pushed in self.push_messages(batch) if pushed}
        deadline = None if timeout is None else time.monotonic() + timeout
        return self._replies(waiting, deadline)

    def _replies(self, waiting: set[str], deadline: float | None) -> Iterator[Message]:
        pause = 0.02
        over = False
        while waiting and not over:
            # Looked at before the last look: what has come in time is taken, however long it
            # took to take the others'.
            over = deadline is not None and time.monotonic() >= deadline
            arrived = list(self.pull_messages(sorted(waiting)))
            for reply in arrived:
                message_id = reply.metadata.reply_to_message_id
                if message_id in waiting:
                    waiting.discard(message_id)
                    self._log_error(reply)
                    yield reply
            if waiting:
                pause = 0.02 if arrived else min(1.5 * pause, self._slowest_look)
                time.sleep(pause)

    def _log_error(self, reply: Message) -> None:
        """Log why a node has no answer: each reason once, and not too many."""
        if not reply.has_error() or len(self._logged) >= _REASONS_LOGGED:
            return
        reason = printable(reply.error.reason, _LONGEST_REASON)
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("a node answered with an error: %s", reason)


def _unpacked(reply: Message) -> Message:
    """A reply as it was before it was packed; one that cannot be unpacked stays packed.

    The decoder of replies then finds no arrays in it, and says so.
    """
    if not reply.has_content() or not is_packed(reply.content):
        return reply
    with suppress(Exception):
        return deliver(reply, unpack(reply.content))
    return reply
