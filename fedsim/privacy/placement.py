"""Placements: who adds the noise of a release, and so who sees what without it.

The server adds it once, to the sum of the rows (`SERVER`); or each client adds a share of it to its
own row before anything leaves it (`CLIENTS`), or the same under masks (`SecureAggregation`). A
release plan has a placement, and everything else asks it: what a ledger line records, which
settings it excludes, into how many shares the noise is divided. What the placements of a ledger's
lines mean for its guarantee is said by `adversary` and `trusted`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.entry import Entry
from fedsim.privacy.events import Event
from fedsim.privacy.laws import Sampler
from fedsim.privacy.laws.base import Level
from fedsim.privacy.laws.full import unamplified
from fedsim.privacy.noise import Noise
from fedsim.settings import check_settings

PlacementName = Literal["server", "client"]


@dataclass(frozen=True)
class Placement:
    """The server adds the noise of a release, once, to the sum of the rows.

    Attributes
    ----------
    name : "server" or "client"
        Where noise is drawn, as ledger lines and digests say it.
    """

    name: ClassVar[PlacementName] = "server"

    @property
    def at_clients(self) -> bool:
        """Whether rows have noise before they leave their clients."""
        return self.name == "client"

    @property
    def public(self) -> dict[str, int]:
        """Public facts of a ledger line."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """What enters a strategy's digest (`ReleasePlan.settings`)."""
        return {"placement": self.name}

    def check_noise(self, mechanism: object, noise: Noise) -> None:
        """Refuse noise that cannot be added in this place.

        Raises
        ------
        FedsimError
        """

    def check_cohort(self, sampler: Sampler, *, known: bool) -> None:
        """Refuse a sampler whose cohorts do not suit.

        Parameters
        ----------
        sampler : Sampler
        known : bool
            Whether the adversary knows which clients were sampled.

        Raises
        ------
        FedsimError
        """

    def check_metrics(self, *, private: bool, unprotected: bool) -> None:
        """Refuse metrics of clients that the server would see, although it must not.

        Parameters
        ----------
        private, unprotected : bool
            Whether clients' metrics are released with noise that the server adds, and whether
            without any.

        Raises
        ------
        FedsimError
        """

    def excess_noise(self, clients: int) -> float:
        """Noise in the sum of so many clients, over the noise that is charged."""
        return 1.0


@dataclass(frozen=True)
class NoiseShares(Placement):
    """Each client adds a share of the noise to its row; the server adds those that are missing.

    Of n clients that are asked, each adds variance ``z^2 C^2 / n``.
    """

    name: ClassVar[PlacementName] = "client"

    def share_count(self, asked: int) -> int:
        """Number of shares into which the noise is divided, of ``asked`` clients."""
        return asked

    def check_noise(self, mechanism: object, noise: Noise) -> None:
        """Refuse that clients add noise if there is none, or if it cannot be divided into shares.

        Raises
        ------
        FedsimError
        """
        must = "placement = 'client' (noise.placement); it must be 'server' with"
        if getattr(mechanism, "guarantee", "none") == "none":
            raise FedsimError(
                f"{must} {type(mechanism).__name__}, which has no noise that clients could share."
            )
        if noise.correlated or not noise.divisible:
            raise FedsimError(
                f"{must} {type(noise).__name__} noise (noise.name), which cannot be added in "
                "shares."
            )

    def check_cohort(self, sampler: Sampler, *, known: bool) -> None:
        """Refuse a sampler whose clients share a release that they have not begun together.

        Raises
        ------
        FedsimError
        """
        if not sampler.synchronous:
            raise FedsimError(
                f"noise.placement is 'client'; it must be 'server' with cohort.name = "
                f"'{sampler.name}': those who share a release have begun it at different times, "
                "and none knows the others."
            )

    def check_metrics(self, *, private: bool, unprotected: bool) -> None:
        """Refuse metrics to which the server would add the noise."""
        if private:
            raise FedsimError(
                "evaluate.private is set (metrics.private); it must be left out while "
                "noise.placement = 'client': clients send their shares and nothing else."
            )


@dataclass(frozen=True)
class SecureAggregation(NoiseShares):
    """Shares of the noise, summed under masks: the server learns only the sum of some clients.

    Parameters
    ----------
    threshold : int
        Minimum number of survivors; with fewer nothing is unmasked: the round is lost, and charged.
    colluders : int
        Number of clients that may share all they know with the server; the guarantee relies on the
        noise of the others alone.

    Raises
    ------
    FedsimError
        If the threshold is below 2 or does not exceed the number of colluders.
    """

    threshold: int
    colluders: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 <= self.colluders < self.threshold or self.threshold < 2:
            raise FedsimError(
                f"secagg.threshold = {self.threshold} with secagg.colluders = {self.colluders}; "
                "it must be at least 2, and more than the colluders."
            )

    @property
    def public(self) -> dict[str, int]:
        """Public facts of a ledger line."""
        return {"secagg-threshold": self.threshold, "secagg-colluders": self.colluders}

    @property
    def settings(self) -> dict[str, Any]:
        """What enters a strategy's digest."""
        return {**super().settings, "secure": self}

    def share_count(self, asked: int) -> int:
        """One for each of the fewest honest survivors, whose noise is what is charged."""
        return self.threshold - self.colluders

    def excess_noise(self, clients: int) -> float:
        """All clients add noise, and that of the fewest honest survivors is charged."""
        return math.sqrt(clients / self.share_count(clients))

    def check_cohort(self, sampler: Sampler, *, known: bool) -> None:
        """Refuse cohorts that are smaller than the threshold, or whose size is secret.

        Each client's share of the noise has a fixed variance. A sum of more clients therefore has
        more noise, and one of too few clients is lost. Both can be seen in the models.

        Raises
        ------
        FedsimError
            If cohorts are on average smaller than the threshold, or those of neighbouring
            populations have different sizes.
        """
        super().check_cohort(sampler, known=known)
        sampled = sampler.expected_size
        if self.threshold > sampled:
            raise FedsimError(
                f"secagg.threshold is {self.threshold}; it must be at most {sampled:g}, the mean "
                "number of clients that the cohort samples: a round with fewer is lost, and "
                "charged."
            )
        if not known and sampler.adjacency == "add-remove":
            raise FedsimError(
                "secagg.observer = 'outsider' (cohort_known = False) with the cohort "
                f"'{sampler.name}', whose size is secret; it must be 'server', or the cohort "
                "'fixed' or 'full': a sum of more clients has more noise, which models show."
            )

    def check_metrics(self, *, private: bool, unprotected: bool) -> None:
        """Refuse metrics of single clients, which masks would hide."""
        super().check_metrics(private=private, unprotected=unprotected)
        if unprotected:
            raise FedsimError(
                "evaluate.unprotected is true (metrics.unprotected); it must be false with secure "
                "aggregation (secagg.threshold), which hides what single clients report."
            )


SERVER, CLIENTS = Placement(), NoiseShares()
PLACEMENTS: dict[PlacementName, Placement] = {at.name: at for at in (SERVER, CLIENTS)}
"""The placements without settings, by name."""


def adversary(entries: Sequence[Entry], level: Level, delta: float) -> list[str]:
    """Sentences on who sees what, and what protects a row from each of them."""
    if level == "example":
        return [
            "Adversary: anyone who receives what clients send, the server and other clients "
            "included. Noise is added before anything leaves a client, which trusts only itself."
        ]
    shared = [entry for entry in entries if entry.noised_by_clients]
    masked = [entry for entry in shared if entry.summed_shares]
    if not shared:
        return [
            "Adversary: anyone who sees the models. The server sees the clients' updates before "
            "the noise, and is trusted."
        ]
    if unnoised := len(entries) - len(shared):
        return [
            "Adversary: anyone who sees the models and nothing else. The server is trusted: in "
            f"{unnoised} of these {len(entries)} releases it saw the clients' updates before the "
            "noise, and nothing is promised against it; in the others clients added noise to "
            "their own shares."
        ]
    if len(masked) == len(shared):
        return _of_masked_sums(masked)
    return [
        "Adversary: anyone who sees the models and nothing else. Clients add noise to their own "
        "shares, and are trusted to bound them.",
        *_against_server(shared, delta),
    ]


def _of_masked_sums(masked: Sequence[Entry]) -> list[str]:
    """Sentences on who sees what under secure aggregation."""
    sums = [(entry.summed_shares, int(entry.public["secagg-colluders"] or 0)) for entry in masked]
    # Of runs with different settings, what all of them allow.
    threshold, colluders = min(t for t, _ in sums), min(c for _, c in sums)
    honest = min(t - c for t, c in sums)
    are_full = all(entry.event.law.is_gaussian and entry.event.law.rate == 1 for entry in masked)
    view = (
        f"sees sums of at least {threshold} masked shares (secure aggregation), and up to "
        f"{colluders} clients that collude with it"
    )
    return [
        f"Adversary: the server, which follows the protocol and {view}; and anyone who sees the "
        "models. Sampling, which the server knows, amplifies nothing."
        if are_full
        else "Adversary: anyone who sees the models and nothing else. The server "
        f"{view}; it also knows who was sampled, so that less is promised against it "
        "(secagg.observer).",
        "Clients bound their own rows and add noise to their shares, so that the fewest honest "
        f"clients of a sum, {honest}, bring all of the noise that is counted. That "
        "clients drop out is assumed not to depend on their data.",
    ]


def _against_server(shared: Sequence[Entry], delta: float) -> list[str]:
    """Sentences on the guarantee against a server that sums the clients' noisy shares."""
    # A round of count 0 is covered by an earlier event.
    entries = [entry for entry in shared if entry.event.count]
    noise = min((entry.event.total_noise_multiplier for entry in entries), default=0.0)
    rule = (
        "The server knows which clients it sampled and what noise it added itself, so sampling "
        "amplifies nothing against it. Where it sees only the sum of r shares, of which D are "
        "missing and k known to colluders, the noise multiplier against it is z sqrt((r-D-k)/r)"
    )
    are_gaussian = all(
        entry.event.law.is_gaussian and entry.event.law.population for entry in entries
    )
    if not noise or math.isinf(noise) or not are_gaussian:
        return [f"{rule}; where it sees a single share, z / sqrt(r)."]
    cases = {"none missing or colluding": 1.0, "a tenth of them": 0.9}
    epsilons = [
        f"epsilon {_unamplified(((e.event, share) for e in entries), delta):.4g} with {name}"
        for name, share in cases.items()
    ]
    cohorts, remaining_delta = _largest_cohorts(entries, delta)
    total = sum(cohorts[entry.event] for entry in entries)
    single = _unamplified(((e.event, 1 / cohorts[e.event]) for e in entries), remaining_delta)
    unless = (
        f" but with probability {delta - remaining_delta:g}, which delta includes"
        if remaining_delta < delta
        else ""
    )
    return [
        f"{rule} (z = {noise:g}: {', '.join(epsilons)}); without secure aggregation it sees each "
        f"single share, at z / sqrt(r), epsilon {single:.4g} for a client that is sampled whenever "
        f"it can be, where r is at most {total / len(entries):.4g} on average{unless}."
    ]


def _largest_cohorts(entries: Sequence[Entry], delta: float) -> tuple[dict[Event, float], float]:
    """Upper bounds on the size of the cohorts of a sampled client, by event.

    A cohort is larger given that a certain client is in it, and its size may be random. For
    independent draws the bound is on the mean over an event's rounds, and fails with a probability
    that is taken from delta. For other draws of varying size, and for a user's sampler, the bound
    is the population.

    Returns
    -------
    sizes : dict of Event to float
    delta : float
        The rest of delta.
    """
    declared = {entry.event for entry in entries if entry.declared_by_user}
    rounds = Counter(entry.event for entry in entries)
    cohorts: dict[Event, float] = {}
    independent = []
    for event in rounds:
        population = event.law.population or 0
        inclusion = event.law.inclusion(population)
        has_inclusion = inclusion is not None and event.law.rounds == 1 and event not in declared
        cohorts[event] = population
        if has_inclusion and inclusion is not None and inclusion.size is not None:
            cohorts[event] = inclusion.size
        elif has_inclusion:
            independent.append(event)
    if not independent:
        return cohorts, delta
    from scipy.stats import binom  # takes half a second, and few statements need it

    # In the n rounds of a client that is sampled in all of them, the numbers of the other clients
    # add up to Binomial(n (population - 1), rate), whose quantile bounds their mean.
    for event in independent:
        other_draws, failure = rounds[event] * (cohorts[event] - 1), delta / 2 / len(independent)
        cohorts[event] = 1 + float(binom.isf(failure, other_draws, event.law.rate)) / rounds[event]
    return cohorts, delta / 2


def _unamplified(shares: Iterable[tuple[Event, float]], delta: float) -> float:
    """Epsilon against an adversary who knows the cohort, by each event's share of the variance."""
    accountant = Accountant()
    for event, share in shares:
        z = event.total_noise_multiplier * math.sqrt(share)
        accountant.add(Event(noise_multiplier=z, law=unamplified(event.law), count=event.count))
    return accountant.epsilon(delta)


def trusted(entries: Sequence[Entry], level: Level) -> str:
    """Whom a protected row has to trust, in one short sentence."""
    if level == "example":
        return "Trusted: nobody but the client itself, which adds the noise."
    if not all(entry.noised_by_clients for entry in entries):
        return "Trusted: the server, which sees clients' updates before the noise."
    if all(entry.summed_shares for entry in entries):
        return "Trusted: the server, to follow the protocol; clients, to add their noise."
    return "Trusted: clients, to add their noise; the server sees each noisy share."
