"""The interface of local algorithms: small functions over explicit state.

The state is a dictionary of tensors with a leading client axis; one client is a block of size 1.
Per-client numbers (such as rates) are ``[n]`` tensors in the state, so that clients with different
values can share a block. The trainer calls, for a block of clients,

    state = algorithm.init(theta, numbers)          theta [n, D]
    for index in range(steps):                      one gradient evaluation each
        gradient = path(algorithm.point(state), batch)
        algorithm.step(state, gradient, Step(round, index))
    theta = algorithm.finish(state)
    vectors = algorithm.send(state)                 in addition to the update, if it sends any

and slices the state along its first axis whenever clients run out of steps, so that no algorithm
sees a client that has finished. Entries may be changed in place or replaced. ``D`` is ``d`` plus
some zeros between parameters (`fedsim.rows.packing`), which must stay zero.

On a GPU a step may be captured and replayed (`fedsim.training.graphs`), if ``phase`` tells which
of the algorithm's steps do the same operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.mechanisms import Mechanism
from fedsim.mechanisms.scaling import ScalingMechanism
from fedsim.rows.layout import Layout, Width
from fedsim.settings import Doc, Ge, Gt, check_settings

PERSONAL_MASK = "personal"
"""State entry ``[n, D]`` with `separates_personal`: 1 where a parameter is personal, else 0."""

State = dict[str, Any]
"""Names to tensors ``[n, ...]``, or other values that can be sliced by client, as a `Gradient`."""

# Types of settings that several algorithms have, with their ranges and descriptions.
LearningRate = Annotated[float, Gt(0), Doc("The learning rate of local steps.")]
WeightDecay = Annotated[
    float, Ge(0), Doc("Weight decay: this multiple of the parameters is added to their gradient.")
]
RootEpsilon = Annotated[
    float, Gt(0), Doc("A small number added to the root, to avoid a division by zero.")
]


@dataclass(frozen=True)
class RunFacts:
    """Public facts about a run on which an algorithm may depend.

    Attributes
    ----------
    private_examples : bool
        Whether the gradients of its steps are noised (example-level privacy).
    mechanism : Mechanism or None
        Mechanism that bounds clients' updates (client-level privacy); None without it.
    steps : int or None
        Number of local steps of a round; None where it differs between clients.
    """

    private_examples: bool = False
    mechanism: Mechanism | None = None
    steps: int | None = None

    @property
    def private(self) -> bool:
        """Whether examples or whole clients are protected."""
        return self.private_examples or self.mechanism is not None

    def client_mechanism(self, algorithm: LocalAlgorithm) -> Mechanism | None:
        """The mechanism with which a client can bound its update just as the sum does.

        Returns
        -------
        Mechanism or None
            Its ``bound(rows [n, D])`` accepts rows with any order of coordinates. None where
            updates are not bounded.

        Raises
        ------
        FedsimError
            If the mechanism depends on more than a row's norm, or changes from round to round.
        """
        mechanism = self.mechanism
        one_number = Layout.of({"row": torch.zeros(1)})
        fixed = isinstance(mechanism, ScalingMechanism) and not mechanism.init(one_number)
        if mechanism is None or fixed:
            return mechanism
        raise FedsimError(
            f"{algorithm.label} (client.name) needs the bounded update that enters the sum, but "
            f"clients do not know how {type(mechanism).__name__} (mechanism.name) bounds it; it "
            "must be 'clipping', 'norm-bound' or 'normalization', alone and in a private run, "
            "which bound by the norm alone, the same way in every round."
        )


@dataclass(frozen=True)
class RoundMeans:
    """Means of a released round, as the server knows them.

    Attributes
    ----------
    round : int
    update : Tensor ``[d]``
        Mean of the clients' updates; in a private run the released, noisy mean.
    sent, received : mapping of name to Tensor ``[d]`` or ``[1]``
        Means of the vectors that clients sent, and the vectors that they received.
    share : float
        Number of clients in the mean divided by the population. In a run that is private at client
        level the expected share, since the number of clients in the sum is secret.
    """

    round: int
    update: Tensor
    sent: Mapping[str, Tensor]
    received: Mapping[str, Tensor]
    share: float


@dataclass(frozen=True)
class ServerUpdate:
    """Result of combining a round's means on the server.

    Attributes
    ----------
    update : Tensor ``[d]``
        Update for the server optimiser's step.
    vectors : mapping of name to Tensor ``[d]`` or ``[1]``
        Vectors to send with the next round's parameters.
    """

    update: Tensor
    vectors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Step:
    """Position of a gradient evaluation in a run.

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
        """Value of ``function`` at this step, such as a factor of the learning rate.

        In a captured step it is a tensor ``[]``, whose value is set before each replay.
        """
        return function(self)


class Gradient(Protocol):
    """Gradients of ``n`` clients, each at its own point.

    It can be sliced by client, as the tensors of a state are, but not indexed by a number.
    """

    def __getitem__(self, clients: slice) -> Gradient:
        """The gradients of these clients."""

    def dense(self) -> Tensor:
        """The gradients as a new tensor ``[n, D]``."""

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Compute ``theta [n, D] - rate [n] * gradient`` in place, or into ``out`` if given."""

    def distance(self, other: Gradient) -> Tensor:
        """``|| self - other ||`` in L2, ``[n]``; ``other`` must come from the same path."""

    def max_abs(self) -> Tensor:
        """Upper bound of the absolute values of the coordinates, ``[n]``."""

    def norms(self) -> Tensor:
        """L2 norms, ``[n]``."""

    def scaled(self, factors: Tensor) -> Gradient:
        """The gradients times ``factors [n]``."""


def require_slice(clients: object) -> slice:
    """The clients of whom a gradient is asked, which must be a slice.

    Raises
    ------
    FedsimError
    """
    if isinstance(clients, slice):
        return clients
    raise FedsimError(
        f"a gradient is sliced by client, such as gradient[2:3], not indexed by {clients!r}."
    )


@dataclass(frozen=True)
class DenseGradient:
    """Gradients as a dense tensor ``[n, D]``."""

    values: Tensor

    def __getitem__(self, clients: slice) -> DenseGradient:
        """The gradients of these clients."""
        return DenseGradient(self.values[require_slice(clients)])

    def dense(self) -> Tensor:
        """A copy of the tensor."""
        return self.values.clone()

    def distance(self, other: Gradient) -> Tensor:
        """L2 norms of the differences, ``[n]``."""
        norms: Tensor = torch.linalg.vector_norm(self.values - other.dense(), dim=1)
        return norms

    def max_abs(self) -> Tensor:
        """The largest absolute value of each row, ``[n]``."""
        return torch.maximum(self.values.amax(1), -self.values.amin(1))

    def norms(self) -> Tensor:
        """L2 norm of each row, ``[n]``."""
        norms: Tensor = torch.linalg.vector_norm(self.values, dim=1)
        return norms

    def scaled(self, factors: Tensor) -> DenseGradient:
        """The rows times ``factors [n]``, as a new tensor."""
        return DenseGradient(self.values * factors.unsqueeze(1))

    def subtract_from(self, theta: Tensor, rate: Tensor, out: Tensor | None = None) -> None:
        """Subtract with one multiply-add over the block."""
        into = theta if out is None else out
        torch.addcmul(theta, self.values, rate.unsqueeze(1), value=-1, out=into)


class LocalAlgorithm(ABC):
    """A client's local optimiser. Subclasses are frozen dataclasses of their settings.

    A subclass overrides the properties below by class attributes, such as
    ``carried: ClassVar[tuple[str, ...]] = ("velocity",)``.
    """

    @property
    def label(self) -> str:
        """Name in messages: that of the class, or of the algorithm that a wrapper holds."""
        return type(self).__name__

    @property
    def carried(self) -> tuple[str, ...]:
        """Names of the state entries that a client may carry over to its next round.

        Each client stores its own (``client.state``).
        """
        return ()

    @property
    def evaluates(self) -> str:
        """Name of the carried entry, ``[n, D]``, with the model that a client evaluates.

        Empty if clients evaluate the global model.
        """
        return ""

    @property
    def sends(self) -> Mapping[str, Width]:
        """Vectors that clients send with updates, by name; of the model's size, or a number."""
        return {}

    @property
    def receives(self) -> Mapping[str, Width]:
        """Vectors that clients receive with parameters, by name; those of `sends` come first."""
        return self.sends

    @property
    def requires_client_state(self) -> bool:
        """Whether the algorithm requires that each client keeps its own state between rounds."""
        return False

    @property
    def requires_plain_means(self) -> bool:
        """Whether `combine` is correct only for unweighted, unbounded means over clients."""
        return False

    @property
    def separates_personal(self) -> bool:
        """Whether it treats personal parameters (``model.personal``) differently from others."""
        return False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "step" in vars(cls) and "phase" not in vars(cls):
            # A base class's `phase` describes its own `step`, and may be wrong for this one.
            cls.phase = LocalAlgorithm.phase  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_settings(self, "client.")

    def for_run(self, facts: RunFacts) -> LocalAlgorithm:
        """The algorithm with its unset settings chosen for this run.

        Raises
        ------
        FedsimError
            If it cannot be used in such a run.
        """
        return self

    def numbers(self) -> dict[str, float]:
        """Settings that may differ between the clients of one block, by name."""
        return {}

    def init(self, theta: Tensor, numbers: State) -> State:
        """State at the start of a round.

        Parameters
        ----------
        theta : Tensor ``[n, D]``
            The global parameters, once for each client. The algorithm may change them in place.
        numbers : dict of str to Tensor ``[n]``
            Each client's values of `numbers`; the vectors of `receives` that the server sends,
            ``[n, D]`` or ``[n, 1]``, zeros in the first round; and, with `separates_personal`,
            `PERSONAL_MASK`.
        """
        return {"theta": theta, **numbers}

    def example_state(self, width: int) -> State:
        """An example state, of one client with zero parameters, for its entries and shapes."""
        numbers: State = {name: torch.tensor([value]) for name, value in self.numbers().items()}
        sizes = {"model": width, "number": 1}
        vectors = {name: torch.zeros(1, sizes[size]) for name, size in self.receives.items()}
        mask = {PERSONAL_MASK: torch.zeros(1, width)} if self.separates_personal else {}
        return self.init(torch.zeros(1, width), numbers | vectors | mask)

    def point(self, state: State) -> Tensor:
        """Parameters at which the next gradient is evaluated, ``[n, D]``."""
        theta: Tensor = state["theta"]
        return theta

    @abstractmethod
    def step(self, state: State, gradient: Gradient, at: Step) -> None:
        """Update the state by one gradient."""

    def phase(self, at: Step) -> Hashable:
        """Key of the operations that `step` does at this step, for capture on a GPU.

        Steps with equal keys must do the same operations, whatever the tensors' values: they read
        numbers that depend on ``at`` by ``at.number`` only, read no tensor's values back, and treat
        all clients in the same way. Steps with key None, the default, are not captured.
        """
        return None

    def finish(self, state: State) -> Tensor:
        """The clients' final parameters, ``[n, D]``."""
        theta: Tensor = state["theta"]
        return theta

    def report(self, state: State) -> dict[str, Tensor]:
        """Metrics that clients report in addition to loss and number of examples, each ``[n]``."""
        return {}

    def send(self, state: State) -> dict[str, Tensor]:
        """The vectors named by `sends`, ``[n, D]`` or ``[n, 1]``; called once, after `finish`."""
        return {}

    def combine(self, means: RoundMeans) -> ServerUpdate:
        """On the server, compute the update and the next round's vectors of `receives`.

        By default these are the mean update, and the means of the vectors that clients sent.
        """
        return ServerUpdate(means.update, means.sent)


def refuse_vectors(algorithm: LocalAlgorithm) -> None:
    """Refuse an algorithm that sends vectors in addition to the update, for a private run.

    Raises
    ------
    FedsimError
    """
    if algorithm.sends:
        raise FedsimError(
            f"client.name names {algorithm.label}, which sends "
            f"{', '.join(algorithm.sends)} in addition to the update; in a run that is private at "
            "client or example level it must send its update alone, since a plan bounds and noises "
            "nothing else (Scaffold.for_run gives such an algorithm)."
        )
