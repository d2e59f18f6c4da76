"""Batch rules of functions and tensor methods: whether their results have a row for each example.

A rule takes a call with known arguments (`NodeCall`) and returns its result, or raises
`NotReadError`. What has no rule (`fedsim.training.structure.tables`) is refused.

Three errors are possible, and each rule must exclude them: that a result's row depends on another
example's row (sums over axis 0, broadcasting of examples against others), that rows change their
order (a reshape that does not begin with the number of examples, a transposition), and that
something is written to that examples have in common: a buffer, say, or a view of it
(`Batched.shared`). For the last one rules need do nothing: `apply_rule` sees what a call writes to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.training.structure.values import (
    SIZE,
    Batched,
    BatchSize,
    Fixed,
    NodeCall,
    batched_results,
    leads,
    memory,
)

Rule = Callable[[NodeCall], Any]


def apply_rule(call: NodeCall, rule: Rule | None) -> Any:
    """The result of a call, by its rule; a constant if no argument depends on examples.

    Raises
    ------
    NotReadError
    """
    if rule is None:
        raise call.unknown("is not known to act on each example by itself")
    sizes = sum(isinstance(value, BatchSize) for value in call.values)
    # Allowed once, as a size of the result: arithmetic with it could weigh or place examples.
    call.need(not sizes or (sizes == 1 and rule in SIZED), "reads the number of examples")
    if call.batched or sizes:
        result = rule(call)
    else:  # no argument depends on an example: the result is a constant, as a parameter is
        call.need(isinstance(call.results, Tensor), "gives no tensor")
        result = Fixed(call.results)
    _require_own_memory(call, rule)
    return result


def _require_own_memory(call: NodeCall, rule: Rule) -> None:
    """Refuse a call that writes to anything but its first argument's numbers of each example."""
    # Whatever is written to could be read by another example, or by the next call. What the graph
    # has made from examples, row for row, is theirs alone.
    call.need(call.kwargs.get("out") is None, "writes to its argument 'out'")
    # By its name too: dropout, say, writes only in training mode.
    named = call.name.endswith("_") and not call.name.endswith("__")
    named = named or bool(call.argument(len(call.args), "inplace", False))
    written = set() if rule in UNCALLED else call.written
    if not named and not written:
        return
    first = call.args[0] if call.args else call.kwargs.get("input")
    own: set[int] = set()
    if rule is elementwise and isinstance(first, Batched) and not first.shared:
        own.add(memory(first.like))
    call.need(bool(own) and written <= own, "writes to what is fixed")


def elementwise(call: NodeCall) -> Batched:
    """Functions whose every number depends only on the arguments' numbers at its own position."""
    result = call.results
    call.need(isinstance(result, Tensor), "gives no tensor")
    # Broadcasting aligns shapes from the right. A batch with as many dimensions as the result stays
    # aligned with its own examples. Something fixed with as many would have a different row for
    # each example, by its position, unless it has one row for all.
    rank = result.dim()
    for value in call.values:
        if isinstance(value, Batched):
            call.need(not value.axis and value.like.dim() == rank, "sets examples beside others")
        elif isinstance(value, Fixed):
            is_broadcast = value.like.dim() < rank or value.like.shape[0] == 1
            call.need(is_broadcast, "treats examples by their place in the batch")
    return call.same_axis(result)


def reduction(call: NodeCall) -> Any:
    """Reductions over named dimensions, none of them the examples'."""
    if isinstance(call.argument(1, "other"), Batched | Fixed):
        return elementwise(call)
    call.dims()
    return batched_results(call, call.results)


def dimension_rule(default: int | None = None, position: int = 1, name: str = "dim") -> Rule:
    """Rule of functions along named dimensions, none of them the examples' (`NodeCall.dims`)."""

    def rule(call: NodeCall) -> Any:
        call.dims(position, name, default)
        call.need(len(call.batched) == 1, "has more than one batch")
        return batched_results(call, call.results)

    return rule


def reshape(call: NodeCall) -> Batched:
    """Each example's numbers in another shape, in the same order."""
    call.need(call.first.axis == 0, "moves the examples")
    sizes = _sizes(call)
    # In row-major order an example's numbers stay together only behind a leading batch axis.
    leads = bool(sizes) and (isinstance(sizes[0], BatchSize) or sizes[0] == -1)
    call.need(leads, "does not begin with the number of examples")
    return call.same_axis(call.results)


def _sizes(call: NodeCall) -> tuple[Any, ...]:
    """Sizes that are given after the tensor, one by one or as one tuple."""
    sizes = call.args[1:] or tuple(call.kwargs.values())
    return tuple(sizes[0]) if sizes and isinstance(sizes[0], tuple | list) else sizes


def unsqueeze(call: NodeCall) -> Batched:
    """A new dimension, not before the first one."""
    rank, dim = call.first.like.dim(), call.argument(1, "dim")
    call.need(dim % (rank + 1) != 0, "moves the examples")
    return call.same_axis(call.results)


def permuted(call: NodeCall, order: list[int]) -> Batched:
    """Axes in another order; the examples' axis may move."""
    value = call.args[0]
    return Batched(call.results, order.index(value.axis), value.shared)


def transpose(call: NodeCall) -> Batched:
    """Two axes change places."""
    rank = call.args[0].like.dim()
    one, two = (d % rank for d in (call.argument(1, "dim0"), call.argument(2, "dim1")))
    order = list(range(rank))
    order[one], order[two] = two, one
    return permuted(call, order)


def permute(call: NodeCall) -> Batched:
    """All axes in a given order."""
    rank = call.args[0].like.dim()
    return permuted(call, [d % rank for d in _sizes(call)])


def attribute(call: NodeCall) -> Batched:
    """A tensor's ``mT`` or ``T``."""
    value, name = call.args
    rank = value.like.dim() if isinstance(value, Batched) else 0
    is_transpose = (name == "mT" and rank >= 2) or (name == "T" and rank == 2)
    call.need(is_transpose, f"of '{name}' is not known")
    return permuted(call, [*range(rank - 2), rank - 1, rank - 2])


def expand(call: NodeCall) -> Batched:
    """Copies of something fixed for each example, or of each example's own numbers."""
    sizes, value = _sizes(call), call.args[0]
    if isinstance(value, Fixed):
        has_one_row = value.like.dim() < len(sizes) or value.like.shape[0] == 1
        call.need(has_one_row and isinstance(sizes[0], BatchSize), "is not one for each example")
        return call.same_axis(call.results, shared=True)
    call.need(len(sizes) == call.first.like.dim(), "moves the examples")
    call.need(isinstance(sizes[0], BatchSize) or sizes[0] == -1, "is not one for each example")
    return call.same_axis(call.results)


def getitem(call: NodeCall) -> Any:
    """An item of a tuple, numbers at the same place of each example, or rows of a fixed table."""
    value, index = call.args
    if isinstance(value, tuple):
        return value[index]
    if isinstance(index, tuple) and len(index) == 1:  # torch 2.6 passes a tensor in this form
        index = index[0]
    if isinstance(value, Fixed):
        rows_of = leads(index) and index.like.dtype != torch.bool
        call.need(rows_of, "is not at a known place")
        return call.same_axis(call.results)
    places = index if isinstance(index, tuple) else (index,)
    if value.axis:  # the last layer's hidden state, say
        full_slice = slice(None)
        first = all(place == full_slice or isinstance(place, int) for place in places)
        call.need(first and len(places) <= value.axis, "moves the examples")
        axis = value.axis - sum(isinstance(place, int) for place in places)
        return Batched(call.results, axis, value.shared)
    # The first axis must be taken whole: by a full slice, or by an ellipsis for which the other
    # places leave at least that axis.
    covers = bool(places) and (places[0] is Ellipsis or places[0] == slice(None))
    if places and places[0] is Ellipsis:
        covers = sum(place is not None for place in places[1:]) < value.like.dim()
    call.need(covers, "takes examples by their place in the batch")
    constant = (int, slice, type(None), type(Ellipsis))
    are_constant = all(isinstance(p, constant) and not isinstance(p, BatchSize) for p in places)
    ends = [end for p in places if isinstance(p, slice) for end in (p.start, p.stop, p.step)]
    call.need(
        are_constant and not any(isinstance(end, BatchSize) for end in ends),
        "is not at a known place",
    )
    return call.same_axis(call.results)


def concatenation(call: NodeCall) -> Batched:
    """Batches joined along a dimension that is not the examples'."""
    tensors: Any = call.args[0] if call.args else call.kwargs.get("tensors")
    call.need(isinstance(tensors, tuple | list) and bool(tensors), "has no tensors")
    call.need(all(map(leads, tensors)), "puts examples beside something else")
    rank = tensors[0].like.dim() + (call.name == "stack")
    call.need(call.argument(1, "dim", 0) % rank != 0, "puts examples beside each other")
    return call.same_axis(call.results)


def matmul(call: NodeCall) -> Batched:
    """A matrix product that does not sum over examples."""
    left, right = call.args
    sides = [side.like.dim() if isinstance(side, Batched) else 0 for side in (left, right)]
    # A product sums over the last axis of one and the last but one of the other. From three
    # dimensions on, and for a table of two on the other side, neither is the examples'.
    straight = not any(side.axis for side in (left, right) if isinstance(side, Batched))
    call.need(straight, "sums over examples")
    if all(sides):
        call.need(sides[0] == sides[1] >= 3, "sums over examples")
    elif sides[0]:
        call.need(sides[0] >= 2 and right.like.dim() <= 2, "sets examples beside others")
    else:
        call.need(sides[1] >= 3 and left.like.dim() <= 2, "sums over examples")
    return call.same_axis(call.results)


def einsum(call: NodeCall) -> Batched:
    """An einsum that keeps the examples' axis first and does not sum over it."""
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    equation = equation.replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    call.need("->" in equation and "." not in equation, "is not written out")
    example = equation.partition("->")[2][:1]
    for term, operand in zip(terms, operands, strict=True):
        if isinstance(operand, Batched):
            is_by_example = not operand.axis and term[0] == example and term.count(example) == 1
            call.need(is_by_example, "sums over examples")
        else:
            call.need(example not in term, "takes examples by their place in the batch")
    return call.same_axis(call.results)


def rows(min_rank: int, *, exactly: bool = False) -> Callable[[NodeCall], Batched]:
    """Rule of functions of one batch with ``min_rank`` or more dimensions, and of fixed arguments.

    ``exactly`` so many where torch also takes a single example without a batch axis: the channels
    of an image, say, would pass for examples.
    """

    def rule(call: NodeCall) -> Batched:
        rank = call.first.like.dim()
        fits = rank == min_rank if exactly else rank >= min_rank
        call.need(fits, "is given no batch of such examples")
        call.need(len(call.batched) == 1, "has more than one batch")
        return call.same_axis(call.results)

    return rule


def images(axes: int) -> Rule:
    """Rule of functions of a batch ``[B, C, ...]`` of images with so many axes."""
    return rows(axes + 2, exactly=True)


def layer_norm(call: NodeCall) -> Batched:
    """Normalisation over the last dimensions, without the examples'."""
    return rows(len(call.argument(1, "normalized_shape")) + 1)(call)


def embedding(call: NodeCall) -> Batched:
    """Rows of a fixed table, by the numbers of an example."""
    call.need(isinstance(call.argument(1, "weight"), Fixed), "has a table that is not fixed")
    call.need(call.argument(3, "max_norm") is None, "writes to what is fixed")
    call.need(not call.argument(5, "scale_grad_by_freq", False), "weighs examples by each other")
    return call.same_axis(call.results)


def one_hot(call: NodeCall) -> Batched:
    """One-hot vectors for a given number of classes: else torch takes it from all examples."""
    classes, like = call.argument(1, "num_classes", -1), call.first.like
    call.need(classes > 0, "counts classes over the examples of a batch")
    return Batched(like.new_empty(*like.shape, classes))


def attention(call: NodeCall) -> Batched:
    """Attention within each example; a mask must be one for all."""
    queries = call.args[:3]
    right = len(queries) == 3 and all(map(leads, queries))
    ranks = {query.like.dim() for query in queries} if right else {0}
    right = right and len(ranks) == 1 and min(ranks) >= 3
    mask = call.argument(3, "attn_mask")
    fixed = mask is None or (isinstance(mask, Fixed) and mask.like.dim() == 2)
    call.need(right and fixed, "does not attend within each example")
    return call.same_axis(call.results)


def pad(call: NodeCall) -> Batched:
    """Padding of the last dimensions, without the examples'."""
    sizes, rank = call.argument(1, "pad"), call.first.like.dim()
    call.need(isinstance(sizes, tuple | list) and len(sizes) // 2 < rank, "pads the batch")
    # Other modes take a tensor with one dimension fewer as a single example without a batch axis.
    plain = call.argument(2, "mode", "constant") == "constant" or rank == len(sizes) // 2 + 2
    call.need(plain, "pads the batch")
    return call.same_axis(call.results)


def loss_of_each(classes: bool) -> Rule:
    """Rule of torch's losses, with ``reduction="none"``."""

    def rule(call: NodeCall) -> Batched:
        outputs, targets = call.argument(0, "input"), call.argument(1, "target")
        call.need(
            leads(outputs) and leads(targets), "does not compare examples with targets of their own"
        )
        call.need(call.kwargs.get("reduction") == "none", "gives one number for a batch")
        if classes:
            call.need(outputs.like.dim() >= 2, "is given one number for each example")
            call.need(len(call.batched) == 2, "is weighed by another batch")
            return call.same_axis(call.results)
        return elementwise(call)

    return rule


def filled(call: NodeCall) -> Batched:
    """A new tensor filled with one number, with a row for each example."""
    sizes = _sizes(call)
    call.need(bool(sizes) and isinstance(sizes[0], BatchSize), "is not one for each example")
    return call.same_axis(call.results, shared=False)


def size(call: NodeCall) -> Any:
    """The number of examples."""
    value = call.args[0]
    call.need(call.argument(1, "dim") == value.axis, "is not the number of examples")
    return SIZE


SIZED = (reshape, expand, filled)
"""Rules of the functions that may be given the number of examples."""

UNCALLED = (one_hot, size, getitem)
"""Rules of functions that only read, which are not called on meta or may have no tensors."""
