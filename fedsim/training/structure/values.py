"""What is known of a value while a graph is read: whether it has a row for each example, and where.

Tensors are on the device ``meta``: they have shapes and no numbers. Nobody's data, and nothing made
up in their place, is needed to read a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

BATCH = 7919
"""Stands for the number of examples on ``meta``: a prime, so that no other size is it by chance."""


class NotReadError(Exception):
    """A graph has a node of which it is not known that it acts on each example by itself."""


@dataclass(frozen=True)
class Batched:
    """A tensor with a row for each example.

    Attributes
    ----------
    like : Tensor on meta
        Of its shape; `BATCH` along ``axis``.
    axis : int
        Where the examples are. All rules but those that move an axis want 0.
    shared : bool
        Whether it may lie in the memory of something fixed, which nothing may write to.
    """

    like: Tensor
    axis: int = 0
    shared: bool = False


@dataclass(frozen=True)
class Fixed:
    """A tensor that is the same whatever the examples are: a parameter, a buffer, a constant."""

    like: Tensor


def leads(value: Any) -> TypeGuard[Batched]:
    """Whether it is a tensor that has its examples along the first axis."""
    return isinstance(value, Batched) and not value.axis


class BatchSize(int):
    """The number of examples of a batch, which a graph may hand on as a size and nothing else."""


SIZE = BatchSize(BATCH)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of this shape and dtype without numbers."""
    return torch.empty_like(tensor, device="meta")


def module_on_meta(module: nn.Module) -> Callable[..., Any]:
    """A call of a module with its parameters and buffers on meta."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 1 and _is_dense_layer_of(module, args[0]):
            # torch gives the same, and imports its compiler for that: over a second a process.
            outputs = getattr(module, "out_features", args[0].shape[-1])
            return args[0].new_empty((*args[0].shape[:-1], outputs))
        tensors = {k: on_meta(t) for k, t in (*module.named_parameters(), *module.named_buffers())}
        return torch.func.functional_call(module, tensors, args, kwargs)

    return function


def _is_dense_layer_of(module: nn.Module, x: Any) -> bool:
    """Whether it is a layer or an activation of an ordinary dense network, which suits an input."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        return False
    if type(module) is nn.Linear:
        shape = (module.out_features, module.in_features)
        bias = module.bias is None or module.bias.shape == shape[:1]
        weight = module.weight.shape == shape and module.weight.dtype == x.dtype
        return bias and weight and x.shape[-1] == module.in_features
    return type(module) in (nn.ReLU, nn.Sigmoid, nn.Tanh)


def method_of(name: str) -> Callable[..., Any]:
    """A call of this method of a tensor."""

    def function(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, name)(*args, **kwargs)

    return function


class Pair(NamedTuple):
    """What torch's functions along a dimension give, which code may ask for by name."""

    values: Any
    indices: Any


class NodeCall(NamedTuple):
    """A function, method or module of a graph, and what it is given.

    Attributes
    ----------
    name : str
        For sentences.
    function : callable
        What gives the result's shape, from tensors on meta.
    args, kwargs
        Values: `Batched`, `Fixed`, `BatchSize`, tuples and lists of them, and constants.
    module : nn.Module or None
        If it is a module that is called.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None = None

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at a position, or of this name; a module has it among its settings."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, getattr(self.module, name, default))

    @property
    def values(self) -> list[Any]:
        """All that it is given, with what is inside tuples, lists and slices."""
        values: list[Any] = []
        map_aggregate((self.args, self.kwargs), values.append)
        return values

    @property
    def batched(self) -> list[Batched]:
        """What it is given that has a row for each example."""
        return [value for value in self.values if isinstance(value, Batched)]

    @property
    def first(self) -> Batched:
        """The first argument, which must have its examples along the first axis."""
        value = self.args[0] if self.args else self.kwargs.get("input")
        if not leads(value):
            raise self.unknown("does not have its examples along the first axis")
        return value

    @property
    def shared(self) -> bool:
        """Whether its result may lie in the memory of something fixed."""
        return any(value.shared for value in self.batched)

    @property
    def results(self) -> Any:
        """What it gives, on meta."""
        args: Any = map_aggregate(self.args, _meta)
        kwargs: Any = map_aggregate(self.kwargs, _meta)
        return self.function(*args, **kwargs)

    def need(self, met: bool, why: str) -> None:
        """Refuse the node unless a condition is met."""
        if not met:
            raise self.unknown(why)

    def unknown(self, why: str) -> NotReadError:
        """An error that names the node."""
        return NotReadError(f"{self.name} {why}")

    def same_axis(self, result: Tensor, *, shared: bool | None = None) -> Batched:
        """A result whose first axis must be that of the examples still."""
        # By its size: it is a prime that no other axis has, so that an axis of it is the examples'.
        rows = isinstance(result, Tensor) and result.dim() > 0 and result.shape[0] == BATCH
        self.need(rows, "does not keep a row for each example")
        return Batched(result, 0, self.shared if shared is None else shared)

    def dims(self, position: int = 1, name: str = "dim", default: Any = None) -> list[int]:
        """Dimensions that it is given as one number, some, or as the rest of its arguments.

        They must be none of the examples'.
        """
        # `flip(x, 1, 2)` and `flip(x, dims=(1, 2))` are one call.
        given = self.argument(position, name, default)
        if isinstance(given, int) and len(self.args) > position + 1 and name == "dims":
            given = self.args[position:]
        numbers = [given] if isinstance(given, int) else given
        self.need(
            isinstance(numbers, tuple | list) and bool(numbers) and _plain(numbers),
            "goes through all examples",
        )
        rank = self.first.like.dim()
        dims = [number + rank if number < 0 else number for number in numbers]
        self.need(0 not in dims, "goes through the examples of a batch")
        return dims


def batched_results(call: NodeCall, results: Any) -> Any:
    """A result, or a tuple of results, each with a row for each example."""
    if isinstance(results, tuple | list):
        rows = (batched_results(call, result) for result in results)
        return Pair(*rows) if hasattr(results, "values") else tuple(rows)
    return call.same_axis(results)


def _plain(numbers: Any) -> bool:
    return all(isinstance(n, int) and not isinstance(n, BatchSize | bool) for n in numbers)


def _meta(value: Any) -> Any:
    if isinstance(value, Batched | Fixed):
        return value.like
    return int(value) if isinstance(value, BatchSize) else value
