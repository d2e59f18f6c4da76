"""Example-level privacy inside a client: sampling, bound and noise, and the privacy cost."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedsim import regular_files
from fedsim.arguments import check_arguments
from fedsim.clients.base import LocalAlgorithm
from fedsim.mechanisms import Mechanism
from fedsim.mechanisms.base import require_mechanism
from fedsim.privacy import Accountant, ClientLedgers, Entry, Event, worst_client
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.privacy.digest import digest_of
from fedsim.privacy.laws import Sampler
from fedsim.privacy.local_work import LocalWork
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.settings import Ge, Gt, Lt, check_settings
from fedsim.tasks.losses import Loss
from fedsim.training.batches import (
    MAX_CHUNK,
    Batches,
    Ints,
    batch_width,
    chunk_width,
    plan_batches,
    plan_poisson,
)
from fedsim.training.paths.choice import TrainedModel
from fedsim.training.paths.examples import GradientMethod
from fedsim.training.steps import RoundStart, Stepper


@dataclass(frozen=True)
class ExamplePrivacy:
    """Every gradient a local algorithm sees is a noisy sum of bounded per-example gradients.

    Guarantee: for each client on its own, with zero-out adjacency of one of its examples (which
    contributes nothing instead), T Gaussian releases of multiplier z at rate ``|B| / N_i``, where T
    counts every gradient evaluation: two per ADADP iteration, discarded ones included. Clients hold
    disjoint data, so the federation's epsilon is the largest client's.

    The number of examples ``N_i`` of every client is public, since rates, steps and denominators
    follow from it: adding or removing an example is not covered.

    Parameters
    ----------
    mechanism : Mechanism
        Bounds per-example gradients.
    noise_multiplier : float
        z: standard deviation of the noise on a sum, divided by the clip norm.
    hardened : bool
        Whether the noise withstands attacks on floating-point sampling.
    sampling : "poisson" or "shuffle"
        Poisson batches: each example is in a batch with probability ``|B| / N_i``, and batch sizes
        vary. Shuffled passes: each pass is charged as one Gaussian without amplification. Random
        batches of a fixed size are not offered: their guarantee is for replace-one neighbours,
        where that of examples is for zero-out neighbours.
    chunk : int
        Examples that go through the model at once; 0 for a rule by the batch size. A batch of any
        size takes as many chunks as it needs, and is never truncated.
    delta : float
    max_epsilon : float, optional
        Largest epsilon that a client may spend.
    stopping : Stopping
        Whether released values may end the run: the budget then holds at half of delta.
    ledger_dir : path, optional
        Directory of the clients' ledgers; in memory by default.
    unprotected_metrics : bool
        Whether a client reports its un-noised training loss.
    """

    mechanism: Mechanism
    noise_multiplier: Annotated[float, Ge(0)]
    hardened: bool = True
    sampling: Literal["poisson", "shuffle"] = "poisson"
    chunk: Annotated[int, Ge(0)] = 0
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    max_epsilon: Annotated[float | None, Gt(0)] = None
    stopping: Stopping = FIXED
    ledger_dir: Path | None = None
    unprotected_metrics: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        require_mechanism(self.mechanism, "ExamplePrivacy")

    def ledgers(self) -> ClientLedgers:
        """The clients' ledgers, which record releases and enforce the budget."""
        return ClientLedgers(
            self.ledger_dir,
            delta=self.delta,
            max_epsilon=self.max_epsilon,
            stopping=self.stopping,
        )

    @cached_property
    def noise(self) -> Independent:
        """The noise that is added to the sum of a step's gradients."""
        return Independent(float(self.noise_multiplier), self.hardened)

    def scaled(self, multiplier: float) -> ExamplePrivacy:
        """A copy with noise at another multiplier."""
        return replace(self, noise_multiplier=multiplier)

    @property
    def private(self) -> bool:
        """Whether any client's epsilon is finite."""
        return self.mechanism.guarantee == "gaussian" and self.noise.multiplier > 0

    def plan(
        self, work: LocalWork, size: int, rounds: int | None = None
    ) -> ReleasePlan[Mechanism] | None:
        """Release plan of a client with ``size`` examples; None without any."""
        if size == 0:
            return None
        return ReleasePlan(
            level="example",
            sampler=self._sampler(work, size),
            bound=self.mechanism,
            noise=self.noise,
            rounds=rounds,
            releases=work.steps_of(size),
        )

    def _sampler(self, work: LocalWork, size: int) -> Sampler:
        if self.sampling == "poisson":
            return work.poisson(size)
        return work.passes(size)

    def batches(
        self,
        work: LocalWork,
        indices: Sequence[Ints],
        client_ids: Ints,
        randomness: Sequence[Randomness],
        round: int,
        max_chunk: int = MAX_CHUNK,
    ) -> Batches:
        """Draw a block's batches by the sampler that is charged; parameters as in `plan_batches`.

        Batches have a chunk axis: ``index`` and ``weight`` are ``[n, S, chunks, B]``.
        """
        inputs = (work, indices, client_ids, randomness, round)
        if self.sampling == "poisson":
            width = self.width(work, len(indices[0]), max_chunk)
            return plan_poisson(*inputs, width, amplified=self.private)
        batches = plan_batches(*inputs)
        index, weight = batches.index[:, :, None], batches.weight[:, :, None]
        return replace(batches, index=index, weight=weight)

    def width(self, work: LocalWork, size: int, max_chunk: int = MAX_CHUNK) -> int:
        """Physical batch width of a client with ``size`` examples, 1 or more."""
        if self.sampling == "poisson":
            return self.chunk or chunk_width(work.batch_of(size), max_chunk)
        return batch_width(work.batch_size, size)

    def keyed(
        self, randomness: Randomness, algorithm: LocalAlgorithm, work: LocalWork, loss: Loss
    ) -> Randomness:
        """Randomness keyed by a digest of known settings, for a run without a release digest."""
        settings = {
            "seed": randomness.seed,
            "algorithm": algorithm,
            "work": work,
            "loss": loss,
            "mechanism": self.mechanism,
            "noise": self.noise,
            "sampling": self.sampling,
        }
        return Randomness(randomness.seed, digest_of(settings))


@check_arguments
def example_events(
    privacy: ExamplePrivacy, work: LocalWork, sizes: Iterable[int], rounds: int
) -> list[Event]:
    """Privacy events of ``rounds`` rounds, for clients of these sizes that are in all of them."""
    plans = (privacy.plan(work, size) for size in sorted(set(sizes)))
    return [plan.event().times(rounds) for plan in plans if plan is not None]


@check_arguments
def example_epsilon(
    privacy: ExamplePrivacy, work: LocalWork, sizes: Iterable[int], rounds: int
) -> float:
    """Epsilon at ``privacy.delta`` of the client that pays most for ``rounds`` rounds."""
    events = example_events(privacy, work, sizes, rounds)
    worst = [worst_client(events, privacy.delta)] if events else []
    return Accountant(worst).epsilon(privacy.delta)


class ExampleReleases:
    """Makes the ledger entries of clients' rounds, and records them.

    A release counts as the same as an earlier one if two things hold. It belongs to the same round
    of the same run; without a name of the run, it was made by this very object. And the client's
    keyed fingerprint of all that the release depends on is the same: data and normalisation, frozen
    parameters, received tensors, the work, and the files of the user's own code.

    Parameters
    ----------
    privacy : ExamplePrivacy
    trained : TrainedModel
    stepper : Stepper
    work : LocalWork
    method : GradientMethod

    Attributes
    ----------
    run : str or None
        Name of the run, by the key in its directory; None if it is unknown.
    changing : collection of str
        Names of frozen parameters that change between rounds: they count as received tensors.
    """

    def __init__(
        self,
        privacy: ExamplePrivacy,
        trained: TrainedModel,
        stepper: Stepper,
        work: LocalWork,
        method: GradientMethod,
    ) -> None:
        self.ledgers = privacy.ledgers()
        self._privacy, self._model, self._work = privacy, trained.model, work
        self._data, algorithm = stepper.data, stepper.algorithm
        # In the fingerprint, since another path or method gives other bits.
        path = f"{stepper.path.name}, {method.name}"
        bounded = (privacy.mechanism, privacy.noise, privacy.sampling)
        self._settings = (algorithm, work, *bounded, path, stepper.device.type)
        self._code = (algorithm, trained.loss, privacy.mechanism, *trained.model.modules())
        self._rows = method.evidence
        self.run: str | None = None
        self.changing: Collection[str] = ()
        self._unique_release = f"once:{secrets.token_hex(16)}"

    def record(self, round: int, clients: Iterable[RoundStart]) -> None:
        """Write a ledger line for each of these clients; it is on disk when this returns.

        Raises
        ------
        FedsimError
            If a client's budget does not allow it, or if it repeats a round of a run with other
            data or another model while its noise is determined by the seed.
        """
        for entry in self._entries(round, clients):
            self.ledgers.record(entry)

    def exceeded(self, round: int, clients: Iterable[RoundStart]) -> str | None:
        """Why one of these clients' budgets forbids the round; None if all allow it."""
        if self._privacy.max_epsilon is None:
            return None
        return self.ledgers.exceeded(self._entries(round, clients))

    def _entries(self, round: int, clients: Iterable[RoundStart]) -> Iterator[Entry]:
        for start in clients:
            # Without a run's name, no earlier entry may match but those of this very object.
            size = self._data.size(start.client)
            plan = self._privacy.plan(self._work, size)
            if plan is not None:
                yield Entry(
                    round=round,
                    client=start.client,
                    level="example",
                    event=plan.charge(round),
                    entropy=start.randomness.entropy,
                    release=(start.randomness.release or "") if self.run else self._unique_release,
                    run=self.run,
                    fingerprint=self.ledgers.fingerprint(self._parts(start)),
                    mechanism=str(self._privacy.mechanism),
                    placement="client",
                    public={
                        "examples": size,
                        "steps": plan.releases,
                        **plan.public,
                        "rows": self._rows,
                    },
                )

    def _parts(self, start: RoundStart) -> Iterator[bytes]:
        yield self._frozen
        yield repr((self._settings, start.randomness, dict(start.numbers))).encode()
        data = self._data
        examples = torch.from_numpy(data.indices[start.client]).to(data.x.device)
        tensors = {"x": data.x[examples], "y": data.y[examples], "mean": data.mean, "std": data.std}
        tensors["mask"] = None if data.mask is None else data.mask[examples]
        if data.unusable is not None:
            tensors["unusable"] = torch.from_numpy(data.unusable[data.indices[start.client]])
        parameters = dict(self._model.named_parameters())
        tensors |= {f"changing.{name}": parameters[name] for name in self.changing}
        yield from _tensor_parts(tensors | dict(start.received))

    @cached_property
    def _frozen(self) -> bytes:
        """Digest of the model, its untrained tensors and user code; only used inside an HMAC."""
        frozen: dict[str, Tensor | None] = {}
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad and name not in self.changing:
                frozen[name] = parameter
        frozen.update(self._model.named_buffers())
        digest = hashlib.sha256(repr(self._model).encode())
        for described in (*_tensor_parts(frozen), *_files_of(self._code)):
            digest.update(len(described).to_bytes(8, "little") + described)
        return digest.digest()


def _files_of(objects: Iterable[object]) -> Iterator[bytes]:
    """Contents of the files that define the user's own classes and functions, which may change."""
    callables = (value.func if isinstance(value, partial) else value for value in objects)
    for name in sorted({str(value.__module__) for value in callables}):
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        if file.is_file() and name.partition(".")[0] not in ("fedsim", "torch"):
            yield regular_files.read_bytes(file)


def _tensor_parts(tensors: Mapping[str, Tensor | None]) -> Iterator[bytes]:
    for name, tensor in sorted(tensors.items()):
        if tensor is None:
            yield f"{name}: none".encode()
            continue
        yield f"{name}: {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
