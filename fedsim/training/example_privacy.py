"""Example-level privacy inside a client: which rows are drawn, what is noised, what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism
from fedsim.privacy import ClientLedgers, Event, worst_client
from fedsim.privacy.digest import digest_of
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import LocalWork, ReleasePlan
from fedsim.privacy.stopping import FIXED, Stopping
from fedsim.randomness import Randomness
from fedsim.tasks.losses import Loss
from fedsim.training.batches import Batches, Ints, plan_batches, plan_poisson

__all__ = ["ExamplePrivacy", "example_epsilon", "example_events"]


@dataclass(frozen=True)
class ExamplePrivacy:
    """Every gradient a local algorithm sees is a noisy sum of bounded per-example gradients.

    Guarantee: for each client on its own, with zero-out adjacency of one of its examples (its
    gradients replaced by zero), T Gaussian releases of multiplier z at rate ``|B| / N_i``, where T
    counts every gradient evaluation: two an ADADP iteration, discarded ones included. Clients
    hold disjoint data, so the federation's epsilon is the largest of theirs.

    The number of examples ``N_i`` of every client is public, since rates, steps and denominators
    follow from it: adding or removing an example is not covered.

    Parameters
    ----------
    mechanism : Mechanism
        Bounds the gradients of single examples.
    noise_multiplier : float
        Standard deviation of the noise on a sum over the mechanism's C.
    sampling : "poisson" or "shuffle"
        Poisson batches: each example is in a batch with probability ``|B| / N_i``, however many
        that makes. Shuffled passes are charged as one Gaussian without amplification a pass.
    chunk : int
        Examples that go through the model at once; 0 leaves it to a rule of the batch size.
        A batch of any size takes as many chunks as it needs, and is never truncated.
    hardened : bool
        Noise that is safe against attacks on floating-point sampling, at four times the cost.
    delta : float
    max_epsilon : float, optional
        What no client spends more than.
    stopping : Stopping
        Whether what is released may end the run: the budget then holds at half of delta.
    ledger_dir : path, optional
        Where each client's ledger is; in memory otherwise.
    unprotected_metrics : bool
        Whether a client reports its un-noised training loss.
    """

    mechanism: Mechanism
    noise_multiplier: float
    sampling: Literal["poisson", "shuffle"] = "poisson"
    chunk: int = 0
    hardened: bool = False
    delta: float = 1e-5
    max_epsilon: float | None = None
    stopping: Stopping = FIXED
    ledger_dir: Path | None = None
    unprotected_metrics: bool = False

    def __post_init__(self) -> None:
        if not self.noise_multiplier >= 0:
            raise FedsimError(
                f"client.noise.multiplier is {self.noise_multiplier}; it must be at least 0."
            )
        if self.sampling not in ("poisson", "shuffle"):
            raise FedsimError(
                f"client.noise.sampling is '{self.sampling}'; it must be 'poisson' or 'shuffle': "
                "batches of a fixed size have replace-one neighbours, and examples zero-out ones."
            )
        if self.chunk < 0:
            raise FedsimError(f"client.chunk is {self.chunk}; it must be 0 (auto) or more.")

    def ledgers(self) -> ClientLedgers:
        """Where clients write their releases down, and what they have spent."""
        return ClientLedgers(
            self.ledger_dir,
            delta=self.delta,
            max_epsilon=self.max_epsilon,
            stopping=self.stopping,
        )

    @property
    def private(self) -> bool:
        """Whether any client's epsilon is finite."""
        return self.mechanism.guarantee == "gaussian" and self.noise_multiplier > 0

    def plan(
        self, work: LocalWork, size: int, rounds: int | None = None
    ) -> ReleasePlan[Mechanism] | None:
        """What a client with ``size`` examples releases; None without any."""
        if size == 0:
            return None
        return ReleasePlan(
            level="example",
            sampler=work.poisson(size) if self.sampling == "poisson" else work.passes(size),
            bound=self.mechanism,
            noise=Independent(self.noise_multiplier, self.hardened),
            rounds=rounds,
            releases=work.steps_of(size),
        )

    def batches(
        self,
        work: LocalWork,
        indices: Sequence[Ints],
        client_ids: Ints,
        randomness: Sequence[Randomness],
        round: int,
    ) -> Iterator[Batches]:
        """Draw clients' batches as their events say; parameters as `plan_batches`.

        Batches have a chunk axis: ``index`` and ``weight`` are ``[n, S, chunks, B]``.
        """
        drawn = (work, indices, client_ids, randomness, round)
        if self.sampling == "poisson":
            yield from plan_poisson(*drawn, self.chunk, amplified=self.private)
            return
        for b in plan_batches(*drawn):
            yield Batches(b.members, b.index[:, :, None], b.weight[:, :, None], b.steps)

    def keyed(
        self, randomness: Randomness, algorithm: LocalAlgorithm, work: LocalWork, loss: Loss
    ) -> Randomness:
        """Randomness without a config's release digest, keyed by what is known of the release."""
        settings = {
            "seed": randomness.seed,
            "algorithm": algorithm,
            "work": work,
            "loss": loss,
            "mechanism": self.mechanism,
            "noise-multiplier": self.noise_multiplier,
            "sampling": self.sampling,
            "hardened": self.hardened,
        }
        return Randomness(randomness.seed, digest_of(settings))


def example_events(
    privacy: ExamplePrivacy, work: LocalWork, sizes: Iterable[int], rounds: int
) -> list[Event]:
    """What ``rounds`` rounds cost clients of these sizes that take part in all of them."""
    plans = (privacy.plan(work, size) for size in sorted(set(sizes)))
    return [plan.event().times(rounds) for plan in plans if plan is not None]


def example_epsilon(
    privacy: ExamplePrivacy, work: LocalWork, sizes: Iterable[int], rounds: int
) -> float:
    """Epsilon at ``privacy.delta`` of the client that pays most for ``rounds`` rounds."""
    events = example_events(privacy, work, sizes, rounds)
    return worst_client(events, privacy.delta).cost.epsilon if events else 0.0
