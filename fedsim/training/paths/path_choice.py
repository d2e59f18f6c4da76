"""Which path trains a model, and how many clients at a time: one fixed rule.

| path    | what it takes                                           | gradients as | on a GPU |
| ------- | ------------------------------------------------------- | ------------ | -------- |
| layered | a chain of layers: a model program (`program.lowered`)  | factors      | captured |
| func    | what `torch.func.vmap` takes                            | dense rows   | captured |
| plain   | everything; one client at a time                        | dense rows   | eager    |

Every local algorithm runs on every path: it sees a `Gradient`, and not which path it came from.
The rule (`choose`): layered if the model is such a chain; with convolutions only on a CPU, and if
one of them is max-pooled. Else func on a GPU, where launches are the cost, and on a CPU for small
models whose parameters are all in linear layers, if `vmap` takes them. Else plain: the cost is then
arithmetic, and no path saves any. `fedsim tune` measures all of them.

On a CPU with compiled kernels, clients with large rows (`program.SEQUENTIAL_BYTES`) go one after
another: each takes all its steps while its row is in the cache.

The first two paths pad all batches of a block to one width, by copies of a batch's own examples
with weight 0. They are for models and losses that have been read and treat each example by itself
(`fedsim.training.structure`). All others take the plain path, which gives a model its real batches
and nothing else. So does a model that draws random numbers itself, or whose loss does, since
torch's generator serves one client at a time (`fedsim.training.side_effects`). Masks of dropout
are drawn at counters by the path func (`fedsim.training.paths.dropout`), which the rule takes for
such models on a GPU; they are other masks than those of the path plain. Per-example gradients, for
example-level privacy, have methods of their own (`fedsim.training.paths.examples`), which draw as
the path does.

Captured: a whole local step is one CUDA graph (`fedsim.training.graphs`), for every algorithm
here, and so is a private step (`fedsim.training.private_steps`). Exceptions are convolutions on the
layered path, per-example gradients one client at a time, and an algorithm that does not say which
of its steps are the same (`LocalAlgorithm.phase`). Eager: kernel by kernel.
"""

from __future__ import annotations

import functools
import logging
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Literal, Protocol, Self

import torch
from torch import Tensor, nn

from fedsim.clients.base import Gradient
from fedsim.errors import FedsimError, printable
from fedsim.kernels import convolutions, dense
from fedsim.rows.packing import Packing
from fedsim.tasks.losses import Loss
from fedsim.training.data import ClientData
from fedsim.training.paths.dropout import DropoutPath
from fedsim.training.paths.func import FuncPath
from fedsim.training.paths.plain import PlainPath
from fedsim.training.paths.program import Program, lowered
from fedsim.training.paths.recurrent import with_products
from fedsim.training.side_effects import HiddenDraws, hidden_draws, loss_draws, made_up_inputs
from fedsim.training.structure.reading import Reading, read

_log = logging.getLogger(__name__)

PathName = Literal["auto", "plain", "func", "layered"]
KernelName = Literal["auto", "eager", "compiled"]

# Most bytes of a block's rows. On a CPU, sharing each operation's dispatch among more clients gains
# more than is lost when rows leave the cache; on a GPU, this is a small part of the memory.
CPU_BYTES = 2**25
CUDA_BYTES = 2**31
SMALL_BYTES = 2**18
MAX_CLIENTS = {"cpu": 256, "cuda": 4096}


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
            Weight of each example's loss; 0 on padding.

        Returns
        -------
        Gradient
            Gradient of ``sum_j weight_j loss_j``, for each client at its own point.
        Tensor ``[n, B]``
            Loss of each example, unweighted.
        """

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs ``[n, B, ...]`` for ``x [n, B, ...]`` at ``theta [n, D]``."""


@dataclass(frozen=True)
class TrainedModel:
    """A model with its loss and its data, and what is known about them.

    Attributes
    ----------
    model : nn.Module
    packing : Packing
        Packing of all parameters that are trained.
    loss : callable
    data : ClientData
    draws : HiddenDraws
    reading : Reading
        What was read of the model, in training mode, and of the loss.
    plain_only : bool
        Whether it must run for one client at a time: it or its loss draws random numbers, from
        torch's one generator, or it records statistics of its batches.
    by_dropout : bool
        Whether it would not be, but for draws of its own in training.
    program : Program or None
        The model program; None if it is no such chain of layers, or is ``plain_only``.
    """

    model: nn.Module
    packing: Packing
    loss: Loss
    data: ClientData
    draws: HiddenDraws
    reading: Reading
    plain_only: bool
    by_dropout: bool
    program: Program | None

    @classmethod
    def inspect(
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
        """Test and read a model, with its loss.

        Parameters
        ----------
        model, packing, loss, data
        kernel : "eager" or "compiled"
            Executor of its program.
        statistics : bool
            Whether the model records statistics of its batches.
        private : bool
            Whether clients have example-level privacy: what a loss declares of itself is then not
            trusted.

        Raises
        ------
        FedsimError
            If the model keeps state that would carry one client's data to another.
        """
        dtype = packing.layout.dtype
        inputs, (x, y) = made_up_inputs(data, dtype), data.empty(dtype)
        draws = hidden_draws(model, inputs)
        # A loss is computed in evaluation too, and from the same generator.
        if loss_draws(model, loss, inputs, y):
            draws = HiddenDraws(training=True, evaluation=True)
        reading = read(model.train(), loss, x, y, declared=not private)
        plain_only = draws.training or draws.evaluation or statistics
        by_dropout = draws.training and not (draws.evaluation or statistics)
        program = None if plain_only else lowered(reading, packing, kernel)
        return cls(model, packing, loss, data, draws, reading, plain_only, by_dropout, program)


def choose(name: str, trained: TrainedModel, device: torch.device) -> Path:
    """The path that a setting asks for, or that the rule picks.

    The rule tests func on made-up examples before it picks it. A model that may look across a batch
    can only take the plain path.

    Raises
    ------
    FedsimError
        If the path asked for cannot take this model.
    """
    reading, program = trained.reading, trained.program
    structure, read_loss = reading.structure, reading.loss
    plain = PlainPath(trained.model, trained.packing, trained.loss)
    kind = type(trained.model).__name__
    if trained.plain_only and (dropout := _dropout_path(name, trained, device)) is not None:
        return dropout
    if trained.plain_only or structure is None or read_loss is None:
        if name in ("auto", "plain"):
            return plain
        raise _refusal(name, trained)
    if program is not None:
        # Convolutions gain by what pooling discards. On a GPU this path takes them client by
        # client, and would spend its time on launches.
        pooled = any(layer.pool is not None for layer in program.convolutions)
        preferred = not program.convolutions or (device.type == "cpu" and pooled)
        if name == "layered" or (name == "auto" and preferred):
            return program
    elif name == "layered":
        raise FedsimError(
            f"client.path = 'layered' does not take a {kind} like this one; "
            "it takes a chain of convolutions with ReLU and max-pooling, or none, and linear "
            "layers with ReLU, tanh or sigmoid. Allowed here: 'auto', 'func', 'plain'."
        )
    module = with_products(structure.module) or structure.module
    func = FuncPath(module, trained.packing, read_loss)
    small = func.aligned and _row_bytes(trained.packing) <= SMALL_BYTES
    if name == "plain" or (name == "auto" and device.type != "cuda" and not small):
        return plain
    if (error := _vmap_error(func, trained.data)) is None:
        return func
    if name == "func":
        raise FedsimError(
            f"client.path = 'func' does not take this {kind} with this loss "
            f"({error}); allowed here: 'auto', 'plain'."
        )
    _log.warning("torch.func cannot take this model (%s); it trains client by client", error)
    return plain


def _refusal(name: str, trained: TrainedModel) -> FedsimError:
    refused_model = f"a model or a loss that may look across a batch ({trained.reading.why})"
    if trained.plain_only:
        refused_model = (
            "a model that draws random numbers (other than by dropout, which 'func' takes), or "
            "whose loss does, or that keeps statistics of batches"
        )
    return FedsimError(
        f"client.path = '{name}' does not take {refused_model}; allowed here: 'auto', 'plain'."
    )


def _dropout_path(name: str, trained: TrainedModel, device: torch.device) -> DropoutPath | None:
    """The func path of a model that draws masks of dropout and nothing else; None if it is not.

    The rule takes it on a GPU; a CPU trains such a model client by client.
    """
    structure, loss = trained.reading.structure, trained.reading.loss
    wanted = name == "func" or (name == "auto" and device.type == "cuda")
    if not (wanted and trained.by_dropout) or structure is None or loss is None:
        return None
    path = DropoutPath.lowered(structure, trained.packing, loss)
    return path if _vmap_error(path, trained.data) is None else None


def _row_bytes(packing: Packing) -> int:
    return packing.width * packing.layout.dtype.itemsize


def resolve_kernel(kernel: KernelName, device: torch.device) -> KernelName:
    """Executor of the layered path: "eager" or "compiled".

    Compiled kernels add in another order than torch's operations, so that the executor is a part of
    a run's settings. The rule takes them on every CPU where they can be built.

    Raises
    ------
    FedsimError
        If compiled ones are asked for, and cannot be built.
    """
    if kernel == "eager" or device.type != "cpu":
        return "eager" if kernel == "auto" else kernel
    if _can_compile():
        return "compiled"
    if kernel == "auto":
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
def _vmap_error(path: FuncPath, data: ClientData) -> str | None:
    """What `vmap` raises for the model and its loss: for branches on values, for example."""
    dtype, example = path.packing.layout.dtype, data.one_example(protected=True)
    if example is None:
        return None
    index = torch.zeros(2, 2, dtype=torch.int64, device=example.x.device)
    theta = torch.zeros(2, path.packing.width, dtype=dtype, device=index.device)
    try:
        with redirect_stderr(StringIO()):  # torch.fx prints a traceback if its graph fails
            x = example.inputs(index, dtype)
            path.gradient(theta, x, example.targets(index, dtype), theta.new_zeros(2, 2))
            path.outputs(theta, x)
    except RuntimeError as error:
        return printable(str(error).partition("\n")[0])
    return None


def max_block_clients(
    model: nn.Module, packing: Packing, device: torch.device, block_size: int = 0
) -> int:
    """Most clients in a block: ``block_size``, or the rule's number if that is 0.

    On a CPU, convolutions always go one client at a time: that is no slower, and a client's bits
    then do not depend on its block.

    Raises
    ------
    FedsimError
        If ``block_size`` is negative.
    """
    if block_size < 0:
        raise FedsimError(f"client.block-size is {block_size}; it must be 0 (auto) or more.")
    if device.type == "cpu" and _convolutional(model):
        return 1
    return block_size or most_rows(device, _row_bytes(packing))


def most_rows(device: torch.device, row_bytes: int) -> int:
    """Most rows of this size in a block, by the rule."""
    budget = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    return max(1, min(MAX_CLIENTS.get(device.type, 256), budget // max(1, row_bytes)))


def _convolutional(model: nn.Module) -> bool:
    """Whether a trained parameter belongs to a convolution."""
    kinds = (nn.modules.conv._ConvNd,)
    return any(
        isinstance(m, kinds) and any(p.requires_grad for p in m.parameters())
        for m in model.modules()
    )
