"""`fedsim privacy`: the epsilon of a plan, the noise for a target, the rounds within a budget."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedsim.cli.console import Output, Overrides, panel_option
from fedsim.cli.noises import show_noises
from fedsim.cli.privacy_question import (
    Source,
    parse_axis,
    read_source,
    require_choice,
    with_axis_value,
    with_plan,
    with_sampling,
)
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Answer, Ledger, Question, Statement, TradeOff, tradeoff
from fedsim.privacy.entry import History
from fedsim.privacy.events import simple_laws

_plan = partial(panel_option, "The plan")
_sampling = partial(panel_option, "Sampling")


def privacy(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SOURCE",
            help="A config (run.toml), a ledger (ledger.jsonl), or the directory of a run or of "
            "clients' ledgers.",
        ),
    ] = None,
    set_: Overrides = None,
    noise_multiplier: Annotated[
        float | None,
        _plan(
            "Standard deviation of the noise on the sum, over the clip norm.",
            "--noise-multiplier",
            "-z",
        ),
    ] = None,
    target_epsilon: Annotated[
        float | None, _plan("Compute the noise multiplier that meets this.")
    ] = None,
    max_epsilon: Annotated[
        float | None, _plan("Compute how many rounds this budget allows.")
    ] = None,
    rounds: Annotated[int | None, _plan("Rounds; with a ledger, further rounds.")] = None,
    delta: Annotated[float | None, _plan("The config's, or 1e-5.")] = None,
    invocations: Annotated[int, _plan("Noisy sums a round: 2 for ADADP.")] = 1,
    over: Annotated[
        str | None,
        _plan(
            "A table over rounds, noise-multiplier, target-epsilon, max-epsilon, rate or delta.",
            metavar="KEY=A,B,C",
        ),
    ] = None,
    noises: Annotated[
        bool, _plan("Compare kinds of noise at a config's epsilon.", "--noises")
    ] = False,
    picture: Annotated[
        Path | None, _plan("With --noises: also draw their errors.", metavar="PNG")
    ] = None,
    sampling: Annotated[str | None, _sampling(f"{', '.join(simple_laws())}.")] = None,
    rate: Annotated[float | None, _sampling("Poisson: the probability of being sampled.")] = None,
    size: Annotated[int | None, _sampling("Fixed: how many are sampled.")] = None,
    population: Annotated[
        int | None, _sampling("Out of how many. For Poisson, rate = size / population.")
    ] = None,
    adjacency: Annotated[str | None, _sampling("add-remove, zero-out or replace-one.")] = None,
    level: Annotated[
        str | None,
        _sampling("Without SOURCE: client or example, whose data one row of a sum is."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the statements of a run's ledger as JSON.")
    ] = False,
) -> None:
    """Answer questions about privacy, before a run, during it and after it. Nothing is trained.

    Of noise multiplier, rounds and epsilon, two determine the third. These compute epsilon
    (1.515), the noise multiplier that meets a target, and the rounds that a budget allows:

        fedsim privacy --rate 0.01 --rounds 1000 -z 1.1

        fedsim privacy --rate 0.01 --rounds 1000 --target-epsilon 2

        fedsim privacy --rate 0.01 -z 1.1 --max-epsilon 2

    A config gives the values, which options replace; `--over` makes a table over one of them:

        fedsim privacy run.toml

        fedsim privacy run.toml --over rounds=10,20,40,80

        fedsim privacy run.toml --set cohort.rate=0.1 --over target-epsilon=1,2,4,8

        fedsim privacy run.toml --noises --picture noises.png

    For a run, its ledger says what it has spent, and what further rounds would cost:

        fedsim privacy runs/digits

        fedsim privacy runs/digits --max-epsilon 8

    The same noise costs more without amplification by sampling (`--sampling full`), and with
    cohorts of a fixed size (`--sampling fixed --size 10 --population 100`), where neighbours
    differ by replacing one row with another. At example level, the rate is the batch size over
    the number of a client's examples, which is public, and the rounds are its steps:

        fedsim privacy --level example --rate 0.00333 --rounds 30000 -z 4
    """
    if picture is not None and not noises:
        raise FedsimError(f"--picture {picture} shows what --noises compares; give that too.")
    if noises:
        show_noises(source, set_ or [], picture)
        return
    contents = read_source(source, set_ or [], delta)
    question = contents.question
    if source is None:
        row = require_choice("--level", level or "client", "client", "example")
        question = replace(question, level=row)
    elif level not in (None, question.level):
        raise FedsimError(f"--level is {level!r}, and {source} is about {question.level} level.")
    drawn = {"rate": rate, "size": size, "population": population, "adjacency": adjacency}
    question = with_plan(
        with_sampling(question, sampling, drawn),
        {
            "rounds": rounds,
            "delta": delta,
            "noise_multiplier": noise_multiplier,
            "target_epsilon": target_epsilon,
            "max_epsilon": max_epsilon,
            "invocations": invocations if invocations != 1 else None,
        },
    )
    asks = (rounds, max_epsilon, target_epsilon, over)
    if contents.ledger is not None and all(value is None for value in asks):
        _show_spent(contents, contents.ledger, question.delta, as_json)
        return
    if as_json:
        raise FedsimError(
            "--json prints the statements of a ledger; give it a ledger or a run, without "
            "--rounds, --over or an epsilon."
        )
    console = Output()
    if over is not None:
        key, values = parse_axis(over)
        answers = [with_axis_value(question, key, value).answer() for value in values]
        console.print(_over_table(question, key, answers))
        largest = max((answer.question for answer in answers), key=attrgetter("delta"))
        _print_warning(console, contents.large_delta(largest))
        return
    answer = question.answer()
    console.print(_answer_table(answer))
    _print_warning(console, contents.large_delta(question))
    _print_further(console, contents, answer)


def _print_warning(console: Output, warning: str) -> None:
    if warning:
        console.print(warning)


def _print_further(console: Output, contents: Source, answer: Answer) -> None:
    """Print the notes after an answer: declarations, trade-off curve."""
    for sentence in contents.declarations:
        console.print(sentence)
    if math.isfinite(answer.cost.epsilon) and not answer.question.simulated > 1:
        console.print(_tradeoff_table(tradeoff(answer.events)))


def _show_spent(contents: Source, ledger: Ledger, delta: float, as_json: bool) -> None:
    """Print the statements of a run's ledgers, and a table of epsilon over rounds."""
    statements = contents.ledgers.statements
    if as_json:
        typer.echo(json.dumps([statement.to_dict() for statement in statements], indent=2))
        return
    console = Output()
    for statement in statements:
        console.print(f"{statement}\n")
        if statement.protects and statement.cost.releases:
            console.print(_tradeoff_table(statement.tradeoff))
    console.print(_history_table(ledger.statement(delta)))


def _answer_table(answer: Answer) -> Table:
    """Table with the answer first, then the values that it follows from."""
    question, cost = answer.question, answer.cost
    rows = {
        "epsilon": _number(cost.epsilon),
        "noise multiplier": _number(answer.noise_multiplier),
        "rounds": f"{answer.rounds:,}",
    }
    table = Table.grid(padding=(0, 2))
    table.add_row(Text(question.unknown, "bold"), Text(rows.pop(question.unknown), "bold green"))
    for name, value in rows.items():
        table.add_row(name, value)
    table.add_row("delta", f"{question.delta:g}")
    if question.may_stop:
        table.add_row("", "all rounds, whichever is the last (stop.metric, stop.callbacks)")
    table.add_row("level, neighbours", f"{question.level}, {cost.adjacency}")
    table.add_row("sampling", question.law.label)
    if question.level == "example":
        table.add_row("public", "the number of each client's examples, its steps and rates")
    if others := question.further_events(question, answer.rounds):
        evaluation_count = sum(event.count for event in others)
        table.add_row("private evaluations", f"{evaluation_count:,}, counted")
    if question.past:
        table.add_row("releases before", f"{Accountant(question.past).releases:,}")
    table.add_row("accounted by", _METHODS[cost.method])
    table.add_row("Rényi accounting says", _number(cost.rdp_epsilon))
    if cost.poisson_epsilon is not None:
        table.add_row("Poisson would cost", f"{_number(cost.poisson_epsilon)} (add-remove)")
    if question.simulated:
        larger = f"for a cohort of {question.simulated:,}, no guarantee of this run; "
        why = "the noise follows from the config's seed; see noise.entropy"
        table.add_row("simulated", (larger if question.simulated > 1 else "") + why)
    if question.past and question.unknown == "noise multiplier":
        table.add_row("", "chosen after releases, therefore by Rényi accounting")
    return table


_METHODS = {
    "analytic": "exact curve of the Gaussian",
    "pld": "privacy loss distributions",
    "rdp": "Rényi accounting",
    "none": "nothing: there is no guarantee",
}


def _over_table(question: Question, key: str, answers: list[Answer]) -> Table:
    """One row per answer; the varied key is the first column."""
    headings = {"target_epsilon": "target", "max_epsilon": "budget"}

    def varied(answer: Answer) -> str:
        question = answer.question
        return f"{getattr(question.law if key == 'rate' else question, key):,g}"

    cells: dict[str, Callable[[Answer], str]] = {
        headings.get(key, key.replace("_", " ")): varied,
        "rounds": lambda answer: f"{answer.rounds:,}",
        "noise multiplier": lambda answer: _number(answer.noise_multiplier),
        "epsilon": lambda answer: _number(answer.cost.epsilon),
        "epsilon by RDP": lambda answer: _number(answer.cost.rdp_epsilon),
    }
    table = Table(title=f"{question.level} level, {answers[0].cost.adjacency}")
    for name in cells:
        table.add_column(name, justify="right")
    for answer in answers:
        table.add_row(*(cell(answer) for cell in cells.values()))
    return table


def _history_table(statement: Statement) -> Table:
    """Table of epsilon over rounds, in about ten steps."""
    entries, delta = statement.entries, statement.delta
    table = Table(title=f"{statement.epsilon_label} at delta = {delta:g}")
    for name in ("releases", "round", "epsilon"):
        table.add_column(name, justify="right")
    every, history = max(1, math.ceil(len(entries) / 10)), History()
    for number, entry in enumerate(entries, start=1):
        history.add(entry)
        if number % every == 0 or number == len(entries):
            label = "" if entry.round is None else str(entry.round)
            spent = history.accountant
            table.add_row(f"{spent.releases:,}", label, _number(spent.epsilon(delta)))
    return table


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.4f}"


_FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5)


def _tradeoff_table(curve: TradeOff) -> Table:
    """Least false-negative rates of any membership-inference attack, at some false-positive rates.

    They are rounded down, so that the printed claim is true.
    """
    table = Table(box=None, padding=(0, 2), title="any membership-inference attack")
    table.add_column("at a false-positive rate of", justify="right")
    table.add_column("misses at least", justify="right")
    for rate, missed in zip(_FALSE_POSITIVE_RATES, curve(_FALSE_POSITIVE_RATES), strict=True):
        table.add_row(f"{100 * rate:.1f} %", f"{math.floor(1000 * missed) / 10:.1f} %")
    mu = "infinite" if math.isinf(curve.mu) else f"{curve.mu:.4f}"
    table.add_row("advantage", f"at most {curve.advantage:.4f}")
    table.add_row("Gaussian DP", f"mu = {mu}")
    return table
