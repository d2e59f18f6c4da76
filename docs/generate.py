"""Write what follows from the code: `make generate`, and a test that it has been run."""

from __future__ import annotations

import re
from pathlib import Path

import tomli_w
import yaml

from experiments.leaderboard import leaderboard
from experiments.papers import papers
from fedsim import registry
from fedsim.config.describe import object_names, flower_table, keys
from fedsim.config.release_keys import keys_outside_release

ROOT = Path(__file__).parents[1]
HEAD = "[tool.flwr.app.config]\n"


def pyproject() -> str:
    """pyproject.toml with Flower's table as it should be; it is the file's last."""
    text = (ROOT / "pyproject.toml").read_text()
    tree = {"tool": {"flwr": {"app": {"config": flower_table()}}}}
    table = tomli_w.dumps(tree)
    return text[: text.index(HEAD)] + table[table.index(HEAD) :]


def reference() -> str:
    """docs/reference/config.md: every key, and everything that can be named."""
    lines = ["# Every key of a config", "", "As `fedsim config explain` says it, table by table."]
    table, names, resumable = None, {key.name for key in keys()}, keys_outside_release()
    for key in keys():
        here = key.name.rpartition(".")[0]
        if here != table:
            title = f"Options in `{here}`" if here in names else f"[{here}]" if here else "The top"
            lines += ["", f"## {title}", ""]
            lines += ["| key | default | what it is |", "| --- | --- | --- |"]
            table = here
        default = "" if key.default == "" else f"`{tomli_w.dumps({'k': key.default})[4:].strip()}`"
        words = [key.doc, f"It is {key.type}{': ' + key.allowed if key.allowed else ''}."]
        words += [f"With {', '.join(key.belongs_to)}."] if key.belongs_to else []
        words += ["A resumed run may change it."] if key.name in resumable else []
        text = " ".join(words).replace("|", "\\|")
        lines.append(f"| `{key.name.rpartition('.')[2]}` | {default} | {text} |")
    lines += ["", "# What can be named", ""]
    for kind in registry.KINDS:
        lines += [f"## {kind}", ""]
        lines += [f"- `{name}`: {line}" for name, line in object_names(kind)] + [""]
    return "\n".join(lines).rstrip() + "\n"


def index_for_models() -> str:
    """docs/llms.txt: each page of the site that is a file here, with its first sentence."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}."]
    for section in site["nav"]:
        ((title, pages),) = section.items()
        entries = []
        for page in [{title: pages}] if isinstance(pages, str) else pages:
            ((name, path),) = page.items()
            if (ROOT / "docs" / path).exists():
                entries.append(f"- [{name}]({path}): {_first_sentence(ROOT / 'docs' / path)}")
        lines += ["", f"## {title}", "", *entries] if entries else []
    return "\n".join(lines) + "\n"


def _first_sentence(page: Path) -> str:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|(?<=\n)(?=[-#|])", text)
    prose = next(text for text in paragraphs if re.match(r"[A-Z`*\[]", text))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=\.)\s", plain)[0]


FILES = {
    "docs/leaderboard.md": leaderboard,
    "docs/papers.md": papers,
    "docs/reference/config.md": reference,
    "docs/llms.txt": index_for_models,  # of the pages above it, too
    "pyproject.toml": pyproject,
}


def main() -> None:
    """Write them all."""
    for name, made in FILES.items():
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_text(made())


if __name__ == "__main__":
    main()
