"""Reads the `torch.fx` graphs of a model and a loss, without running either on numbers.

A graph is accepted if each of its nodes is listed as one that treats every example of a batch by
itself, with the shapes that it has there (`fedsim.training.structure.tables`). A forward that
branches on values or on the number of examples has no graph. What runs afterwards is the graph that
was read, never the code that it was read from. So batches may be padded, and per-example gradients
may be taken from one pass over all examples. Whatever could not be read gets real batches only, or
one example at a time.

Everything rests on three points. Values are followed while torch traces, on the device ``meta``, so
that a rule knows the shapes of its node, and which axis holds the examples (`_Tracer`). Whatever
the trace cannot see is refused before it or after it: hooks, random draws outside the graph,
switched gradients, parameters that the graph does not use. And the number of examples is a symbol
to the code (`BatchSize`): it may be passed on as a size, and no arithmetic with it has a rule.

No memory connects one call of a graph with another. A node writes to nothing but what the graph has
made from examples (`apply_rule`), and reads nothing but inputs, parameters, buffers and constants
that the code itself makes from numbers (`_Constants`), which are copied into the graph. A tensor of
a global, of a closure, or in an attribute that is no buffer could be written to by anybody.
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from fedsim.models.modules import has_hooks, is_torchs_own
from fedsim.named_tensors import by_name, without_names
from fedsim.tasks.losses import ExampleLoss, Loss
from fedsim.training.structure.functions import apply_rule
from fedsim.training.structure.tables import FUNCTIONS, METHODS, rule_of
from fedsim.training.structure.values import (
    BATCH,
    Batched,
    Fixed,
    NodeCall,
    NotReadError,
    Pair,
    leads,
    module_on_meta,
    on_meta,
)


@dataclass(frozen=True)
class Structure:
    """The graph that was read of a model.

    Attributes
    ----------
    module : GraphModule
        Runs the graph, with the model's own parameters. Each node's ``meta`` has its ``"value"``:
        `Batched`, `Fixed` or a container of them.
    outputs : Batched
        Shape of its outputs.
    """

    module: fx.GraphModule
    outputs: Batched

    def same(self, other: Structure) -> bool:
        """Whether both graphs have the same code."""
        return self.module.code == other.module.code


@dataclass(frozen=True)
class Reading:
    """What was read of a model and its loss.

    Attributes
    ----------
    model : Structure or None
        The model's graph; None if it may look across a batch.
    loss : callable or None
        The loss to call; None if it may look across a batch.
    targets : Tensor
        A tensor with the targets' shape and dtype.
    why : str
        What could not be read, and why.
    """

    model: Structure | None
    loss: Loss | None
    targets: Tensor
    why: str = ""

    @property
    def structure(self) -> Structure | None:
        """The model's graph, if neither the model nor the loss looks across a batch."""
        return None if self.loss is None else self.model

    def reads(self, function: Loss) -> bool:
        """Whether a function of outputs and targets, such as a metric, treats examples singly."""
        if self.model is None:
            return False
        try:
            return _is_own(function) or bool(_read_loss(function, self.model.outputs, self.targets))
        except NotReadError:
            return False


def read(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, *, declared: bool = False) -> Reading:
    """Read a model and its loss.

    Parameters
    ----------
    model : nn.Module
        In the mode (training or evaluation) that it is read for; not changed.
    loss : callable
        fedsim's own losses are known; any other is read as a model is.
    x, y : Tensor ``[1 or more, ...]``
        Inputs (one, or several by name) and targets, of which only shapes and dtypes matter.
    declared : bool
        Whether to trust what a loss declares by an attribute ``across_batch``.
    """
    structure: Structure | None = None
    try:
        structure = _read_model(model, by_name(_of_batch, x), x.device)
    except NotReadError as error:
        return Reading(None, None, y, f"the model's {error}")
    across = getattr(loss, "across_batch", None)
    if declared and across is not None:
        return Reading(structure, None if across else loss, y, "the loss says so" if across else "")
    if _is_own(loss):
        return Reading(structure, loss, y)
    try:
        return Reading(structure, _read_loss(loss, structure.outputs, y), y)
    except NotReadError as error:
        return Reading(structure, None, y, f"the loss's {error}")


def _is_own(loss: Loss) -> bool:
    is_shipped = type(loss).__module__ == "fedsim.tasks.losses"
    return isinstance(loss, ExampleLoss) and is_shipped


def _of_batch(tensor: Tensor) -> Batched:
    return Batched(torch.empty((BATCH, *tensor.shape[1:]), dtype=tensor.dtype, device="meta"))


def _read_model(
    model: nn.Module, x: Batched | dict[str, Batched], device: torch.device
) -> Structure:
    parameters = dict(model.named_parameters())
    # A copy with the same parameters: a forward may write to attributes while it is traced.
    copied = without_names(copy.deepcopy(model, {id(p): p for p in parameters.values()}))
    for name, module in copied.named_modules():
        if has_hooks(module):
            raise NotReadError(f"module '{name}' has hooks, which are not in a graph")
        if not module.training:
            _keep_off(name, module)
    if isinstance(x, dict) and (missing := x.keys() - signature(model.forward).parameters.keys()):
        raise NotReadError(f"forward does not name its input '{min(missing)}'")
    graph, outputs = _traced(copied, x if isinstance(x, dict) else [x], device)
    if isinstance(x, dict):
        _take_by_name(graph, x)
    module = fx.GraphModule(copied, graph)
    used_names = {name for name, _ in module.named_parameters()}
    # A row would have entries without a gradient.
    unused_names = [n for n, p in parameters.items() if p.requires_grad and n not in used_names]
    if unused_names:
        raise NotReadError(f"parameter '{unused_names[0]}' is not used")
    return Structure(module.train(model.training), outputs)


def _keep_off(name: str, module: nn.Module) -> None:
    """Write into a module that it drops nothing, as by its mode: a graph's modules change theirs.

    A model may leave some of its modules in evaluation mode while it trains, by a ``train`` of its
    own.
    """
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        module.dropout = 0.0
    elif isinstance(module, nn.RReLU):
        raise NotReadError(f"module '{name}' stays in evaluation mode")


def _take_by_name(graph: fx.Graph, inputs: dict[str, Batched]) -> None:
    """Give the graph one input, `NamedTensors`, of which it takes those of its own by name."""
    nodes = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    with graph.inserting_before(next(iter(graph.nodes))):
        whole = graph.placeholder("named_inputs")
        whole.meta["value"] = inputs
    after = whole
    for name in inputs:
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (whole, name))
        after.meta["value"] = inputs[name]
        nodes[name].replace_all_uses_with(after)
        graph.erase_node(nodes[name])
    # A node that is taken may stand before a placeholder of an argument with a default.
    for node in [node for node in graph.nodes if node.op == "placeholder" and node is not whole]:
        whole.append(node)


def _read_loss(loss: Loss, outputs: Batched, y: Tensor) -> Loss:
    root = _LossModule(copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss)
    graph, losses = _traced(root, [outputs, _of_batch(y)], y.device)
    if losses.like.dim() != 1:
        raise NotReadError("result is not one number for each example")
    return fx.GraphModule(root, graph)


class _LossModule(nn.Module):
    """A loss as a module, which can be traced."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)


def _traced(
    root: nn.Module, inputs: list[Batched] | dict[str, Batched], device: torch.device
) -> tuple[fx.Graph, Batched]:
    """The graph of a module, and the abstract value of its result."""
    tracer = _Tracer(inputs, device)
    random_state = torch.get_rng_state()
    before = _bytes(random_state)
    try:
        with torch.enable_grad(), _sizes_by_len(), tracer.constants:
            graph = tracer.trace(root)
    except NotReadError:
        raise
    except (Exception, SystemExit) as error:  # a user's code, given no tensors
        lines = str(error).strip().splitlines() or [""]
        raise NotReadError(f"code has no graph ({type(error).__name__}: {lines[0]})") from error
    finally:
        has_drawn = before != _bytes(torch.get_rng_state())
        if has_drawn:
            torch.set_rng_state(random_state)
    # A number drawn while a graph is traced is a constant in it: each step would repeat it.
    if has_drawn:
        raise NotReadError("code draws random numbers outside its graph")
    (output,) = (node for node in graph.nodes if node.op == "output")
    result = tracer.value(output.args[0])
    if not leads(result):
        raise NotReadError("result has no row for each example")
    graph._tracer_cls = _Unpickling
    return graph, result


class _Unpickling(fx.Tracer):
    """The tracer by which a pickled graph is restored."""

    proxy_buffer_attributes = True


def _bytes(tensor: Tensor) -> bytes:
    """A tensor's bytes, read without an operation of torch's, which might be intercepted."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


class _Tracer(fx.Tracer):
    """torch's tracer, which also computes the abstract value of each node when it is made."""

    def __init__(self, inputs: list[Batched] | dict[str, Batched], device: torch.device) -> None:
        super().__init__()
        # Buffers are nodes too, so that writing to one is seen as writing to something fixed.
        self.proxy_buffer_attributes = True
        self.device = device
        self._inputs = inputs if isinstance(inputs, dict) else iter(inputs)
        self._measuring = False
        self.constants = _Constants()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node: torch's own do, except containers and losses."""
        # They are traced into, so that what they call has nodes of its own.
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.modules.loss._Loss)
        return is_torchs_own(m) and not isinstance(m, containers)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy that knows its shape."""
        return _Proxy(node, self)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A node, whose value is computed before any code sees it."""
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        if kind in ("output", "get_attr"):
            return proxy
        # At once: the very next line of the code may ask for a shape.
        with self.constants.paused():
            value = proxy.node.meta["value"] = self._result(proxy.node)
        if kind == "placeholder" and value is None and proxy.node.args:
            return proxy.node.args[0]  # the forward's own default
        return self._unpacked(proxy, value)

    def _unpacked(self, proxy: Any, value: Any) -> Any:
        """A tuple value as a tuple of proxies, so that code can unpack it; others unchanged."""
        if not isinstance(value, tuple):
            return None if value is None else proxy
        entries = (self._unpacked(proxy[i], v) for i, v in enumerate(value))
        return Pair(*entries) if isinstance(value, Pair) else tuple(entries)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """As torch's, but without nodes for a module's inner calls while shapes are computed."""
        if self._measuring:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """As torch's, but the real parameter while shapes are computed."""
        if self._measuring:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        """As torch's, but of the tensors that are no nodes it takes only those of `_Constants`."""
        if isinstance(a, Tensor) and not self._is_of_root(a):
            # A copy, that nobody else can write to. The graph's own is made at each use, since the
            # code may go on to change its own.
            with self.constants.paused():
                a = self.constants.required(a).detach().clone()
        return super().create_arg(a)

    def _is_of_root(self, tensor: Tensor) -> bool:
        named = (*self.root.parameters(), *self.root.buffers())
        return any(tensor is own for own in named)

    def value(self, argument: Any) -> Any:
        """An argument with its nodes replaced by their abstract values; constants unchanged."""
        return fx.node.map_aggregate(argument, self._value_of)

    def _value_of(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node.op == "get_attr" and "value" not in node.meta:
            with self.constants.paused():
                node.meta["value"] = Fixed(on_meta(_attribute(self.root, str(node.target))))
        return node.meta["value"]

    def _result(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            inputs = self._inputs
            if isinstance(inputs, dict):
                return inputs.get(str(node.target))
            return next(inputs, None)
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise NotReadError("code switches gradients or precision, which is not in a graph")
        args, kwargs = self.value(node.args), self.value(node.kwargs)
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            name = f"{type(module).__name__} '{node.target}'"
            if any(isinstance(v, Tensor) for part in module.modules() for v in vars(part).values()):
                raise NotReadError(f"{name} has a tensor that is neither parameter nor buffer")
            call = NodeCall(name, module_on_meta(module), args, kwargs, module)
            # The rule calls the module on meta to get the result's shape. What the module calls
            # inside must leave no nodes then.
            self._measuring = True
            try:
                return apply_rule(call, rule_of(module))
            finally:
                self._measuring = False
        if node.op == "call_method":
            name = str(node.target)
            method: Any = getattr(Tensor, name, None)
            return apply_rule(NodeCall(name, method, args, kwargs), METHODS.get(name))
        assert callable(node.target)
        name = getattr(node.target, "__name__", str(node.target))
        return apply_rule(NodeCall(name, node.target, args, kwargs), FUNCTIONS.get(node.target))


class _Constants(TorchFunctionMode):
    """Follows the tensors that code makes from numbers while it is traced.

    Any operation on another tensor, which was there before, is refused: nodes stand for inputs,
    parameters and buffers, and what is left comes from outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what the reader itself computes."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def required(self, tensor: Tensor) -> Tensor:
        """A tensor that the code has made.

        Raises
        ------
        NotReadError
            If it is another.
        """
        if self._made.get(id(tensor)) is tensor:
            return tensor
        raise NotReadError(
            f"code uses a tensor {list(tensor.shape)} that is neither input, parameter nor buffer"
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _leaves((args, kwargs))
        # What is made of nodes is a node, which has a rule.
        if self._paused or any(isinstance(value, fx.Proxy) for value in given):
            return func(*args, **kwargs)
        tensors = [value for value in given if isinstance(value, Tensor)]
        if any(value.is_meta for value in tensors):  # shapes of nodes, which have no numbers
            return func(*args, **kwargs)
        for tensor in tensors:
            self.required(tensor)
        result = func(*args, **kwargs)
        # Anything else might be memory in another form: a storage, an array of numpy's.
        if (tensors or func in _FACTORIES) and all(isinstance(v, _PLAIN) for v in given):
            self._made |= {id(v): v for v in _leaves(result) if isinstance(v, Tensor)}
        return result


_FACTORIES = (
    torch.tensor,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.eye,
    torch.arange,
    torch.linspace,
    torch.logspace,
    torch.as_tensor,
    torch.asarray,
)
_PLAIN = (
    Tensor,
    int,
    float,
    complex,
    str,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def _leaves(values: Any) -> list[Any]:
    """The values in tuples, lists, dictionaries and slices."""
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, slice):
        values = values.start, values.stop, values.step
    if isinstance(values, tuple | list):
        return [leaf for value in values for leaf in _leaves(value)]
    return [values]


class _Proxy(fx.Proxy):
    """A tensor of a graph that knows its shape, except the number of examples."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise NotReadError(f"code sets a tensor's '{name}', which is not in a graph")
        super().__setattr__(name, value)

    @property
    def shape(self) -> Any:
        value = self._tensor
        if isinstance(value, Fixed):
            return value.like.shape
        # A node and not a number: a number would fix the batch size in the graph.
        count = self.tracer.create_proxy("call_method", "size", (self, value.axis), {})
        return tuple(count if d == value.axis else n for d, n in enumerate(value.like.shape))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return int(self._tensor.like.dim())

    ndimension = dim

    @property
    def ndim(self) -> int:
        return self.dim()

    @property
    def device(self) -> torch.device:
        return self.tracer.device  # type: ignore[attr-defined,no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._tensor.like.dtype
        return dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def _tensor(self) -> Any:
        value = self.tracer.value(self.node)  # type: ignore[attr-defined]
        if not isinstance(value, Batched | Fixed):
            raise NotReadError("code asks for the shape of an object that is not a tensor")
        return value


def _attribute(root: nn.Module, name: str) -> Tensor:
    where, _, last = name.rpartition(".")
    module = root.get_submodule(where)
    # Not by getattr: while a model is traced, that gives a node.
    for place in (module._parameters, module._buffers, vars(module)):
        if isinstance(tensor := place.get(last), Tensor):
            return tensor
    raise NotReadError(f"'{name}' is not a tensor")


@contextmanager
def _sizes_by_len() -> Iterator[None]:
    """Make ``len(x)`` of a traced tensor ``x.shape[0]``; torch's own cannot be traced."""
    usual = builtins.len

    def length(value: Any) -> Any:
        return value.shape[0] if isinstance(value, _Proxy) else usual(value)

    # `len` is global to the process, so it is replaced only during a trace.
    builtins.len = length
    try:
        yield
    finally:
        builtins.len = usual
