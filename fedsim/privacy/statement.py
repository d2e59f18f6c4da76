"""The privacy statement: a run's guarantee, its level, its neighbours and its adversary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fedsim.arguments import check_arguments
from fedsim.privacy.accountant import Cost
from fedsim.privacy.assumptions import ReleaseSetting, large_delta, not_covered, public_facts
from fedsim.privacy.entry import SIMULATED_COHORT, Entry, History
from fedsim.privacy.events import Event
from fedsim.privacy.laws.base import Adjacency, Level
from fedsim.privacy.placement import adversary, trusted
from fedsim.privacy.records import json_value
from fedsim.privacy.tradeoff import TradeOff, tradeoff

_ADJACENCIES: dict[Adjacency, str] = {
    "add-remove": "adding or removing one {row}",
    "zero-out": "one {row} contributing nothing instead",
    "replace-one": "replacing one {row} by any other",
}

_METHODS = {
    "analytic": "the exact curve of the Gaussian mechanism",
    "pld": "privacy loss distributions (PLD)",
    "rdp": "Rényi accounting (RDP)",
}

SEEDED = (
    "The noise of a seeded run follows from its seed and its release digest, which covers all "
    "settings that can change what is released: runs whose digests differ share none; runs of one "
    "digest on different data share all of it, and their difference has none."
)
"""What runs of one seed share; README says it in the same words."""

_FEWER_CLIENTS = (
    "Fewer clients take part, with the noise on their mean that so many would have "
    "(noise.cohort-size), which does not protect them: epsilon is no guarantee of this run."
)

_OPERATORS = (
    "These figures depend on who took part and on how many examples each client has, which the "
    "guarantee for whole clients protects: they are for the operator, and not to be published."
)


def epsilon_marks(simulated: float, declared: float) -> str:
    """Qualifiers that must follow an epsilon wherever it is shown; "" if there are none.

    Parameters
    ----------
    simulated : float
        0, 1 if the noise follows from a known seed, or the size (above 1) of the larger cohort that
        is simulated in addition.
    declared : float
        0, or 1 if the user declares a law, noise or mechanism.

    Examples
    --------
    >>> "epsilon" + epsilon_marks(simulated=1000, declared=False)
    'epsilon (simulated for a cohort of 1,000)'
    >>> "epsilon" + epsilon_marks(simulated=True, declared=True)
    'epsilon (simulated, declared by the user)'
    >>> epsilon_marks(simulated=False, declared=False)
    ''
    """
    marks = ["simulated" + (f" for a cohort of {simulated:,.0f}" if simulated > 1 else "")]
    marks = marks * bool(simulated) + ["declared by the user"] * bool(declared)
    return f" ({', '.join(marks)})" if marks else ""


@dataclass(frozen=True)
class Statement:
    """The guarantee of a run, computed from its ledgers.

    What these do not say, the network and the metrics shown, is in `run`, if it is known.

    Attributes
    ----------
    cost : Cost
        Epsilon, delta, adjacency and accounting method, for everything that is charged; at
        example level for the client that has spent most.
    level : "client" or "example"
        What is protected: a client with all its data, or one example.
    entries : tuple of Entry
        Entries that are charged to the owner that has spent most.
    events : tuple of Event
        Their events, each with its number of invocations.
    tradeoff : TradeOff
        Bound on membership-inference attacks.
    owners : int
        Number of clients with a history of their own, at example level.
    rows : int or None
        Clients of the declared population, or examples of the smallest client; None if unknown.
    ledger : str or None
        Path of the ledger or ledgers; None if it is in memory only.
    head : str
        Hash of the ledger's last line; empty if there is no line, or more than one ledger.
    lines : int
        Number of the ledger's lines.
    added_sentence : str
        An additional sentence.
    run : ReleaseSetting or None
        What is known of the run beside its ledgers; None if nothing is.
    """

    cost: Cost
    level: Level
    entries: tuple[Entry, ...] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    tradeoff: TradeOff = field(repr=False, compare=False)
    owners: int = 1
    rows: int | None = None
    ledger: str | None = None
    head: str = ""
    lines: int = 0
    added_sentence: str = ""
    run: ReleaseSetting | None = None

    @classmethod
    def from_history(
        cls, worst: History, entries: Sequence[Entry], delta: float, *, level: Level, **facts: Any
    ) -> Self:
        """The statement over the history of the owner that has spent most.

        Parameters
        ----------
        worst : History
        entries : sequence of Entry
            The entries in that history.
        delta : float
        level : "client" or "example"
        **facts
            Further fields of the statement.
        """
        return cls(
            cost=worst.accountant.cost(delta),
            level=level,
            entries=tuple(entries),
            events=tuple(event.times(count) for event, count in worst.counts.items()),
            tradeoff=tradeoff(worst.accountant),
            **facts,
        )

    def for_operator(self) -> Self:
        """The statement marked as for the operator only: examples', where clients are protected."""
        return replace(self, added_sentence=_OPERATORS)

    @property
    def epsilon(self) -> float:
        """Epsilon of the claim; infinite if a release had no guarantee."""
        return self.cost.epsilon

    @property
    def delta(self) -> float:
        """Delta of the claim."""
        return self.cost.delta

    @property
    def adjacency(self) -> Adjacency:
        """Adjacency of the claim."""
        return self.cost.adjacency

    @property
    def private(self) -> bool:
        """Whether epsilon is finite."""
        return math.isfinite(self.cost.epsilon)

    @property
    def simulated(self) -> bool:
        """Whether some noise follows from the config's seed, which is no secret."""
        return any(entry.entropy == "config" for entry in self.entries)

    @property
    def protects(self) -> bool:
        """Whether its epsilon bounds what an attack on this run can find."""
        return self.private and not self.simulated_cohort

    @property
    def simulated_cohort(self) -> int:
        """Size of the larger cohort that some release simulates; 0 if none does."""
        return max((int(e.public.get(SIMULATED_COHORT) or 0) for e in self.entries), default=0)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Names of the laws of the releases, sorted."""
        return tuple(sorted({entry.event.law.name for entry in self.entries}))

    @property
    def declared_by_user(self) -> bool:
        """Whether a law, noise or mechanism is declared by the user."""
        return any(entry.declared_by_user for entry in self.entries)

    @property
    def epsilon_label(self) -> str:
        """The word "epsilon" with its qualifiers, for use wherever it is shown."""
        return f"epsilon{self.marks}"

    @property
    def marks(self) -> str:
        """Qualifiers of its epsilon: see `epsilon_marks`."""
        return epsilon_marks(self.simulated_mark, self.declared_by_user)

    @property
    def simulated_mark(self) -> int:
        """How its epsilon is marked: ``simulated`` of `epsilon_marks`."""
        return self.simulated_cohort or int(self.simulated)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """The statement in plain words, one sentence a line."""
        if not self.cost.releases:
            return ["Nothing was released."]
        if not self.private:
            return [
                "No privacy guarantee: at least one release was made without sufficient noise, so "
                f"epsilon is infinite at {self.level} level.",
                *self._ledger_sentences(),
            ]
        if self.simulated_cohort:
            return [*self._guarantee(), *self._ledger_sentences()]
        return [
            *self._guarantee(),
            self.tradeoff.sentence(),
            *adversary(self.entries, self.level, self.delta),
            *public_facts(self.entries, self.level, self.run),
            f"Not covered: {'; '.join(not_covered(self.run))}.",
            *self._ledger_sentences(),
        ]

    def summary(self) -> list[str]:
        """Four short lines: epsilon and delta, for whom, what an attack misses, who is trusted."""
        if not self.cost.releases or not self.private:
            return self.sentences()[:1]
        source = "a known seed" if self.simulated else "the operating system"
        row = "client with all its data" if self.level == "client" else "example"
        operators = "; for the operator only" if self.added_sentence == _OPERATORS else ""
        epsilon = f"{self.epsilon_label} = {self.epsilon:.4g} at delta = {self.delta:g}"
        if not self.protects:
            return [epsilon, _FEWER_CLIENTS]
        return [
            f"{epsilon}; noise from {source}",
            f"Protected: one {row} (neighbours: {self.adjacency}){operators}.",
            self.tradeoff.brief(),
            trusted(self.entries, self.level),
        ]

    @property
    def releases(self) -> int:
        """Number of releases; each of several rounds that are charged together is one."""
        events = (entry.event for entry in self.entries)
        return sum(1 if event.law.rounds > 1 else event.count for event in events)

    def _guarantee(self) -> list[str]:
        events, releases = [entry.event for entry in self.entries], self.releases
        cost, many, larger = self.cost, releases != 1, self.simulated_cohort
        simulated = ", simulated" if self.simulated else ""
        simulated += f" for a cohort of {larger:,}" if larger else ""
        simulated += ", as the user declares" if self.declared_by_user else ""
        costliest_client = " for the client that has spent most" if self.owners > 1 else ""
        row = "client with all its data" if self.level == "client" else "example"
        neighbours = _ADJACENCIES[cost.adjacency].format(row=row)
        if self.level == "example":
            neighbours += ", the number of each client's examples being unchanged"
        laws = dict.fromkeys(event.law for event in events)  # in their order in the ledger
        sampling = " and ".join(dict.fromkeys(law.sentence(self.level) for law in laws))
        sentences = [
            f"{self.covers[:1].upper()}{self.covers[1:]} {'would be' if larger else 'is'} "
            f"({cost.epsilon:.4g}, {cost.delta:g})-differentially private at {self.level} level"
            f"{simulated}.",
            f"Neighbours: {neighbours} ({cost.adjacency}).",
            f"{releases:,} release{'s' if many else ''}{costliest_client}; {sampling}; "
            f"accounted for by {_METHODS[cost.method]}; Rényi accounting gives "
            f"{cost.rdp_epsilon:.4g}.",
        ]
        if cost.poisson_epsilon is not None:
            sentences.append(
                f"Poisson cohorts of the same expected size would have cost epsilon "
                f"{cost.poisson_epsilon:.4g} (add-remove)."
            )
        if larger:
            sentences.append(_FEWER_CLIENTS)
        if warning := large_delta(self.delta, self.level, self.rows):
            sentences.append(warning)
        sentences += self._closed_plan_sentence()
        if self.simulated:
            sentences.append(
                "Simulated: noise and samples follow from a seed. To anyone who knows it there is "
                f"no guarantee. {SEEDED} Publish at most one of these. With noise.entropy = "
                '"system" noise and samples come from the operating system, no two runs share any, '
                "and the guarantee holds against the adversary named here."
            )
        return sentences

    @property
    def covers(self) -> str:
        """What was released, in words."""
        evaluated = any(entry.kind == "evaluation" for entry in self.entries)
        metrics = " with the noisy metrics of clients' evaluations" if evaluated else ""
        if evaluated and self.run is not None and self.run.noisy:
            metrics += f" ({', '.join(self.run.noisy)})"
        return f"the sequence of global models{metrics}"

    def _closed_plan_sentence(self) -> list[str]:
        rounds = [entry.through for entry in self.entries if entry.through]
        if not rounds:
            return []
        return [
            f"What was released may have ended the run: all rounds up to {max(rounds):,} are "
            "charged, whichever was the last."
        ]

    def _ledger_sentences(self) -> list[str]:
        sentences = [self.added_sentence] if self.added_sentence else []
        sentences.append(f"Ledger: {self.ledger or 'kept in memory only'}.")
        if self.head:
            sentences.append(
                f"Final hash of {self.lines:,} entries: {self.head} (a chain of hashes detects "
                "accidents; to detect forgery keep this hash elsewhere, or sign the run)."
            )
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping; an infinite epsilon is the string "inf"."""
        cost = self.cost
        misses = self.tradeoff([0.01, 0.05, 0.1])
        data = {
            "epsilon": cost.epsilon,
            "delta": cost.delta,
            "simulated": self.simulated,
            SIMULATED_COHORT: self.simulated_cohort,
            "declared": self.declared_by_user,
            "adjacency": cost.adjacency,
            "level": self.level,
            "method": cost.method,
            "rdp-epsilon": cost.rdp_epsilon,
            "poisson-epsilon": cost.poisson_epsilon,
            "misses": dict(zip(("0.01", "0.05", "0.1"), map(float, misses), strict=True)),
            "advantage": self.tradeoff.advantage,
            "mu": self.tradeoff.mu,
            "releases": self.releases,
            "samplers": list(self.samplers),
            "entropies": sorted({entry.entropy for entry in self.entries}),
            "covers": self.covers,
            "adversary": adversary(self.entries, self.level, self.delta) if self.protects else [],
            "public": public_facts(self.entries, self.level, self.run),
            "not-covered": not_covered(self.run),
            "ledger": self.ledger,
            "head": self.head,
            "lines": self.lines,
        }
        return {name: json_value(value) for name, value in data.items()}


@check_arguments
def statements_to_show(server: Statement | None, examples: Statement | None) -> list[Statement]:
    """The statements to show of a run, given those of its server's ledger and of its clients'.

    The server's is left out if clients protect their examples and updates have no noise of their
    own; the examples' is marked as for the operator only if whole clients are protected too.
    """
    if examples is None:
        return [] if server is None else [server]
    if server is None or not server.private:
        return [examples]
    return [server, examples.for_operator()]
