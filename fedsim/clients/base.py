"""What a local algorithm is: small pure pieces over explicit state.

The state is a dictionary of tensors with a leading client axis. One client is a block of
one; per-client numbers (rates and the like) are ``[n]`` tensors in the state, so that clients
with different ones can share a block. The trainer calls, for a block of clients,

    state = algorithm.init(theta, numbers)          theta [n, D]
    for index in range(steps):                      one gradient evaluation each
        gradient = path(algorithm.point(state), batch)
        algorithm.step(state, gradient, Step(round, index))
    theta = algorithm.finish(state)
    vectors = algorithm.send(state)                 where it sends any beside the update

and cuts the state along its first axis whenever clients run out of steps, so no algorithm
sees a client that has finished. Entries may be changed in place or replaced. ``D`` is ``d`` with
some zeros between parameters (`fedsim.rows.packing`); they stay zero.

On a GPU a step may be captured and replayed (`fedsim.training.graphs`), if its algorithm says
by ``phase`` which of its steps are alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms import Mechanism
from fedsim.mechanisms.scaling import ScalingBound
from fedsim.rows.layout import Layout, Width
from fedsim.settings import check_settings

PERSONAL_MASK = "personal"
"""Entry of the state of an algorithm that `parts`, ``[n, D]``: 1 where a parameter is personal."""

State = dict[str, Any]
"""Name to tensor ``[n, ...]``, or to anything else that a slice of clients cuts: a `Gradient`."""


@dataclass(frozen=True)
class RunFacts:
    """What of a run an algorithm may depend on, all of it public.

    Attributes
    ----------
    private_examples : bool
        Whether the gradients of its steps are noised (example-level privacy).
    bound : Mechanism or None
        What bounds clients' updates, where whole clients are protected.
    steps : int or None
        Local steps of a round, where they are the same number for every client.
    """

    private_examples: bool = False
    bound: Mechanism | None = None
    steps: int | None = None

    @property
    def private(self) -> bool:
        """Whether examples or whole clients are protected."""
        return self.private_examples or self.bound is not None

    def known_bound(self, algorithm: LocalAlgorithm) -> Mechanism | None:
        """What bounds updates, if a client can bound its own as it enters the sum.

        Returns
        -------
        Mechanism or None
            Whose ``bound(rows [n, D])`` takes rows in any order of coordinates; None where updates
            enter as they are.

        Raises
        ------
        FedsimError
            If it bounds by more than a row's norm, or differently from round to round.
        """
        bound = self.bound
        one_number = Layout.of({"row": torch.zeros(1)})
        fixed = isinstance(bound, ScalingBound) and not bound.init(one_number)
        if bound is None or fixed:
            return bound
        raise FedsimError(
            f"{type(algorithm).__name__} (client.name) remembers the update that enters the sum, "
            f"and {bound} (mechanism.name) bounds it in a way that no client knows; it must be "
            "'clipping', 'norm-bound' or 'normalization', alone and in a private run, which bound "
            "by the norm alone and in the same way in every round."
        )


@dataclass(frozen=True)
class RoundMeans:
    """What the server knows of a round that is released.

    Attributes
    ----------
    round : int
    update : Tensor ``[d]``
        Mean of the clients' updates; in a private run the released one, with noise.
    sent, received : mapping of name to Tensor ``[d]`` or ``[1]``
        Mean of the vectors that clients sent, and what they had been sent.
    share : float
        Clients in the mean over all clients of the population. In a run that is private at client
        level the expected share, since who is in the sum is secret.
    """

    round: int
    update: Tensor
    sent: Mapping[str, Tensor]
    received: Mapping[str, Tensor]
    share: float


@dataclass(frozen=True)
class Combined:
    """What the server makes of a round's mean row.

    Attributes
    ----------
    update : Tensor ``[d]``
        Along which the server's optimiser steps.
    vectors : mapping of name to Tensor ``[d]`` or ``[1]``
        What goes with the next round's parameters.
    """

    update: Tensor
    vectors: Mapping[str, Tensor]


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


class Gradient(Protocol):
    """Gradients of ``n`` clients, each at its own point.

    A slice of clients cuts it, as it cuts the tensors of a state.
    """

    def __getitem__(self, clients: slice) -> Gradient:
        """The gradients of these clients."""

    def dense(self) -> Tensor:
        """The gradients as a new tensor ``[n, D]``."""

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """``theta [n, D] - rate [n] * gradient``, in place or, where it is given, in ``out``."""

    def distance(self, other: Gradient) -> Tensor:
        """``|| self - other ||`` in L2, ``[n]``; the other comes from the same path."""

    def peak(self) -> Tensor:
        """No coordinate is larger than this in absolute value, ``[n]``."""

    def norms(self) -> Tensor:
        """L2 norms, ``[n]``."""

    def scaled(self, factors: Tensor) -> Gradient:
        """The gradients times ``factors [n]``."""


@dataclass(frozen=True)
class Dense:
    """Gradients written out, ``[n, D]``."""

    values: Tensor

    def __getitem__(self, clients: slice) -> Dense:
        """Of these clients."""
        return Dense(self.values[clients])

    def dense(self) -> Tensor:
        """A copy."""
        return self.values.clone()

    def distance(self, other: Gradient) -> Tensor:
        """Norms of the difference."""
        norms: Tensor = torch.linalg.vector_norm(self.values - other.dense(), dim=1)
        return norms

    def peak(self) -> Tensor:
        """The largest coordinate."""
        return torch.maximum(self.values.amax(1), -self.values.amin(1))

    def norms(self) -> Tensor:
        """Row by row."""
        norms: Tensor = torch.linalg.vector_norm(self.values, dim=1)
        return norms

    def scaled(self, factors: Tensor) -> Dense:
        """A new tensor."""
        return Dense(self.values * factors.unsqueeze(1))

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """One multiply-add over the block."""
        into = theta if out is None else out
        torch.addcmul(theta, self.values, rate.unsqueeze(1), value=-1, out=into)


class LocalAlgorithm(ABC):
    """A client's optimiser. Subclasses are frozen dataclasses of their settings.

    Properties that a subclass has otherwise it sets as class attributes
    (``carried: ClassVar[tuple[str, ...]] = ("velocity",)``).
    """

    @property
    def carried(self) -> tuple[str, ...]:
        """Entries of the state that may outlive a round.

        Kept by each client, or, where they are one number for each, averaged and sent by the
        server.
        """
        return ()

    @property
    def evaluates(self) -> str:
        """The one of them, ``[n, D]``, that is a model which a client evaluates with; "": none.

        It takes the place of the global one.
        """
        return ""

    @property
    def sends(self) -> Mapping[str, Width]:
        """Named vectors that clients send with updates; each as wide as the model, or a number."""
        return {}

    @property
    def receives(self) -> Mapping[str, Width]:
        """Named vectors that clients receive with parameters; those of `sends` come first."""
        return self.sends

    @property
    def remembers(self) -> bool:
        """Whether it means nothing unless each client keeps its own state."""
        return False

    @property
    def plain_means(self) -> bool:
        """Whether what it makes of vectors' means holds for plain means over clients alone."""
        return False

    @property
    def parts(self) -> bool:
        """Whether it treats personal parameters (``model.personal``) apart from the others."""
        return False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "step" in vars(cls) and "phase" not in vars(cls):
            # What a base class promised of its own step does not hold for another.
            cls.phase = LocalAlgorithm.phase  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_settings(self, "client.")

    def for_run(self, facts: RunFacts) -> LocalAlgorithm:
        """The same algorithm, with what was left to the run that it is part of.

        Raises
        ------
        FedsimError
            If it cannot be part of such a run.
        """
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
            The values of `numbers`, client by client; what the server sends of `receives`,
            ``[n, D]`` or ``[n, 1]``, zeros in the first round; and `PERSONAL_MASK`, if it `parts`.
        """
        return {"theta": theta, **numbers}

    def sample(self, width: int) -> State:
        """The state of one client at zeros: its entries and their shapes."""
        numbers: State = {name: torch.tensor([value]) for name, value in self.numbers().items()}
        sizes = {"model": width, "number": 1}
        vectors = {name: torch.zeros(1, sizes[size]) for name, size in self.receives.items()}
        mask = {PERSONAL_MASK: torch.zeros(1, width)} if self.parts else {}
        return self.init(torch.zeros(1, width), numbers | vectors | mask)

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

    def send(self, state: State) -> dict[str, Tensor]:
        """The vectors of `sends`, each ``[n, D]`` or ``[n, 1]``; called once, after `finish`."""
        return {}

    def combine(self, means: RoundMeans) -> Combined:
        """Make the vectors of `receives` for the next round, on the server: what clients sent."""
        return Combined(means.update, means.sent)


def refuse_vectors(algorithm: LocalAlgorithm) -> None:
    """Refuse an algorithm that sends vectors beside the update, in a run that claims privacy.

    Raises
    ------
    FedsimError
    """
    if algorithm.sends:
        raise FedsimError(
            f"client.name names {type(algorithm).__name__}, which sends "
            f"{', '.join(algorithm.sends)} beside the update; in a run that is private at client "
            "or example level it must be an algorithm that sends its update alone, the one thing "
            "that a plan bounds and noises (as what Scaffold.for_run makes of itself)."
        )
