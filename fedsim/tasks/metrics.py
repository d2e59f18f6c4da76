"""Metrics as (init, update, merge, finish): the same number however examples are cut into blocks.

A state is a value: `update` gives a new one that has seen more examples, `merge` one that has seen
what two have seen. What is counted is counted in whole numbers, and what is added is added without
rounding (`ExactSum`), so that states merge to the same result in any order and any tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.settings import check_settings
from fedsim.tasks.exact_sum import ExactSum
from fedsim.tasks.losses import IGNORED, Loss, class_logits, with_settings


class Metric(ABC):
    """What an evaluation reports. Subclasses are frozen dataclasses of their settings.

    Attributes
    ----------
    higher_is_better : bool
        What is looked for, where one of several runs is chosen.
    """

    higher_is_better: ClassVar[bool] = True

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


@dataclass(frozen=True)
class MeanOf(Metric):
    """Mean over examples of a number that each has, such as a loss.

    Parameters
    ----------
    function : callable ``(outputs [B, ...], targets [B, ...]) -> [B]``
    """

    function: Loss
    higher_is_better: ClassVar[bool] = False

    def init(self) -> ExactSum:
        """Nothing seen."""
        return ExactSum()

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

    def merge(self, first: ExactSum, second: ExactSum) -> ExactSum:
        """Both."""
        return first + second

    def finish(self, state: ExactSum) -> float:
        """The mean."""
        return state.mean


def counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[m, K]`` and classes ``[m]`` of the targets that count."""
    if outputs.shape == targets.shape and not targets.is_floating_point():
        outputs = outputs.unsqueeze(-1)
    logits = class_logits(outputs, targets).flatten(0, -2)
    counts = targets.flatten() != IGNORED
    return logits[counts], targets.flatten()[counts]


def metric_of(thing: Callable[..., Any], settings: Mapping[str, Any]) -> Metric:
    """A metric: an object of a `Metric`'s class, or the mean of what a function gives.

    The function takes outputs and targets, and settings beside them, to one number for each
    example, ``[B]``. An object of any other class is such a function.
    """
    if not isinstance(thing, type):
        return MeanOf(with_settings(thing, settings))
    made = thing(**settings)
    return made if isinstance(made, Metric) else MeanOf(made)
