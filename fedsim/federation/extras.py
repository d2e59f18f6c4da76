"""Extras: parts of a round in addition to its sum, such as clients' state, vectors and metrics.

A strategy calls its extras in order: `Extra.send` when a round is configured, `Extra.receive` for
each reply, and `Extra.finish` once the round is released, after its ledger line was written.
`Extra.state` is saved in checkpoints.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import MetricRecord
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm, RoundMeans
from fedsim.errors import FedsimError, printable
from fedsim.federation.arrays import array_record, same_arrays
from fedsim.federation.exchange import Instructions
from fedsim.federation.replies import Reply
from fedsim.rows.layout import Layout, vectors_in, with_vectors

_log = logging.getLogger("fedsim")

LARGEST = 1e100
"""Larger numbers, and non-finite ones, are left out of means, whose sums would overflow."""


@dataclass(frozen=True)
class RoundResult:
    """The result of a round, which each extra may change.

    Attributes
    ----------
    round : int
    update : Tensor ``[p]``
        Input of the server optimiser's step; before any extra, the released mean row ``[d]``.
    count : int
        Number of clients in the sum.
    metrics : MetricRecord or None
        Training metrics; None where clients' metrics are not shown.
    """

    round: int
    update: Tensor
    count: int
    metrics: MetricRecord | None = None


class Extra:
    """Part of a round in addition to its sum. The base class does nothing."""

    def row_layout(self, layout: Layout) -> Layout:
        """The layout of a row, extended by what this extra has clients send after their update."""
        return layout

    def send(self, instructions: Instructions) -> Instructions:
        """A round's instructions, with what this extra adds for the clients."""
        return instructions

    def receive(self, reply: Reply) -> None:
        """Read what a block's clients report; the clients in the sum are True in ``usable [n]``.

        If it raises, it must have changed nothing. The client is then marked as failed
        ("malformed" in the round's report) and left out of this extra. Its row stays in the sum:
        workers have already added it, and a release must be the same on all engines.
        """

    def finish(self, result: RoundResult) -> RoundResult:
        """The result of a released round, changed by what this extra took from the replies."""
        return result

    def state(self) -> Any:
        """The state to save in a checkpoint, as tensors and JSON values."""
        return None

    def restore(self, state: Any) -> None:
        """Continue from `state`."""


def receive_reply(extra: Extra, reply: Reply) -> list[int]:
    """Let an extra take a reply, and return the clients for which it raised.

    If it raises for a block, it takes the block's clients one by one, so that one client's report
    does not make the others fail.
    """
    try:
        extra.receive(reply)
    except Exception as error:
        ids = reply.block.client_ids
        if len(ids) == 1:
            name = type(extra).__name__
            _log.warning("%s cannot use what client %s reports: %s", name, ids, printable(error))
            return [int(ids[0])]
        single_replies = (replace(reply, block=reply.block.select(ids == client)) for client in ids)
        return [client for single in single_replies for client in receive_reply(extra, single)]
    return []


class NamedVectors(Extra):
    """Vectors that clients receive in addition to the parameters (SCAFFOLD's control variates).

    Vectors that clients send back follow the update in their rows, which are then longer than the
    parameters.

    Parameters
    ----------
    algorithm : LocalAlgorithm
        Defines the vectors sent and received, and combines a round's means.
    population : int
    expected : float, optional
        Expected number of clients in a round, used where the actual number is secret.

    Attributes
    ----------
    values : Tensor ``[k]`` or None
        The vectors, concatenated; zeros in the first round, None before it.
    """

    def __init__(
        self, algorithm: LocalAlgorithm, population: int, expected: float | None = None
    ) -> None:
        self._algorithm, self._population, self._expected = algorithm, population, expected
        self.values: Tensor | None = None

    def row_layout(self, layout: Layout) -> Layout:
        """The layout of the parameters, followed by the vectors that clients send."""
        self._parameters = layout
        self._received = with_vectors(layout, self._algorithm.receives)
        size = self._received.d - layout.d
        if self.values is not None and self.values.shape != (size,):
            raise FedsimError(
                f"state= holds vectors of shape {list(self.values.shape)}; with this algorithm and "
                f"these parameters it must be [{size}]."
            )
        self._sent = with_vectors(layout, self._algorithm.sends)
        return self._sent

    def send(self, instructions: Instructions) -> Instructions:
        """The instructions, with the vectors after the parameters."""
        vector, arrays = instructions.vector, instructions.arrays
        if self.values is None:
            self.values = vector.new_zeros(self._received.d - len(vector))
        vector = torch.cat([vector, self.values.to(vector)])
        named = self._received.unflatten(vector)
        vectors = array_record({name: named[name] for name in named if name not in arrays})
        return replace(instructions, vector=vector, arrays=same_arrays(arrays, vectors))

    def finish(self, result: RoundResult) -> RoundResult:
        """Split the mean row into the update ``[p]`` and the next round's vectors."""
        assert self.values is not None  # since the round was sent
        mean, d = result.update, self._parameters.d
        # The vectors that clients received follow the parameters in this layout; the first d
        # entries only fill their place.
        vector = torch.cat([mean[:d], self.values.to(mean)])
        count = result.count if self._expected is None else self._expected
        means = RoundMeans(
            round=result.round,
            update=mean[:d],
            sent=vectors_in(self._sent, mean),
            received=vectors_in(self._received, vector),
            share=count / self._population,
        )
        combined = self._algorithm.combine(means)
        self.values = torch.cat([combined.vectors[name] for name in self._algorithm.receives])
        return replace(result, update=combined.update)

    def state(self) -> Tensor | None:
        """The vectors."""
        return None if self.values is None else self.values.clone()

    def restore(self, state: Tensor | None) -> None:
        """Continue from `state`."""
        self.values = None if state is None else state.clone()
