"""Adam on the mean update, bitwise equal to `torch.optim.Adam`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.server_optimizers.base import StatefulOptimizer
from fedsim.settings import Ge, Gt, Lt


@register("server", "adam")
@dataclass
class ServerAdam(StatefulOptimizer):
    """Adam on the mean update (FedAdam of Reddi et al. 2021); bitwise as `torch.optim.Adam`.

    Its state between rounds is that of torch's optimiser, by torch's names.
    """

    lr: Annotated[float, Gt(0)] = 0.01
    """The server's learning rate."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay rate of the moving average of updates."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay rate of the moving average of squares."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """A small number added to the root, to avoid a division by zero."""

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        parameter = torch.nn.Parameter(vector.clone())
        parameter.grad = (-update).to(vector.dtype)
        # A new torch optimiser for each step, since a schedule changes the rate and a resume the
        # state. This takes 50 microseconds; the first one also imports torch._dynamo.
        betas = self.beta1, self.beta2
        optimizer = torch.optim.Adam([parameter], lr=self.lr, betas=betas, eps=self.eps)
        optimizer.state[parameter].update(self.state())
        optimizer.step()
        self.tensors = optimizer.state[parameter]
        return parameter.detach()
