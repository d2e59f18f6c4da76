"""A model of clients' devices: their availability, their amount of work, and its duration.

A simple model, drawn from a seed and a client's id and never from data: a device is there with
a fixed probability a round, or when a trace says so; it drops out with another; it takes its own
seconds an example and has its own bandwidth, log-normal over clients. Who is drawn and does not
take part counts as missing, so that the event of a private round stays that of its cohort.
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

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

AVAILABLE, DROPS, SPEED, BANDWIDTH, WORK = range(5)  # parts of Purpose.DEVICE
MEGABIT = 1e6 / 8  # bytes
LARGEST_FILE = 2**30


@dataclass(frozen=True)
class RoundLoad:
    """What a round moved, and how long it took by the devices' clocks.

    Attributes
    ----------
    bytes_down, bytes_up : int
        Sent to the devices that were there, and by those that did not drop out: the values of
        what is sent, without any protocol's wrapping.
    seconds : float
        Of the slowest that replied, or the deadline if one passed it.
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
    trace : bool ``[T, population]``, optional
        Whether one is available, in the place of a probability: round r is row (r - 1) mod T.
    """

    seed: int
    settings: DevicesSection
    trace: Bools | None = None
    load: RoundLoad | None = field(default=None, init=False)
    """Of the round that `replying` was asked of last."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Those that a config describes."""
        settings, clients = config.devices, config.partition.clients
        trace = _read_trace(Path(settings.trace), clients) if settings.trace else None
        return cls(config.seed, settings, trace)

    def replying(
        self,
        round: int,
        client_ids: Ints,
        examples: Callable[[Ints], Floats],
        down: int,
        up: int,
    ) -> Bools:
        """Which of these clients ``[n]`` take part in the round, ``[n]``.

        Parameters
        ----------
        round : int
        client_ids : int64 ``[n]``
        examples : callable
            How many examples clients ``[m]`` go through in a round, ``[m]``.
        down, up : int
            Bytes that a client gets and sends.
        """
        available = self._available(round, client_ids)
        replies = available & ~self._drawn(DROPS, self.settings.dropout, round, client_ids)
        seconds = np.zeros(len(client_ids))
        if self.clocked and replies.any():
            ids = client_ids[replies]
            seconds[replies] = self.seconds(ids, examples(ids), down + up)
        sent = int(replies.sum())
        if self.settings.deadline:
            late = seconds > self.settings.deadline
            waited = late.any() or bool((available & ~replies).any())
            seconds = np.minimum(seconds, self.settings.deadline)
            longest = self.settings.deadline if waited else float(seconds.max(initial=0.0))
            replies &= ~late
        else:
            longest = float(seconds.max(initial=0.0))
        self.load = RoundLoad(down * int(available.sum()), up * sent, longest)
        return replies

    def reachable(self, round: int, client_ids: Ints) -> Bools:
        """Which of these clients ``[n]`` are there in the round and do not drop out, ``[n]``."""
        available = self._available(round, client_ids)
        return available & ~self._drawn(DROPS, self.settings.dropout, round, client_ids)

    @property
    def clocked(self) -> bool:
        """Whether devices take any time."""
        return bool(self.settings.seconds_per_example or self.settings.bandwidth)

    def seconds(self, client_ids: Ints, examples: Floats, transferred: int) -> Floats:
        """How long each of these takes for its examples and bytes, ``[n]``."""
        seconds = self.settings.seconds_per_example * self._scales(SPEED, client_ids) * examples
        if self.settings.bandwidth:
            seconds += transferred / (
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
    # A device is asked for again: it is the same one in every round.
    return (
        Randomness(seed)
        .repeated()
        .generator(Purpose.DEVICE, level="client", round=round, client=int(client), part=part)
    )


def work_counts(config: RunConfig) -> Ints | None:
    """Each client's own number of epochs or steps ``[population]``; None where all have one."""
    work, clients = config.client.work, config.partition.clients
    drawn = WORK_RANGE.fullmatch(work)
    if drawn is None:
        return read_work(Path(work), clients) if work else None
    draws = Randomness(config.seed).repeated()
    generator = draws.generator(Purpose.DEVICE, level="client", part=WORK)
    return generator.integers(int(drawn[1]), int(drawn[2]), clients, endpoint=True)


def read_work(path: Path, population: int) -> Ints:
    """Those numbers from a file: a whole number, at least 1, a line for each client.

    Raises
    ------
    FedsimError
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError
        counts = [int(line) for line in regular_files.read_text(path).split()]
    except OSError as error:
        raise FedsimError(f"client.work = '{path}' cannot be read ({error.strerror}).") from None
    except ValueError:  # whose words would tell what is in the file
        raise FedsimError(
            f"client.work = '{path}' holds something else than whole numbers, or is larger than a "
            "gigabyte; it must have one for each client."
        ) from None
    if len(counts) != population or min(counts) < 1 or max(counts) > 1_000_000:
        raise FedsimError(
            f"client.work = '{path}' has {len(counts)} numbers; it must have one from 1 to "
            f"1,000,000 for each of the {population} clients."
        )
    return np.array(counts, dtype=np.int64)


def _read_trace(path: Path, population: int) -> Bools:
    """Who is there: an .npy file of truth values ``[rounds, population]``, which stays there.

    Raises
    ------
    FedsimError
    """
    try:
        trace = np.load(regular_files.require(path), mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise FedsimError(f"devices.trace = '{path}' cannot be read ({error.strerror}).") from None
    except Exception:  # anything that a parser of a stranger's bytes may raise
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
