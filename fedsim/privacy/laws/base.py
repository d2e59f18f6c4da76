"""The law of a sampler's draws: what it costs, and what an audit may test of it.

Accountant, ledger, statement, pages, planning and audit ask the law, and none of them names one.
A new sampler with a law of its own is one file beside this one; a user's law is such a file
elsewhere, and is written into ledgers as data (`fedsim.privacy.laws.declared`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

from fedsim.errors import FedsimError
from fedsim.privacy.losses import Array, DominatingPair, gaussian_rdp
from fedsim.privacy.records import to_json
from fedsim.settings import check_settings

Adjacency = Literal["add-remove", "zero-out", "replace-one"]
Level = Literal["client", "example"]


@dataclass(frozen=True)
class Inclusion:
    """What an audit may test of a draw.

    Attributes
    ----------
    one, two : float
        Probability of any one row being in, and of any two.
    size : int or None
        Of every sample, where it is fixed.
    """

    one: float
    two: float
    size: int | None = None


@dataclass(frozen=True)
class Participation:
    """In which rounds of a plan one row can be.

    Attributes
    ----------
    rounds : int
        T, of the plan.
    separation : int
        A row that is in one round is in none of the next ``separation - 1``; 1 for any rounds.
    most : int or None
        How many rounds a row can be in, if that is limited besides.

    Raises
    ------
    FedsimError
        If one of them is below 1.
    """

    rounds: int
    separation: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "separation", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FedsimError(f"{name} is {value}; it must be 1 or more.")

    @property
    def participations(self) -> int:
        """How many rounds a row can be in: k."""
        separated = -(-self.rounds // self.separation)
        return separated if self.most is None else min(self.most, separated)

    def first(self, rounds: int) -> Participation:
        """Of the first so many rounds."""
        return replace(self, rounds=rounds)


@dataclass(frozen=True, kw_only=True)
class Law(ABC):
    """What one draw costs: a Gaussian of multiplier z on a sum of rows that were so drawn.

    A subclass is a frozen dataclass of public numbers. One of a user's gives `rdp`, and `pairs`
    where it knows them; it is discretised when an event is made of it.

    Attributes
    ----------
    name : str
        As ledgers and ``--sampling`` call it.
    neighbours : tuple of adjacencies
        Those it is proved for, the usual one first.
    population : int or None
        How many there are to draw from, a declared public number.
    adjacency : "add-remove", "zero-out" or "replace-one"

    Raises
    ------
    FedsimError
        If the adjacency is not one of `neighbours`, or the population is below 1.
    """

    name: ClassVar[str]
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("add-remove", "zero-out")
    flower: ClassVar[str] = "NO_AMPLIFICATION"
    """Flower's name for such sampling, in its ``SamplingMethod``."""

    population: int | None = None
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        check_settings(self)
        if self.adjacency not in self.neighbours:
            raise FedsimError(
                f"adjacency is {self.adjacency!r}; with {self.name} sampling it must be "
                f"{' or '.join(self.neighbours)}."
            )
        if self.population is not None and self.population < 1:
            raise FedsimError(f"population is {self.population}; it must be 1 or more.")

    @property
    def rate(self) -> float:
        """Probability of a row being in, in (0, 1]; 1 where sampling amplifies nothing."""
        return 1.0

    @property
    def rounds(self) -> int:
        """How many rounds one event covers: more than 1 if they are not independent.

        It is charged before the first of them; the others then cost nothing.
        """
        return 1

    @property
    def sensitivity(self) -> float:
        """The most that a row moves the one Gaussian that all rounds of an event may be, over C."""
        return 1.0

    @property
    def redrawn(self) -> Law | None:
        """What repeating one of several rounds with other data costs; None for a plain Gaussian."""
        return None

    @property
    def continued(self) -> Law | None:
        """What must have been charged before, if this is only what is charged beyond it."""
        return None

    def covers(self, law: Law) -> bool:
        """Whether all that this one's events and those before them charge includes that law."""
        return self == law

    def gaussian(self, noise_multiplier: float) -> float | None:
        """Sensitivity in standard deviations where a draw is one plain Gaussian; None elsewhere.

        Replacing a row moves the sum by 2C.
        """
        if self.rate < 1:
            return None
        return (2 if self.adjacency == "replace-one" else 1) / noise_multiplier

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair] | None:
        """Dominating pairs, of removing a row and of adding one; None where none is known.

        Without them Rényi accounting is all there is.
        """
        return None

    def rdp(self, noise_multiplier: float) -> Array:
        """Rényi curve at `fedsim.privacy.losses.ORDERS`, of the worse direction."""
        mu = self.gaussian(noise_multiplier)
        if mu is None:
            raise NotImplementedError(f"{type(self).__name__} gives no Rényi curve.")
        return gaussian_rdp(mu)

    def together(self, size: int) -> Array | None:
        """Probabilities that 0, 1, ... ``size`` given rows are in together; None if unknown."""
        return None

    def inclusion(self, population: int) -> Inclusion | None:
        """What an audit may test of draws from so many; None: nothing but that ids are valid."""
        return Inclusion(self.rate, self.rate**2, population if self.rate == 1 else None)

    def as_poisson(self) -> Law | None:
        """Independent draws at the same rate, where those would cost less."""
        return None

    def sampled(self, size: float, population: int) -> Law:
        """The same kind of draw, of an expected ``size`` out of ``population``."""
        return replace(self, population=population)

    def comparable(self, other: Law) -> bool:
        """Whether of these two the one with the larger rate costs no less at equal noise."""
        return type(self) is type(other) and self.adjacency == other.adjacency

    @property
    def is_gaussian(self) -> bool:
        """Whether a draw is one Gaussian if the sample is known, as of all fedsim's own laws."""
        return True

    @property
    @abstractmethod
    def label(self) -> str:
        """A few words for a table, such as "Poisson, rate 0.1"."""

    @abstractmethod
    def sentence(self, row: str) -> str:
        """How a ``row`` ("client") is drawn: part of a statement's sentence."""

    def round_sentence(self, population: int) -> str:
        """Who takes part in a round, for a report's reader."""
        expected = self.rate * population
        return f"Clients of a round: {self.label}; about {expected:,.4g} of {population:,}."

    @classmethod
    def of_options(cls, **options: Any) -> Self:
        """From options that were given on a command line, of rate, size and so on.

        Raises
        ------
        FedsimError
            If it takes others.
        """
        names = {field.name for field in fields(cls)}
        if options.keys() - names:
            others = [name for name in ("rate", "size") if name not in names]
            neither = f"neither --{others[0]} nor" if len(others) > 1 else "no"
            raise FedsimError(f"--sampling {cls.name} takes {neither} --{others[-1]}.")
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """How it is written in a ledger."""
        return {"name": self.name, **dict(sorted(to_json(self).items()))}


def is_shipped(value: object) -> bool:
    """Whether its class is fedsim's own, and nobody has to answer for it."""
    return type(value).__module__.partition(".")[0] == "fedsim"


@dataclass(frozen=True, kw_only=True)
class WrappingLaw(Law):
    """A law around another, its ``base``: of noise that rounds share, of the best of runs."""

    neighbours: ClassVar = ("add-remove", "zero-out", "replace-one")

    base: Law

    @property
    def rate(self) -> float:
        """That of the base."""
        return self.base.rate

    def comparable(self, other: Law) -> bool:
        """Only if it is the same."""
        return self == other

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round, for a report."""
        return self.base.round_sentence(population)
