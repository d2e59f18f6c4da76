"""Abstract values while a graph is read: whether a tensor has a row per example, on which axis.

Tensors are on the device ``meta``: they have shapes and no numbers. So neither real nor made-up
data are needed to read a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

BATCH = 7919
"""Number of examples on ``meta``: a large prime, so that no other size equals it by chance."""


class NotReadError(Exception):
    """A graph has a node that is not known to treat each example by itself."""


@dataclass(frozen=True)
class Batched:
    """A tensor with a row for each example.

    Attributes
    ----------
    like : Tensor on meta
        A tensor of its shape, with `BATCH` along ``axis``.
    axis : int
        Axis of the examples. All rules require 0, except those that move axes.
    shared : bool
        Whether it may share memory with something fixed, which must not be written to.
    """

    like: Tensor
    axis: int = 0
    shared: bool = False


@dataclass(frozen=True)
class Fixed:
    """A tensor that is the same whatever the examples are: a parameter, a buffer, a constant."""

    like: Tensor


def leads(value: Any) -> TypeGuard[Batched]:
    """Whether a value is a tensor with its examples along the first axis."""
    return isinstance(value, Batched) and not value.axis


class BatchSize(int):
    """The number of examples in a batch, which a graph may only pass on as a size."""


SIZE = BatchSize(BATCH)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of this shape and dtype without numbers."""
    return torch.empty_like(tensor, device="meta")


def module_on_meta(module: nn.Module) -> Callable[..., Any]:
    """A function that calls a module with its parameters and buffers on meta."""
    # Made here and not when it is called: they are not the call's own (`Writes`).
    tensors = {k: on_meta(t) for k, t in (*module.named_parameters(), *module.named_buffers())}
    return partial(_call_on_meta, module, tensors)


def _call_on_meta(
    module: nn.Module, tensors: dict[str, Tensor], /, *args: Any, **kwargs: Any
) -> Any:
    if not kwargs and len(args) == 1 and _is_dense_layer_of(module, args[0]):
        # torch gives the same, but first imports its compiler: over a second in each process.
        outputs = getattr(module, "out_features", args[0].shape[-1])
        return args[0].new_empty((*args[0].shape[:-1], outputs))
    return torch.func.functional_call(module, tensors, args, kwargs)


def _is_dense_layer_of(module: nn.Module, x: Any) -> bool:
    """Whether a module is a plain linear layer or activation, and takes this input."""
    if getattr(module, "inplace", False):
        return False  # it must be called, to be seen to write
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        return False
    if type(module) is nn.Linear:
        shape = (module.out_features, module.in_features)
        bias = module.bias is None or module.bias.shape == shape[:1]
        weight = module.weight.shape == shape and module.weight.dtype == x.dtype
        return bias and weight and x.shape[-1] == module.in_features
    return type(module) in (nn.ReLU, nn.Sigmoid, nn.Tanh)


class Pair(NamedTuple):
    """Result of torch's functions along a dimension, whose fields code may read by name."""

    values: Any
    indices: Any


def memory(tensor: Tensor) -> int:
    """A number of a tensor's memory, which all views of it have in common."""
    return int(tensor.untyped_storage()._cdata)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds out, while a function runs, which memory it writes to that was there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self._made: dict[int, Tensor] = {}  # tensors are kept: a number may not be given again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, which takes over a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, name in _written_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(value):
                if memory(tensor) not in self._made:
                    self.written.add(memory(tensor))
                    self.save(tensor)
        results = func(*args, **kwargs)
        old = {memory(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        self._made |= {memory(t): t for t in _tensors(results) if memory(t) not in old}
        return results

    def save(self, tensor: Tensor) -> None:
        """Called before a tensor's memory, which was there before, is written to."""


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that one of torch's operations writes to."""
    # Torch's own schema marks them, whatever the operation's name.
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _tensors(value: Any) -> list[Tensor]:
    """A tensor, or the tensors in tuples and lists; sparse ones have no memory of their own."""
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, tuple | list):
        return [tensor for entry in value for tensor in _tensors(entry)]
    return []


@dataclass(frozen=True)
class NodeCall:
    """A call of a function, method or module in a graph, with its arguments.

    Attributes
    ----------
    name : str
        Name for messages.
    function : callable
        Computes the result's shape, from tensors on meta.
    args, kwargs
        Values: `Batched`, `Fixed`, `BatchSize`, tuples and lists of them, and constants.
    module : nn.Module or None
        The module, if one is called.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None = None
    _writes: Writes = field(default_factory=Writes, repr=False)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at a position or of this name, or else the module's setting of this name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, getattr(self.module, name, default))

    @property
    def values(self) -> list[Any]:
        """All arguments, including those inside tuples, lists and slices."""
        values: list[Any] = []
        map_aggregate((self.args, self.kwargs), values.append)
        return values

    @property
    def batched(self) -> list[Batched]:
        """The arguments that have a row for each example."""
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
        """Whether the result may share memory with something fixed."""
        return any(value.shared for value in self.batched)

    @cached_property
    def results(self) -> Any:
        """The result of the call, on meta."""
        args: Any = map_aggregate(self.args, _meta)
        kwargs: Any = map_aggregate(self.kwargs, _meta)
        with self._writes:
            return self.function(*args, **kwargs)

    @property
    def written(self) -> set[int]:
        """Memory (`memory`) that the call writes to and has not made itself."""
        assert self.results is not NotImplemented  # it is made now, if no rule has asked for it
        return self._writes.written

    def need(self, met: bool, why: str) -> None:
        """Refuse the node unless a condition is met."""
        if not met:
            raise self.unknown(why)

    def unknown(self, why: str) -> NotReadError:
        """An error that names the node."""
        return NotReadError(f"{self.name} {why}")

    def same_axis(self, result: Tensor, *, shared: bool | None = None) -> Batched:
        """The result as a `Batched`; its first axis must still be that of the examples."""
        # Recognised by its size, a prime that no other axis has.
        rows = isinstance(result, Tensor) and result.dim() > 0 and result.shape[0] == BATCH
        self.need(rows, "does not keep a row for each example")
        return Batched(result, 0, self.shared if shared is None else shared)

    def dims(self, position: int = 1, name: str = "dim", default: Any = None) -> list[int]:
        """Dimensions that are given as one number, as several, or as all remaining arguments.

        The examples' dimension must not be among them.
        """
        # `flip(x, 1, 2)` and `flip(x, dims=(1, 2))` are one call.
        argument = self.argument(position, name, default)
        if isinstance(argument, int) and len(self.args) > position + 1 and name == "dims":
            argument = self.args[position:]
        numbers = [argument] if isinstance(argument, int) else argument
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
