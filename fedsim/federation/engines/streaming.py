"""A wrapper of Flower's own grids that yields each reply when it arrives."""

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
from fedsim.federation.engines.directory import ClientDirectory, FedsimGrid
from fedsim.federation.engines.packed_messages import is_packed, pack_messages, unpack
from fedsim.federation.flower_internals import (
    HTTPStatusError,
    NodeInfo,
    ObjectPushError,
    Run,
    deliver,
    has_expired,
    renew,
)

_log = logging.getLogger("fedsim")

_PUSH_AT_ONCE = 64
_REASONS_LOGGED = 20
_MAX_REASON = 300
_MAX_POLL_SECONDS = 0.5


class StreamingGrid(FedsimGrid):
    """A Flower grid whose `send_and_receive` yields each reply when it arrives.

    Flower's own grid collects a list and sleeps three seconds between polls; this one polls after
    20 ms, and then less and less often. It also maps client ids to nodes, and limits how long to
    wait for nodes.

    Parameters
    ----------
    grid : Grid
        Grid of Flower's simulation or deployment runtime.
    clients : int
        The run's population, for which the first round waits.
    patience : float
        Seconds to wait for the population before the run begins with the connected clients.
    roster : mapping of str to int, optional
        Client id of each registered key, as for `ClientDirectory`.
    times_each_client : bool
        Whether each node works independently, as in a deployment, so that a timeout counted from
        the sending of a message is per client, and no client can delay another.
    packs : bool
        Whether the nodes run fedsim's app, which unpacks messages (`packed_messages`).

    Attributes
    ----------
    directory : ClientDirectory
        Client ids of the nodes.
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
    ) -> None:
        self.times_each_client = times_each_client
        self._grid = grid
        self._clients = clients
        self._packs = packs
        self.directory = ClientDirectory(
            timeout=patience, roster=roster, asks_nodes=True, population=clients
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
        """Node id of each client id, for the nodes connected now.

        The first call waits up to ``patience`` seconds for the whole population.
        """
        if not self._waited:
            self._waited = True
            try:
                return self.directory.wait(self._grid, self._clients)
            except FedsimError as error:
                _log.warning("the run begins with the clients that are connected: %s", error)
        return self.directory.connected_clients(self._grid)

    @property
    def ignored(self) -> Counter[str]:
        """Number of nodes at the last look that are no clients, by reason."""
        return self.directory.ignored

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids; none if the SuperLink is restarted meanwhile, twice.

        A SuperLink that is restarted while it receives messages has them, but not their contents,
        so that no node can answer. They are sent once more under the same ids, by which the
        SuperLink gives each to its node only once. If it comes back when they have expired, it
        refuses them; they are renewed and sent once more, since no node gets a message that has
        expired. (A node that got one earlier has two requests, and charges each that it answers.)
        """
        messages = list(messages)
        if self._packs:
            messages = list(pack_messages(messages))
        for consequence in ("they are sent once more", "these do not answer"):
            for message in filter(has_expired, messages):
                renew(message)
            try:
                return self._grid.push_messages(messages)
            except ObjectPushError as error:
                reason = str(error)
            except HTTPStatusError:
                if not any(map(has_expired, messages)):
                    raise
                reason = "they have expired (engine.timeout) while the SuperLink did not answer."
            _log.warning(
                "%d messages did not reach their nodes; %s: %s", len(messages), consequence, reason
            )
        return []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        return [_unpacked(reply) for reply in self._grid.pull_messages(message_ids)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send all messages, and yield the replies as they arrive.

        Parameters
        ----------
        messages : iterable of Message
        timeout : float, optional
            Seconds to wait for replies. Messages expire after it, so that a late node does no
            useless work, and its reply is not taken for one of another round.
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
            # The clock is read before the poll: one poll follows the deadline, so that replies that
            # arrived in time count, however long it took to process the others.
            over = deadline is not None and time.monotonic() >= deadline
            arrived = list(self.pull_messages(sorted(waiting)))
            for reply in arrived:
                message_id = reply.metadata.reply_to_message_id
                if message_id in waiting:
                    waiting.discard(message_id)
                    self._log_error(reply)
                    yield reply
            if waiting:
                pause = 0.02 if arrived else min(1.5 * pause, _MAX_POLL_SECONDS)
                time.sleep(pause)

    def _log_error(self, reply: Message) -> None:
        """Log the error of a node's reply; each reason once, and a limited number of reasons."""
        if not reply.has_error() or len(self._logged) >= _REASONS_LOGGED:
            return
        reason = printable(reply.error.reason, _MAX_REASON)
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("a node answered with an error: %s", reason)


def _unpacked(reply: Message) -> Message:
    """The unpacked reply; one that cannot be unpacked stays packed.

    The decoder of replies then finds no arrays in it, and counts it as malformed.
    """
    if not reply.has_content() or not is_packed(reply.content):
        return reply
    with suppress(Exception):
        return deliver(reply, unpack(reply.content))
    return reply
