"""Channels-last memory format, which is faster for most convolutions on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def channels_last(images: Tensor) -> Tensor:
    """Copy of ``[B, C, H, W]`` in channels-last memory format, which is faster on a CPU.

    Unlike with ``contiguous``, the strides are channels-last even for one channel, and the layers
    that follow keep the format.
    """
    return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


def takes_channels_last(modules: Iterable[nn.Module]) -> bool:
    """Whether torch computes all of a model's convolutions correctly in channels-last format.

    For one channel, channels-last strides are channels-first strides too. With AVX-512, oneDNN (as
    of torch 2.15) then reads wrong numbers if a stride leaves a single column of outputs.
    """
    convolutions = (module for module in modules if isinstance(module, nn.Conv2d))
    return all(module.in_channels > 1 or module.stride[1] == 1 for module in convolutions)


class ViewsOfAnyFormat(TorchFunctionMode):
    """While it is entered, ``x.view(...)`` copies where a view would need ``x`` to be contiguous.

    People's models see the memory format nowhere else: ``x.view(len(x), -1)`` after a convolution
    is what most of them say, and needs the channels first.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, or what it stands for in any format."""
        try:
            return func(*args, **kwargs or {})
        except RuntimeError:
            if func not in _IN_ANY_FORMAT:
                raise
            return _IN_ANY_FORMAT[func](*args, **kwargs or {})


_IN_ANY_FORMAT: dict[Any, Callable[..., Tensor]] = {
    Tensor.view: Tensor.reshape,
    Tensor.view_as: Tensor.reshape_as,
}
