"""`fedsim report` and `fedsim compare`: pages to look at, made from what runs have left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.console import Output
from fedsim.cli.places import check_page

__all__ = ["compare", "report"]


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
        check_page(page)
    # Only now: a mistake should not wait for what reads a ledger.
    from fedsim.reports.page import write
    from fedsim.reports.run_page import run_page
    from fedsim.runs.report import whole_record

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
    check_page(out)
    from fedsim.reports.compare_page import compare_page
    from fedsim.reports.page import write
    from fedsim.reports.record import read_all

    write(compare_page(read_all(runs)), out)
    Output().print(f"comparison: {out}", soft_wrap=True)
