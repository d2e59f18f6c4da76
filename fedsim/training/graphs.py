"""Local steps on a GPU, captured: one launch for a step instead of a hundred.

Small clients leave a GPU waiting for launches. So what a block does in a step, from gathering
its batch to updating its state, is captured in a CUDA graph the first time, and replayed from
then on. A graph reads and writes fixed memory; here these are *buffers*, one for each entry of
the state. State stays in its buffers while a block trains, and blocks of fewer clients use the
first rows of the same memory, so a graph takes none of its own for state. All graphs share the
memory for intermediate results, as one graph runs at a time.

A graph repeats kernels on addresses and knows nothing else. So whatever decides which kernels run,
and on which memory, must be part of the key under which it is kept: phase (`LocalAlgorithm.phase`),
number of clients, and which entries are in which buffers with which strides, which include the
batch's width. A number that a step computes on the host (a rate from a schedule) would be frozen at
its value in the captured step; so it is in a tensor, filled before each replay (`_StepNumbers`).
And a step that reads a tensor back (`.item()`, a branch on values) cannot be captured at all.

Every step is computed for a whole block, however few clients are left in it: a GPU's libraries
choose the order of a product's sums by its shape, so that with fewer rows a client's last bits
would depend on the number of clients. Rows without a client are computed on whatever they hold, and
never read. If a capture fails, the trainer trains without graphs, on the same rows.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedsim.clients.base import DenseGradient, State, Step
from fedsim.rows.packing import LINE
from fedsim.training.gradients import FactoredGradient, LayerFactors, ParameterGradients
from fedsim.training.paths.func import FuncPath
from fedsim.training.paths.program import Program
from fedsim.training.private_steps import PrivateStepper
from fedsim.training.steps import Stepper

_log = logging.getLogger(__name__)

MAX_GRAPHS = 128  # of a trainer, about a MB each; the least recently used one is dropped
WARM_UP = 2
INDEX, WEIGHT = "batch.index", "batch.weight"

Work = Callable[[], tuple[State, Tensor]]


def captured_steps(stepper: Stepper | PrivateStepper, block_size: int) -> StepGraphs | None:
    """Captured steps, on a GPU and for ways whose kernels take a whole block; else None."""
    if isinstance(stepper, PrivateStepper):
        of_block, base = stepper.method.takes_blocks, stepper.stepper
    else:
        path, base = stepper.path, stepper
        layered = isinstance(path, Program) and not path.convolutions
        of_block = layered or isinstance(path, FuncPath)
    if base.device.type == "cuda" and of_block:
        rows = min(block_size, max(1, base.data.population))
        return StepGraphs(stepper, CudaRecorder(base.device), rows)
    return None


class StepGraphs:
    """Local steps by replays of CUDA graphs.

    Parameters
    ----------
    stepper : Stepper or PrivateStepper
        Its eager steps are captured, and run directly where that is not possible.
    recorder : CudaRecorder
    block_size : int
        Number of clients that every step is computed for; a larger block takes a multiple of it.
    """

    def __init__(
        self, stepper: Stepper | PrivateStepper, recorder: CudaRecorder, block_size: int
    ) -> None:
        self.stepper, self.recorder, self.block_size = stepper, recorder, block_size
        self.graphs: OrderedDict[Hashable, _CapturedStep] = OrderedDict()
        self.can_capture = True
        self._buffers: dict[Hashable, Tensor] = {}
        self._rows = 0

    def __call__(self, state: State, index: Tensor, weight: Tensor, step: Step) -> Tensor:
        """As `Stepper.step_eagerly`; the new state is in buffers that the next block overwrites."""
        try:
            return self._replay_step(state, index, weight, step)
        except BaseException:
            # Buffers or clocks may hold a part of this step: nothing of it may be replayed.
            self.graphs.clear()
            self._buffers.clear()
            raise

    def _replay_step(self, state: State, index: Tensor, weight: Tensor, step: Step) -> Tensor:
        n, rows = len(index), -(-len(index) // self.block_size) * self.block_size
        if rows > self._rows:
            # Graphs know their buffers by address: with larger buffers all must be captured again.
            self.graphs.clear()
            self._buffers.clear()
            self._rows = rows
        # The batch moves into buffers too: a graph gathers from the same memory every time.
        buffered, structure = self._copy_to_buffers({**state, INDEX: index, WEIGHT: weight}, rows)
        # A capture needs the memory that the entries had outside the buffers. And an algorithm may
        # add entries and drop others: the state is what the step left.
        state.clear()
        new_state, losses = self._step(buffered, structure, step, rows)
        state.update((name, value[:n]) for name, value in new_state.items())
        # The next replay writes over the losses, which are read only at the end of the block.
        return losses[:n].clone()

    def _step(
        self, buffered: State, structure: Hashable, step: Step, rows: int
    ) -> tuple[State, Tensor]:
        """State after one step of all rows, and losses, by a graph or eagerly."""
        phase = self.stepper.algorithm.phase(step) if self.can_capture else None
        # Two steps share a graph only if the algorithm does the same in both, on as many clients,
        # and if the same entries are in the same buffers: a graph is blind to all three.
        key = (phase, rows, structure)
        if phase is not None and key not in self.graphs:
            try:
                self.graphs[key] = self._capture(buffered, step, rows)
            except RuntimeError as error:
                # `_capture` has restored the state in its buffers.
                _log.warning("a CUDA graph could not be captured (%s); training without one", error)
                self.can_capture = False
                self.graphs.clear()
            if len(self.graphs) > MAX_GRAPHS:
                self.graphs.popitem(last=False)
        if phase is None or not self.can_capture:
            state = _entries(buffered)
            losses = self.stepper.step_eagerly(state, buffered[INDEX], buffered[WEIGHT], step)
            return state, losses
        self.graphs.move_to_end(key)
        captured = self.graphs[key]
        captured.clock.set(step)
        captured.replay()
        return captured.state, captured.losses

    def _capture(self, buffered: State, step: Step, rows: int) -> _CapturedStep:
        clock = _StepNumbers(step.round, step.index, buffered[INDEX].device)
        # Capturing runs the step several times, and each run changes the state: afterwards all of
        # it is restored, and the first replay takes the step.
        saved: list[tuple[Tensor, Tensor]] = []

        def save(_: str, tensor: Tensor) -> Tensor:
            saved.append((tensor, tensor.clone()))
            return tensor

        map_tensors(buffered, "", save)

        def work() -> tuple[State, Tensor]:
            state = _entries(buffered)
            losses = self.stepper.step_eagerly(state, buffered[INDEX], buffered[WEIGHT], clock)
            # Steps may leave new tensors in the state. Copying them back into the buffers is part
            # of the graph, so that the next replay finds what this one left.
            return self._copy_to_buffers(state, rows)[0], losses

        try:
            replay, (state, losses) = self.recorder.record(lambda: clock.run(work))
        finally:
            for tensor, value in saved:
                tensor.copy_(value)
        return _CapturedStep(replay, clock, state, losses)

    def _copy_to_buffers(self, entries: State, rows: int) -> tuple[State, Hashable]:
        """Put the entries into buffers, as ``rows`` rows; those that are elsewhere are copied.

        Entries that are one tensor stay one. Also returns the structure, which is the same for all
        states that one graph can take.
        """
        owners: dict[Hashable, str] = {}
        structure: list[Hashable] = []
        moves: list[tuple[Tensor, Tensor]] = []

        def in_buffer(name: str, tensor: Tensor) -> Tensor:
            # One tensor under two names (a point that is the parameters themselves, say) must stay
            # one: in two buffers, a step in place would move only one of them.
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            owner = owners.setdefault(place, name)
            shared_by = (owner, tensor.dtype, tensor.shape[1:], tensor.stride()[1:])
            structure.append((name, shared_by))
            if shared_by not in self._buffers:
                self._buffers[shared_by] = _rows_like(tensor, self._rows)
            buffer = self._buffers[shared_by]
            # What is in its buffer already, as state is from step to step, is not copied.
            if owner == name and tensor.data_ptr() != buffer.data_ptr():
                moves.append((buffer[: len(tensor)], tensor))
            return buffer[:rows]

        result: State = map_tensors(entries, "", in_buffer)
        storages = {_storage(buffer) for buffer in self._buffers.values()}
        # Entries may have changed places (an algorithm swaps two of its tensors): what is in
        # another's buffer is saved before anything is written there.
        saved = [(to, t.clone() if _storage(t) in storages else t) for to, t in moves]
        for to, tensor in saved:
            to.copy_(tensor)
        return result, tuple(structure)


def _entries(buffered: State) -> State:
    """The algorithm's entries, without the batch."""
    return {name: value for name, value in buffered.items() if name not in (INDEX, WEIGHT)}


@dataclass(frozen=True)
class _StepNumbers(Step):
    """A step as a graph sees it: numbers that depend on round or index are in tensors.

    A number is identified by its position among those that the step asks for, since an algorithm
    may make a new function each time. The tensors are made in the first run, before the capture:
    making one is a kernel, which every replay would repeat with the captured step's value.
    """

    device: torch.device
    numbers: list[tuple[Callable[[Step], float], Tensor, float]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def run(self, work: Work) -> tuple[State, Tensor]:
        """Do the work once; it must ask for the same count of numbers each time."""
        self.counts.append(0)
        result = work()
        if self.counts[-1] != self.counts[0]:
            first, last = self.counts[0], self.counts[-1]
            raise RuntimeError(f"the step used {first} numbers at first, then {last}")
        return result

    def number(self, function: Callable[[Step], float]) -> Tensor:
        # A Python float would be frozen into the graph as the value of the step captured.
        place = self.counts[-1]
        self.counts[-1] += 1
        if place == len(self.numbers):
            value = function(Step(self.round, self.index))
            tensor = torch.full((), value, dtype=torch.float64, device=self.device)
            self.numbers.append((function, tensor, value))
        return self.numbers[place][1]

    def set(self, step: Step) -> None:
        for place, (function, tensor, value) in enumerate(self.numbers):
            new_value = function(step)
            if new_value != value:
                self.numbers[place] = function, tensor.fill_(new_value), new_value


@dataclass(frozen=True)
class _CapturedStep:
    """A graph, with the tensors that hold its results."""

    replay: Callable[[], None]
    clock: _StepNumbers
    state: State
    losses: Tensor


def map_tensors(value: Any, name: str, change: Callable[[str, Tensor], Tensor]) -> Any:
    """A state, or a part of one, with ``change`` applied to every tensor and its own name."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, Mapping):
        return {key: map_tensors(entry, f"{name}.{key}", change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [map_tensors(entry, f"{name}.{i}", change) for i, entry in enumerate(value)]
    if isinstance(value, DenseGradient | ParameterGradients | FactoredGradient | LayerFactors):
        entry = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **map_tensors(entry, name, change))
    return value  # a gradient's fields that are not tensors


def _rows_like(tensor: Tensor, rows: int) -> Tensor:
    """Zeros ``[rows, ...]`` with the memory layout of ``tensor``, on which kernels depend."""
    shape, inner = tensor.shape[1:], tensor.stride()[1:]
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, inner, strict=True))
    # Rows padded to a cache line have small gaps, which are kept. With larger ones, the tensor is a
    # part of something larger, and the gaps are not its own.
    padded = 0 <= tensor.stride(0) - extent < LINE
    stride = tensor.stride(0) if padded else extent
    return tensor.new_empty_strided((rows, *shape), (stride, *inner)).zero_()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CudaRecorder:
    """Captures in CUDA graphs, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> tuple[Callable[[], None], tuple[State, Tensor]]:
        """Run ``work`` three times on the stream, then capture it.

        Returns
        -------
        callable
            Replays it, on what its tensors hold by then.
        (State, Tensor)
            What ``work`` returned; each replay writes into these very tensors.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                # Libraries allocate their workspaces and pick their kernels in the first runs,
                # which a capture does not survive.
                for _ in range(WARM_UP):
                    work()
                with _forbid_synchronisation():
                    work()
        finally:
            # Also if a run failed: kernels that it launched may still be writing to the buffers,
            # which are then restored and used from this stream.
            current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # One pool for all graphs: they run one after another, and intermediate results are not
        # needed by the next graph. In some releases of torch a capture that fails leaves its own
        # stream as the current one. "thread_local": other threads may allocate meanwhile.
        with (
            torch.cuda.stream(current),
            _pause_garbage_collection(),
            torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ),
        ):
            result = work()
        return graph.replay, result


@contextmanager
def _forbid_synchronisation() -> Iterator[None]:
    """Make waiting for the GPU an error: raised here, before a capture, it cannot break one."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Keep the collector from freeing another trainer's graphs, which would break a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
