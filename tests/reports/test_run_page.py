from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from left_runs import left_run

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.federation import client_metrics
from fedsim.privacy import Entry, Event, Ledger
from fedsim.privacy.laws import PoissonLaw
from fedsim.reports.charts import Line, Lines, PageTable, release_curves, thinned
from fedsim.reports.compare_page import compare_page
from fedsim.reports.page import render, write
from fedsim.reports.run_page import OPERATORS_FACTS, run_page
from fedsim.runs.callbacks import Callback
from fedsim.runs.metrics import QUANTILES, MetricsFile, learning_columns, subject
from fedsim.runs.record import RunRecord
from fedsim.runs.run_ledgers import RunLedgers
from fedsim.runs.summary import complete_record
from fedsim.runs.sweep import grid_runs, run_sweep
from fedsim.strategies import RoundReport, RunFailedError

EVIL = """</script><script>alert(1)</script><img src=x onerror="alert(2)">' & 数字"""

PRIVATE = {
    "rounds": 2,
    "partition.clients": 40,
    "cohort.name": "poisson",
    "cohort.rate": 0.5,
    "mechanism.name": "clipping",
    "noise.multiplier": 2.0,
    "client.lr": 0.5,
}


class Outline(HTMLParser):
    """Elements, headings and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, element, attributes):
        self.elements.append((element, dict(attributes)))
        self._inside.append(element)

    def handle_endtag(self, element):
        while self._inside and self._inside.pop() != element:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._inside):
            self.words += data + "\n"

    def named(self, *names: str) -> list[tuple[str, dict[str, str | None]]]:
        return [element for element in self.elements if element[0] in names]


def page_of(directory: Path) -> str:
    return run_page(RunRecord.read(directory))


def chart_specs(page: str) -> list[str]:
    return re.findall(r'<script type="application/json" id="chart-\d+">(.*?)</script>', page)


@pytest.fixture(scope="module")
def private_run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("private") / "run"
    fedsim.run(RunConfig().replace(**PRIVATE), out=out)
    return out


def test_a_run_leaves_its_page_and_report_makes_the_same(private_run: Path) -> None:
    left = (private_run / "report.html").read_text(encoding="utf-8")
    assert Outline(left).words == Outline(page_of(private_run)).words


def test_a_page_asks_nobody_for_anything(private_run: Path) -> None:
    outline = Outline((private_run / "report.html").read_text(encoding="utf-8"))
    assert not outline.named("link", "img", "iframe", "object")
    assert not any({"src", "href"} & set(attributes) for _, attributes in outline.elements)
    policy = next(a["content"] for _, a in outline.named("meta") if "http-equiv" in a)
    assert "default-src 'none'" in policy


def test_headings_come_in_order_and_charts_have_words_and_numbers(private_run: Path) -> None:
    outline = Outline((private_run / "report.html").read_text(encoding="utf-8"))
    levels = [int(name[1]) for name, _ in outline.named("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    charts = [attributes for _, attributes in outline.elements if "data-chart" in attributes]
    assert len(charts) >= 4
    assert all(len(chart["aria-label"]) > 20 for chart in charts)
    assert len(outline.named("figure")) == len(outline.named("details")) - 1 == len(charts)
    assert [a["lang"] for _, a in outline.named("html")] == ["en"]


def test_a_private_page_shows_what_is_public_and_names_the_operators_facts(
    private_run: Path,
) -> None:
    words = Outline((private_run / "report.html").read_text(encoding="utf-8")).words
    assert "differentially private at client level, simulated" in words
    assert words.count(OPERATORS_FACTS) == 2
    assert "Not shown: in a private run" in words
    assert "partition" not in json.loads((private_run / "summary.json").read_text())
    assert "train-" not in words.replace("pretrain-", "")


def test_a_private_run_without_its_ledger_is_not_called_unprivate(
    private_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(private_run, tmp_path / "run")
    (tmp_path / "run" / "ledger.jsonl").unlink()
    words = Outline(page_of(tmp_path / "run")).words
    assert "what it has cost is not known" in words
    assert "claims no privacy" not in words
    assert words.count(OPERATORS_FACTS) == 2


def test_clients_data_show_only_where_they_may(tmp_path: Path) -> None:
    shown = {"evaluate.unprotected": True, "evaluate.clients-every": 1}
    fedsim.run(RunConfig().replace(**PRIVATE, **shown), out=tmp_path / "run")
    words = Outline((tmp_path / "run" / "report.html").read_text(encoding="utf-8")).words
    assert "Each client's mix of classes" in words
    assert "Made from clients' data without noise" in words
    assert "Accuracy over clients" in words
    assert "The band holds the middle 80 %" in words


def test_clients_metrics_with_noise_are_no_round_and_not_called_unprotected(tmp_path: Path) -> None:
    own = {"evaluate.clients-every": 1, "evaluate.private": True, "evaluate.multiplier": 2.0}
    fedsim.run(RunConfig().replace(**PRIVATE, **own), out=tmp_path / "run")
    record = RunRecord.read(tmp_path / "run")
    assert record.released is not None
    assert record.released.kind == "release"
    words = Outline((tmp_path / "run" / "report.html").read_text(encoding="utf-8")).words
    assert "probability 0.5" in " ".join(words.split())
    assert "with noise (evaluate.private)" in words
    assert "without noise (evaluate.unprotected)" not in words


def test_examples_level_alone_hides_clients_data_too(tmp_path: Path) -> None:
    examples = {
        "rounds": 1,
        "partition.clients": 20,
        "client.mechanism.name": "clipping",
        "client.noise.multiplier": 1.0,
    }
    fedsim.run(RunConfig().replace(**examples), out=tmp_path / "run")
    words = Outline((tmp_path / "run" / "report.html").read_text(encoding="utf-8")).words
    assert "differentially private at example level" in words
    assert "No privacy guarantee" not in words
    assert "Not shown: in a private run" in words


def test_the_confusion_matrix_counts_every_test_example(private_run: Path) -> None:
    test = json.loads((private_run / "summary.json").read_text())["test"]
    assert test["kind"] == "classes"
    assert sum(map(sum, test["counts"])) == 360
    right = sum(row[i] for i, row in enumerate(test["counts"])) / 360
    accuracy = MetricsFile(private_run / "metrics.csv").rows()[-1]["test-accuracy"]
    assert right == pytest.approx(accuracy)


@pytest.mark.parametrize("classes", [3, 30])
def test_of_a_class_without_test_examples_nothing_is_said_to_be_recognised(
    classes: int, tmp_path: Path
) -> None:
    counts = np.eye(classes, dtype=int)
    counts[1] = 0
    path = left_run(tmp_path / "run", [{"round": 0, "test-loss": 1.0}])
    summary = {"format": 1, "test": {"kind": "classes", "counts": counts.tolist()}}
    (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    page = page_of(path)
    assert "0.00 %" not in Outline(page).words.replace("100.00 %", "")
    if classes > 20:
        (spec,) = [s for s in map(json.loads, chart_specs(page)) if s["kind"] == "bars"]
        assert spec["labels"] == ["0", *map(str, range(2, classes))]
        assert set(spec["values"]) == {1.0}


def test_what_strangers_write_is_text(tmp_path: Path) -> None:
    rows = [{"round": 0, "test-loss": 1.0, "test-" + EVIL: 0.5, EVIL: 1.0}]
    rows.append({**rows[0], "round": 1, EVIL: 2.0})
    page = page_of(left_run(tmp_path / "run", rows, title=EVIL, **{"model.name": "m:" + EVIL}))
    outline = Outline(page)
    assert "<script>alert" not in page
    assert not outline.named("img")
    # Data, dashes and the one script of ours.
    kinds = [attributes.get("type") for _, attributes in outline.named("script")]
    assert kinds.count(None) == 1
    assert EVIL in outline.words
    assert not any(name.startswith("on") for _, a in outline.elements for name in a)


def test_a_fact_is_text() -> None:
    assert "<th>&lt;b&gt;</th><td>&amp; &#34;</td>" in render("facts.html", facts={"<b>": '& "'})


def test_data_of_a_chart_can_neither_end_its_element_nor_run(tmp_path: Path) -> None:
    rows = [{"round": k, "test-loss": value} for k, value in enumerate((1.0, math.inf, 3.0))]
    for row in rows:
        row["test-</script><!--\u2028"] = row["test-loss"]
    page = page_of(left_run(tmp_path / "run", rows))
    specs = chart_specs(page)
    assert not any(character in spec for spec in specs for character in "<>&")
    (series,) = json.loads(specs[1])["series"]
    assert json.loads(specs[1])["y"] == "</script><!  \u2028"
    assert series["y"] == [1, None, 3]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"round": 0, "test-loss": 2.3}],
        [{"round": 0, "test-loss": "nan"}, {"round": 1, "test-loss": "inf"}],
        [
            {"round": k, "asked": 3, "usable": 0, "failed": 3, "failed-raised": 3}
            for k in range(1, 4)
        ],
        [{"round": k, "epsilon": "inf", "simulated": 1} for k in range(1, 3)],
    ],
    ids=["none", "the initial model", "not finite", "all failed", "no guarantee"],
)
def test_every_end_of_a_run_makes_a_page(rows: list, tmp_path: Path) -> None:
    words = Outline(page_of(left_run(tmp_path / "run", rows))).words
    assert "It is still running, was interrupted or ended in an error, after round" in words
    if any(row.get("failed") for row in rows):
        assert "raised" in words
        assert "and 9 failed." in words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"client.work": "whole(1,5)"}, "1 to 5 passes, drawn for each client, over batches of 10"),
        ({"client.work": "w.txt", "client.steps": 3, "client.epochs": 1}, "a number of steps that"),
        ({}, "1 pass over batches of 10"),
    ],
)
def test_a_page_says_how_much_clients_train(settings: dict, words: str, tmp_path: Path) -> None:
    page = page_of(left_run(tmp_path / "run", [], **settings))
    assert words in " ".join(Outline(page).words.split())


def test_a_page_says_that_its_charts_are_thinned(tmp_path: Path) -> None:
    for rounds, is_thinned in ((800, False), (801, True)):
        rows = [{"round": k, "test-loss": 1.0} for k in range(rounds)]
        words = Outline(page_of(left_run(tmp_path / "run", rows))).words
        assert ("charts show the highs and lows" in words) == is_thinned


def test_one_round_is_spoken_of_as_one(tmp_path: Path) -> None:
    run = left_run(tmp_path / "run", [{"round": 1, "test-loss": 1.0, "seconds": 2.0}], rounds=1)
    (run / "summary.json").write_text('{"format": 1, "ended": "finished"}')
    words = Outline(page_of(run)).words
    assert "It finished its only round." in words
    assert "in this round" in words
    assert "1 rounds" not in words


@pytest.mark.slow
def test_a_long_runs_page_stays_small_and_keeps_its_extremes(tmp_path: Path) -> None:
    rows = [
        {"round": k, "test-loss": 9.0 if k == 54_321 else 1 / (k + 1), "epsilon": k / 1e4}
        for k in range(100_000)
    ]
    page = page_of(left_run(tmp_path / "run", rows))
    assert len(page) < 150_000
    assert "[54321," in page or ",54321," in page


def test_what_only_the_operator_knows_is_no_release() -> None:
    assert {subject(column) for column in RoundReport.columns} == {"operator"}


def test_noise_alone_has_its_closed_form_beside_the_released_norm() -> None:
    config = RunConfig().replace(**PRIVATE, **{"mechanism.clip-norm": 0.5}).to_run_config()
    rows = [{"round": k, "update-norm": 1.0, "clip-norm": 0.5} for k in (1.0, 2.0)]
    event = Event(noise_multiplier=2.0, law=PoissonLaw(rate=0.5))
    ledger = Ledger()
    ledger.record(Entry(event=event, public={"denominator": 0.5 * 40}))
    record = RunRecord(Path("x"), config, rows, RunLedgers(server=ledger), {"parameters": 400})
    (chart,) = release_curves(record)
    released, bound, noise = chart.lines
    assert (released.y, bound.y) == ([1.0, 1.0], [0.5, 0.5])
    # z C sqrt(d) over the expected cohort.
    assert noise.y == pytest.approx([2.0 * 0.5 * 20 / (0.5 * 40)] * 2)
    assert not released.reference
    assert bound.reference
    assert noise.reference


def test_spreads_over_clients_are_known_by_their_columns() -> None:
    assert tuple(client_metrics.QUANTILES) == QUANTILES
    columns = ["clients-loss", *(f"clients-loss-{end}" for end in QUANTILES), "test-x-max"]
    assert learning_columns(columns) == {
        "loss": {"clients": "clients-loss"},
        "x-max": {"test": "test-x-max"},
    }


def test_a_run_that_failed_leaves_pages_that_say_so_and_why(tmp_path: Path) -> None:
    config = RunConfig().replace(
        **{"rounds": 9, "client.lr": 1e30, "partition.clients": 5, "server.max-failed-rounds": 2}
    )
    with pytest.raises(RunFailedError):
        fedsim.run(config, out=tmp_path / "run")
    words = Outline((tmp_path / "run" / "report.html").read_text(encoding="utf-8")).words
    assert "It failed: every client that was asked failed in 2 rounds in a row" in words
    assert "non-finite" in words
    assert "client.lr, server.lr or another learning rate may be too high" in words
    assert "malformed" not in words
    record = RunRecord.read(tmp_path / "run")
    assert record.outcome.why in words
    assert "<td>failed</td>" in compare_page([record])


def test_a_run_that_was_interrupted_has_a_page_when_it_is_asked_for(tmp_path: Path) -> None:
    class Interrupting(Callback):
        def on_round(self, status):
            if status.round == 2:
                signal.raise_signal(signal.SIGINT)

    config = RunConfig().replace(**{"rounds": 50, "partition.clients": 5})
    result = fedsim.run(config, out=tmp_path / "run", callbacks=[Interrupting()])
    assert result.ended == "interrupted"
    words = Outline(run_page(complete_record(tmp_path / "run"))).words
    assert f"It reached round {result.metrics[-1]['round']} of 50. It was interrupted" in words


def test_members_of_a_sweep_leave_pages(tmp_path: Path) -> None:
    base = RunConfig().replace(**{"rounds": 1, "partition.clients": 5})
    run_sweep(grid_runs(base, {"seed": [1, 2]}), tmp_path)
    for seed in (1, 2):
        assert (tmp_path / f"seed={seed}" / "report.html").is_file()


def test_thinning_keeps_ends_and_extremes() -> None:
    values = [math.nan, *([1.0] * 5000), -7.0, *([1.0] * 5000), 8.0, 2.0]
    keep = thinned(values, 100)
    assert len(keep) <= 100
    assert {0, 5001, 10_002, 10_003} <= set(keep)
    assert thinned(values[:50], 100) == list(range(50))


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("round,test-loss\n0,2.5\n1,2.")
    assert MetricsFile(path).rows() == [{"round": 0.0, "test-loss": 2.5}]


def test_a_config_of_another_version_is_shown_as_it_is(tmp_path: Path) -> None:
    run = left_run(tmp_path / "run", [{"round": 0, "test-loss": 1.0}])
    (run / "config.toml").write_text('name = "old"\n[client]\nlearning-speed = 3\n')
    words = Outline(page_of(run)).words
    assert "client.learning-speed" in words


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: (run / "config.toml").unlink(), "is not a run's directory"),
        (lambda run: (run / "config.toml").write_text("="), "is not valid TOML"),
        (lambda run: (run / "summary.json").write_text('{"format": 9}'), "has format 9"),
        (lambda run: (run / "summary.json").write_text("{"), "is damaged"),
        (lambda run: (run / "metrics.csv").write_text("round\nx\n"), "is damaged"),
        (lambda run: (run / "metrics.csv").write_text("1,0.5\n2,0.7\n"), "a row has no round"),
        (lambda run: (run / "ledger.jsonl").write_text("x\n"), "ledger"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(spoil, says: str, tmp_path: Path) -> None:
    run = left_run(tmp_path / "run", [{"round": 0, "test-loss": 1.0}])
    spoil(run)
    with pytest.raises(FedsimError, match=says) as error:
        RunRecord.read(run)
    assert "\n" not in str(error.value)


def test_nobody_elses_page_is_overwritten(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("<h1>mine</h1>")
    with pytest.raises(FedsimError, match="not a page that fedsim made"):
        write("<p>", page)
    assert page.read_text() == "<h1>mine</h1>"


def test_a_comparison_replaces_an_earlier_one_and_no_runs_report(tmp_path: Path) -> None:
    record = RunRecord.read(left_run(tmp_path / "run", [{"round": 0, "test-loss": 1.0}]))
    report, comparison = tmp_path / "report.html", tmp_path / "compare.html"
    write(run_page(record), report)
    for _ in range(2):
        write(compare_page([record]), comparison)
    with pytest.raises(FedsimError, match="is a run page, not a compare page; choose another"):
        write(compare_page([record]), report)
    assert report.read_text() == run_page(record)


def test_what_is_drawn_is_told_in_words_and_in_a_table() -> None:
    chart = Lines("Loss", "round", "loss", [Line("test", [0, 1, 2], [3.0, math.nan, 1.0])])
    assert chart.words() == "Loss. test: from 3 to 1, lowest 1 at 2, highest 3 at 0."
    assert chart.table() == PageTable(["round", "test"], [["0", "3"], ["1", "–"], ["2", "1"]])


def test_a_page_tells_of_files_whose_names_are_no_utf8(tmp_path: Path) -> None:
    write(render("page.html", title="runs/r\udcfcn"), tmp_path / "page.html")
    assert "runs/r?n" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_of_a_regression_speaks_of_one_and_writes_amounts_out(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
    y = 3_000 + 10_000 * x[:, 0]
    data = ((x[::2], y[::2]), (x[1::2], y[1::2]))
    settings = {"task.loss": "squared-error", "task.metrics": "rmse", "partition.clients": 4}
    fedsim.run(RunConfig().replace(rounds=1, **settings), data=data, out=tmp_path / "run")
    page = page_of(tmp_path / "run")
    assert "A linear model, trained for 1 round" in page
    test = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    assert all(float(middle.replace(",", "")) >= 3_000 for middle in test["true"])
    assert not any("e+" in middle for middle in test["true"])
    assert re.search(r'<strong class="long">[\d,]{9,}</strong><span>test loss', page)


@pytest.mark.parametrize("shown", ["not private", "unprotected", "private"])
def test_metrics_by_owner_are_on_the_page_where_they_may_be_shown(
    shown: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    ages, places = rng.integers(20, 90, 90), rng.integers(0, 3, 90)
    names = ("north", "east", "south")
    lines = [
        f"{a},{'yes' if a > 55 else 'no'},{names[p]}" for a, p in zip(ages, places, strict=True)
    ]
    path = tmp_path / "people.csv"
    path.write_text("\n".join(["age,ill,hospital_id", *lines]) + "\n")
    config = RunConfig().replace(
        **{
            "rounds": 1,
            "data.name": str(path),
            "data.columns": "y=ill,owner=hospital_id",
            "data.types": "age=0:100,ill=no|yes",
            "partition.name": "by-owner",
            "partition.clients": 3,
        }
    )
    if shown != "not private":
        unprotected = shown == "unprotected"
        private = {"mechanism.name": "clipping", "noise.multiplier": 1.0}
        private |= {"evaluate.unprotected": unprotected, "evaluate.every": int(unprotected)}
        config = config.replace(**private)
    fedsim.run(config, out=tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    words = Outline(page).words
    assert ("Metrics by hospital" in words) == (shown != "private")
    assert all((f"\n{name}\n" in words) == (shown != "private") for name in names)
    assert words == Outline(page_of(tmp_path / "run")).words
    if shown != "private":
        owners = RunRecord.read(tmp_path / "run").summary["owners"]
        table = fedsim.load(tmp_path / "run").evaluate_by("owner")
        assert list(owners) == list(table) == sorted(names)
        for name, metrics in table.items():
            assert owners[name] == pytest.approx(metrics)
        assert fedsim.load(tmp_path / "run").evaluate_by("hospital_id") == table
