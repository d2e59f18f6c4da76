"""What `fedsim privacy` shows: answers, histories, trade-offs, checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich.table import Table
from rich.text import Text

from fedsim.privacy import Accountant, Answer, Event, Ledger, Question, TradeOff
from fedsim.privacy.claims import Stopping
from fedsim.privacy.verification import Verified

_LABELS = {
    "poisson": "Poisson, rate {rate:.6g}",
    "fixed": "{size} of {population} without replacement",
    "full": "everybody, no amplification",
    "shuffle": "shuffled passes, no amplification",
}


def report(answer: Answer, prv: bool = False) -> Table:
    """The answer first, then what it rests on; with ``prv``, what Opacus's accountant says."""
    question, cost = answer.question, answer.cost
    rows = {
        "epsilon": _number(cost.epsilon),
        "noise multiplier": _number(answer.noise_multiplier),
        "rounds": f"{answer.rounds:,}",
    }
    table = Table.grid(padding=(0, 2))
    table.add_row(Text(question.asks, "bold"), Text(rows.pop(question.asks), "bold green"))
    for name, value in rows.items():
        table.add_row(name, value)
    table.add_row("delta", f"{question.delta:g}")
    if question.stopping.times:
        table.add_row("", "half of it for an earlier end (stop.metric, stop.callbacks)")
    table.add_row("level, neighbours", f"{question.level}, {cost.adjacency}")
    table.add_row("sampling", question.law.label)
    if question.level == "example":
        table.add_row("public", "how many examples each client has, its steps and rates")
    if question.past:
        table.add_row("releases before", f"{Accountant(question.past).releases:,}")
    table.add_row("accounted by", _METHODS[cost.method])
    table.add_row("Rényi accounting says", _number(cost.rdp_epsilon))
    if prv:
        table.add_row("Opacus's PRV accountant says", prv_says(answer.events, question.delta))
    if cost.poisson_epsilon is not None:
        table.add_row("Poisson would cost", f"{_number(cost.poisson_epsilon)} (add-remove)")
    if question.simulated:
        table.add_row("simulated", "noise follows from the config's seed; see noise.entropy")
    if question.past and question.asks == "noise multiplier":
        table.add_row("", "chosen after releases were made, hence by Rényi accounting")
    return table


def prv_says(events: Iterable[Event], delta: float) -> str:
    """Opacus's opinion in a word."""
    epsilon = Accountant(events).prv_epsilon(delta)
    if epsilon is None:
        return "nothing: it takes Poisson-sampled Gaussians only"
    return f"{_number(epsilon)} at most"


_METHODS = {
    "analytic": "exact curve of the Gaussian",
    "pld": "privacy loss distributions",
    "rdp": "Rényi accounting",
    "none": "nothing: there is no guarantee",
}


def over_table(question: Question, key: str, answers: list[Answer], prv: bool = False) -> Table:
    """One row an answer; what varies stands first."""
    asked = {"target_epsilon": "target", "max_epsilon": "budget"}
    cells: dict[str, Callable[[Answer], str]] = {
        asked.get(key, key.replace("_", " ")): lambda answer: f"{_value(answer.question, key):,g}",
        "rounds": lambda answer: f"{answer.rounds:,}",
        "noise multiplier": lambda answer: _number(answer.noise_multiplier),
        "epsilon": lambda answer: _number(answer.cost.epsilon),
        "epsilon by RDP": lambda answer: _number(answer.cost.rdp_epsilon),
    }
    if prv:
        cells["epsilon by PRV"] = lambda answer: prv_says(answer.events, question.delta)
    table = Table(title=f"{question.level} level, {answers[0].cost.adjacency}")
    for name in cells:
        table.add_column(name, justify="right")
    for answer in answers:
        table.add_row(*(cell(answer) for cell in cells.values()))
    return table


def _value(question: Question, key: str) -> float:
    return float(getattr(question.law if key == "rate" else question, key))


def history(ledger: Ledger, delta: float, stopping: Stopping) -> Table:
    """Epsilon as it grew, in about ten steps."""
    table = Table(title=f"epsilon at delta = {delta:g}")
    for name in ("releases", "round", "epsilon"):
        table.add_column(name, justify="right")
    entries = ledger.charged
    every = max(1, math.ceil(len(entries) / 10))
    accountant = Accountant()
    for number, entry in enumerate(entries, start=1):
        accountant.add(entry.event)
        if number % every == 0 or number == len(entries):
            label = "" if entry.round is None else str(entry.round)
            end = stopping.after(entry.round or 0)
            epsilon = end.epsilon(accountant, entry.event, delta)
            table.add_row(f"{accountant.releases:,}", label, _number(epsilon))
    return table


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.4f}"


ALARMS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5)


def tradeoff_table(curve: TradeOff) -> Table:
    """What a membership-inference attack must miss, at some false-positive rates."""
    table = Table(box=None, padding=(0, 2), title="what an attacker must miss")
    table.add_column("false positives", justify="right")
    table.add_column("misses at least", justify="right")
    for alarms, missed in zip(ALARMS, curve(ALARMS), strict=True):
        table.add_row(f"{alarms:.1%}", f"{math.floor(1000 * missed) / 10:.1f}%")
    mu = "infinite" if math.isinf(curve.mu) else f"{curve.mu:.4f}"
    table.add_row("advantage", f"{curve.advantage:.4f}")
    table.add_row("mu (valid)", mu)
    return table


def checks_table(checks: Sequence[Verified]) -> Table:
    """One line a check."""
    table = Table.grid(padding=(0, 2))
    for check in checks:
        mark = Text("holds", "green") if check.holds else Text("FAILS", "bold red")
        table.add_row(mark, check.subject, check.seen)
    return table
