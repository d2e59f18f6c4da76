"""A Flower Grid on this machine, in one process or several, without a server or Ray."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.federation.engines.client_app import client_app
from fedsim.federation.engines.directory import ConsecutiveNodes, FedsimGrid
from fedsim.federation.engines.dispatch import RETRIES, Dispatch
from fedsim.federation.engines.forked import ForkedWorkerPool
from fedsim.federation.engines.process import keep_freed_memory
from fedsim.federation.engines.workers import WorkerPool, guarded_blocks
from fedsim.federation.exchange import Instructions, Replies
from fedsim.federation.flower_internals import (
    CLIENT_RAISED,
    NODE_UNAVAILABLE,
    NodeInfo,
    Run,
    deliver,
    empty_run,
    ensure_identity,
    error_reply,
    send_as,
    set_message_id,
    unavailable,
)
from fedsim.mechanisms import PartialSum
from fedsim.process import Closed
from fedsim.rows.block import Block, BlockTrainer
from fedsim.rows.layout import Layout
from fedsim.training import Trainer

# Flower reserves 0, for no node, and 1, for the SuperLink.
_FIRST_NODE_ID = 2

Handler = Callable[[Message, Context], Message]


class LocalGrid(Closed, FedsimGrid):
    """Nodes that live in this process, and run when their replies are requested.

    Node ids follow the order of the client ids, and each node has one `Context` for its lifetime.
    A client that raises gives an error reply. Clients must draw random numbers from generators
    that they seed themselves; nothing else here is random.

    Parameters
    ----------
    client : ClientApp or BlockTrainer
        A Flower app is run once for each message. A block trainer trains whole blocks for a
        strategy that sends `Instructions`, and is wrapped in a Flower app for any other.
    num_nodes : int, optional
        Number of nodes; by default, and at most, a block trainer's population.
    run_config : mapping, optional
        Entries of every client's ``context.run_config``.
    node_config : mapping, optional
        Entries of every client's ``context.node_config``, in addition to "partition-id" and
        "num-partitions".
    run_id : int
    workers : int
        With more than one, blocks are trained by this number of processes. They are forked from
        this one when training first begins, share its memory, and end with `close`. Each bounds and
        sums the rows that it trains, and sums merge exactly: bytes do not depend on the number of
        workers. A worker that dies is replaced and its clients are trained again; clients that keep
        killing their worker fail, and so does one that alone exceeds the round's timeout. A
        Flower app's clients run one after another in this process, for any number.
    retries : int
        How many times clients may lose their worker before they are tried one by one, each on a
        worker that does nothing else meanwhile.

    Attributes
    ----------
    times_each_client : bool
        True: a timeout counts from each client's own start, so that a slow client does not exclude
        others. A private run sets no timeout on a grid without this attribute.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> grid = LocalGrid(ClientApp(), num_nodes=3)
    >>> dict(grid.client_ids())
    {0: 2, 1: 3, 2: 4}
    """

    times_each_client = True

    @check_arguments
    def __init__(
        self,
        client: ClientApp | BlockTrainer,
        *,
        num_nodes: int | None = None,
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
        run_id: int = 1,
        workers: int = 1,
        retries: int = RETRIES,
    ) -> None:
        if workers < 1:
            raise FedsimError(f"workers is {workers}; it must be at least 1.")
        self._app: Handler | None = client if isinstance(client, ClientApp) else None
        self._trainer = None if isinstance(client, ClientApp) else require_trainer(client)
        self._num_nodes = _count_nodes(self._trainer, num_nodes)
        if self._trainer is not None:
            keep_freed_memory()
        self._run_config = dict(run_config or {})
        self._node_config = dict(node_config or {})
        self._run = empty_run(run_id)
        self._contexts: dict[int, Context] = {}
        self._pushed: dict[str, Message] = {}
        self._one_client = threading.Lock()
        self._expires: dict[str, float] = {}
        # A message's ttl excludes the time in which other clients train, since clients here train
        # one after another.
        self._worked = 0.0
        self._serial = itertools.count(1)
        self._open: Replies | None = None
        self._workers = workers
        self._retries = retries
        self._pool: WorkerPool[Any] | None = None
        ensure_identity(run_id)

    def close(self) -> None:
        """End the workers, if there are any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def layout(self) -> Layout | None:
        """Layout of the parameters that the clients train; None if the trainer has none."""
        return getattr(self._trainer, "layout", None)

    def set_run(self, run: Run) -> None:
        """Set the run that this grid belongs to; a new run clears the nodes' contexts."""
        if run.run_id != self._run.run_id:
            self._contexts.clear()
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid belongs to."""
        return self._run

    def get_node_ids(self) -> list[int]:
        """Node ids, sorted; the same in every run."""
        return list(range(_FIRST_NODE_ID, _FIRST_NODE_ID + self._num_nodes))

    def get_nodes(self) -> list[NodeInfo]:
        """Flower's description of each node, in the order of the ids."""
        return [NodeInfo(node_id=node_id) for node_id in self.get_node_ids()]

    def client_ids(self) -> Mapping[int, int]:
        """Node id of each client id, without sending messages."""
        return ConsecutiveNodes(_FIRST_NODE_ID, self._num_nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Queue messages; their clients run when the replies are pulled.

        Returns
        -------
        list of str
            Ids to pull the replies by, in the order of the messages.
        """
        return [self._queue(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Run the clients of these messages, and return each reply once.

        As in Flower, the reply is an error if a message has exceeded its ``ttl``, was answered
        before, or was never sent. Time that other clients work does not count towards the ``ttl``.
        """
        return [self._reply(message_id) for message_id in message_ids]

    @property
    def trains_blocks(self) -> bool:
        """Whether clients are run by a block trainer, and not by a Flower app."""
        return self._trainer is not None

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies, in the order of the messages.

        Parameters
        ----------
        messages : iterable of Message
            `Instructions` to a block trainer are trained in blocks as the replies are read, and
            their replies have no particular order.
        timeout : float, optional
            Seconds that a client's reply may take, from the client's own start, so that no client
            is late because of another. In one process a late client is not ended, but its reply is
            dropped; clients that train in a block have no separate times, and no timeout.

        Returns
        -------
        Replies or list of Message
            `Replies` to a block trainer's `Instructions`. Those not read are completed before the
            next messages are sent.
        """
        if self._open is not None:
            for _ in self._open.blocks():  # train the clients whose blocks were not read
                pass
            self._open = None
        # Instructions of fedsim's own strategy are trained in blocks. Other strategies send plain
        # messages, as do wrappers that iterate over the instructions; each is answered by itself.
        if self._trainer is not None and isinstance(messages, Instructions):
            trainer, instructions = self._trainer, messages
            if instructions.message_type == "train":
                trainer.receive(instructions.config)
                # One ledger line a round, before any client trains.
                trainer.charge(instructions.recipients.client_ids, instructions.round)
            self._open = Replies(
                instructions,
                partial(self._blocks, trainer, instructions, timeout),
                # Workers sum the rows where they train them.
                sums=self._workers > 1 or self._pool is not None,
            )
            return self._open
        replies = []
        worked = self._worked
        for message in messages:
            message_id = self._queue(message, self._worked - worked)
            started = time.monotonic()
            reply = self._reply(message_id)
            if timeout is None or time.monotonic() - started < timeout:
                replies.append(reply)
        return replies

    def _blocks(
        self,
        trainer: BlockTrainer,
        instructions: Instructions,
        timeout: float | None,
        into: PartialSum | None,
    ) -> Iterator[Block]:
        # Fork at the first round, so that workers have all changes to the trainer until then.
        if self._workers > 1 and self._pool is None:
            self._pool = ForkedWorkerPool(trainer, self._workers)
        if self._pool is not None:
            return Dispatch(
                self._pool,
                trainer,
                instructions,
                timeout,
                retries=self._retries,
                into=into,
            ).blocks()
        client_ids = np.asarray(instructions.recipients.client_ids, dtype=np.int64)
        return guarded_blocks(trainer, instructions, client_ids)

    def _queue(self, message: Message, excluded_seconds: float = 0.0) -> str:
        """Queue a message; its ttl excludes these seconds since its creation."""
        metadata = message.metadata
        if metadata.ttl <= 0:
            raise FedsimError(f"a message's ttl is {metadata.ttl} s; it must be positive.")
        # A counter and not a random id, so that ids are the same in every run.
        message_id = f"{next(self._serial):016x}"
        send_as(message, message_id, self._run.run_id)
        age = time.time() - metadata.created_at - excluded_seconds
        # Flower's strategies put one RecordDict into all of a round's messages, so that a client
        # could change its neighbours'. Only the arrays' immutable bytes stay shared.
        self._pushed[message_id] = deliver(message, copy.deepcopy(message.content))
        self._expires[message_id] = self._clock() + metadata.ttl - age
        return message_id

    def _clock(self) -> float:
        """Seconds by the monotonic clock, without the time that clients have worked."""
        return time.monotonic() - self._worked

    def _reply(self, message_id: str) -> Message:
        # Removed from the queue: as in Flower, a reply can be pulled only once.
        message = self._pushed.pop(message_id, None)
        seconds_left = self._expires.pop(message_id, 0.0) - self._clock()
        if message is None or seconds_left < 0:
            reply = unavailable(message_id, self._run.run_id)
        else:
            # Flower's older strategies send from several threads, but clients share state that is
            # not thread-safe: torch's generators, and Python 3.11's parser of numpy's headers.
            with self._one_client:
                started = time.monotonic()
                reply = self._answer(message)
                seconds = time.monotonic() - started
                self._worked += seconds
            if seconds > seconds_left:
                reply = unavailable(message_id, self._run.run_id)
        set_message_id(reply, f"{next(self._serial):016x}")
        return reply

    def _answer(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        if not _FIRST_NODE_ID <= node_id < _FIRST_NODE_ID + self._num_nodes:
            return error_reply(message, NODE_UNAVAILABLE, f"there is no node {node_id}")
        try:
            reply = self._handler()(message, self._context(node_id))
            _check_answers(reply, message)
        # A client's code may raise any exception, or call `sys.exit`.
        except (Exception, SystemExit) as error:
            return error_reply(message, CLIENT_RAISED, f"{type(error).__name__}: {error}")
        return reply

    def _handler(self) -> Handler:
        if self._app is None:
            trainer = self._trainer
            if not isinstance(trainer, Trainer):
                raise FedsimError(
                    f"a {type(trainer).__name__} trains for fedsim's strategies only; to answer "
                    "others' messages it must be a fedsim Trainer."
                )
            self._app = client_app(lambda _context: trainer)
        return self._app

    def _context(self, node_id: int) -> Context:
        if node_id not in self._contexts:
            self._contexts[node_id] = Context(
                run_id=self._run.run_id,
                node_id=node_id,
                node_config={
                    **self._node_config,
                    "partition-id": node_id - _FIRST_NODE_ID,
                    "num-partitions": self._num_nodes,
                },
                state=RecordDict(),
                run_config=dict(self._run_config),
            )
        return self._contexts[node_id]


def _check_answers(reply: object, message: Message) -> None:
    """Refuse anything but a reply to ``message`` from its node, as Flower's SuperLink does."""
    if not isinstance(reply, Message):
        raise TypeError(f"the client returned a {type(reply).__name__}, not a Message")
    request, answer = message.metadata, reply.metadata
    if answer.reply_to_message_id != request.message_id:
        raise ValueError("the client replied to a message other than the one it was sent")
    if (answer.src_node_id, answer.run_id) != (request.dst_node_id, request.run_id):
        raise ValueError("the client replied in another node's name, or for another run")


def require_trainer(trainer: BlockTrainer | ClientApp) -> BlockTrainer:
    """Return the argument if it is a block trainer.

    Raises
    ------
    FedsimError
        If it does not implement `BlockTrainer`.
    """
    if isinstance(trainer, BlockTrainer) and hasattr(trainer, "population"):
        return trainer
    raise FedsimError(
        f"a {type(trainer).__name__} is not a fedsim.rows.block.BlockTrainer; derive a class with "
        "population, train and evaluate from it (a ClientApp runs on "
        "LocalGrid, or in Flower's own simulation)."
    )


def _count_nodes(trainer: BlockTrainer | None, num_nodes: int | None) -> int:
    if trainer is None:
        if num_nodes is None or num_nodes < 1:
            raise FedsimError(
                f"num_nodes is {num_nodes}; a LocalGrid of a ClientApp needs at least one node."
            )
        return num_nodes
    population = trainer.population
    if num_nodes is None:
        return population
    if not 1 <= num_nodes <= population:
        raise FedsimError(
            f"num_nodes is {num_nodes}; it must lie between 1 and the trainer's population, "
            f"{population}."
        )
    return num_nodes
