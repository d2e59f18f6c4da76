"""Pages as a browser shows them: Chromium, driven over its own protocol."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from left_runs import left_run

import fedsim
from fedsim import RunConfig
from fedsim.reports.charts import Line, Lines, PageTable
from fedsim.reports.compare_page import compare_page
from fedsim.reports.page import render
from fedsim.reports.plots import DARK, LIGHT
from fedsim.reports.run_page import run_page
from fedsim.runs.export import publish
from fedsim.runs.record import RunRecord, read_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]

EVIL = '</title><script>document.title = "owned"</script><img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    settings = {
        "title": EVIL,
        "rounds": 6,
        "partition.clients": 40,
        "partition.name": "dirichlet",
        "client.lr": 0.5,
        "evaluate.clients-every": 2,
        "evaluate.unprotected": True,
        "mechanism.name": "clipping",
        "noise.multiplier": 2.0,
    }
    fedsim.run(RunConfig().replace(**settings), out=folder / "run")
    rows = [
        {"round": k, "test-loss": 9.0 / (k + 1), "test-accuracy": k / 100_000}
        for k in range(100_000)
    ]
    long = left_run(folder / "long", rows)
    (folder / "long.html").write_text(run_page(RunRecord.read(long)), encoding="utf-8")
    empty = left_run(folder / "empty", [])
    (folder / "empty.html").write_text(run_page(RunRecord.read(empty)), encoding="utf-8")
    moved = [
        {"round": k, "bytes-down": 2.8e6 + 1e6 * k, "bytes-up": 9e5, "seconds": 1.0}
        for k in range(9)
    ]
    devices = left_run(folder / "devices", moved)
    (folder / "devices.html").write_text(run_page(RunRecord.read(devices)), encoding="utf-8")
    named = left_run(folder / "named", [{"round": 0, "test-loss": 1.0}])
    labels = [f"a diagnosis of {kind} that takes a whole line of a phone's screen" for kind in "ab"]
    mixes = {"labels": labels, "columns": ["1", "2"], "shares": [[1.0, 0.5], [0.0, 0.5]]}
    summary = {
        "format": 1,
        "test": {"kind": "classes", "counts": [[3, 1], [0, 4]], "labels": labels},
        "partition": {"said": "", "sizes": {"labels": ["4"], "counts": [2]}, "mixes": mixes},
    }
    (named / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "named.html").write_text(run_page(RunRecord.read(named)), encoding="utf-8")
    for seed in (1, 2, 3):
        for rate in (0.1, 0.3):
            some = [{"round": k, "test-loss": 1 + rate * seed / (k + 1)} for k in range(30)]
            left_run(folder / "sweep" / f"{rate}-{seed}", some, seed=seed, **{"client.lr": rate})
    compared = compare_page(read_all([folder / "sweep"]))
    (folder / "compare.html").write_text(compared, encoding="utf-8")
    spotty = [Line("a", [0, 2, 4], [1, math.nan, 3]), Line("b", [1, 3], [5, 4])]
    chart = Lines("Gaps", "round", "value", spotty)
    empty_table = PageTable(["run"], [])
    facts = {"several_seeds": False, "several_runs": False, "several_private": False}
    tables = {"results": empty_table, "runs": empty_table, "differences": None}
    counts = {"left_out": 0, "diverged": 0}
    html = render("compare.html", title="", summary="", curves=[chart], **facts, **tables, **counts)
    (folder / "gaps.html").write_text(html, encoding="utf-8")
    clock = {
        "rounds": 12,
        "partition.clients": 60,
        "client.steps": 2,
        "cohort.name": "buffered",
        "cohort.concurrency": 20,
        "cohort.buffer": 4,
        "mechanism.weighting": "uniform",
        "devices.seconds-per-step": 2.0,
        "devices.spread": 1.0,
        "devices.dropout": 0.2,
    }
    fedsim.run(RunConfig().replace(**clock), out=folder / "clock")
    (folder / "clock" / "report.html").rename(folder / "buffered.html")
    names = ("long", "empty", "devices", "named", "compare", "gaps", "buffered")
    others = {name: folder / f"{name}.html" for name in names}
    board = publish(fedsim.load(folder / "run"), folder / "bundle") / "statement.html"
    return {"run": folder / "run" / "report.html", "board": board, **others}


@pytest.mark.parametrize("name", ["run", "long", "empty", "devices", "named", "compare", "board"])
@pytest.mark.parametrize("width", [360, 1200])
def test_a_page_opens_without_complaint_and_fits(
    name: str, width: int, pages: dict[str, Path], browser: Browser
) -> None:
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(pages[name], width=width)
    assert browser.complaints == []
    assert set(browser.requests) == {pages[name].absolute().as_uri()}
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    charts = browser.evaluate("document.querySelectorAll('[data-chart]').length")
    drawn = browser.evaluate("document.querySelectorAll('.plot > svg, .plot canvas').length")
    assert charts == drawn
    assert charts >= (0 if name in ("empty", "board") else 1)


def test_the_statement_for_a_board_is_one_printed_page(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages["board"])
    printed = base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1


@pytest.mark.parametrize("name", ["run", "named", "buffered"])
@pytest.mark.parametrize("width", [360, 1200])
def test_no_label_is_cut_off_or_stands_on_another(
    name: str, width: int, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[name], width=width)
    problems = browser.evaluate(
        """[...document.querySelectorAll('.plot > svg')].flatMap((svg) => {
          const frame = svg.getBoundingClientRect();
          const boxes = [...svg.querySelectorAll('text')].map(
            (text) => [text.textContent, text.getBoundingClientRect()]);
          const cut = boxes.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1);
          const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 3 && b.top < a.bottom - 3;
          const over = boxes.filter(([, a], i) => boxes.some(([, b], j) => j > i && meet(a, b)));
          return [...cut, ...over].map(([text]) => text);
        })"""
    )
    assert problems == []


@pytest.mark.parametrize("name", ["run", "long", "compare"])
def test_nothing_that_a_chart_draws_is_cut_off_at_its_sides(
    name: str, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[name], width=390)
    cut = browser.evaluate(
        """[...document.querySelectorAll('.plot canvas')].filter((canvas) => {
          const inked = (x) => canvas.getContext('2d').getImageData(x, 0, 1, canvas.height)
            .data.some((value, i) => i % 4 === 3 && value > 0);
          return inked(0) || inked(canvas.width - 1);
        }).map((canvas) => canvas.closest('figure').textContent.trim().slice(0, 40))"""
    )
    assert cut == []


def test_long_names_of_classes_leave_room_for_what_they_name(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages["named"], width=360)
    cells = "[...document.querySelectorAll('.plot > svg rect[fill-opacity]')]"
    widths = browser.evaluate(f"{cells}.map((cell) => cell.getBoundingClientRect().width)")
    assert min(widths) > 50
    names = "[...document.querySelectorAll('.matrix tbody th')]"
    assert browser.evaluate(f"Math.max(...{names}.map((name) => name.clientWidth))") < 180


@pytest.mark.parametrize("name", ["run", "named"])
def test_the_headings_of_a_confusion_matrix_are_unbroken_words(
    name: str, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[name], width=360)
    lines = browser.evaluate(
        """['first', 'last'].map((end) => {
          const words = document.createRange();
          words.selectNodeContents(document.querySelector(`.matrix thead th:${end}-child`));
          return words.getClientRects().length;
        })"""
    )
    assert lines == [1, 1]


def test_a_strangers_title_runs_nothing(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["run"])
    assert browser.evaluate("document.title") == f"{EVIL} – fedsim"
    assert browser.evaluate("document.querySelector('h1').textContent") == EVIL
    assert browser.evaluate("document.querySelectorAll('img').length") == 0


def test_the_mouse_reads_values_and_zooms(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["compare"])
    x, y = browser.middle(".plot")
    browser.mouse("mouseMoved", x, y)
    told = browser.evaluate("document.querySelector('.tip:not([hidden])').innerText")
    assert "round" in told
    assert "client.lr 0.1" in told
    scale = "JSON.stringify(document.querySelector('.plot').uplot.scales.x)"
    before = browser.evaluate(scale)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + 60, y, button="left")
    browser.mouse("mouseReleased", x + 60, y, button="left", clickCount=1)
    assert browser.evaluate(scale) != before
    browser.click("button[aria-label='Reset the zoom']")
    assert browser.evaluate(scale) == before


def test_bytes_are_read_in_their_units(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["devices"])
    plot = ".plot[aria-label^=Bytes]"
    assert "5 MB" in browser.evaluate(f"document.querySelector('{plot}').uplot.axes[1]._values")
    x, y = browser.middle(plot)
    browser.mouse("mouseMoved", x, y)
    told = browser.evaluate("document.querySelector('.tip:not([hidden])').innerText")
    assert re.search(r"to them\s+\d\.?\d? MB\s+back\s+900 kB", told)


def test_the_keyboard_reads_values_and_they_are_spoken(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages["compare"])
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.key("End")
    assert "round 29" in browser.evaluate("document.querySelector('[aria-live]').textContent")
    browser.key("ArrowLeft")
    assert "round 28" in browser.evaluate("document.querySelector('[aria-live]').textContent")
    browser.key("+")
    assert not browser.evaluate("document.querySelector('[aria-label^=\"Reset\"]').disabled")


def test_a_timelines_tasks_are_read_by_keyboard_and_mouse(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages["buffered"])
    plot = ".plot[aria-label^='Who trains']"
    browser.evaluate(f'document.querySelector("{plot}").focus()')
    live = (
        f'document.querySelector("{plot}").parentElement.querySelector("[aria-live]").textContent'
    )
    told = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"):
        browser.key(key)
        told.append(browser.evaluate(live))
    assert all(
        re.match(r"client \d+, trains version \d+, seconds .* in release", one) for one in told
    )
    assert told[0] == told[2] == told[4] != told[1]
    corner = browser.evaluate(
        f"""(() => {{
          const box = document.querySelector("{plot} [data-bar]").getBoundingClientRect();
          return [box.left + 1, box.top + box.height / 2];
        }})()"""
    )
    browser.mouse("mouseMoved", *corner)
    shown = browser.evaluate("document.querySelector('.tip:not([hidden])').innerText")
    assert re.sub(r"[\s,]+", " ", shown) == re.sub(r"[\s,]+", " ", told[0])


def test_axes_of_compared_runs_begin_at_zero_until_they_are_zoomed(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages["compare"])
    lowest = "document.querySelector('.plot').uplot.scales.y.min"
    assert browser.evaluate(lowest) == 0
    browser.click("button[aria-label='Zoom in']")
    assert browser.evaluate(lowest) > 0.9


def test_keys_of_a_table_stay_whole_on_a_phone(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["compare"], width=360)
    lines = browser.evaluate(
        "[...document.querySelectorAll('.scroll:not(figure *) th')].map((th) => th.clientHeight)"
    )
    assert max(lines) < 2 * min(lines)


def test_a_legends_key_hides_its_curve(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["compare"])
    shown = "document.querySelector('.plot').uplot.series.map((series) => series.show)"
    assert browser.evaluate(shown) == [True] * 7
    browser.click(".legend .key")
    assert browser.evaluate(shown) == [True, False, False, False, True, True, True]


def test_a_logarithmic_axis_has_ticks_and_the_same_curve(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages["compare"])
    browser.click("button[aria-label='Logarithmic scale']")
    assert browser.evaluate("document.querySelectorAll('.plot canvas').length") >= 1
    assert len(browser.evaluate("document.querySelector('.plot').uplot.axes[1]._values")) >= 3
    assert browser.evaluate("document.querySelector('.plot').uplot.scales.y.distr") == 3


def test_a_missing_value_breaks_its_line_and_other_lines_points_do_not(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages["gaps"])
    columns = browser.evaluate(
        "document.querySelector('.plot').uplot.data.map((column) => [...column].map("
        "(value) => value === undefined ? 'other' : value))"
    )
    assert columns[1] == [1, "other", None, "other", 3]
    assert columns[4] == ["other", 5, "other", 4, "other"]


def test_a_heading_sorts_its_table(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["compare"])
    column = (
        "[...document.querySelector('table.sortable').tBodies[0].rows]"
        ".map((row) => row.cells[2].dataset.value)"
    )
    heading = "table.sortable thead th:nth-child(3) button"
    browser.click(heading)
    up = [float(value) for value in browser.evaluate(column)]
    browser.click(heading)
    down = [float(value) for value in browser.evaluate(column)]
    assert up == sorted(up) == down[::-1]


def test_the_page_follows_the_readers_colours_and_prints_light(
    pages: dict[str, Path], browser: Browser, tmp_path: Path
) -> None:
    colour = "getComputedStyle(document.documentElement).getPropertyValue('--background')"
    for dark, theme in ((False, LIGHT), (True, DARK)):
        browser.open(pages["run"], dark=dark)
        assert browser.evaluate(colour) == theme.background
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate(colour) == LIGHT.background
    browser.printed(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
