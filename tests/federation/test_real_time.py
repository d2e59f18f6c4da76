"""Buffered rounds in real time, over a network of nodes that are slow, frozen, dead or late."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim.array_types import Floats, Ints
from fedsim.clients import SGD
from fedsim.cohorts import BufferedCohort, FullCohort
from fedsim.engines import LocalGrid, StreamingGrid
from fedsim.errors import FedsimError, RunFailedError
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.buffered import real_time
from fedsim.federation.buffered.schedule import LATENESS, ReleaseSchedule
from fedsim.federation.engines import client_app as client_app_module
from fedsim.federation.engines.client_app import hold_answers
from fedsim.federation.flower_internals import unavailable
from fedsim.mechanisms import Clipping, Mechanism, NoPrivacy, PrivateScalar
from fedsim.randomness import Randomness
from fedsim.rows.block import KEEP_SINCE
from fedsim.strategies import Availability, DPFedAvg
from fedsim.training import Trainer

NEVER = math.inf


class Clock:
    """Stands for the module `time`: sleeping moves it, at most to the next thing that happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        self.now = min([end, *(event for event in self.events if event > self.now)])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(real_time, "time", clock)
    return clock


class Network(LocalGrid):
    """Nodes that answer after some seconds of the clock.

    A node that is frozen (NEVER) gets its messages and says nothing. Of a node that is lost, and of
    a message that has expired, the SuperLink says so, in an error under its own node id.
    """

    def __init__(
        self,
        clients: Trainer | ClientApp,
        clock: Clock,
        seconds: list[float] | Floats,
        lost: Iterable[int] = (),
        absent: Callable[[float], set[int]] = lambda now: set(),
    ) -> None:
        super().__init__(clients, num_nodes=len(seconds))
        self.clock, self.seconds, self.lost, self.absent = clock, list(seconds), {*lost}, absent
        self.sent: dict[str, tuple[float, int, Message]] = {}
        self.times: dict[str, float] = {}
        self.asked: list[tuple[float, int]] = []
        self.pulled: list[int] = []

    def client_ids(self) -> dict[int, int]:
        away = self.absent(self.clock.now)
        return {k: node for k, node in super().client_ids().items() if k not in away}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        for message_id, message in zip(ids, messages, strict=True):
            client = message.metadata.dst_node_id - 2
            self.asked.append((self.clock.now, client))
            self.times[message_id] = self.clock.now
            end = self.clock.now + (0.05 if client in self.lost else self.seconds[client])
            self.sent[message_id] = end, client, message
            self.clock.events.append(end)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready = [
            (client, message_id)
            for message_id in message_ids
            for end, client, _ in [self.sent[message_id]]
            if end <= self.clock.now
        ]
        return [self._answered(client, message_id) for client, message_id in sorted(ready)]

    def _answered(self, client: int, message_id: str) -> Message:
        self.pulled.append(client)
        _, _, message = self.sent[message_id]
        expired = self.clock.now > self.times[message_id] + message.metadata.ttl
        if client in self.lost or expired:
            return unavailable(message_id, self.run.run_id)
        (answer,) = super().pull_messages([message_id])
        return answer


# -- with a schedule ---------------------------------------------------------------

CLIENTS, ROUNDS = 12, 9
SECONDS = np.exp(np.random.default_rng(3).normal(size=CLIENTS))
COHORT = BufferedCohort(6, 3, participations=5, rounds=ROUNDS, population=CLIENTS)
SCHEDULE = ReleaseSchedule.of(COHORT, SECONDS, 1)


def trainer_of(**settings: object) -> Trainer:
    data = make_data([9, 7, 9, 4, 12, 9, 8, 10, 9, 3, 9, 11], dtype=torch.float64)
    return Trainer(
        make_mlp(dtype=torch.float64), SGD(lr=0.3, momentum=0.5), data, batch_size=4,
        randomness=Randomness(3), **settings,
    )  # fmt: skip


def strategy_of(real: bool = True, mechanism: Mechanism | None = None, **available) -> DPFedAvg:
    mechanism = mechanism or Clipping(0.2)
    return DPFedAvg(
        mechanism=mechanism, noise_multiplier=None if isinstance(mechanism, NoPrivacy) else 1.0,
        cohort=COHORT, seed=Randomness(4, "of all"), rounds=ROUNDS, fraction_evaluate=0.0,
        availability=Availability(**{"schedule": SCHEDULE, "real_time": real, **available}),
    )  # fmt: skip


def initial(trainer: Trainer) -> ArrayRecord:
    return array_record({k: v.detach().clone() for k, v in trainer.model.named_parameters()})


def flat(arrays: ArrayRecord) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors(arrays).values()])


def made_virtually(failing: set[int], mechanism: Mechanism | None = None) -> Tensor:
    """The model after the same releases on a virtual clock, if these clients always drop out."""

    def replying(round: int, client_ids: Ints) -> np.ndarray:
        return ~np.isin(client_ids, list(failing))

    trainer = trainer_of()
    strategy = strategy_of(real=False, mechanism=mechanism, replying=replying)
    return flat(strategy.start(LocalGrid(trainer), initial(trainer), ROUNDS).arrays)


SCALAR = PrivateScalar(Clipping(0.2), name="loss", high=5.0, fraction=0.1)


@pytest.mark.parametrize(
    "mechanism", [Clipping(0.2), SCALAR, NoPrivacy("uniform")], ids=["dp", "scalar", "none"]
)
@pytest.mark.parametrize("fault", ["none", "frozen", "lost", "late", "away"])
def test_releases_have_the_bytes_of_the_virtual_clock_whoever_does_not_answer(
    fault: str, mechanism: Mechanism, clock: Clock
) -> None:
    bad, seconds = {1, 7}, 0.6 * SECONDS
    if fault in ("frozen", "late"):
        # An update that comes before its release is made is in it.
        waits = SCHEDULE.times[SCHEDULE.releases - 1] - SCHEDULE.starts
        late = [1.01 * waits[SCHEDULE.client_ids == client].max() for client in sorted(bad)]
        seconds[[1, 7]] = NEVER if fault == "frozen" else late
    trainer = trainer_of()
    network = Network(
        trainer,
        clock,
        seconds,
        lost=bad if fault == "lost" else (),
        absent=lambda now: bad if fault == "away" else set(),
    )
    strategy = strategy_of(mechanism=mechanism)
    counts: list[tuple[int, int]] = []
    result = strategy.start(
        StreamingGrid(network),
        initial(trainer),
        ROUNDS,
        on_round=lambda _, result: counts.append((strategy.report.asked, strategy.report.usable)),
    )
    assert (LATENESS in str(strategy.privacy_statement())) == strategy.private
    failing = set() if fault == "none" else bad
    assert torch.equal(flat(result.arrays), made_virtually(failing, mechanism))
    inside = SCHEDULE.releases > 0
    releases, clients = SCHEDULE.releases[inside], SCHEDULE.client_ids[inside]
    usable = [int((~np.isin(clients[releases == n], list(failing))).sum()) for n in range(1, 10)]
    assert counts == [(3, count) for count in usable]
    # When releases are made follows from the schedule, whoever answers when.
    assert clock.now == pytest.approx(SCHEDULE.times[-1], rel=1e-9)
    if fault == "late":  # what came later was not even looked at
        assert not bad & set(network.pulled)


def test_requests_are_sent_at_their_times_and_only_to_those_of_the_schedule(clock: Clock) -> None:
    trainer = trainer_of()
    network = Network(trainer, clock, 0.3 * SECONDS)
    strategy_of().start(network, initial(trainer), ROUNDS)
    inside = SCHEDULE.releases > 0
    expected = sorted(
        zip(SCHEDULE.starts[inside].tolist(), SCHEDULE.client_ids[inside].tolist(), strict=True)
    )
    assert [client for _, client in network.asked] == [client for _, client in expected]
    times = [time for time, _ in network.asked]
    assert times == pytest.approx([start for start, _ in expected], abs=0.02)


def test_answers_that_came_in_time_count_however_long_the_server_was_busy(clock: Clock) -> None:
    trainer = trainer_of()
    network = Network(trainer, clock, 0.6 * SECONDS)

    def busy(number: int, result: object) -> None:
        clock.now += 1000

    result = strategy_of().start(network, initial(trainer), ROUNDS, on_round=busy)
    assert torch.equal(flat(result.arrays), made_virtually(set()))
    assert clock.now == pytest.approx(SCHEDULE.times[-1] + 1000 * ROUNDS, rel=1e-9)


def test_answers_of_tasks_longer_than_flowers_messages_live_count(clock: Clock) -> None:
    """Flower's messages expire after twelve hours, unless they say another time."""
    cohort = replace(COHORT, rounds=2)
    schedule = ReleaseSchedule.of(cohort, np.full(CLIENTS, 100_000.0), 1)
    network = Network(trainer_of(), clock, np.full(CLIENTS, 50_000.0))
    strategy = DPFedAvg(
        mechanism=Clipping(0.2),
        noise_multiplier=1.0,
        cohort=cohort,
        rounds=2,
        availability=Availability(schedule=schedule, real_time=True),
    )
    usable: list[int] = []
    strategy.start(
        network,
        initial(trainer_of()),
        2,
        on_round=lambda _, result: usable.append(strategy.report.usable),
    )
    assert usable == [3, 3]


def test_a_run_resumed_after_any_release_ends_with_the_same_bytes(clock: Clock) -> None:
    trainer, states, whole = trainer_of(), {}, made_virtually({1})
    seconds = 0.6 * SECONDS
    seconds[1] = NEVER
    strategy = strategy_of()
    strategy.start(
        Network(trainer, clock, seconds),
        initial(trainer),
        ROUNDS,
        on_round=lambda number, result: states.update({number: (strategy.state(), result.arrays)}),
    )
    for number in range(1, ROUNDS):
        state, arrays = states[number]
        network = Network(trainer_of(), clock, seconds)
        resumed = strategy_of().start(network, arrays, ROUNDS, state=state)
        assert torch.equal(flat(resumed.arrays), whole)
        # Each of those whose release is not made is asked once more, at first.
        again = (SCHEDULE.versions < number) & (SCHEDULE.releases > number)
        first = sorted(client for time, client in network.asked if time == network.asked[0][0])
        assert set(SCHEDULE.client_ids[again].tolist()) <= set(first)
    other = strategy_of(schedule=ReleaseSchedule.of(COHORT, SECONDS[::-1].copy(), 1))
    with pytest.raises(FedsimError, match="another schedule of devices"):
        other.start(network, arrays, ROUNDS, state=state)
    with pytest.raises(FedsimError, match="with the settings of this strategy"):
        strategy_of(real=False).start(network, arrays, ROUNDS, state=state)


def test_clients_keep_the_state_from_which_a_request_is_trained_again(
    clock: Clock, tmp_path: Path
) -> None:
    trainer = trainer_of(state="client")
    virtual = strategy_of(real=False, replying=lambda _, ids: np.ones(len(ids), dtype=bool))
    whole = flat(virtual.start(LocalGrid(trainer), initial(trainer), ROUNDS).arrays)
    for number in (3, 5):
        trainer = trainer_of(state="client", state_dir=tmp_path / str(number))
        network, states = Network(trainer, clock, 0.6 * SECONDS), {}
        strategy, keep = strategy_of(), ConfigRecord({KEEP_SINCE: number})
        strategy.start(
            network,
            initial(trainer),
            number + 3,
            train_config=keep,
            on_round=lambda n, result, of=strategy, at=states: at.update(
                {n: (of.state(), result.arrays)}
            ),
        )
        state, arrays = states[number]
        resumed = strategy_of().start(network, arrays, ROUNDS, train_config=keep, state=state)
        assert torch.equal(flat(resumed.arrays), whole)


def test_a_vector_in_flight_is_not_the_servers_own(clock: Clock) -> None:
    """An optimiser that writes into its argument does not change what others are read against."""

    class InPlace:
        def starting_point(self, vector: Tensor) -> Tensor:
            return vector

        def step(self, vector: Tensor, update: Tensor) -> Tensor:
            return vector.add_(update)

        def state(self) -> None:
            return None

        def restore(self, state: object) -> None:
            pass

    def run(optimizer: object) -> Tensor:
        trainer = trainer_of()
        strategy = DPFedAvg(
            mechanism=Clipping(0.2), noise_multiplier=0.0, cohort=COHORT, seed=4, rounds=ROUNDS,
            availability=Availability(schedule=SCHEDULE, real_time=True),
            server_optimizer=optimizer,
        )  # fmt: skip
        network = Network(trainer, clock, 0.6 * SECONDS)
        return flat(strategy.start(network, initial(trainer), ROUNDS).arrays)

    assert torch.equal(run(None), run(InPlace()))


# -- as they come ------------------------------------------------------------------


def moving(means: list[float], lr: float) -> ClientApp:
    """Client c moves a scalar by ``lr (means[c] - start)``."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x = tensors(message.content["arrays"])["x"]
        x = x + lr * (means[context.node_config["partition-id"]] - x)
        content = {"arrays": array_record({"x": x}), "m": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return app


def arriving(
    network: Network, rounds: int, timeout: float = 3600, **numbers: int
) -> tuple[DPFedAvg, list[float]]:
    population = len(network.seconds)
    settings = {"concurrency": population, "participations": 10**6} | numbers
    strategy = DPFedAvg(
        mechanism=NoPrivacy("uniform"),
        rounds=rounds,
        cohort=BufferedCohort(**settings, rounds=rounds, population=population),
        availability=Availability(real_time=True, node_timeout=5.0),
    )
    found: list[float] = []
    start = array_record({"x": torch.zeros(1, dtype=torch.float64)})
    strategy.start(
        network,
        start,
        rounds,
        timeout,
        on_round=lambda _, result: found.append(float(tensors(result.arrays)["x"])),
    )
    return strategy, found


def test_updates_are_released_in_the_order_of_their_arrival(clock: Clock) -> None:
    network = Network(moving([1, -1], 0.1), clock, [1, 3])
    _, x = arriving(network, 6, buffer=1)
    assert x == pytest.approx([0.1, 0.19, 0.271, 0.221, 0.2989, 0.36901], abs=1e-9)
    network = Network(moving([1, 0, -2], 0.5), clock, [1, 2, 4])
    _, x = arriving(network, 6, buffer=2)
    expected = [0.25, 0.375, 0.242574865, 0.365639888, 0.432819944, 0.250927158]
    assert x == pytest.approx(expected, abs=1e-9)


def test_a_frozen_node_holds_up_nobody_and_is_a_failure_once_its_time_is_over(
    clock: Clock,
) -> None:
    network = Network(moving([1, 0, 5], 0.5), clock, [1, 2, NEVER])
    _, x = arriving(network, 6, buffer=2)
    assert {client for _, client in network.asked[3:]} == {0, 1}
    assert clock.now == pytest.approx(12)  # six times the slower of the two others
    assert len(x) == 6
    # With a time limit, its place is a zero, and it is asked again.
    clock.now = 0.0
    network = Network(moving([1, 0, 5], 0.5), clock, [1, 2, NEVER])
    arriving(network, 6, timeout=3.5, buffer=2)
    assert [client for _, client in network.asked].count(2) >= 2


def test_a_node_that_is_lost_fills_its_place_with_a_zero(clock: Clock) -> None:
    network = Network(moving([1, 0, 5], 0.5), clock, [1, 2, 4], lost=[2])
    strategy, x = arriving(network, 1, buffer=2)
    report = strategy.report
    assert (report.asked, report.usable, report.reasons["missing"]) == (2, 1, 1)
    assert x == [0.25]  # client 0 alone, over the buffer


def test_a_client_is_in_no_more_releases_than_allowed_and_a_dry_run_ends(clock: Clock) -> None:
    network = Network(moving([1, 0, 5], 0.5), clock, [1, 1.5, NEVER])
    with pytest.raises(RunFailedError, match=r"no client is left for release 4 of 4"):
        arriving(network, 4, buffer=2, participations=3, timeout=50, concurrency=2)
    asked = [client for _, client in network.asked]
    assert max(asked.count(k) for k in (0, 1)) <= 3
    # What cannot be even if all take the same time is refused at once.
    with pytest.raises(FedsimError, match="would do"):
        arriving(network, 5, buffer=2, participations=3)


def test_a_client_that_connects_later_takes_part(clock: Clock) -> None:
    network = Network(
        moving([1, 0, 5], 0.5), clock, [1, 2, 1], absent=lambda now: {2} if now < 2.5 else set()
    )
    arriving(network, 4, buffer=2)
    asked = [(time, client) for time, client in network.asked if client == 2]
    assert asked[0][0] >= 2.5


def test_clients_that_stay_away_end_a_run_of_which_none_is_left(clock: Clock) -> None:
    network = Network(moving([1, 0, 5], 0.5), clock, [1, 1, 1], absent=lambda now: {1, 2})
    with pytest.raises(RunFailedError, match="no client is left for release 1"):
        arriving(network, 4, buffer=2)


def test_a_run_as_they_come_resumes_with_the_participations_that_are_left(clock: Clock) -> None:
    network = Network(moving([1, 0, 5], 0.5), clock, [1, 1.5, 2])
    strategy, _ = arriving(network, 3, buffer=2, participations=3)
    (taken,) = strategy.state()["in-flight"].values()
    assert sum(times for _, times, _ in taken) == 6
    assert max(times for _, times, _ in taken) <= 3


# -- refusals ----------------------------------------------------------------------


def test_what_cannot_be_in_real_time_is_refused_in_a_sentence(clock: Clock) -> None:
    with pytest.raises(FedsimError, match="must be given in a private run, also with real_time"):
        strategy_of(schedule=None)
    with pytest.raises(FedsimError, match=r"availability\.real_time is given, and the cohort"):
        DPFedAvg(
            mechanism=Clipping(1.0),
            noise_multiplier=1.0,
            cohort=FullCohort(3),
            availability=Availability(real_time=True),
        )
    with pytest.raises(FedsimError, match=r"fraction_evaluate is 1; with availability\.real_time"):
        DPFedAvg(
            mechanism=NoPrivacy("uniform"),
            cohort=COHORT,
            rounds=ROUNDS,
            fraction_evaluate=1.0,
            availability=Availability(real_time=True),
        )
    with pytest.raises(FedsimError, match=r"ReleaseSchedule\.of this cohort"):
        strategy_of(schedule=ReleaseSchedule.of(replace(COHORT, buffer=2), SECONDS, 1))


def test_loops_that_send_all_messages_at_once_are_refused(clock: Clock) -> None:
    trainer = trainer_of()
    network, strategy = Network(trainer, clock, SECONDS), strategy_of()
    with pytest.raises(FedsimError, match=r"run it by DPFedAvg\.start"):
        Strategy.start(strategy, network, initial(trainer), 2)
    strategy.loop_has_stages = True
    messages = strategy.configure_train(1, initial(trainer), ConfigRecord(), network)
    with pytest.raises(FedsimError, match="sent one by one"):
        network.send_and_receive(messages)
    with pytest.raises(FedsimError, match="take the replies of their exchange"):
        strategy.aggregate_train(1, [])


# -- the node ----------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
def test_a_node_holds_an_answer_and_an_error_alike(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(client_app_module, "time", clock)

    def train(message: Message, context: Context) -> Message:
        clock.now += 3.0
        if raises:
            raise ArithmeticError("as planned")
        return message

    context = Context(1, 1, {}, RecordDict(), {})
    for seconds, end in ((20.0, 10.0), (4.0, 3.0), (0.0, 3.0)):
        clock.now = 0.0
        with pytest.raises(ArithmeticError) if raises else pytest.MonkeyPatch.context():
            hold_answers(lambda _, seconds=seconds: seconds)(None, context, train)
        assert clock.now == end
