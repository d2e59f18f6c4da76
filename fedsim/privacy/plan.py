"""The release plan: what is sampled, bounded, noised and released how often, in one value.

Rates, numbers of steps, denominators and events are computed here, at both levels, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Annotated, ClassVar, Generic, Literal, Protocol, TypeVar

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.calibration import calibrate_events
from fedsim.privacy.entry import DECLARED, Fact
from fedsim.privacy.events import Event
from fedsim.privacy.laws import (
    FixedSize,
    Full,
    InclusionSampler,
    Law,
    Level,
    Participation,
    Poisson,
    Sampler,
    declared_population,
)
from fedsim.privacy.laws.base import is_shipped
from fedsim.privacy.laws.correlated import CorrelatedLaw, ExtendedLaw, Extension
from fedsim.privacy.laws.full import unamplified
from fedsim.privacy.laws.selection import Selection, SelectionLaw
from fedsim.privacy.noise import Correlated, Noise
from fedsim.settings import Gt, check_settings


def evaluation_sampler(sampler: Sampler, rate: float) -> Sampler:
    """The sampler of evaluations at this rate, with the neighbours of the rounds' ``sampler``.

    Poisson sampling, or a fixed number where neighbours are replace-one.
    """
    population = declared_population(sampler)
    if sampler.adjacency != "replace-one":
        return Poisson(rate, population, adjacency=sampler.adjacency)
    if rate == 1:
        return Full(population, adjacency="replace-one")
    return FixedSize(max(1, round(rate * population)), population)


class Bounded(Protocol):
    """The part of a bound that a plan needs: whether noise in units of its C gives a guarantee."""

    @property
    def guarantee(self) -> Literal["gaussian", "none"]:
        """ "gaussian" where one row moves the sum by at most C, "none" otherwise."""


@dataclass(frozen=True)
class DeclaredBound:
    """A bound in code that is not fedsim's: the user declares that it bounds rows.

    Attributes
    ----------
    words : str
        Its description, for the ledger.
    clip_norm : float
    """

    words: str
    clip_norm: Annotated[float, Gt(0)]
    guarantee: ClassVar[Literal["gaussian", "none"]] = "gaussian"

    def __post_init__(self) -> None:
        check_settings(self, "bound.")

    def __str__(self) -> str:
        return self.words


BoundT = TypeVar("BoundT", bound=Bounded, covariant=True)


@dataclass(frozen=True, kw_only=True)
class ReleasePlan(Generic[BoundT]):
    """Sampler, bound and noise, bound together: what is released, and what it costs.

    It is made once, from a config or by a strategy's keywords, and travels whole: to the strategy,
    to the releaser, to the workers that sum blocks, to the ledger.

    Guarantee: that of `event`, for rows drawn by ``sampler``, bounded by ``bound``, summed with
    ``noise`` and divided by `denominator`, with nothing else that follows from them released.

    Rounds are charged as its law says: each by itself; several in a row, of which a row can be in
    one, together before the first of them; or all of them together before round 1, where they
    share draws or a row is in a fixed number of them. `event` is that cost, and `charge` the part
    of it that a round's line in the ledger has. A plan is `closed` if no further round may follow,
    and `charged_ahead` if, besides, it would have cost less to plan fewer rounds.

    Parameters
    ----------
    level : "client" or "example"
        What a row is. At example level neighbours are zero-out, a client's number of examples
        being public, and samplers that are not are refused.
    sampler : Sampler
        Of a round's clients, or of a step's examples.
    bound : Bounded
    noise : Noise
    rounds : int, optional
        How many rounds make up the plan.
    releases : int
        Noisy sums a round, each over a sample of its own: a client's local steps. Noise of an
        example-level plan that is correlated is so over the sums of one round, and each round
        begins anew.
    selection : Selection, optional
        If only the best of a random number of such runs is published.
    cohort_known : bool
        Whether the adversary knows which clients were sampled, as a server does: sampling then
        amplifies nothing.
    extension : Extension, optional
        Of a plan that was charged with fewer rounds at first.

    Raises
    ------
    FedsimError
        If the sampler's neighbours are not the level's, or something is no sampler or noise.
    """

    level: Level
    sampler: Sampler
    bound: BoundT
    noise: Noise
    rounds: int | None = None
    releases: int = 1
    selection: Selection | None = None
    cohort_known: bool = False
    extension: Extension | None = None

    def __post_init__(self) -> None:
        for part, base in ((self.sampler, Sampler), (self.noise, Noise)):
            if not isinstance(part, base):
                raise FedsimError(
                    f"{type(part).__name__} is no {base.__name__.lower()}; it must be derived "
                    f"from {base.__module__}.{base.__name__}."
                )
        check_settings(self)
        if self.level == "example" and self.sampler.adjacency != "zero-out":
            raise FedsimError(
                f"the {self.sampler.name} sampler's neighbours are {self.sampler.adjacency}; at "
                "example level they must be zero-out, since numbers of examples are public, as "
                "those of 'poisson', 'full' and 'shuffle' batches are."
            )

        if self.noise.correlated:
            object.__setattr__(self, "noise", self._fitted_noise())

    def _fitted_noise(self) -> Noise:
        """The noise with the coefficients for this sampler's participation.

        Raises
        ------
        FedsimError
            If the plan has no rounds, or its rows are examples and clients may not add such noise.
        """
        if self.level == "example":
            if not getattr(self.noise, "local", False):
                raise FedsimError(
                    f"client.noise.name is '{_name_of(self.noise)}', which stores vectors of many "
                    "steps for every client; it must be 'independent', 'lambda-cgd', 'bisr' or "
                    "'tree'."
                )
            return _fitted(self.noise, self.sampler.participation(self.releases))
        if self.rounds is None:
            raise FedsimError(
                f"noise.name is '{_name_of(self.noise)}', whose rounds share draws, and the plan "
                "has no number of rounds; it must be 'independent' there."
            )
        return _fitted(self.noise, self.sampler.participation(self.rounds))

    @property
    def private(self) -> bool:
        """Whether any epsilon is finite."""
        return self.bound.guarantee == "gaussian" and self.noise.multiplier > 0

    @property
    def amplified(self) -> bool:
        """Whether the guarantee requires that the sample stays secret."""
        event = self.event()
        return event.private and event.law.rate < 1

    @property
    def declared_by_user(self) -> bool:
        """Whether its events rest on what the user declares of the sampler or the noise."""
        return bool({"sampler", "noise"} & set(self.declared))

    @property
    def law(self) -> Law:
        """What a sum over one sample costs, with this noise."""
        drawn = self.sampler.law()
        if self.cohort_known:
            drawn = replace(unamplified(drawn), population=drawn.population)
        law = self.noise.law(drawn)
        if self.level == "example" and isinstance(law, CorrelatedLaw):
            law = replace(law, rounds=1)  # the sums are all of one round
        return law

    def check_secure(self) -> None:
        """Refuse secure sums that would show how many clients a secret cohort has.

        The variance of a share's noise is fixed: a sum of more clients has more noise, and one of
        too few is lost. Both show in the models.

        Raises
        ------
        FedsimError
            If neighbours have cohorts of other sizes.
        """
        if not self.cohort_known and self.sampler.adjacency == "add-remove":
            raise FedsimError(
                "secagg.observer = 'outsider' (cohort_known = False) with the cohort "
                f"'{self.sampler.name}', whose size is secret; it must be 'server', or the cohort "
                "'fixed' or 'full': a sum of more clients has more noise, which models show."
            )

    @property
    def public(self) -> dict[str, Fact]:
        """Its public facts in a ledger's line, besides the event."""
        return {"denominator": self.denominator, **dict.fromkeys(self.declared, DECLARED)}

    @property
    def declared(self) -> list[str]:
        """Which of "sampler", "noise" and "bound" are the user's own code, and cannot be verified.

        An `InclusionSampler` is not among them: its law follows from its inclusion probabilities,
        which an audit tests. No audit tests the distribution of a noise that is not fedsim's.
        """
        parts = {
            "sampler": of_user(self.sampler) and not isinstance(self.sampler, InclusionSampler),
            "noise": of_user(self.noise),
            "bound": of_user(self.bound) or isinstance(self.bound, DeclaredBound),
        }
        return [name for name, declared in parts.items() if declared]

    @property
    def denominator(self) -> float:
        """What sums are divided by: the declared expected size, never a count."""
        return float(self.sampler.expected_size)

    @property
    def closed(self) -> bool:
        """Whether no round may follow: the plan is charged as a whole, or rounds share draws."""
        if self.noise.correlated and self.level == "client":
            return True
        # Other laws of several rounds (groups in turn) are charged for so many at a time, however
        # many follow.
        return self.rounds is not None and (
            self.selection is not None or self.sampler.horizon is not None
        )

    @property
    def charged_ahead(self) -> bool:
        """Whether the first round is charged for all rounds, and fewer rounds would cost less."""
        law = self.event().law
        return self.level == "client" and isinstance(law, CorrelatedLaw) and law.rate == 1

    def charge(self, round: int, attempt: int = 0) -> Event:
        """The event in the ledger's line of a round.

        Parameters
        ----------
        round : int
            From 1 on. Of rounds that one event covers, the first is charged, and the others have
            count 0. After an extension, the next round is charged with what the longer plan costs
            more.
        attempt : int
            How often the round was drawn before with other data.
        """
        event = self.event()
        if event.law.rounds == 1:
            return event
        if attempt:
            law = event.law.redrawn or unamplified(event.law)
            return replace(event, law=law, count=1)
        begins = 1
        if self.extension is not None and round > self.extension.after:
            event = replace(event, law=self._beyond(self.extension.rounds))
            begins = self.extension.after + 1
        return event if (round - begins) % event.law.rounds == 0 else event.times(0)

    def _beyond(self, rounds: int) -> ExtendedLaw:
        """What its law costs beyond the first so many of its rounds, charged before."""
        law, shorter = self.law, replace(self, rounds=rounds).law
        return ExtendedLaw(
            base=law, shorter=shorter, population=law.population, adjacency=law.adjacency
        )

    def event(self) -> Event:
        """What one round costs, or as many as its law covers."""
        event = Event(
            noise_multiplier=self.noise.multiplier,
            law=self.law,
            # Over its rounds, or its sums of one round, correlated noise is one Gaussian.
            count=1 if self.noise.correlated else self.sampler.gaussians(self.releases),
            guarantee=self.bound.guarantee == "gaussian",
        )
        return event if self.selection is None else self._selected(event, self.selection)

    def _selected(self, event: Event, selection: Selection) -> Event:
        """What all rounds cost, if the best of several runs is published."""
        if self.rounds is None:
            raise FedsimError("a selection among runs is of whole runs; the plan has no rounds.")
        law = SelectionLaw(
            base=event.law,
            invocations=event.over(self.rounds).count,
            distribution=selection.distribution,
            mean=selection.mean,
            rounds=self.rounds,
            population=event.law.population,
            adjacency=event.law.adjacency,
        )
        return replace(event, law=law, count=1)

    def epsilon(self, delta: float, *, after: int | None = None) -> float:
        """Epsilon of the whole plan, or of its first ``after`` rounds.

        In a plan that is charged as a whole, fewer rounds cost less only if their number was fixed
        in advance; a run that ends early may claim the whole plan's epsilon alone.

        Raises
        ------
        FedsimError
            If neither says how many rounds there are.
        """
        rounds = self.rounds if after is None else after
        if rounds is None:
            raise FedsimError("the plan has no rounds; say how many, or after how many.")
        return Accountant([self._first(rounds)] if rounds else []).epsilon(delta)

    def _first(self, rounds: int) -> Event:
        """What the first so many rounds cost."""
        whole, noise = self.event().over(rounds), self.noise
        if not (self.charged_ahead and isinstance(noise, Correlated)):
            return whole
        known = noise.known_participation
        prefix = known.first(min(rounds, known.rounds))
        assert isinstance(whole.law, CorrelatedLaw)
        return replace(whole, law=replace(whole.law, sensitivity=noise.sensitivity(prefix)))

    def calibrated(
        self, target_epsilon: float, delta: float, others: Sequence[Event] = ()
    ) -> ReleasePlan[BoundT]:
        """The same plan with the least noise at which all its rounds cost the target at delta.

        Parameters
        ----------
        others : sequence of Event
            Further releases of the plan, besides the rounds.

        Raises
        ------
        FedsimError
            If it has no rounds, or no noise will do.
        """
        if self.rounds is None:
            raise FedsimError("the plan has no rounds; a target epsilon is of so many rounds.")
        rounds = self.rounds
        z = calibrate_events(
            lambda z: [*others, replace(self, noise=self.noise.scaled(z)).event().over(rounds)],
            target_epsilon=target_epsilon,
            delta=delta,
        )
        return replace(self, noise=self.noise.scaled(z))


@lru_cache(maxsize=4096)
def _fitted(noise: Noise, participation: Participation) -> Noise:
    """Cached: clients of one size have one plan, and many rounds."""
    return noise.fitted(participation)


def _name_of(noise: Noise) -> str:
    return str(getattr(noise, "name", type(noise).__name__))


def of_user(value: object) -> bool:
    """Whether its class, or that of a bound in it, is not fedsim's."""
    return not is_shipped(value) or any(map(of_user, _bounds_in(value)))


def _bounds_in(value: object) -> Iterator[object]:
    """Bounds that a bound is composed of: its fields, or what these list."""
    if isinstance(value, list | tuple):
        inner = list(value)
    else:
        inner = [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else []
    for entry in inner:
        yield from [entry] if hasattr(entry, "guarantee") else _bounds_in(entry)
