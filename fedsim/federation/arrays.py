"""Flower arrays that are serialised only when their bytes are read.

Flower's `Array` holds serialised bytes: it serialises when it is created and parses again at every
``.numpy()``. Within one process the bytes are not needed, so a `LazyArray` keeps the tensor and
serialises on demand; both are the same on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedsim.arguments import as_text, check_arguments
from fedsim.errors import FedsimError
from fedsim.rows.layout import Layout

# `Array.stype` of an array that `numpy.load` can read.
NUMPY = "numpy.ndarray"


class LazyArray(Array):
    """A Flower `Array` that refers to a tensor, which must not be written to any more.

    Insert it with ``record[key] = array``: ``ArrayRecord(dict)`` copies its entries into plain,
    serialised arrays. It is pickled, and deflated for the wire, as a plain array.

    Parameters
    ----------
    tensor : Tensor
        The values; not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__.update(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stype=NUMPY,
            _tensor=tensor.detach(),
        )

    # The base class is a dataclass with a field of this name. A property in its place serialises
    # only when the bytes are read; hence the values in `__dict__` above, and no `super().__init__`.
    @property
    def data(self) -> bytes:
        """The serialised values, as `numpy.save` writes them."""
        if "_data" not in self.__dict__:
            self.__dict__["_data"] = Array.from_numpy_ndarray(self.numpy()).data
        data: bytes = self.__dict__["_data"]
        return data

    @data.setter
    def data(self, value: bytes) -> None:
        self.__dict__["_data"] = value
        self.__dict__["_tensor"] = torch.from_numpy(super().numpy())

    @property
    def tensor(self) -> Tensor:
        """The tensor itself; do not write to it."""
        tensor: Tensor = self.__dict__["_tensor"]
        return tensor

    def numpy(self) -> npt.NDArray[Any]:
        """Copy of the values, like Flower's own arrays."""
        # A copy, since callers train in place on the result.
        return np.array(self.tensor.cpu().numpy())

    def plain(self) -> Array:
        """A plain, serialised array of the same values."""
        return Array(dtype=self.dtype, shape=self.shape, stype=self.stype, data=self.data)

    def deflate(self) -> bytes:
        """Bytes for the wire, from which the receiver inflates a plain `Array`."""
        return self.plain().deflate()

    def __deepcopy__(self, memo: object) -> LazyArray:
        return LazyArray(self.tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


@check_arguments
def array_record(arrays: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> ArrayRecord:
    """Record of named tensors, without copying or serialising them.

    Raises
    ------
    FedsimError
        If a value is no tensor.
    """
    try:
        named = dict(arrays)
    except (TypeError, ValueError):
        raise FedsimError(f"arrays is {as_text(arrays)}; it must map names to tensors.") from None
    record = ArrayRecord()
    for name, tensor in named.items():
        if not torch.is_tensor(tensor):
            raise FedsimError(f"arrays has {as_text(tensor)} for {name!r}; it must be a Tensor.")
        record[name] = LazyArray(tensor)
    return record


@check_arguments
def tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Named tensors of a record, uncopied from a `LazyArray`; do not write to them."""
    return {
        name: array.tensor
        if isinstance(array, LazyArray)
        # from_numpy also accepts the 0-d arrays that np.load returns.
        else torch.from_numpy(array.numpy())
        for name, array in record.items()
    }


def same_arrays(*records: ArrayRecord) -> ArrayRecord:
    """One record that shares the arrays of several; ``ArrayRecord(dict)`` would serialise them."""
    shells = ArrayRecord()
    for record in records:
        for name, array in record.items():
            shells[name] = array
    return shells


def to_arrays(vector: Tensor, layout: Layout, server: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named parameters of ``vector [d]``; untrained entries of the layout keep the server's value.

    Other entries of ``server`` are left out.
    """
    parameters = layout.unflatten(vector)
    named = {entry.name: parameters[entry.name].to(entry.dtype) for entry in layout.entries}
    named |= {name: torch.as_tensor(server[name]) for name in layout.untrained}
    return {name: named[name] for name in server if name in named}
