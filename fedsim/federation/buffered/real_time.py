"""Buffered rounds in real time: over a network, where requests are sent and answered one by one.

With a schedule, the seconds of a client are declared. A release is made when those of all clients
in it are over, whoever has answered. What is not there by then is a zero in its place, and dropped
if it comes later. So an answer's time decides nothing but that, and with the same schedule the
releases have the same bytes as on a virtual clock. Without a schedule, and without privacy, a
release is made of the answers that come first.

::

    configure_train -> RealTimeSum.request(): an exchange, which has sent nothing yet
    run_to_end      -> Exchange.over(grid, timeout)
    aggregate_train -> RealTimeSum.replies(): sends requests and receives answers, until the release

A request's answer is a difference from the version that was sent with it, whose vector is kept
until then; a checkpoint has those vectors. A resumed run sends the requests again that had no
release yet.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedsim.array_types import Bools, Ints
from fedsim.errors import FedsimError, RunFailedError
from fedsim.federation.arrays import array_record, tensors, to_arrays
from fedsim.federation.buffered.schedule import ReleaseSchedule
from fedsim.federation.buffered.sums import BufferSum, weighted
from fedsim.federation.exchange import Exchange, Instructions, Recipients
from fedsim.federation.extras import Extra
from fedsim.federation.flower_internals import TIMED_OUT, error_reply
from fedsim.federation.replies import Reply, read_replies
from fedsim.federation.round_report import Tally
from fedsim.federation.row_sums import Summing
from fedsim.mechanisms import PartialSum
from fedsim.privacy.laws.buffered import Buffered
from fedsim.privacy.laws.sampler import declared_population
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import DenseRows
from fedsim.rows.block import KEEP_SINCE, Block

BUSY = 3600.0
"""Seconds that the server may be busy with a release and what follows, such as an evaluation."""
LONGEST_PAUSE = 0.5
"""Seconds at most from one look at the answers to the next."""


@dataclass(frozen=True, eq=False)
class Request:
    """A client that was asked to train a version.

    Attributes
    ----------
    client : int
    instructions : Instructions
        Of the version, for this client alone.
    release : int
        Number of the release with its update; 0 if that is not known in advance.
    end : float
        When it has had its time, by `time.monotonic`.
    """

    client: int
    instructions: Instructions
    release: int
    end: float

    @property
    def version(self) -> int:
        """The version that it trains."""
        return self.instructions.round - 1


Answer = tuple[Request, Message]
NewRequest = tuple[int, Instructions, int, float]
"""A client, what it is sent, its release, and its seconds."""
Nodes = Callable[[Grid], Mapping[int, int]]
"""Function that returns the node id of each client that is connected to a grid."""
Replying = Callable[[int, Ints], Bools]


class Requests(Extra):
    """The requests in flight, over all rounds.

    Parameters
    ----------
    cohort : Buffered
    nodes : callable
        As `Nodes`.
    replying : callable or None
        As of `Availability`.
    """

    def __init__(self, cohort: Buffered, nodes: Nodes, replying: Replying | None) -> None:
        self.cohort, self._nodes, self._replying = cohort, nodes, replying
        self._waiting: dict[str, Request] = {}  # by message id

    @abstractmethod
    def answers(
        self, grid: Grid, instructions: Instructions, timeout: float | None
    ) -> Iterator[Answer]:
        """Send a round's requests, and yield the answers that are in its release, as they come."""

    def _taking_part(self, grid: Grid, number: int, clients: Ints) -> dict[int, int]:
        """Node of each of these clients that is connected, and takes part in the round."""
        nodes = self._nodes(grid)
        present = clients[[client in nodes for client in clients.tolist()]]
        if self._replying is not None:
            present = present[self._replying(number, present)]
        return {client: nodes[client] for client in present.tolist()}

    def _count_load(self, number: int, started: Ints) -> None:
        """Call the rule for all that have started in a round, whose load it counts."""
        if self._replying is not None:
            self._replying(number, started)

    def _push(self, grid: Grid, nodes: Mapping[int, int], requests: Sequence[NewRequest]) -> None:
        """Send requests to clients' nodes."""
        messages, sent = list[Message](), []
        for client, instructions, release, seconds in requests:
            if client in nodes:
                node = np.array([nodes[client]], dtype=np.uint64)
                recipient = Recipients(np.array([client]), node)
                own = replace(instructions, recipients=recipient, numbers={})
                (message,) = own
                # An answer that has come in time is pulled once the server is not busy any more.
                message.metadata.ttl = seconds + BUSY
                messages.append(message)
                sent.append((client, own, release, seconds))
        ids = list(grid.push_messages(messages)) if messages else []
        now = time.monotonic()
        for message_id, (client, own, release, seconds) in zip(ids, sent, strict=False):
            if message_id:
                self._waiting[message_id] = Request(client, own, release, now + seconds)

    def _pull(self, grid: Grid) -> Iterator[Answer]:
        """The answers that have come."""
        for answer in grid.pull_messages(sorted(self._waiting)) if self._waiting else ():
            request = self._waiting.pop(answer.metadata.reply_to_message_id, None)
            if request is not None:
                yield request, answer


class ScheduledRequests(Requests):
    """Requests of a schedule, whose seconds each client has in real time.

    While the server is busy with a release the schedule stands still, so that clients may have more
    time than declared, and never less.

    Parameters
    ----------
    cohort, nodes, replying
        As for `Requests`.
    schedule : ReleaseSchedule
    """

    def __init__(
        self,
        cohort: Buffered,
        nodes: Nodes,
        replying: Replying | None,
        schedule: ReleaseSchedule,
    ) -> None:
        super().__init__(cohort, nodes, replying)
        self._schedule = schedule
        self._vectors: dict[int, Tensor] = {}
        self._begun: set[int] = set()  # versions whose requests were sent by this process
        self._ends: dict[int, float] = defaultdict(float)  # of each release
        self._early: dict[int, list[Answer]] = defaultdict(list)

    def send(self, instructions: Instructions) -> Instructions:
        """The instructions; clients that keep state keep it for requests that are sent again."""
        since = instructions.config.get(KEEP_SINCE)
        if not isinstance(since, int):
            return instructions
        inside = self._schedule.releases > 0
        latest = int((self._schedule.releases - self._schedule.versions)[inside].max())
        config = ConfigRecord({**instructions.config, KEEP_SINCE: max(0, since - latest)})
        return replace(instructions, config=config)

    def answers(
        self, grid: Grid, instructions: Instructions, timeout: float | None
    ) -> Iterator[Answer]:
        """The answers in a release, until the time of all its clients is over.

        All are pulled, so that the SuperLink need not keep them; those that are in later releases
        are kept here.
        """
        number, began = instructions.round, time.monotonic()
        todo = self._due(instructions)
        self._ends[number] = max(self._ends[number], began + self._schedule.seconds_of(number))
        yield from self._early.pop(number, ())
        pause = 0.02
        is_over = False
        while not is_over:
            now = time.monotonic()
            starting = []
            while todo and began + todo[0][0] <= now:
                starting.append(todo.popleft())
            self._start(grid, number, starting)
            # The clock is read before the last look, so that what is in time counts.
            is_over = not todo and now >= self._ends[number]
            pause = min(1.5 * pause, LONGEST_PAUSE)
            for request, answer in self._pull(grid):
                pause = 0.02
                if request.release == number:
                    yield request, answer
                else:
                    self._early[request.release].append((request, answer))
            if not is_over:
                until = began + todo[0][0] if todo else self._ends[number]
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
        self._count_load(number, self._schedule.starting(number)[0])
        self._forget(number)

    def _due(self, instructions: Instructions) -> deque[tuple[float, int, Instructions]]:
        """Requests to send in this round: seconds from its begin, place in the schedule, and what.

        In the first round of a resumed run also those of earlier versions without a release yet.
        """
        schedule, number = self._schedule, instructions.round
        self._vectors[number - 1] = instructions.vector
        due = []
        for version, vector in self._vectors.items():
            if version in self._begun:
                continue
            first, end = np.searchsorted(schedule.versions, [version, version + 1]).tolist()
            of_version = _of_version(instructions, version, vector)
            begin = float(schedule.times[version - 1]) if version else 0.0
            for place in range(first, end):
                if schedule.releases[place] >= number:
                    again = version != number - 1
                    offset = 0.0 if again else float(schedule.starts[place]) - begin
                    due.append((offset, place, of_version))
        self._begun |= set(self._vectors)
        return deque(sorted(due, key=lambda request: request[:2]))

    def _start(
        self, grid: Grid, number: int, starting: Sequence[tuple[float, int, Instructions]]
    ) -> None:
        if not starting:
            return
        schedule = self._schedule
        places = [place for _, place, _ in starting]
        clients, releases = schedule.client_ids[places], schedule.releases[places]
        seconds = (schedule.ends - schedule.starts)[places]
        columns = (clients.tolist(), [i for _, _, i in starting], releases.tolist(), seconds)
        requests = list(zip(*columns, strict=True))
        self._push(grid, self._taking_part(grid, number, clients), requests)
        # Whether a client is connected or answers early moves no release.
        now = time.monotonic()
        for _, _, release, of_client in requests:
            self._ends[release] = max(self._ends[release], now + of_client)

    def _forget(self, number: int) -> None:
        """Forget what no release after this one needs."""
        late = [m for m, request in self._waiting.items() if request.release == number]
        for message_id in late:
            del self._waiting[message_id]
        del self._ends[number]
        needed = self._schedule.versions[self._schedule.releases > number]
        self._vectors = {
            version: vector for version, vector in self._vectors.items() if version in needed
        }

    def state(self) -> dict[str, Any]:
        """The vectors of versions in flight, and the schedule's digest."""
        vectors = {str(version): vector.clone() for version, vector in self._vectors.items()}
        return {"schedule": self._schedule.code, "versions": vectors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        Raises
        ------
        FedsimError
            If it is of another schedule.
        """
        self._schedule.check_code(state["schedule"])
        self._vectors = {int(version): vector for version, vector in state["versions"].items()}


def _of_version(instructions: Instructions, version: int, vector: Tensor) -> Instructions:
    """A round's instructions with another version of the model."""
    if version == instructions.round - 1:
        return instructions
    assert instructions.layout is not None
    vector = vector.to(instructions.vector.device)
    named = to_arrays(vector, instructions.layout, tensors(instructions.arrays))
    config = ConfigRecord({**instructions.config, "server-round": version + 1})
    return replace(
        instructions, round=version + 1, vector=vector, arrays=array_record(named), config=config
    )


class ArrivingRequests(Requests):
    """Requests without a schedule: an update is in the next release when it comes.

    Parameters
    ----------
    cohort, nodes, replying
        As for `Requests`.
    randomness : Randomness
        Keys the draws of those who start.
    patience : float
        Seconds to wait for clients, if none trains and those left are not connected.

    Raises
    ------
    FedsimError
        If clients have too few participations for all releases, even if all take the same time.
    """

    def __init__(
        self,
        cohort: Buffered,
        nodes: Nodes,
        replying: Replying | None,
        randomness: Randomness,
        patience: float,
    ) -> None:
        super().__init__(cohort, nodes, replying)
        population = declared_population(cohort)
        ReleaseSchedule.of(cohort, np.ones(population), 0)
        self._population, self._randomness = population, randomness
        self._patience = patience
        self._times: Counter[int] = Counter()  # releases that each client was in
        self._last: dict[int, int] = {}  # and the last one
        self._come: deque[Answer] = deque()

    def answers(
        self, grid: Grid, instructions: Instructions, timeout: float | None
    ) -> Iterator[Answer]:
        """The next ``buffer`` answers; a client that fails, or has no time left, is one of them."""
        number, found, started = instructions.round, 0, list[int]()
        generator = self._randomness.generator(Purpose.SAMPLE, level="client", round=number)
        pause, alone_since = 0.02, time.monotonic()
        while True:
            # First all that has come, and the release that it completes; then all starts.
            while self._come and found < self.cohort.buffer:
                request, answer = self._come.popleft()
                self._times[request.client] += 1
                self._last[request.client] = number
                found += 1
                yield request, answer
            if found == self.cohort.buffer:
                break
            started += self._start(grid, instructions, generator, timeout)
            self._come += self._pull(grid)
            self._come += self._overdue()
            now = time.monotonic()
            alone_since = now if self._waiting or self._come else alone_since
            if now - alone_since > self._patience:
                raise RunFailedError(self._dried_up(number))
            pause = 0.02 if self._come else min(1.5 * pause, LONGEST_PAUSE)
            if not self._come:
                time.sleep(pause)
        self._count_load(number, np.array(sorted(started), dtype=np.int64))

    def _start(
        self,
        grid: Grid,
        instructions: Instructions,
        generator: np.random.Generator,
        timeout: float | None,
    ) -> list[int]:
        """Fill free places with idle clients that are connected; return those."""
        free = self.cohort.concurrency - len(self._waiting) - len(self._come)
        number, cohort = instructions.round, self.cohort
        busy = {request.client for request in self._waiting.values()}
        busy |= {request.client for request, _ in self._come}
        idle = [
            client
            for client in range(self._population)
            if client not in busy
            and self._times[client] < cohort.participations
            and self._last.get(client, -cohort.separation) + cohort.separation <= number
        ]
        if not busy and not idle:
            raise RunFailedError(self._dried_up(number))
        if free <= 0 or not idle:
            return []
        nodes = self._taking_part(grid, number, np.array(idle, dtype=np.int64))
        chosen = np.sort(generator.permutation(list(nodes))[:free]).tolist()
        seconds = 1e9 if timeout is None else timeout
        self._push(grid, nodes, [(client, instructions, 0, seconds) for client in chosen])
        return list(chosen)

    def _overdue(self) -> Iterator[Answer]:
        """An error for each request that has had its time; its answer is dropped if it comes."""
        now = time.monotonic()
        for message_id in [m for m, request in self._waiting.items() if request.end <= now]:
            request = self._waiting.pop(message_id)
            (message,) = request.instructions
            asked = Message(RecordDict(), message.metadata.dst_node_id, "train")
            yield request, error_reply(asked, TIMED_OUT, "it has not answered in time.")

    def _dried_up(self, number: int) -> str:
        rounds, cohort = self.cohort.rounds, self.cohort
        return (
            f"no client is left for release {number:,} of {rounds:,}: those that are connected "
            f"have been in cohort.participations = {cohort.participations:,} releases, or wait "
            f"(cohort.separation = {cohort.separation:,}); more participations or more clients "
            "would do."
        )

    def state(self) -> dict[str, Any]:
        """Clients with their number of releases and the last one; what is in flight is lost."""
        return {"taken": [[k, n, self._last[k]] for k, n in sorted(self._times.items())]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        taken = state["taken"]
        self._times = Counter({client: times for client, times, _ in taken})
        self._last = {client: last for client, _, last in taken}


class _RoundExchange(Exchange):
    """A round's requests and answers."""

    def __init__(self, requests: Requests, instructions: Instructions) -> None:
        self._requests, self._instructions = requests, instructions
        self._grid: Grid | None = None
        self._timeout: float | None = None

    def over(self, grid: Grid, timeout: float | None) -> Iterable[Message]:
        self._grid, self._timeout = grid, timeout
        return self

    def __iter__(self) -> Iterator[Message]:
        return (message for _, message in self.answers())

    def answers(self) -> Iterator[Answer]:
        """The answers, each with its request."""
        if self._grid is None:
            raise FedsimError(
                "the requests of buffered rounds in real time are sent one by one; run them by "
                "the strategy's own start(...), or by fedsim.strategies.run_to_end."
            )
        return self._requests.answers(self._grid, self._instructions, self._timeout)


@dataclass(frozen=True)
class RealTimeSumming(Summing):
    """How the rows of one release are added up, each of which belongs to a version of its own.

    Attributes
    ----------
    round : int
        Number of the release.
    versions : dict of int to int
        The version that each client trained.
    """

    round: int = 0
    versions: dict[int, int] = field(default_factory=dict)

    def add_rows(self, block: Block, rows: Tensor, total: PartialSum) -> Tensor:
        """Add each row times the weight of its staleness."""
        sampler = self.plan.sampler
        assert isinstance(sampler, Buffered)
        late = [self.round - 1 - self.versions[client] for client in block.client_ids.tolist()]
        rows, weights = weighted(self.plan, rows, np.array([sampler.weight(t) for t in late]))
        side_scalars = self.side_scalars(block)
        return total.add(DenseRows(rows), weights=weights, side_scalars=side_scalars)


@dataclass(eq=False)
class RealTimeSum(BufferSum):
    """Sends requests one by one, and releases the sum of the answers in the buffer.

    Parameters
    ----------
    requests : Requests
    """

    sums_on_workers: ClassVar[bool] = False
    requests: Requests = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tally = Tally(np.empty(0, np.int64), absent=self.requests.cohort.buffer)
        settings = {"round": self.instructions.round, "asked": self.requests.cohort.buffer}
        self._summing = RealTimeSumming(**vars(self.summing) | settings)
        self.summing = self._summing

    def request(self) -> Exchange:
        """The exchange of the round's requests and answers."""
        # A copy of the vector, since answers are read against it after the server's step.
        vector = self.instructions.vector.clone()
        return _RoundExchange(self.requests, replace(self.instructions, vector=vector))

    def next_stage(self, replies: Iterable[Message]) -> None:
        """None: all is done in one exchange, which only fedsim's own loop has."""

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Send requests, and decode the answers as they come."""
        if not isinstance(messages, _RoundExchange):
            raise FedsimError("buffered rounds in real time take the replies of their exchange.")
        for request, answer in messages.answers():
            self.tally.expect(request.client)
            self._summing.versions[request.client] = request.version
            decoded = read_replies(
                [answer], request.instructions, self.tally, needed=self.summing.reported
            )
            for reply in decoded:
                block = self.tally.accept(reply.block)
                if len(block.client_ids):
                    yield replace(reply, block=block)
