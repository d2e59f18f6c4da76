"""Which examples a client looks at, step by step: a keyed draw, and a padding of its own.

The physical width of a client's batches follows from the batch size and the client's own
number of examples only, never from who shares its block: so its bits do not either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness

__all__ = ["Batches", "Plan", "chunk_width", "plan_batches", "plan_poisson", "width"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """How a client goes through its data.

    Parameters
    ----------
    batch_size : int
        Examples a step; 0 takes all of a client's examples every step.
    epochs, steps : int or None
        Local work: passes over the client's data, or gradient evaluations. Exactly one.
    """

    batch_size: int
    epochs: int | None = 1
    steps: int | None = None

    @classmethod
    def checked(cls, batch_size: int, epochs: int | None, steps: int | None) -> Plan:
        """One epoch if neither epochs nor steps are given; `FedsimError` if both, or too few."""
        if batch_size < 0:
            raise FedsimError(f"client.batch-size is {batch_size}; it must be 0 (all) or more.")
        if epochs is not None and steps is not None:
            raise FedsimError(
                f"client.epochs = {epochs} and client.steps = {steps}; set one of them."
            )
        if epochs is None and steps is None:
            epochs = 1
        for key, value in (("epochs", epochs), ("steps", steps)):
            if value is not None and value < 1:
                raise FedsimError(f"client.{key} is {value}; it must be at least 1.")
        return cls(batch_size, epochs, steps)

    def steps_of(self, size: int) -> int:
        """Gradient evaluations of a client with ``size`` examples (0 without data)."""
        if size == 0:
            return 0
        if self.steps is not None:
            return self.steps
        return (self.epochs or 0) * self.steps_per_epoch(size)

    def steps_per_epoch(self, size: int) -> int:
        """Batches in one pass; the last one may be short."""
        return -(-size // (self.batch_size or size))

    def batch_of(self, size: int) -> int:
        """Examples a step of a client with ``size``: the batch size, or all it has."""
        return min(self.batch_size or size, size)


@dataclass(frozen=True)
class Batches:
    """Batches of clients that share one physical width ``B``, those with most steps first.

    Attributes
    ----------
    members : int64 ``[n]``
        Positions of these clients in the block that was asked for.
    index : int64 ``[n, S, B]``
        Examples; padding repeats some example of the client under weight 0.
    weight : float64 ``[n, S, B]``
        ``1/b`` on the ``b`` real examples of a step, 0 on padding.
    steps : int64 ``[n]``
        Steps of each client, descending; later entries of its rows mean nothing.
    """

    members: Ints
    index: Ints
    weight: npt.NDArray[np.float64]
    steps: Ints


def width(batch_size: int, size: int) -> int:
    """Physical batch width of a client with ``size`` examples: at least 2.

    The batch size where the client can (nearly) fill it, else the next power of two above
    its size, so that clients of similar size share a block.
    """
    wanted = min(batch_size or size, size)
    if 2 * size > batch_size > 0:
        return max(2, batch_size)
    return max(2, 1 << (wanted - 1).bit_length())


def plan_batches(
    plan: Plan,
    indices: Sequence[Ints],
    client_ids: Ints,
    randomness: Sequence[Randomness],
    round: int,
) -> Iterator[Batches]:
    """Draw the batches of some clients, grouped by physical width.

    Parameters
    ----------
    plan : Plan
    indices : sequence of int64 arrays
        Examples of each of these clients (not of the whole population).
    client_ids : int64 ``[n]``
    randomness : sequence of Randomness
        One for each of these clients (a sweep's members differ in theirs).
    round : int
    """
    groups: dict[int, list[int]] = {}
    for position, own in enumerate(indices):
        if len(own):
            groups.setdefault(width(plan.batch_size, len(own)), []).append(position)
    for B in sorted(groups):
        members = np.array(groups[B], dtype=np.int64)
        sizes = np.array([len(indices[i]) for i in members], dtype=np.int64)
        steps = np.array([plan.steps_of(int(size)) for size in sizes], dtype=np.int64)
        order = np.argsort(-steps, kind="stable")
        members, sizes, steps = members[order], sizes[order], steps[order]
        most = int(steps[0])
        index = np.zeros((len(members), most, B), dtype=np.int64)
        weight = np.zeros((len(members), most, B), dtype=np.float64)
        for row, position in enumerate(members):
            own = indices[position]
            draws = randomness[position].generator(Purpose.BATCH, round, int(client_ids[position]))
            _fill(plan, own, int(steps[row]), draws, index[row], weight[row])
        yield Batches(members, index, weight, steps)


def chunk_width(batch_size: int) -> int:
    """Rule for the examples of a Poisson batch that go through a model at once.

    Wide enough that a small batch seldom needs two, narrow enough that a large one wastes
    little on padding.
    """
    return max(2, min(64, 1 << (3 * batch_size // 2 - 1).bit_length()))


def plan_poisson(
    plan: Plan,
    indices: Sequence[Ints],
    client_ids: Ints,
    randomness: Sequence[Randomness],
    round: int,
    chunk: int = 0,
) -> Iterator[Batches]:
    """Draw Poisson batches: each example is in one with probability ``|B| / N``.

    Parameters as `plan_batches`, and ``chunk``, the examples that go through a model at once.
    The batches have a chunk axis: ``index`` and ``weight`` are ``[n, S, chunks, B]``, a weight is
    1 on every example drawn, and a step has as many chunks as its largest draw needs.
    """
    groups: dict[int, list[int]] = {}
    for position, own in enumerate(indices):
        if len(own):
            B = chunk or chunk_width(plan.batch_of(len(own)))
            groups.setdefault(B, []).append(position)
    for B in sorted(groups):
        members = np.array(groups[B], dtype=np.int64)
        steps = np.array([plan.steps_of(len(indices[i])) for i in members], dtype=np.int64)
        order = np.argsort(-steps, kind="stable")
        members, steps = members[order], steps[order]
        drawn = [
            _poisson(
                plan,
                indices[i],
                int(steps[row]),
                randomness[i].generator(Purpose.BATCH, round, int(client_ids[i])),
            )
            for row, i in enumerate(members)
        ]
        chunks = max(1, -(-max(len(batch) for own in drawn for batch in own) // B))
        shape = (len(members), int(steps[0]), chunks * B)
        index, weight = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        for row, (steps_drawn, i) in enumerate(zip(drawn, members, strict=True)):
            index[row] = indices[i][0]
            for step, batch in enumerate(steps_drawn):
                index[row, step, : len(batch)] = batch
                weight[row, step, : len(batch)] = 1.0
        shape_in_chunks = (*shape[:2], chunks, B)
        yield Batches(
            members, index.reshape(shape_in_chunks), weight.reshape(shape_in_chunks), steps
        )


def _poisson(plan: Plan, own: Ints, steps: int, draws: np.random.Generator) -> list[Ints]:
    rate = plan.batch_of(len(own)) / len(own)
    return [own[draws.random(len(own)) < rate] for _ in range(steps)]


def _fill(
    plan: Plan,
    own: Ints,
    steps: int,
    draws: np.random.Generator,
    index: Ints,
    weight: npt.NDArray[np.float64],
) -> None:
    """Shuffled passes over ``own`` into ``index [S, B]`` and ``weight [S, B]``."""
    size = len(own)
    batch = plan.batch_of(size)
    full, last = divmod(size, batch)
    at = 0
    index[:] = own[0]
    while at < steps:
        shuffled = own[draws.permutation(size)] if batch < size else own
        take = min(full, steps - at)
        index[at : at + take, :batch] = shuffled[: take * batch].reshape(take, batch)
        weight[at : at + take, :batch] = 1.0 / batch
        at += take
        if last and at < steps:
            index[at, :last] = shuffled[full * batch :]
            weight[at, :last] = 1.0 / last
            at += 1
