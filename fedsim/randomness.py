"""Random draws as a function of their address (key, level, purpose, round, client, part).

Philox is counter-based: a generator is a point in a space of 2^256 counters under a 2^128
key, so a draw needs no state that a resumed run, another worker or another block size
would have to reproduce. Nothing in fedsim draws from a global generator.

A stream counts in the first of its counter's four words; the other three are its address.
Two addresses are therefore disjoint by construction: no stream of fewer than 2^64 blocks
reaches into another's.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from fedsim.arguments import expected, explain_call, require
from fedsim.errors import FedsimError

DrawLevel = Literal["run", "client", "example"]
_LEVELS: dict[DrawLevel, int] = {"run": 0, "client": 1, "example": 2}


class Purpose(IntEnum):
    """What a draw is for. A sample is amplified if its accounting relies on its being secret.

    Attributes
    ----------
    keyed_by : "seed" or "release"
        What the key is made from: the seed alone, so that runs of one seed can be compared; or
        seed and release digest, so that two runs of one seed that release different things
        share no draw.
    levels : tuple of "run", "client" and "example"
        Kinds of rows that the draw can be about; "run" if it is about none.
    part_meaning : str
        Meaning of the part number, which separates draws of one level, purpose, round, client.
    """

    keyed_by: Literal["seed", "release"]
    levels: tuple[DrawLevel, ...]
    part_meaning: str

    INIT = 1, "seed", ("run",), "0 a model, 1 an adapter; an experiment numbers its own"
    PARTITION = 2, "seed", ("run",), "0 dealing examples, 1 keeping some of them"
    SAMPLE = 3, "seed", ("client", "example"), "the step, or the pass over examples"
    AMPLIFIED_SAMPLE = 4, "release", ("client", "example"), "the step"
    NOISE = 5, "release", ("client", "example"), "0 a release, its scalars last"
    SHARE = 6, "release", ("client",), "0 a client's share of a release's noise"
    DROPOUT = 7, "seed", ("example",), "the step; 2^40 an evaluation"
    EVALUATE = 8, "seed", ("client",), "0 who evaluates"
    AUDIT = 9, "seed", ("run",), "an audit numbers its own"
    DEVICE = 11, "seed", ("client",), "0 available, 1 drops out, 2 speed, 3 bandwidth, 4 work"
    STEP_NOISE = 12, "release", ("example",), "the step in which noise is drawn on a GPU"

    def __new__(
        cls,
        number: int,
        keyed_by: Literal["seed", "release"],
        levels: tuple[DrawLevel, ...],
        part_meaning: str,
    ) -> Self:
        """Make a purpose. Its number is part of its draws' addresses and must never change."""
        purpose = int.__new__(cls, number)
        purpose._value_ = number
        purpose.keyed_by, purpose.levels, purpose.part_meaning = keyed_by, levels, part_meaning
        return purpose


class Address(NamedTuple):
    """Address of a stream. ``key`` is None for draws from the operating system's entropy."""

    key: tuple[int, int] | None
    level: DrawLevel
    purpose: Purpose
    round: int
    client: int
    part: int


class Stream:
    """One generator that is moved from address to address.

    Moving it costs an eighth of making a new one, which asks the operating system for entropy
    that a keyed generator does not need. There is one generator object: after the next move, the
    one returned before draws from the new address.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)

    def seek(self, key: tuple[int, int], counter: tuple[int, int, int, int]) -> np.random.Generator:
        """Move the generator to the start of the stream at this key and counter, and return it."""
        # numpy takes any sequences of integers here, and tuples cost half of what arrays do.
        state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": counter, "key": key},
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,  # past its end: no word that the last address left there is used
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._philox.state = state
        return self._generator


@explain_call
@dataclass(frozen=True)
class Randomness:
    """Source of all random draws of a run.

    Parameters
    ----------
    seed : int or None
        From 0 to 2^63 - 1: every draw is a function of it. None: every generator is seeded by
        the operating system, and no draw can be repeated.
    release : str or None
        Digest of all that determines what the run releases. With it, noise and amplified samples
        are keyed by seed and digest. Without it they are keyed by the seed alone, and then two
        different private runs must not share a seed: subtracting their releases cancels the noise.
    """

    seed: int | None
    release: str | None = None
    _keys: dict[str, tuple[int, int]] = field(init=False, repr=False, compare=False)
    _repeats: bool = field(default=False, init=False, repr=False, compare=False)

    address_observer: ClassVar[Callable[[Address], object] | None] = None
    """Called with the address of every draw that is not replayed (`for_replay`); for tests."""

    def __post_init__(self) -> None:
        require("seed", self.seed, expected(int | None))
        require("release", self.release, expected(str | None))
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise FedsimError(f"seed is {self.seed}; it must lie in [0, 2^63).")
        keys = {"seed": _key(self.seed, None), "release": _key(self.seed, self.release)}
        object.__setattr__(self, "_keys", keys)

    @property
    def entropy(self) -> Literal["config", "system"]:
        """Name of this source in the ledger."""
        return "system" if self.seed is None else "config"

    def for_replay(self) -> Self:
        """The same source, for addresses used before: in a retry, a replay or a check.

        With system entropy the draws are new ones nevertheless.
        """
        source = copy.copy(self)
        object.__setattr__(source, "_repeats", True)
        return source

    def generator(
        self,
        purpose: Purpose,
        *,
        level: DrawLevel,
        round: int = 0,
        client: int = 0,
        part: int = 0,
        stream: Stream | None = None,
    ) -> np.random.Generator:
        """Generator of the draws at this address, which must not have been used before.

        Parameters
        ----------
        purpose : Purpose
        level : "run", "client" or "example"
            One of ``purpose.levels``; see `Purpose`, also for the parts.
        round, client, part : int
            0 or more.
        stream : Stream, optional
            Generator to move to the address, instead of making a new one.

        Raises
        ------
        ValueError
            If there is no such address.
        """
        parts = range(part, part + 1)
        return next(
            self.generators(
                purpose, level=level, round=round, client=client, parts=parts, stream=stream
            )
        )

    def generators(
        self,
        purpose: Purpose,
        *,
        level: DrawLevel,
        round: int = 0,
        client: int = 0,
        parts: range,
        stream: Stream | None = None,
    ) -> Iterator[np.random.Generator]:
        """Yield the `generator` of one part after another, each valid until the next is taken."""
        key, words, watch = self._start(purpose, level, round, client, parts)
        stream = stream or Stream()
        for part in parts:
            if watch is not None:
                watch(Address(key, level, purpose, round, words[2], part))
            if key is None:
                yield stream.seek((secrets.randbits(64), secrets.randbits(64)), (0, 0, 0, 0))
            else:
                yield stream.seek(key, (0, words[0] + part - parts.start, *words[1:]))

    def counters(
        self, purpose: Purpose, *, level: DrawLevel, round: int, client: int, parts: range
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Key, and last three words of Philox's counter, at the first of these parts' addresses.

        For draws that are made at their counters (`fedsim.kernels.device_normals`) and not by a
        generator; the addresses are the same, and each must not have been used before. For every
        further part the first of the three words is larger by 1.

        From the operating system's entropy the key is a fresh one. Draws that must stay secret, of
        a purpose that is keyed by "release", are not made so then.
        """
        key, words, watch = self._start(purpose, level, round, client, parts)
        if key is None and purpose.keyed_by == "release":
            raise ValueError("secret draws from the operating system's entropy have no counters.")
        if watch is not None:
            for part in parts:
                watch(Address(key, level, purpose, round, words[2], part))
        return key or (secrets.randbits(64), secrets.randbits(64)), words

    def _start(
        self, purpose: Purpose, level: DrawLevel, round: int, client: int, parts: range
    ) -> tuple[tuple[int, int] | None, tuple[int, int, int], Callable[[Address], object] | None]:
        """Key, last three words of the counter of the first part, and what is told of addresses."""
        if level not in purpose.levels:
            raise ValueError(f"{purpose.name} has no level {level!r}, only {purpose.levels}.")
        last = parts.stop - 1
        if not (parts.start >= 0 and last < 2**48 and 0 <= round < 2**63 and 0 <= client < 2**63):
            raise ValueError(f"there is no address of round {round}, client {client}, part {last}.")
        key = None if self.seed is None else self._keys[purpose.keyed_by]
        # One counter word has level (bits 56 to 63), purpose (48 to 55) and part (0 to 47).
        words = _LEVELS[level] << 56 | purpose << 48 | parts.start, round, client
        return key, words, None if self._repeats else Randomness.address_observer


@dataclass(frozen=True)
class Draws:
    """Random draws of one owner's samples: of a server's cohorts, or of a client's batches.

    Parameters
    ----------
    randomness : Randomness
    level : "client" or "example"
        What is sampled.
    amplified : bool
        Whether the accounting relies on the sample being secret.
    client : int
        Client whose examples are sampled; 0 for cohorts.
    stream : Stream, optional
        Shared with others that draw in turn; then a generator is valid until the next is taken,
        by anyone.
    """

    randomness: Randomness
    level: Literal["client", "example"]
    amplified: bool
    client: int = 0
    stream: Stream | None = None

    def generator(self, round: int, part: int = 0) -> np.random.Generator:
        """Generator of a round's draws; ``part`` is the step, or another division of the round."""
        return next(self.generators(round, range(part, part + 1)))

    def generators(self, round: int, parts: range) -> Iterator[np.random.Generator]:
        """Yield the `generator` of one part after another, each valid until the next is taken."""
        return self.randomness.generators(
            Purpose.AMPLIFIED_SAMPLE if self.amplified else Purpose.SAMPLE,
            level=self.level,
            round=round,
            client=self.client,
            parts=parts,
            stream=self.stream,
        )

    def for_replay(self) -> Draws:
        """The same draws, made again: see `Randomness.for_replay`."""
        return replace(self, randomness=self.randomness.for_replay())


def _key(seed: int | None, release: str | None) -> tuple[int, int]:
    text = f"fedsim draws, version 2\nseed {seed}\nrelease {release or ''}\n"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
