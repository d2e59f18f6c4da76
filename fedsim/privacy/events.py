"""Events: what one release costs, before anybody turns it into an epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

from fedsim.errors import FedsimError

__all__ = ["Adjacency", "Event", "Level", "Sampling", "common_adjacency", "dominating_event"]

Sampling = Literal["poisson", "fixed", "full", "shuffle"]
Adjacency = Literal["add-remove", "zero-out", "replace-one"]
Level = Literal["client", "example"]

# Which neighbours a sampler's amplification is proved for. Without amplification (full,
# shuffle) a fixed denominator makes every relation valid, at its own sensitivity.
ALLOWED: Mapping[Sampling, tuple[Adjacency, ...]] = {
    "poisson": ("add-remove", "zero-out"),
    "fixed": ("replace-one",),
    "full": ("zero-out", "add-remove", "replace-one"),
    "shuffle": ("zero-out", "add-remove", "replace-one"),
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One noisy sum, or ``count`` equal ones, as the accountant sees it.

    All fields are public information.

    Attributes
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by the clip norm, whatever the
        adjacency. 0 is a release without noise, infinity one that says nothing.
    sampler : "poisson", "fixed", "full" or "shuffle"
        How the rows of the sum were drawn. "fixed" is without replacement; "shuffle" is one
        pass over shuffled rows, charged as one unamplified Gaussian a pass.
    rate : float
        Probability of a row taking part (Poisson), or share of the rows (fixed).
    size, population : int or None
        The fixed size, and how many there are to draw from. Required by "fixed".
    adjacency : "add-remove", "zero-out" or "replace-one"
        Defaults to the sampler's own: add-remove for Poisson, replace-one for fixed,
        zero-out otherwise.
    count : int
        Invocations: 2 for an ADADP iteration, T for T equal steps of a client.
    sides : mapping of name to float
        Noise multipliers of the bounded scalars released from the same rows, each with
        noise of its own. Together with the main sum: ``1/z^2 = sum 1/z_j^2``.
    guarantee : bool
        False when the release is not private although noise was added, such as a mechanism
        with un-noised statistics; its epsilon is infinite.

    Raises
    ------
    FedsimError
        If a value is outside its range, or the adjacency is not the sampler's.

    Examples
    --------
    >>> from fedsim.privacy import Accountant
    >>> week = Event(noise_multiplier=2.0, sampler="poisson", rate=0.1).times(7)
    >>> round(Accountant([week]).epsilon(delta=1e-5), 2)
    0.69
    """

    noise_multiplier: float
    sampler: Sampling = "poisson"
    rate: float = 1.0
    size: int | None = None
    population: int | None = None
    adjacency: Adjacency | None = None
    count: int = 1
    sides: Mapping[str, float] = field(default_factory=dict)
    guarantee: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, str) or self.sampler not in ALLOWED:
            raise FedsimError(
                f"sampler is {self.sampler!r}; it must be one of {', '.join(get_args(Sampling))}."
            )
        if self.adjacency is None:
            object.__setattr__(self, "adjacency", ALLOWED[self.sampler][0])
        if self.adjacency not in ALLOWED[self.sampler]:
            raise FedsimError(
                f"adjacency is {self.adjacency!r}; with {self.sampler} sampling it must be "
                f"{' or '.join(ALLOWED[self.sampler])}."
            )
        for name, z in {"noise_multiplier": self.noise_multiplier, **self.sides}.items():
            if not z >= 0:
                raise FedsimError(f"{name} is {z}; a noise multiplier must be at least 0.")
        if self.count != int(self.count) or self.count < 1:
            raise FedsimError(f"count is {self.count}; it must be a whole number, 1 or more.")
        object.__setattr__(self, "count", int(self.count))
        self._check_sampling()
        object.__setattr__(self, "sides", dict(sorted(self.sides.items())))

    def _check_sampling(self) -> None:
        if self.population is not None and self.population < 1:
            raise FedsimError(f"population is {self.population}; it must be 1 or more.")
        if self.sampler == "fixed":
            if self.size is None or self.population is None:
                raise FedsimError("fixed sampling needs size and population.")
            if not 1 <= self.size <= self.population:
                raise FedsimError(
                    f"size is {self.size}; it must lie in [1, population = {self.population}]."
                )
            object.__setattr__(self, "rate", self.size / self.population)
        elif self.sampler != "poisson":
            object.__setattr__(self, "rate", 1.0)
        if not 0 < self.rate <= 1:
            raise FedsimError(f"rate is {self.rate}; it must lie in (0, 1].")

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of text are a process's own.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.to_dict().values()).__repr__())

    @property
    def relation(self) -> Adjacency:
        """The adjacency, never None."""
        return cast(Adjacency, self.adjacency)

    @property
    def total_noise_multiplier(self) -> float:
        """Noise multiplier of main sum and sides together, per invocation."""
        if not self.sides:
            return self.noise_multiplier
        parts = [self.noise_multiplier, *self.sides.values()]
        if min(parts) == 0:
            return 0.0
        precision = math.fsum(1.0 / z**2 for z in parts)
        return 1.0 / math.sqrt(precision) if precision else math.inf

    @property
    def private(self) -> bool:
        """Whether any finite epsilon holds for this release."""
        return self.guarantee and self.total_noise_multiplier > 0

    def times(self, count: int) -> Event:
        """This event ``count`` times over."""
        return replace(self, count=self.count * count)

    @cached_property
    def once(self) -> Event:
        """One invocation of it."""
        return self if self.count == 1 else replace(self, count=1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping; infinite numbers are written as the string "inf"."""
        return {
            "sampler": self.sampler,
            "adjacency": self.adjacency,
            "noise-multiplier": _encoded(self.noise_multiplier),
            "rate": self.rate,
            "size": self.size,
            "population": self.population,
            "count": self.count,
            "sides": {name: _encoded(z) for name, z in self.sides.items()},
            "guarantee": self.guarantee,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Event:
        """Inverse of `to_dict`.

        Raises
        ------
        FedsimError
            If a field is missing, unknown or out of range.
        """
        known = {"sampler", "adjacency", "noise-multiplier", "rate", "size"}
        known |= {"population", "count", "sides", "guarantee"}
        if set(data) != known:
            raise FedsimError(
                f"an event has the fields {sorted(data)}; it must have {sorted(known)}."
            )
        sides = data["sides"]
        if not isinstance(sides, Mapping) or not isinstance(data["guarantee"], bool):
            raise FedsimError("an event's sides must be a mapping, its guarantee true or false.")
        for name in ("size", "population", "count"):
            value = data[name]
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer and (value is not None or name == "count"):
                raise FedsimError(f"an event's {name} is {value!r}; it must be a whole number.")
        return cls(
            noise_multiplier=_decoded("noise-multiplier", data["noise-multiplier"]),
            sampler=cast(Sampling, data["sampler"]),
            rate=_decoded("rate", data["rate"]),
            size=data["size"],
            population=data["population"],
            adjacency=cast(Adjacency, data["adjacency"]),
            count=data["count"],
            sides={name: _decoded(name, z) for name, z in sides.items()},
            guarantee=data["guarantee"],
        )


def common_adjacency(relations: Iterable[Adjacency]) -> Adjacency:
    """The one relation that events of these relations are accounted for together.

    Add-remove and zero-out have the same dominating pair for a Gaussian with a fixed
    denominator, so they compose; the result is named zero-out, for which both hold.

    Raises
    ------
    FedsimError
        If replace-one meets another relation: their epsilons must not be added up.
    """
    distinct = set(relations)
    if len(distinct) > 1 and "replace-one" in distinct:
        raise FedsimError(
            f"events are accounted for {' and '.join(sorted(distinct))}; "
            "replace-one composes with replace-one only."
        )
    if len(distinct) == 1:
        return distinct.pop()
    return "zero-out" if distinct else "add-remove"


def dominating_event(events: Iterable[Event]) -> Event | None:
    """An event at least as costly as each of these: least noise, largest rate and count.

    None without events. Across different samplers amplification is given up.
    """
    known = list(events)
    if not known:
        return None
    if not all(event.private for event in known):
        return Event(noise_multiplier=0.0, guarantee=False)
    noise = min(event.total_noise_multiplier for event in known)
    count = max(event.count for event in known)
    if len({event.sampler for event in known}) == 1:
        widest = max(known, key=lambda event: event.rate)
        return replace(widest, noise_multiplier=noise, sides={}, count=count)
    adjacency = common_adjacency(event.relation for event in known)
    return Event(noise_multiplier=noise, sampler="full", adjacency=adjacency, count=count)


def _encoded(z: float) -> float | str:
    return "inf" if math.isinf(z) else z


def _decoded(name: str, value: object) -> float:
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FedsimError(f"an event's {name} is {value!r}; it must be a number.")
    return float(value)
