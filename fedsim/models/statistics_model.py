"""A model for which one gradient step computes a client's statistics, used by `fedsim stats`.

Its parameter has one entry per sum. With the loss of the same name, its gradient for an example is
minus the row that the example adds to the sums. So one step at rate 1 on all of a client's examples
gives the client's mean row, and one round, on any engine, gives a noisy sum of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedsim.mechanisms.bounded_values import Moments
from fedsim.models.networks import Network
from fedsim.registry import register

if TYPE_CHECKING:
    from torch import nn


@register("model", "statistics")
@dataclass(frozen=True)
class Statistics(Network):
    """Not a predictor: sums that give means, deviations, quantiles and shares of classes."""

    inputs: Literal["none", "each", "together"] = "each"
    """Which statistics of inputs are computed: of each feature or channel, of all together, or
    none."""
    low: float = 0.0
    """The lower end to which inputs are clamped."""
    high: float = 1.0
    """The upper end to which inputs are clamped."""
    quantiles: bool = False
    """Whether histograms, and quantiles from them, are released."""
    targets: Literal["none", "classes", "numbers"] = "none"
    """The kind of targets; 'none' for no statistics of targets."""

    @property
    def moments(self) -> Moments:
        """Encoding of an input in the sums."""
        return Moments("inputs", self.low, self.high, self.quantiles)

    def columns(self, input_shape: Sequence[int]) -> int:
        """Number of inputs (features or channels) that have sums of their own."""
        return {"none": 0, "each": input_shape[0], "together": 1}[self.inputs]

    def target_sums(self, outputs: int) -> int:
        """Number of sums of targets, given the number of classes or of numbers in a target."""
        return {"none": 0, "classes": outputs, "numbers": self.moments.size * outputs}[self.targets]

    def __call__(self, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        """Build it for inputs of this shape and targets of so many classes or numbers."""
        # Imported here so that reading a config does not load torch.
        from fedsim.models.sums import Sums

        columns = self.columns(input_shape)
        return Sums(self.moments, columns, self.target_sums(num_classes))
