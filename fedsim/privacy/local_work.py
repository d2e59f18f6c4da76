"""Local work of a client: batch size, steps and passes (epochs), which are all public."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fedsim.errors import FedsimError
from fedsim.privacy.laws import Full, Poisson, ShuffledPasses
from fedsim.settings import Ge, check_settings


@dataclass(frozen=True)
class LocalWork:
    """A client's local work: batch size, and number of epochs or of steps.

    Parameters
    ----------
    batch_size : int
        Examples in a step; 0 takes all of a client's examples in every step.
    epochs, steps : int or None
        Passes over the client's data, or gradient evaluations; one epoch if neither is given.

    Raises
    ------
    FedsimError
        If epochs and steps are both given, or a number is out of range.
    """

    batch_size: Annotated[int, Ge(0)]
    epochs: Annotated[int | None, Ge(1)] = None
    steps: Annotated[int | None, Ge(1)] = None

    def __post_init__(self) -> None:
        check_settings(self, "client.")
        if self.epochs is not None and self.steps is not None:
            raise FedsimError(
                f"client.epochs = {self.epochs} and client.steps = {self.steps}; set one of them."
            )
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)

    def counted(self, count: int) -> LocalWork:
        """The same work with ``count`` epochs, or ``count`` steps if it is given in steps."""
        if self.epochs is None:
            return replace(self, steps=count)
        return replace(self, epochs=count)

    def batch_of(self, size: int) -> int:
        """Examples in a step of a client with ``size``: the batch size, or all if it has fewer."""
        return min(self.batch_size or size, size)

    def steps_of(self, size: int) -> int:
        """Gradient evaluations of a client with ``size`` examples (0 without data)."""
        if size == 0:
            return 0
        if self.epochs is None:
            assert self.steps is not None
            return self.steps
        return self.epochs * -(-size // self.batch_of(size))

    def examples_of(self, size: int) -> int:
        """Examples that a client with ``size`` processes in a round; the mean, if sampled."""
        if self.epochs is None:
            return self.steps_of(size) * self.batch_of(size) if size else 0
        return self.epochs * size

    def poisson(self, size: int) -> Poisson | Full:
        """Sampler of Poisson batches, for a client with ``size`` examples, 1 or more.

        Adjacency is zero-out, since ``size`` is public. A batch of all examples needs no sampling.
        """
        batch = self.batch_of(size)
        return Full(size) if batch == size else Poisson(batch / size, size, adjacency="zero-out")

    def passes(self, size: int) -> ShuffledPasses | Full:
        """Sampler of the batches of shuffled passes, for a client with ``size`` examples."""
        batch = self.batch_of(size)
        return Full(size) if batch == size else ShuffledPasses(batch, size)
