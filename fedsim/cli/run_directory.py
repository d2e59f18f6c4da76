"""`fedsim evaluate`, `export`, `report` and `compare`: what is made of a run's directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedsim.cli.console import Output, check_out
from fedsim.errors import FedsimError

RUN = Annotated[Path, typer.Argument(help="A run's directory.")]
BEST = Annotated[
    bool, typer.Option("--best", help="The round that `checkpoint.best` has kept, not the last.")
]


def evaluate(
    run: RUN,
    data: Annotated[
        str,
        typer.Option(help="Whose test examples: a name or a path; the run's own if unset."),
    ] = "",
    best: BEST = False,
) -> None:
    """Evaluate a run's model on test examples: its own data set's, or others.

        fedsim evaluate runs/digits
        fedsim evaluate runs/digits --data hospital.npz

    Examples are normalised as they were in training. A file holds `x_test` and `y_test`, and
    `x_train` and `y_train` beside them, as for a run.
    """
    import fedsim

    metrics = fedsim.load(run, best=best).evaluate(data)
    table = Table.grid(padding=(0, 2))
    for name, value in metrics.items():
        table.add_row(name, f"{value:.6g}")
    Output().print(table)


def export(
    run: RUN,
    to: Annotated[str, typer.Option(help="onnx, torchscript or safetensors.")] = "",
    public: Annotated[
        bool, typer.Option("--public", help="A bundle to publish: only what is covered.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The file, or the bundle's directory; beside RUN if unset.")
    ] = None,
    best: BEST = False,
) -> None:
    """Put a run's model into another format, or make a bundle of it to publish.

        fedsim export runs/digits --to onnx
        fedsim export runs/digits --public

    ONNX and TorchScript take inputs as they lie in the data set: normalisation is part of them.
    `--public` leaves out what the guarantee does not cover: metrics, times, who took part,
    paths. Its directory holds the model, the statement with the ledger's head, and the config.
    """
    if public == bool(to):
        raise FedsimError("say either --to FORMAT or --public.")
    from fedsim.runs.export import FORMATS, default_path, publish
    from fedsim.runs.export import export as exported
    from fedsim.runs.saved import load

    if to and to not in FORMATS:
        raise FedsimError(f"--to is '{to}'; it must be one of {', '.join(FORMATS)}.")
    saved = load(run, best=best)
    console = Output()
    if public:
        path = out or run.absolute().with_name(f"{run.absolute().name}-public")
        console.print(f"bundle: {publish(saved, path)}", soft_wrap=True)
        return
    path = out or default_path(saved, to)
    if os.path.lexists(path):
        raise FedsimError(f"--out {path} is there already; choose another file.")
    content = exported(saved, to)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    console.print(f"{to}: {path}", soft_wrap=True)


def report(
    run: Annotated[Path, typer.Argument(help="A run's directory.")],
    out: Annotated[Path | None, typer.Option(help="Another place than RUN/report.html.")] = None,
) -> None:
    """Make a run's page anew: what it was, what it reached, what it cost.

        fedsim report runs/digits

    `fedsim run` writes the same page at its end. This one also reads a run that was interrupted or
    killed, or is going on. The page is one file and works offline; of a private run it shows what
    is public, and the operator's facts by that name.
    """
    page = out or run / "report.html"
    if out is not None or run.is_dir():
        check_out(page, ".html")
    # Only now: a mistake should not wait for what reads a ledger.
    from fedsim.reports.page import write
    from fedsim.reports.run_page import run_page
    from fedsim.runs.summary import whole_record

    write(run_page(whole_record(run)), page)
    Output().print(f"report: {page}", soft_wrap=True)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Directories of runs, or of sweeps: all their members.")
    ],
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("compare.html"),
) -> None:
    """Compare runs on one page: curves, a table that sorts, and where their configs differ.

        fedsim compare runs/lr* --out lr.html
        fedsim compare runs/digits-sweep

    Runs whose configs differ in their seeds only stand together: their mean, and beside it the
    standard deviation over seeds.
    """
    check_out(out, ".html")
    from fedsim.reports.compare_page import compare_page
    from fedsim.reports.page import write
    from fedsim.runs.record import read_all

    write(compare_page(read_all(runs)), out)
    Output().print(f"comparison: {out}", soft_wrap=True)
