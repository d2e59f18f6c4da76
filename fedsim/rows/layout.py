"""Layout of a row: the slice of each parameter, and of each named vector sent with it.

An algorithm may send vectors with its update (a control variate) and receive the server's result.
They are at the end of the row, so that everything done to rows (bounds, exact sums, transport,
validation) is done to them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, shape and dtype, and the slice ``start:stop`` of a row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Names, shapes, dtypes and slices of the parameters that make up a row.

    Floating-point entries follow each other in the given order. Integer and boolean entries
    (``untrained``) are not part of a row: they keep the server's value.
    """

    entries: tuple[Parameter, ...]
    untrained: tuple[str, ...] = ()

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor]) -> Layout:
        """Layout of named tensors, in their order.

        Raises
        ------
        FedsimError
            If there is no floating-point entry, or all of them are empty.
        """
        entries: list[Parameter] = []
        untrained: list[str] = []
        start = 0
        for name, tensor in arrays.items():
            if tensor.is_floating_point():
                stop = start + tensor.numel()
                entries.append(Parameter(name, tuple(tensor.shape), tensor.dtype, start, stop))
                start = stop
            else:
                untrained.append(name)
        if start == 0:
            raise FedsimError("there is no floating-point parameter to train.")
        return cls(tuple(entries), tuple(untrained))

    @cached_property
    def d(self) -> int:
        """Length of a row."""
        return self.entries[-1].stop

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of a row: the widest of the entries'."""
        dtype = self.entries[0].dtype
        for entry in self.entries[1:]:
            dtype = torch.promote_types(dtype, entry.dtype)
        return dtype

    def flatten(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Named tensors as one vector ``[d]`` of the layout's dtype.

        Raises
        ------
        ValueError
            If an entry is missing or has another shape.
        """
        parts: list[Tensor] = []
        for entry in self.entries:
            tensor = arrays.get(entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape:
                fault = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise ValueError(
                    f"parameter '{entry.name}' is {fault}; it must have shape {entry.shape}."
                )
            parts.append(tensor.detach().reshape(-1).to(self.dtype))
        return torch.cat(parts)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views of ``vector [..., d]``: each ``[..., *shape]``, in the row's dtype."""
        lead = vector.shape[:-1]
        return {
            entry.name: vector[..., entry.start : entry.stop].reshape((*lead, *entry.shape))
            for entry in self.entries
        }

    def subset(self, entries: Sequence[Parameter]) -> tuple[Layout, tuple[slice, ...]]:
        """A layout of some entries alone, and their columns in this one.

        Columns of neighbouring entries are joined to one slice.
        """
        taken_entries: list[Parameter] = []
        columns: list[slice] = []
        start = 0
        for entry in entries:
            stop = start + entry.stop - entry.start
            taken_entries.append(replace(entry, start=start, stop=stop))
            if columns and columns[-1].stop == entry.start:
                columns[-1] = slice(columns[-1].start, entry.stop)
            else:
                columns.append(slice(entry.start, entry.stop))
            start = stop
        return Layout(tuple(taken_entries)), tuple(columns)


Width = Literal["model", "number"]
"""Size of a named vector: that of all parameters sent, or a single number."""

PREFIX = "client/"


def with_vectors(layout: Layout, sends: Mapping[str, Width]) -> Layout:
    """The layout with these vectors appended, under the names ``client/NAME``."""
    entries = list(layout.entries)
    for name, width in sends.items():
        start, size = entries[-1].stop, layout.d if width == "model" else 1
        entries.append(Parameter(PREFIX + name, (size,), layout.dtype, start, start + size))
    return Layout(tuple(entries), layout.untrained)


def vectors_in(layout: Layout, rows: Tensor) -> dict[str, Tensor]:
    """Views of the named vectors in rows ``[..., d]``, each ``[..., size]``, by name."""
    return {
        entry.name.removeprefix(PREFIX): rows[..., entry.start : entry.stop]
        for entry in layout.entries
        if entry.name.startswith(PREFIX)
    }
