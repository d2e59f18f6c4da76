"""Alternating training: parts of the parameters take turns, in rows of one fixed layout."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.rows.layout import Layout


@dataclass(frozen=True)
class Alternation:
    """In round r (from 1) part ``(r - 1) mod k`` of ``k`` parts is trained, and the others rest.

    Resting parameters are zero in every row. They add nothing to a norm, so that the whole clip
    norm is available to the trained ones. The server drops the release at their places, where it
    is noise alone: this is post-processing, so that the guarantee is that of a release of the
    whole row, and no noise reaches a resting parameter.

    Attributes
    ----------
    parts : tuple of tuples of str
        Names of each part's parameters. Parameters in no part are trained in every round.
    """

    parts: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        all_names = [name for names in self.parts for name in names]
        if len(self.parts) < 2 or not all(self.parts) or len(set(all_names)) < len(all_names):
            raise FedsimError("an alternation must have two or more parts without common names.")

    def resting(self, turn: int) -> frozenset[str]:
        """Names of the parameters that rest while part ``turn`` is trained."""
        return frozenset(n for k, names in enumerate(self.parts) for n in names if k != turn)

    def part_of(self, round: int) -> int:
        """Index of the part that is trained in a round."""
        return (round - 1) % len(self.parts)

    def trained(self, layout: Layout, turn: int) -> Tensor:
        """Columns of a row that are trained together with part ``turn``, int64 ``[a]``.

        Raises
        ------
        FedsimError
            If the layout lacks one of the parts' parameters.
        """
        missing = {n for names in self.parts for n in names} - set(layout.slices())
        if missing:
            raise FedsimError(f"'{min(missing)}' is to be trained in turns, and is in no row.")
        resting = self.resting(turn)
        ranges = [
            torch.arange(entry.start, entry.stop)
            for entry in layout.entries
            if entry.name not in resting
        ]
        return torch.cat(ranges)

    def replaced(self, values: Tensor, resting: Tensor, layout: Layout, round: int) -> Tensor:
        """``values [d]`` at the columns that a round trains, ``resting [d]`` at the others."""
        columns = self.trained(layout, self.part_of(round)).to(values.device)
        return resting.index_copy(0, columns, values[columns])
