"""Clients' private rounds as their ledgers know them: written down before anything is drawn."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim import regular_files
from fedsim.clients.base import LocalAlgorithm
from fedsim.privacy import ClientRelease
from fedsim.privacy.plan import LocalWork
from fedsim.randomness import Randomness
from fedsim.tasks.losses import Loss
from fedsim.training.data import ClientData
from fedsim.training.entering import Entering
from fedsim.training.example_privacy import ExamplePrivacy

__all__ = ["ExampleReleases", "Starting", "starting"]


@dataclass(frozen=True)
class Starting:
    """What a client goes into a round with.

    Attributes
    ----------
    client : int
    randomness : Randomness
    received : mapping of name to Tensor
        Parameters that came in, and state that was kept.
    numbers : mapping of name to float
        The algorithm's numbers, which may be the client's own.
    """

    client: int
    randomness: Randomness
    received: Mapping[str, Tensor]
    numbers: Mapping[str, float]


def starting(
    entering: Entering, start: Tensor, numbers: Mapping[str, npt.NDArray[np.float64]]
) -> Iterator[Starting]:
    """What each of these clients goes into a round with, from ``start [n, D]``."""
    for position, client in enumerate(entering.client_ids.tolist()):
        received = {"start": start[position]}
        # Where it has kept nothing, whatever stands there is of others.
        kept = entering.kept.rows if entering.kept.present[position] else {}
        received |= {f"kept.{name}": rows[position] for name, rows in kept.items()}
        values = {name: float(column[position]) for name, column in numbers.items()}
        yield Starting(client, entering.randomness[position], received, values)


class ExampleReleases:
    """What each round of these clients is to their ledgers.

    A release is the same as an earlier one if it is of the same round of the same run (where nobody
    has said which run it is, only if this very object made it), and the client's keyed fingerprint
    of all that it is a function of is the same: data and normalisation, frozen parameters, what
    came in, the work, and the files of the user's own code.

    Parameters
    ----------
    privacy : ExamplePrivacy
    model : nn.Module
    algorithm : LocalAlgorithm
    data : ClientData
    work : LocalWork
    loss : Loss
    path : str
        Which path computes the gradients: another gives other bits.
    rows : str
        How it is known that a row is one example's; see `fedsim.training.paths.examples.Way`.

    Attributes
    ----------
    run : str or None
        Which run the rounds are of, by the key in its directory; None where nobody has said so.
    """

    def __init__(
        self,
        privacy: ExamplePrivacy,
        model: nn.Module,
        algorithm: LocalAlgorithm,
        data: ClientData,
        work: LocalWork,
        loss: Loss,
        *,
        path: str,
        rows: str,
    ) -> None:
        self.ledgers = privacy.ledgers()
        self._privacy, self._model, self._data, self._work = privacy, model, data, work
        bounded = (privacy.mechanism, privacy.noise_multiplier, privacy.sampling, privacy.hardened)
        self._settings = (algorithm, work, *bounded, path, data.x.device.type)
        self._code = (algorithm, loss, privacy.mechanism, *model.modules())
        self._rows = rows
        self.run: str | None = None
        self._once = f"once:{secrets.token_hex(16)}"

    def record(self, round: int, clients: Iterable[Starting]) -> None:
        """A line for each of these clients, on disk when this returns.

        Raises
        ------
        FedsimError
            If a client's budget does not allow it, or it goes through a round of a run again with
            other data or from another model, and its noise follows from the seed.
        """
        for release in self._releases(clients):
            self.ledgers.record(round, release)

    def exceeded(self, round: int, clients: Iterable[Starting]) -> str | None:
        """Why one of these clients' budgets does not allow the round; None if all do."""
        if self._privacy.max_epsilon is None:
            return None
        return self.ledgers.exceeded(round, self._releases(clients))

    def _releases(self, clients: Iterable[Starting]) -> Iterator[ClientRelease]:
        for starting in clients:
            size = self._data.size(starting.client)
            plan = self._privacy.plan(self._work, size)
            if plan is not None:
                yield ClientRelease(
                    client=starting.client,
                    event=plan.event(),
                    entropy=starting.randomness.entropy,
                    release=(starting.randomness.release or "") if self.run else self._once,
                    run=self.run,
                    fingerprint=self.ledgers.fingerprint(self._parts(starting)),
                    mechanism=str(self._privacy.mechanism),
                    public={
                        "examples": size,
                        "steps": plan.releases,
                        **plan.public,
                        "rows": self._rows,
                    },
                )

    def _parts(self, starting: Starting) -> Iterator[bytes]:
        yield self._frozen
        yield repr((self._settings, starting.randomness, dict(starting.numbers))).encode()
        data = self._data
        examples = torch.from_numpy(data.indices[starting.client]).to(data.x.device)
        tensors = {"x": data.x[examples], "y": data.y[examples], "mean": data.mean, "std": data.std}
        tensors["mask"] = None if data.mask is None else data.mask[examples]
        if data.unusable is not None:
            tensors["unusable"] = torch.from_numpy(data.unusable[data.indices[starting.client]])
        yield from _tensor_parts(tensors | dict(starting.received))

    @cached_property
    def _frozen(self) -> bytes:
        """Digest of the model, what of it is not trained, and user code; for the HMAC only."""
        frozen: dict[str, Tensor | None] = {}
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                frozen[name] = parameter
        frozen.update(self._model.named_buffers())
        digest = hashlib.sha256(repr(self._model).encode())
        for described in (*_tensor_parts(frozen), *_files_of(self._code)):
            digest.update(len(described).to_bytes(8, "little") + described)
        return digest.digest()


def _files_of(things: Iterable[object]) -> Iterator[bytes]:
    """Files that define the user's own classes and functions: their bodies may have changed."""
    callables = (thing.func if isinstance(thing, partial) else thing for thing in things)
    for name in sorted({str(thing.__module__) for thing in callables}):
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
