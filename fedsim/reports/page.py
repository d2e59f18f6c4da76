"""One page in one file: its head, its colours, its script. It asks no network for anything."""

from __future__ import annotations

import base64
import hashlib
import os
from importlib.resources import files
from pathlib import Path

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.reports.charts import Chart, figure
from fedsim.reports.markup import Markup, inert_json, tag
from fedsim.reports.palette import DARK, DASHES, LIGHT, Theme
from fedsim.version import VERSION

__all__ = ["Page", "write"]

_GENERATOR = '<meta name="generator" content="fedsim'


class Page:
    """A document that grows section by section.

    Parameters
    ----------
    title : str
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._header: list[Markup] = [tag("h1", title)]
        self._main: list[Markup] = []
        self._charts = 0

    def lead(self, *content: object) -> None:
        """What stands before the first heading."""
        self._header += [part if isinstance(part, Markup) else tag("p", part) for part in content]

    def section(self, heading: str, *content: Markup | Chart | str | None) -> None:
        """A heading and what stands under it; charts beside one another, text as a paragraph.

        Nothing is added where nothing stands under it.
        """
        blocks: list[Markup] = []
        row: list[Markup] = []
        for part in content:
            if not isinstance(part, Markup | str | None):
                self._charts += 1
                row.append(figure(part, f"chart-{self._charts}"))
                continue
            if row:
                blocks.append(tag("div", *row, class_="charts"))
                row = []
            if part:
                blocks.append(part if isinstance(part, Markup) else tag("p", part))
        if row:
            blocks.append(tag("div", *row, class_="charts"))
        if blocks:
            self._main.append(tag("section", tag("h2", heading), *blocks))

    def html(self) -> str:
        """The whole document."""
        script = _asset("report.js")
        # Whatever a title or a label may smuggle in: no other script runs, nothing is fetched.
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        )
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="generator", content=f"fedsim {VERSION}"),
            tag("title", f"{self._title} – fedsim"),
            tag("style", Markup(_colours() + _asset("report.css"))),
        )
        about = f"Made by fedsim {VERSION}. This page is one file and works offline."
        body = tag(
            "body",
            tag("header", *self._header),
            tag("main", *self._main),
            tag("footer", tag("p", about)),
            tag("noscript", tag("p", "Charts need JavaScript; their numbers are in the tables.")),
            inert_json(DASHES, "dashes"),
            tag("script", Markup(script)),
        )
        document = f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"
        # Names of files that are no UTF-8 have characters that no page can have.
        return document.encode(errors="replace").decode()


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
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(html, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _asset(name: str) -> str:
    return files("fedsim.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _colours() -> str:
    """Custom properties of both themes; what is printed is light."""
    return (
        f":root{{{_properties(LIGHT)}}}\n"
        f"@media screen and (prefers-color-scheme: dark){{:root{{{_properties(DARK)}}}}}\n"
        "@media print{html{color-scheme:light}}\n"
    )


def _properties(theme: Theme) -> str:
    names = ("background", "surface", "ink", "muted", "grid", "frame", "accent")
    plain = "".join(f"--{name}:{getattr(theme, name)};" for name in names)
    return plain + "".join(f"--series-{i}:{colour};" for i, colour in enumerate(theme.series))
