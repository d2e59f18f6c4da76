"""A model by its name, with an initialisation that is a function of the seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedsim.errors import FedsimError
from fedsim.models.adadp import adadp_cifar
from fedsim.models.dense import dense, parse_widths
from fedsim.models.user import user_model
from fedsim.randomness import Purpose, Randomness

__all__ = ["NAMES", "build"]

NAMES = ("softmax", "mlp", "adadp-mnist", "adadp-cifar")
"""Models that have a name; ``module:callable`` is one of the user's own."""

_ADADP_MNIST_WIDTHS = (256, 256, 256)


def build(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    widths: str | Sequence[int] = "",
    bias: bool | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Build a model on the CPU, initialised.

    Parameters
    ----------
    name : str
        - ``softmax``: softmax regression, ``fc1``.
        - ``mlp``: ``fc1``, ReLU, ``fc2``, ... with ``widths``.
        - ``adadp-mnist``: Koskela and Honkela's MNIST network: three hidden layers of 256 and
          no biases, 334,336 parameters on 28x28 images.
        - ``adadp-cifar``: their CIFAR-10 network: two convolutions of 64 (38,720 parameters) and
          fully connected layers of 500, 500 and 10 without biases (1,055,000).
        - ``module:callable``: anything of the user's that returns an `nn.Module`; see
          `fedsim.models.user`.
    input_shape : ``(C, H, W)`` or ``(d,)``
        Shape of one example. The model takes a batch ``[B, *input_shape]`` and returns logits
        ``[B, num_classes]``.
    num_classes : int
    widths : str or sequence of int
        Hidden units of each layer of an ``mlp``, such as ``"256,256"``.
    bias : bool, optional
        Whether fully connected layers have biases; None for the model's own habit (``softmax``
        and ``mlp`` have them, the ADADP networks have none).
    dtype : torch.float32 or torch.float64
        The float64 model starts from the float32 one's numbers.
    seed : int
        Of the initialisation, which depends on nothing else.

    Returns
    -------
    nn.Module
        The dense models are an `nn.Sequential` of one `nn.Flatten`, then `nn.Linear` layers
        with `nn.ReLU` between them, and nothing else.

    Raises
    ------
    FedsimError
        If there is no such model, or its options or shapes do not fit.

    Examples
    --------
    >>> model = build("mlp", (1, 28, 28), 10, widths="256,256", seed=1)
    >>> [name for name, _ in model.named_parameters()][:2]
    ['fc1.weight', 'fc1.bias']
    """
    if widths and name != "mlp":
        raise FedsimError(
            f"model.widths is '{widths}', which model.name = '{name}' has no use for; only mlp has."
        )
    if dtype not in (torch.float32, torch.float64):
        raise FedsimError(f"model.dtype is {dtype}; it must be float32 or float64.")
    shape = tuple(input_shape)
    # Layers draw their initial weights from torch's global generator: lend it, put it back.
    draws = Randomness(seed).generator(Purpose.INIT, level="run")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(draws.integers(2**63)))
        model = _build(name, shape, num_classes, widths, bias)
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise FedsimError(
            f"model.name is '{name}', which has lazy layers, whose shapes are unknown until data "
            "come; give every layer its sizes."
        )
    for parameter_name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise FedsimError(
                f"model.name is '{name}', whose {parameter_name} is complex; parameters must be "
                "real numbers."
            )
    return model.to(dtype)


def _build(
    name: str,
    shape: tuple[int, ...],
    num_classes: int,
    widths: str | Sequence[int],
    bias: bool | None,
) -> nn.Module:
    with_bias = True if bias is None else bias
    if name == "softmax":
        return dense(shape, (), num_classes, bias=with_bias)
    if name == "mlp":
        return dense(shape, parse_widths(widths), num_classes, bias=with_bias)
    if name == "adadp-mnist":
        return dense(shape, _ADADP_MNIST_WIDTHS, num_classes, bias=bool(bias))
    if name == "adadp-cifar":
        return adadp_cifar(shape, num_classes, bias=bool(bias))
    if ":" in name:
        return user_model(name, shape, num_classes)
    raise FedsimError(
        f"model.name is '{name}'; it must be one of {', '.join(NAMES)}, or module:callable."
    )
