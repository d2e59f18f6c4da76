"""Sending a trainer to worker processes that share its data instead of copying them."""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

__all__ = ["Parcel"]

# Smaller tensors are copied: they are not worth a buffer of their own, and what an
# algorithm keeps and changes in place (rates, counters) is among them.
_SHARED_FROM = 1 << 20


@dataclass(frozen=True)
class Parcel:
    """An object, with its large tensors apart as plain arrays.

    An object store that maps arrays into its readers' memory (Ray's does) holds the data
    once for all the processes of a machine. Tensors of a mebibyte and more are then
    read-only; parameters are always copied.

    Attributes
    ----------
    body : bytes
    arrays : list of ndarray
        The large tensors' values, in the order in which the body refers to them.
    """

    body: bytes
    arrays: list[npt.NDArray[Any]]

    @classmethod
    def pack(cls, value: object) -> Parcel:
        """Pack an object; classes and functions that workers cannot import go by value."""
        arrays: list[npt.NDArray[Any]] = []
        stream = io.BytesIO()
        _pickler_class()(stream, arrays).dump(value)
        return cls(stream.getvalue(), arrays)

    def unpack(self) -> Any:
        """The object, over this parcel's arrays."""
        return _Unpickler(io.BytesIO(self.body), self.arrays).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, arrays: list[npt.NDArray[Any]]) -> None:
        super().__init__(stream)
        self._arrays = arrays

    def persistent_load(self, pid: Any) -> Tensor:
        with warnings.catch_warnings():
            # "not writable": just so.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(self._arrays[pid])


def _pickler_class() -> Any:
    from ray.cloudpickle import CloudPickler

    class Pickler(CloudPickler):
        def __init__(self, stream: io.BytesIO, arrays: list[npt.NDArray[Any]]) -> None:
            super().__init__(stream, protocol=5)  # type: ignore[no-untyped-call]
            self._arrays = arrays
            # The tensors too: an id means something only while its object lives.
            self._known: dict[int, tuple[int, Tensor]] = {}

        def persistent_id(self, value: object) -> int | None:
            if type(value) is not Tensor or not _shareable(value):
                return None
            if id(value) not in self._known:
                self._known[id(value)] = (len(self._arrays), value)
                self._arrays.append(np.ascontiguousarray(value.detach().numpy()))
            return self._known[id(value)][0]

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, nn.Parameter):
                plain = np.array(value.detach().cpu().numpy())
                return _parameter, (plain, value.requires_grad)
            return super().reducer_override(value)  # type: ignore[no-untyped-call]

    return Pickler


def _shareable(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.numel() * tensor.element_size() >= _SHARED_FROM
    )


def _parameter(values: npt.NDArray[Any], requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(values.copy()), requires_grad=requires_grad)
