"""Clients' data: inputs and targets of all, and the indices of each client's examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.arguments import as_text
from fedsim.errors import FedsimError
from fedsim.named_tensors import NamedTensors, each
from fedsim.settings import check_settings
from fedsim.tasks.losses import IGNORED

# Clients whose indices are checked at once: one by one, a million clients take ten seconds.
CHECKED_TOGETHER = 10_000


@dataclass(frozen=True)
class ClientData:
    """Every client's examples, without a copy per client.

    Attributes
    ----------
    x : Tensor ``[N, ...]``, or NamedTensors
        Inputs on the device that trains, in memory or memory-mapped; a batch is converted when it
        is gathered (`as_inputs`). Several by name are for ``model.forward(**batch)``.
    y : Tensor ``[N]`` or ``[N, ...]``
        Targets: integers are classes, floating-point numbers are regression targets.
    indices : sequence of int64 arrays
        ``indices[i]`` are the examples of client ``i``; an empty array is a client without data.
    mean, std : Tensor broadcastable to one example, or None
        Normalisation of a gathered batch: ``(x - mean) / std``, after uint8 became ``x / 255``.
    mask : bool Tensor of the shape of ``y`` or of its first dimensions, or None
        Which targets count. Those that do not are gathered as `fedsim.tasks.IGNORED` (classes) or
        NaN (numbers).
    unusable : bool array ``[N]``, or None
        Examples with an invalid label or token, which has been replaced, and test examples with
        numbers that are not finite. A client that has one fails; with example-level privacy such
        examples' gradients count as zero.
    public : Tensor ``[2 or more, ...]`` or NamedTensors, optional
        Public inputs, on which a model and a loss are tried in place of made-up ones.

    Raises
    ------
    FedsimError
        If an index is outside the data, or the sizes of inputs, targets and mask do not match.
    """

    x: Tensor | NamedTensors
    y: Tensor
    indices: Sequence[npt.NDArray[np.int64]]
    mean: Tensor | None = None
    std: Tensor | None = None
    mask: Tensor | None = None
    unusable: npt.NDArray[np.bool_] | None = None
    public: Tensor | NamedTensors | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        count = len(self.x)
        if len(self.y) != count:
            raise FedsimError(f"there are {count} inputs but {len(self.y)} targets.")
        if self.mask is not None and self.mask.shape != self.y.shape[: self.mask.dim()]:
            raise FedsimError(
                f"the mask is {list(self.mask.shape)} for targets {list(self.y.shape)}; it must "
                "have their shape, or that of their first dimensions."
            )
        for first in range(0, len(self.indices), CHECKED_TOGETHER):
            clients = range(first, min(first + CHECKED_TOGETHER, len(self.indices)))
            examples = [self.indices[c] for c in clients]
            _require_positions(examples, first)
            if not _in_range(np.concatenate(examples), count):
                client = next(c for c in clients if not _in_range(self.indices[c], count))
                raise FedsimError(
                    f"client {client} has an example outside 0 .. {count - 1}, the data's range."
                )

    @property
    def population(self) -> int:
        """Number of clients."""
        return len(self.indices)

    def size(self, client: int) -> int:
        """Number of examples of one client."""
        return len(self.indices[client])

    def to(self, device: torch.device | str) -> ClientData:
        """The same data on another device."""
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor | NamedTensors)}
        copies: dict[str, Any] = {k: v.to(device) for k, v in tensors.items()}
        is_unchanged = all(copies[k] is tensor for k, tensor in tensors.items())
        return self if is_unchanged else replace(self, **copies)

    def require_usable(self, client_ids: Iterable[int]) -> None:
        """Raise FedsimError if a client has an unusable example."""
        if self.unusable is None:
            return
        for client in client_ids:
            if self.unusable[self.indices[client]].any():
                raise FedsimError(
                    f"client {client} has an example with a label or token outside the declared "
                    "range (data.classes, data.vocabulary; undeclared, that of the test examples), "
                    "or a test example with numbers that are not finite."
                )

    def inputs(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Inputs at ``index`` (int64, any shape ``[*lead]``) as ``[*lead, ...]`` of ``dtype``."""
        return self._gathered(self.x, index, dtype)

    def _gathered(self, x: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        flat = index.reshape(-1)
        x = as_inputs(each(lambda one: one.index_select(0, flat), x), dtype)
        if self.mean is not None and self.std is not None:
            x = x.sub_(self.mean.to(x)).div_(self.std.to(x))
        return each(lambda one: one.reshape(*index.shape, *one.shape[1:]), x)

    def targets(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Targets at ``index`` (int64 ``[*lead]``) as ``[*lead, ...]``, int64 or of ``dtype``."""
        flat = index.reshape(-1)
        y = self.y.index_select(0, flat)
        y = y.to(dtype) if y.is_floating_point() else y.long()
        if self.mask is not None:
            absent = ~self.mask.index_select(0, flat)
            absent = absent.view(*absent.shape, *[1] * (y.dim() - absent.dim()))
            y = y.masked_fill(absent, float("nan") if y.is_floating_point() else IGNORED)
        return y.reshape(*index.shape, *y.shape[1:])

    def empty(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs and targets of no example ``[0, ...]``, for their shapes and dtypes."""
        no_example = torch.zeros(0, dtype=torch.int64, device=self.x.device)
        return self.inputs(no_example, dtype), self.targets(no_example, dtype)

    def public_inputs(self, count: int, dtype: torch.dtype, part: int = 0) -> Tensor | None:
        """``count`` of the public inputs, again and again; None if there are none.

        Those of ``part`` 0 and of part 1 are different ones.
        """
        if self.public is None:
            return None
        rows = torch.arange(part, len(self.public), 2, device=self.y.device)
        return self._gathered(self.public, rows[torch.arange(count) % len(rows)], dtype)

    def one_example(self, *, protected: bool) -> ClientData | None:
        """One client with one example, to test a model, a loss and metrics; None without any.

        It is the first example that any client has. If clients' data are protected, it is made up,
        of ones, or the first public one: whether a run starts must not depend on anyone's data.
        """
        if not len(self.x):
            return None
        if not protected:
            first = next((part[:1] for part in self.indices if len(part)), None)
            return None if first is None else replace(self, indices=[first])
        y = torch.ones_like(self.y[:1])
        x = each(torch.ones_like, self.x[:1]) if self.public is None else self.public[:1]
        indices = [np.zeros(1, dtype=np.int64)]
        return replace(self, x=x, y=y, indices=indices, mask=None, unusable=None)

    def require_disjoint(self) -> None:
        """Raise FedsimError if two clients have an example, or one client has it twice."""
        is_used, count = np.zeros(len(self.x), dtype=np.bool_), 0
        for part in self.indices:
            is_used[part] = True
            count += len(part)
        if int(is_used.sum()) < count:
            raise FedsimError(
                f"clients have {count} positions for {int(is_used.sum())} examples; with "
                "example-level privacy each example must belong to one client, once: its effect "
                "is counted once."
            )


def as_inputs(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs ``[B, ...]`` of a data set as a model takes them.

    uint8 images ``[B, C, H, W]`` are divided by 255; other uint8, booleans and floating numbers
    are converted to ``dtype``; other integers are tokens, int64. Of several inputs booleans stay
    booleans, for masks.
    """
    if isinstance(x, NamedTensors):
        return each(lambda one: one if one.dtype == torch.bool else as_inputs(one, dtype), x)
    if x.is_floating_point() or x.dtype in (torch.uint8, torch.bool):
        values = x.to(dtype)
        return values.div_(255) if x.dtype == torch.uint8 and x.dim() == 4 else values
    return x.long()


def _require_positions(client_indices: Sequence[object], first: int) -> None:
    """Refuse positions of clients ``first``, ``first + 1``, ... that are not integer arrays."""
    for client, part in enumerate(client_indices, first):
        if not (
            isinstance(part, np.ndarray)
            and part.ndim == 1
            and (part.dtype.kind in "iu" or not len(part))
        ):
            raise FedsimError(
                f"indices has {as_text(part)} for client {client}; it must be an array [n] of "
                "whole numbers, the positions of the client's examples."
            )


def _in_range(examples: npt.NDArray[np.int64], count: int) -> bool:
    """Whether all indices are in ``0 .. count - 1``."""
    return not len(examples) or (int(examples.min()) >= 0 and int(examples.max()) < count)
