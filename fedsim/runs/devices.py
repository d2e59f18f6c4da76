"""Simulated devices of clients: their availability, amount of work, and time taken.

The model is simple, and depends on a seed and a client's id, never on data. A device is available
with a fixed probability each round, or according to a trace; it drops out with another
probability; its seconds for an example and its bandwidth are log-normal over clients. A sampled
client that does not take part counts as missing, so that a private round is accounted for as its
sampled cohort.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedsim import regular_files
from fedsim.config import RunConfig
from fedsim.config.sections import WORK_RANGE, DevicesSection
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness
from fedsim.training import Trainer

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

AVAILABLE, DROPS, SPEED, BANDWIDTH, WORK = range(5)  # parts of Purpose.DEVICE
MEGABIT = 1e6 / 8  # bytes
LARGEST_WORK_FILE = 2**30


@dataclass(frozen=True)
class RoundLoad:
    """Bytes sent in a round, and its simulated duration.

    Attributes
    ----------
    bytes_down, bytes_up : int
        Bytes sent to the available devices, and by those that did not drop out; values only,
        without a protocol's overhead.
    seconds : float
        Time of the slowest device that replied, or the deadline if any device missed it.
    """

    bytes_down: int
    bytes_up: int
    seconds: float


@dataclass
class Devices:
    """The devices of a population.

    Parameters
    ----------
    seed : int
    settings : DevicesSection
    examples : callable
        Numbers of examples ``[m]`` that clients ``[m]`` process in a round.
    down, up : int
        Bytes that a client receives and sends in a round.
    trace : bool ``[T, population]``, optional
        Availability, instead of a probability: row (r - 1) mod T is for round r.
    """

    seed: int
    settings: DevicesSection
    examples: Callable[[Ints], Floats]
    down: int
    up: int
    trace: Bools | None = None
    load: RoundLoad | None = field(default=None, init=False)
    """Load of the round of the last call of `replying`."""

    @classmethod
    def of(cls, config: RunConfig, trainer: Trainer) -> Self:
        """Make the devices that a config describes, on which a trainer's clients train."""
        settings, clients = config.devices, config.partition.clients
        size, values = trainer.layout.dtype.itemsize, trainer.row_layout.d
        down, up = trainer.received_layout.d * size, values * size
        trace = _read_trace(Path(settings.trace), clients) if settings.trace else None
        return cls(config.seed, settings, trainer.workload.examples, down, up, trace)

    def replying(self, round: int, client_ids: Ints) -> Bools:
        """Whether each of these clients takes part in the round, ``bool [n]``; sets `load`."""
        available = self._available(round, client_ids)
        replies = available & ~self._drawn(DROPS, self.settings.dropout, round, client_ids)
        seconds = np.zeros(len(client_ids))
        if self.clocked and replies.any():
            ids = client_ids[replies]
            seconds[replies] = self.seconds(ids)
        sent, longest = int(replies.sum()), float(seconds.max(initial=0.0))
        if deadline := self.settings.deadline:
            late = seconds > deadline
            # The server cannot know that a device dropped out: it waits until the deadline for it.
            if late.any() or (available & ~replies).any():
                longest = deadline
            replies &= ~late
        self.load = RoundLoad(self.down * int(available.sum()), self.up * sent, longest)
        return replies

    def reachable(self, round: int, client_ids: Ints) -> Bools:
        """Whether each client is available in the round and does not drop out, ``bool [n]``."""
        available = self._available(round, client_ids)
        return available & ~self._drawn(DROPS, self.settings.dropout, round, client_ids)

    @property
    def clocked(self) -> bool:
        """Whether simulated time is modelled at all."""
        return bool(self.settings.seconds_per_example or self.settings.bandwidth)

    def seconds(self, client_ids: Ints) -> Floats:
        """Seconds that each client takes for its examples and bytes, ``[n]``."""
        speeds, examples = self._scales(SPEED, client_ids), self.examples(client_ids)
        seconds = self.settings.seconds_per_example * speeds * examples
        if self.settings.bandwidth:
            seconds += (self.down + self.up) / (
                self.settings.bandwidth * MEGABIT * self._scales(BANDWIDTH, client_ids)
            )
        return seconds

    def _available(self, round: int, client_ids: Ints) -> Bools:
        if self.trace is not None:
            row: Bools = np.asarray(self.trace[(round - 1) % len(self.trace)])
            return row[client_ids].astype(bool)
        return self._drawn(AVAILABLE, self.settings.availability, round, client_ids)

    def _drawn(self, part: int, probability: float, round: int, client_ids: Ints) -> Bools:
        if probability in (0.0, 1.0):
            return np.full(len(client_ids), probability == 1.0)
        draws = [_generator(self.seed, part, client, round).random() for client in client_ids]
        return np.array(draws, dtype=np.float64) < probability

    def _scales(self, part: int, client_ids: Ints) -> Floats:
        if not self.settings.spread:
            return np.ones(len(client_ids))
        draws = [_generator(self.seed, part, client).standard_normal() for client in client_ids]
        scales: Floats = np.exp(self.settings.spread * np.array(draws, dtype=np.float64))
        return scales


def _generator(seed: int, part: int, client: int, round: int = 0) -> np.random.Generator:
    # `repeated`: the same draws are made in every round, since a device's speed does not change.
    return (
        Randomness(seed)
        .repeated()
        .generator(Purpose.DEVICE, level="client", round=round, client=int(client), part=part)
    )


def work_counts(config: RunConfig) -> Ints | None:
    """Each client's number of epochs or steps ``[population]``; None if all have the same."""
    work, clients = config.client.work, config.partition.clients
    drawn = WORK_RANGE.fullmatch(work)
    if drawn is None:
        return read_work(Path(work), clients) if work else None
    draws = Randomness(config.seed).repeated()
    generator = draws.generator(Purpose.DEVICE, level="client", part=WORK)
    return generator.integers(int(drawn[1]), int(drawn[2]), clients, endpoint=True)


def read_work(path: Path, population: int) -> Ints:
    """Read them from a file: a whole number of at least 1 on one line for each client.

    Raises
    ------
    FedsimError
    """
    try:
        if path.stat().st_size > LARGEST_WORK_FILE:
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
