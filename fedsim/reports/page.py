"""Pages: plain data in, HTML out by the templates. A page is one file and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.durable import replace
from fedsim.reports.plots import DARK, DASHES, LIGHT, Theme
from fedsim.runs.metrics import finite_json
from fedsim.version import VERSION

if TYPE_CHECKING:
    from jinja2 import Environment

_GENERATOR = '<meta name="generator" content="fedsim'
_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **context: object) -> str:
    """A template's HTML; whatever is put into it is escaped.

    Parameters
    ----------
    template : str
        A file's name in ``templates``; `page.html` and those that extend it need a ``title``, and
        `facts.html`, a bare table for a notebook, ``facts`` by their names.
    """
    environment = _environment()
    # Macros of a page number its charts.
    numbers = itertools.count(1)
    html = environment.get_template(template).render(
        next_chart_id=lambda: f"chart-{next(numbers)}", **context
    )
    # Names of files that are no UTF-8 have characters that no page can have.
    return html.encode(errors="replace").decode()


@dataclass(frozen=True)
class ProgressBar:
    """A fact that is drawn: so much ``done`` of a ``total``, and a text beside."""

    done: int
    total: int
    text: str


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only where a page is made

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_function"] = _json
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    environment.globals |= {
        # Of the bytes between the tags: the policy lets no other script run.
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "script": script,
        "version": VERSION,
        "dashes": DASHES,
        "light": LIGHT,
        "dark": DARK,
        "custom_properties": _custom_properties,
    }
    return environment


def _json(value: object, **_: object) -> str:
    """JSON, which has no number that is not finite: null in its place."""
    return json.dumps(finite_json(value), separators=(",", ":"), allow_nan=False)


def _custom_properties(theme: Theme) -> str:
    names = ("background", "surface", "ink", "muted", "grid", "frame", "accent")
    plain = "".join(f"--{name}:{getattr(theme, name)};" for name in names)
    return plain + "".join(f"--series-{i}:{colour};" for i, colour in enumerate(theme.series))


def write(html: str, path: Path) -> None:
    """Write a page, whole or not at all; its directory is made.

    Raises
    ------
    FedsimError
        If there is a file that is no page of fedsim's.
    """
    if path.exists():
        with open(path, "rb", opener=regular_files.opener) as file:
            if _GENERATOR.encode() not in file.read(4096):
                raise FedsimError(
                    f"{path} is there and is no page that fedsim made; choose another --out."
                )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, html.encode())
