"""Flower arrays that are serialised only when their bytes are read.

Flower's `Array` holds serialised bytes: it writes them when made and parses them again at
every ``.numpy()``. In one process the bytes are not needed, so a `LazyArray` keeps the tensor
and serialises on demand; on the wire the two are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedsim.arguments import check_arguments, shown
from fedsim.errors import FedsimError

# `Array.stype` of an array that `numpy.load` can read.
NUMPY = "numpy.ndarray"


class LazyArray(Array):
    """A Flower `Array` over a tensor that is not written to any more.

    Insert it with ``record[key] = array``: ``ArrayRecord(dict)`` copies the entries to plain
    serialised arrays. It pickles, and deflates for the wire, as the plain array it stands for.

    Parameters
    ----------
    tensor : Tensor
        Kept, not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__.update(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stype=NUMPY,
            _tensor=tensor.detach(),
        )

    # The base class is a dataclass with a field of this name; a property in its place is
    # what makes the bytes come into being only when they are read.
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
        """The tensor itself; not to be written to."""
        tensor: Tensor = self.__dict__["_tensor"]
        return tensor

    def numpy(self) -> npt.NDArray[Any]:
        """Copy of the values, as Flower's own arrays give."""
        # Callers train in place on what they get here.
        return np.array(self.tensor.cpu().numpy())

    def plain(self) -> Array:
        """The serialised array that this one stands for."""
        return Array(dtype=self.dtype, shape=self.shape, stype=self.stype, data=self.data)

    def deflate(self) -> bytes:
        """Bytes for the wire: the receiver finds a plain `Array`."""
        return self.plain().deflate()

    def __deepcopy__(self, memo: object) -> LazyArray:
        return LazyArray(self.tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


@check_arguments
def array_record(arrays: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> ArrayRecord:
    """Record of named tensors, none of them copied or serialised.

    Raises
    ------
    FedsimError
        If something in it is no tensor.
    """
    try:
        named = dict(arrays)
    except (TypeError, ValueError):
        raise FedsimError(f"arrays is {shown(arrays)}; it must map names to tensors.") from None
    record = ArrayRecord()
    for name, tensor in named.items():
        if not torch.is_tensor(tensor):
            raise FedsimError(f"arrays has {shown(tensor)} for {name!r}; it must be a Tensor.")
        record[name] = LazyArray(tensor)
    return record


@check_arguments
def tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Named tensors of a record, without a copy where it holds them; not to be written to."""
    return {
        name: array.tensor
        if isinstance(array, LazyArray)
        # np.load of a 0-d array is an array still; from_numpy takes it as it is.
        else torch.from_numpy(array.numpy())
        for name, array in record.items()
    }


def same_arrays(*records: ArrayRecord) -> ArrayRecord:
    """A record of the arrays of these; ``ArrayRecord(dict)`` would serialise every tensor's."""
    shells = ArrayRecord()
    for record in records:
        for name, array in record.items():
            shells[name] = array
    return shells
