"""`fedsim config`: what a config may say, and what one says."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedsim import registry
from fedsim.cli.console import Command, Group, Output
from fedsim.config import RunConfig
from fedsim.config.describe import Key, choice_in, choices_of, keys, schema, template
from fedsim.config.digest import keys_outside_release
from fedsim.errors import FedsimError

config = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Say what a config may say: its keys, what can be chosen, a first one to start from.",
)


@config.command("list", cls=Command)
def list_(
    kind: Annotated[
        str | None, typer.Argument(help="mechanism, client, data, ...; all kinds if left out.")
    ] = None,
) -> None:
    """List what there is of a kind: fedsim's own, and what installed packages add.

        fedsim config list mechanism

    Anything of your own is written `module:name` in the same places.
    """
    if kind is not None and kind not in registry.PACKAGES:
        raise FedsimError(f"KIND is '{kind}'; it must be {', '.join(registry.PACKAGES)}.")
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in [kind] if kind else registry.PACKAGES:
        for thing, line in choices_of(name):
            table.add_row(*(() if kind else (name,)), thing, line)
    Output().print(table)


@config.command(cls=Command)
def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="A key such as client.lr, a table such as client, or one of its choices such as "
            "client.adam."
        ),
    ],
) -> None:
    """Explain a key, a table's keys, or those that a choice of the table's brings along.

    fedsim config explain client.tol
    fedsim config explain mechanism
    fedsim config explain mechanism.adaclip
    """
    every = keys()
    output = Output()
    if exact := [k for k in every if k.name == key]:
        for entry in exact:
            output.print(_explained(entry))
        return
    if in_table := [k for k in every if k.name.rpartition(".")[0] == key]:
        output.print(_table(key, in_table, every))
        return
    table, _, choice = key.rpartition(".")
    of_choice = [k for k in every if k.name.rpartition(".")[0] == table and choice in k.belongs_to]
    if of_choice:
        output.print(_lines(of_choice))
        return
    line = choice_in(table, choice)
    if not line:
        raise _unknown(key, every)
    output.print(f"{key}\n    {line}\n    It brings no keys of its own.")


def _unknown(key: str, every: list[Key]) -> FedsimError:
    known = {k.name for k in every} | {k.name.rpartition(".")[0] for k in every}
    known |= {f"{k.name.rpartition('.')[0]}.{choice}" for k in every for choice in k.belongs_to}
    close = difflib.get_close_matches(key, sorted(known), n=1)
    hint = f" did you mean '{close[0]}'?" if close else ""
    return FedsimError(f"there is no key '{key}';{hint or ' fedsim config list has the kinds.'}")


def _table(table: str, of_table: list[Key], every: list[Key]) -> RenderableType:
    """A table's own keys, a line each, and the names of those that its choices bring along."""
    parts: list[RenderableType] = [_lines([k for k in of_table if not k.belongs_to])]
    choices: dict[str, list[str]] = {}
    for entry in of_table:
        for choice in entry.belongs_to:
            choices.setdefault(choice, []).append(entry.name.rpartition(".")[2])
    if choices:
        names = Table(box=None, pad_edge=False, show_header=False)
        for choice in sorted(choices):
            names.add_row(choice, ", ".join(choices[choice]))
        first = min(choices)
        told = f"Choices bring keys of their own (`fedsim config explain {table}.{first}`):"
        parts += [Text(f"\n{told}"), names]
    inner = {k.name.rpartition(".")[0] for k in every if k.name.startswith(f"{table}.")} - {table}
    if inner:
        parts.append(Text(f"\nTables of its own: {', '.join(sorted(inner))}."))
    return Lines(*parts)


def _lines(chosen: list[Key]) -> Table:
    lines = Table(box=None, pad_edge=False, show_header=False)
    for entry in chosen:
        default = "unset" if entry.default == "" else json.dumps(entry.default)
        lines.add_row(entry.name, default, entry.doc)
    return lines


def _explained(key: Key) -> str:
    lines = [key.name, f"    {key.doc}", f"    It is {key.type}{_allowed(key)}."]
    shown = json.dumps(key.default)
    lines.append(f"    By default {shown}." if key.default != "" else "    By default unset.")
    if key.belongs_to:
        lines.append(f"    It belongs to {', '.join(key.belongs_to)}.")
    if key.name in keys_outside_release():
        lines.append("    A resumed run may change it: --resume --set.")
    return "\n".join(lines)


def _allowed(key: Key) -> str:
    return f": {key.allowed}" if key.allowed else ""


@config.command(cls=Command)
def init(
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Choose: `mechanism.name=clipping`."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A file to write it to, which is new.")] = None,
) -> None:
    """Write a config to start from: every key of what is chosen, with what it means.

    fedsim config init --set client.name=adam --set partition.name=dirichlet --out run.toml
    """
    text = template(RunConfig.of(set_ or []))
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise FedsimError(f"--out is {out}, which is there already; choose another.") from None


@config.command("schema", cls=Command)
def schema_() -> None:
    """Print the JSON schema, from which editors complete and check a TOML file.

        fedsim config schema > fedsim.schema.json

    and `#:schema ./fedsim.schema.json` as the first line of the config.
    """
    typer.echo(json.dumps(schema(), indent=2))


@config.command(cls=Command)
def show(
    file: Annotated[Path, typer.Argument(metavar="CONFIG", help="A config's TOML file.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key: `client.lr=0.1`."),
    ] = None,
) -> None:
    """Show a config complete, with all that it leaves at a default.

    fedsim config show run.toml --set client.name=adam
    """
    typer.echo(RunConfig.load(file, set_ or []).to_toml(), nl=False)
