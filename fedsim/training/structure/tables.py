"""Which functions, methods and modules have a batch rule: whatever is in no table is refused.

A wrong entry would let a row contain another example's gradient. So a table lists only what treats
each example by itself *whatever its arguments*; where arguments matter, the rule checks them.
Modules are known by their exact type: a subclass may do anything, and its own forward is read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedsim.models.modules import is_torchs_own
from fedsim.models.normalization import FixedBatchNorm
from fedsim.training.structure.functions import (
    Rule,
    attention,
    attribute,
    concatenation,
    dimension_rule,
    einsum,
    elementwise,
    embedding,
    expand,
    filled,
    getitem,
    images,
    layer_norm,
    loss_of_each,
    matmul,
    one_hot,
    pad,
    permute,
    reduction,
    reshape,
    rows,
    size,
    transpose,
    unsqueeze,
)
from fedsim.training.structure.values import Batched, Fixed, NodeCall, leads


def _each(names: Iterable[str] | str, rule: Rule) -> dict[str, Rule]:
    """One rule for each of some names, which are a list or separated by spaces."""
    return dict.fromkeys(names.split() if isinstance(names, str) else names, rule)


_ELEMENTWISE = (
    "abs neg exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sin cos tan sinh "
    "cosh asin acos atan asinh acosh atanh tanh sigmoid relu erf erfc floor ceil round "
    "trunc frac sign clamp clip nan_to_num isnan isinf isfinite logit add sub subtract "
    "mul multiply div divide true_divide floor_divide pow fmod remainder maximum minimum "
    "where lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logical_xor "
    "logical_not bitwise_and bitwise_or bitwise_not atan2 hypot xlogy logaddexp "
    "masked_fill zeros_like ones_like full_like selu celu dropout deg2rad rad2deg sinc "
    "heaviside fmax fmin"
)
_METHODS_ONLY = (
    "contiguous clone detach to float double half bool long int type_as relu_ add_ mul_ "
    "sub_ div_ clamp_ tanh_ sigmoid_ exp_ neg_ masked_fill_ square_ sqrt_ log_ abs_ pow_"
)
_REDUCTIONS = (
    "sum mean amax amin max min prod logsumexp var std argmax argmin any all nansum nanmean median"
)

NAMED: dict[str, Rule] = {
    **_each(_ELEMENTWISE, elementwise),
    **_each(_REDUCTIONS, reduction),
    **_each(("softmax", "log_softmax", "cumsum", "cumprod", "unbind"), dimension_rule()),
    **_each(("sort", "argsort"), dimension_rule(default=-1)),
    **_each(("chunk", "split", "tensor_split"), dimension_rule(position=2)),
    **_each(("select", "narrow", "index_select", "squeeze"), dimension_rule()),
    **_each(("flip",), dimension_rule(name="dims")),
    "topk": dimension_rule(default=-1, position=2),
    "roll": dimension_rule(position=2, name="dims"),
    "norm": dimension_rule(position=2),
    "flatten": dimension_rule(default=0, name="start_dim"),
    "unflatten": dimension_rule(),
    "reshape": reshape,
    "unsqueeze": unsqueeze,
    "transpose": transpose,
    "swapaxes": transpose,
    "permute": permute,
    "matmul": matmul,
    "bmm": matmul,
    **_each(("cat", "stack", "concat"), concatenation),
    **_each(("triu", "tril"), rows(3)),  # of each matrix
}
"""Rules by the names that torch's functions and tensors' methods have in common."""

# Operators call these where a constant comes before a value of the graph.
_DUNDERS = (
    "add radd sub rsub mul rmul truediv rtruediv div rdiv pow rpow mod rmod eq ne lt le gt ge and "
    "or xor"
)

METHODS: dict[str, Rule] = {
    **NAMED,
    **{f"__{name}__": elementwise for name in _DUNDERS.split()},
    "__matmul__": matmul,
    "__getitem__": getitem,
    **_each(_METHODS_ONLY, elementwise),
    "view": reshape,
    "expand": expand,
    "size": size,
    **_each(("new_zeros", "new_ones", "new_full"), filled),
}

_ACTIVATIONS = (
    "relu relu6 gelu silu elu selu celu leaky_relu softplus softsign logsigmoid hardtanh "
    "hardswish hardsigmoid mish sigmoid tanh tanhshrink softshrink hardshrink threshold "
    "dropout alpha_dropout"
)

_OPERATORS = (
    "add sub mul truediv floordiv mod pow neg pos abs invert and_ or_ xor eq ne lt le gt ge"
)
_OF_NUMBERS = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div "
    "binary_cross_entropy_with_logits poisson_nll_loss soft_margin_loss"
)

FUNCTIONS: dict[Any, Rule] = {
    **{getattr(torch, name): rule for name, rule in NAMED.items() if hasattr(torch, name)},
    **{getattr(F, name): elementwise for name in _ACTIVATIONS.split()},
    **{getattr(operator, name): elementwise for name in _OPERATORS.split()},
    operator.matmul: matmul,
    operator.getitem: getitem,
    getattr: attribute,
    torch.einsum: einsum,
    F.linear: rows(2),
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.rms_norm: layer_norm,
    F.group_norm: rows(2),
    F.softmax: dimension_rule(),
    F.log_softmax: dimension_rule(),
    F.normalize: dimension_rule(default=1, position=2),
    F.glu: dimension_rule(default=-1),
    F.pad: pad,
    F.one_hot: one_hot,
    F.scaled_dot_product_attention: attention,
    torch.linalg.vector_norm: dimension_rule(position=2),
    **{
        getattr(F, f"{kind}{n}d"): images(n)
        for kind in ("conv", "avg_pool", "adaptive_avg_pool", "max_pool")
        for n in (1, 2, 3)
    },
    **{
        getattr(F, name): loss_of_each(classes=True)
        for name in ("cross_entropy", "nll_loss", "multi_margin_loss")
    },
    **{getattr(F, name): loss_of_each(classes=False) for name in _OF_NUMBERS.split()},
}


BY_EXAMPLE = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Linear,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.Flatten,
    nn.Identity,
    FixedBatchNorm,
)
"""Modules whose output for an example is a function of that example alone, without random draws."""


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a module; None if none is known."""
    kind = type(module)
    if not all(is_torchs_own(part) for part in module.modules()):
        return None
    condition = CONDITIONS.get(kind)
    return MODULES.get(kind) if condition is None or condition(module) else None


def prelu(call: NodeCall) -> Batched:
    """PReLU, with one slope for all numbers or one for each channel."""
    return rows(2 if call.argument(1, "num_parameters") > 1 else 1)(call)


def recurrent(call: NodeCall) -> Any:
    """Sequences, from a hidden state of zeros; the last hidden state has examples on axis 1."""
    call.need(len(call.values) == 1, "is given more than sequences")
    call.need(call.first.like.dim() == 3, "is given no batch of sequences")
    outputs, state = call.results
    if isinstance(state, tuple):
        return call.same_axis(outputs), tuple(Batched(hidden, 1) for hidden in state)
    return call.same_axis(outputs), Batched(state, 1)


def multihead_attention(call: NodeCall) -> Any:
    """Attention within each example's sequence."""
    tensors = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    are_sequences = all(leads(value) and value.like.dim() == 3 for value in tensors)
    call.need(are_sequences, "is given no batches of sequences")
    _masks(call, key=("key_padding_mask", 3), attention=("attn_mask", 5))
    outputs, weights = call.results
    return call.same_axis(outputs), None if weights is None else call.same_axis(weights)


def encoder_layer(call: NodeCall) -> Batched:
    """A transformer layer within each example's sequence."""
    call.need(call.first.like.dim() == 3, "is given no batch of sequences")
    _masks(call, key=("src_key_padding_mask", 2), attention=("src_mask", 1))
    return call.same_axis(call.results)


def _masks(call: NodeCall, *, key: tuple[str, int], attention: tuple[str, int]) -> None:
    """Check the masks: of an example's own positions, and of pairs of positions, one for all."""
    key_mask = call.argument(key[1], key[0])
    call.need(key_mask is None or leads(key_mask), "has an unknown mask")
    attention_mask = call.argument(attention[1], attention[0])
    fixed = isinstance(attention_mask, Fixed) and attention_mask.like.dim() == 2
    call.need(attention_mask is None or fixed, "has an unknown mask")


_ACTIVATION_MODULES = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.LogSigmoid,
    nn.Tanhshrink,
    nn.Softshrink,
    nn.Hardshrink,
    nn.Threshold,
    nn.Dropout,
    nn.AlphaDropout,
    nn.RReLU,
)


def _by_axes(kinds: str, axes: int) -> list[Any]:
    """Module classes for images with so many axes, by names such as ``Conv{n}d``."""
    return [getattr(nn, kind.format(n=axes)) for kind in kinds.split()]


_IMAGES = (
    "Conv{n}d ConvTranspose{n}d AvgPool{n}d AdaptiveAvgPool{n}d Dropout{n}d ZeroPad{n}d "
    "ConstantPad{n}d ReflectionPad{n}d ReplicationPad{n}d CircularPad{n}d"
)
_MAXIMA, _INSTANCES = "MaxPool{n}d AdaptiveMaxPool{n}d", "InstanceNorm{n}d"

MODULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys(_ACTIVATION_MODULES, elementwise),
    **{
        kind: images(axes)
        for axes in (1, 2, 3)
        for kind in _by_axes(f"{_IMAGES} {_MAXIMA} {_INSTANCES}", axes)
    },
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle, nn.Unfold), images(2)),
    **dict.fromkeys((nn.Linear, nn.GroupNorm), rows(2)),
    **dict.fromkeys((nn.LocalResponseNorm, nn.Upsample), rows(3)),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), layer_norm),
    **dict.fromkeys(
        (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.Unflatten), dimension_rule()
    ),
    nn.Flatten: dimension_rule(name="start_dim"),
    nn.PReLU: prelu,
    nn.Embedding: rows(1),
    nn.EmbeddingBag: rows(2, exactly=True),
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), recurrent),
    nn.MultiheadAttention: multihead_attention,
    nn.TransformerEncoderLayer: encoder_layer,
}


def _only_reads(table: Any) -> bool:
    # `max_norm` rewrites the rows of the table that a batch uses, `scale_grad_by_freq` counts them
    # over the batch.
    return table.max_norm is None and not (table.scale_grad_by_freq or table.sparse)


CONDITIONS: dict[type[nn.Module], Callable[[Any], bool]] = {
    # Running statistics are buffers: each example would change the next one's result.
    **{
        kind: lambda norm: not norm.track_running_stats
        for axes in (1, 2, 3)
        for kind in _by_axes(_INSTANCES, axes)
    },
    **{
        kind: lambda pool: not pool.return_indices
        for axes in (1, 2, 3)
        for kind in _by_axes(_MAXIMA, axes)
    },
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag), _only_reads),
    # Without it examples are on the second axis, which the other rules do not take.
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention), lambda m: m.batch_first),
    nn.TransformerEncoderLayer: lambda layer: (
        layer.self_attn.batch_first and layer.activation in (F.relu, F.gelu)
    ),
}
"""Conditions on a module's settings: if they are not met, its rule does not apply."""
