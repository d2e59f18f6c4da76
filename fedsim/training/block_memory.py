"""How much of a GPU's memory a block of clients takes, found before any client trains.

Steps of a made-up block are made on tensors without data: torch computes shapes and nothing else,
so that neither memory nor a GPU's time is spent, and the path, the model, the loss and the
algorithm are the run's own.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsim.clients.base import PERSONAL_MASK, State, Step
from fedsim.training.graphs import map_tensors
from fedsim.training.paths.dropout import DropoutPath
from fedsim.training.private_steps import PrivateStepper
from fedsim.training.steps import DROPOUT_COUNTER, DROPOUT_KEY, Stepper

_log = logging.getLogger(__name__)

USABLE_SHARE = 0.75
"""Part of a GPU's memory that blocks may take: libraries' workspaces and gaps take the rest."""


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that operations within it make.

    Attributes
    ----------
    peak : int
        The most bytes that existed at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._now, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it makes."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self._now -= size


@torch.no_grad()
def block_bytes(stepper: Stepper, private: PrivateStepper | None, clients: int, width: int) -> int:
    """Bytes that a block takes: its state, twice if captured, and the largest part of two steps.

    Parameters
    ----------
    stepper : Stepper
    private : PrivateStepper or None
        Makes the steps, if clients have example-level privacy.
    clients, width : int
        Number of clients, and of examples that go through the model at once for each.
    """
    algorithm, packing, device = stepper.algorithm, stepper.packing, stepper.device
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        theta = torch.zeros(clients, packing.width, dtype=packing.layout.dtype, device=device)
        sizes = {"model": packing.width, "number": 1}
        received: State = {k: theta.new_full((clients,), v) for k, v in algorithm.numbers().items()}
        received |= {
            name: theta.new_zeros(clients, sizes[size]) for name, size in algorithm.receives.items()
        }
        if algorithm.separates_personal:
            received[PERSONAL_MASK] = torch.zeros_like(theta)
        state = algorithm.init(theta, received)
        index = torch.zeros(clients, width, dtype=torch.int64, device=device)
        if isinstance(stepper.path, DropoutPath):
            key, counter = index.new_zeros(clients, 2), index.new_zeros(clients, 3)
            state |= {DROPOUT_KEY: key, DROPOUT_COUNTER: counter}
        buffers: dict[str, int] = {}

        def note(name: str, tensor: Tensor) -> Tensor:
            buffers[name] = tensor.nbytes
            return tensor

        # Some algorithms take two kinds of steps in turn.
        for step in (Step(1, 0), Step(1, 1)):
            if private is None:
                stepper.step_eagerly(state, index, theta.new_ones(clients, width), step)
            else:
                private.try_step(state, index, step)
            map_tensors(state, "", note)
    peak: int = live.peak
    return peak + (0 if stepper.captured_step is None else sum(buffers.values()))


def clients_within(
    memory: int, stepper: Stepper, private: PrivateStepper | None, clients: int, width: int
) -> int:
    """Most clients of a block, at most ``clients``, that fit into ``memory`` bytes; at least 1.

    All of them where the steps cannot be made on tensors without data.
    """
    most = clients
    try:
        while most > 1 and (size := block_bytes(stepper, private, most, width)) > memory:
            most = max(1, min(most - 1, most * memory // size))
    # A user's model may look at a value, and torch raises much for what has none.
    except Exception as error:
        _log.debug("the memory of a block cannot be predicted (%s)", error)
        return clients
    return most
