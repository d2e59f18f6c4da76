"""Buffered asynchronous rounds: the clock, the sums of releases to come, and what they cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from hypothesis import given
from hypothesis import strategies as st
from killed_runs import killed_in
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor
from typer.testing import CliRunner

import fedsim
from fedsim import RunConfig
from fedsim.array_types import Bools, Floats, Ints
from fedsim.audit.config_audit import audit_config
from fedsim.audit.user_checks import releases_of_clients
from fedsim.cli.app import app
from fedsim.clients import SGD, Scaffold
from fedsim.cohorts import BufferedCohort, FullCohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.aggregation.robust import Median
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.buffered.schedule import LATENESS, OpenTimes, ReleaseSchedule, _Clock
from fedsim.federation.buffered.timeline import BARS, DEVICES, LINES, timeline
from fedsim.mechanisms import (
    AdaClip,
    Clipping,
    Mechanism,
    NoPrivacy,
    Normalization,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
)
from fedsim.privacy import Independent, Ledger, epsilon
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.losses import gaussian_epsilon
from fedsim.privacy.noise import Correlated
from fedsim.privacy.noise.banded import Banded
from fedsim.privacy.noise.blt import BLT
from fedsim.privacy.noise.tree import Tree
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.block import Block, BlockTrainer
from fedsim.runs.resolve import resolve
from fedsim.runs.run_ledgers import RunLedgers
from fedsim.strategies import Availability, ClientTraining, DPFedAvg
from fedsim.training import Trainer
from fedsim.training.example_privacy import ExamplePrivacy

WITHOUT_LIMIT = 10**6


def schedule_of(
    seconds: list[float] | Floats, rounds: int, open_times: OpenTimes | None = None, **numbers: int
) -> ReleaseSchedule:
    settings = {"concurrency": len(seconds), "participations": WITHOUT_LIMIT} | numbers
    cohort = BufferedCohort(**settings, rounds=rounds, population=len(seconds))
    others = () if open_times is None else (open_times,)
    return ReleaseSchedule.of(cohort, np.array(seconds, dtype=np.float64), 0, *others)


def handed_in(schedule: ReleaseSchedule) -> list[tuple[float, int, int]]:
    """(time, client, staleness) of all updates that are released, in the order of the clock."""
    late = schedule.releases - 1 - schedule.versions
    columns = (schedule.ends, schedule.client_ids, late, schedule.releases)
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    return [(end, client, stale) for end, client, stale, release in rows if release]


@dataclass
class Drawn(BlockTrainer):
    """Client c moves a scalar by ``lr (means[c] - start)``."""

    means: list[float]
    lr: float

    @property
    def population(self) -> int:
        return len(self.means)

    @property
    def layout(self) -> Layout:
        return Layout.of({"x": torch.zeros(1, dtype=torch.float64)})

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        means = torch.tensor([self.means[k] for k in client_ids.tolist()], dtype=torch.float64)
        rows = self.lr * (means[:, None] - vector)
        yield Block.sent(client_ids, rows, {"num-examples": np.ones(len(client_ids))})

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        raise NotImplementedError


def values_of(schedule: ReleaseSchedule, means: list[float], lr: float) -> list[float]:
    """The scalar after each release, as the strategy makes it."""
    found: list[float] = []
    strategy = DPFedAvg(
        mechanism=NoPrivacy("uniform"),
        cohort=schedule.cohort,
        rounds=schedule.cohort.rounds,
        availability=Availability(schedule=schedule),
    )
    start = array_record({"x": torch.zeros(1, dtype=torch.float64)})
    strategy.start(
        LocalGrid(Drawn(means, lr)),
        start,
        schedule.cohort.rounds,
        on_round=lambda _, result: found.append(float(tensors(result.arrays)["x"])),
        evaluate_config=None,
    )
    return found


# -- the clock ---------------------------------------------------------------------


def test_a_buffer_of_one_releases_the_known_versions_at_the_known_times() -> None:
    schedule = schedule_of([1, 3], 6, buffer=1)
    assert schedule.times.tolist() == [1, 2, 3, 3, 4, 5]
    assert [late for _, _, late in handed_in(schedule)] == [0, 0, 0, 3, 0, 0]
    x = values_of(schedule, [1, -1], 0.1)
    assert x == pytest.approx([0.1, 0.19, 0.271, 0.221, 0.2989, 0.36901], abs=1e-9)


def test_a_buffer_of_two_releases_the_known_versions_at_the_known_times() -> None:
    schedule = schedule_of([1, 2, 4], 6, buffer=2)
    assert schedule.times.tolist() == [2, 4, 5, 6, 8, 9]
    assert handed_in(schedule) == [
        (1, 0, 0), (2, 1, 0), (3, 0, 0), (4, 1, 0), (4, 2, 2), (5, 0, 0),
        (6, 0, 0), (6, 1, 1), (7, 0, 0), (8, 1, 0), (9, 0, 0), (9, 2, 2),
    ]  # fmt: skip
    x = values_of(schedule, [1, 0, -2], 0.5)
    expected = [0.25, 0.375, 0.242574865, 0.365639888, 0.432819944, 0.250927158]
    assert x == pytest.approx(expected, abs=1e-9)


@st.composite
def runs(draw: st.DrawFn) -> tuple[BufferedCohort, Floats]:
    population = draw(st.integers(1, 30))
    concurrency = draw(st.integers(1, population))
    cohort = BufferedCohort(
        concurrency,
        draw(st.integers(1, concurrency)),
        participations=draw(st.integers(1, 5)),
        separation=draw(st.integers(1, 4)),
        rounds=draw(st.integers(1, 25)),
        population=population,
    )
    # Few different times, so that many clients finish at one instant.
    seconds = draw(st.lists(st.integers(1, 4), min_size=population, max_size=population))
    return cohort, np.array(seconds, dtype=np.float64)


def check_promises(schedule: ReleaseSchedule) -> None:
    """The promises of a schedule, each counted anew from its columns."""
    cohort, inside = schedule.cohort, schedule.releases > 0
    clients, releases = schedule.client_ids[inside], schedule.releases[inside]
    assert (np.bincount(releases, minlength=cohort.rounds + 1)[1:] == cohort.buffer).all()
    assert len(set(zip(clients.tolist(), releases.tolist(), strict=True))) == len(clients)
    assert max(Counter(schedule.client_ids.tolist()).values()) <= cohort.participations
    order = np.lexsort((releases, clients))
    same = np.diff(clients[order]) == 0
    assert (np.diff(releases[order])[same] >= cohort.separation).all()
    # Of those who train at a time: who starts when another ends takes its place.
    times = np.concatenate([schedule.starts, schedule.ends])
    changes = np.concatenate([np.ones(len(schedule)), -np.ones(len(schedule))])
    in_flight = np.cumsum(changes[np.lexsort((changes, times))])
    assert in_flight.max() <= cohort.concurrency
    # From the newest version at the start; and in the release that is the next at the end.
    made_before = np.searchsorted(schedule.times, schedule.starts, side="right")
    assert (schedule.versions == made_before).all()
    assert (schedule.times[releases - 1] >= schedule.ends[inside]).all()
    before = np.where(releases > 1, schedule.times[releases - 2], 0.0)
    assert (before <= schedule.ends[inside]).all()


@given(runs())
def test_a_schedule_keeps_its_promises_and_dries_up_exactly_when_too_few_are_left(
    run: tuple[BufferedCohort, Floats],
) -> None:
    cohort, seconds = run
    clock = _Clock(cohort, seconds, 5, OpenTimes())
    made = clock.run()
    if made == cohort.rounds:
        schedule = ReleaseSchedule.of(cohort, seconds, 5)
        assert ReleaseSchedule.of(cohort, seconds, 5).code == schedule.code
        check_promises(schedule)
        return
    # All that have participations left wait for releases: fewer than fill the next ones.
    assert sum(left > 0 for left in clock.left) < cohort.buffer * cohort.separation
    with pytest.raises(FedsimError, match=f" left after {made} of {cohort.rounds} releases"):
        ReleaseSchedule.of(cohort, seconds, 5)
    if made:
        check_promises(ReleaseSchedule.of(replace(cohort, rounds=made), seconds, 5))


def test_nobody_is_twice_in_a_release_in_a_hundred_thousand_events() -> None:
    seconds = np.exp(np.random.default_rng(1).normal(size=3000))
    for buffer in (1, 10, 200):
        check_promises(schedule_of(seconds, 50_000 // buffer, concurrency=200, buffer=buffer))


@pytest.mark.parametrize(
    ("cohort", "column"),
    [
        ({"participations": 2}, {}),  # the cohort is charged for fewer than the schedule has
        ({"separation": 3}, {}),
        ({"buffer": 2}, {}),
        ({"rounds": 9}, {}),
        ({}, {"client_ids": 0}),  # one client in every place
        ({}, {"versions": 10}),  # updates of models that are not made yet
    ],
)
def test_a_schedule_on_which_the_charge_could_not_count_is_refused(
    cohort: dict[str, int], column: dict[str, int]
) -> None:
    made = schedule_of(np.ones(8), 10, concurrency=6, buffer=3, participations=5)
    columns = {name: np.full(len(made), value) for name, value in column.items()}
    schedule = replace(made, cohort=replace(made.cohort, **cohort), **columns)
    with pytest.raises(FedsimError, match=r"it must be made by ReleaseSchedule\.of"):
        DPFedAvg(
            mechanism=Clipping(1.0),
            noise_multiplier=1.0,
            cohort=schedule.cohort,
            rounds=schedule.cohort.rounds,
            availability=Availability(schedule=schedule),
        )


def test_clients_start_only_when_they_are_available() -> None:
    class Shifts(OpenTimes):
        """Half of the clients in turn, ten seconds each; nobody in every third turn."""

        def available(self, client: int, version: int, time: float) -> bool:
            turn = int(time // 10) % 3
            return turn < 2 and client % 2 == turn

        def next_change(self, time: float) -> float:
            return (time // 10 + 1) * 10

    schedule = schedule_of([3.0] * 12, 40, Shifts(), concurrency=6, buffer=2)
    check_promises(schedule)
    turns = (schedule.starts // 10).astype(int) % 3
    assert (turns == schedule.client_ids % 2).all()
    assert {0, 1} == set(turns.tolist())
    # With all in mid-task or away, the clock goes on to the next turn.
    assert (schedule.starts % 10 == 0).any()

    class Never(OpenTimes):
        def available(self, client: int, version: int, time: float) -> bool:
            return False

    with pytest.raises(FedsimError, match="after 0 of 4 releases"):
        schedule_of([1.0] * 3, 4, Never(), buffer=1)


def test_numbers_that_cannot_be_are_refused_with_those_that_would_do() -> None:
    for numbers, words in (
        ({"concurrency": 3, "buffer": 4}, "cohort.buffer is 4; it must be at most"),
        ({"concurrency": 9, "buffer": 2}, "cohort.concurrency is 9; it must be at most"),
        ({"concurrency": 3, "buffer": 2, "participations": 0}, "participations is 0"),
        ({"concurrency": 3, "buffer": 2, "separation": 0}, "separation is 0"),
    ):
        with pytest.raises(FedsimError, match=words):
            BufferedCohort(**numbers, population=8)
    with pytest.raises(FedsimError, match=r"rounds = 5 or cohort.participations = 3") as refused:
        schedule_of([1.0, 2, 1, 2, 1, 2, 1, 2], 6, concurrency=4, buffer=3, participations=2)
    assert "about 12 clients" in str(refused.value)
    schedule_of([1.0, 2, 1, 2, 1, 2, 1, 2], 5, concurrency=4, buffer=3, participations=2)
    schedule_of([1.0, 2, 1, 2, 1, 2, 1, 2], 6, concurrency=4, buffer=3, participations=3)
    for seconds in (np.ones(4), np.array([1.0, 0, 1, 1, 1]), np.array([1.0, np.nan, 1, 1, 1])):
        cohort = BufferedCohort(2, 1, rounds=2, population=5)
        with pytest.raises(FedsimError, match="one number above 0 for each of the 5 clients"):
            ReleaseSchedule.of(cohort, seconds, 0)


def test_a_timeline_has_some_devices_of_all_speeds_and_what_they_do() -> None:
    seconds = np.exp(np.random.default_rng(1).normal(size=3000))
    schedule = schedule_of(seconds, 2000, concurrency=200, buffer=10)
    drops = {
        (int(version) + 1, int(client))
        for version, client in zip(schedule.versions[::7], schedule.client_ids[::7], strict=True)
    }

    def replying(round: int, client_ids: Ints) -> Bools:
        return np.array([(round, client) not in drops for client in client_ids.tolist()])

    shown = timeline(schedule, replying)
    assert json.loads(json.dumps(shown)) == shown
    of_client = [seconds[row["client"]] for row in shown["rows"]]
    assert len(of_client) == DEVICES
    assert of_client == sorted(of_client)
    assert of_client[0] < 0.2
    assert of_client[-1] > 5
    columns = zip(
        schedule.client_ids.tolist(), schedule.starts.tolist(), schedule.ends.tolist(),
        schedule.versions.tolist(), schedule.releases.tolist(), strict=True,
    )  # fmt: skip
    everything = set(columns)
    bars = [(row["client"], *bar) for row in shown["rows"] for bar in row["bars"]]
    assert any(failed for *_, failed in bars)
    for client, start, end, version, release, released, failed in bars:
        assert (client, start, end, version, release) in everything
        assert start < shown["until"]
        assert released == (schedule.times[release - 1] if release else 0)
        assert failed == ((version + 1, client) in drops)
    assert max(len(row["bars"]) for row in shown["rows"]) <= BARS
    assert len(shown["releases"]) <= LINES
    for time, number in shown["releases"]:
        assert schedule.times[number - 1] == time <= shown["until"]


# -- what it costs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "k", "expected"),
    [(1, 1, 4.377178), (2, 4, 4.377178), (1.5, 3, 5.174810), (4, 10, 3.341409), (3, 20, 6.999227)],
)
def test_participations_cost_as_one_gaussian_charged_before_the_first_release(
    z: float, k: int, expected: float
) -> None:
    cohort = BufferedCohort(20, 5, participations=k, rounds=40, population=100)
    assert epsilon(noise_multiplier=z, cohort=cohort, rounds=40, delta=1e-5) == pytest.approx(
        expected, abs=1e-6
    )
    plan = ReleasePlan(
        level="client",
        sampler=cohort,
        mechanism=Clipping(1.0),
        noise=Independent(z),
        rounds=40,
    )
    assert plan.closed
    assert [plan.charge(number).count for number in (1, 2, 40)] == [1, 0, 0]
    assert plan.epsilon(1e-5) == pytest.approx(expected, abs=1e-6)
    assert not plan.amplified
    assert replace(plan, cohort_known=True).epsilon(1e-5) == plan.epsilon(1e-5)
    assert plan.sampler.adjacency == "zero-out"
    # A round that is redrawn is one more release.
    redrawn = plan.charge(3, redrawn=True)
    assert (redrawn.law.gaussian(z), redrawn.count) == (1 / z, 1)


def test_a_client_is_charged_for_no_more_releases_than_its_separation_allows() -> None:
    cohort = BufferedCohort(20, 5, participations=9, separation=10, rounds=25, population=100)
    assert cohort.participation(25) == Participation(25, 10, 9)
    once = epsilon(noise_multiplier=1.5, cohort=cohort, rounds=25, delta=1e-5)
    assert once == pytest.approx(5.174810, abs=1e-6)  # of 3: releases 1, 11 and 21


def test_correlated_noise_has_the_sensitivity_of_separated_releases() -> None:
    cohort = BufferedCohort(20, 5, participations=3, separation=4, rounds=12, population=100)
    noise = Banded(2.0, bands=4)
    plan = ReleasePlan(
        level="client", sampler=cohort, mechanism=Clipping(1.0), noise=noise, rounds=12
    )
    # Four bands and releases four apart: columns of one client do not overlap.
    times = plan.event().law.sensitivity / plan.noise.column_norm
    assert times == pytest.approx(np.sqrt(3), rel=1e-9)
    tighter = replace(plan, sampler=replace(cohort, participations=1))
    assert tighter.event().law.sensitivity == pytest.approx(tighter.noise.column_norm, rel=1e-9)


def matrix_of(noise: Correlated, rounds: int) -> Floats:
    """The matrix whose product with the rounds' sums is noised, from its definition."""
    numbers = noise.coefficient_values()
    if isinstance(noise, Tree):  # a row for each node of each tree: the rounds below it
        (period,) = map(int, numbers)
        return np.array(
            [
                [float(first <= t < first + width) for t in range(rounds)]
                for start in range(0, rounds, period)
                for width in (1 << level for level in range(period.bit_length()))
                for first in range(start, start + period, width)
            ]
        )
    if isinstance(noise, BLT):
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        column = [1.0] + [sum(w * d**lag for d, w in pairs) for lag in range(rounds - 1)]
    else:
        column = [*numbers, *[0.0] * rounds][:rounds]
    return np.array(
        [[column[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)]
    )


def delta_of(eps: float, mu: float) -> float:
    """Delta of a Gaussian whose mean moves by mu standard deviations (Balle and Wang 2018)."""
    return norm.cdf(mu / 2 - eps / mu) - np.exp(eps) * norm.cdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize(("k", "separation"), [(1, 1), (3, 4), (2, 4), (9, 4), (2, 8)])
@pytest.mark.parametrize("kind", [Banded, BLT, Tree])
def test_correlated_noise_costs_what_the_worst_releases_of_a_client_do(
    kind: type[Correlated], k: int, separation: int
) -> None:
    rounds, z = 16, 2.0
    cohort = BufferedCohort(
        20, 5, participations=k, separation=separation, rounds=rounds, population=100
    )
    plan = ReleasePlan(
        level="client", sampler=cohort, mechanism=Clipping(1.0), noise=kind(z), rounds=rounds
    )
    assert isinstance(plan.noise, Correlated)
    matrix = matrix_of(plan.noise, rounds)
    assert (matrix >= 0).all()  # so that the worst updates of a client are all the same vector
    worst = max(
        float(np.linalg.norm(matrix[:, pattern].sum(1)))
        for count in range(1, k + 1)
        for pattern in combinations(range(rounds), count)
        if all(b - a >= separation for a, b in pairwise(pattern))
    )
    expected = brentq(lambda eps: delta_of(eps, worst / z) - 1e-5, 1e-6, 200.0, xtol=1e-12)
    assert plan.epsilon(1e-5) == pytest.approx(expected, rel=1e-6)
    assert plan.closed
    assert [plan.charge(number).count for number in (1, 2, rounds)] == [1, 0, 0]


# -- the rounds --------------------------------------------------------------------

CLIENTS, ROUNDS = 12, 9
SECONDS = np.exp(np.random.default_rng(3).normal(size=CLIENTS))
COHORT = BufferedCohort(6, 3, participations=5, rounds=ROUNDS, population=CLIENTS)


def trainer_of(**settings: object) -> Trainer:
    data = make_data([9, 7, 9, 4, 12, 9, 8, 10, 9, 3, 9, 11], dtype=torch.float64)
    return Trainer(
        make_mlp(dtype=torch.float64), SGD(lr=0.3), data, batch_size=4,
        randomness=Randomness(3), **settings,
    )  # fmt: skip


def strategy_of(
    mechanism: Mechanism, z: float | None, schedule: ReleaseSchedule, **settings: object
) -> DPFedAvg:
    return DPFedAvg(
        mechanism=mechanism, noise_multiplier=z, cohort=schedule.cohort, seed=4,
        rounds=schedule.cohort.rounds, availability=Availability(schedule=schedule),
        **settings,
    )  # fmt: skip


def weights_after(
    strategy: DPFedAvg, trainer: Trainer, rounds: int = ROUNDS, workers: int = 1
) -> Tensor:
    parameters = {k: v.detach().clone() for k, v in trainer.model.named_parameters()}
    with LocalGrid(trainer, workers=workers) as grid:
        result = strategy.start(grid, array_record(parameters), rounds)
    return torch.cat([tensor.reshape(-1) for tensor in tensors(result.arrays).values()])


MECHANISMS: dict[str, Callable[[], tuple[Mechanism, float | None]]] = {
    "clipping": lambda: (Clipping(0.2), 1.0),
    "normalisation": lambda: (Normalization(0.2), 1.0),
    "layers": lambda: (PerLayer(Clipping(0.2)), 1.0),
    "scalar": lambda: (PrivateScalar(Clipping(0.2), name="loss", high=5.0, fraction=0.1), 1.0),
    "without noise": lambda: (Clipping(0.2), 0.0),
    "without privacy": lambda: (NoPrivacy("uniform"), None),
}


@pytest.mark.parametrize("kind", MECHANISMS)
def test_rows_are_added_to_their_releases_by_any_number_of_workers(kind: str) -> None:
    mechanism, z = MECHANISMS[kind]()
    schedule = ReleaseSchedule.of(COHORT, SECONDS, 1)
    assert (schedule.releases - 1 - schedule.versions).max() > 2
    one = weights_after(strategy_of(mechanism, z, schedule), trainer_of())
    small = weights_after(strategy_of(mechanism, z, schedule), trainer_of(block_size=2))
    two = weights_after(strategy_of(mechanism, z, schedule), trainer_of(), workers=2)
    assert torch.equal(one, small)
    assert torch.equal(one, two)


def test_a_release_is_the_sum_of_bounded_then_weighted_rows_over_the_buffer() -> None:
    schedule, trainer, clip = ReleaseSchedule.of(COHORT, SECONDS, 1), trainer_of(), 0.2
    versions = [trainer.initial()]
    rows: dict[int, list[Tensor]] = {}
    for number in range(1, ROUNDS + 1):
        ids, releases = schedule.starting(number)
        for client, release in zip(ids.tolist(), releases.tolist(), strict=True):
            (block,) = trainer.train(versions[-1], np.array([client]), number)
            assert block.rows is not None
            (row,) = block.rows
            bounded = row * min(1.0, clip / float(row.norm()))
            rows.setdefault(release, []).append(bounded * (1 + release - number) ** -0.5)
        assert len(rows[number]) == COHORT.buffer
        versions.append(versions[-1] + torch.stack(rows[number]).sum(0) / COHORT.buffer)
    found = weights_after(strategy_of(Clipping(clip), 0.0, schedule), trainer_of())
    torch.testing.assert_close(found, versions[-1], rtol=0, atol=1e-8)


@pytest.mark.parametrize("examples", [False, True])
@pytest.mark.parametrize("kind", ["without privacy", "without noise"])
def test_equal_times_and_a_full_buffer_are_synchronous_rounds_to_the_byte(
    kind: str, examples: bool
) -> None:
    mechanism, z = MECHANISMS[kind]()
    # With noise in the clients, at the address of the round.
    noised = {"privacy": ExamplePrivacy(Clipping(0.5), 0.8, rounds=5)} if examples else {}
    cohort = BufferedCohort(CLIENTS, CLIENTS, participations=5, rounds=5, population=CLIENTS)
    schedule = ReleaseSchedule.of(cohort, np.ones(CLIENTS), 1)
    assert (schedule.versions == schedule.releases - 1)[schedule.releases > 0].all()
    buffered = weights_after(strategy_of(mechanism, z, schedule), trainer_of(**noised), 5)

    def synchronous() -> DPFedAvg:
        return DPFedAvg(mechanism=mechanism, noise_multiplier=z, cohort=FullCohort(CLIENTS), seed=4)

    assert torch.equal(buffered, weights_after(synchronous(), trainer_of(**noised), 5))
    if examples:
        assert not torch.equal(buffered, weights_after(synchronous(), trainer_of(), 5))


@pytest.mark.parametrize("kind", ["clipping", "without privacy"])
def test_a_strategy_resumed_after_any_release_ends_with_the_same_bytes(kind: str) -> None:
    mechanism, z = MECHANISMS[kind]()
    schedule, states = ReleaseSchedule.of(COHORT, SECONDS, 1), {}
    strategy, trainer = strategy_of(mechanism, z, schedule), trainer_of()
    parameters = {k: v.detach().clone() for k, v in trainer.model.named_parameters()}
    whole = strategy.start(
        LocalGrid(trainer),
        array_record(parameters),
        ROUNDS,
        on_round=lambda number, result: states.update({number: (strategy.state(), result.arrays)}),
    )
    for number in range(1, ROUNDS):
        state, arrays = states[number]
        again = strategy_of(mechanism, z, schedule)
        resumed = again.start(LocalGrid(trainer_of()), arrays, ROUNDS, state=state)
        for name, tensor in tensors(whole.arrays).items():
            assert torch.equal(tensor, tensors(resumed.arrays)[name])
    other = strategy_of(mechanism, z, ReleaseSchedule.of(COHORT, SECONDS[::-1].copy(), 1))
    with pytest.raises(FedsimError, match="another schedule of devices"):
        other.start(LocalGrid(trainer_of()), states[2][1], ROUNDS, state=states[2][0])


def test_a_failed_client_leaves_a_zero_in_its_place() -> None:
    @dataclass
    class Failing(Drawn):
        bad: int = 1

        def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
            for block in super().train(vector, client_ids, round):
                assert block.rows is not None
                block.rows[torch.from_numpy(client_ids == self.bad)] = torch.nan
                yield block

    schedule = schedule_of([1, 2, 4], 2, buffer=2)
    strategy = DPFedAvg(
        mechanism=NoPrivacy("uniform"),
        cohort=schedule.cohort,
        rounds=2,
        availability=Availability(schedule=schedule),
    )
    start = array_record({"x": torch.zeros(1, dtype=torch.float64)})
    result = strategy.start(LocalGrid(Failing([1, 0, -2], 0.5)), start, 1)
    # Client 1 shares the first release with client 0, whose update counts half all the same.
    assert float(tensors(result.arrays)["x"]) == pytest.approx(0.25, abs=1e-12)


def test_a_releases_line_is_in_the_ledger_before_its_version_is_trained() -> None:
    # Else updates in the sums of later releases could not be taken back if the budget is spent.
    lines: list[tuple[int, int]] = []

    @dataclass
    class Watching(Drawn):
        def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
            lines.append((round, len(strategy.ledger.entries)))
            yield from super().train(vector, client_ids, round)

    schedule = schedule_of([1, 2, 4], 4, buffer=2)
    strategy = strategy_of(Clipping(1.0), 1.0, schedule)
    start = array_record({"x": torch.zeros(1, dtype=torch.float64)})
    strategy.start(LocalGrid(Watching([1, 0, -2], 0.5)), start, 4)
    assert lines == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_what_assumes_a_synchronous_cohort_is_refused_in_a_sentence() -> None:
    schedule = ReleaseSchedule.of(COHORT, SECONDS, 1)
    cases: list[tuple[str, Mechanism, float | None, Mapping[str, object]]] = [
        ("bound changes between rounds", AdaClip(1.0), 1.0, {}),
        ("bound changes between rounds", QuantileClipping(1.0), 1.0, {}),
        ("it must be 'uniform'", NoPrivacy("num-examples"), None, {}),
        ("it must be 'server'", Clipping(1.0), 1.0, {"placement": "client"}),
        ("it must be a sum", Median(), None, {}),
        (
            "sends or receives vectors",
            NoPrivacy("uniform"),
            None,
            {"clients": ClientTraining(algorithm=Scaffold())},
        ),
    ]
    for words, mechanism, z, settings in cases:
        with pytest.raises(FedsimError, match=words):
            strategy_of(mechanism, z, schedule, **settings)
    with pytest.raises(FedsimError, match=r"availability\.schedule must be given"):
        DPFedAvg(mechanism=Clipping(1.0), noise_multiplier=1.0, cohort=COHORT, rounds=ROUNDS)
    with pytest.raises(FedsimError, match=r"availability\.schedule must be given"):
        DPFedAvg(
            mechanism=Clipping(1.0),
            noise_multiplier=1.0,
            cohort=replace(COHORT, buffer=2),
            rounds=ROUNDS,
            availability=Availability(schedule=schedule),
        )
    with pytest.raises(FedsimError, match="it must be left out"):
        DPFedAvg(
            mechanism=Clipping(1.0),
            noise_multiplier=1.0,
            cohort=FullCohort(CLIENTS),
            availability=Availability(schedule=schedule),
        )


# -- runs --------------------------------------------------------------------------

RUN = RunConfig.parse(
    {
        "rounds": 12,
        "seed": 3,
        "partition": {"clients": 40, "max-examples": 20},
        "client": {"steps": 2, "name": "adadp-lr", "state": "client"},
        "cohort": {"name": "buffered", "concurrency": 12, "buffer": 4, "participations": 3},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.5},
        "devices": {"seconds-per-step": 2.0, "bandwidth": 0.1, "spread": 1.0, "dropout": 0.1},
        "evaluate": {"every": 6},
        "checkpoint": {"every": 3},
        "engine": {"device": "cpu"},
    }
)


def test_a_run_is_killed_in_any_round_and_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    whole = fedsim.run(RUN, out=tmp_path / "whole")
    model = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert whole.privacy.epsilon == pytest.approx(5.174810, abs=1e-6)
    ledger = Ledger.read(tmp_path / "whole" / "ledger.jsonl")
    assert [entry.event.count for entry in ledger.entries] == [1, *[0] * 11]
    for number in (1, 2, 3, 7, 12):
        out = tmp_path / str(number)
        with killed_in(number):
            fedsim.run(RUN, out=out)
        fedsim.run(RUN, out=out, resume=True)
        assert (out / "model.safetensors").read_bytes() == model
    times = [row["virtual-seconds"] for row in whole.metrics[1:]]
    assert len(times) == 12
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Test accuracy over the devices&#39; time" in page
    assert "Who trains which version when" in page
    assert min(times) >= 0 < max(times)


@pytest.mark.parametrize("whole_clients", [False, True])
def test_examples_are_charged_for_the_versions_that_their_client_trains(
    whole_clients: bool,
) -> None:
    examples = {
        "client.name": "sgd", "client.state": "reset",
        "client.mechanism.name": "clipping", "client.noise.multiplier": 1.2,
        **({} if whole_clients else {
            "mechanism.name": "none", "mechanism.weighting": "uniform", "noise.multiplier": "",
        }),
    }  # fmt: skip
    config = RUN.replace(**examples)
    buffered = fedsim.run(config)
    schedule = resolve(config).devices.schedule
    assert schedule is not None
    most = int(np.bincount(schedule.client_ids[schedule.releases > 0]).max())
    cohort = dict.fromkeys(("concurrency", "buffer", "participations"), "")
    devices = dict.fromkeys(("seconds-per-step", "bandwidth", "spread", "dropout"), 0.0)
    synchronous = fedsim.run(
        config.replace(
            rounds=most,
            **{"cohort.name": "full", **{f"cohort.{key}": value for key, value in cohort.items()}},
            **{f"devices.{key}": value for key, value in devices.items()},
        )
    )
    assert buffered.example_privacy is not None
    assert synchronous.example_privacy is not None
    assert 1 < most < 12
    assert buffered.example_privacy.epsilon == synchronous.example_privacy.epsilon
    if whole_clients:
        assert buffered.privacy.epsilon == pytest.approx(5.174810, abs=1e-6)


def test_runs_of_two_workers_have_the_bytes_of_one(tmp_path: Path) -> None:
    for workers in (1, 2):
        settings = {"engine.workers": workers}
        fedsim.run(RUN.replace(**settings), out=tmp_path / str(workers))
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in "12")
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "simulation"])
def test_other_engines_give_the_bytes_of_the_local_one(engine: str, tmp_path: Path) -> None:
    config = RUN.replace(rounds=6)
    fedsim.run(config, out=tmp_path / "local")
    fedsim.run(config, engine=engine, out=tmp_path / engine)
    expected, found = (tmp_path / name / "model.safetensors" for name in ("local", engine))
    assert found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("devices.seconds-per-example", 1.0, "how many examples a client has"),
        ("client.steps", 0, "passes take as many steps"),
        ("devices.deadline", 9.0, "devices.deadline"),
        ("devices.trace-seconds", 9.0, "devices.trace"),
        ("devices.duration", 9.0, "0 with devices.duration"),
        ("rounds", 60, "would do"),
        ("cohort.buffer", 13, "it must be at most cohort.concurrency"),
    ],
)
def test_a_config_that_cannot_be_is_refused_before_anything_is_written(
    key: str, value: float | str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(FedsimError, match=words):
        fedsim.run(RUN.replace(**{key: value}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_times_there_is_no_clock() -> None:
    with pytest.raises(FedsimError, match=r"devices\.seconds-per-step .* above 0"):
        RUN.replace(
            **{"devices.seconds-per-step": 0.0, "devices.bandwidth": 0.0, "devices.spread": 0.0}
        )


def test_a_trace_over_virtual_time_says_when_clients_start(tmp_path: Path) -> None:
    trace = np.zeros((2, 40), dtype=bool)
    trace[0, :20] = trace[1, 20:] = True
    np.save(tmp_path / "trace.npy", trace)
    settings = {"devices.trace": str(tmp_path / "trace.npy"), "devices.trace-seconds": 7.0}
    config = RUN.replace(**settings, **{"cohort.participations": 9})
    schedule = resolve(config).devices.schedule
    assert schedule is not None
    rows = (schedule.starts // 7).astype(int) % 2
    assert trace[rows, schedule.client_ids].all()


def test_an_audit_examines_the_schedule_and_attacks_a_buffer() -> None:
    config = RUN.replace(**{"noise.entropy": "system"})
    verdict, assumptions = audit_config(config, runs=40, seconds=60.0)
    assert not verdict.refuting
    assert "releases of each client" in [check.name for check in verdict.checks]
    assert "buffered cohorts" in assumptions["federation"]
    schedule = resolve(config).devices.schedule
    assert schedule is not None
    assert releases_of_clients(schedule).p_value == 1
    often = replace(schedule, client_ids=np.zeros_like(schedule.client_ids))
    assert releases_of_clients(often).p_value == 0


def test_a_release_that_is_drawn_again_costs_one_more(tmp_path: Path) -> None:
    config = RUN.replace(**{"noise.entropy": "system"})
    with killed_in(5):
        fedsim.run(config, out=tmp_path / "out")
    resumed = fedsim.run(config, out=tmp_path / "out", resume=True)
    # Releases 4 and 5 were made after the checkpoint of release 3: with three planned ones, five.
    expected = gaussian_epsilon(np.sqrt(5) / 1.5, 1e-5)
    assert resumed.privacy.epsilon == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("level", ["client", "example"])
def test_statements_name_what_a_run_in_real_time_assumes(level: str, tmp_path: Path) -> None:
    private = {"mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.5}}
    tables = private if level == "client" else {
        "mechanism": {"name": "none", "weighting": "uniform"},
        "client": {"steps": 2, "batch-size": 5, **private},
    }  # fmt: skip
    config = RunConfig.parse(
        {
            "rounds": 2,
            "partition": {"clients": 6, "max-examples": 20},
            "cohort": {"name": "buffered", "concurrency": 4, "buffer": 3},
            "devices": {"duration": 20.0},
            "evaluate": {"every": 0},
            "engine": {"device": "cpu"},
            **tables,
        }
    )
    (tmp_path / "run.toml").write_text(config.to_toml())
    fedsim.run(config, out=tmp_path / "run")
    for engine, is_real in (("local", False), ("deployment", True)):
        flat = config.to_run_config() | {"engine.name": engine}
        (statement,) = replace(RunLedgers.read(tmp_path / "run"), config=flat).statements
        assert statement.level == level
        assert (LATENESS in str(statement)) == is_real
        question = ["privacy", str(tmp_path / "run.toml"), "--set", f"engine.name={engine}"]
        shown = CliRunner().invoke(app, question)
        assert shown.exit_code == 0, shown.output
        assert (LATENESS in " ".join(shown.output.split())) == is_real
