"""`fedsim experiment`: reproduce a paper's figure or table.

It is available in a source checkout only. Since this module is imported at every start of the
`fedsim` command, the modules that compute are imported inside functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedsim.cli.console import Output
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from experiments.framework.judge import Judged


def experiment(
    name: Annotated[
        str | None, typer.Argument(help="An experiment, or a directory with an experiment.toml.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for results; `runs/experiments/<name>` if unset.")
    ] = None,
    data: Annotated[Path, typer.Option(help="Where data sets are kept.")] = Path("data"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version, to see that everything works.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 is one a core.")] = 0,
    only: Annotated[
        str,
        typer.Option(metavar="PATTERN", help='Only members whose names match, such as "FedAvg *".'),
    ] = "*",
    again: Annotated[
        bool, typer.Option("--again", help="Also members whose results its directory stores.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="engine.KEY=VALUE",
            help="Where members run: engine.device=cuda, or engine.name=ray.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Judge the stored results again; nothing is computed.")
    ] = False,
    store: Annotated[
        bool,
        typer.Option(
            "--store",
            help="Keep results in its directory, all or those so far, with README and pictures; "
            "with --check, write these again.",
        ),
    ] = False,
) -> None:
    """Reproduce a figure or a table of a paper, and say which of its claims are reproduced.

    Without a name, the experiments are listed; with `--check` all of them are judged. An
    experiment consists of independent members, most of them training runs. Only members without a
    result in its directory or in `--out` are run, so that a table can be filled over days and on
    several machines; `--again` ignores results in the directory. An experiment that is interrupted
    is continued by the same command.

        fedsim experiment quadratic --again
        fedsim experiment das-fmnist --data ./data --workers 2 --again
        fedsim experiment niid-mnist --data ./data --only "FedAvg seed=1" --store
        fedsim experiment niid-mnist --data ./data --set engine.device=cuda --store

    A member that trains has a run's directory, which `fedsim privacy` and `fedsim report` read: in
    `runs/` below `--out`, named by the digest of its settings, which is also in results.json.

    An experiment writes a page, README.md, with its tables, verdicts and pictures (.png). To change
    a setting, copy the experiment's directory and give the copy's path instead of the name.

    The command ends with status 1 and a sentence if a verdict is not valid: a best value at its
    grid's edge, too few seeds, or a claim with another verdict than its directory's
    `judgement.toml` states. `--store` keeps the results in the experiment's directory, and writes
    its README and pictures from them; `--check` judges the results that are kept there.
    """
    from experiments.framework.judge import Judgement, judge
    from experiments.framework.run import directories, find, load, run_members

    console = Output()
    if name is None:
        wrong = False
        for known, directory in directories().items():
            line = f"{known:22} {Judgement.load(directory).title}"
            console.print(line, highlight=False, soft_wrap=True)
            wrong |= check and _checked(console, directory, data, store)
        raise typer.Exit(wrong)
    directory = find(name)
    Judgement.load(directory)  # a mistake in it is found before anything is run
    if check:
        raise typer.Exit(_checked(console, directory, data, store, verdicts=True))
    if store and quick:
        raise FedsimError("--store keeps results of the file's own settings: no --quick.")
    where = out or Path("runs") / "experiments" / (directory.name + "-quick" * quick)
    made = load(directory, data=data, quick=quick, engine=set_ or ())

    def member(name: str, done: int, total: int) -> None:
        text = name or ("of earlier runs" if done else "to do")
        console.print(f"{done:>4}/{total}  {text}", highlight=False)

    try:
        stored = run_members(made, where, workers=workers, only=only, again=again, observer=member)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Finished members are kept in {where}; run it again.")
        raise typer.Exit(130) from None
    judged = judge(made, stored)
    judged.write(where)
    if store:
        stored.save(directory)
        judged.write(directory)
    console.print(str(where / "README.md"), highlight=False, soft_wrap=True)
    if quick:
        console.print("This was the quick version: too small to judge the paper by.")
    _show_verdicts(console, judged)
    raise typer.Exit(not quick and _show_faults(console, judged.faults))


def _checked(
    console: Output, directory: Path, data: Path, store: bool, *, verdicts: bool = False
) -> bool:
    """Judge stored results again, print verdicts and faults, and return whether there are any."""
    from experiments.framework.judge import faults_of_page, judge
    from experiments.framework.run import Stored, load

    judged = judge(load(directory, data=data), Stored.load(directory))
    if store:
        judged.write(directory)
    if verdicts:
        _show_verdicts(console, judged)
    return _show_faults(console, judged.faults + faults_of_page(judged))


def _show_verdicts(console: Output, judged: Judged) -> None:
    from experiments.framework.judge import NOT_MEASURED

    if judged.report is None:
        console.print(NOT_MEASURED)
    for claim in judged.report.claims if judged.report else ():
        claimed = judged.claimed(claim)
        whose = "" if claimed.source else "ours, "
        verdict = claimed.word(claim.reproduced)
        line = f"{verdict:15} {whose}{claim.panel}: {claim.says}: {claim.measured}"
        console.print(line, highlight=False, soft_wrap=True)
    for member in judged.missing:
        console.print(f"{'not run':15} {member.name}", highlight=False, soft_wrap=True)
    if judged.missing:
        console.print(judged.unrun, highlight=False, soft_wrap=True)


def _show_faults(console: Output, faults: list[str]) -> bool:
    for fault in faults:
        console.print(Text(fault, style="bold red"))
    return bool(faults)
