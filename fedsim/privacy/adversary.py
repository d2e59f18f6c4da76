"""Which adversary a guarantee is about: who sees what, and what is public or assumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedsim.privacy.accountant import Accountant
from fedsim.privacy.entry import DECLARED, Entry, Fact
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Level
from fedsim.privacy.laws.full import unamplified

NOT_COVERED = (
    "what the operator sees and logs: who was sampled, who replied, who failed and why, when",
    "metrics of clients' data, where evaluate.unprotected releases them",
)

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
"""Sentences by the public fact of an entry that is declared by the user."""

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
"""How it is known that a row is one example's, by what a ledger says of it."""


def large_delta(delta: float, level: Level, rows: int | None) -> str:
    """A warning where delta allows a row to be published whole; empty where it does not.

    Parameters
    ----------
    rows : int or None
        How many there are: clients of the population, or examples of the smallest client.
    """
    if not rows or delta * rows < 1:
        return ""
    whose = "the population" if level == "client" else "a client's examples"
    key = "noise.delta" if level == "client" else "client.noise.delta"
    return (
        f"Warning: delta = {delta:g} is at least 1 / {rows:,}, {whose}: it would also allow "
        f"publishing one {level} drawn at random; {key} should be far below."
    )


def adversary(entries: Sequence[Entry], level: Level, delta: float) -> list[str]:
    """Sentences on who sees what, and what protects a row from them."""
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
    if clear := len(entries) - len(shared):
        return [
            "Adversary: anyone who sees the models and nothing else. The server is trusted: in "
            f"{clear} of these {len(entries)} releases it saw the clients' updates before the "
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
    """Who sees what where shares leave clients under masks."""
    threshold = min(int(entry.public["secagg-threshold"] or 0) for entry in masked)
    colluders = max(int(entry.public["secagg-colluders"] or 0) for entry in masked)
    known = all(entry.event.law.is_gaussian and entry.event.law.rate == 1 for entry in masked)
    sees = (
        f"sees sums of at least {threshold} masked shares (secure aggregation), and up to "
        f"{colluders} clients that tell it what they know"
    )
    return [
        f"Adversary: the server, which follows the protocol and {sees}; and anyone who sees the "
        "models. Sampling, which the server knows, amplifies nothing."
        if known
        else "Adversary: anyone who sees the models and nothing else. The server "
        f"{sees}; it also knows who was sampled, so that less is promised against it "
        "(secagg.observer).",
        "Clients bound their own rows and add noise to their shares, so that the fewest honest "
        f"clients of a sum, {threshold - colluders}, bring all of the noise that is counted. That "
        "clients drop out is assumed not to depend on their data.",
    ]


def _against_server(shared: Sequence[Entry], delta: float) -> list[str]:
    events = [entry.event for entry in shared]
    cohort = min((_expected(event) for event in events), default=None)
    noise = min(event.total_noise_multiplier for event in events)
    rule = (
        "The server knows which clients it sampled and what noise it added itself, so sampling "
        "amplifies nothing against it. Where it sees only the sum of r shares, of which D are "
        "missing and k known to colluders, the noise multiplier against it is z sqrt((r-D-k)/r)"
    )
    known = all(event.law.is_gaussian for event in events)
    if not cohort or not noise or math.isinf(noise) or not known:
        return [f"{rule}; where it sees a single share, z / sqrt(r)."]
    cases = {"none missing or colluding": 0, "a tenth of them": math.ceil(cohort / 10)}
    spent = [
        f"epsilon {_unamplified(events, (cohort - gone) / cohort, delta):.4g} with {name}"
        for name, gone in cases.items()
        if gone < cohort
    ]
    alone = _unamplified(events, 1 / cohort, delta)
    return [
        f"{rule} (z = {noise:g}, r = {cohort}: {', '.join(spent)}); without secure aggregation it "
        f"sees each single share, at z / sqrt(r), epsilon {alone:.4g}."
    ]


def _expected(event: Event) -> int:
    """How many clients a round samples, on average; 0 where the population is not known."""
    return round(event.law.rate * event.law.population) if event.law.population else 0


def _unamplified(events: Sequence[Event], share: float, delta: float) -> float:
    """Epsilon where the adversary knows the cohort, with this share of the noise's variance."""
    accountant = Accountant()
    for event in events:
        z = event.total_noise_multiplier * math.sqrt(share)
        accountant.add(Event(noise_multiplier=z, law=unamplified(event.law), count=event.count))
    return accountant.epsilon(delta)


def public_facts(entries: Sequence[Entry], level: Level) -> list[str]:
    """Sentences on what is taken as public, what is assumed, and what the user declares."""
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
        sentences.append(
            f"Public: the declared population{clients}, the sampling rate, the denominator and "
            "the number of rounds."
        )
        sentences.append(
            "Assumed: that all nodes being unreachable at once never depends on a client's data: a "
            "round that reaches none (on a network; never on an engine of one machine) ends the "
            "run."
        )
    facts = _facts(entries)
    known = facts.get("rows", set())
    sentences.extend(sentence for how, sentence in ROWS.items() if how in known)
    for fact, sentence in DECLARED_SENTENCES.items():
        if DECLARED in facts.get(fact, ()):
            sentences.append(sentence)
    return sentences


def _facts(entries: Sequence[Entry]) -> Mapping[str, set[Fact]]:
    facts: dict[str, set[Fact]] = {}
    for entry in entries:
        for name, value in entry.public.items():
            facts.setdefault(name, set()).add(value)
        # Older ledgers, and Flower's strategies, have this flag for samplers alone.
        if entry.declared_by_user and "noise" not in entry.public:
            facts.setdefault("sampler", set()).add(DECLARED)
    return facts
