"""Samplers of one's own, by inclusion probabilities, and what is known of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError
from fedsim.privacy.events import Adjacency, Event
from fedsim.privacy.samplers import Poisson
from fedsim.privacy.sampling import Ids, Sampler, SamplerDefaults, check_population
from fedsim.randomness import Draws

__all__ = ["InclusionSampler", "declared_by_user", "of_user"]

_DERIVED = {"draw", "event", "law", "gaussians", "rate", "adjacency", "_probabilities"}


class InclusionSampler(SamplerDefaults):
    """Base of samplers that let each row in independently, with a probability of its own.

    A subclass says `probabilities` and nothing else: draw and event follow from them, and an
    audit can hold inclusion frequencies against them, one by one, in pairs and over rounds.

    Guarantee: add-remove, that of Poisson sampling at ``highest``. Nobody's probability may
    depend on what is private of anybody.

    Parameters
    ----------
    population : int
        Declared public number.
    highest : float
        No probability of any round is above it, in (0, 1]: what the event charges.
    """

    name: ClassVar[str] = "inclusion"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Of its own, and from classes that stand before this one among its bases.
        nearer = cls.__mro__[: cls.__mro__.index(InclusionSampler)]
        derived = _DERIVED & {name for definition in nearer for name in vars(definition)}
        if derived:
            raise FedsimError(
                f"{cls.__name__} defines {', '.join(sorted(derived))}; an InclusionSampler says "
                "its probabilities only, and the rest follows from them."
            )

    def __init__(self, population: int, highest: float) -> None:
        check_population(population)
        if not 0 < highest <= 1:
            raise FedsimError(f"the highest probability is {highest}; it must lie in (0, 1].")
        self.population, self.highest = population, highest

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.population}, {self.highest})"

    def probabilities(self, round: int) -> npt.NDArray[np.float64]:
        """Probability of each being in this round, public, ``[population]``."""
        raise NotImplementedError

    @property
    def rate(self) -> float:
        """The highest probability."""
        return self.highest

    @property
    def adjacency(self) -> Adjacency:
        """Add-remove."""
        return "add-remove"

    @property
    def expected_size(self) -> float:
        """The sum of the first round's probabilities, for every round."""
        return float(self._probabilities(1).sum())

    def draw(self, round: int, draws: Draws, step: int = 0) -> Ids:
        """Sorted ids: a Poisson sample at the highest probability, thinned."""
        candidates = Poisson(self.highest, self.population).draw(round, draws, 2 * step)
        numbers = draws.generator(round, 2 * step + 1).random(len(candidates))
        return candidates[numbers * self.highest < self._probabilities(round)[candidates]]

    def law(self) -> Event:
        """Poisson sampling at the highest probability."""
        return Poisson(self.highest, self.population).law()

    def _probabilities(self, round: int) -> npt.NDArray[np.float64]:
        p = np.asarray(self.probabilities(round), dtype=np.float64)
        if p.shape != (self.population,) or not ((p >= 0) & (p <= self.highest)).all():
            raise FedsimError(
                f"the probabilities of round {round} must be {self.population} numbers in "
                f"[0, {self.highest:g}], since the event charges the highest."
            )
        return p


def declared_by_user(sampler: Sampler) -> bool:
    """Whether nothing but the sampler's own word says that its event is true of its draws."""
    return of_user(sampler) and not isinstance(sampler, InclusionSampler)


def of_user(value: object) -> bool:
    """Whether its class, or that of a bound that it is composed of, is not fedsim's."""
    ours = type(value).__module__.partition(".")[0] == "fedsim"
    return not ours or any(map(of_user, _bounds_in(value)))


def _bounds_in(value: object) -> Iterator[object]:
    """Bounds that a bound is composed of: its fields, or what these list."""
    if isinstance(value, list | tuple):
        inner = list(value)
    else:
        inner = [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else []
    for entry in inner:
        yield from [entry] if hasattr(entry, "guarantee") else _bounds_in(entry)
