"""statement.html: a run's guarantee on one page, for an ethics board that does not know the field.

It is computed from the run's statements, and so from its ledger: numbers of the config and of the
accounting, and names of metrics. No value that was measured on anybody's data is on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.privacy import Statement
from fedsim.privacy.assumptions import DECLARED_SENTENCES, large_delta, public_facts
from fedsim.privacy.entry import WEIGHTS
from fedsim.privacy.laws.base import Adjacency
from fedsim.reports.page import render
from fedsim.runs.metrics import brief

_WEAK = 10.0
"""Epsilon from which the odds may change 20,000 times and more, so that the page says so."""

_PEOPLE = {"patient", "person", "participant", "subject", "individual", "user", "student"}
"""Nouns of clients who are people, and so have no people's data."""

_CHANGES: dict[Adjacency, str] = {
    "add-remove": "had not been there",
    "zero-out": "had contributed nothing",
    "replace-one": "had been replaced by any other",
}


def board_page(
    title: str, statements: Sequence[Statement], noun: str, *, examples_too: bool = False
) -> str:
    """The page of a private run, as one self-contained HTML file without scripts.

    Parameters
    ----------
    title : str
        The run's name.
    statements : sequence of Statement
        Its published statements: at client level, or at example level only.
    noun : str
        What a client is, such as "hospital".
    examples_too : bool
        Whether single examples are protected in addition, by how much is not published.
    """
    return render(
        "board.html",
        title=title,
        noun=noun,
        plural=_plural(noun),
        levels=[
            {
                "numbers": words.numbers(),
                "warnings": words.warnings(),
                "sections": words.sections() if words.statement.protects else (),
                "evidence": words.evidence(),
            }
            for words in (_Words(statement, noun) for statement in statements)
        ],
        examples_too=examples_too,
    )


def _plural(noun: str) -> str:
    """The plural of an English noun that has a regular one."""
    if re.search("[^aeiou]y$", noun):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if re.search("(s|x|z|ch|sh)$", noun) else f"{noun}s"


def _rounded_up(value: float) -> str:
    """A number from 0 on with two digits, never below it."""
    if not value:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return brief(float(f"{math.ceil(value / unit) * unit:.2g}"))


def _plain(delta: float) -> str:
    """A small number above 0 with two digits, never below it, without a power of ten if it fits."""
    unit = 10.0 ** (math.floor(math.log10(delta)) - 1)
    value = math.ceil(round(delta / unit, 6)) * unit
    return f"{value:.2g}" if value < 1e-9 else f"{value:.10f}".rstrip("0")


@dataclass(frozen=True)
class _Words:
    """A statement in plain words, in which a client is called by the user's ``noun``."""

    statement: Statement
    noun: str

    @property
    def _of_client(self) -> bool:
        return self.statement.level == "client"

    @property
    def _nouns(self) -> str:
        return _plural(self.noun)

    @property
    def _row(self) -> str:
        """What is protected, as a noun."""
        return self.noun if self._of_client else "record"

    @property
    def _was_used(self) -> str:
        """What an attacker would like to know, after the word "whether"."""
        data = f"the data of one {self.noun} were" if self._of_client else "one record was"
        return f"{data} used"

    def numbers(self) -> list[tuple[str, str]]:
        """The figures of the guarantee, each with its name."""
        statement, releases = self.statement, self.statement.releases
        figures = [
            (f"{statement.epsilon:.3g}", statement.epsilon_label),
            (_plain(statement.delta), "delta"),
            (f"{releases:,}", "release" if releases == 1 else "releases"),
        ]
        declared = {entry.event.law.population or 0 for entry in statement.entries}
        if self._of_client and max(declared) and statement.protects:
            figures.append((f"{max(declared):,}", f"{self._nouns} (declared)"))
        return figures

    def warnings(self) -> list[str]:
        """Sentences that come first, since each takes something from the guarantee."""
        statement, sentences = self.statement, []
        if statement.simulated:
            sentences.append(
                "This is a simulation, and no evidence. Its noise follows from a known number, the "
                "seed, and whoever knows it can subtract the noise. The figures are what such a "
                'training guarantees if its noise is secret (noise.entropy = "system").'
            )
        if statement.simulated_cohort:
            sentences.append(
                f"The noise is that of a larger training, with {statement.simulated_cohort:,} "
                f"{self._nouns} in a round; here there were fewer, and epsilon is no guarantee."
            )
        if statement.declared_by_user:
            sentences.append(
                "A part of the calculation is declared by those who trained the model, and not "
                "derived by the software: see what is assumed."
            )
        if large_delta(statement.delta, statement.level, statement.rows):
            sentences.append(
                f"Delta is {_plain(statement.delta)}, and there are {statement.rows:,} "
                f"{_plural(self._row)}: so large a delta would also allow publishing the data of "
                "one, drawn at random."
            )
        if statement.protects and statement.epsilon >= _WEAK:
            sentences.append(
                f"Epsilon is {statement.epsilon:.3g}. From about {_WEAK:g} on it excludes little; "
                "the error rates below say what an attack could do."
            )
        return sentences

    def sections(self) -> list[tuple[str, list[str]]]:
        """The page's headings, each with its paragraphs."""
        return [
            ("What is protected", self._protected()),
            ("Against whom", self._against()),
            ("What epsilon and delta mean here", self._meaning()),
            ("What was released", self._released()),
            ("What is assumed", self._assumed()),
            ("What is not covered", self._not_covered()),
        ]

    def _protected(self) -> list[str]:
        statement, noun = self.statement, self.noun
        sentence = (
            f"Whether {self._was_used}. All that was released would have been nearly as likely if "
            f"that {self._row} {_CHANGES[statement.adjacency]}; how nearly is said by epsilon and "
            "delta."
        )
        if not self._of_client:
            return [
                f"{sentence} A record is one row of the data of any {noun}.",
                "Somebody with several records is protected less. How many records each "
                f"{noun} has is not protected.",
            ]
        if noun in _PEOPLE:
            return [sentence]
        return [
            sentence,
            f"The data of a person at one {noun} are protected as a part of that {noun}'s. "
            f"{self._of_person()} Somebody whose data are at several {self._nouns} is protected "
            "less.",
        ]

    def _of_person(self) -> str:
        """What the guarantee for a client is for a part of its data."""
        statement = self.statement
        if statement.adjacency == "replace-one":
            return "The same figures hold for the difference that this person makes."
        # From a client's data with the person to those without it is two steps: away, and back.
        delta = (1 + math.exp(min(statement.epsilon, 700.0))) * statement.delta
        if delta >= 0.1:
            return "For the difference that this person makes these figures guarantee nothing."
        return (
            "For the difference that this person makes, the guarantee is weaker: epsilon "
            f"{_rounded_up(2 * statement.epsilon)} and delta {_plain(delta)}."
        )

    def _against(self) -> list[str]:
        noun, entries = self.noun, self.statement.entries
        everybody = "everybody who sees what was released, even if they know all other data"
        if not self._of_client:
            return [
                f"Against {everybody}; also against the server, and against other {self._nouns}: "
                f"each {noun} adds the noise before anything leaves it."
            ]
        if not all(entry.noised_by_clients for entry in entries):
            server = (
                "Not against the server that adds up the contributions: it sees them before the "
                "noise, and has to be trusted."
            )
        elif least := min((entry.summed_shares for entry in entries), default=0):
            server = (
                f"The server sees only sums of at least {least} contributions, which have noise "
                f"already. It is trusted to follow the protocol, and the {self._nouns} to add "
                "their noise; the full statement says what holds against the server itself."
            )
        else:
            server = (
                f"Each {noun} adds a part of the noise. Against the server, which sees single "
                "contributions with little noise, much less is guaranteed: the full statement says "
                "how much."
            )
        return [f"Against {everybody}.", server]

    def _meaning(self) -> list[str]:
        statement = self.statement
        epsilon, delta = statement.epsilon, statement.delta
        # Rounded down, as in the full statement.
        missed = [math.floor(1000 * float(statement.tradeoff(rate))) / 10 for rate in (0.01, 0.1)]
        odds = "so much that it is no useful limit"
        if epsilon < _WEAK:
            odds = f"by a factor of at most {_rounded_up(math.exp(epsilon))}"
        return [
            f"Suppose somebody tries to find out whether {self._was_used}. With false alarms in "
            f"1 % of cases they miss at least {missed[0]:g} % of the true ones, and with false "
            f"alarms in 10 % at least {missed[1]:g} %. Guessing misses 99 % and 90 %.",
            f"Epsilon, {epsilon:.3g}, limits how far what was released may change the odds of such "
            f"a suspicion: {odds}. Smaller is better; with delta 0, an epsilon of 0 reveals "
            "nothing.",
            f"Delta, {_plain(delta)}, is by how much that limit may be missed: roughly the chance "
            "that it does not hold.",
        ]

    def _released(self) -> list[str]:
        statement, run = self.statement, self.statement.run
        sentences = [
            "The model after each round, and the settings of the training. Epsilon counts all "
            f"releases together: {statement.releases:,}."
        ]
        if any(entry.kind == "evaluation" for entry in statement.entries):
            names = f" ({', '.join(run.noisy)})" if run is not None and run.noisy else ""
            sentences.append(
                f"With noise, and counted: measures of the model on the {self._nouns}' data{names}."
            )
        if run is None:
            sentences.append("Whether measures of data were released without noise is not known.")
        elif run.without_noise:
            sentences.append(f"Without noise, and not covered: {'; '.join(run.without_noise)}.")
        else:
            sentences.append(f"No measure of the {self._nouns}' data was released without noise.")
        return sentences

    def _assumed(self) -> list[str]:
        statement = self.statement
        secret = "is secret, which here it was not" if statement.simulated else "stays secret"
        sentences = [f"That the software works as described, and that the noise {secret}."]
        if self._of_client:
            sampled = any(entry.event.law.rate < 1 for entry in statement.entries)
            rate = "how often each is asked, " if sampled else ""
            weighted = any(WEIGHTS in entry.public for entry in statement.entries)
            weight = "how much each counts, " if weighted else ""
            sentences.append(
                f"Known, and not protected: the number of {self._nouns}, {rate}{weight}and the "
                "number of rounds."
            )
            if statement.run is None or statement.run.network:
                sentences.append(
                    f"That when no {self.noun} can be reached, this has nothing to do with "
                    "anybody's data."
                )
        facts = public_facts(statement.entries, statement.level, statement.run)
        sentences += [fact for fact in facts if fact in DECLARED_SENTENCES.values()]
        return [*sentences, *filter(None, [statement.added_sentence])]

    def _not_covered(self) -> list[str]:
        return [
            "What the model teaches about people in general: that smokers fall ill more often "
            "holds also for smokers whose data nobody used.",
            f"What those who run the training see: which {self.noun} took part when, and what "
            f"failed. And the data where they are kept, at each {self.noun}.",
        ]

    def evidence(self) -> str:
        """What the figures can be checked against."""
        statement = self.statement
        lines = f"the run's ledger, {statement.lines:,} lines" if statement.lines else "its ledgers"
        if not statement.head:
            return f"The figures are computed from {lines}, whose final hash is not published."
        return f"The figures are computed from {lines}, with the final hash {statement.head}."
