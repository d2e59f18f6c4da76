"""A linear layer with a low-rank adapter: insert it into a model, and merge it into the weight.

A linear layer is torch's `nn.Linear`, or the `Conv1D` of Hugging Face's GPT-2, which computes the
same from a transposed weight. An adapter of a layer in half precision is in float32, as in peft:
of the small steps that train it, little would be left in bfloat16.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.errors import FedsimError
from fedsim.models.modules import has_hooks
from fedsim.named_tensors import each
from fedsim.randomness import Purpose, Randomness

FACTORS = ("lora_A", "lora_B")


class LowRankLinear(nn.Module):
    """``base_layer(x) + scaling * lora_B(lora_A(x))``, with peft's names for its parts.

    It deliberately has no attribute ``weight``: code that multiplies by a layer's weight without
    calling the layer would silently leave out the adapter, and so fails instead.

    Parameters
    ----------
    base_layer : nn.Linear, or a `Conv1D` of transformers
        Frozen here.
    rank : int
    scaling : float
        Factor of the low-rank product.

    Notes
    -----
    The ``torch.fx`` graph of its forward consists of linear layers, a product with a constant and
    a sum, so that a model that can be analysed without adapters still can be with them.
    """

    def __init__(self, base_layer: nn.Module, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer, self.scaling = base_layer.requires_grad_(False), scaling
        self.out_features, self.in_features = _matrix(base_layer).shape
        # Layers on "meta" draw no initial weights, so that torch's global generator (which is the
        # user's) does not advance; `adapt` sets the weights.
        weight, meta = _matrix(base_layer), torch.device("meta")
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.converts = dtype != weight.dtype
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, dtype=dtype, device=meta)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, dtype=dtype, device=meta)
        for factor in (self.lora_A, self.lora_B):
            factor.to_empty(device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``."""
        base: Tensor = self.base_layer(x)
        if self.converts:
            x = x.to(torch.float32)
        outputs: Tensor = base + self.lora_B(self.lora_A(x)) * self.scaling
        return outputs.to(base.dtype) if self.converts else outputs

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """The base layer, with the adapter added to its weight (computed in float64)."""
        weight = _matrix(self.base_layer)
        product = self.lora_B.weight.double() @ self.lora_A.weight.double()
        weight.copy_(weight.double() + self.scaling * product)
        self.base_layer.get_parameter("weight").requires_grad_(True)
        return self.base_layer


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is a `Conv1D` of transformers, which need not be imported."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _matrix(layer: nn.Module) -> Tensor:
    """The weight ``[outputs, inputs]`` of a linear layer, a view of its own memory."""
    weight = layer.get_parameter("weight").detach()
    return weight.T if is_conv1d(layer) else weight


def adapt(
    model: nn.Module, targets: str, rank: int, scaling: float, seed: int, *, frozen_a: bool
) -> nn.Module:
    """Insert adapters into a model, in place, and freeze all other parameters.

    Parameters
    ----------
    model : nn.Module
    targets : str
        Shell patterns of names of linear layers, separated by commas.
    rank : int
    scaling : float
        Factor of the low-rank product.
    seed : int
        Seed of the initial A factors.
    frozen_a : bool
        Whether the A factors are not trained.

    Raises
    ------
    FedsimError
        If the targets or the rank do not fit the model, which is then unchanged.
    """
    refuse_adapted(model)
    layers = _targets(targets, model)
    for name, layer in layers.items():
        outputs, inputs = _matrix(layer).shape
        if rank > min(inputs, outputs):
            raise FedsimError(
                f"adapter.rank = {rank}; it must be at most {min(inputs, outputs)}, the smaller "
                f"side of '{name}' ({inputs} inputs, {outputs} outputs), or "
                "adapter.targets must leave that layer out."
            )
    model.requires_grad_(False)
    draws = Randomness(seed).generator(Purpose.INIT, level="run", part=1)
    half: torch.dtype | None = None
    for name, layer in layers.items():
        adapter = LowRankLinear(layer, rank, scaling)
        edge = 1 / math.sqrt(adapter.in_features)
        values = draws.uniform(-edge, edge, (rank, adapter.in_features)).astype("float32")
        with torch.no_grad():
            adapter.lora_A.weight.copy_(torch.from_numpy(values))
            adapter.lora_B.weight.zero_()
        adapter.lora_A.weight.requires_grad_(not frozen_a)
        _replace(model, name, adapter.train(layer.training))
        if adapter.converts:
            half = adapter.base_layer.get_parameter("weight").dtype
    if half is not None:
        model.register_forward_pre_hook(partial(_convert_inputs, half), with_kwargs=True)
        model.register_forward_hook(_convert_outputs)
    return model


def _convert_inputs(
    half: torch.dtype, model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Floating-point inputs of a model in half precision, in that: data are in float32."""
    converted = tuple(each(partial(_as, half), value) for value in inputs)
    return converted, {name: _as(half, value) for name, value in keywords.items()}


def _convert_outputs(model: nn.Module, inputs: object, outputs: Any) -> Any:
    """Outputs in float32, so that the loss is computed in it."""
    return _as(torch.float32, outputs)


def _as(dtype: torch.dtype, value: Any) -> Any:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def merge(model: nn.Module) -> nn.Module:
    """Merge a model's adapters into their layers' weights, in place.

    Raises
    ------
    FedsimError
        If there are none.
    """
    adapters = low_rank_layers(model)
    if not adapters:
        raise FedsimError("the model has no adapter to merge.")
    for name, adapter in adapters.items():
        _replace(model, name, adapter.merged())
    return model


def low_rank_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    """The adapters of a model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LowRankLinear)}


def refuse_adapted(model: nn.Module) -> None:
    """Refuse a model that already has adapters, fedsim's or peft's.

    Raises
    ------
    FedsimError
    """
    for name, module in model.named_modules():
        if {*FACTORS} & {*name.split(".")} or isinstance(module, LowRankLinear):
            raise FedsimError(
                f"the model has an adapter already, at '{name}'; it must be merged, or "
                "adapter.name must be 'none'."
            )


def _targets(patterns: str, model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers that patterns match, by name, in the model's order.

    Raises
    ------
    FedsimError
        If a pattern matches none, or a layer that cannot be adapted.
    """
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    modules = dict(model.named_modules())
    linear = [
        name
        for name, module in modules.items()
        if name and (type(module) is nn.Linear or is_conv1d(module))
    ]
    names_or_patterns = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if not names_or_patterns or not linear:
        allowed = ", ".join(linear) or "none inside it"
        raise FedsimError(
            f"adapter.targets = '{patterns}'; it must name linear layers of the model, which has "
            f"{allowed}."
        )
    for pattern in names_or_patterns:
        if any(fnmatchcase(name, pattern) for name in linear):
            continue
        others = [name for name in modules if name and fnmatchcase(name, pattern)]
        matched = "no layer"
        if others:
            class_name = type(modules[others[0]]).__name__
            matched = f"'{others[0]}', a {class_name} and not an nn.Linear"
        raise FedsimError(
            f"adapter.targets has the pattern '{pattern}', which matches {matched}; the model's "
            f"linear layers are {', '.join(linear)}."
        )
    named = {n for n in linear if any(fnmatchcase(n, pattern) for pattern in names_or_patterns)}
    layers = {n: m for n, m in modules.items() if n in named}
    for name, layer in layers.items():
        if why := _obstacle(name, layer, places[id(layer)], model):
            raise FedsimError(f"adapter.targets names '{name}', {why}; it must leave that out.")
    return layers


def _obstacle(name: str, layer: nn.Module, places: list[str], model: nn.Module) -> str:
    """Why a linear layer cannot be adapted; empty if it can be."""
    if len(places) > 1:
        return f"which is also '{places[1]}' in the model"
    own_ids = {id(parameter) for parameter in layer.parameters()}
    prefix = f"{name}."
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own_ids and not other.startswith(prefix):
            return f"whose weight is tied to '{other}'"
    if has_hooks(layer) or "forward" in vars(layer):
        return "which has hooks or a forward of its own"
    return ""


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module of this name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
    # In evaluation, TransformerEncoder and its layers have a fast path that reads the weights of
    # their linear layers without calling these. Switch it off in every module that contains this
    # one; otherwise evaluation fails, as a LowRankLinear has no weight.
    while True:
        above = model.get_submodule(parent)
        if isinstance(above, nn.TransformerEncoderLayer):
            above.activation_relu_or_gelu = 0
        if isinstance(above, nn.TransformerEncoder):
            above.use_nested_tensor = False
        if not parent:
            return
        parent = parent.rpartition(".")[0]
