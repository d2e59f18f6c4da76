"""`fedsim sweep`: a grid of runs, or points drawn at random, in one go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsim.cli.console import Output
from fedsim.config import RunConfig
from fedsim.config.plan import dealing
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.reports.sweep import MemberLine, SeedsLine
    from fedsim.runs.sweep import Halving, Member, MemberOutcome
    from fedsim.runs.sweep.measure import Spread


SOME_FAILED = 3
"""The status of a sweep that came to its end, but not all of whose members did."""


def sweep(
    config: Annotated[Path, typer.Argument(help="The TOML file that describes every member.")],
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="KEY=V1,V2,..",
            help="An axis: values, or a span to draw from: log(0.01,1), uniform(0,1), whole(1,9).",
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key in every member."),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="Draw so many points instead of the whole grid."),
    ] = None,
    halving: Annotated[
        int | None,
        typer.Option(min=2, help="Of the settings at a rung, let one in so many go on."),
    ] = None,
    first_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds to the first rung of --halving.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the sweep; `runs/<name>-sweep` if unset.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="The axis of the picture; the first but `seed` if unset.")
    ] = None,
) -> None:
    """Run many configs in one go, and compare what they reach.

    Members that differ only in rates, seeds, partitions or in what the server does train side
    by side, in common blocks, and end with the same bytes as when each is run alone:

        fedsim sweep digits.toml --over client.lr=0.1,0.3,1.0 --over seed=1,2,3

    A random search draws points from the seed, and successive halving compares them on
    `data.validation` after 2, 6, 18.. rounds and lets the best third go on:

        fedsim sweep digits.toml --over "client.lr=log(0.01,1)" --random 27 --halving 3
        --first-rounds 2 --set data.validation=0.1

    Every member has the artefacts of a run in a directory of its own; sweep.csv, sweep-seeds.csv
    (mean and standard deviation over seeds) and sweep.png compare them. An interrupted sweep goes
    on where it stopped. The status is 3 if members failed; the others are not affected.
    """
    base = RunConfig.load(config, set_ or [])
    # Only now: a mistake in the config should not wait for torch.
    from fedsim.reports.plots import save
    from fedsim.reports.sweep import draw, over_seeds, read_line, seeds_csv, to_csv
    from fedsim.runs.sweep import Halving, drawn, is_done, measure_of, members, parse_axes

    axes = parse_axes(over)
    grid = members(base, axes) if random is None else drawn(base, axes, random)
    axis = plot or next((key for key in axes if key != "seed"), next(iter(axes)))
    if axis not in axes:
        raise FedsimError(f"--plot is {axis}; it must be an axis: {', '.join(axes)}.")
    if halving is None and first_rounds != 1:
        raise FedsimError(f"--first-rounds = {first_rounds}; it belongs to --halving.")
    where = out or Path("runs") / f"{base.name}-sweep"
    _check_own(where, grid)
    console = Output()
    kept = sum(is_done(member, where) for member in grid)
    if kept:
        console.print(f"{kept} of {len(grid)} members are there already.")
    halved = None if halving is None else Halving(halving, first_rounds)
    try:
        outcomes = _run(console, grid, where, halved)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Finished members are kept in {where}; run it again.")
        raise typer.Exit(130) from None
    lines = []
    for member in grid:
        outcome = outcomes[member.label]
        measure = measure_of(member.config)
        directory = where / member.label
        lines.append(
            read_line(
                member.point, directory, measure, outcome=outcome.ended, reason=outcome.reason
            )
        )
    settings = over_seeds(lines)
    (where / "sweep.csv").write_text(to_csv(lines), encoding="utf-8")
    (where / "sweep-seeds.csv").write_text(seeds_csv(settings), encoding="utf-8")
    title = f"{base.name}: test {lines[0].measure.name} over {axis}"
    save(draw(settings, axis, title, joined=random is None), where / "sweep.png")
    console.print(_members_table(lines) if len(settings) == len(lines) else _seeds_table(settings))
    _say_best(console, settings)
    _say_price(console, grid, lines, where, halved)
    console.print(*(str(where / name) for name in ("sweep.csv", "sweep-seeds.csv", "sweep.png")))
    _end_by_failures(console, outcomes)


def _check_own(where: Path, grid: Sequence[Member]) -> None:
    """Refuse a directory whose tables and pictures no sweep has made."""
    taken = [
        name for name in ("sweep.csv", "sweep-seeds.csv", "sweep.png") if (where / name).exists()
    ]
    if taken and not any((where / member.label).exists() for member in grid):
        raise FedsimError(
            f"--out {where} holds {' and '.join(taken)} and no member of this sweep, so that they "
            "may be somebody's own; choose another directory."
        )


def _run(
    console: Console, grid: Sequence[Member], where: Path, halving: Halving | None
) -> Mapping[str, MemberOutcome]:
    from fedsim.runs.sweep import is_done, run_sweep

    total = sum(member.config.rounds for member in grid if not is_done(member, where))
    # How many rounds halving leaves out is not known before.
    of_all = "/{task.total}" if halving is None else ""
    columns = (
        progress.TextColumn(f"{{task.completed}}{of_all} rounds"),
        progress.BarColumn(bar_width=30),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total if halving is None else None)
        return run_sweep(grid, where, lambda _, row: bar.advance(task, row["round"] > 0), halving)


def _members_table(lines: Sequence[MemberLine]) -> Table:
    from fedsim.reports.sweep import best_of, over_seeds

    best = best_of(over_seeds(lines))
    table = Table(box=box.SIMPLE_HEAD)
    for key in lines[0].point:
        table.add_column(key, justify="right")
    name = lines[0].measure.name
    for heading in (name, "last five", "epsilon", "loss", "outcome"):
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(
            *(str(value) for value in line.point.values()),
            *(_figure(number, name) for number in (line.test, line.mean_test)),
            _epsilon(line),
            _figure(line.loss, "loss"),
            line.outcome,
            style="bold" if best is not None and line in best.lines else "",
        )
    return table


def _seeds_table(settings: Sequence[SeedsLine]) -> Table:
    from fedsim.reports.sweep import best_of

    best = best_of(settings)
    name = settings[0].lines[0].measure.name
    table = Table(
        box=box.SIMPLE_HEAD, caption="mean and standard deviation of the seeds that ended"
    )
    for key in settings[0].point:
        table.add_column(key, justify="right")
    for heading in (name, "last five", "epsilon", "loss", "seeds ended"):
        table.add_column(heading, justify="right")
    for setting in settings:
        table.add_row(
            *(str(value) for value in setting.point.values()),
            *(_spread(spread, name) for spread in (setting.last, setting.test)),
            _epsilon(max(setting.lines, key=lambda line: line.epsilon or 0.0)),
            _spread(setting.loss, "loss"),
            f"{setting.ended} of {len(setting.lines)}",
            style="bold" if setting is best else "",
        )
    return table


def _spread(spread: Spread | None, name: str) -> str:
    if spread is None:
        return "-"
    deviation = "" if spread.std is None else f" ± {_figure(spread.std, name)}"
    return _figure(spread.mean, name) + deviation


def _figure(value: float, name: str) -> str:
    """A number as a run's page and `fedsim compare` write it."""
    from fedsim.runs.metrics import brief, is_share

    return brief(value, is_share(name, [value]))


def _say_best(console: Console, settings: Sequence[SeedsLine]) -> None:
    from fedsim.reports.sweep import best_of

    best = best_of(settings)
    name = settings[0].lines[0].measure.name
    if best is not None and len(settings) > 1:
        point = ", ".join(f"{key} = {value}" for key, value in best.point.items())
        console.print(f"Best by validation-{name}, {_spread(best.validation, name)}: {point}.")
    elif len(settings) > 1 and all(setting.validation is None for setting in settings):
        console.print(
            "No best one is named: nothing is chosen by test examples; data.validation holds "
            "others out."
        )


def _end_by_failures(console: Console, outcomes: Mapping[str, MemberOutcome]) -> None:
    failed = {label: o.reason for label, o in outcomes.items() if o.ended == "failed"}
    for label, reason in failed.items():
        console.print(Text(f"{label} failed: {reason}", style="yellow"))
    if failed:
        console.print(
            Text(f"{len(failed)} of {len(outcomes)} members failed; the others came to their end.")
        )
        raise typer.Exit(SOME_FAILED)


def _epsilon(line: MemberLine) -> str:
    if line.epsilon is None:
        return "-"
    return f"{line.epsilon:.3g}{' (simulated)' * line.simulated}"


def _say_price(
    console: Console,
    grid: Sequence[Member],
    lines: Sequence[MemberLine],
    where: Path,
    halving: Halving | None,
) -> None:
    """What choosing among private members costs."""
    from fedsim.privacy.durable import archived
    from fedsim.reports.sweep import examples_price
    from fedsim.runs.sweep import outcomes

    protecting = [member for member in grid if member.config.client.private]
    if len(protecting) > 1:
        delta = max(member.config.client.noise.delta for member in protecting)
        left = Counter[Path]()
        for member in protecting:
            directory = Path(member.config.client.state_dir or where / member.label / "clients")
            left[directory] += member.config.rounds - _rounds_made(where / member.label)
        dealt = {dealing(member.config) for member in protecting}
        ways = outcomes(protecting, halving)
        cost = examples_price(left, delta, ways, same=len(dealt) == 1)
        console.print(
            f"Whoever sees all {len(protecting)} members whose clients protect their examples has "
            f"seen their composition: epsilon = {cost.epsilon:.4g} at delta = {delta} (example "
            f"level), for the example that pays most.{_shared(ways)}"
        )
    private = [member for member in grid if member.config.private]
    # One that failed before its first row may have released, and written that down.
    ledgers = {where / member.label / "ledger.jsonl": member for member in private}
    made = {path: m for path, m in ledgers.items() if path.exists() or archived(path)}
    if len(made) < 2:
        return
    delta = max(member.config.noise.delta for member in private)
    console.print(
        f"Each private member is (epsilon, {delta:g})-differentially private with the epsilon of "
        f"its line. {_together(made, delta, halving)}"
    )
    if any(line.outcome == "dropped" for line in lines):
        console.print(
            "Members that were dropped have that epsilon for a number of rounds fixed in advance; "
            "their own statements say what holds for theirs."
        )
    if any(line.simulated for line in lines):
        console.print(
            "These are simulated: the noise follows from the members' seeds. For real data set "
            "noise.entropy = 'system'.",
            style="yellow",
        )


def _rounds_made(directory: Path) -> int:
    from fedsim.privacy import Ledger

    path = directory / "ledger.jsonl"
    return Ledger.read(path).rounds_made if path.exists() else 0


def _shared(ways: int) -> str:
    if ways == 1:
        return ""
    return (
        " Which members went on, or ended, follows from what was released: half of delta is shared "
        "among all that might have been."
    )


def _together(made: Mapping[Path, Member], delta: float, halving: Halving | None) -> str:
    """What all members cost a client whose releases all of them are about."""
    from fedsim.reports.sweep import price
    from fedsim.runs.sweep import outcomes

    if len({dealing(member.config) for member in made.values()}) > 1:
        return (
            "There is no figure for all of them: they deal examples to clients differently (seed, "
            "data or partition), so that one client's examples are many clients' in another "
            "member. Choose within one dealing, or deal by owners."
        )
    seen = f"Whoever sees all {len(made)} of them, as choosing the best does, has seen their"
    ways = outcomes(list(made.values()), halving)
    planned = {path: member.config.rounds for path, member in made.items()}
    try:
        cost = price(planned, delta, ways)
    except FedsimError as error:
        return f"{seen} releases together, for which there is no figure: {error}"
    return f"{seen} composition: epsilon = {cost.epsilon:.4g}.{_shared(ways)}"
