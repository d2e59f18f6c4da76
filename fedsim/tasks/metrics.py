"""Metrics as (init, update, merge, finish): the same number however examples are cut into blocks.

A state is a value: `update` gives a new one that has seen more examples, `merge` one that has seen
what two have seen. What is counted is counted in whole numbers, and what is added is added without
rounding (`ExactSum`), so that states merge to the same result in any order and any tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.settings import check_settings
from fedsim.tasks.losses import IGNORED, Loss, class_logits, like_targets, with_settings

Floats = npt.NDArray[np.float64]

# Below every bit of a float64, denormal or not.
LEAST_BIT = 1200
HALF = 26


@dataclass(frozen=True)
class ExactSum:
    """A sum of float64 numbers that no order of adding changes.

    Attributes
    ----------
    units : int
        The sum in units of 2^-1200.
    count : int
        How many numbers.
    bad : int
        How many of them were not finite.
    """

    units: int = 0
    count: int = 0
    bad: int = 0

    @classmethod
    def of(cls, values: Tensor | Floats) -> Self:
        """Sum of all numbers of an array."""
        if isinstance(values, torch.Tensor):
            values = values.detach().double().numpy()
        flat = np.asarray(values, dtype=np.float64).ravel()
        finite = flat[np.isfinite(flat)]
        fraction, exponent = np.frexp(finite)
        digits = np.ldexp(fraction, 53).astype(np.int64)
        shifts, which = np.unique(exponent, return_inverse=True)
        # Halves of 26 bits: sums of 2^26 of them are whole numbers that float64 holds.
        low = np.bincount(which, weights=digits & (2**HALF - 1), minlength=len(shifts))
        high = np.bincount(which, weights=digits >> HALF, minlength=len(shifts))
        units = sum(
            ((int(h) << HALF) + int(lo)) << (int(shift) - 53 + LEAST_BIT)
            for shift, lo, h in zip(shifts, low, high, strict=True)
        )
        return cls(units, len(flat), len(flat) - len(finite))

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.count + other.count, self.bad + other.bad)

    @property
    def mean(self) -> float:
        """The mean, rounded once; NaN over nothing, or where a number was not finite."""
        if self.bad or not self.count:
            return float("nan")
        return self.units / (self.count << LEAST_BIT)


class Metric(ABC):
    """What an evaluation reports. Subclasses are frozen dataclasses of their settings.

    Attributes
    ----------
    higher_is_better : bool
        What is looked for, where one of several runs is chosen.
    ends : pair of float, or None
        The range that it never leaves, where there is one.
    """

    higher_is_better: ClassVar[bool] = True
    ends: ClassVar[tuple[float, float] | None] = None

    def __post_init__(self) -> None:
        check_settings(self, f"{type(self).__name__}.")

    @abstractmethod
    def init(self) -> Any:
        """State of nothing seen."""

    @abstractmethod
    def update(self, state: Any, outputs: Tensor, targets: Tensor) -> Any:
        """State after more examples.

        Parameters
        ----------
        state : what `init`, `update` or `merge` gave
        outputs : Tensor ``[B, ...]``
            Of the model; on the CPU, as all tensors here.
        targets : Tensor ``[B, ...]``
            With `fedsim.tasks.IGNORED` (classes) or NaN (numbers) where one does not count.
        """

    @abstractmethod
    def merge(self, first: Any, second: Any) -> Any:
        """State of what both have seen: exact, and the same in any order."""

    @abstractmethod
    def finish(self, state: Any) -> float:
        """The metric; NaN where it is not defined (an AUC of one class, or of nothing)."""


class Mean(Metric):
    """The mean of numbers that `update` adds, or what `finish` makes of it: of errors, mostly."""

    higher_is_better: ClassVar[bool] = False

    def init(self) -> ExactSum:
        """Nothing seen."""
        return ExactSum()

    def merge(self, first: ExactSum, second: ExactSum) -> ExactSum:
        """Both."""
        return first + second

    def finish(self, state: ExactSum) -> float:
        """The mean."""
        return state.mean


@dataclass(frozen=True)
class MeanOf(Mean):
    """Mean over examples of a number that each has, such as a loss.

    Parameters
    ----------
    function : callable ``(outputs [B, ...], targets [B, ...]) -> [B]``
    """

    function: Loss

    def update(self, state: ExactSum, outputs: Tensor, targets: Tensor) -> ExactSum:
        """More examples.

        Raises
        ------
        FedsimError
            If the function does not give one number for each.
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
        return state + ExactSum.of(values)


def counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[m, K]`` and classes ``[m]`` of the targets that count."""
    if outputs.shape == targets.shape and not targets.is_floating_point():
        outputs = outputs.unsqueeze(-1)
    logits = class_logits(outputs, targets).flatten(0, -2)
    counts = targets.flatten() != IGNORED
    return logits[counts], targets.flatten()[counts]


def predicted_classes(logits: Tensor) -> Tensor:
    """The class of the largest of ``[..., K]``; with one output, whether that is above 0."""
    return (logits[..., 0] > 0).long() if logits.shape[-1] == 1 else logits.argmax(-1)


def by_label(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as ``[m, K]``: a column for each label, or number of a vector."""
    columns = (-1, targets.shape[-1] if targets.dim() > 1 else 1)
    return like_targets(outputs, targets).reshape(columns), targets.reshape(columns)


def metric_of(thing: Callable[..., Any], settings: Mapping[str, Any]) -> Metric:
    """A metric: an object of a `Metric`'s class, or the mean of what a function gives.

    The function takes outputs and targets, and settings beside them, to one number for each
    example, ``[B]``. An object of any other class is such a function.
    """
    if not isinstance(thing, type):
        return MeanOf(with_settings(thing, settings))
    made = thing(**settings)
    return made if isinstance(made, Metric) else MeanOf(made)
