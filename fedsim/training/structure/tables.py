"""Which functions, methods and modules have a batch rule: what is in no table is not known.

A wrong entry would let a row hold another example's gradient, so that a table names what acts on
each example by itself *whatever its arguments*; where arguments matter, the rule looks at them.
Modules are known by their very type: a subclass may do anything, and is read inside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedsim.training.structure.functions import (
    Rule,
    along,
    attention,
    attribute,
    einsum,
    elementwise,
    embedding,
    expand,
    flatten,
    getitem,
    image,
    layer_norm,
    loss_of_each,
    matmul,
    new,
    norm,
    one_hot,
    pad,
    permute,
    reduction,
    reshape,
    rows,
    size,
    together,
    transpose,
    unflatten,
    unsqueeze,
    within,
)
from fedsim.training.structure.values import Batched, Fixed, NodeCall


def _each(names: Iterable[str] | str, rule: Rule) -> dict[str, Rule]:
    """The rule for each of some names, apart by spaces."""
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
    **_each(("softmax", "log_softmax", "cumsum", "cumprod", "unbind"), along()),
    **_each(("sort", "argsort"), along(default=-1)),
    **_each(("chunk", "split", "tensor_split"), along(position=2)),
    **_each(("select", "narrow", "index_select", "squeeze"), along()),
    **_each(("flip",), along(name="dims")),
    "topk": along(default=-1, position=2),
    "roll": along(position=2, name="dims"),
    "norm": norm,
    "flatten": flatten,
    "unflatten": unflatten,
    "reshape": reshape,
    "unsqueeze": unsqueeze,
    "transpose": transpose,
    "swapaxes": transpose,
    "permute": permute,
    "matmul": matmul,
    "bmm": matmul,
    **_each(("cat", "stack", "concat"), together),
    **_each(("triu", "tril"), within),
}
"""Of torch's functions and of tensors' methods alike."""

# As a constant before a value of the graph calls them.
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
    **_each(("new_zeros", "new_ones", "new_full"), new),
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
    F.softmax: along(),
    F.log_softmax: along(),
    F.normalize: along(default=1, position=2),
    F.glu: along(default=-1),
    F.pad: pad,
    F.one_hot: one_hot,
    F.scaled_dot_product_attention: attention,
    torch.linalg.vector_norm: norm,
    **{getattr(F, f"conv{n}d"): image(n + 2) for n in (1, 2, 3)},
    **{
        getattr(F, f"{kind}_pool{n}d"): image(n + 2)
        for kind in ("avg", "adaptive_avg")
        for n in (1, 2, 3)
    },
    **{getattr(F, f"max_pool{n}d"): image(n + 2) for n in (1, 2, 3)},
    **{
        getattr(F, name): loss_of_each(classes=True)
        for name in ("cross_entropy", "nll_loss", "multi_margin_loss")
    },
    **{getattr(F, name): loss_of_each(classes=False) for name in _OF_NUMBERS.split()},
}


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module is what torch made it, and does nothing that was hung on or put into it."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(module)
        and not has_hooks(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called before or after the module."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a module, None where none is known."""
    if not all(is_torchs_own(part) for part in module.modules()):
        return None
    make = MODULES.get(type(module))
    return None if make is None else make(module)


def _flatten(module: Any) -> Rule:
    def rule(call: NodeCall) -> Batched:
        rank = call.first.like.dim()
        call.need(module.start_dim % rank != 0, "puts examples beside each other")
        return call.same_axis(call.results)

    return rule


def _along_dim(module: Any) -> Rule:
    def rule(call: NodeCall) -> Batched:
        rank = call.first.like.dim()
        call.need(module.dim is not None and module.dim % rank != 0, "goes through the examples")
        return call.same_axis(call.results)

    return rule


def _prelu(module: Any) -> Rule:
    return rows(2 if module.num_parameters > 1 else 1)


def _pooling(rank: int) -> Any:
    def make(module: Any) -> Rule | None:
        return None if getattr(module, "return_indices", False) else image(rank)

    return make


def _layer_norm(module: Any) -> Rule:
    return rows(len(module.normalized_shape) + 1)


def _instance_norm(rank: int) -> Any:
    def make(module: Any) -> Rule | None:
        # Running statistics are buffers: each example would change the next one's result.
        return None if module.track_running_stats else image(rank)

    return make


def _embedding(module: Any) -> Rule | None:
    # `max_norm` rewrites the rows of the table that a batch uses, `scale_grad_by_freq` counts them
    # over the batch.
    writes = module.max_norm is not None
    return None if writes or module.scale_grad_by_freq or module.sparse else rows(1)


def _bag(module: Any) -> Rule | None:
    return None if _embedding(module) is None else image(2)


def _recurrent(module: Any) -> Rule | None:
    # Else examples are the second axis, which the other rules do not take.
    if not module.batch_first:
        return None

    def rule(call: NodeCall) -> Any:
        call.need(len(call.values) == 1, "is given more than sequences")
        call.need(call.first.like.dim() == 3, "is given no batch of sequences")
        outputs, state = call.results
        hidden = tuple(Batched(s, 1) for s in (state if isinstance(state, tuple) else (state,)))
        return call.same_axis(outputs), hidden if isinstance(state, tuple) else hidden[0]

    return rule


def _attention(module: Any) -> Rule | None:
    if not module.batch_first:
        return None

    def rule(call: NodeCall) -> Any:
        names = ("query", "key", "value")
        given = [call.argument(i, name) for i, name in enumerate(names)]
        right = all(isinstance(g, Batched) and not g.axis and g.like.dim() == 3 for g in given)
        call.need(right, "is given no batches of sequences")
        _masks(call, key=("key_padding_mask", 3), attention=("attn_mask", 5))
        outputs, weights = call.results
        return call.same_axis(outputs), None if weights is None else call.same_axis(weights)

    return rule


def _encoder_layer(module: Any) -> Rule | None:
    if not module.self_attn.batch_first or module.activation not in (F.relu, F.gelu):
        return None

    def rule(call: NodeCall) -> Batched:
        call.need(call.first.like.dim() == 3, "is given no batch of sequences")
        _masks(call, key=("src_key_padding_mask", 2), attention=("src_mask", 1))
        return call.same_axis(call.results)

    return rule


def _masks(call: NodeCall, *, key: tuple[str, int], attention: tuple[str, int]) -> None:
    """A mask of an example's positions, and one of pairs of positions, the same for all."""
    own = call.argument(key[1], key[0])
    call.need(own is None or (isinstance(own, Batched) and not own.axis), "has an unknown mask")
    shared = call.argument(attention[1], attention[0])
    fixed = isinstance(shared, Fixed) and shared.like.dim() == 2
    call.need(shared is None or fixed, "has an unknown mask")


def _always(rule: Rule) -> Any:
    return lambda module: rule


_ACTIVATION_MODULES = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold,
    nn.Dropout, nn.AlphaDropout, nn.RReLU,
)  # fmt: skip


def _of_images(rank: int) -> tuple[Any, ...]:
    """Classes whose batch is ``[B, C, ...]`` of so many dimensions."""
    kinds = (
        "Conv{n}d ConvTranspose{n}d AvgPool{n}d AdaptiveAvgPool{n}d Dropout{n}d ZeroPad{n}d "
        "ConstantPad{n}d ReflectionPad{n}d ReplicationPad{n}d CircularPad{n}d"
    )
    return tuple(getattr(nn, name) for name in kinds.format(n=rank - 2).split())


MODULES: dict[type[nn.Module], Any] = {
    **dict.fromkeys(_ACTIVATION_MODULES, _always(elementwise)),
    **{kind: _always(image(rank)) for rank in (3, 4, 5) for kind in _of_images(rank)},
    **{
        getattr(nn, f"{kind}{rank - 2}d"): _pooling(rank)
        for rank in (3, 4, 5)
        for kind in ("MaxPool", "AdaptiveMaxPool")
    },
    **{getattr(nn, f"InstanceNorm{rank - 2}d"): _instance_norm(rank) for rank in (3, 4, 5)},
    nn.Linear: _always(rows(2)),
    nn.Flatten: _flatten,
    nn.Softmax: _along_dim,
    nn.LogSoftmax: _along_dim,
    nn.Softmin: _along_dim,
    nn.GLU: _along_dim,
    nn.Unflatten: _along_dim,
    nn.PReLU: _prelu,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    nn.GroupNorm: _always(rows(2)),
    nn.LocalResponseNorm: _always(rows(3)),
    nn.PixelShuffle: _always(image(4)),
    nn.PixelUnshuffle: _always(image(4)),
    nn.Upsample: _always(rows(3)),
    nn.Unfold: _always(image(4)),
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _bag,
    nn.RNN: _recurrent,
    nn.GRU: _recurrent,
    nn.LSTM: _recurrent,
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
}
