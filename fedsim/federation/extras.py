"""Extras of a round, besides its sum: clients' state, named vectors, metrics.

A strategy calls its extras in order: `Extra.send` when a round is configured, `Extra.take` for each
reply, and `Extra.finish` once the round is released, after the ledger has its line. What an extra
keeps from round to round is its `Extra.state`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm, RoundMeans
from fedsim.errors import printable
from fedsim.federation.aggregation.server_sum import PendingRound
from fedsim.federation.arrays import array_record, same_arrays
from fedsim.federation.exchange import Instructions
from fedsim.federation.replies import Reply
from fedsim.rows.block import CLIENT_STATE
from fedsim.rows.layout import Layout, vectors_in, with_vectors

_log = logging.getLogger("fedsim")

LARGEST = 1e100
"""Larger numbers, and those not finite, enter no mean: sums of them would overflow."""

_STATE_PREFIX = f"{CLIENT_STATE}."


@dataclass(frozen=True)
class RoundResult:
    """The result of a round, which each extra may change.

    Attributes
    ----------
    pending : PendingRound
    update : Tensor ``[p]``
        The step of the server's optimiser follows it; at first the released mean row ``[d]``.
    count : int
        Clients in the sum.
    metrics : MetricRecord or None
        Of training, where clients' metrics are shown.
    """

    pending: PendingRound
    update: Tensor
    count: int
    metrics: MetricRecord | None = None


class Extra:
    """Something that a round does besides its sum; by default nothing."""

    def row_layout(self, layout: Layout) -> Layout:
        """The layout of a row, with what this has clients send after their update."""
        return layout

    def send(self, instructions: Instructions) -> Instructions:
        """A round's instructions, with what this sends to clients."""
        return instructions

    def take(self, reply: Reply) -> None:
        """Take what a block's clients report; those that are ``usable [n]`` are in the sum.

        If it raises, it must have changed nothing. The client has then failed ("malformed" in
        the round's report) and has no part in this extra. Its row stays in the sum: engines whose
        workers add rows up could not take it out again, and a release is the same on all engines.
        """

    def finish(self, result: RoundResult) -> RoundResult:
        """The result of a round that was released, with what follows from the replies."""
        return result

    def state(self) -> Any:
        """What outlives a round, as tensors and JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Resume what `state` gave."""


def take_reply(extra: Extra, reply: Reply) -> list[int]:
    """Let an extra take a reply, and return the clients that fail because it raises.

    Where it raises over a block, it takes the block's clients one by one: what one reports is no
    failure of the others.
    """
    try:
        extra.take(reply)
    except Exception as error:
        ids = reply.block.client_ids
        if len(ids) == 1:
            name = type(extra).__name__
            _log.warning("%s cannot use what client %s reports: %s", name, ids, printable(error))
            return [int(ids[0])]
        alone = (replace(reply, block=reply.block.select(ids == client)) for client in ids)
        return [client for one in alone for client in take_reply(extra, one)]
    return []


class SharedClientState(Extra):
    """Averages the state that clients end with (ADADP's rate), and sends it to the next round's.

    Attributes
    ----------
    values : dict of str to float
        The means, empty before the first round has ended.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._final: dict[str, list[float]] = {}

    def send(self, instructions: Instructions) -> Instructions:
        """With the means, and word that clients are to report what they end with."""
        self._final = {}
        means = {_STATE_PREFIX + name: mean for name, mean in self.values.items()}
        config = ConfigRecord({**instructions.config, CLIENT_STATE: True, **means})
        return replace(instructions, config=config)

    def take(self, reply: Reply) -> None:
        """Note what the ``usable [n]`` clients ended with."""
        assert reply.block.usable is not None
        counted = reply.block.usable.cpu().numpy()
        for key, values in reply.block.metrics.items():
            if key.startswith(_STATE_PREFIX):
                # A client without data has ended with nothing.
                final = values[counted & (np.abs(values) <= LARGEST)].tolist()
                self._final.setdefault(key.removeprefix(_STATE_PREFIX), []).extend(final)

    def finish(self, result: RoundResult) -> RoundResult:
        """Average what was noted; what no client reported keeps its last mean."""
        # The exact sum does not depend on the order in which clients came.
        self.values |= {k: math.fsum(v) / len(v) for k, v in self._final.items() if v}
        self._final = {}
        return result

    def state(self) -> dict[str, float]:
        """The means."""
        return dict(self.values)

    def restore(self, state: Mapping[str, float]) -> None:
        """Resume what `state` gave."""
        self.values = {name: float(value) for name, value in state.items()}


class NamedVectors(Extra):
    """What an algorithm's clients are sent beside the parameters (SCAFFOLD's control variates).

    Rows are longer than the parameters where clients send vectors: these stand after their update.

    Parameters
    ----------
    algorithm : LocalAlgorithm
        Says what clients send and are sent, and what becomes of a round.
    population : int
    expected : float, optional
        How many clients a round counts on, where it is secret how many are in its sum.

    Attributes
    ----------
    values : Tensor ``[k]`` or None
        The vectors, one after another: all zeros at first, None before the first round.
    """

    def __init__(
        self, algorithm: LocalAlgorithm, population: int, expected: float | None = None
    ) -> None:
        self._algorithm, self._population, self._expected = algorithm, population, expected
        self.values: Tensor | None = None

    def row_layout(self, layout: Layout) -> Layout:
        """That of the parameters, and after them the vectors that clients send."""
        self._parameters = layout
        self._received = with_vectors(layout, self._algorithm.receives)
        return with_vectors(layout, self._algorithm.sends)

    def send(self, instructions: Instructions) -> Instructions:
        """With the vectors after the parameters."""
        vector, arrays = instructions.vector, instructions.arrays
        if self.values is None:
            self.values = vector.new_zeros(self._received.d - len(vector))
        vector = torch.cat([vector, self.values.to(vector)])
        named = self._received.unflatten(vector)
        vectors = array_record({name: named[name] for name in named if name not in arrays})
        return replace(instructions, vector=vector, arrays=same_arrays(arrays, vectors))

    def finish(self, result: RoundResult) -> RoundResult:
        """With the update ``[p]`` that is in the mean row; its vectors are the next round's."""
        assert self.values is not None  # since the round was sent
        mean, d = result.update, self._parameters.d
        sent = torch.cat([mean[:d], self.values.to(mean)])
        count = result.count if self._expected is None else self._expected
        means = RoundMeans(
            round=result.pending.round,
            update=mean[:d],
            sent=vectors_in(result.pending.layout, mean),
            received=vectors_in(self._received, sent),
            share=count / self._population,
        )
        combined = self._algorithm.combine(means)
        self.values = torch.cat([combined.vectors[name] for name in self._algorithm.receives])
        return replace(result, update=combined.update)

    def state(self) -> Tensor | None:
        """The vectors."""
        return None if self.values is None else self.values.clone()

    def restore(self, state: Tensor | None) -> None:
        """Resume what `state` gave."""
        self.values = state
