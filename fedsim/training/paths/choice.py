"""Which path trains a model, and how many clients at a time: one fixed rule.

| path    | what it takes                                           | gradients as | on a GPU |
| ------- | ------------------------------------------------------- | ------------ | -------- |
| layered | a chain of layers: a model program (`program.lowered`)  | factors      | captured |
| func    | what `torch.func.vmap` takes                            | dense rows   | captured |
| plain   | everything; one client at a time                        | dense rows   | eager    |

Every local algorithm runs on every path: it sees a `Gradient` and not where that came from.
The rule (`choose`): layered where the model has it, with convolutions only on a CPU and where one
is max-pooled; else func on a GPU, which is bound by launches, and on a CPU for small models whose
parameters are all in linear layers, if it can take them; else plain, as the others are bound by
arithmetic there.
`fedsim tune` measures all of them.

On a CPU clients with large rows (`program.SEQUENTIAL_BYTES`) and compiled kernels take their steps
one after another, each all of its own while its row is in the cache.

The first two give all batches of a block one width, by copies of a batch's own examples whose
weight is 0: they are for models and losses that have been read and look at each example by itself
(`fedsim.training.structure`). All others have the plain path, which gives a model its real batches
and nothing else. So has a model that draws random numbers itself (dropout): torch's generator is
lent to one client at a time (`fedsim.training.side_effects`). Gradients of single examples, for
clients that protect them, have methods of their own (`fedsim.training.paths.examples`).

Captured: a whole local step is one CUDA graph (`fedsim.training.graphs`), for every algorithm
here; not with convolutions on the layered path, not for an algorithm that does not say which of its
steps are alike (`LocalAlgorithm.phase`), nor where gradients are privatised in the client. Eager:
kernel by kernel.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn

from fedsim.clients.base import Gradient
from fedsim.errors import FedsimError
from fedsim.kernels import convolutions, dense
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.data import ClientData
from fedsim.training.paths.func import FuncPath
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.program import Program, lowered
from fedsim.training.side_effects import HiddenDraws, hidden_draws, made_up_inputs
from fedsim.training.structure.reading import Reading, read

_log = logging.getLogger(__name__)

PathName = Literal["auto", "plain", "func", "layered"]
KernelName = Literal["auto", "eager", "compiled"]

# What a block's rows may take. On a CPU more clients share each operation's dispatch, which gains
# more than rows lose that leave the cache; on a GPU it is a corner of the memory.
CPU_BYTES = 2**25
CUDA_BYTES = 2**31
SMALL_BYTES = 2**18
MOST_CLIENTS = {"cpu": 256, "cuda": 4096}


class Path(Protocol):
    """One way to compute the gradients of a block."""

    @property
    def name(self) -> str:
        """Its name in a config."""

    def gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Gradient, Tensor]:
        """Gradients at ``theta [n, D]``, and losses.

        Parameters
        ----------
        theta : Tensor ``[n, D]``, packed
        x : Tensor ``[n, B, ...]``
        y : Tensor ``[n, B, ...]``
        weight : Tensor ``[n, B]``
            What each example's loss counts; 0 on padding.

        Returns
        -------
        Gradient
            Of ``sum_j weight_j loss_j``, for each client at its own point.
        Tensor ``[n, B]``
            Loss of each example, unweighted.
        """

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs ``[n, B, ...]`` for ``x [n, B, ...]`` at ``theta [n, D]``."""


@dataclass(frozen=True)
class TrainedModel:
    """A model with its loss and its data, and what was found out about them.

    Attributes
    ----------
    model : nn.Module
    packing : Packing
        Of all parameters that are trained.
    loss : callable
    data : ClientData
    draws : HiddenDraws
    reading : Reading
        In training.
    plain_only : bool
        Whether it runs for one client at a time: it draws random numbers, for which torch's
        generator is lent to a client, or writes down statistics of its batches.
    program : Program or None
        If it is such a chain of layers, and not ``plain_only``.
    """

    model: nn.Module
    packing: Packing
    loss: Loss
    data: ClientData
    draws: HiddenDraws
    reading: Reading
    plain_only: bool
    program: Program | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        packing: Packing,
        loss: Loss,
        data: ClientData,
        kernel: KernelName,
        *,
        statistics: bool,
        private: bool,
    ) -> Self:
        """Try the model and read it, with its loss.

        Parameters
        ----------
        model, packing, loss, data
        kernel : "eager" or "compiled"
            What its program computes with.
        statistics : bool
            Whether the model writes down statistics of its batches.
        private : bool
            Whether clients protect their examples: no loss is then taken at its word.

        Raises
        ------
        FedsimError
            If the model keeps something that would carry one client's data to another.
        """
        dtype = packing.layout.dtype
        draws = hidden_draws(model, made_up_inputs(data, dtype))
        reading = read(model.train(), loss, *data.empty(dtype), declared=not private)
        plain_only = draws.training or draws.evaluation or statistics
        program = None if plain_only else lowered(reading, packing, kernel)
        return cls(model, packing, loss, data, draws, reading, plain_only, program)


def choose(wanted: PathName, trained: TrainedModel, device: torch.device) -> Path:
    """The path a setting asks for, or the rule's.

    The rule tries func on made-up examples of the data's kind before it settles on it. A model that
    may look across a batch has the plain path only.

    Raises
    ------
    FedsimError
        If the path asked for cannot take this model.
    """
    reading, program = trained.reading, trained.program
    structure, read_loss = reading.structure, reading.loss
    plain = PlainPath(trained.model, trained.packing, trained.loss)
    kind = type(trained.model).__name__
    if trained.plain_only or structure is None or read_loss is None:
        if wanted in ("auto", "plain"):
            return plain
        refused = f"a model or a loss that may look across a batch ({reading.why})"
        if trained.plain_only:
            refused = (
                "a model that draws random numbers (dropout, say) or keeps statistics of batches"
            )
        raise FedsimError(
            f"client.path = '{wanted}' does not take {refused}; allowed here: 'auto', 'plain'."
        )
    if program is not None:
        # Convolutions gain by what pooling throws away; on a GPU they go client by client here,
        # bound by launches.
        pooled = any(layer.pool is not None for layer in program.convolutions)
        wins = not program.convolutions or (device.type == "cpu" and pooled)
        if wanted == "layered" or (wanted == "auto" and wins):
            return program
    elif wanted == "layered":
        raise FedsimError(
            f"client.path = 'layered' does not take a {kind} like this one; "
            "it takes a chain of convolutions with ReLU and max-pooling, or none, and linear "
            "layers with ReLU, tanh or sigmoid. Allowed here: 'auto', 'func', 'plain'."
        )
    func = FuncPath(structure.module, trained.packing, read_loss)
    small = func.aligned and _row_bytes(trained.packing) <= SMALL_BYTES
    fits = wanted == "auto" and (device.type == "cuda" or small) and _takes(func, trained.data)
    return func if wanted == "func" or fits else plain


def _row_bytes(packing: Packing) -> int:
    return packing.width * packing.layout.dtype.itemsize


def kernel_of(wanted: KernelName, device: torch.device) -> KernelName:
    """What the layered path computes with: "eager" or "compiled".

    The compiled kernels add up in another order than torch's operations: which of them a run uses
    is a part of it. The rule takes them on every CPU where they can be built.

    Raises
    ------
    FedsimError
        If compiled ones are asked for, and cannot be built.
    """
    if wanted == "eager" or device.type != "cpu":
        return "eager" if wanted == "auto" else wanted
    if _can_compile():
        return "compiled"
    if wanted == "auto":
        return "eager"
    raise FedsimError(
        "client.kernel = 'compiled' needs kernels that cannot be built on this machine (a C "
        "compiler 'cc' is missing or not usable, or FEDSIM_COMPILED=0 is set). "
        "'--set client.kernel=eager' trains without them; that is another run, with other noise."
    )


@functools.cache
def _can_compile() -> bool:
    if dense.is_compiled(torch.float32) and convolutions.is_compiled(torch.float32):
        return True
    _log.info("compiled kernels cannot be built on this machine; torch's operations train")
    return False


@torch.no_grad()
def _takes(path: FuncPath, data: ClientData) -> bool:
    """Whether the path can take the model: `vmap` knows no branches on values, for one."""
    dtype, one = path.packing.layout.dtype, data.one_example(protected=True)
    if one is None:
        return True
    index = torch.zeros(2, 2, dtype=torch.int64, device=one.x.device)
    theta = torch.zeros(2, path.packing.width, dtype=dtype, device=index.device)
    try:
        path.gradient(
            theta, one.inputs(index, dtype), one.targets(index, dtype), theta.new_zeros(2, 2)
        )
    except RuntimeError as error:
        _log.warning("torch.func cannot take this model (%s); it trains client by client", error)
        return False
    return True


def most_clients(model: nn.Module, packing: Packing, device: torch.device, wanted: int = 0) -> int:
    """Most clients that a block holds: as many as are ``wanted``, or (0) by the rule.

    On a CPU, convolutions go one client at a time whatever is wanted: that is no slower, and a
    client's bits stay its own.

    Raises
    ------
    FedsimError
        If fewer than none are wanted.
    """
    if wanted < 0:
        raise FedsimError(f"client.block-size is {wanted}; it must be 0 (auto) or more.")
    if device.type == "cpu" and _convolutional(model):
        return 1
    return wanted or most_rows(device, _row_bytes(packing))


def most_rows(device: torch.device, row_bytes: int) -> int:
    """Most rows of this size that a block holds by the rule."""
    budget = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    return max(1, min(MOST_CLIENTS.get(device.type, 256), budget // max(1, row_bytes)))


def _convolutional(model: nn.Module) -> bool:
    """Whether a trained parameter belongs to a convolution."""
    kinds = (nn.modules.conv._ConvNd,)
    return any(
        isinstance(m, kinds) and any(p.requires_grad for p in m.parameters())
        for m in model.modules()
    )
