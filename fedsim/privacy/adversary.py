"""Sentences on the adversary of a guarantee: who sees what, what is public, what is assumed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsim.privacy.accountant import Accountant
from fedsim.privacy.entry import DECLARED, Entry, Fact
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Level
from fedsim.privacy.laws.full import unamplified


@dataclass(frozen=True)
class ReleaseSetting:
    """What a statement says of a run that is not in its ledgers.

    Attributes
    ----------
    network : bool
        Whether its nodes are reached over a network.
    noisy : tuple of str
        Names of the metrics that clients' evaluations released with noise.
    without_noise : tuple of str
        Metrics of clients' data that were released without noise, in words, with whose they are.
    """

    network: bool = True
    noisy: tuple[str, ...] = ()
    without_noise: tuple[str, ...] = ()


DECLARED_SENTENCES = {
    "sampler": (
        "Declared by the user: that the sampler draws what its event says. It was not derived from "
        "inclusion probabilities."
    ),
    "noise": (
        "Declared by the user: that the noise, which is not fedsim's own, costs no more than its "
        "law says."
    ),
    "bound": (
        "Declared by the user: that the bound, which is not fedsim's own, makes no row longer than "
        "it says, and splits the noise into no less than is charged for."
    ),
}
"""Sentence for each part of a plan (a public fact of an entry) that the user declares."""

ROWS: Mapping[Fact, str] = {
    "by structure": (
        "A row is one example's by structure: the model and the loss run as graphs, each node of "
        "which is known to act on every example by itself."
    ),
    "one at a time: user code": (
        "A row is one example's because user code is given one example at a time, and begins each "
        "with the same buffers and attributes. State that it keeps elsewhere (globals, files) is "
        "not checked."
    ),
    "probed": (
        "That a row is one example's, whatever the others are, was probed on the model and the "
        "loss, not proved."
    ),
}
"""Why a row depends on one example alone, by the fact ``rows`` in a ledger."""


def large_delta(delta: float, level: Level, rows: int | None) -> str:
    """Warning that delta would allow to publish a random row; empty if delta is small enough.

    Parameters
    ----------
    delta : float
    level : "client" or "example"
    rows : int or None
        Number of rows: clients in the population, or examples of the smallest client.
    """
    if not rows or delta * rows < 1:
        return ""
    covered_rows = "the population" if level == "client" else "a client's examples"
    key = "noise.delta" if level == "client" else "client.noise.delta"
    return (
        f"Warning: delta = {delta:g} is at least 1 / {rows:,}, {covered_rows}: it would also allow "
        f"publishing one {level} drawn at random; {key} should be far below."
    )


def adversary(entries: Sequence[Entry], level: Level, delta: float) -> list[str]:
    """Sentences on who sees what, and what protects a row from each of them."""
    if level == "example":
        return [
            "Adversary: anyone who receives what clients send, the server and other clients "
            "included. Noise is added before anything leaves a client, which trusts only itself."
        ]
    shared = [entry for entry in entries if entry.placement == "client"]
    masked = [entry for entry in shared if "secagg-threshold" in entry.public]
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
    sums = [
        (int(entry.public["secagg-threshold"] or 0), int(entry.public["secagg-colluders"] or 0))
        for entry in masked
    ]
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


def public_facts(
    entries: Sequence[Entry], level: Level, run: ReleaseSetting | None = None
) -> list[str]:
    """Sentences on what is public, what is assumed, and what the user declares."""
    sentences = []
    if level == "example":
        sentences.append(
            "Public: the number of every client's examples, and with it its steps, sampling "
            "rates and denominators."
        )
    else:
        declared = {entry.event.law.population for entry in entries}
        populations = sorted(number for number in declared if number)
        clients = f" ({', '.join(f'{n:,}' for n in populations)} clients)" if populations else ""
        sampled = any(entry.event.law.rate < 1 for entry in entries)
        sampling = "the sampling rate, " if sampled else ""
        sentences.append(
            f"Public: the declared population{clients}, {sampling}the denominator and the number "
            "of rounds."
        )
        if run is None or run.network:
            sentences.append(
                "Assumed: that all nodes being unreachable at once never depends on a client's "
                "data: a round that reaches none ends the run."
            )
    facts = _facts(entries)
    evidence = facts.get("rows", set())
    sentences.extend(sentence for kind, sentence in ROWS.items() if kind in evidence)
    for fact, sentence in DECLARED_SENTENCES.items():
        if DECLARED in facts.get(fact, ()):
            sentences.append(sentence)
    return sentences


def not_covered(run: ReleaseSetting | None) -> list[str]:
    """What the guarantee does not cover, of what this run has released or shown.

    Of a run about which nothing but its ledger is known, metrics without noise are a possibility.
    """
    shown = ["what the operator sees and logs: who took part, who failed and why, when"]
    if run is None:
        shown.append("metrics of clients' data, if the run has released any without noise")
    elif run.without_noise:
        metrics = "; ".join(run.without_noise)
        shown.append(f"metrics that the run has released without noise ({metrics})")
    return shown


def trusted(entries: Sequence[Entry], level: Level) -> str:
    """Whom a protected row has to trust, in one short sentence."""
    if level == "example":
        return "Trusted: nobody but the client itself, which adds the noise."
    if any(entry.placement != "client" for entry in entries):
        return "Trusted: the server, which sees clients' updates before the noise."
    if all("secagg-threshold" in entry.public for entry in entries):
        return "Trusted: the server, to follow the protocol; clients, to add their noise."
    return "Trusted: clients, to add their noise; the server sees each noisy share."


def _facts(entries: Sequence[Entry]) -> Mapping[str, set[Fact]]:
    """All values of each public fact over the entries."""
    facts: dict[str, set[Fact]] = {}
    for entry in entries:
        for name, value in entry.public.items():
            facts.setdefault(name, set()).add(value)
        # In older ledgers, and with Flower's strategies, this flag refers to the sampler alone.
        if entry.declared_by_user and "noise" not in entry.public:
            facts.setdefault("sampler", set()).add(DECLARED)
    return facts
