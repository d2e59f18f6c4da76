"""`fedsim privacy`: what a plan costs, what noise a target needs, what a budget buys."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from fedsim.cli.console import Output
from fedsim.cli.privacy_source import Source, read_source
from fedsim.cli.privacy_views import (
    checks_table,
    history,
    over_table,
    prv_says,
    report,
    tradeoff_table,
)
from fedsim.errors import FedsimError
from fedsim.privacy import Adjacency, Law, Question, tradeoff
from fedsim.privacy.claims import group_cost
from fedsim.privacy.events import shipped_laws
from fedsim.privacy.manifest import new_key
from fedsim.reports.verification import verify_run

_PLAN, _SAMPLING, _LEDGER = "The plan", "Who takes part", "What a run left behind"


def privacy(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SOURCE",
            help="A config (run.toml), a ledger (ledger.jsonl), or the directory of a run or of "
            "clients' ledgers.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the config."),
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            "--noise-multiplier", "-z", help="Noise on the sum / clip norm.", rich_help_panel=_PLAN
        ),
    ] = None,
    target_epsilon: Annotated[
        float | None,
        typer.Option(help="Ask for the noise multiplier that meets this.", rich_help_panel=_PLAN),
    ] = None,
    max_epsilon: Annotated[
        float | None,
        typer.Option(help="Ask how many rounds this budget buys.", rich_help_panel=_PLAN),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds; with a ledger, further ones.", rich_help_panel=_PLAN),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="1e-5 if nothing says otherwise.", rich_help_panel=_PLAN)
    ] = None,
    invocations: Annotated[
        int, typer.Option(help="Noisy sums a round: 2 for ADADP.", rich_help_panel=_PLAN)
    ] = 1,
    over: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A,B,C",
            help="A table over rounds, noise-multiplier, target-epsilon, max-epsilon, rate or "
            "delta.",
            rich_help_panel=_PLAN,
        ),
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(shipped_laws())}.", rich_help_panel=_SAMPLING),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Poisson: probability of taking part.", rich_help_panel=_SAMPLING),
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="Fixed: how many take part.", rich_help_panel=_SAMPLING)
    ] = None,
    population: Annotated[
        int | None,
        typer.Option(
            help="Out of how many. Poisson: rate = size / population.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    adjacency: Annotated[
        str | None,
        typer.Option(help="add-remove, zero-out or replace-one.", rich_help_panel=_SAMPLING),
    ] = None,
    level: Annotated[
        str,
        typer.Option(
            help="Whose data one row of a sum is: client, or example.", rich_help_panel=_SAMPLING
        ),
    ] = "client",
    group: Annotated[
        int | None,
        typer.Option(
            help="Say too what somebody is promised who owns so many clients.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    prv: Annotated[
        bool,
        typer.Option(
            "--prv",
            help="Ask Opacus's PRV accountant too; it takes a few seconds to load.",
            rich_help_panel=_PLAN,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="What a ledger says, as JSON.", rich_help_panel=_LEDGER),
    ] = False,
    verify_: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare a run's files with its ledger and manifest; status 1 if they differ.",
            rich_help_panel=_LEDGER,
        ),
    ] = False,
    public_key: Annotated[
        Path | None,
        typer.Option(
            help="Verify the signature of the run's manifest too.", rich_help_panel=_LEDGER
        ),
    ] = None,
    new_key_path: Annotated[
        Path | None,
        typer.Option(
            "--new-key",
            metavar="PATH",
            help="Make a key that signs runs (noise.ledger-key), and PATH.pub to verify with.",
            rich_help_panel=_LEDGER,
        ),
    ] = None,
) -> None:
    """Answer questions about privacy, before a run, during it and after it. Nothing is trained.

    Of noise, rounds and epsilon, two determine the third. These give epsilon (1.515), the
    noise multiplier that meets a target, and the rounds that a budget buys:

        fedsim privacy --rate 0.01 --rounds 1000 -z 1.1

        fedsim privacy --rate 0.01 --rounds 1000 --target-epsilon 2

        fedsim privacy --rate 0.01 -z 1.1 --max-epsilon 2

    A config fills in what it says, and options replace it; a table runs over one thing:

        fedsim privacy run.toml

        fedsim privacy run.toml --over rounds=10,20,40,80

        fedsim privacy run.toml --set cohort.rate=0.1 --over target-epsilon=1,2,4,8

    A ledger says what a run has spent, and what more would cost:

        fedsim privacy runs/digits

        fedsim privacy runs/digits --max-epsilon 8

        fedsim privacy runs/digits --verify

    Without amplification by sampling (`--sampling full`) and with cohorts of a fixed size
    (`--size 10 --population 100 --sampling fixed`, accounted for replacing one row by
    another) the same noise costs more: try it. At example level, rate is the batch size
    over a client's examples, which are public in number, and rounds are its steps:

        fedsim privacy --level example --rate 0.00333 --rounds 30000 -z 4
    """
    if new_key_path is not None:
        public = new_key(new_key_path)
        Output().print(f"{new_key_path} signs (noise.ledger-key); give {public} to who verifies.")
        return
    if verify_ or public_key is not None:
        _verify(source, public_key, delta)
        return
    read = read_source(source, set_ or [], delta)
    options: dict[str, Any] = {
        "rounds": rounds,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "target_epsilon": target_epsilon,
        "max_epsilon": max_epsilon,
    }
    question = read.question
    if source is None:
        question = replace(question, level=_one_of("--level", level, "client", "example"))
    drawn = {"rate": rate, "size": size, "population": population, "adjacency": adjacency}
    question = _merged(
        replace(question, law=_law(question, sampling, drawn)),
        {name: value for name, value in options.items() if value is not None},
    )
    question = replace(question, invocations=invocations) if invocations != 1 else question
    questions = (rounds, max_epsilon, target_epsilon, over)
    if read.ledger is not None and all(question is None for question in questions):
        _spent(read, question.delta, as_json, prv, group)
        return
    if as_json:
        raise FedsimError("--json says what a ledger holds; give it a ledger and no question.")
    console = Output()
    if over is not None:
        key, values = _over(over)
        answers = [
            (
                replace(question, law=_law(question, None, {key: value}))
                if key == "rate"
                else _merged(question, {key: value})
            ).answer()
            for value in values
        ]
        console.print(over_table(question, key, answers, prv))
        return
    answer = question.answer()
    console.print(report(answer, prv))
    if (owned := read.group if group is None else group) != 1:
        console.print(group_cost(answer.events, owned, question.delta).sentence(question.level))
    if read.extrapolated is not None and rounds is None:
        console.print(read.extrapolated.sentence())
    for sentence in read.declared:
        console.print(sentence)
    if math.isfinite(answer.cost.epsilon):
        console.print(tradeoff_table(tradeoff(answer.events)))


def _spent(read: Source, delta: float, as_json: bool, prv: bool, group: int | None) -> None:
    """What ledgers say: the statements, and how epsilon grew."""
    statements = read.statements(delta)
    if group is not None:
        statements = [replace(statement, group=None).of_group(group) for statement in statements]
    if as_json:
        typer.echo(json.dumps([statement.to_dict() for statement in statements], indent=2))
        return
    console = Output()
    for statement in statements:
        console.print(f"{statement}\n")
        if statement.private and statement.cost.releases:
            console.print(tradeoff_table(statement.tradeoff))
    if read.ledger is not None:
        console.print(history(read.ledger, delta, read.question.stopping))
        if prv:
            said = prv_says([entry.event for entry in read.ledger.charged], delta)
            console.print(f"Opacus's PRV accountant says {said}.")


def _verify(run: Path | None, public_key: Path | None, delta: float | None) -> None:
    """Compare what a run left behind; exit status 1 if it does not fit."""
    if run is None or not run.is_dir() or not (run / "ledger.jsonl").is_file():
        raise FedsimError(
            f"--verify {run or ''} looks at a run, by its ledger.jsonl; name the directory of one, "
            "such as runs/digits."
        )
    checks = verify_run(run, public_key, delta)
    console = Output()
    console.print(checks_table(checks))
    if public_key is None:
        console.print("Without a signature this shows accidents, not forgers (--public-key).")
    if not all(check.holds for check in checks):
        raise typer.Exit(1)


def _law(question: Question, sampling: str | None, drawn: dict[str, Any]) -> Law:
    """How rows are drawn: as the question says, but for what options say of it."""
    given = {name: value for name, value in drawn.items() if value is not None}
    if "adjacency" in given:
        _one_of("--adjacency", given["adjacency"], *get_args(Adjacency))
    before = question.law
    if sampling is None and not given.keys() & {"rate", "size"}:
        return replace(before, **given)
    kind = shipped_laws()[_one_of("--sampling", sampling or "poisson", *shipped_laws())]
    kept = ["population", "adjacency"] if type(before) is kind else ["population"]
    given = {name: getattr(before, name) for name in kept} | given
    # At example level numbers of examples are public.
    if question.level == "example" and "zero-out" in kind.neighbours:
        given.setdefault("adjacency", "zero-out")
    return kind.of_options(**given)


def _merged(question: Question, changes: dict[str, Any]) -> Question:
    """The plan with options put in its place; what they ask for is left open."""
    if changes.get("target_epsilon") is not None and "noise_multiplier" not in changes:
        question = replace(question, noise_multiplier=None)
    if "noise_multiplier" in changes and "target_epsilon" not in changes:
        question = replace(question, target_epsilon=None)
    if "max_epsilon" in changes and "target_epsilon" not in changes and question.target_epsilon:
        # A config's target fixes its noise; the budget is then asked of that noise.
        question = replace(
            question, noise_multiplier=question.answer().noise_multiplier, target_epsilon=None
        )
    return replace(question, **changes)


def _one_of(name: str, value: str, *allowed: str) -> Any:
    if value not in allowed:
        raise FedsimError(f"{name} is {value!r}; it must be {', '.join(allowed)}.")
    return value


_OVER: dict[str, type] = {
    "rounds": int,
    "noise-multiplier": float,
    "target-epsilon": float,
    "max-epsilon": float,
    "rate": float,
    "delta": float,
}


def _over(text: str) -> tuple[str, list[int | float]]:
    key, _, values = text.partition("=")
    key = _one_of("--over", key.strip(), *_OVER)
    try:
        parsed = [_OVER[key](value) for value in values.split(",")]
    except ValueError:
        raise FedsimError(
            f"--over {text!r} must be KEY=A,B,C, such as rounds=10,100,1000."
        ) from None
    return key.replace("-", "_"), parsed
