"""Rounds of local work, a block of clients at a time: from what they are sent to where they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.clients.base import PERSONAL_MASK
from fedsim.randomness import Randomness
from fedsim.training.batches import Batches, Ints
from fedsim.training.compression import LEFT_OUT, Compression
from fedsim.training.entering import Begun, Entering
from fedsim.training.example_releases import ExampleReleases, Starting, starting
from fedsim.training.fitting import Fitted, numbers_of
from fedsim.training.keeping import Keeping, Kept
from fedsim.training.sending import Received, Sending
from fedsim.training.stepping import Stepping
from fedsim.training.steps import Bench, Ended

__all__ = ["LocalRounds"]

Floats = npt.NDArray[np.float64]


@dataclass
class LocalRounds:
    """What a block of clients does in a round, in order, and what is left of it.

    A client's ledger line is on disk before anything of the round is drawn, and what it keeps
    changes last, once its block is done: a block that raised can be asked again.

    Attributes
    ----------
    model : nn.Module
    bench : Bench
    keeping : Keeping
    sending : Sending
    stepping : Stepping
    compression : Compression or None
        Of what clients send.
    releases : ExampleReleases or None
        Where they write down what they release of their examples; None where they release
        nothing, or where somebody else has written it down.
    told : mapping of str to float
        The algorithm's numbers as the server says them, in the place of its own.
    """

    model: nn.Module
    bench: Bench
    keeping: Keeping
    sending: Sending
    stepping: Stepping
    compression: Compression | None
    releases: ExampleReleases | None
    told: Mapping[str, float] = field(default_factory=dict, init=False)
    _begun: Begun = field(default_factory=Begun, init=False)

    def __post_init__(self) -> None:
        # All of its modules; then, to go through them for each block would take longer than a step.
        self.model.train()

    def enter(self, client_ids: Ints, round: int, randomness: Sequence[Randomness]) -> Entering:
        """These clients, as they go into a round."""
        sources = self._begun.sources(client_ids, round, randomness)
        return Entering(client_ids, round, sources, self.keeping.load(client_ids, round))

    def blocks(
        self, client_ids: Ints, round: int, randomness: Randomness, size: int
    ) -> Iterator[Entering]:
        """These clients, ``size`` at a time, as they go into a round.

        Some draw their batches before their block's turn comes, many at once: they have begun then.
        """
        first = 0
        while first < len(client_ids):
            ahead = self.stepping.ahead(client_ids[first:], size)
            ids = client_ids[first : first + (ahead or size)]
            sources = self._begun.sources(ids, round, [randomness] * len(ids))
            drawn = None
            if ahead:
                self._begun.begin(ids, round)
                drawn = list(self.stepping.batches(ids, round, sources))
            for start in range(0, len(ids), size):
                block = slice(start, min(start + size, len(ids)))
                kept = self.keeping.load(ids[block], round)
                batches = None
                if drawn is not None:
                    parts = (group.within(block.start, block.stop) for group in drawn)
                    batches = [part for part in parts if len(part.members)]
                yield Entering(ids[block], round, sources[block], kept, batches)
            first += len(ids)

    def starting(self, vectors: Tensor, entering: Entering) -> Iterator[Starting]:
        """What ledgers know of these clients' round from ``vectors [1 or n, d]``."""
        numbers = numbers_of(self.bench.algorithm, self.told, {}, len(entering))
        start = self.keeping.start(self.sending.received(vectors).parameters, entering.kept)
        return starting(entering, start, numbers)

    @torch.no_grad()
    def fit(
        self, received: Received, entering: Entering, numbers: Mapping[str, Sequence[float]]
    ) -> Fitted:
        """Train from what was ``received``; nothing is kept before `finish`.

        Nothing else lies where their parameters do then.
        """
        n = len(entering)
        values = numbers_of(self.bench.algorithm, self.told, numbers, n)
        start = self.keeping.start(received.parameters, entering.kept)
        self._begin(entering, start, values)
        named = {k: v.expand(n, -1) for k, v in received.named.items()}
        nothing = {k: torch.zeros_like(v) for k, v in named.items()}
        fitted = Fitted(start, self._metrics(entering), nothing)
        if not self.model.training:
            self.model.train()
        for batches in self._batches(entering):
            members = batches.members
            positions = torch.from_numpy(members).to(start.device)
            everybody = np.array_equal(members, np.arange(n))
            group = entering if everybody else entering.of(members)
            steps = self.stepping.steps(batches, group)
            # One start for all needs no rows of its own before steps write to it.
            as_it_is = everybody or start.stride(0) == 0
            ended = steps.run(
                start[: len(members)] if as_it_is else start[positions],
                {k: torch.from_numpy(v[members]).to(start) for k, v in values.items()}
                | {k: v[positions] for k, v in named.items()}
                | self._mask(len(members)),
                group.kept.rows,
                torch.from_numpy(group.kept.present).to(start.device),
            )
            if self.compression is not None:
                vectors = received.vectors[positions % len(received.vectors)]
                ended = self._compressed(ended, vectors, group.kept)
            ended.carried.update(self.keeping.personal.kept(ended.theta))
            losses = steps.mean_losses() if self.stepping.reports_loss else None
            fitted.take(members, ended, losses, send=self.keeping.state_kind == "server")
        if not fitted.carried:  # nobody has data, and the start is not theirs
            fitted.theta = start.clone()
        return fitted

    def finish(self, fitted: Fitted, entering: Entering) -> None:
        """Let clients keep what they ended with: the last thing that happens to a block."""
        for members, carried in fitted.carried:
            self.keeping.memory.store(entering.client_ids[members], entering.round, carried)
        self._begun.end(entering.client_ids)

    def _batches(self, entering: Entering) -> Iterable[Batches]:
        if entering.drawn is not None:
            return entering.drawn
        return self.stepping.batches(entering.client_ids, entering.round, entering.randomness)

    def _begin(self, entering: Entering, start: Tensor, numbers: Mapping[str, Floats]) -> None:
        """Charge each client, but for a round that it begins again."""
        if self.releases is not None:
            for client in starting(entering, start, numbers):
                if not self._begun.has(client.client, entering.round):
                    self.releases.record(entering.round, [client])
                    self._begun.begin(np.array([client.client]), entering.round)
        self._begun.begin(entering.client_ids, entering.round)

    def _metrics(self, entering: Entering) -> dict[str, Floats]:
        sizes = [self.bench.data.size(i) for i in entering.client_ids.tolist()]
        metrics = {"num-examples": np.array(sizes, dtype=np.float64)}
        if self.stepping.reports_loss:
            metrics["loss"] = np.zeros(len(entering))
        if self.keeping.state_kind != "reset":
            metrics["fresh-state"] = (~entering.kept.present).astype(np.float64)
        return metrics

    def _mask(self, n: int) -> dict[str, Tensor]:
        """Which parameters are personal, for an algorithm that asks."""
        if not self.bench.algorithm.parts:
            return {}
        return {PERSONAL_MASK: self.keeping.personal.mask.expand(n, -1)}

    def _compressed(self, ended: Ended, vectors: Tensor, kept: Kept) -> Ended:
        """What clients that started at ``vectors [n, d]`` send, and what they leave out."""
        assert self.compression is not None
        shared = self.sending.shared
        target = shared.unpack(ended.theta) - vectors
        if LEFT_OUT in kept.rows:
            there = torch.from_numpy(kept.present).to(target.device)[:, None]
            target = torch.where(there, target + kept.rows[LEFT_OUT].to(target), target)
        sent = vectors + self.compression(target)
        # As it arrives: a sum with the parameters has been rounded.
        left_out = target - (sent - vectors)
        return replace(
            ended, theta=shared.pack(sent), carried={**ended.carried, LEFT_OUT: left_out}
        )
