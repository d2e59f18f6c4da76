"""A trained model that takes raw inputs, as in the data set, and normalises them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.datasets.checks import torch_dtype
from fedsim.errors import FedsimError


class InferenceModel(nn.Module):
    """A trained model that takes raw inputs, as in the data set, and normalises them.

    uint8 images ``[B, C, H, W]`` are divided by 255, floating inputs are unchanged, other integers
    are tokens; then the run's normalisation is applied, if it had one.

    Parameters
    ----------
    model : nn.Module
        Becomes a submodule, whose parameters are frozen.
    mean, std : Tensor broadcastable to one example, or None
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, model: nn.Module, mean: Tensor | None, std: Tensor | None) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(parameter.dtype for parameter in model.parameters())
        for name, number in (("mean", mean), ("std", std)):
            number = None if number is None else number.to(self.dtype)
            self.register_buffer(name, number, persistent=False)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the model, ``[B, ...]``."""
        if x.dtype == torch.uint8:
            x = x.to(self.dtype) / 255
        elif x.is_floating_point():
            x = x.to(self.dtype)
        else:
            x = x.long()
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        outputs: Tensor = self.model(x)
        return outputs


def numbers_of(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Examples as a tensor: converted to ``dtype`` if that is floating, else unchanged.

    Raises
    ------
    FedsimError
        If they are not numbers, or not finite in that dtype (NaN would predict the first class).
    """
    if array.dtype.kind not in "biuf":
        raise FedsimError(f"examples are of dtype {array.dtype}; they must be real numbers.")
    numbers = torch.from_numpy(np.ascontiguousarray(array, torch_dtype(array)))
    numbers = numbers.to(dtype) if dtype.is_floating_point else numbers
    if not numbers.isfinite().all():
        raise FedsimError(
            f"examples have NaN or infinite numbers as {numbers.dtype}; all must be finite."
        )
    return numbers
