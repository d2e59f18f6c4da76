"""Events: a release as the accountant sees it, which composes many of them to an epsilon."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Annotated, Any

from fedsim.arguments import expected, require
from fedsim.errors import FedsimError
from fedsim.privacy import laws
from fedsim.privacy.laws.base import Adjacency, Law, WrappingLaw, is_shipped
from fedsim.privacy.laws.declared import NAME, DeclaredLaw, as_data
from fedsim.privacy.laws.full import FullLaw
from fedsim.privacy.laws.sampler import Sampler
from fedsim.privacy.records import read_record, to_json
from fedsim.settings import Ge, check_settings
from fedsim.synonyms import closest


@dataclass(frozen=True, kw_only=True)
class Event:
    """One noisy sum, or ``count`` equal ones, as the accountant sees it.

    All fields are public information. A law that fedsim does not ship is replaced by data here
    (`DeclaredLaw`), so that reading the event later needs only fedsim's code.

    Attributes
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by the clip norm, for any
        adjacency. 0 is a release without noise, infinity one that reveals nothing.
    law : Law
        How the rows of the sum were sampled, and at what cost.
    count : int
        Invocations: 2 for an ADADP iteration, T for T equal steps of a client; 0 for a round that
        an earlier event covers.
    sides : mapping of name to float
        Noise multipliers of the bounded scalars released from the same rows, each with independent
        noise. Together with the main sum: ``1/z^2 = sum 1/z_j^2``.
    guarantee : bool
        False if the release is not private although noise was added, as of a mechanism with
        un-noised statistics; its epsilon is infinite.

    Raises
    ------
    FedsimError
        If a value is outside its range.

    Examples
    --------
    >>> from fedsim.privacy import Accountant
    >>> from fedsim.privacy.laws import PoissonLaw
    >>> week = Event(noise_multiplier=2.0, law=PoissonLaw(rate=0.1)).times(7)
    >>> round(Accountant([week]).epsilon(delta=1e-5), 2)
    0.69
    """

    # Ledgers have the fields in this order.
    law: Law = field(default_factory=FullLaw)
    noise_multiplier: Annotated[float, Ge(0)]
    count: Annotated[int, Ge(0)] = 1
    sides: Mapping[str, float] = field(default_factory=dict)
    guarantee: bool = True

    @classmethod
    def of(
        cls, sampler: Sampler, noise_multiplier: float, *, count: int = 1, guarantee: bool = True
    ) -> Event:
        """Event of ``count`` noisy sums over one round's samples."""
        return cls(
            noise_multiplier=noise_multiplier,
            law=sampler.law(),
            count=sampler.gaussians(count),
            guarantee=guarantee,
        )

    def __post_init__(self) -> None:
        check_settings(self)
        for name, z in self.sides.items():
            require(str(name), z, expected(float))
            if not z >= 0:
                raise FedsimError(f"{name} is {z}; a noise multiplier must be at least 0.")
        object.__setattr__(self, "count", int(self.count))
        object.__setattr__(self, "sides", dict(sorted(self.sides.items())))
        if not is_shipped(self.law):
            object.__setattr__(self, "law", as_data(self.law, self.total_noise_multiplier))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached hash: hashes of strings differ from process to process.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _hash(self) -> int:
        sides = tuple(self.sides.items())
        return hash((self.noise_multiplier, self.law, self.count, sides, self.guarantee))

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency that the law's cost refers to."""
        return self.law.adjacency

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
        """This event, ``count`` times."""
        return replace(self, count=self.count * count)

    def over_rounds(self, rounds: int) -> Event:
        """Event of ``rounds`` rounds: this one, once for every `Law.rounds` of them begun."""
        return self.times(-(-rounds // self.law.rounds))

    def further_rounds(self, rounds: int, made: int) -> Event:
        """Event of ``rounds`` more rounds after ``made`` rounds, the last of which had this event.

        If an event covers several rounds, the rest of those already charged is free.
        """
        if self.law.rounds == 1:
            return self.times(rounds)
        blocks = -(-made // self.law.rounds)
        return self.single.times(-(-(made + rounds) // self.law.rounds) - blocks)

    @cached_property
    def single(self) -> Event:
        """One invocation of this event."""
        return self if self.count == 1 else replace(self, count=1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping; infinite numbers are written as the string "inf"."""
        return to_json(self)

    @classmethod
    def from_dict(cls, data: object) -> Event:
        """Inverse of `to_dict`.

        Raises
        ------
        FedsimError
            If a field is missing, unknown or out of range.
        """
        if not isinstance(data, Mapping):
            raise FedsimError(f"event is {data!r}; it must be a mapping.")
        data = {**data, "law": law_from_dict(data.get("law"))}
        return read_record(cls, data, "an event")


def law_from_dict(data: object) -> Law:
    """A law from its JSON in a ledger: one of fedsim's, or a `DeclaredLaw`; no user code is run.

    Raises
    ------
    FedsimError
        If it is neither.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise FedsimError(f"an event's law is {data!r}; it must be a mapping with a name.")
    name, options = data["name"], {k.replace("_", "-"): v for k, v in data.items() if k != "name"}
    if isinstance(options.get("base"), Mapping):  # the law that a wrapping law contains
        options["base"] = law_from_dict(options["base"])
    kind = DeclaredLaw if name == NAME else law_named(name)
    return read_record(kind, options, f"the law '{name}'")


@cache
def shipped_laws() -> Mapping[str, type[Law]]:
    """fedsim's own laws by name: all that are defined in `fedsim.privacy.laws`."""
    modules = (
        importlib.import_module(f"{laws.__name__}.{module.name}")
        for module in pkgutil.iter_modules(laws.__path__)
    )
    members = [member for module in modules for member in vars(module).values()]
    classes = [member for member in members if isinstance(member, type) and issubclass(member, Law)]
    return {kind.name: kind for kind in classes if isinstance(vars(kind).get("name"), str)}


def simple_laws() -> list[str]:
    """Names of the shipped laws that do not wrap another one."""
    return [name for name, law in shipped_laws().items() if not issubclass(law, WrappingLaw)]


def law_named(name: str) -> type[Law]:
    """The class of one of fedsim's own laws.

    Raises
    ------
    FedsimError
        If fedsim has no law of this name.
    """
    if name not in shipped_laws():
        hint = closest("cohort", name, shipped_laws())
        raise FedsimError(
            f"sampling is {name!r};{hint} must be one of {', '.join(shipped_laws())}."
        )
    return shipped_laws()[name]


def common_adjacency(relations: Iterable[Adjacency]) -> Adjacency:
    """The one adjacency under which events of these adjacencies are composed.

    Add-remove and zero-out have the same dominating pair for a Gaussian with a fixed
    denominator, so that they compose; the result is called zero-out, for which both hold.

    Raises
    ------
    FedsimError
        If replace-one is among other adjacencies: their epsilons must not be composed.
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
