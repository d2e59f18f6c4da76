"""PyTorch's optimisers on the mean update, bitwise equal to `torch.optim`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedsim.lazy import Tensor, torch
from fedsim.registry import register
from fedsim.server_optimizers.base import StatefulOptimizer
from fedsim.settings import Doc, Ge, Gt, Lt, settings_of

Rate = Annotated[float, Gt(0), Doc("The server's learning rate.")]
Beta1 = Annotated[float, Ge(0), Lt(1), Doc("Decay rate of the moving average of updates.")]
Beta2 = Annotated[float, Ge(0), Lt(1), Doc("Decay rate of the moving average of squares.")]
Decay = Annotated[float, Ge(0), Lt(1), Doc("Decay rate of the moving average of squares.")]
Eps = Annotated[float, Gt(0), Doc("A small number added to the root, to avoid a division by zero.")]


@dataclass
class TorchOptimizer(StatefulOptimizer):
    """An optimiser of `torch.optim`, with the negative mean update as the gradient.

    Its state between rounds is that of the torch optimiser, by torch's names.

    Attributes
    ----------
    optimizer : str
        Name of the class in `torch.optim`.
    decay_name : str
        That class's name for the setting ``decay``; empty if it has none.
    """

    optimizer: ClassVar[str]
    decay_name: ClassVar[str] = ""

    lr: Rate = 0.01

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters ``[d]``, in the dtype of ``vector``."""
        settings: dict[str, Any] = {s.name: getattr(self, s.name) for s in settings_of(self)}
        if "beta1" in settings:
            settings["betas"] = settings.pop("beta1"), settings.pop("beta2")
        if self.decay_name:
            settings[self.decay_name] = settings.pop("decay")
        parameter = torch.nn.Parameter(vector.clone())
        parameter.grad = (-update).to(vector.dtype)
        # A new torch optimiser for each step, since a schedule changes the rate and a resume the
        # state. This takes 50 microseconds; the first one also imports torch._dynamo.
        optimizer = getattr(torch.optim, self.optimizer)([parameter], **settings)
        optimizer.state[parameter].update(self.state())
        optimizer.step()
        self.tensors = optimizer.state[parameter]
        return parameter.detach()


@register("server", "adam")
@dataclass
class ServerAdam(TorchOptimizer):
    """Adam on the mean update (FedAdam of Reddi et al. 2021); bitwise as `torch.optim.Adam`."""

    optimizer: ClassVar[str] = "Adam"
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.999
    eps: Eps = 1e-8


@register("server", "adamw")
@dataclass
class ServerAdamW(ServerAdam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); as `torch.optim.AdamW`."""

    optimizer: ClassVar[str] = "AdamW"
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Weight decay: each step subtracts this multiple of lr times the parameters."""


@register("server", "adamax")
@dataclass
class ServerAdamax(ServerAdam):
    """Adam with the infinity norm of updates (Kingma and Ba 2015); as `torch.optim.Adamax`."""

    optimizer: ClassVar[str] = "Adamax"


@register("server", "nadam")
@dataclass
class ServerNAdam(ServerAdam):
    """Adam with Nesterov's momentum (Dozat 2016); as `torch.optim.NAdam`."""

    optimizer: ClassVar[str] = "NAdam"


@register("server", "rmsprop")
@dataclass
class ServerRMSProp(TorchOptimizer):
    """RMSProp on the mean update; as `torch.optim.RMSprop`."""

    optimizer: ClassVar[str] = "RMSprop"
    decay_name: ClassVar[str] = "alpha"
    decay: Decay = 0.99
    eps: Eps = 1e-8


@register("server", "adagrad")
@dataclass
class ServerAdagrad(TorchOptimizer):
    """Adagrad on the mean update; as `torch.optim.Adagrad`."""

    optimizer: ClassVar[str] = "Adagrad"
    eps: Eps = 1e-10


@register("server", "adadelta")
@dataclass
class ServerAdadelta(TorchOptimizer):
    """Adadelta on the mean update (Zeiler 2012); as `torch.optim.Adadelta`."""

    optimizer: ClassVar[str] = "Adadelta"
    decay_name: ClassVar[str] = "rho"
    lr: Rate = 1.0
    decay: Decay = 0.9
    eps: Eps = 1e-6
