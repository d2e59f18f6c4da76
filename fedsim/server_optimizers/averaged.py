"""A moving average of the model in place of the model itself: what follows the server's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.server_optimizers.published import ServerSGD
from fedsim.settings import Ge, Lt


@register("server", "averaged")
@dataclass
class AveragedSGD(ServerSGD):
    """SGD on the mean update, of whose iterates a moving average is released (De et al. 2022).

    Clients train from the last iterate, as without the average. The average is what a round
    releases: what is evaluated, by clients too, and saved. Both follow from the noisy means, so
    that the average costs no privacy.
    """

    decay: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Decay of the moving average; of the first ``1 / (1 - decay)`` iterates it is the mean."""

    def starting_point(self, vector: Tensor) -> Tensor:
        """The last iterate ``[d]``."""
        return self.tensors["iterate"].to(vector) if self.tensors else vector

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """The new average ``[d]``, in the dtype of ``vector``, the last iterate."""
        number = int(self.tensors["step"]) + 1 if self.tensors else 1
        average = self.moment("average", vector)
        iterate = super().step(vector, update)
        average = average.lerp(iterate, max(1 - self.decay, 1 / number))
        velocity = {"velocity": self.tensors["velocity"]} if self.momentum else {}
        self.tensors = {
            **velocity,
            "step": torch.tensor(number),
            "iterate": iterate,
            "average": average,
        }
        return average
