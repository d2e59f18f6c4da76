"""Metrics as (init, update, merge, finish): the result does not depend on how examples are batched.

A state is an immutable value: `update` returns a new state with more examples, `merge` the state of
the examples of two. Counts are integers and sums are exact (`ExactSum`), so that states merge to
the same result in any order and any tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from fedsim.arguments import check_arguments
from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.settings import check_settings
from fedsim.tasks.losses import IGNORED, Loss, class_logits, like_targets, with_settings

S = TypeVar("S")

# 2^-1200 is below the least bit of any float64, denormals included (2^-1074).
MIN_BIT = 1200
HALF = 26


@dataclass(frozen=True)
class ExactSum:
    """An exact sum of float64 numbers, which does not depend on the order of addition.

    Attributes
    ----------
    units : int
        The sum in units of 2^-1200.
    count : int
        Number of summands.
    bad : int
        Number of summands that were not finite.
    """

    units: int = 0
    count: int = 0
    bad: int = 0

    @classmethod
    def from_values(cls, values: Tensor | Floats) -> Self:
        """Exact sum of all numbers of an array."""
        if isinstance(values, torch.Tensor):
            values = values.detach().double().numpy()
        flat = np.asarray(values, dtype=np.float64).ravel()
        finite = flat[np.isfinite(flat)]
        # Each number is digits * 2^(exponent - 53), with digits a whole number of 53 bits.
        fraction, exponent = np.frexp(finite)
        digits = np.ldexp(fraction, 53).astype(np.int64)
        shifts, which = np.unique(exponent, return_inverse=True)
        # bincount adds in float64: halves of 26 and 27 bits keep sums of up to 2^26 of them exact.
        low = np.bincount(which, weights=digits & (2**HALF - 1), minlength=len(shifts))
        high = np.bincount(which, weights=digits >> HALF, minlength=len(shifts))
        units = sum(
            ((int(h) << HALF) + int(lo)) << (int(shift) - 53 + MIN_BIT)
            for shift, lo, h in zip(shifts, low, high, strict=True)
        )
        return cls(units, len(flat), len(flat) - len(finite))

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.count + other.count, self.bad + other.bad)

    @property
    def mean(self) -> float:
        """The mean, rounded once; NaN if there are no numbers, or one was not finite."""
        if self.bad or not self.count:
            return float("nan")
        return self.units / (self.count << MIN_BIT)


class Metric(ABC):
    """A number that an evaluation reports. Subclasses are frozen dataclasses of their settings.

    Attributes
    ----------
    higher_is_better : bool, or None
        Whether the run with the largest value is chosen in a selection among runs; None if a
        user-defined function does not say.
    ends : pair of float, or None
        Smallest and largest possible value, if the metric is bounded.
    """

    higher_is_better: ClassVar[bool | None] = True
    ends: ClassVar[tuple[float, float] | None] = None

    def __post_init__(self) -> None:
        check_settings(self, f"{type(self).__name__}.")

    @abstractmethod
    def init(self) -> Any:
        """State without examples."""

    @abstractmethod
    def update(self, state: Any, outputs: Tensor, targets: Tensor) -> Any:
        """State after more examples.

        Parameters
        ----------
        state
            Result of `init`, `update` or `merge`.
        outputs : Tensor ``[B, ...]``
            Outputs of the model; on the CPU, as all tensors here.
        targets : Tensor ``[B, ...]``
            Targets, `fedsim.tasks.IGNORED` (classes) or NaN (numbers) where they do not count.
        """

    @abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """State of the examples of both: exact, and independent of the order."""

    @abstractmethod
    def finish(self, state: Any) -> float:
        """The metric; NaN if it is not defined (an AUC with one class, or without examples)."""


class Summed(Metric):
    """A metric whose state is a number, an array, or a sequence of states that are added up.

    An empty sequence is the state without examples.
    """

    def merge(self, first: S, second: S) -> S:
        """Sum of both, element by element."""
        total: S = _sum(first, second)
        return total


def _sum(first: Any, second: Any) -> Any:
    if not isinstance(first, Sequence):
        return first + second
    if not first or not second:
        return first or second
    return [_sum(a, b) for a, b in zip(first, second, strict=True)]


class Mean(Summed):
    """A mean of numbers that `update` sums, usually errors; subclasses may override `finish`."""

    higher_is_better: ClassVar[bool | None] = False

    def init(self) -> ExactSum:
        """The empty sum."""
        return ExactSum()

    def finish(self, state: ExactSum) -> float:
        """The mean."""
        return state.mean


@dataclass(frozen=True)
class MeanOf(Mean):
    """Mean over examples of a function with one value per example, such as a loss.

    Parameters
    ----------
    function : callable ``(outputs [B, ...], targets [B, ...]) -> [B]``
        Its attribute ``higher_is_better`` says what is looked for.
    """

    function: Loss

    @property
    def higher_is_better(self) -> bool | None:  # type: ignore[override]
        """The function's own ``higher_is_better``; None if it has none: an error or a score."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return getattr(function, "higher_is_better", None)

    def update(self, state: ExactSum, outputs: Tensor, targets: Tensor) -> ExactSum:
        """Sum after more examples.

        Raises
        ------
        FedsimError
            If the function does not return one number per example.
        """
        with torch.no_grad():
            values = self.function(outputs, targets)
        if not isinstance(values, torch.Tensor) or values.shape != targets.shape[:1]:
            shape = (
                list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            )
            name = getattr(self.function, "__name__", str(self.function))
            raise FedsimError(
                f"'{name}' gives {shape} for {len(targets)} examples; a loss or a metric of your "
                f"own must give one number for each, [{len(targets)}]."
            )
        return state + ExactSum.from_values(values)


def counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[m, K]``, K at least 2, and classes ``[m]`` of the targets that count.

    A single output z is the logit of class 1 against class 0: the logits are then 0 and z. If z is
    NaN both are, so that class 0 is predicted, as with K outputs.
    """
    if not targets.is_floating_point():
        outputs = with_class_axis(outputs, targets.shape)
    logits = class_logits(outputs, targets).flatten(0, -2)
    if logits.shape[1] == 1:
        logits = torch.cat([torch.where(logits.isnan(), logits, 0.0), logits], dim=1)
    counts = targets.flatten() != IGNORED
    return logits[counts], targets.flatten()[counts]


def with_class_axis(outputs: Tensor, shape: Sequence[int]) -> Tensor:
    """Outputs ``[*shape, K]`` for classes of this shape; a single output may lack its axis."""
    return outputs.unsqueeze(-1) if outputs.shape == torch.Size(shape) else outputs


def predicted_classes(logits: Tensor) -> Tensor:
    """Class of the largest logit of ``[..., K]``; with one output, 1 if it is above 0, else 0."""
    return (logits[..., 0] > 0).long() if logits.shape[-1] == 1 else logits.argmax(-1)


def by_label(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as ``[m, K]``: a column for each label, or number of a vector."""
    columns = (-1, targets.shape[-1] if targets.dim() > 1 else 1)
    return like_targets(outputs, targets).reshape(columns), targets.reshape(columns)


@check_arguments
def metric_of(factory: Callable[..., Any], settings: Mapping[str, Any]) -> Metric:
    """Make a metric from a subclass of `Metric`, or as the mean of a function over examples.

    The function takes outputs, targets and the settings as keywords, and returns one number per
    example, ``[B]``. Objects of any other class are used as such a function.
    """
    made = with_settings(factory, settings)
    return made if isinstance(made, Metric) else MeanOf(made)
