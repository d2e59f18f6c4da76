"""Batch rules of torch's modules, by their very type: a subclass of one is read inside."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from fedsim.training.structure.functions import Rule, elementwise, image, rows
from fedsim.training.structure.values import Batched, Fixed, NodeCall

__all__ = ["MODULES", "is_torchs_own", "rule_of"]


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
        return None if module.track_running_stats else image(rank)

    return make


def _embedding(module: Any) -> Rule | None:
    writes = module.max_norm is not None
    return None if writes or module.scale_grad_by_freq or module.sparse else rows(1)


def _bag(module: Any) -> Rule | None:
    return None if _embedding(module) is None else image(2)


def _recurrent(module: Any) -> Rule | None:
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


_ACTIVATIONS = (
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
    **dict.fromkeys(_ACTIVATIONS, _always(elementwise)),
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
