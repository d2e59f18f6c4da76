"""Render HTML pages from templates and plain data. A page is one file and loads no others."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
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
_KIND = re.compile('<meta name="fedsim-page" content="([^"]*)">')
_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **context: object) -> str:
    """Render a template to HTML; all values are escaped.

    Parameters
    ----------
    template : str
        Name of a file in ``templates``. `page.html` and the templates that extend it need a
        ``title``; `facts.html`, a bare table for a notebook, needs ``facts``, values by name.
    """
    environment = _environment()
    # Gives each chart of the page an id of its own.
    numbers = itertools.count(1)
    html = environment.get_template(template).render(
        page_kind=template.removesuffix(".html"),
        next_chart_id=lambda: f"chart-{next(numbers)}",
        **context,
    )
    # File names that are not UTF-8 contain surrogates, which cannot be encoded.
    return html.encode(errors="replace").decode()


@dataclass(frozen=True)
class ProgressBar:
    """A fact shown as a bar, ``done`` of ``total``, with a text next to it."""

    done: int
    total: int
    text: str


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # loaded only to make pages

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_function"] = _json
    # The charts' library, uPlot (MIT, `uplot.LICENSE` beside it), and what draws with it.
    own = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    library = (_TEMPLATES / "uplot.js").read_text(encoding="utf-8")
    lines = (line.strip() for line in own.splitlines())
    script = library + "\n".join(line for line in lines if not line.startswith("//"))
    environment.globals |= {
        # Digest of the exact bytes between the script tags: the page's content security policy
        # allows this script and no other.
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
    """JSON text, with null for NaN and infinite numbers, which JSON lacks."""
    return json.dumps(finite_json(value), separators=(",", ":"), allow_nan=False)


def _custom_properties(theme: Theme) -> str:
    names = ("background", "surface", "ink", "muted", "grid", "frame", "accent")
    plain = "".join(f"--{name}:{getattr(theme, name)};" for name in names)
    return plain + "".join(f"--series-{i}:{colour};" for i, colour in enumerate(theme.series))


def write(html: str, path: Path) -> None:
    """Write a page atomically; its directory is created.

    Raises
    ------
    FedsimError
        If the path exists and is not a fedsim page of the same kind.
    """
    if path.exists():
        with open(path, "rb", opener=regular_files.opener) as file:
            existing_page = file.read(4096).decode(errors="replace")
        if _GENERATOR not in existing_page:
            raise FedsimError(
                f"{path} exists and is not a page that fedsim made; choose another --out."
            )
        before, now = _KIND.search(existing_page), _KIND.search(html)
        if before and now and before[1] != now[1]:  # pages of earlier versions lack a kind
            raise FedsimError(
                f"{path} exists and is a {before[1]} page, not a {now[1]} page; choose another "
                "--out."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, html.encode())
