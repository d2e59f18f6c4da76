"""What a block of clients ends with, put together from groups whose batches have one width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.clients.base import LocalAlgorithm
from fedsim.errors import FedsimError
from fedsim.rows.exchange import CLIENT_STATE
from fedsim.training.batches import Ints
from fedsim.training.steps import Ended

__all__ = ["Fitted", "Local", "numbers_of"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Local:
    """What ``n`` clients end with.

    Attributes
    ----------
    theta : Tensor ``[n, d]``
        Their parameters ``w_client``.
    metrics : dict of str to float64 ``[n]``
    """

    theta: Tensor
    metrics: dict[str, Floats]


@dataclass
class Fitted:
    """A block, before anything is kept of it.

    Attributes
    ----------
    theta : Tensor ``[n, D]``
        Packed parameters: at first where clients start, who stay there without data.
    metrics : dict of str to float64 ``[n]``
    vectors : mapping of name to Tensor ``[n, D]`` or ``[n, 1]``
        What clients send beside: zeros of those without data.
    carried : list of (positions, state)
        What which of the clients are to keep.
    """

    theta: Tensor
    metrics: dict[str, Floats]
    vectors: dict[str, Tensor]
    carried: list[tuple[Ints, dict[str, Tensor]]] = field(default_factory=list)

    def take(self, members: Ints, ended: Ended, losses: Floats | None, *, send: bool) -> None:
        """Put in where the clients at these positions end.

        ``send``: what they keep is one number for each entry, which they report.
        """
        n = len(self.theta)
        if np.array_equal(members, np.arange(n)):
            self.theta = ended.theta
        else:
            if not self.carried:
                self.theta = self.theta.clone()  # it may be one start for all
            self.theta[torch.from_numpy(members).to(self.theta.device)] = ended.theta
        self.carried.append(_sound(members, ended))
        for name, rows in ended.sent.items():
            self.vectors[name][torch.from_numpy(members).to(rows.device)] = rows
        if losses is not None:
            self.metrics["loss"][members] = losses
        for name, report in ended.reports.items():
            self._column(name, 0.0)[members] = report.double().cpu().numpy()
        if send:
            for name, rows in ended.carried.items():
                # A client without data has no part in the mean.
                column = self._column(f"{CLIENT_STATE}.{name}", np.nan)
                column[members] = rows.double().cpu().numpy()

    def _column(self, name: str, default: float) -> Floats:
        return self.metrics.setdefault(name, np.full(len(self.theta), default))


def _sound(members: Ints, ended: Ended) -> tuple[Ints, dict[str, Tensor]]:
    """What those of the clients are to keep that ended with numbers: others keep what they had."""
    if not ended.carried:
        return members, {}
    ended = replace(
        ended, carried={name: _apart(rows, ended.theta) for name, rows in ended.carried.items()}
    )
    sound = torch.ones(len(members), dtype=torch.bool, device=ended.theta.device)
    for rows in (ended.theta, *ended.carried.values()):
        sound &= torch.isfinite(rows.reshape(len(rows), -1)).all(1).to(sound.device)
    if bool(sound.all()):
        return members, ended.carried
    carried = {name: rows[sound.to(rows.device)] for name, rows in ended.carried.items()}
    return members[sound.cpu().numpy()], carried


def _apart(rows: Tensor, theta: Tensor) -> Tensor:
    """These rows where ``theta`` is not, which is overwritten before they are kept."""
    together = rows.untyped_storage().data_ptr() == theta.untyped_storage().data_ptr()
    return rows.clone() if together else rows


def numbers_of(
    algorithm: LocalAlgorithm,
    of_all: Mapping[str, float],
    of_each: Mapping[str, Sequence[float]],
    n: int,
) -> dict[str, Floats]:
    """The algorithm's numbers of ``n`` clients, each ``[n]``, some given for all or for each.

    Raises
    ------
    FedsimError
        If the algorithm has no such number.
    """
    values: dict[str, Floats] = {
        name: np.full(n, float(value)) for name, value in {**algorithm.numbers(), **of_all}.items()
    }
    for name, column in of_each.items():
        if name not in values:
            raise FedsimError(
                f"'{name}' cannot differ between clients of one block; allowed: "
                f"{', '.join(values) or 'nothing'}."
            )
        values[name] = np.asarray(column, dtype=np.float64)
    return values
