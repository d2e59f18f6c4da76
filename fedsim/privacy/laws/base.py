"""Interface of a law: the privacy cost of a sampler's draw, and what an audit may test of it.

Accountant, ledger, statement, reports, planning and audit use only this interface and name no
law. A new sampler with its law is one file in this package. A user's law lives outside fedsim and
is written into ledgers as data (`fedsim.privacy.laws.declared`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.privacy.losses import DominatingPair, gaussian_rdp
from fedsim.privacy.records import to_json
from fedsim.settings import REQUIRED, Ge, check_settings, settings_of

Adjacency = Literal["add-remove", "zero-out", "replace-one"]
Level = Literal["client", "example"]


@dataclass(frozen=True)
class Inclusion:
    """Inclusion probabilities that an audit compares with the observed draws.

    Attributes
    ----------
    single, pair : float
        Probability that a given row is sampled, and that two given rows both are.
    size : int or None
        Size of every sample; None where it varies.
    """

    single: float
    pair: float
    size: int | None = None


@dataclass(frozen=True)
class Participation:
    """The rounds of a plan in which one row can be sampled (its participation pattern).

    Attributes
    ----------
    rounds : int
        T, the number of rounds of the plan.
    separation : int
        Least distance of two rounds with the same row: after one, the row is in none of the next
        ``separation - 1``. 1 where nothing separates them.
    most : int or None
        Largest number of rounds with the same row; None where only the separation limits it.

    Raises
    ------
    FedsimError
        If one of them is below 1.
    """

    rounds: Annotated[int, Ge(1)]
    separation: Annotated[int, Ge(1)] = 1
    most: Annotated[int | None, Ge(1)] = None

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def participations(self) -> int:
        """Largest number of rounds that one row can be in: k."""
        separated = -(-self.rounds // self.separation)
        return separated if self.most is None else min(self.most, separated)

    def first(self, rounds: int) -> Participation:
        """The same participation over the first ``rounds`` rounds only."""
        return replace(self, rounds=rounds)


@dataclass(frozen=True, kw_only=True)
class Law(ABC):
    """Privacy cost of one draw: of Gaussian noise, multiplier z, on the sum of the sampled rows.

    A subclass is a frozen dataclass of public numbers. A user's law implements `rdp`, and `pairs`
    where dominating pairs are known; both are evaluated once, when an event is made of the law.

    Attributes
    ----------
    name : str
        Name in ledgers and in ``--sampling``.
    neighbours : tuple of adjacencies
        Adjacencies for which the law is proved, the usual one first.
    population : int or None
        Number of rows to draw from: declared, public.
    adjacency : "add-remove", "zero-out" or "replace-one"
        The adjacency that the cost refers to.

    Raises
    ------
    FedsimError
        If the adjacency is not one of `neighbours`, or a number is out of range.
    """

    name: ClassVar[str]
    neighbours: ClassVar[tuple[Adjacency, ...]] = ("add-remove", "zero-out")
    flower_method: ClassVar[str] = "NO_AMPLIFICATION"
    """Member of Flower's ``SamplingMethod`` for this sampling."""

    population: Annotated[int | None, Ge(1)] = None
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        check_settings(self)
        if self.adjacency not in self.neighbours:
            raise FedsimError(
                f"adjacency is {self.adjacency!r}; with {self.name} sampling it must be "
                f"{' or '.join(self.neighbours)}."
            )

    @property
    def rate(self) -> float:
        """Probability that a row is sampled, in (0, 1]; 1 where there is no amplification."""
        return 1.0

    @property
    def rounds(self) -> int:
        """Number of rounds that one event covers; more than 1 if they are not independent.

        The event is charged before the first of them, and the others are then free.
        """
        return 1

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity, in units of C, of the one Gaussian that all rounds of an event form."""
        return 1.0

    @property
    def redraw_law(self) -> Law | None:
        """Law of one covered round repeated with different data; None for a plain Gaussian."""
        return None

    @property
    def known_sample_law(self) -> Law | None:
        """Law of the same rounds for an adversary who knows which rows were sampled.

        None for one plain Gaussian a round, which is always enough. A law whose event covers
        several rounds, not all of which a row is in, gives a law of as many rounds here.
        """
        return None

    def gaussian(self, noise_multiplier: float) -> float | None:
        """``mu``, sensitivity over standard deviation, if a draw is one plain Gaussian, else None.

        Replacing a row moves the sum by 2C.
        """
        if self.rate < 1:
            return None
        return (2 if self.adjacency == "replace-one" else 1) / noise_multiplier

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair] | None:
        """Dominating pairs for removing a row and for adding one; None where they are unknown.

        Without them only Rényi accounting is possible.
        """
        return None

    def rdp(self, noise_multiplier: float) -> Floats:
        """Rényi curve at `fedsim.privacy.losses.ORDERS`: the worse of removing and adding a row."""
        mu = self.gaussian(noise_multiplier)
        if mu is None:
            raise NotImplementedError(f"{type(self).__name__} gives no Rényi curve.")
        return gaussian_rdp(mu)

    def group_sampling(self, size: int) -> Floats | None:
        """Probabilities that 0, 1, ... ``size`` of ``size`` given rows are sampled, if known.

        Used for the privacy of groups (`fedsim.privacy.groups`).
        """
        return None

    def inclusion(self, population: int) -> Inclusion | None:
        """Inclusion probabilities in a given population; None: an audit tests only valid ids."""
        return Inclusion(self.rate, self.rate**2, population if self.rate == 1 else None)

    def as_poisson(self) -> Law | None:
        """Poisson sampling at the same rate, where it would cost less (a hint for the user)."""
        return None

    def expected_size(self, population: int) -> float:
        """Expected number of rows of a sample; all of them if sampling does not amplify."""
        return self.rate * population

    def with_sample_size(self, size: float, population: int) -> Law:
        """The same kind of law, for samples of expected ``size`` out of ``population``.

        A law that is not known for other sizes covers samples up to its own expected size.

        Raises
        ------
        FedsimError
            If it does not cover ``size``.
        """
        if size > math.ceil(self.expected_size(population)):
            raise FedsimError(
                f"samples have {size:g} of {population:,} rows; with the declared law "
                f"({self.label}) they have {self.expected_size(population):,.4g}, and more would "
                "cost more: declare the law of the samples that are drawn."
            )
        return replace(self, population=population)

    def comparable(self, other: Law) -> bool:
        """Whether the one of larger rate costs at least as much as the other, at equal noise."""
        return type(self) is type(other) and self.adjacency == other.adjacency

    @property
    def is_gaussian(self) -> bool:
        """Whether the release is a plain Gaussian once the sample is known (true of fedsim's)."""
        return True

    @property
    @abstractmethod
    def label(self) -> str:
        """Short description, for tables, such as "Poisson, rate 0.1"."""

    @abstractmethod
    def sentence(self, row: str) -> str:
        """How a ``row`` ("client", "example") is sampled: a phrase of the privacy statement."""

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        expected = self.expected_size(population)
        return f"Clients of a round: {self.label}; about {expected:,.4g} of {population:,}."

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Build it from the command line's options (rate, size, population, ...).

        Raises
        ------
        FedsimError
            If an option is not a field of this law, or one that it needs is missing.
        """
        defaults = {setting.name: setting.default for setting in settings_of(cls)}
        names = defaults.keys()
        if options.keys() - names:
            other_names = [name for name in ("rate", "size") if name not in names]
            negation = f"neither --{other_names[0]} nor" if len(other_names) > 1 else "no"
            raise FedsimError(f"--sampling {cls.name} takes {negation} --{other_names[-1]}.")
        if missing := [n for n in names - options.keys() if defaults[n] is REQUIRED]:
            needed = " and ".join(f"--{name}" for name in sorted(missing, reverse=True))
            raise FedsimError(f"--sampling {cls.name} needs {needed}.")
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """The law as JSON, for the ledger."""
        return {"name": self.name, **dict(sorted(to_json(self).items()))}


def check_level(
    level: Level,
    adjacency: Adjacency,
    allowed: tuple[Adjacency, ...] = ("zero-out", "replace-one"),
) -> None:
    """Refuse neighbours that differ in a client's number of examples, which is public.

    Raises
    ------
    FedsimError
        If ``adjacency`` is not among the ``allowed`` ones at example level.
    """
    if level == "example" and adjacency not in allowed:
        raise FedsimError(
            f"adjacency is {adjacency!r}; at example level it must be {' or '.join(allowed)}, "
            "since how many examples a client has is public."
        )


def is_shipped(value: object) -> bool:
    """Whether its class is part of fedsim, rather than declared by the user."""
    return type(value).__module__.partition(".")[0] == "fedsim"


@dataclass(frozen=True, kw_only=True)
class WrappingLaw(Law):
    """A law built on another one, its ``base``, such as that of correlated noise."""

    neighbours: ClassVar = ("add-remove", "zero-out", "replace-one")

    base: Law

    @property
    def rate(self) -> float:
        """Sampling rate of the base."""
        return self.base.rate

    def comparable(self, other: Law) -> bool:
        """Only with an equal law."""
        return self == other

    def expected_size(self, population: int) -> float:
        """That of the base."""
        return self.base.expected_size(population)

    def round_sentence(self, population: int) -> str:
        """Which clients take part in a round: a sentence for reports."""
        return self.base.round_sentence(population)
