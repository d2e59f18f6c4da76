"""Pages of the site that follow from the code and from results: made when the site is built."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from notebook_page import notebook_page

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    ("Runs", "fedsim", ("run", "load", "RunConfig", "Callback", "RunStatus", "Live")),
    ("What a run reached", "fedsim.runs.record", ("RunResult",)),
    ("What a run has left", "fedsim.runs.saved", ("SavedRun",)),
    ("A trained model", "fedsim.runs.model", ("InferenceModel",)),
    ("Cohorts", "fedsim.cohorts", None),
    ("Mechanisms", "fedsim.mechanisms", None),
    ("Strategies", "fedsim.strategies", None),
    ("Engines", "fedsim.engines", None),
    ("Training", "fedsim.training", None),
    ("Clients", "fedsim.clients", None),
    ("Partitions", "fedsim.partitions", None),
    ("Data sets", "fedsim.datasets", None),
    ("Models", "fedsim.models", None),
    ("Losses and metrics", "fedsim.tasks", None),
    ("Server optimisers", "fedsim.server_optimizers", None),
    ("Settings of one's own", "fedsim.settings", None),
    ("Privacy", "fedsim.privacy", None),
    ("Random numbers", "fedsim.randomness", None),
    ("Audit", "fedsim.audit", None),
)
BENCHMARKS = (
    *("local", "convolutions", "example_privacy", "engines", "workers", "kills"),
    "mutations",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made, and the repository's own pages, to the files of the site."""
    notebook, drawn = notebook_page(
        ROOT / "examples" / "notebooks" / "first_run.ipynb", "pictures/notebook"
    )
    for name, png in drawn.items():
        files.append(File.generated(config, f"pictures/notebook/{name}", content=png))
    pages = {
        "notebook.md": notebook,
        "reference/command.md": command_reference(),
        "reference/python.md": python_reference(),
        "experiments.md": experiments(),
        "gallery.md": gallery(),
        "benchmarks.md": benchmarks(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "security.md": (ROOT / "SECURITY.md").read_text(),
    }
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    for picture in pictures():
        uri = f"pictures/{picture.relative_to(ROOT / 'experiments').as_posix()}"
        files.append(File.generated(config, uri, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files of the repository lead to their pages; keep keys in one piece."""
    here = "../" * page.file.src_uri.count("/")
    for file, uri in (("SECURITY.md", "security.md"), ("CHANGELOG.md", "changelog.md")):
        markdown = markdown.replace(f"](../{file})", f"]({here}{uri})")
    markdown = re.sub(r"\]\(docs/", f"]({here}", markdown)
    if page.file.src_uri in ("reference/config.md", "reference/command.md"):
        # A key or an option, in a table's first cell, is not broken at its hyphens.
        markdown = re.sub(r"^\| (`[^|]+`) \|", _unbroken, markdown, flags=re.MULTILINE)
    return markdown


def _unbroken(cell: re.Match[str]) -> str:
    return "| " + re.sub(r"`[^`]+`", lambda code: f"{code[0]}{{ .unbroken }}", cell[1]) + " |"


def command_reference() -> str:
    """One section a command: what its help says."""
    from fedsim.cli.app import app

    group = typer.main.get_command(app)
    lines = ["# The command\n", "`fedsim COMMAND --help` says the same.\n"]
    lines += _sections(group, "fedsim")
    return "\n".join(lines)


def _sections(command: click.Command, name: str) -> list[str]:
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        subcommands = (
            (sub, command.get_command(context, sub)) for sub in command.list_commands(context)
        )
        return [
            line
            for sub, found in subcommands
            if found
            for line in _sections(found, f"{name} {sub}")
        ]
    text = (command.help or "").strip()
    return [f"## {name}\n", f"{text}\n", *_parameters(command), ""]


def _parameters(command: click.Command) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.name == "help":
            continue
        words = ", ".join(f"`{word}`" for word in parameter.opts)
        if isinstance(parameter, click.Argument):
            words = f"`{parameter.human_readable_name.upper()}`"
        text = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
        default = parameter.default
        shown = f"`{default}`" if default not in (None, False, (), [], "", ...) else ""
        rows.append(f"| {words} | {text} | {shown} |")
    return ["| option | what | default |", "| --- | --- | --- |", *rows] if rows else []


def python_reference() -> str:
    """The public names of each package, with their docstrings."""
    lines = ["# Python\n"]
    for title, module, members in MODULES:
        lines += [
            f"## {title}\n",
            f"::: {module}",
            "    options:",
            "      show_root_heading: false",
        ]
        lines += ["      show_root_toc_entry: false"]
        if members:
            lines += [f"      members: [{', '.join(members)}]"]
        lines += [""]
    return "\n".join(lines)


def pictures() -> list[Path]:
    """Every committed picture of an experiment."""
    return sorted((ROOT / "experiments").rglob("*.png"))


def experiments() -> str:
    """Every figure and table of the papers, from the experiments' stored results and judgements."""
    from experiments.framework.judge import overview

    return overview()


def gallery() -> str:
    """Every picture, with the experiment that makes it."""
    lines = ["# Pictures\n"]
    for picture in pictures():
        where = picture.relative_to(ROOT / "experiments")
        lines += [f"## {where.parent.name}: {where.stem}\n"]
        lines += [f"![{where.stem} of {where.parent.name}](pictures/{where.as_posix()})", ""]
    return "\n".join(lines)


def benchmarks() -> str:
    """The recorded figures of speed and memory, and the command that measures each again."""
    lines = [
        "# Benchmarks\n",
        "Run them in a checkout after `make test`, with nothing else running. Each takes minutes,",
        "lists its options with `--help`, and prints figures like those below; `make bench` runs",
        "the first.\n",
        "| command | measures |",
        "| --- | --- |",
    ]
    for name in BENCHMARKS:
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        line = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        # Some begin with the command itself.
        line = re.sub(r"^`[^`]*`:\s*", "", line)
        lines.append(f"| `python -m benchmarks.{name}` | {line.rstrip('.')} |")
    lines.append("")
    for results in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        lines += [re.sub(r"^(#+) ", r"#\1 ", results.read_text(), flags=re.MULTILINE), ""]
    return "\n".join(lines)
