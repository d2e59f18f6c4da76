"""What a local algorithm is: small pure pieces over explicit state.

The state is a dictionary of tensors with a leading client axis. One client is a block of
one; per-client numbers (rates and the like) are ``[n]`` tensors in the state, so that clients
with different ones can share a block. The trainer calls, for a block of clients,

    state = algorithm.init(theta, numbers)          theta [n, D]
    for index in range(steps):                      one gradient evaluation each
        gradient = path(algorithm.point(state), batch)
        algorithm.step(state, gradient, Step(round, index))
    theta = algorithm.finish(state)

and cuts the state along its first axis whenever clients run out of steps, so no algorithm
sees a client that has finished. Entries may be changed in place or replaced. ``D`` is ``d`` with
some zeros between parameters (`fedsim.rows.packing`); they stay zero.

On a GPU a step may be captured and replayed (`fedsim.training.graphs`), if its algorithm says
by ``phase`` which of its steps are alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedsim.clients.gradients import Gradient
from fedsim.settings import check_settings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LocalAlgorithm", "State", "Step"]

State = dict[str, Any]
"""Name to tensor ``[n, ...]``, or to anything else that a slice of clients cuts: a `Gradient`."""


@dataclass(frozen=True)
class Step:
    """Where in a run a gradient evaluation stands: both count from the run's own origin.

    Attributes
    ----------
    round : int
        The strategy's round, from 1.
    index : int
        The client's gradient evaluation in this round, from 0.
    """

    round: int
    index: int

    def number(self, function: Callable[[Step], float]) -> float | Tensor:
        """A number that depends on the step, such as what a rate is multiplied by.

        In a captured step it is a tensor ``[]`` that gets its value before each replay.
        """
        return function(self)


class LocalAlgorithm(ABC):
    """A client's optimiser. Subclasses are frozen dataclasses of their settings.

    Attributes
    ----------
    carried : tuple of str
        Entries of the state that may outlive a round: kept by each client, or, where they are
        one number for each, averaged and sent by the server.
    evaluates : str
        The one of them, ``[n, D]``, that is a model which a client evaluates with in place of the
        global one; empty for none.
    """

    carried: ClassVar[tuple[str, ...]] = ()
    evaluates: ClassVar[str] = ""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "step" in vars(cls) and "phase" not in vars(cls):
            # What a base class promised of its own step does not hold for another.
            cls.phase = LocalAlgorithm.phase  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_settings(self, "client.")

    def where_noised(self, noised: bool) -> LocalAlgorithm:
        """With the settings that were left to whether its gradients are noised."""
        del noised
        return self

    def numbers(self) -> dict[str, float]:
        """Settings that may differ from client to client within one block, by their own names."""
        return {}

    def init(self, theta: Tensor, numbers: State) -> State:
        """State at the start of a round.

        Parameters
        ----------
        theta : Tensor ``[n, D]``
            The global parameters, once for each client; the algorithm owns the tensor.
        numbers : dict of str to Tensor ``[n]``
            The values of `numbers`, client by client.
        """
        return {"theta": theta, **numbers}

    def point(self, state: State) -> Tensor:
        """Where the next gradient is taken, ``[n, D]``."""
        theta: Tensor = state["theta"]
        return theta

    @abstractmethod
    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Take one gradient into account."""

    def phase(self, at: Step) -> Hashable:
        """Name what `step` does: in steps of one phase it does the same, on tensors of any values.

        What else `step` takes from ``at`` it gets by ``at.number``; it reads no tensor back, and
        treats clients alike. None, the default, promises nothing: such steps are not captured.
        """
        return None

    def finish(self, state: State) -> Tensor:
        """The clients' final parameters, ``[n, D]``."""
        theta: Tensor = state["theta"]
        return theta

    def report(self, state: State) -> dict[str, Tensor]:
        """What these clients report besides loss and number of examples, each ``[n]``."""
        return {}
