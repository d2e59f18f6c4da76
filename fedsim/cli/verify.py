"""`fedsim verify` and `fedsim key`: check a run's files; make the key that signs them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from fedsim.cli.console import Output
from fedsim.errors import FedsimError
from fedsim.privacy.manifest import new_key
from fedsim.reports.verification import NOT_VERIFIED, verify_run


def verify(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    public_key: Annotated[
        Path | None,
        typer.Option(help="Also verify the signature of the run's manifest with this key."),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the epsilons in metrics.csv; the config's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Compare a run's files with its ledger and its manifest; status 1 if they differ.

    For example:

        fedsim verify runs/digits

        fedsim verify runs/digits --public-key me.pem.pub

    The chain of the ledger's hashes, model, config, metrics and report are compared, and every
    epsilon is computed again from the ledger. Without a signature (`fedsim key`) this detects
    accidents, not forgery.
    """
    if not (run / "config.toml").is_file():
        raise FedsimError(
            f"{run} is not a run's directory: it has no config.toml; name one, such as runs/digits."
        )
    checks = verify_run(run, public_key, delta)
    failed = not all(check.passed for check in checks)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
        raise typer.Exit(int(failed))
    table = Table.grid("", "", Column(overflow="fold"), padding=(0, 2))
    for check in checks:
        mark = Text("passes", "green") if check.passed else Text("FAILS", "bold red")
        table.add_row(mark, check.subject, check.detail)
    console = Output()
    console.print(table)
    console.print(NOT_VERIFIED)
    if public_key is None:
        console.print("Without a signature this detects accidents, not forgery; see --public-key.")
    if failed:
        raise typer.Exit(1)


def key(
    path: Annotated[Path, typer.Argument(help="Where the private key is written.")],
) -> None:
    """Make a key that signs runs, and PATH.pub to verify them with.

    For example:

        fedsim key me.pem

        fedsim run run.toml --set noise.ledger-key=me.pem --out runs/signed

        fedsim verify runs/signed --public-key me.pem.pub
    """
    public = new_key(path)
    Output().print(f"{path} signs runs (noise.ledger-key); give {public} to those who verify them.")
