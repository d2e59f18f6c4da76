"""The privacy statement: a run's guarantee, its level, its neighbours and its adversary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fedsim.arguments import check_arguments
from fedsim.privacy.accountant import Accountant, Cost
from fedsim.privacy.adversary import NOT_COVERED, adversary, large_delta, public_facts
from fedsim.privacy.claims import FIXED, Extrapolation, Stopping, costliest
from fedsim.privacy.entry import Entry
from fedsim.privacy.laws.base import Adjacency, Level
from fedsim.privacy.ledger_file import LedgerFile
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

_OPERATORS = (
    "These figures depend on who took part and on how many examples each client has, which the "
    "guarantee for whole clients protects: they are for the operator, and not to be published."
)


def epsilon_marks(simulated: bool, declared: bool) -> str:
    """Qualifiers that must follow an epsilon wherever it is shown; "" if there are none.

    Examples
    --------
    >>> "epsilon" + epsilon_marks(simulated=True, declared=True)
    'epsilon (simulated, declared by the user)'
    >>> epsilon_marks(simulated=False, declared=False)
    ''
    """
    marks = ["simulated"] * simulated + ["declared by the user"] * declared
    return f" ({', '.join(marks)})" if marks else ""


@dataclass(frozen=True)
class Statement:
    """The guarantee of a run, computed from its ledgers and from nothing else.

    Attributes
    ----------
    cost : Cost
        Epsilon, delta, adjacency and accounting method, for everything that is charged; at
        example level for the client that has spent most.
    level : "client" or "example"
        What is protected: a client with all its data, or one example.
    charged : tuple of Entry
        Entries that are charged.
    planned : Accountant
        Composition of these and of all rounds still planned.
    tradeoff : TradeOff
        Bound on membership-inference attacks, for ``planned``.
    ledgers : int
        Number of ledgers: one for each client at example level.
    rows : int or None
        Clients of the declared population, or examples of the smallest client; None if unknown.
    before : int
        Charged releases that are in archived ledgers of earlier runs.
    this_run : Cost or None
        Cost without those; None if there are none.
    ledger : str or None
        Path of the ledger or ledgers; None if it is in memory only.
    head : str
        Hash of the ledger's last line; empty if there is no line, an incomplete last one, or more
        than one ledger.
    lines : int
        Number of the ledger's lines.
    note : str
        An additional sentence.
    stopping : Stopping
        Whether releases might end the run early, and its planned rounds.
    extrapolated : Extrapolation or None
        Cost of a hypothetical larger cohort, whose noise on the mean the run has simulated.
    """

    cost: Cost
    level: Level
    charged: tuple[Entry, ...] = field(repr=False)
    tradeoff: TradeOff = field(repr=False, compare=False)
    planned: Accountant = field(repr=False, compare=False)
    ledgers: int = 1
    rows: int | None = None
    before: int = 0
    this_run: Cost | None = None
    ledger: str | None = None
    head: str = ""
    lines: int = 0
    note: str = ""
    stopping: Stopping = FIXED
    extrapolated: Extrapolation | None = None

    @classmethod
    def of(
        cls,
        ledgers: Sequence[LedgerFile],
        delta: float,
        place: str | None = None,
        *,
        stopping: Stopping = FIXED,
    ) -> Self:
        """The statement over one or more ledgers whose owners have disjoint data.

        Figures for attacks and groups are for all planned rounds.

        Parameters
        ----------
        ledgers : sequence of Ledger
            One at client level, one for each client at example level.
        delta : float
        place : str, optional
            Description of where several ledgers are.
        stopping : Stopping
            Whether releases might end the run; by default its rounds were fixed in advance.
        """
        worst = costliest([ledger.history for ledger in ledgers], delta, stopping)
        planned = stopping.planned(worst)
        this_run = worst.without_archive() if worst.archived else None
        single = ledgers[0] if len(ledgers) == 1 and place is None else None
        heads = [] if single is None or single.ends_incomplete else single.heads
        if single is not None and single.path is not None:
            place = str(single.path)
        return cls(
            cost=stopping.cost(worst, delta),
            level=ledgers[0].level,
            charged=tuple(worst.effective),
            tradeoff=tradeoff(planned),
            planned=planned,
            ledgers=len(ledgers),
            rows=min(filter(None, (ledger.history.rows for ledger in ledgers)), default=None),
            before=sum(entry.event.count for entry in worst.archived if entry.kind != "planned"),
            this_run=None if this_run is None else stopping.cost(this_run, delta),
            ledger=place,
            head=heads[-1] if heads else "",
            lines=len(single.heads) if single is not None else 0,
            stopping=stopping,
        )

    def of_operator(self) -> Self:
        """The statement marked as for the operator only: examples', where clients are protected."""
        return replace(self, note=_OPERATORS)

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
    def of_run(self) -> int:
        """Number of releases of this run, without earlier ones."""
        return self.cost.releases - self.before

    @property
    def simulated(self) -> bool:
        """Whether some noise follows from the config's seed, which is no secret."""
        return any(entry.entropy == "config" for entry in self.charged)

    @property
    def torn(self) -> int:
        """Number of torn lines, each counted as a release."""
        return sum(entry.kind == "torn" for entry in self.charged)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Names of the laws of the releases, sorted."""
        return tuple(sorted({entry.event.law.name for entry in self.charged}))

    @property
    def declared(self) -> bool:
        """Whether a law, noise or bound is declared by the user."""
        return any(entry.declared_by_user for entry in self.charged)

    @property
    def words(self) -> str:
        """The word "epsilon" with its qualifiers, for use wherever it is shown."""
        return f"epsilon{epsilon_marks(self.simulated, self.declared)}"

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
                *self._archive(),
                *self._ledger_sentences(),
            ]
        return [
            *self._guarantee(),
            self.tradeoff.sentence(),
            *adversary(self.charged, self.level, self.delta),
            *public_facts(self.charged, self.level),
            *self._archive(),
            *self._provisos(),
            f"Not covered: {'; '.join(NOT_COVERED)}.",
            *self._ledger_sentences(),
        ]

    def _guarantee(self) -> list[str]:
        # Each of several rounds that are charged together counts as one release.
        events = [entry.event for entry in self.charged if entry.kind != "planned"]
        releases = sum(1 if event.law.rounds > 1 else event.count for event in events)
        cost, many = self.cost, releases != 1
        simulated = ", simulated" if self.simulated else ""
        simulated += ", as the user declares" if self.declared else ""
        costliest_client = " for the client that has spent most" if self.ledgers > 1 else ""
        row = "client with all its data" if self.level == "client" else "example"
        neighbours = _ADJACENCIES[cost.adjacency].format(row=row)
        if self.level == "example":
            neighbours += ", the number of each client's examples being unchanged"
        laws = dict.fromkeys(event.law for event in events)  # in their order in the ledger
        sampling = " and ".join(dict.fromkeys(law.sentence(self.level) for law in laws))
        sentences = [
            f"{self.covers[:1].upper()}{self.covers[1:]} is ({cost.epsilon:.4g}, {cost.delta:g})-"
            f"differentially private at {self.level} level{simulated}.",
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
        if self.extrapolated is not None:
            sentences.append(self.extrapolated.sentence())
        if warning := large_delta(self.delta, self.level, self.rows):
            sentences.append(warning)
        sentences += self._end()
        if self.simulated:
            sentences.append(
                "Simulated: noise and samples follow from the config's seed. To anyone who knows "
                "it there is no guarantee. Two runs of one seed on different data share their "
                "noise, and their difference has none: publish at most one of them. With "
                'noise.entropy = "system" noise and samples come from the operating system, no two '
                "runs share any, and the guarantee holds against the adversary named here."
            )
        return sentences

    @property
    def covers(self) -> str:
        """What was released, in words."""
        evaluated = any(entry.kind == "evaluation" for entry in self.charged)
        metrics = " with the noisy metrics of clients' evaluations" if evaluated else ""
        return f"the sequence of global models{metrics}"

    def _end(self) -> list[str]:
        times, left = self.stopping.possible_ends, self.stopping.rounds_left
        if times:
            return [
                f"Released values may end the run after any of {times:,} rounds. Epsilon is the "
                f"smaller of that of the rounds made, at delta / {2 * times:,}, and that of all "
                "planned rounds (or a smaller budget), at delta / 2: it holds whichever round is "
                "the last. Figures for attacks and groups are for all planned rounds."
            ]
        if left:
            return [
                f"Released values ended the run {left:,} rounds before its planned end, which was "
                "not declared before by stop.metric or stop.callbacks: epsilon and the figures for "
                "attacks and groups are for all planned rounds, or a smaller budget."
            ]
        if any(entry.kind == "planned" for entry in self.charged):
            return [
                "Released values ended a run before its planned end: epsilon and the figures for "
                "attacks and groups are for all its planned rounds, or a smaller budget."
            ]
        return []

    def _archive(self) -> list[str]:
        if self.this_run is None:
            return []
        epsilon = self.this_run.epsilon
        own_epsilon = f"{epsilon:.4g}" if math.isfinite(epsilon) else "infinite"
        return [
            f"{self.before:,} of the releases were made by earlier runs, whose ledgers are "
            f"archived beside this one and count; this run's own would be epsilon {own_epsilon}."
        ]

    def _provisos(self) -> list[str]:
        sentences = []
        if any(entry.version == 1 for entry in self.charged):
            sentences.append(
                "Part of the ledger is of format 1"
                + (
                    ", which claimed add-remove; it is read as zero-out, with the number of every "
                    "client's examples public."
                    if self.level == "example"
                    else ": each of its releases is charged, also where a run repeated one."
                )
            )
        if self.torn:
            sentences.append(f"{self.torn} incomplete ledger line(s) are counted as releases.")
        return sentences

    def _ledger_sentences(self) -> list[str]:
        sentences = [self.note] if self.note else []
        sentences.append(f"Ledger: {self.ledger or 'kept in memory only'}.")
        if self.head:
            sentences.append(
                f"Final hash of {self.lines:,} entries: {self.head} (a chain of hashes detects "
                "accidents; to detect forgery keep this hash elsewhere, or sign the run)."
            )
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe mapping; an infinite epsilon is the string "inf"."""
        cost, extrapolated = self.cost, self.extrapolated
        misses = self.tradeoff([0.01, 0.05, 0.1])
        data = {
            "epsilon": cost.epsilon,
            "delta": cost.delta,
            "extrapolated-epsilon": None if extrapolated is None else extrapolated.epsilon,
            "simulated": self.simulated,
            "declared": self.declared,
            "adjacency": cost.adjacency,
            "level": self.level,
            "method": cost.method,
            "rdp-epsilon": cost.rdp_epsilon,
            "poisson-epsilon": cost.poisson_epsilon,
            "misses": dict(zip(("0.01", "0.05", "0.1"), map(float, misses), strict=True)),
            "advantage": self.tradeoff.advantage,
            "mu": self.tradeoff.mu,
            "releases": cost.releases,
            "releases-before": self.before,
            "own-epsilon": None if self.this_run is None else self.this_run.epsilon,
            "samplers": list(self.samplers),
            "entropies": sorted({entry.entropy for entry in self.charged}),
            "torn": self.torn,
            "stops": self.stopping.possible_ends,
            "covers": self.covers,
            "adversary": adversary(self.charged, self.level, self.delta) if self.private else [],
            "public": public_facts(self.charged, self.level),
            "not-covered": list(NOT_COVERED),
            "ledger": self.ledger,
            "head": self.head,
            "lines": self.lines,
        }
        return {name: json_value(value) for name, value in data.items()}


@check_arguments
def claimed(server: Statement | None, examples: Statement | None) -> list[Statement]:
    """The statements to show of a run, given those of its server's ledger and of its clients'.

    The server's is left out if clients protect their examples and updates have no noise of their
    own; the examples' is marked as for the operator only if whole clients are protected too.
    """
    if examples is None:
        return [] if server is None else [server]
    if server is None or not server.private:
        return [examples]
    return [server, examples.of_operator()]
