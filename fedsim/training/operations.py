"""What a model's local work takes in arithmetic, as its shapes tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fedsim.training.trainer import Trainer

__all__ = ["multiplications", "operations_of"]

# So many clients tell what the others do.
CLIENTS = 1000

# The outputs, the gradients of the inputs and those of the weights.
PASSES = 3


@torch.no_grad()
def multiplications(model: nn.Module, sample: Tensor) -> float:
    """About how many multiplications one gradient of one example takes.

    Each module's own parameters count once for every place that it puts out: a linear layer's
    once an example (or token), a convolution's once a pixel.

    Parameters
    ----------
    model : nn.Module
    sample : Tensor ``[B, ...]``
        Examples, whatever their values.
    """
    counted = 0.0

    def count(module: nn.Module, _: Any, outputs: Any) -> None:
        nonlocal counted
        tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        parameters = sum(p.numel() for p in module.parameters(recurse=False))
        if parameters and torch.is_tensor(tensor):
            counted += parameters * _places(module, tensor)

    hooks = [module.register_forward_hook(count) for module in model.modules()]
    training = model.training
    try:
        model.eval()(sample)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return PASSES * counted / len(sample)


def _places(module: nn.Module, outputs: Tensor) -> float:
    if isinstance(module, nn.Embedding):
        return 0.0  # looked up
    axis = 1 if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else -1
    return outputs.numel() / max(1, outputs.shape[axis])


def operations_of(trainer: Trainer) -> float:
    """Multiplications of a client's local work, on average over the first clients."""
    data, work = trainer.data, trainer.workload.work
    sizes = [data.size(client) for client in range(min(trainer.population, CLIENTS))]
    if not len(data.x) or not any(sizes):
        return 0.0
    gradients = sum(work.steps_of(n) * min(work.batch_size or n, n) for n in sizes) / len(sizes)
    sample = data.zeros((2,), trainer.layout.dtype)[0]
    return gradients * multiplications(trainer.model, sample)
