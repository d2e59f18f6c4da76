"""The schedule of buffered asynchronous rounds: who trains which version when, on a virtual clock.

No training is needed to know it: it follows from a seed, the devices and public numbers. So it is
simulated first, and a run then trains the clients version by version.

At one instant, first all clients that have finished hand in, by client id, and the releases that
they complete are made; then free places are filled, from the newest version. A client that has
handed in waits for the release that has its update, and for ``separation - 1`` further ones. It
is thus at most once in a release.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from fedsim.array_types import Floats, Ints
from fedsim.errors import FedsimError
from fedsim.privacy.laws.buffered import Buffered
from fedsim.privacy.laws.sampler import declared_population
from fedsim.randomness import Purpose, Randomness, Stream

MAX_TRIES = 10_000
"""Idle devices at most that are tried for a free place at one instant: if none of them is
available, the place stays empty until the next."""


LATENESS = (
    "Assumed: whether a client's update is there when the declared seconds of its task are over "
    "does not depend on its data. One that is late is a zero in its place."
)
"""What a private run in real time assumes."""


class OpenTimes:
    """When devices are available. The base class: always."""

    def available(self, client: int, version: int, time: float) -> bool:
        """Whether a client may start from a version at this time."""
        return True

    def next_change(self, time: float) -> float:
        """The next time after ``time`` at which another client may be available; inf for never."""
        return math.inf


ALWAYS = OpenTimes()


@dataclass(frozen=True)
class ReleaseSchedule:
    """Who trains which version when, and in which release the update is; by order of the starts.

    Attributes
    ----------
    cohort : Buffered
    client_ids : int64 ``[n]``
    versions : int64 ``[n]``
        The version from which each trains, ascending; version 0 is the initial model.
    releases : int64 ``[n]``
        Number of the release with its update, from 1 on; 0 for one that hands in after the last.
    starts, ends : float64 ``[n]``
        Seconds of the virtual clock.
    times : float64 ``[rounds]``
        When each release is made.
    """

    cohort: Buffered
    client_ids: Ints
    versions: Ints
    releases: Ints
    starts: Floats
    ends: Floats
    times: Floats

    @classmethod
    def of(
        cls, cohort: Buffered, seconds: Floats, seed: int, open_times: OpenTimes = ALWAYS
    ) -> Self:
        """Simulate the clock until the last release.

        Parameters
        ----------
        cohort : Buffered
        seconds : float64 ``[population]``
            How long each client takes, above 0. It must not depend on protected data.
        seed : int
            Keys the draws of the clients that start.
        open_times : OpenTimes
            When devices are available.

        Raises
        ------
        FedsimError
            If there are not enough clients with participations left; it says what would do.
        """
        population = declared_population(cohort)
        if seconds.shape != (population,) or not (np.isfinite(seconds) & (seconds > 0)).all():
            raise FedsimError(
                f"seconds has shape {list(seconds.shape)}; it must have one number above 0 for "
                f"each of the {population:,} clients."
            )
        clock = _Clock(cohort, seconds, seed, open_times)
        made = clock.run()
        if made < cohort.rounds:
            raise FedsimError(_dried_up(cohort, made, seconds, seed, open_times))
        return cls(cohort, *clock.columns())

    def __len__(self) -> int:
        return len(self.client_ids)

    @cached_property
    def code(self) -> str:
        """SHA-256 of who is in which release from which version, in hexadecimal."""
        digest = hashlib.sha256(repr(replace(self.cohort)).encode())
        for column in (self.client_ids, self.versions, self.releases):
            digest.update(column.tobytes())
        return digest.hexdigest()

    def check(self) -> None:
        """Refuse a schedule without its cohort's numbers, on which the charge counts.

        Raises
        ------
        FedsimError
        """
        cohort, inside = self.cohort, self.releases > 0
        order = np.lexsort((self.releases[inside], self.client_ids[inside]))
        clients, releases = self.client_ids[inside][order], self.releases[inside][order]
        gaps = np.diff(releases)[np.diff(clients) == 0]
        sizes = np.bincount(releases, minlength=cohort.rounds + 1)[1:]
        fits = (
            (gaps >= cohort.separation).all()
            and np.unique(clients, return_counts=True)[1].max(initial=0) <= cohort.participations
            and len(sizes) == cohort.rounds
            and (sizes == cohort.buffer).all()
            and (self.versions[inside] < self.releases[inside]).all()
        )
        if not fits:
            raise FedsimError(
                f"schedule is none of its cohort, {cohort}: a client is in too many releases, or "
                "in two that are too close, or a release has not cohort.buffer updates of earlier "
                "versions; it must be made by ReleaseSchedule.of."
            )

    def check_code(self, code: object) -> None:
        """Refuse the `code` of another schedule, with which a run began that is resumed.

        Raises
        ------
        FedsimError
        """
        if code != self.code:
            raise FedsimError(
                "state= is of a run with another schedule of devices (Availability.schedule); it "
                "must be the one that the run began with."
            )

    @cached_property
    def _offsets(self) -> Ints:
        """Position of the first start of each version, and the number of all: ``[rounds + 1]``."""
        return np.searchsorted(self.versions, np.arange(self.cohort.rounds + 1)).astype(np.int64)

    def starting(self, round: int) -> tuple[Ints, Ints]:
        """Sorted ids of the clients that train version ``round - 1``, and each one's release.

        Those who hand in after the last release are not among them.
        """
        part = slice(self._offsets[round - 1], self._offsets[round])
        ids, releases = self.client_ids[part], self.releases[part]
        order = np.argsort(ids, kind="stable")
        order = order[releases[order] > 0]
        return ids[order], releases[order]

    def seconds_of(self, round: int) -> float:
        """Seconds from the release before to this one."""
        return float(self.times[round - 1] - (self.times[round - 2] if round > 1 else 0.0))


def _dried_up(
    cohort: Buffered, made: int, seconds: Floats, seed: int, open_times: OpenTimes
) -> str:
    """Why a schedule ended after so many releases, and which numbers would do."""
    population = declared_population(cohort)
    rounds = f"rounds = {made:,}" if made else ""
    enough = next(
        (
            k
            for k in _candidates(cohort, population)
            if _Clock(replace(cohort, participations=k), seconds, seed, open_times).run()
            == cohort.rounds
        ),
        None,
    )
    more = None if enough is None else f"cohort.participations = {enough:,}"
    needed = -(-cohort.rounds * cohort.buffer // cohort.participations)
    clients = f"about {needed + cohort.buffer * cohort.separation:,} clients (partition.clients)"
    choices = " or ".join(filter(None, [rounds, more, clients]))
    return (
        f"cohort.participations is {cohort.participations:,}, and too few of the {population:,} "
        f"clients have any left after {made:,} of {cohort.rounds:,} releases of {cohort.buffer:,} "
        f"updates (cohort.separation = {cohort.separation:,}), or are available then; {choices} "
        "would do."
    )


def _candidates(cohort: Buffered, population: int) -> Iterator[int]:
    """Larger numbers of participations, from the least that could do."""
    least = -(-cohort.rounds * cohort.buffer // population)
    first = max(cohort.participations + 1, least)
    yield from (first, first + 1, 2 * first)
    yield max(cohort.rounds, first)


class _Clock:
    """The state of the simulation.

    Attributes
    ----------
    left : list of int
        Participations that each client has left.
    """

    def __init__(self, cohort: Buffered, seconds: Floats, seed: int, open_times: OpenTimes) -> None:
        self._cohort, self._open_times = cohort, open_times
        self._seconds: list[float] = seconds.tolist()
        self._draws = _version_draws(seed, cohort.concurrency, cohort.buffer)
        self._idle = list(range(len(seconds)))
        self.left = [cohort.participations] * len(seconds)
        self._in_flight: list[tuple[float, int, int]] = []  # (end, client, position)
        self._waiting: list[list[int]] = [[]]  # clients in each release
        self._version, self._time = 0, 0.0
        self._uniform = self._draws(0)
        self._ids, self._versions, self._releases = array("q"), array("q"), array("q")
        self._starts, self._ends, self._times = array("d"), array("d"), array("d")

    def run(self) -> int:
        """Advance to the last release; return how many were made."""
        rounds, in_flight = self._cohort.rounds, self._in_flight
        self._start()
        while self._version < rounds:
            time = in_flight[0][0] if in_flight else math.inf
            # A free place waits for the next change of availability, if that comes first.
            if self._idle and len(in_flight) < self._cohort.concurrency:
                time = min(time, self._open_times.next_change(self._time))
            if time == math.inf:
                break
            self._time = time
            self._hand_in()
            if self._version < rounds:
                self._start()
        return self._version

    def columns(self) -> Iterator[Any]:
        """The columns of a `ReleaseSchedule`, in its order."""
        for numbers in (self._ids, self._versions, self._releases):
            yield np.array(numbers, dtype=np.int64)
        for times in (self._starts, self._ends, self._times):
            yield np.array(times, dtype=np.float64)

    def _hand_in(self) -> None:
        """All clients that finish now hand in, by id, and complete releases."""
        in_flight, buffer, rounds = self._in_flight, self._cohort.buffer, self._cohort.rounds
        time = self._time
        while in_flight and in_flight[0][0] == time and self._version < rounds:
            _, client, position = heapq.heappop(in_flight)
            place = self._waiting[self._version]
            place.append(client)
            self._releases[position] = self._version + 1
            if len(place) == buffer:
                self._release()

    def _release(self) -> None:
        """Make a release: a new version. Clients that have waited for it are idle again."""
        self._times.append(self._time)
        self._version += 1
        self._waiting.append([])
        self._uniform = self._draws(self._version)
        ready = self._version - self._cohort.separation
        if ready >= 0:
            left = self.left
            self._idle += [client for client in self._waiting[ready] if left[client]]
            self._waiting[ready] = []

    def _start(self) -> None:
        """Fill free places, by client id, from the newest version."""
        free = self._cohort.concurrency - len(self._in_flight)
        chosen: list[int] = []
        while free and self._idle:
            client = self._drawn()
            if client is None:
                break
            chosen.append(client)
            free -= 1
        chosen.sort()
        time, version, seconds = self._time, self._version, self._seconds
        for client in chosen:
            end = time + seconds[client]
            heapq.heappush(self._in_flight, (end, client, len(self._ids)))
            self.left[client] -= 1
            self._ids.append(client)
            self._versions.append(version)
            self._releases.append(0)
            self._starts.append(time)
            self._ends.append(end)

    def _drawn(self) -> int | None:
        """Take one of the idle and available clients at random; None if there seems to be none."""
        idle, uniform, size = self._idle, self._uniform, len(self._idle)
        if self._open_times is ALWAYS:
            place = int(uniform() * size)
            client, idle[place] = idle[place], idle[-1]
            idle.pop()
            return client
        # Those that were tried are at the front, so that nobody is tried twice.
        for tried in range(min(size, MAX_TRIES)):
            place = tried + int(uniform() * (size - tried))
            client = idle[place]
            if self._open_times.available(client, self._version, self._time):
                idle[place] = idle[-1]
                idle.pop()
                return client
            idle[place], idle[tried] = idle[tried], client
        return None


def _version_draws(
    seed: int, concurrency: int, buffer: int
) -> Callable[[int], Callable[[], float]]:
    """Function of a version that returns the source of its uniform numbers, each in [0, 1)."""
    # `for_replay`: the schedule is public, and made again by every process that needs it.
    randomness, stream = Randomness(seed).for_replay(), Stream()

    def of_version(version: int) -> Callable[[], float]:
        chunk = min(concurrency if version == 0 else 2 * buffer, 1024)

        def numbers() -> Iterator[float]:
            # One stream for all versions: the next one moves it, and this one is not used any more.
            generator = randomness.generator(
                Purpose.SAMPLE, level="client", round=version + 1, stream=stream
            )
            while True:
                yield from generator.random(chunk).tolist()

        return numbers().__next__

    return of_version
