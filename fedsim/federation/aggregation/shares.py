"""Shares: rows that clients bound and noise themselves; how they are requested and made.

The noise of a round's shares sums to the noise of its release, so that the server needs no row
without noise. The server adds the noise that missing clients would have added.

A message has the noise parameters of a share (``share-*`` entries of its config) and the part of
the mechanism's state that is needed to bound a row (an array record named `STATE_RECORD`). The
client's reply has its bounded and noised row (an array record with the one entry `SHARE_ARRAY`) and
nothing else about its data. Engines that train clients in this process send no messages: the shares
are then made here, with the draws that each client would have used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism, NoiseSource, PartialSum, Releaser, State
from fedsim.privacy.noise import Independent, Noise
from fedsim.privacy.placement import CLIENTS
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import DenseRows, Layout
from fedsim.rows.dense import Weights
from fedsim.rows.exact import RowMasks

STATE_RECORD = "mechanism-state"
SHARE_ARRAY = "share-units"
"""Name of the one array in a client's share."""
USABLE = "share-usable"

SHARE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Shares:
    """Rows that n clients have bounded and noised themselves, each as one vector of whole numbers.

    Attributes
    ----------
    units : float64 ``[n, size]``
        Shares in units of the grids of the sums that they enter, one sum after another (`split`).
    usable : bool ``[n]``
        False where the client's row was not finite: its share is noise alone. The server drops it,
        unless it is masked.
    """

    units: Tensor
    usable: Tensor

    def words(self) -> npt.NDArray[np.uint64]:
        """The shares as words modulo 2^64, ``[n, size]``, to be masked."""
        return self.units.cpu().numpy().astype(np.int64).view(np.uint64)

    def reply(self) -> RecordDict:
        """Content of one client's reply without masks: all that it reveals of its data."""
        return RecordDict(
            {
                "arrays": ArrayRecord({SHARE_ARRAY: Array(self.units[0].cpu().numpy())}),
                "metrics": MetricRecord({USABLE: int(self.usable[0])}),
            }
        )


def split(total: PartialSum, vector: Tensor) -> dict[str, Tensor]:
    """The parts of shares ``vector [..., size]`` that enter each sum, sorted by its name.

    Sums with infinite noise have no part.
    """
    sizes = share_sizes(total)
    return dict(zip(sizes, torch.split(vector, [*sizes.values()], dim=-1), strict=True))


def share_sizes(total: PartialSum) -> dict[str, int]:
    """Number of a share's entries that enter each sum, sorted by its name."""
    multipliers = total.definition.split
    names = (name for name in sorted(total.grids) if multipliers[name] < math.inf)
    return {name: total.grids[name].coarse.shape[-1] for name in names}


@dataclass(frozen=True)
class ShareRequest:
    """Request to each sampled client for its share of a noisy sum.

    Attributes
    ----------
    mechanism, noise, denominator
        As in the round's release plan.
    share_count : int
        Number of shares into which the noise is divided: each has variance
        ``z^2 C^2 / share_count``.
    release : str
        Release digest that keys the shares' noise together with the seed; empty without one.
    """

    mechanism: Mechanism
    noise: Noise
    denominator: float
    share_count: int
    release: str = ""

    @classmethod
    def read(cls, entries: Mapping[str, object], mechanism: Mechanism) -> ShareRequest:
        """Read a request from a message's config entries, with the client's own mechanism.

        Raises
        ------
        ValueError
            If an entry is missing or not a number.
        """
        noise = Independent(
            _number(entries, "share-noise-multiplier"), hardened=bool(entries["share-hardened"])
        )
        denominator, share_count = (
            _number(entries, "share-denominator"),
            _int(entries, "share-asked"),
        )
        return cls(mechanism, noise, denominator, share_count, str(entries["share-release"]))

    def entries(self) -> dict[str, float | int | str]:
        """The config entries from which `read` makes the same request."""
        return {
            "share-noise-multiplier": self.noise.multiplier,
            "share-denominator": self.denominator,
            "share-asked": self.share_count,
            "share-hardened": self.noise.hardened,
            "share-release": self.release,
        }


def _number(entries: Mapping[str, object], key: str) -> float:
    value = entries.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"the message's {key} is {value!r}; it must be a number.")
    return float(value)


def _int(entries: Mapping[str, object], key: str) -> int:
    value = entries.get(key)
    if not isinstance(value, int):
        raise ValueError(f"the message's {key} is {value!r}; it must be a whole number.")
    return value


def share_multiplier(noise_multiplier: float, asked: int) -> float:
    """Noise multiplier of one client's share among ``asked`` clients: ``z / sqrt(asked)``."""
    if asked < 1:
        raise FedsimError(f"asked is {asked}; a share needs at least one client asked.")
    return noise_multiplier / math.sqrt(asked)


def missing_share(asked: int, usable: int) -> float:
    """Part of the noise's variance that the server adds to ``usable`` of ``asked`` shares.

    It is ``1 - usable / asked``, and 1 for an empty cohort: the variance of the noise on the sum is
    then z^2 C^2 for any cohort size and any number of dropouts.
    """
    if not 0 <= usable <= asked:
        raise FedsimError(f"usable is {usable}; it must lie between 0 and asked, {asked}.")
    return 1 - usable / asked if asked else 1.0


def make_shares(
    request: ShareRequest,
    block: Tensor,
    bounding: State,
    layout: Layout,
    *,
    sources: Sequence[NoiseSource],
    side_scalars: Mapping[str, Weights] | None = None,
) -> Shares:
    """Bound and noise the rows of n clients, on the clients' side.

    Each share is one bounded row plus noise of variance ``z^2 C^2 / share_count`` from that
    client's own source. If the row is not finite, the share is noise alone.

    Parameters
    ----------
    block : Tensor ``[n, d]``
    bounding : State
        `Mechanism.bounding_state`: the part of the mechanism's state that clients receive.
    sources : sequence of n NoiseSource

    Raises
    ------
    FedsimError
        If the mechanism has no noise or the noise cannot be divided, if the entries or shapes of
        ``bounding`` are not the mechanism's, or if a state sent by the server would make a row
        longer than the bound for which its noise is scaled.
    """
    # The strategy refuses this too, but a client does not rely on the server's checks.
    CLIENTS.check_noise(request.mechanism, request.noise)
    _require_state(
        bounding, request.mechanism.bounding_state(request.mechanism.init(layout), layout)
    )
    n = len(block)
    releaser = Releaser([request] * n, layout, device=block.device)
    total = releaser.start_bounding(
        {name: tensor.expand(n, *tensor.shape) for name, tensor in bounding.items()}
    )
    masks = RowMasks((n, 1), block.device)
    columns = {
        name: torch.as_tensor(values)[:, None] for name, values in (side_scalars or {}).items()
    }
    weights = torch.ones(n, 1, dtype=torch.float64, device=block.device)
    total.add_owners(DenseRows(block[:, None]), weights, [1] * n, side_scalars=columns, masks=masks)
    _require_bounded(total)
    units, _ = releaser.add_noise(
        total, sources, lambda z: share_multiplier(z, request.share_count)
    )
    vectors = torch.cat([units[name] for name in share_sizes(total)], dim=1)
    return Shares(vectors, masks.usable[:, 0])


def share_source(
    randomness: Randomness, number: int, client: int, *, hardened: bool
) -> NoiseSource:
    """The source of a client's share of the noise of round ``number``."""
    generator = randomness.generator(Purpose.SHARE, level="client", round=number, client=client)
    return NoiseSource(generator, hardened)


def _require_state(bounding: State, required: State) -> None:
    """Refuse an (untrusted) state that lacks entries of the mechanism, or has other sizes."""
    for name, tensor in required.items():
        value = bounding.get(name)
        if value is None or value.numel() != tensor.numel():
            fault = "lacks" if value is None else f"has the shape {tuple(value.shape)} for"
            raise FedsimError(
                f"the mechanism-state of the message {fault} '{name}'; it must have "
                f"{', '.join(required)}, '{name}' of shape {tuple(tensor.shape)}."
            )


def _require_bounded(total: PartialSum) -> None:
    """Refuse rows longer than their bound, which a malicious server's state could produce."""
    for summed in total.segments:
        grid = summed.grids["sum"]
        norms = torch.linalg.vector_norm(grid.on_grid(), dim=-1) * grid.unit
        if bool((norms > grid.radius * (1 + SHARE_TOLERANCE)).any()):
            raise FedsimError(
                "the mechanism-state of the message makes rows longer than the bound that their "
                "noise is for; it must be the state that this mechanism has in the round."
            )


def share_entries(message: Message) -> ConfigRecord | None:
    """The config record that asks for a share, if the message has one."""
    for record in message.content.config_records.values():
        if "share-asked" in record:
            return record
    return None


def share_for_message(
    message: Message,
    mechanism: Mechanism,
    row: Tensor,
    layout: Layout,
    reported: Mapping[str, float],
    randomness: Randomness,
    client: int,
) -> Shares:
    """The share that a message asks one client for.

    Parameters
    ----------
    message : Message
    mechanism : Mechanism
        The client's own mechanism.
    row : Tensor ``[d]``
        The client's update, in this layout.
    reported : mapping of name to float
        The client's metrics, which contain the mechanism's side scalars.
    randomness : Randomness
        Randomness of the client's noise.

    Raises
    ------
    FedsimError
        If the message does not ask for a share, or as `make_shares` does.
    """
    entries = share_entries(message)
    if entries is None:
        raise FedsimError(
            "the server asks for a masked update that is not a share; it must be one."
        )
    request = ShareRequest.read(entries, mechanism)
    # Keyed by the strategy's release digest, so that an engine in the strategy's process would make
    # the same share.
    keyed, number = (
        Randomness(randomness.seed, request.release or None),
        _int(entries, "server-round"),
    )
    return make_shares(
        request,
        row.unsqueeze(0),
        message.content.array_records[STATE_RECORD].to_torch_state_dict(),
        layout,
        sources=[share_source(keyed, number, client, hardened=request.noise.hardened)],
        side_scalars={name: np.array([reported[name]]) for name in mechanism.side_scalar_names},
    )
