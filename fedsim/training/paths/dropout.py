"""The func path of models with dropout, whose masks are inputs (`fedsim.training.paths.masks`).

Each call of dropout in the graph that was read becomes a product with a mask, and so does dropout
between the layers of a recurrent layer. They are other masks than those of the path `plain`, which
draws with torch's generator. Whatever else draws is left in the graph, and `torch.func.vmap`
refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.paths.func import FuncPath
from fedsim.training.paths.masks import MaskedProduct, WithoutMasks, masked_products
from fedsim.training.paths.recurrent import Products, copied, with_products
from fedsim.training.structure.reading import Structure
from fedsim.training.structure.values import leads

_OF_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True)
class DropoutPath(FuncPath):
    """`FuncPath` of a model whose only draws are those of dropout."""

    @classmethod
    def lowered(cls, structure: Structure, packing: Packing, loss: Loss) -> Self:
        """The path of a model that was read."""
        return cls(_masked(structure.module), packing, loss)

    @property
    def aligned(self) -> bool:
        """False: on a CPU clients go one after another, so that no bit depends on the block."""
        return False


def _masked(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with products in the place of dropout; all other layers stay those of the graph."""
    model = with_products(module, masked=True) or copied(module)
    graph = model.graph
    inputs = next(node for node in graph.nodes if node.op == "placeholder")
    first = next(node for node in graph.nodes if node.op != "placeholder")
    model.add_submodule("without_masks", WithoutMasks())
    with graph.inserting_before(first):
        own = graph.call_module("without_masks", (inputs,))
    inputs.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
    for node in [*graph.nodes]:
        if node.op == "call_module" and isinstance(_called(model, node), Products):
            node.kwargs = {**node.kwargs, "inputs": inputs}
        elif (product := _product(model, node)) is not None:
            name = f"masked_product_{len(masked_products(model))}"
            model.add_submodule(name, product)
            x = node.args[0] if node.args else node.kwargs["input"]
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_module(name, (x, inputs)))
            graph.erase_node(node)
    for place, product in enumerate(masked_products(model)):
        product.place = place
    model.recompile()
    return model


def _product(model: fx.GraphModule, node: fx.Node) -> MaskedProduct | None:
    """What takes the place of a call of dropout; None for any other call."""
    module = _called(model, node) if node.op == "call_module" else None
    settings: Mapping[str, Any]
    if module is not None and type(module) in (nn.Dropout, *_OF_CHANNELS):
        settings = vars(module)
    elif node.op == "call_function" and node.target in (F.dropout, torch.dropout):
        names = ("input", "p", "training", "inplace")
        settings = {"p": 0.5, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        if not settings.get("training", settings.get("train", True)):
            return None
    else:
        return None
    value, p = node.meta["value"], settings["p"]
    if not leads(value) or not isinstance(p, int | float):
        return None  # one mask for all examples, or a probability of which nothing is known
    shape: Sequence[int] = value.like.shape[1:]
    if type(module) in _OF_CHANNELS:
        shape = (shape[0], *[1] * (len(shape) - 1))
    return MaskedProduct(p, bool(settings.get("inplace", False)), shape)


def _called(model: fx.GraphModule, node: fx.Node) -> nn.Module:
    return model.get_submodule(str(node.target))
