"""`fedsim experiment`: reproduce a paper's figure or table.

It is available in a source checkout only. Since this module is imported at every start of the
`fedsim` command, the modules that compute are imported inside functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fedsim.cli.console import Output

_PLAIN: Any = {"highlight": False, "soft_wrap": True}


def experiment(
    name: Annotated[
        str | None, typer.Argument(help="An experiment, or a directory with an experiment.toml.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for results; `runs/experiments/<name>` if unset.")
    ] = None,
    data: Annotated[Path, typer.Option(help="Where data sets are kept.")] = Path("data"),
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
    a setting, or to try a smaller version, copy the experiment's directory and give the copy's path
    instead of the name.

    The command ends with status 1 and a sentence if a verdict is not valid: a best value at its
    grid's edge, too few seeds, or a claim with another verdict than its directory's
    `judgement.toml` states. `--store` keeps the results in the experiment's directory, and writes
    its README and pictures from them; `--check` judges the results that are kept there.
    """
    from experiments.framework.judge import Judgement, judge
    from experiments.framework.run import Stored, directories, find, load, run_members

    console, wrong = Output(), False
    for directory in [find(name)] if name else directories().values():
        # A mistake in its files is found before anything is run.
        console.print(f"{directory.name:22} {Judgement.load(directory).title}", **_PLAIN)
        if not (name or check):
            continue
        made, where = load(directory, data=data, engine=set_ or ()), directory
        if not check:
            where = out or Path("runs", "experiments", directory.name)
            ran = run_members(made, where, workers=workers, only=only, again=again)
            for member, done, known in ran:
                console.print(f"{done:>4}/{known}  {member or where}", **_PLAIN)
        judged = judge(made, Stored.load(where), Stored.load(directory))
        if not check:
            judged.write(where)
        if store:
            judged.write(directory)
            if not check:
                judged.stored.save(directory)
        for line in [*judged.verdicts, str(where / "README.md")] if name else ():
            console.print(line, **_PLAIN)
        for fault in [*judged.faults(), *(judged.faults_of_page() if check else ())]:
            console.print(Text(fault, style="bold red"))
            wrong = True
    raise typer.Exit(wrong)
