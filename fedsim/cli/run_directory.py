"""`fedsim evaluate`, `export`, `report` and `compare`, which work on the directories of runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from fedsim.cli.console import Output, check_out
from fedsim.errors import FedsimError
from fedsim.synonyms import closest

RUN = Annotated[Path, typer.Argument(help="A run's directory.")]
BEST = Annotated[
    bool,
    typer.Option(
        "--best", help="The model of the round that `checkpoint.best` kept, not of the last."
    ),
]


def evaluate(
    run: RUN,
    data: Annotated[
        str,
        typer.Option(help="A data set's name or path; the run's own if unset."),
    ] = "",
    best: BEST = False,
    by: Annotated[
        str,
        typer.Option(
            help="A column, such as `owner`, or its name in the table: a row for each value."
        ),
    ] = "",
) -> None:
    """Evaluate a run's model on test examples of its own data set, or of another.

    For example:

        fedsim evaluate runs/digits
        fedsim evaluate runs/digits --data hospital.npz
        fedsim evaluate runs/hospitals --by hospital

    Examples are normalised as they were in training. A file has `x_train`, `y_train`, `x_test` and
    `y_test`, as for a run; of a single table, every fifth row is a test example.
    """
    import fedsim

    saved = fedsim.load(run, best=best)
    if by:
        Output().print(_table_by(by, saved.evaluate_by(by, data)))
        return
    metrics = saved.evaluate(data)
    table = Table.grid(padding=(0, 2))
    for name, value in metrics.items():
        table.add_row(name, f"{value:.6g}")
    Output().print(table)


def _table_by(column: str, metrics: Mapping[str, Mapping[str, float]]) -> Table:
    from fedsim.runs.metrics import brief, is_share

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = next(iter(metrics.values()), {})
    table.add_column(column)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for value, of_value in metrics.items():
        cells = (brief(number, percent=is_share(n, [number])) for n, number in of_value.items())
        table.add_row(value, *cells)
    return table


def export(
    run: RUN,
    to: Annotated[str, typer.Option(help="onnx, torchscript, safetensors or peft.")] = "",
    public: Annotated[
        bool, typer.Option("--public", help="A bundle to publish: only what the guarantee covers.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The file, or the bundle's directory; beside RUN if unset.")
    ] = None,
    best: BEST = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the run's adapter into the model's weights.")
    ] = False,
    client_noun: Annotated[
        str,
        typer.Option(help="What a client is on the bundle's page; the owners' column if unset."),
    ] = "",
) -> None:
    """Convert a run's model to another format, or make a bundle of it to publish.

    For example:

        fedsim export runs/digits --to onnx
        fedsim export runs/digits --public --client-noun hospital
        fedsim export runs/text-adapter --to peft

    `peft` is a folder with a run's adapter, which peft and `adapter.weights` read. ONNX and
    TorchScript models take the data set's own inputs: they contain the normalisation.
    `--public` leaves out what the guarantee does not cover: metrics, times, who was sampled,
    paths. The bundle holds the model, the statement, and the config; `statement.html` is one page
    in plain words, for an ethics board, to be printed. The statement has the
    ledger's final hash, except for a simulated run, whose seed could be found from it.
    """
    if public == bool(to):
        raise FedsimError("give either --to FORMAT or --public.")
    if client_noun and not public:
        raise FedsimError("--client-noun is for --public, whose page uses it.")
    if public and merge:
        raise FedsimError("--merge is for --to FORMAT; --public publishes what was released.")
    from fedsim.privacy.durable import replace
    from fedsim.runs.export import BUNDLE, FORMATS, PEFT, default_path, export_adapter, publish
    from fedsim.runs.export import export as exported
    from fedsim.runs.saved import load

    if to and to not in (*FORMATS, PEFT):
        formats = (*FORMATS, PEFT)
        hint = closest("", to, formats)
        raise FedsimError(f"--to is '{to}';{hint} must be one of {', '.join(formats)}.")
    saved = load(run, best=best, merge=merge)
    console = Output()
    if public:
        path = out or run.absolute().with_name(f"{run.absolute().name}-public")
        bundle = publish(saved, path, client_noun)
        console.print_files({bundle / name: purpose for name, purpose in BUNDLE.items()})
        return
    path = out or default_path(saved, to)
    if to == PEFT:
        console.print_files({export_adapter(saved, path): "the adapter, for peft"})
        return
    if os.path.lexists(path):
        raise FedsimError(f"--out {path} already exists; choose another file.")
    content = exported(saved, to)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, content)
    console.print_files({path: f"the model, as {to}"})


def report(
    run: RUN,
    out: Annotated[Path | None, typer.Option(help="`RUN/report.html` if unset.")] = None,
) -> None:
    """Write a run's page: its settings, its metrics, what its privacy cost.

    For example:

        fedsim report runs/digits

    `fedsim run` writes the same page when it ends; this command also takes a run that was
    interrupted or killed, or is still running. The page is one file and works offline. What the
    guarantee of a private run does not cover is marked as the operator's.
    """
    page = out or run / "report.html"
    if out is not None or run.is_dir():
        check_out(page, ".html")
    # Imported here so that a mistake is reported before the accountants are loaded.
    from fedsim.reports.page import write
    from fedsim.reports.run_page import run_page
    from fedsim.runs.summary import complete_record

    write(run_page(complete_record(run)), page)
    Output().print_files({page: "curves, statement and config on one page"})


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Directories of runs, or of sweeps for all their runs.")
    ],
    out: Annotated[Path, typer.Option(help="The page, an HTML file.")] = Path("compare.html"),
) -> None:
    """Compare runs on one page: curves, a sortable table, and the differences of their configs.

    For example:

        fedsim compare runs/lr* --out lr.html
        fedsim compare runs/digits-sweep

    Runs whose configs differ only in the seed are shown as one: their mean and standard deviation.
    """
    check_out(out, ".html")
    from fedsim.reports.compare_page import compare_page
    from fedsim.reports.page import write
    from fedsim.runs.record import read_all

    write(compare_page(read_all(runs)), out)
    Output().print_files({out: "curves, tables and differences on one page"})
