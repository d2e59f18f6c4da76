"""LoRA: the product of two narrow matrices, added to each chosen linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from fedsim.adapters.base import Adapter
from fedsim.registry import register
from fedsim.settings import Ge, Gt, Le

if TYPE_CHECKING:
    from torch import nn


@register("adapter", "lora")
@dataclass(frozen=True)
class LoRA(Adapter):
    """``x W' + b + alpha/rank (x A') B'``: A and B are trained, W and b stay (Hu et al. 2022).

    A starts uniform on ``+-1/sqrt(inputs)`` and B at zero, so that the model's initial outputs do
    not change. The mean of the clients' products ``B A`` differs from the product of the mean
    factors, unless one factor is the same for all clients: averages are exact with A frozen (Sun
    et al. 2024, "FFA-LoRA").
    """

    rank: Annotated[int, Ge(1), Le(65536)] = 8
    """The rank: rows of A and columns of B."""
    alpha: Annotated[float, Gt(0)] = 8.0
    """The product B A is scaled by alpha / rank; peft calls it lora_alpha."""
    targets: str = "*"
    """Shell patterns of the linear layers that are adapted, by their names in the model, such as
    '*.query,*.value'; '*' for all."""
    factors: Literal["both", "frozen-a"] = "both"
    """Which factors are trained: both, or B alone with A frozen."""

    def __call__(self, model: nn.Module, seed: int) -> nn.Module:
        """Replace each layer that ``targets`` matches by one with an adapter.

        Raises
        ------
        FedsimError
            If a pattern matches no linear layer, or one that cannot be adapted.
        """
        from fedsim.adapters.layers import adapt

        scaling, frozen_a = self.alpha / self.rank, self.factors == "frozen-a"
        return adapt(model, self.targets, self.rank, scaling, seed, frozen_a=frozen_a)

    def merged(self, model: nn.Module) -> nn.Module:
        """The model with each W replaced by ``W + alpha/rank B A``, under its original names."""
        from fedsim.adapters.layers import merge

        return merge(model)

    def files(self, model: nn.Module) -> Mapping[str, bytes]:
        """``adapter_config.json`` and ``adapter_model.safetensors``."""
        from fedsim.adapters.peft import peft_files

        return peft_files(model, self.rank, self.alpha)

    def load(self, model: nn.Module, directory: Path) -> None:
        """Load the weights of such a folder into an adapted model; all of them, or none."""
        from fedsim.adapters.peft import load

        load(model, directory, self.rank, self.alpha)
