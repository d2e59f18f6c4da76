"""The schedules that asynchronous rounds are compared with."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.asynchronous.worth import HOUR, Day, synchronous
from fedsim.cohorts import BufferedCohort
from fedsim.errors import FedsimError

POPULATION = 60
SECONDS = 600 * np.exp(np.random.default_rng(2).normal(size=POPULATION))


@pytest.mark.parametrize(("started", "buffer"), [(5, 5), (8, 5)])
def test_a_synchronous_round_takes_the_first_of_those_that_begin_it(
    started: int, buffer: int
) -> None:
    cohort = BufferedCohort(started, buffer, participations=9, rounds=40, population=POPULATION)
    day = Day(POPULATION, 1)
    schedule = synchronous(cohort, SECONDS, 1, day)
    assert np.bincount(schedule.client_ids).max() <= 9
    before = 0.0
    for version in range(40):
        of = schedule.versions == version
        (start,) = set(schedule.starts[of].tolist())
        clients, ends = schedule.client_ids[of], schedule.ends[of]
        assert len(set(clients.tolist())) == started
        assert start >= before
        assert all(day.available(client, version, start) for client in clients.tolist())
        np.testing.assert_array_equal(ends, start + SECONDS[clients])
        before = np.sort(ends)[buffer - 1]
        assert schedule.times[version] == before
        in_release = schedule.releases[of] > 0
        np.testing.assert_array_equal(in_release, ends <= before)
        assert set(schedule.releases[of][in_release].tolist()) == {version + 1}


def test_too_few_participations_are_refused() -> None:
    cohort = BufferedCohort(8, 5, participations=1, rounds=40, population=POPULATION)
    with pytest.raises(FedsimError, match="too few clients have any left after 7 of 40 rounds"):
        synchronous(cohort, SECONDS, 1, Day(POPULATION, 1))


def test_each_device_is_available_for_eight_hours_of_each_day() -> None:
    day, hours = Day(POPULATION, 1), np.arange(0, 72, 1 / 60)
    for client in range(POPULATION):
        available = [day.available(client, 0, HOUR * hour) for hour in hours.tolist()]
        assert np.mean(available) == pytest.approx(1 / 3, abs=1e-3)
        np.testing.assert_array_equal(available[: 24 * 60], available[24 * 60 : 48 * 60])
