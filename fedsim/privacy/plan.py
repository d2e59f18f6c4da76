"""The release plan: sampler, mechanism, noise and number of releases, in one value.

Rates, numbers of steps, denominators and events are computed here, at both levels, and
nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from fedsim.arguments import as_text
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.calibration import calibrate_events
from fedsim.privacy.digest import OUTSIDE_DIGEST
from fedsim.privacy.entry import DECLARED, SIMULATED_COHORT, WEIGHTS, Entropy, Entry, Fact
from fedsim.privacy.events import Event
from fedsim.privacy.laws import (
    FixedSize,
    FixedSizeLaw,
    Full,
    InclusionSampler,
    Law,
    Level,
    Participation,
    Poisson,
    PoissonLaw,
    Sampler,
    declared_population,
)
from fedsim.privacy.laws.base import check_level, is_shipped
from fedsim.privacy.laws.correlated import CorrelatedLaw
from fedsim.privacy.laws.full import one_gaussian, unamplified
from fedsim.privacy.noise import Correlated, Noise
from fedsim.privacy.placement import SERVER, Placement
from fedsim.settings import Ge, Gt, check_settings


def evaluation_sampler(sampler: Sampler, rate: float) -> Sampler:
    """Sampler of the clients that evaluate, under the same adjacency as the rounds' ``sampler``.

    It is Poisson sampling at ``rate``, or a fixed size under replace-one.
    """
    population = declared_population(sampler)
    if sampler.adjacency != "replace-one":
        return Poisson(rate, population, adjacency=sampler.adjacency)
    if rate == 1:
        return Full(population, adjacency="replace-one")
    return FixedSize(max(1, round(rate * population)), population)


class MechanismLike(Protocol):
    """What a plan needs of a mechanism: whether noise in units of its C gives a guarantee."""

    @property
    def guarantee(self) -> Literal["gaussian", "none"]:
        """ "gaussian" where one row moves the sum by at most C, "none" otherwise."""


@dataclass(frozen=True)
class DeclaredMechanism:
    """A mechanism outside of fedsim, such as a Flower strategy's: the user declares that it holds.

    Attributes
    ----------
    words : str
        Description of the mechanism, for the ledger.
    clip_norm : float
        C, the largest norm of a row.
    """

    words: str
    clip_norm: Annotated[float, Gt(0)]
    guarantee: ClassVar[Literal["gaussian", "none"]] = "gaussian"

    def __post_init__(self) -> None:
        check_settings(self, "mechanism.")

    def __str__(self) -> str:
        return self.words


def refuse_noise(mechanism: MechanismLike, key: str, amount: float) -> None:
    """Refuse noise, or a target for it, if it would protect nobody with this mechanism.

    Parameters
    ----------
    mechanism : MechanismLike
        If it, or a mechanism inside it, has the attribute ``no_noise``, that is the reason.
    key : str
        The setting that asks for noise: ``noise.multiplier``, ``client.noise.target-epsilon``.
    amount : float

    Raises
    ------
    FedsimError
    """
    name = f"{type(mechanism).__name__} ({key.rpartition('noise.')[0]}mechanism.name)"
    if reason := _no_noise(mechanism):
        raise FedsimError(f"{key} is {amount}; it must be unset with {name}: {reason}.")
    if key.endswith("target-epsilon") and mechanism.guarantee == "none":
        raise FedsimError(
            f"{key} is {amount}; it must be unset with {name}, which gives no guarantee with any "
            "noise."
        )


def _no_noise(mechanism: object) -> str:
    inner = (reason for part in _mechanisms_in(mechanism) if (reason := _no_noise(part)))
    return str(getattr(mechanism, "no_noise", "")) or next(inner, "")


MechanismT = TypeVar("MechanismT", bound=MechanismLike, covariant=True)


SMALLEST_WEIGHT = 1e-6
"""Least weight of a client, relative to the largest; a smaller one is none in sums that round."""


@dataclass(frozen=True, kw_only=True)
class ReleasePlan(Generic[MechanismT]):
    """Sampler, mechanism and noise in one value: what is released, and at what privacy cost.

    A loop that releases by a plan, and what its guarantee takes as public::

        plan = ReleasePlan(
            level="client",  # whose rows
            sampler=Poisson(rate=0.1, population=1000),  # these; not who is sampled
            mechanism=Clipping(1.0),  # C; not a row, nor its norm
            noise=Independent(1.1),  # the multiplier; not a draw
            rounds=100,  # before the first, if the plan is closed
        )
        for number in range(1, 101):
            rows = train(model, plan.sampler.draw(number, draws))  # secret
            with ledger.release(plan, number):  # plan.charge(number) is on disk, or refused
                mean = (sum(map(bounded, rows)) + noise) / plan.denominator
            model += mean  # public, as is all that follows from it

    It is made once, from a config or a strategy's keywords, and passed whole to the strategy, the
    releaser, the workers that sum blocks, and the ledger.

    Guarantee: that of `event`, if rows are sampled by ``sampler``, bounded by ``mechanism``, summed
    with ``noise`` and divided by `denominator`, and nothing else that depends on them is released.

    The law decides how rounds are charged: each round separately; several consecutive rounds, of
    which a row can be in one, together before the first of them; or all rounds together before
    round 1, if they share draws or a row is in a fixed number of them. `event` is that cost, and
    `charge` is the part of it in a round's ledger line. A plan is `closed` if its rounds are fixed
    before the first, so that all are charged before it and no further round may follow: also one
    whose releases may end it. It is `charged_ahead` if a plan of fewer rounds would have cost less.

    Parameters
    ----------
    level : "client" or "example"
        What a row is. At example level the adjacency must be zero-out, since a client's number of
        examples is public.
    sampler : Sampler
        Sampler of a round's clients, or of a step's examples.
    mechanism : MechanismLike
    noise : Noise
    rounds : int, optional
        Number of rounds of the plan.
    releases : int
        Noisy sums in a round, each over a separate sample: a client's local steps.
    cohort_known : bool
        Whether the adversary knows which clients were sampled, as a server does. There is then
        no amplification.
    may_stop : bool
        Whether what is released may end the run before its last round.
    simulated : Event, optional
        Event of a release of the larger cohort whose noise on the mean is simulated: see
        `simulating`.
    placement : Placement
        Who adds the noise; at example level each client adds its own.
    weights : tuple of float
        Declared weight of each client in the mean, by client id; empty for equal ones. A bounded
        row is multiplied by its client's weight over the largest, so that it is not longer than C.

    Raises
    ------
    FedsimError
        If the adjacency does not suit the level, a part has a wrong type, or a number is below 1.
    """

    level: Level
    sampler: Sampler
    mechanism: MechanismT
    noise: Noise
    rounds: Annotated[int | None, Ge(1)] = None
    releases: Annotated[int, Ge(1)] = 1
    cohort_known: bool = False
    may_stop: bool = False
    simulated: Event | None = None
    # A strategy's digest has it already (`Placement.settings`).
    placement: Placement = field(default=SERVER, metadata=OUTSIDE_DIGEST)
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for part, base in ((self.sampler, Sampler), (self.noise, Noise)):
            if not isinstance(part, base):
                raise FedsimError(
                    f"{type(part).__name__} is no {base.__name__.lower()}; it must be derived "
                    f"from {base.__module__}.{base.__name__}."
                )
        if getattr(self.mechanism, "guarantee", None) not in ("gaussian", "none"):
            raise FedsimError(
                f"mechanism is {as_text(self.mechanism)}; it must be one of fedsim.mechanisms, or "
                "have the attribute guarantee, 'gaussian' or 'none'."
            )
        check_settings(self)
        if self.may_stop and self.rounds is None:
            raise FedsimError(
                "may_stop is True, and the plan has no number of rounds; it must be given, since "
                "all of them are charged before the first."
            )
        check_level(self.level, self.sampler.adjacency, allowed=("zero-out",))
        if self.noise.multiplier:
            refuse_noise(self.mechanism, f"{self._noise_table}.multiplier", self.noise.multiplier)
        self.placement.check_noise(self.mechanism, self.noise)
        self.placement.check_cohort(self.sampler, known=self.cohort_known)
        if self.weights:
            self._check_weights()
        if self.noise.correlated:
            object.__setattr__(self, "noise", self._fitted_noise())

    def _check_weights(self) -> None:
        """Refuse weights that are not one for each client, or that bounded rows cannot have.

        Raises
        ------
        FedsimError
        """
        count, population = len(self.weights), self.sampler.population or 0
        name = type(self.mechanism).__name__
        if self.level == "example":
            must = "left out at example level"
        elif count != population:
            must = f"one number for each of the {population} clients of the population"
        elif not all(0 <= weight < math.inf for weight in self.weights) or not any(self.weights):
            must = "numbers of at least 0, of which one is above 0"
        elif any(0 < weight < SMALLEST_WEIGHT for weight in self.relative_weights):
            must = f"numbers that are 0, or at least {SMALLEST_WEIGHT:g} of the largest"
        elif not getattr(self.mechanism, "takes_weights", False):
            must = (
                f"empty with {name} (mechanism.name, mechanism.per-layer, "
                "mechanism.private-scalar), which does more with rows than to bound and add them"
            )
        elif self.mechanism.guarantee == "none" and (
            getattr(self.mechanism, "weighting", "") == "uniform"
        ):
            must = "empty with mechanism.weighting = 'uniform'"
        elif not self.sampler.synchronous:
            must = f"empty with cohort.name = '{self.sampler.name}', whose rows weigh by their age"
        elif self.placement.at_clients:
            must = "empty unless the server adds the noise (noise.placement, secagg.threshold)"
        else:
            return
        raise FedsimError(f"mechanism.weights has {count} numbers; it must be {must}.")

    @cached_property
    def relative_weights(self) -> tuple[float, ...]:
        """The weights over the largest, in [0, 1]; empty for equal ones."""
        largest = max(self.weights, default=1.0)
        return tuple(weight / largest for weight in self.weights)

    def _fitted_noise(self) -> Noise:
        """The noise with its coefficients for this sampler's participation.

        Raises
        ------
        FedsimError
            If the plan has no number of rounds, or is at example level.
        """
        if self.level == "example":
            raise FedsimError(
                f"the noise is {_name_of(self.noise)}, which is correlated over releases; at "
                "example level it must be independent."
            )
        if self.rounds is None:
            raise FedsimError(
                f"noise.name is '{_name_of(self.noise)}', whose rounds share draws, and the plan "
                "has no number of rounds; it must be 'independent' there."
            )
        return _fitted(self.noise, self.sampler.participation(self.rounds))

    @property
    def _noise_table(self) -> str:
        """The table of a config that says how much noise there is."""
        return "client.noise" if self.level == "example" else "noise"

    @property
    def private(self) -> bool:
        """Whether the plan has a finite epsilon."""
        return self.mechanism.guarantee == "gaussian" and self.noise.multiplier > 0

    @property
    def amplified(self) -> bool:
        """Whether the guarantee requires that the sample stays secret."""
        event = self.event()
        return event.private and event.law.rate < 1

    @property
    def declared_by_user(self) -> bool:
        """Whether the cost depends on what the user declares of the sampler or the noise."""
        return bool({"sampler", "noise"} & set(self.user_parts))

    @property
    def law(self) -> Law:
        """Law of the plan's releases: the sampler's, with this noise."""
        sampler_law = self.sampler.law() if self.simulated is None else self.simulated.law
        if self.cohort_known:
            sampler_law = unamplified(sampler_law)
        return self.noise.law(sampler_law)

    def simulating(self, size: int, population: int) -> ReleasePlan[MechanismT]:
        """The plan of a run that simulates the noise of a larger cohort, and protects nobody.

        The sum over m sampled clients gets m / M of the noise that the sum over M = ``size``
        clients out of ``population`` would have, so that the mean has the same noise. `event`, and
        with it every epsilon, is that of the larger cohort, and is marked so in the ledger.

        Raises
        ------
        FedsimError
            If the cost of a larger cohort is not known, or the size is not that of a larger one.
        """
        law, drawn, clients = self.sampler.law(), self.denominator, self.sampler.population or 0
        if not isinstance(law, PoissonLaw | FixedSizeLaw) or self.noise.correlated:
            raise FedsimError(
                f"noise.cohort-size is {size}; it must be 0, unless cohort.name is 'poisson' or "
                "'fixed', and noise.name 'independent': the cost of a larger cohort is known for "
                "these only."
            )
        if self.weights:
            raise FedsimError(
                f"noise.cohort-size is {size}; it must be 0 with mechanism.weights: what clients "
                "of a larger cohort weigh is not declared."
            )
        if population < clients:
            raise FedsimError(
                f"noise.cohort-population is {population}; it must be 0, or at least the run's own "
                f"population, partition.clients = {clients}."
            )
        if not max(drawn, 2) <= size <= population:
            raise FedsimError(
                f"noise.cohort-size is {size}; it must be from {max(drawn, 2):g}, the clients that "
                f"are sampled here, to {population}, the population of the larger cohort."
            )
        event = Event(law=law.with_sample_size(size, population), noise_multiplier=0.0)
        return replace(self, simulated=event)._with_multiplier(self.noise.multiplier)

    def _with_multiplier(self, z: float) -> ReleasePlan[MechanismT]:
        """The plan at another noise multiplier, of the larger cohort if one is simulated."""
        if self.simulated is None:
            return replace(self, noise=self.noise.with_multiplier(z))
        added = z * self.denominator / self.simulated_cohort
        event = replace(self.simulated, noise_multiplier=z)
        return replace(self, noise=self.noise.with_multiplier(added), simulated=event)

    @property
    def simulated_cohort(self) -> int:
        """Expected size of the larger cohort whose noise is simulated; 0 without one."""
        if self.simulated is None:
            return 0
        law = self.simulated.law
        return round(law.expected_size(law.population or 0))

    def simulated_mark(self, entropy: Entropy) -> int:
        """How epsilon is marked: ``simulated`` of `fedsim.privacy.statement.epsilon_marks`."""
        return self.simulated_cohort or int(entropy == "config")

    def check_entropy(self, entropy: Entropy) -> None:
        """Refuse evidence of the cost of a cohort that did not take part.

        Raises
        ------
        FedsimError
            If a larger cohort is simulated with noise from the operating system.
        """
        if self.simulated_cohort and entropy == "system":
            raise FedsimError(
                f"noise.cohort-size is {self.simulated_cohort}; it must be 0 in a deployment, in "
                "an audit and with noise.entropy = 'system' (DPFedAvg without a seed): the epsilon "
                "of a larger cohort is simulated, and no guarantee of this run."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What enters a strategy's digest, which keys its noise: other names re-key seeded runs."""
        own = {"mechanism": self.mechanism, "cohort": self.sampler, "noise": self.noise}
        weights = {"weights": list(self.weights)} if self.weights else {}
        return own | self.placement.settings | weights

    @property
    def public(self) -> dict[str, Fact]:
        """The plan's public facts in a ledger line, in addition to the event."""
        facts: dict[str, Fact] = {"denominator": self.denominator, **self.placement.public}
        if self.simulated_cohort:
            facts[SIMULATED_COHORT] = self.simulated_cohort
        if self.weights:
            facts[WEIGHTS] = DECLARED
        return facts | dict.fromkeys(self.user_parts, DECLARED)

    @cached_property
    def user_parts(self) -> list[str]:
        """Which of "sampler", "noise" and "bound" are the user's code, and so cannot be verified.

        An `InclusionSampler` is not among them: its law follows from its inclusion probabilities,
        which an audit tests. No audit can test the distribution of a user's noise.
        """
        parts = {
            "sampler": is_user_code(self.sampler)
            and not isinstance(self.sampler, InclusionSampler),
            "noise": is_user_code(self.noise),
            "bound": is_user_code(self.mechanism) or isinstance(self.mechanism, DeclaredMechanism),
        }
        return [name for name, declared in parts.items() if declared]

    @cached_property
    def denominator(self) -> float:
        """Divisor of the sums: the declared expected number of rows, never a count.

        With weights it is that number times their declared mean.
        """
        expected = float(self.sampler.expected_size)
        weights = self.relative_weights
        return expected * math.fsum(weights) / len(weights) if weights else expected

    @property
    def closed(self) -> bool:
        """Whether its rounds are fixed before the first: no round may follow them."""
        if self.may_stop or self.noise.correlated:
            return True
        # A law of groups in turn is charged one cycle at a time, so further cycles may follow.
        return self.rounds is not None and self.sampler.horizon is not None

    @property
    def charged_ahead(self) -> bool:
        """Whether round 1 is charged for all rounds, and a plan of fewer rounds would cost less."""
        return self.may_stop or self._is_one_gaussian

    @property
    def _is_one_gaussian(self) -> bool:
        """Whether all rounds together are one Gaussian, whose sensitivity grows with them."""
        law = self.event().law
        return isinstance(law, CorrelatedLaw) and law.rate == 1

    @property
    def separable(self) -> bool:
        """Whether each round is a release of its own, so that fewer rounds are charged as such."""
        if self.level == "example":
            return True
        return self.event().law.rounds == 1 and not self.noise.correlated

    def charge(self, round: int, *, redrawn: bool = False) -> Event:
        """The event in the ledger line of a round.

        Parameters
        ----------
        round : int
            From 1 on. If one event covers several rounds, the first of them is charged, and the
            others have count 0; if releases may end the run, the first one is charged for all.
        redrawn : bool
            Whether the round has been drawn before, with other draws: it costs one more release,
            without amplification where rounds are not independent.
        """
        event = self.event()
        if redrawn:
            if event.law.rounds == 1:
                return event
            law = event.law.redraw_law or one_gaussian(event.law)
            return replace(event, law=law, count=1)
        if self.may_stop:
            return event.over_rounds(self.rounds or 1) if round == 1 else event.times(0)
        return event if (round - 1) % event.law.rounds == 0 else event.times(0)

    def event(self) -> Event:
        """Event of one round, or of as many rounds as the law covers."""
        simulated = self.simulated
        return Event(
            noise_multiplier=(
                self.noise.multiplier if simulated is None else simulated.noise_multiplier
            ),
            law=self.law,
            # Correlated noise makes all rounds one Gaussian.
            count=1 if self.noise.correlated else self.sampler.gaussians(self.releases),
            guarantee=self.mechanism.guarantee == "gaussian",
        )

    def multiplier_in_sum(self, clients: int) -> float:
        """Noise multiplier of the sum of so many clients; at least the one that is charged."""
        return self.noise.multiplier * self.placement.excess_noise(clients)

    def entry(self, event: Event, **fields: Any) -> Entry:
        """A ledger's entry for this event of the plan.

        Parameters
        ----------
        event : Event
            What is charged, as from `charge`.
        **fields
            Further fields of `Entry`; ``public`` is in addition to the plan's own facts.
        """
        return Entry(
            level=self.level,
            event=event,
            mechanism=str(self.mechanism),
            placement="client" if self.level == "example" else self.placement.name,
            declared_by_user=self.declared_by_user,
            public={**self.public, **fields.pop("public", {})},
            **fields,
        )

    def epsilon(self, delta: float, *, after_round: int | None = None) -> float:
        """Epsilon of the whole plan, or of its first ``after_round`` rounds.

        In a plan that is charged as a whole, fewer rounds cost less only if their number was fixed
        in advance; a run that ends early may claim only the whole plan's epsilon.

        Raises
        ------
        FedsimError
            If neither ``after_round`` nor the plan gives a number of rounds.
        """
        rounds = self.rounds if after_round is None else after_round
        if rounds is None:
            raise FedsimError("the plan has no number of rounds; give it, or give `after_round`.")
        return Accountant([self._prefix_event(rounds)] if rounds else []).epsilon(delta)

    def _prefix_event(self, rounds: int) -> Event:
        """Event of the first ``rounds`` rounds, if their number was fixed in advance."""
        event, noise = self.event().over_rounds(rounds), self.noise
        if not (self._is_one_gaussian and isinstance(noise, Correlated)):
            return event
        participation = noise.known_participation
        prefix = participation.first(min(rounds, participation.rounds))
        assert isinstance(event.law, CorrelatedLaw)
        return replace(event, law=replace(event.law, sensitivity=noise.sensitivity(prefix)))

    def calibrated(
        self, target_epsilon: float, delta: float, others: Sequence[Event] = ()
    ) -> ReleasePlan[MechanismT]:
        """The same plan, with the least noise at which all rounds meet the target epsilon.

        Parameters
        ----------
        target_epsilon, delta : float
        others : sequence of Event
            Further releases in addition to the rounds, such as evaluations.

        Raises
        ------
        FedsimError
            If the plan has no number of rounds, its mechanism gives no guarantee, or no noise meets
            the target.
        """
        refuse_noise(self.mechanism, f"{self._noise_table}.target-epsilon", target_epsilon)
        if self.rounds is None:
            raise FedsimError("the plan has no number of rounds, which a target epsilon needs.")
        rounds = self.rounds
        z = calibrate_events(
            lambda z: [*others, self._with_multiplier(z).event().over_rounds(rounds)],
            target_epsilon=target_epsilon,
            delta=delta,
        )
        return self._with_multiplier(z)


@lru_cache(maxsize=4096)
def _fitted(noise: Noise, participation: Participation) -> Noise:
    """`Noise.fit`, cached: all clients of one size have equal plans, in every round."""
    return noise.fit(participation)


def _name_of(noise: Noise) -> str:
    return str(getattr(noise, "name", type(noise).__name__))


def is_user_code(value: object) -> bool:
    """Whether the value's class, or that of a mechanism inside it, is the user's."""
    return not is_shipped(value) or any(map(is_user_code, _mechanisms_in(value)))


def _mechanisms_in(value: object) -> Iterator[object]:
    """Mechanisms that a mechanism is composed of: in its fields, or in lists in them."""
    if isinstance(value, list | tuple):
        inner = list(value)
    else:
        inner = [getattr(value, f.name) for f in fields(value)] if is_dataclass(value) else []
    for entry in inner:
        yield from [entry] if hasattr(entry, "guarantee") else _mechanisms_in(entry)
