"""Sentences on a guarantee: what is public, assumed, declared by the user, and not covered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.privacy.entry import DECLARED, WEIGHTS, Entry, Fact
from fedsim.privacy.laws.base import Level


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
        "Declared by the user: that the mechanism, which is not fedsim's own, makes no row longer "
        "than it says, and splits the noise into no less than is charged for."
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
    if WEIGHTS in facts:
        sentences.append("Public: the declared weight of each client in the mean.")
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
