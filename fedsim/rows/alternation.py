"""Parameters that are trained in turns, in a row whose layout stays the same in all rounds."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.rows.layout import Layout


@dataclass(frozen=True)
class Alternation:
    """In round r (from 1) the part ``(r - 1) mod k`` of ``k`` is trained, and the others rest.

    What rests has zeros in every row: it enters no norm and no bound, so that a row's whole bound
    is for what is trained. A server drops what a release has at those places. That is
    post-processing of the release, and nothing but noise, since all rows are zero there: the
    guarantee is that of a release of the whole row, and no noise ever reaches a parameter that
    rests.

    Attributes
    ----------
    parts : tuple of tuples of str
        Names of parameters. Those that no part has are trained in every round.
    """

    parts: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        every = [name for names in self.parts for name in names]
        if len(self.parts) < 2 or not all(self.parts) or len(set(every)) < len(every):
            raise FedsimError("an alternation must have two or more parts without common names.")

    def resting(self, turn: int) -> frozenset[str]:
        """Names of what rests while the part of this number is trained."""
        return frozenset(n for k, names in enumerate(self.parts) for n in names if k != turn)

    def part_of(self, round: int) -> int:
        """The number of the part that is trained in a round."""
        return (round - 1) % len(self.parts)

    def trained(self, layout: Layout, turn: int) -> Tensor:
        """Columns of a row that are trained with that part, int64 ``[a]``.

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
        """``values [d]`` at what a round trains, and ``resting [d]`` at what rests in it."""
        columns = self.trained(layout, self.part_of(round)).to(values.device)
        return resting.index_copy(0, columns, values[columns])
