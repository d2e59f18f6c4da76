"""The local optimiser of Xu et al. 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.clients.rmsprop import RMSProp
from fedsim.lazy import Tensor
from fedsim.registry import register
from fedsim.settings import Doc, Ge, Gt, Lt


@register("client", "adadp-noise")
@dataclass(frozen=True)
class AdadpNoise(RMSProp):
    """The local optimiser of Xu et al. 2020: RMSProp with ``eps`` inside the root.

    Their method is this on gradients privatised by `fedsim.mechanisms.AdaptiveNoise`: give
    that mechanism to `ExamplePrivacy`. ``decay`` is one minus their gamma, the weight of the
    new term; they do not say which value they used.
    """

    decay: Annotated[
        float, Ge(0), Lt(1), Doc("Weight of the old mean of squares: one minus their gamma.")
    ] = 0.9
    eps: Annotated[float, Gt(0), Doc("Added within the root.")] = 1e-8

    def _root(self, second: Tensor) -> Tensor:
        return second.add(self.eps).sqrt_()
