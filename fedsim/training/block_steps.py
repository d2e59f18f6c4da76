"""Local steps of a block of clients with small dense models, on a CPU."""

from __future__ import annotations

from fedsim.clients.base import State, Step
from fedsim.training.batches import Batches
from fedsim.training.local_step import LocalStep
from fedsim.training.paths.stacked import StackedPath
from fedsim.training.steps import Bench, Floats, Steps

__all__ = ["BlockSteps"]


class BlockSteps(Steps):
    """As `Steps`; what losses need of all steps is prepared at once."""

    def __init__(self, bench: Bench, path: StackedPath, batches: Batches, round: int) -> None:
        super().__init__(bench, batches, round)
        self.path = path
        # Step by step, as they are taken.
        self._index = self.index.transpose(0, 1).contiguous()
        targets = bench.data.targets(self._index.flatten(0, 1), bench.dtype)
        self.batch_losses = path.losses(targets, self.weight.transpose(0, 1).flatten(0, 1))

    def step(self, state: State, index: int, active: int) -> None:
        """See `Steps`."""
        bench, step = self.bench, self.bench.step
        assert isinstance(step, LocalStep)  # it is captured on a GPU only
        examples = self._index[index]
        x = bench.data.inputs(examples[:active], bench.dtype)
        point, first = bench.algorithm.point(state), index * examples.shape[0]
        gradient = self.path.gradient_of(point, x, self.batch_losses, first)
        step.take(state, gradient, Step(self.round, index))

    @property
    def seen(self) -> Floats:
        """See `Steps`."""
        seen: Floats = self.batch_losses.seen().double().numpy()
        return seen.reshape(self._index.shape).swapaxes(0, 1)
