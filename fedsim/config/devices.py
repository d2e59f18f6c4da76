"""Simulated devices of clients: their availability, amount of work, and time taken.

All that concerns them is in this file: the table ``[devices]`` and the key ``client.work``, their
refusals, what a private run assumes of them, who is available, and the clock.

The model is simple, and depends on a seed and a client's id, never on data. A device is available
with a fixed probability each round, or according to a trace; it drops out with another
probability; its seconds for an example and its bandwidth are log-normal over clients. A sampled
client that does not take part counts as missing, so that a private round is accounted for as its
sampled cohort.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

import numpy as np

from fedsim import regular_files
from fedsim.array_types import Bools, Floats, Ints
from fedsim.config.tables import ConfigTable, Needs, Refusals
from fedsim.errors import FedsimError
from fedsim.federation.buffered.schedule import ALWAYS, LATENESS, OpenTimes, ReleaseSchedule
from fedsim.privacy.laws.buffered import Buffered
from fedsim.privacy.laws.sampler import Sampler, declared_population
from fedsim.randomness import Purpose, Randomness, Stream
from fedsim.settings import Constraint, Ge, Gt, Le, Lt, NamesPath

AVAILABLE, DROPS, SPEED, BANDWIDTH, WORK = range(5)  # parts of Purpose.DEVICE
MEGABIT = 1e6 / 8  # bytes
MAX_WORK_FILE = 2**30
MIN_DURATION = 8.0
"""Seconds that a task takes at least in a deployment: Flower's nodes look for messages every three
seconds, and hold their answers for half of it (`fedsim.apps.client_app`)."""

_WORK_RANGE = re.compile(r"whole\((\d{1,7}), *(\d{1,7})\)")


def _is_work(text: str) -> bool:
    drawn = _WORK_RANGE.fullmatch(text)
    return "(" not in text or (drawn is not None and 1 <= int(drawn[1]) <= int(drawn[2]))


Work: TypeAlias = Annotated[
    str,
    Constraint(_is_work, "whole(low,high) with whole numbers from 1 on, the path of a file, or ''"),
]
"""Type of clients' amounts of work: ``whole(1,5)``, a file, or empty for equal work."""


@dataclass(frozen=True, init=False)
class DevicesSection(ConfigTable, table="devices"):
    """Simulated devices of clients, drawn from the seed, never from data."""

    availability: Annotated[float, Gt(0), Le(1)] = 1.0
    """The probability that a device is available, independently in each round."""
    trace: Annotated[str, NamesPath("training")] = ""
    """In place of availability: an .npy file of truth values [rounds, clients], repeated as often
    as needed. A sampled client that is not available counts as missing."""
    trace_seconds: Annotated[float, Ge(0), Needs("trace")] = 0.0
    """With a buffered cohort, whose rounds have no fixed time: the seconds that a row of
    devices.trace is for. It says when clients may start."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """The probability that an available device does not reply, independently in each round."""
    seconds_per_example: Annotated[float, Ge(0)] = 0.0
    """Training time of the median device, in seconds an example; 0 for none."""
    seconds_per_step: Annotated[float, Ge(0)] = 0.0
    """Training time of the median device, in seconds a local step; 0 for none."""
    bandwidth: Annotated[float, Ge(0)] = 0.0
    """Bandwidth of the median device, in megabits a second each way; 0 for no limit."""
    spread: Annotated[float, Ge(0), Le(10)] = 0.0
    """How much devices differ: standard deviation of the logarithms of seconds-per-example (or
    seconds-per-step) and bandwidth."""
    duration: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """With a buffered cohort, in place of the other times: the seconds of every client's task, from
    the request for its update to the release that it may be in. In a deployment they are real: an
    update that is not there by then counts as zero. 0 for none: without privacy a deployment then
    releases the updates that come first."""
    deadline: Annotated[float, Ge(0)] = 0.0
    """Deadline of a round on the device's simulated clock, in seconds: later replies do not count;
    0 for none."""

    def refusals(self, config: Any) -> Refusals:
        """Keys of the table that break a rule of a `RunConfig`, each with what it must be."""
        if self.trace and self.availability != 1:
            yield (
                "devices.availability",
                f"unset while devices.trace = '{self.trace}' says which devices are available",
            )
        for key in ("deadline", "spread"):
            if getattr(self, key) and not self.clocked:
                yield (
                    f"devices.{key}",
                    "0 while devices take no time: devices.seconds-per-step, "
                    "devices.seconds-per-example and devices.bandwidth say how much",
                )
        if self.deadline and config.protects:
            yield (
                "devices.deadline",
                "0 in a run that is private at client or example level: how long a device takes "
                "depends on how many examples it has, which would decide whose update is in the "
                "sum",
            )
        if config.cohort.name == "buffered":
            yield from self._refused_by_clock(config)
        elif self.trace_seconds:
            yield (
                "devices.trace-seconds",
                "0 unless cohort.name = 'buffered': a row of the trace is for one round",
            )
        elif self.duration:
            yield "devices.duration", "0 unless cohort.name = 'buffered', whose tasks take time"
        for setting in fields(self) if config.engine.name == "deployment" else ():
            if setting.name != "duration" and getattr(self, setting.name) != setting.default:
                yield (
                    f"devices.{setting.name.replace('_', '-')}",
                    "unset with engine.name = 'deployment', whose devices are real",
                )

    def _refused_by_clock(self, config: Any) -> Refusals:
        """Keys that a buffered cohort excludes, or needs."""
        buffered = "with cohort.name = 'buffered'"
        if config.engine.name == "deployment":
            yield from self._refused_by_deployment(config)
        elif not self.clocked:
            yield (
                "devices.seconds-per-step",
                f"above 0 {buffered}, or devices.seconds-per-example, devices.bandwidth or "
                "devices.duration: who trains when follows from the time that devices take",
            )
        for key in ("seconds-per-step", "seconds-per-example", "bandwidth", "spread"):
            if self.duration and getattr(self, key.replace("-", "_")):
                yield f"devices.{key}", "0 with devices.duration, which is all the time of a task"
        if self.deadline:
            yield "devices.deadline", f"0 {buffered}, which waits for nobody"
        if self.trace and not self.trace_seconds:
            yield "devices.trace-seconds", f"above 0 {buffered} and devices.trace"
        if config.protects and self.seconds_per_example:
            yield (
                "devices.seconds-per-example",
                f"0 {buffered} in a run that is private at client or example level: how many "
                "examples a client has would decide when its update counts; "
                "devices.seconds-per-step goes by declared steps",
            )
        if config.protects and self.seconds_per_step and not config.client.steps:
            yield (
                "client.steps",
                f"above 0 {buffered} and devices.seconds-per-step in a run that is private at "
                "client or example level: passes take as many steps as a client has examples",
            )

    def _refused_by_deployment(self, config: Any) -> Refusals:
        """Keys that a buffered cohort excludes, or needs, on a real federation."""
        where = "with cohort.name = 'buffered' and engine.name = 'deployment'"
        if not self.duration and config.protects:
            yield (
                "devices.duration",
                f"above 0 {where} in a run that is private at client or example level: in which "
                "order updates come may depend on clients' data, so that each counts when the "
                "seconds of its task are over",
            )
        if 0 < self.duration < MIN_DURATION:
            yield (
                "devices.duration",
                f"at least {MIN_DURATION:g} {where}: a node looks for requests every three seconds",
            )

    @property
    def clocked(self) -> bool:
        """Whether time is modelled at all."""
        times = (self.seconds_per_example, self.seconds_per_step, self.bandwidth, self.duration)
        return any(times)


def assumption(config: Mapping[str, object]) -> str:
    """What a private run with a flat config assumes of devices and work; "" if nothing."""
    sentences = list(filter(None, [lateness(config)]))
    usual = DevicesSection().to_tree()
    del usual["duration"]  # the same for all clients
    modelled = any(config.get(f"devices.{key}", value) != value for key, value in usual.items())
    if modelled or config.get("client.work"):
        sentences.append(
            "Which clients are available, drop out or do how much work follows from the seed or "
            "from files that are assumed to be independent of clients' data (devices, client.work)."
        )
    return " ".join(sentences)


def lateness(config: Mapping[str, object]) -> str:
    """What a run with a flat config assumes of late updates, at either level; "" if nothing."""
    is_real = config.get("engine.name") == "deployment"
    return LATENESS if is_real and config.get("devices.duration") else ""


_COLUMNS = ("bytes-down", "bytes-up", "virtual-seconds")


@dataclass
class Devices:
    """The devices of a population.

    Parameters
    ----------
    seed : int
    settings : DevicesSection
    examples, steps : callable
        Numbers of examples, and of local steps, ``[m]`` that clients ``[m]`` process in a round. In
        a private run the steps are declared ones, also of a client without examples.
    down, up : int
        Bytes that a client receives and sends in a round.
    trace : bool ``[T, population]``, optional
        Availability, instead of a probability: row (r - 1) mod T is for round r.
    cohort : Sampler, optional
        The run's, if it may be a buffered one.
    """

    seed: int
    settings: DevicesSection
    examples: Callable[[Ints], Floats]
    steps: Callable[[Ints], Floats]
    down: int
    up: int
    trace: Bools | None = None
    cohort: Sampler | None = None
    load: Mapping[str, int | float] = field(default_factory=dict, init=False)
    """Load of the round of the last call of `replying`, by column of metrics.csv: bytes sent to the
    available devices, and by those that did not drop out (values only, without a protocol's
    overhead); seconds of the slowest device that replied, or the deadline if one missed it."""

    @classmethod
    def from_settings(
        cls,
        settings: DevicesSection,
        population: int,
        seed: int,
        *,
        examples: Callable[[Ints], Floats],
        steps: Callable[[Ints], Floats],
        down: int,
        up: int,
        cohort: Sampler | None = None,
    ) -> Self:
        """The devices of a population that a config's table describes."""
        trace = _read_trace(Path(settings.trace), population) if settings.trace else None
        return cls(seed, settings, examples, steps, down, up, trace, cohort)

    @cached_property
    def schedule(self) -> ReleaseSchedule | None:
        """Who trains which version when, of a buffered cohort; None for any other.

        Raises
        ------
        FedsimError
            If its numbers cannot be, as `ReleaseSchedule.of`.
        """
        if not isinstance(self.cohort, Buffered) or not self.settings.clocked:
            return None  # without times, in a deployment, updates are taken as they come
        seconds = self.seconds(np.arange(declared_population(self.cohort)))
        least = float(seconds.min())
        if least <= 0:
            raise FedsimError(
                f"client {int(seconds.argmin())} would take {least:g} seconds (devices, client); "
                "with cohort.name = 'buffered' each must take some: set devices.bandwidth too, or "
                "give each client examples."
            )
        always = self.trace is None and self.settings.availability == 1
        return ReleaseSchedule.of(
            self.cohort, seconds, self.seed, ALWAYS if always else _OpenTimes(self)
        )

    def replying(self, round: int, client_ids: Ints) -> Bools:
        """Whether each of these clients takes part in the round, ``bool [n]``; sets `load`."""
        if self.schedule is not None:
            return self._replying_later(self.schedule, round, client_ids)
        available = self._available(round, client_ids)
        replies = available & ~self._draw_events(DROPS, self.settings.dropout, round, client_ids)
        seconds = np.zeros(len(client_ids))
        if self.settings.clocked and replies.any():
            ids = client_ids[replies]
            seconds[replies] = self.seconds(ids)
        sent, longest = int(replies.sum()), float(seconds.max(initial=0.0))
        if deadline := self.settings.deadline:
            late = seconds > deadline
            # The server cannot know that a device dropped out: it waits until the deadline for it.
            if late.any() or (available & ~replies).any():
                longest = deadline
            replies &= ~late
        loads = (self.down * int(available.sum()), self.up * sent, longest)
        self.load = dict(zip(_COLUMNS, loads, strict=True))
        return replies

    def _replying_later(self, schedule: ReleaseSchedule, round: int, client_ids: Ints) -> Bools:
        """Whether each of these clients, which start from a version, hands in an update later.

        One that drops out hands in a zero at its time, so that the others' schedule stays the same.
        """
        replies = ~self._draw_events(DROPS, self.settings.dropout, round, client_ids)
        sent = int(replies.sum())
        loads = (self.down * len(client_ids), self.up * sent, schedule.seconds_of(round))
        self.load = dict(zip(_COLUMNS, loads, strict=True))
        return replies

    def reachable(self, round: int, client_ids: Ints) -> Bools:
        """Whether each client is available in the round and does not drop out, ``bool [n]``."""
        available = self._available(round, client_ids)
        return available & ~self._draw_events(DROPS, self.settings.dropout, round, client_ids)

    def available_at(self, client: int, round: int, time: float) -> bool:
        """Whether a client may begin in a round of a buffered cohort, at a time of its clock."""
        if self.trace is not None:
            return bool(
                self.trace[int(time // self.settings.trace_seconds) % len(self.trace), client]
            )
        return bool(self._available(round, np.array([client]))[0])

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of metrics.csv for the load of a round."""
        return _COLUMNS if self.settings.clocked else _COLUMNS[:2]

    def seconds(self, client_ids: Ints) -> Floats:
        """Seconds that each client takes for its examples and bytes, ``[n]``."""
        settings, speeds = self.settings, self._scales(SPEED, client_ids)
        seconds = np.full(len(client_ids), settings.duration)
        if settings.seconds_per_example:
            seconds += settings.seconds_per_example * speeds * self.examples(client_ids)
        if settings.seconds_per_step:
            seconds += settings.seconds_per_step * speeds * self.steps(client_ids)
        if settings.bandwidth:
            seconds += (self.down + self.up) / (
                settings.bandwidth * MEGABIT * self._scales(BANDWIDTH, client_ids)
            )
        return seconds

    def _available(self, round: int, client_ids: Ints) -> Bools:
        if self.trace is not None:
            row: Bools = np.asarray(self.trace[(round - 1) % len(self.trace)])
            return row[client_ids].astype(bool)
        return self._draw_events(AVAILABLE, self.settings.availability, round, client_ids)

    def _draw_events(self, part: int, probability: float, round: int, client_ids: Ints) -> Bools:
        if probability in (0.0, 1.0):
            return np.full(len(client_ids), probability == 1.0)
        draws = [
            generator.random() for generator in _generators(self.seed, part, client_ids, round)
        ]
        return np.array(draws, dtype=np.float64) < probability

    def _scales(self, part: int, client_ids: Ints) -> Floats:
        if not self.settings.spread:
            return np.ones(len(client_ids))
        draws = [
            generator.standard_normal() for generator in _generators(self.seed, part, client_ids)
        ]
        scales: Floats = np.exp(self.settings.spread * np.array(draws, dtype=np.float64))
        return scales


def declared_schedule(config: Any, cohort: Sampler) -> ReleaseSchedule | None:
    """The schedule of a config's buffered ``cohort`` whose times are declared; None of any other.

    Raises
    ------
    FedsimError
        As `ReleaseSchedule.of`.
    """
    if not (config.devices.duration and isinstance(cohort, Buffered)):
        return None
    seconds = np.full(config.partition.clients, config.devices.duration)
    return ReleaseSchedule.of(cohort, seconds, config.seed)


class _OpenTimes(OpenTimes):
    """When simulated devices are available, on the clock of a buffered cohort."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def available(self, client: int, version: int, time: float) -> bool:
        return self._devices.available_at(client, version + 1, time)

    def next_change(self, time: float) -> float:
        # With a probability, whoever is not available is so for the whole version.
        if self._devices.trace is None:
            return math.inf
        length = self._devices.settings.trace_seconds
        return (time // length + 1) * length


def _generators(
    seed: int, part: int, client_ids: Ints, round: int = 0
) -> Iterator[np.random.Generator]:
    """Generators of these clients' draws, each valid until the next is taken."""
    # `for_replay`: made again in every round, since a device's speed does not change.
    randomness, stream = Randomness(seed).for_replay(), Stream()
    for client in client_ids.tolist():
        yield randomness.generator(
            Purpose.DEVICE, level="client", round=round, client=client, part=part, stream=stream
        )


def work_counts(work: str, population: int, seed: int) -> Ints | None:
    """Each client's number of epochs or steps ``[population]``; None if all have the same."""
    drawn = _WORK_RANGE.fullmatch(work)
    if drawn is None:
        return read_work(Path(work), population) if work else None
    draws = Randomness(seed).for_replay()
    generator = draws.generator(Purpose.DEVICE, level="client", part=WORK)
    return generator.integers(int(drawn[1]), int(drawn[2]), population, endpoint=True)


def work_sentence(work: str, many: str) -> str:
    """How many epochs or steps (``many``) clients do, in words; empty if all do the same."""
    if drawn := _WORK_RANGE.fullmatch(work):
        return f"{drawn[1]} to {drawn[2]} {many}, drawn for each client,"
    return f"a number of {many} that {work} says for each client," if work else ""


def read_work(path: Path, population: int) -> Ints:
    """Read them from a file: a whole number of at least 1 on one line for each client.

    Raises
    ------
    FedsimError
    """
    try:
        if path.stat().st_size > MAX_WORK_FILE:
            raise ValueError
        counts = [int(line) for line in regular_files.read_text(path).split()]
    except OSError as error:
        raise FedsimError(f"client.work = '{path}' cannot be read ({error.strerror}).") from None
    except ValueError:  # its message would show content of the file
        raise FedsimError(
            f"client.work = '{path}' contains values other than whole numbers, or is larger than a "
            "gigabyte; it must have one for each client."
        ) from None
    if len(counts) != population or min(counts) < 1 or max(counts) > 1_000_000:
        raise FedsimError(
            f"client.work = '{path}' has {len(counts)} numbers; it must have one from 1 to "
            f"1,000,000 for each of the {population} clients."
        )
    return np.array(counts, dtype=np.int64)


def _read_trace(path: Path, population: int) -> Bools:
    """Open a trace: an .npy file of truth values ``[rounds, population]``, memory-mapped.

    Raises
    ------
    FedsimError
    """
    try:
        trace = np.load(regular_files.require(path), mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise FedsimError(f"devices.trace = '{path}' cannot be read ({error.strerror}).") from None
    except Exception:  # a parser of untrusted bytes may raise anything
        trace = None
    if (
        not isinstance(trace, np.ndarray)
        or trace.dtype != np.bool_
        or trace.ndim != 2
        or not len(trace)
        or trace.shape[1] != population
    ):
        raise FedsimError(
            f"devices.trace = '{path}' must be an .npy file of truth values, rounds times the "
            f"{population} clients."
        )
    return trace
