"""`fedsim config`: explain the keys and choices of configs, and show a config."""

from __future__ import annotations

import difflib
import json
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fedsim import registry
from fedsim.arguments import quoted_alternatives
from fedsim.cli.console import Command, ConfigFile, Group, Output, Overrides
from fedsim.config import RunConfig
from fedsim.config.describe import (
    Key,
    keys,
    object_names,
    object_summary,
    object_tables,
    schema,
    template,
)
from fedsim.config.release_keys import keys_outside_release
from fedsim.errors import FedsimError
from fedsim.privacy.durable import create
from fedsim.synonyms import KEYS, NAMES, closest

INDENT = "    "
NARROWEST_TEXT = 30  # columns of a description beside its key and default

config = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Explain configs: their keys, their choices, a template to start from.",
)


@config.command("list", cls=Command)
def list_(
    kind: Annotated[
        str | None, typer.Argument(help="mechanism, client, data, ...; all kinds if left out.")
    ] = None,
) -> None:
    """List the choices of a kind: fedsim's own, and those that installed packages add.

    For example:

        fedsim config list mechanism

    A class or function of your own is named `module:name` in the same places.
    """
    if kind is not None and kind not in registry.KINDS:
        hint = closest("", kind, registry.KINDS)
        raise FedsimError(f"KIND is '{kind}';{hint} must be {', '.join(registry.KINDS)}.")
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in [kind] if kind else registry.KINDS:
        for choice, line in object_names(name):
            table.add_row(*(() if kind else (name,)), choice, line)
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
    """Explain a key, the keys of a table, or the keys of one of its choices.

    For example:

        fedsim config explain client.tol
        fedsim config explain mechanism
        fedsim config explain mechanism.adaclip

    For a single key it shows the type, the default, the allowed values, and whether a
    resumed run may change it.
    """
    every = keys()
    output = Output()
    table, _, choice = key.rpartition(".")
    if exact := [k for k in every if k.name == key]:
        output.print(_explained(exact))
    elif in_table := [k for k in every if _table_of(k) == key]:
        output.print(_table(key, in_table, every, output.width))
    elif of_choice := [k for k in every if _table_of(k) == table and choice in k.belongs_to]:
        output.print(_lines(of_choice, output.width))
    elif line := object_summary(table, choice):
        output.print(f"{key}\n    {line}\n    It has no keys of its own.")
    else:
        raise _unknown(key, every)


def _table_of(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _unknown(key: str, every: list[Key]) -> FedsimError:
    known = {k.name for k in every} | {_table_of(k) for k in every}
    known |= {f"{_table_of(k)}.{choice}" for k in every for choice in k.belongs_to}
    known |= {f"{table}.{name}" for table, kind in object_tables() for name in registry.names(kind)}
    plain = key.lower().replace("_", "-")
    table, _, word = plain.rpartition(".")
    matches = [name.partition(" ")[0] for name in KEYS.get(word, ())]
    matches = [name for name in matches if name.rpartition(".")[0] == table] or matches
    matches += [name for name in sorted(known) if name.endswith(f".{plain}")]
    if not matches:
        elsewhere = ((t, NAMES.get(kind, {}).get(word)) for t, kind in object_tables())
        matches = [f"{t}.{name}" for t, name in elsewhere if f"{t}.{name}" in known]
        matches += ["task.metrics"] * (word in {*registry.names("metric"), *NAMES["metric"]})
    matches = list(dict.fromkeys(matches)) or difflib.get_close_matches(plain, sorted(known), n=1)
    hint = f" did you mean {quoted_alternatives(tuple(matches[:8]))}?" if matches else ""
    return FedsimError(f"there is no key '{key}';{hint or ' fedsim config list has the kinds.'}")


def _table(table: str, of_table: list[Key], every: list[Key], width: int) -> RenderableType:
    """One line per key that a table always has, and the names of its choices' own keys."""
    parts: list[RenderableType] = [_lines([k for k in of_table if not k.belongs_to], width)]
    choices: dict[str, list[str]] = {}
    for entry in of_table:
        for choice in entry.belongs_to:
            choices.setdefault(choice, []).append(entry.name.rpartition(".")[2])
    if choices:
        names = Table(
            Column(no_wrap=True),
            Column(overflow="fold"),
            box=None,
            pad_edge=False,
            show_header=False,
        )
        for choice in sorted(choices):
            names.add_row(choice, ", ".join(choices[choice]))
        example = f"`fedsim config explain {table}.{min(choices)}`"
        parts += [Text(f"\nChoices with keys of their own ({example}):"), names]
    inner = {_table_of(k) for k in every if k.name.startswith(f"{table}.")} - {table}
    if inner:
        parts.append(Text(f"\nTables inside it: {', '.join(sorted(inner))}."))
    return Lines(*parts)


def _lines(chosen: list[Key], width: int) -> RenderableType:
    rows = [(entry.name, _default(entry), entry.doc) for entry in chosen]
    widths = [max(len(row[place]) for row in rows) for place in (0, 1)]
    longest_word = max(len(word) for row in rows for word in row[2].split())
    if width < sum(widths) + max(longest_word, NARROWEST_TEXT) + 4:
        # One below the other: side by side, keys and words would be cut.
        blocks: list[RenderableType] = []
        for name, default, doc in rows:
            blocks += [f"{name}  {default}", Padding(doc, (0, 0, 0, 4))]
        return Lines(*blocks)
    lines = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        lines.add_row(*row)
    return lines


def _default(key: Key) -> str:
    return "unset" if key.default == "" else json.dumps(key.default)


def _explained(entries: list[Key]) -> str:
    """A key in words; of one that several choices have with other words, a line for each."""
    key = entries[0]
    if len(entries) > 1:
        is_one_type = len({_type(one) for one in entries}) == 1
        lines = [
            f"{', '.join(one.belongs_to)}: {one.doc} {'' if is_one_type else f'{_type(one)} '}"
            f"By default {_default(one)}."
            for one in entries
        ]
        lines += [_type(key)] * is_one_type
    else:
        lines = [key.doc, _type(key), f"By default {_default(key)}."]
        lines += [f"It belongs to {', '.join(key.belongs_to)}."] * bool(key.belongs_to)
    if key.name in keys_outside_release():
        lines.append("A resumed run may change it: --resume --set.")
    filled = (
        textwrap.fill(line, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
        for line in lines
    )
    return "\n".join((key.name, *filled))


def _type(key: Key) -> str:
    return f"It is {key.type}{f': {key.allowed}' if key.allowed else ''}."


@config.command(cls=Command)
def init(
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Choose: `client.name=adam`."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new file to write it to.")] = None,
) -> None:
    """Write a config to start from: every key of the choices made, with its description.

    For example:

        fedsim config init --set client.name=adam --set partition.name=dirichlet --out run.toml

    Without --out it is printed.
    """
    text = template(RunConfig.from_overrides(set_ or []))
    if out is None:
        typer.echo(text, nl=False)
        return
    if not create(out, text.encode()):
        raise FedsimError(f"--out is {out}, which already exists; choose another.")


@config.command("schema", cls=Command)
def schema_() -> None:
    """Print the JSON schema, from which editors complete and check a TOML file.

    Write it to a file,

        fedsim config schema > fedsim.schema.json

    and name that file in the first line of a config: `#:schema ./fedsim.schema.json`.
    """
    typer.echo(json.dumps(schema(), indent=2))


@config.command(cls=Command)
def show(
    config: ConfigFile,
    set_: Overrides = None,
    resolved: Annotated[
        bool,
        typer.Option(
            "--resolved",
            help="Fill in what follows from the data, the model and the machine: the gradient "
            "path, the kernel, the noise of a target epsilon.",
        ),
    ] = False,
) -> None:
    """Show a config with every key, including those left at their defaults.

    For example:

        fedsim config show run.toml --set client.name=adam

    With --resolved it is what a run would write to its config.toml. Nothing is run; a mistake in
    the config is reported.
    """
    settings = RunConfig.load(config, set_ or [])
    if resolved:
        from fedsim.runs.resolve import resolve

        settings = resolve(settings).config
    typer.echo(settings.to_toml(), nl=False)
