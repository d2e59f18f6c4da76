"""Side effects of a model: random draws, and state that it keeps between calls.

A model that draws (dropout, noise layers, `torch.rand` in a forward) takes its numbers from torch's
global generator, as everything else in the process does: its bits would depend on what else is
trained. Such a model, or a loss that draws, is detected when its trainer is built. From then on the
generator serves one client and step at a time, seeded from the client's own keyed stream.

State that a model keeps between calls (a counter in a buffer, a list in an attribute) would carry
one client's data into another's update, or one example's into another's gradient. It is refused
where it shows (`hidden_draws`), and restored between protected examples
(`fedsim.training.own_state`). Runs without privacy carry buffers that are known to change
(`changed_buffers`).

A GPU's arithmetic depends on settings of the process too: `reproducible_arithmetic` sets them
around every call whose bits matter.
"""

from __future__ import annotations

import copy
import os
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.kernels.device_normals import stream_words
from fedsim.models.carried_buffers import carried_buffers
from fedsim.models.parameters import call_with
from fedsim.named_tensors import NamedTensors, each
from fedsim.randomness import Purpose, Randomness, Stream
from fedsim.tasks.losses import Loss, is_fedsims_own
from fedsim.training.data import ClientData
from fedsim.training.structure.tables import BY_EXAMPLE
from fedsim.training.structure.values import Writes, memory

EVALUATION = 2**40
"""Part of the address of an evaluation's draws, in the place of a training step's number."""

# Modules that are known neither to draw nor to change their buffers.
DETERMINISTIC_MODULES = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Unflatten,
    nn.Conv3d,
    nn.Embedding,
    *BY_EXAMPLE,
)


@dataclass(frozen=True)
class HiddenDraws:
    """Whether a model, or its loss, draws random numbers in training, and whether in evaluation."""

    training: bool
    evaluation: bool


def hidden_draws(model: nn.Module, x: Tensor | None) -> HiddenDraws:
    """Run a copy of a model, and watch the random generators.

    Parameters
    ----------
    model : nn.Module
        Not changed.
    x : Tensor ``[4, ...]`` or None
        Inputs of its data's shape and dtype. With None, or if the model does not take them, the
        types of its modules decide.

    Raises
    ------
    FedsimError
        If it draws from numpy's or Python's generator, changes buffers that are not carried, or
        keeps any other state between calls that its outputs depend on.
    """
    if all(type(module) in DETERMINISTIC_MODULES for module in model.modules()):
        return HiddenDraws(training=False, evaluation=False)
    draws_by_type = any(_known_to_draw(module) for module in model.modules())
    if x is None:
        return HiddenDraws(training=draws_by_type, evaluation=False)
    try:
        training, evaluation = (
            _makes_draws(copy.deepcopy(model).train(mode), x) for mode in (True, False)
        )
    except FedsimError:
        raise
    except (Exception, SystemExit):  # a user's code, which will fail in training too
        return HiddenDraws(training=draws_by_type, evaluation=False)
    return HiddenDraws(training or draws_by_type, evaluation)


def made_up_inputs(data: ClientData, dtype: torch.dtype) -> Tensor | None:
    """Made-up inputs ``[4, ...]`` for `hidden_draws`, or public ones; None without any data.

    Never real examples: the result, which may be a refusal, must not depend on anyone's data.
    """
    if not len(data.x):
        return None
    if (public := data.public_inputs(4, dtype)) is not None:
        return public
    x, _ = data.empty(dtype)

    def made_up(one: Tensor) -> Tensor:
        return torch.cat([one.new_zeros(2, *one.shape[1:]), one.new_ones(2, *one.shape[1:])])

    return each(made_up, x)


def _known_to_draw(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)


@torch.no_grad()
def _makes_draws(model: nn.Module, x: Tensor) -> bool:
    carried = _carried(model, x.device)
    foreign = _foreign_generators()
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        before = _generators(x.device)
        inputs = x.clone()  # a forward may write to its inputs
        with Writes() as writes:
            model(inputs)
        has_drawn = before != _generators(x.device)
        remembers = _is_stateful(model, x, carried)
    _refuse_writes_elsewhere(writes, model, "model", [inputs])
    if changed := [name for name in changed_buffers(model, x) if name not in carried]:
        raise FedsimError(
            f"the model changes its buffers {', '.join(changed)} as it runs, which no client's "
            "update carries; it must leave them as they are."
        )
    _refuse_draws_since(foreign, "model")
    if remembers:
        raise FedsimError(
            "the model gives other outputs for the same inputs after it has processed others: what "
            "it stores in between would carry one client's data into another's update; it must be "
            "a function of its inputs, parameters and buffers."
        )
    return has_drawn


@torch.no_grad()
def changed_buffers(model: nn.Module, x: Tensor) -> list[str]:
    """Names of the buffers that a model changes as it runs, in training or in evaluation mode.

    Its parameters are slightly changed before: the vectors of ``spectral_norm`` may be exact for
    the initial ones. None are found if the model does not take the inputs.

    Parameters
    ----------
    model : nn.Module
        Not changed.
    x : Tensor ``[4, ...]``
        Inputs of its data's shape and dtype, of no client.
    """
    copied = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in copied.named_buffers()}
    if not before:
        return []
    # An error is of a user's code, which will fail in training too.
    with suppress(Exception, SystemExit), seeded(0, x.device):
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                parameter.mul_(torch.empty_like(parameter).uniform_(0.9, 1.1))
        for mode in (True, False):
            copied.train(mode)(x.clone())
    # One of another shape is a cache that grows, which is restored.
    return [
        name
        for name, buffer in copied.named_buffers()
        if name in before and buffer.shape == before[name].shape
        if not torch.allclose(buffer.to(before[name]), before[name], rtol=0, atol=0, equal_nan=True)
    ]


def _carried(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Parameters and buffers that the model may change as it runs, by name.

    On a GPU a client's buffers would be restored after each step, not after each round: there only
    those in its row are carried.
    """
    if (carried := carried_buffers(model)) is None:
        return {}
    names = [*carried.averaged, *(carried.restored if device.type == "cpu" else ())]
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: named[name].clone() for name in names}


def loss_draws(model: nn.Module, loss: Loss, x: Tensor | None, y: Tensor) -> bool:
    """Whether a loss draws random numbers, tested on made-up inputs and targets of zeros.

    Parameters
    ----------
    model, loss
        Not changed.
    x : Tensor ``[B, ...]`` or None
        The inputs. Without any, or if the model or the loss does not take them, no draws show.
    y : Tensor ``[any, ...]``
        Targets, of which only the dtype and the shape of one matter.

    Raises
    ------
    FedsimError
        If it draws from numpy's or Python's generator.
    """
    if x is None or is_fedsims_own(loss):
        return False
    foreign = _foreign_generators()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            outputs = copy.deepcopy(model).train()(x.clone())
            targets, own_loss = y.new_zeros(len(x), *y.shape[1:]), copy.deepcopy(loss)
            before = _generators(x.device)
            with Writes() as writes:
                own_loss(outputs, targets)
            has_drawn = before != _generators(x.device)
    except (Exception, SystemExit):  # a user's code, which will fail in training too
        return False
    _refuse_writes_elsewhere(writes, own_loss, "loss", [outputs, targets])
    _refuse_draws_since(foreign, "loss")
    return has_drawn


def _refuse_writes_elsewhere(
    writes: Writes, owner: object, name: str, arguments: Sequence[object]
) -> None:
    """Refuse writes to memory that is neither the owner's own, which is restored, nor an argument.

    A tensor of a global or a closure would carry one client's data into another's update.
    """
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else [owner]
    own = _tensors_in([*arguments, *(getattr(module, "__dict__", {}) for module in modules)])
    if isinstance(owner, nn.Module):
        own += [*owner.parameters(), *owner.buffers()]
    known = {memory(tensor) for tensor in own}
    if writes.written - known:
        raise FedsimError(
            f"the {name} writes into a tensor that is not its own (of a global variable, say), "
            "which would carry one client's data into another's update; it must make a new tensor."
        )


def _tensors_in(values: object) -> list[Tensor]:
    """Tensors in containers of any depth."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, NamedTensors):
        values = values.tensors
    if isinstance(values, Mapping):
        return _tensors_in(list(values.values()))
    if isinstance(values, list | tuple | set | deque):
        return [tensor for value in values for tensor in _tensors_in(value)]
    return []


def _refuse_draws_since(foreign: tuple[object, ...], name: str) -> None:
    if foreign != _foreign_generators():
        raise FedsimError(
            f"the {name} draws from numpy's or Python's global generator, so that its draws could "
            "not be repeated; it must draw from torch's."
        )


def _is_stateful(model: nn.Module, x: Tensor, carried: Mapping[str, Tensor]) -> bool:
    """Whether the same inputs, with the same draws, give other outputs after other inputs.

    Each call starts from the same values of what is ``carried``.
    """
    half = len(x) // 2
    outputs: list[Tensor] = []
    for other_inputs in (None, x[half:], x[:half]):
        if other_inputs is not None:
            with suppress(Exception):  # a model may take batches of one size only
                model(other_inputs.clone())
        with seeded(0, x.device):
            same_start = {name: value.clone() for name, value in carried.items()}
            output = call_with(model, same_start, x[:half].clone())
        if isinstance(output, Tensor):
            outputs.append(output.clone())
    # With a tolerance: a GPU may add in any order.
    return any(
        output.shape != outputs[0].shape
        or not torch.allclose(output, outputs[0], rtol=1e-5, atol=1e-6, equal_nan=True)
        for output in outputs[1:]
    )


def _generators(device: torch.device) -> list[bytes]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


def _foreign_generators() -> tuple[object, ...]:
    name, keys, *position = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), name, np.asarray(keys).tobytes(), *position


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and this device for a while; with None, do nothing."""
    if seed is None:
        yield
        return
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.cuda.device(device) if gpus else nullcontext():
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def reproducible_arithmetic(device: torch.device, *, tf32: bool = False) -> Iterator[None]:
    """The same bits every time, in full precision unless ``tf32``, if ``device`` is a GPU.

    By default a GPU rounds the factors of a convolution's products to ten bits (TF32), and may sum
    them in any order: cuDNN depending on the algorithm it picks, cuBLAS on the workspace it finds
    free when several streams are in use. cuBLAS reads the size of its workspaces from the
    environment at its first call in a process; a value that is already set is kept.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    products, allowed_tf32 = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32
    ):
        products.allow_tf32 = tf32
        try:
            yield
        finally:
            products.allow_tf32 = allowed_tf32


@dataclass(frozen=True)
class Seeds:
    """Seeds of the models' own random draws (dropout), for ``n`` clients in a round.

    Parameters
    ----------
    randomness : sequence of n Randomness
    client_ids : int64 ``[n]``
    round : int
    """

    randomness: Sequence[Randomness]
    client_ids: Ints
    round: int

    def of_client(self, position: int, steps: int) -> Ints:
        """Seeds for all steps of one of the clients, ``[steps]``."""
        return self._seeds(position, range(steps), 1)[:, 0]

    def of_step(self, step: int, active: int, count: int = 1) -> Ints:
        """Seeds for a step of each of the first ``active`` clients, ``[active, count]``."""
        one_step = range(step, step + 1)
        return np.concatenate([self._seeds(k, one_step, count) for k in range(active)])

    def counters(self, steps: Ints, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys ``[n, 2]`` and counters ``[n, 3]`` of each client's first step, of ``steps [n]``."""
        streams = [
            source.counters(
                Purpose.DROPOUT,
                level="example",
                round=self.round,
                client=client,
                parts=range(count),
            )
            for source, client, count in zip(
                self.randomness, self.client_ids.tolist(), steps.tolist(), strict=True
            )
        ]
        return stream_words(streams, device)

    def _seeds(self, position: int, steps: range, count: int) -> Ints:
        """Seeds for these steps of one client, ``[steps, count]``."""
        generators = self.randomness[position].generators(
            Purpose.DROPOUT,
            level="example",
            round=self.round,
            client=int(self.client_ids[position]),
            parts=steps,
            stream=self._stream,
        )
        # Each generator is valid only until the next one is made (they share a stream).
        seeds = [draws.integers(2**63, size=count, dtype=np.uint64) for draws in generators]
        return np.array(seeds, dtype=np.uint64).astype(np.int64)

    @cached_property
    def _stream(self) -> Stream:
        return Stream()
