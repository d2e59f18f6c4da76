"""Which functions and methods have a batch rule, and which: what is in no table is not believed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

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

__all__ = ["FUNCTIONS", "METHODS"]


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
