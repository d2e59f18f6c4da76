"""`fedsim privacy`: what a plan costs, what noise a target needs, what a budget buys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table
from rich.text import Text

from fedsim.cli.console import Output
from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Adjacency, Answer, Ledger, Plan, Sampling

__all__ = ["privacy"]

_PLAN, _SAMPLING = "The plan", "Who takes part"


def privacy(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SOURCE",
            help="A config (run.toml), a ledger (ledger.jsonl), or the directory of a run.",
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
        str | None, typer.Option(help="poisson, fixed, full or shuffle.", rich_help_panel=_SAMPLING)
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

        fedsim privacy runs/digits --max-epsilon 8

    Without amplification by sampling (`--sampling full`) and with cohorts of a fixed size
    (`--size 10 --population 100 --sampling fixed`, accounted for replacing one row by
    another) the same noise costs more: try it. At example level, rate is the batch size
    over a client's examples, and rounds are its steps:

        fedsim privacy --level example --rate 0.00333 --rounds 30000 -z 4
    """
    plan, ledger = _source(source, set_ or [], delta)
    given: dict[str, Any] = {
        "rounds": rounds,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "target_epsilon": target_epsilon,
        "max_epsilon": max_epsilon,
        **_sampling(sampling, rate, size, population, adjacency),
    }
    plan = _merged(plan, {name: value for name, value in given.items() if value is not None})
    plan = replace(plan, invocations=invocations) if invocations != 1 else plan
    if source is None:
        plan = replace(plan, level=_one_of("--level", level, "client", "example"))
    console = Output()
    questions = (rounds, max_epsilon, target_epsilon, over)
    if ledger is not None and all(question is None for question in questions):
        console.print(str(ledger.statement(plan.delta)))
        console.print(_history(ledger, plan.delta))
        return
    if over is not None:
        key, values = _over(over)
        console.print(_table(plan, key, [_merged(plan, {key: value}).answer() for value in values]))
        return
    console.print(_report(plan.answer()))


def _source(
    source: Path | None, overrides: list[str], delta: float | None
) -> tuple[Plan, Ledger | None]:
    """The plan that a config or a ledger makes, before the options."""
    if source is None:
        if overrides:
            raise FedsimError(f"--set {overrides[0]} changes a config; name the config first.")
        return Plan(), None
    if source.suffix == ".toml":
        return _configured(RunConfig.load(source, overrides)), None
    directory = source if source.is_dir() else source.parent
    settings = directory / "config.toml"
    if delta is None and settings.is_file():
        delta = RunConfig.load(settings).noise.delta
    ledger = Ledger.read(directory / "ledger.jsonl" if source.is_dir() else source)
    plan = Plan(delta=1e-5 if delta is None else delta, level=ledger.level)
    if not ledger.charged:
        return plan, ledger
    last = ledger.charged[-1].event
    return replace(
        plan,
        noise_multiplier=last.total_noise_multiplier,
        sampler=last.sampler,
        rate=last.rate,
        size=last.size,
        population=last.population,
        adjacency=last.adjacency,
        invocations=last.count,
        past=tuple(entry.event for entry in ledger.charged),
    ), ledger


def _configured(config: RunConfig) -> Plan:
    cohort, noise, clients = config.cohort, config.noise, config.partition.clients
    if not config.private and config.client.private:
        return _examples(config)
    if not config.private:
        raise FedsimError(
            f"mechanism.name = {config.mechanism.name!r} and noise.multiplier = "
            f"{noise.multiplier}, and clients do not protect their examples; the run has no "
            "guarantee, and its epsilon is infinite."
        )
    return Plan(
        noise_multiplier=noise.multiplier,
        target_epsilon=noise.target_epsilon,
        rounds=config.rounds,
        delta=noise.delta,
        sampler=cohort.name,
        rate=cohort.rate if cohort.name == "poisson" else 1.0,
        size=cohort.size if cohort.name == "fixed" else None,
        population=clients,
    )


def _examples(config: RunConfig) -> Plan:
    """The plan of the client that pays most, where clients protect their examples."""
    # How many examples clients have, and so their rates, only the data can say.
    from fedsim.runs.build import Build

    build = Build(config)
    worst = build.worst_client(config.rounds)
    if worst is None or build.example_privacy is None:
        raise FedsimError(f"partition.clients = {config.partition.clients}; none has an example.")
    return Plan(
        noise_multiplier=build.example_privacy.noise_multiplier,
        rounds=config.rounds,
        delta=config.client.noise.delta,
        sampler=worst.event.sampler,
        rate=worst.event.rate,
        adjacency=worst.event.adjacency,
        invocations=worst.event.count // config.rounds,
        level="example",
    )


def _sampling(
    sampling: str | None,
    rate: float | None,
    size: int | None,
    population: int | None,
    adjacency: str | None,
) -> dict[str, Any]:
    """What the options say about who takes part."""
    said: dict[str, Any] = {"population": population}
    if adjacency is not None:
        allowed = ("add-remove", "zero-out", "replace-one")
        said["adjacency"] = cast(Adjacency, _one_of("--adjacency", adjacency, *allowed))
    if sampling is None and (rate is not None or size is not None):
        sampling = "poisson"
    if sampling is None:
        return said
    sampler = _one_of("--sampling", sampling, "poisson", "fixed", "full", "shuffle")
    said["sampler"] = cast(Sampling, sampler)
    if sampler == "poisson":
        if rate is None and (size is None or population is None):
            raise FedsimError("--sampling poisson needs --rate, or --size and --population.")
        said["rate"] = rate if rate is not None else cast(int, size) / cast(int, population)
    elif sampler == "fixed":
        said["size"] = size
    elif rate is not None or size is not None:
        raise FedsimError(f"--sampling {sampler} takes neither --rate nor --size.")
    return said


def _merged(plan: Plan, changes: dict[str, Any]) -> Plan:
    """The plan with options put in its place; what they ask for is left open."""
    if "sampler" in changes and changes["sampler"] != plan.sampler:
        plan = replace(plan, rate=1.0, size=None, adjacency=None)
    if changes.get("target_epsilon") is not None and "noise_multiplier" not in changes:
        plan = replace(plan, noise_multiplier=None)
    if "noise_multiplier" in changes and "target_epsilon" not in changes:
        plan = replace(plan, target_epsilon=None)
    if "max_epsilon" in changes and "target_epsilon" not in changes and plan.target_epsilon:
        # A config's target fixes its noise; the budget is then asked of that noise.
        plan = replace(plan, noise_multiplier=plan.answer().noise_multiplier, target_epsilon=None)
    return replace(plan, **changes)


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


_LABELS = {
    "poisson": "Poisson, rate {rate:.6g}",
    "fixed": "{size} of {population} without replacement",
    "full": "everybody, no amplification",
    "shuffle": "shuffled passes, no amplification",
}


def _report(answer: Answer) -> Table:
    """The answer first, then what it rests on."""
    plan, cost = answer.plan, answer.cost
    sampling = _LABELS[plan.sampler].format(
        rate=plan.rate, size=plan.size, population=plan.population
    )
    rows = {
        "epsilon": _number(cost.epsilon),
        "noise multiplier": _number(answer.noise_multiplier),
        "rounds": f"{answer.rounds:,}",
    }
    table = Table.grid(padding=(0, 2))
    table.add_row(Text(plan.asks, "bold"), Text(rows.pop(plan.asks), "bold green"))
    for name, value in rows.items():
        table.add_row(name, value)
    table.add_row("delta", f"{plan.delta:g}")
    table.add_row("level, neighbours", f"{plan.level}, {cost.adjacency}")
    table.add_row("sampling", sampling)
    if plan.past:
        table.add_row("releases before", f"{Accountant(plan.past).releases:,}")
    table.add_row("accounted by", _METHODS[cost.method])
    table.add_row("Rényi accounting says", _number(cost.rdp_epsilon))
    if cost.poisson_epsilon is not None:
        table.add_row("Poisson would cost", f"{_number(cost.poisson_epsilon)} (add-remove)")
    if plan.past and plan.asks == "noise multiplier":
        table.add_row("", "chosen after releases were made, hence by Rényi accounting")
    return table


_METHODS = {
    "analytic": "exact curve of the Gaussian",
    "pld": "privacy loss distributions",
    "rdp": "Rényi accounting",
    "none": "nothing: there is no guarantee",
}


def _table(plan: Plan, key: str, answers: list[Answer]) -> Table:
    """One row an answer; what varies stands first."""
    asked = {"target_epsilon": "target", "max_epsilon": "budget"}
    cells: dict[str, Callable[[Answer], str]] = {
        asked.get(key, key.replace("_", " ")): lambda answer: f"{getattr(answer.plan, key):,g}",
        "rounds": lambda answer: f"{answer.rounds:,}",
        "noise multiplier": lambda answer: _number(answer.noise_multiplier),
        "epsilon": lambda answer: _number(answer.cost.epsilon),
        "epsilon by RDP": lambda answer: _number(answer.cost.rdp_epsilon),
    }
    table = Table(title=f"{plan.level} level, {answers[0].cost.adjacency}")
    for name in cells:
        table.add_column(name, justify="right")
    for answer in answers:
        table.add_row(*(cell(answer) for cell in cells.values()))
    return table


def _history(ledger: Ledger, delta: float) -> Table:
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
            table.add_row(f"{accountant.releases:,}", label, _number(accountant.epsilon(delta)))
    return table


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.4f}"
