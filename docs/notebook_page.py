"""A notebook as a page of the site: its cells, and what they gave when they were run just now."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

MAX_SECONDS = 600  # of one cell

Pictures = dict[str, bytes]


def notebook_page(path: Path, folder: str) -> tuple[str, Pictures]:
    """Run a notebook, and write it down.

    Parameters
    ----------
    path : Path
    folder : str
        Of the site, in which its pictures will be, from the page.

    Returns
    -------
    markdown : str
    pictures : dict of str to bytes
        PNGs by their names in ``folder``.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="fedsim-notebook-") as directory:
        where = {"metadata": {"path": directory}}
        NotebookClient(notebook, timeout=MAX_SECONDS, resources=where).execute()
    pictures: Pictures = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            parts.append(_shown(output, folder, f"{cell.id}-{len(pictures)}.png", pictures))
    return "\n\n".join(parts) + "\n", pictures


def _shown(output: Any, folder: str, name: str, pictures: Pictures) -> str:
    """One output in Markdown: a picture where there is one, else a table, else text."""
    if output.output_type == "stream":
        return _text(output.text)
    data = output.data
    if "image/png" in data:
        pictures[name] = base64.b64decode(data["image/png"])
        return f"![What this cell draws]({folder}/{name})"
    if "text/html" in data:
        return f'<div class="output">{data["text/html"]}</div>'
    return _text(data["text/plain"])


def _text(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
