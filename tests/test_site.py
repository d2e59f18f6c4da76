"""The documentation's site: it is built, and every page of it opens from disk without complaint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("material", "mkdocstrings", "nbclient"):
        pytest.importorskip(needed, reason="needs what `make docs` installs")
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.mark.slow
def test_the_notebooks_page_shows_what_its_cells_gave(site: Path) -> None:
    page = (site / "notebook.html").read_text(encoding="utf-8")
    assert "differentially private at client level" in page
    assert "<th>test accuracy</th>" in page
    assert len(list((site / "pictures" / "notebook").glob("*.png"))) == 1


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_every_page_opens_from_disk_without_complaint_and_fits(
    site: Path, browser: Browser, width: int
) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 30
    for page in pages:
        browser.complaints.clear()
        browser.requests.clear()
        browser.open(page, width=width)
        assert browser.complaints == [], page
        assert [url for url in browser.requests if url.startswith("http")] == [], page
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, page
