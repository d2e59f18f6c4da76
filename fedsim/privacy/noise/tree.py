"""Binary tree noise: sums over rounds are estimated from the noisy sums of the tree's nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Participation
from fedsim.privacy.noise.base import NoiseDraws, NoiseState
from fedsim.privacy.noise.correlated import Correlated
from fedsim.registry import register


@register("noise", "tree")
@dataclass(frozen=True)
class Tree(Correlated):
    """Binary trees, one after another, over as many rounds as a row is in one of (DP-FTRL).

    Each node is the noisy sum of its rounds. The sum of the rounds so far is estimated from the
    complete nodes that make it up, each from its own noise and its children's, weighted by their
    precisions (Honaker 2015; Kairouz et al. 2021). The one coefficient is the number of rounds of
    a tree. The state is at most one vector for each level.
    """

    name: ClassVar[str] = "tree"
    form: ClassVar[str] = "the number of rounds of a tree"

    def best_coefficients(self, participation: Participation) -> str:
        """The number of rounds from one participation of a row to its next."""
        is_once = participation.participations == 1
        return str(participation.rounds if is_once else participation.separation)

    def are_coefficients(self, numbers: Sequence[float]) -> bool:
        """Whether they are one whole number, from 1 to 2^31 - 1."""
        return self.coefficients.isdecimal() and 1 <= numbers[0] < 2**31

    @property
    def bands(self) -> int:
        """Number of rounds of a tree: rounds of different trees have no noise in common."""
        return int(self.coefficient_values()[0])

    @property
    def column_norm(self) -> float:
        """Root of the number of levels: a round is in one node of each."""
        return math.sqrt(self.bands.bit_length())

    def sensitivity(self, participation: Participation) -> float:
        """L2 sensitivity to a row that is in at most one round of each tree.

        Raises
        ------
        FedsimError
            If a row can be in two rounds of a tree.
        """
        count = participation.participations
        if count > 1 and participation.separation < self.bands:
            raise FedsimError(
                f"noise.coefficients is {self.coefficients}; with noise.name = 'tree' it must be "
                f"at most {participation.separation}, the rounds from one participation of a "
                "client to the next: it may be in one round of a tree only."
            )
        return self.column_norm * math.sqrt(count)

    def repeat_sensitivity(self, participation: Participation) -> float:
        """L2 sensitivity of the nodes that a round completes; a row is in each at most once."""
        return self.column_norm

    def matrix(self, rounds: int) -> Floats:
        """The lower triangular C whose noise has the same covariance as the tree's.

        The tree itself is a matrix with a row for each node. Its noise over rounds, ``noise Z``,
        has the covariance ``noise noise^T = L L^T``, and C is the inverse of L.
        """
        # Rows of weights of the nodes' own noises, for each node's estimate and for each prefix.
        period, heights = self.bands, range(self.bands.bit_length())
        numbers = {node: index for index, node in enumerate(_nodes(rounds, period))}
        estimates: dict[tuple[int, int], Floats] = {}
        for (end, height), index in sorted(numbers.items(), key=lambda item: item[0][1]):
            own_noise = np.eye(1, len(numbers), index)[0]
            estimates[end, height] = own_noise
            if height:
                part = 1 / (2 - 0.5**height)  # the weight of the own noise, as in `combine`
                left, right = ((end - h, height - 1) for h in (1 << (height - 1), 0))
                estimates[end, height] *= part
                estimates[end, height] += (1 - part) * (estimates[left] + estimates[right])
        sums = np.zeros((rounds, len(numbers)))
        for row, end in zip(sums, range(1, rounds + 1), strict=True):
            # The nodes of a prefix of a tree are the binary digits of its l2_norm. All earlier
            # trees are in the last sum before this one began.
            start = (end - 1) // period * period
            for height in heights:
                if end - start >> height & 1:
                    row += estimates[start + (end - start >> height << height), height]
            row += sums[start - 1] if start else 0
        noise = np.diff(sums, axis=0, prepend=0)
        return np.asarray(np.linalg.inv(np.linalg.cholesky(noise @ noise.T)))

    def variances(self, rounds: int) -> Floats:
        """Variance of one coordinate of the summed noise of rounds 1 to t, at multiplier 1.

        The estimate of a complete node of height h has the variance ``1 / (2 - 2^-h)``.
        """
        period = self.bands
        heights = np.arange(period.bit_length())
        of_node = 1 / (2 - 0.5**heights)
        lengths = np.arange(1, period + 1)[:, None]
        in_tree = ((lengths >> heights & 1) * of_node).sum(1)
        trees, place = np.divmod(np.arange(1, rounds + 1), period)
        return np.asarray(trees * in_tree[-1] + np.concatenate([[0.0], in_tree])[place])

    def combine(self, draws: NoiseDraws, state: NoiseState) -> tuple[Any, NoiseState]:
        """Change in the noise of the estimated sum of all rounds so far.

        The state is the noise of the estimates of the complete nodes that make up the current
        tree's prefix, by height. Like a carry in binary addition, a round replaces the nodes of
        the lowest heights by the one that they complete.
        """
        l2_norm = (draws.round - 1) % self.bands + 1
        nodes = {} if l2_norm == 1 else dict(state)
        estimate, noise, variance, height = draws(), None, 1.0, 0
        while not l2_norm >> height & 1:
            left_estimate = nodes.pop(str(height))
            noise = -left_estimate if noise is None else noise - left_estimate
            # Two independent estimates of the node: by its own noise, of variance 1, and by its
            # children's sum, of variance 2v. Weighted by precision they have 2v / (1 + 2v), which
            # is also the weight of the own noise.
            part = 2 * variance / (1 + 2 * variance)
            height, variance = height + 1, part
            estimate = part * draws(0, height) + (1 - part) * (left_estimate + estimate)
        nodes[str(height)] = estimate
        return estimate if noise is None else estimate + noise, nodes


def _nodes(rounds: int, period: int) -> list[tuple[int, int]]:
    """Complete nodes of the trees over ``rounds`` rounds, as (last round, height)."""
    return [
        (end, height)
        for end in range(1, rounds + 1)
        for height in range(period.bit_length())
        if ((end - 1) % period + 1) % (1 << height) == 0
    ]
