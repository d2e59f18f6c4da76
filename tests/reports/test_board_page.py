"""The page of a public bundle, for an ethics board."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.cli import main
from fedsim.reports.board_page import board_page
from fedsim.runs.export import publish

HOSPITALS = ("north", "east", "south")
ENTROPY = {"noise.entropy": "system"}
CLIENTS = {"mechanism.name": "clipping", "noise.multiplier": 8.0}
EXAMPLES = {"client.mechanism.name": "clipping", "client.noise.multiplier": 4.0}


def run_of(path: Path, **settings: object) -> fedsim.SavedRun:
    rows = [f"{20 + k},{'yes' if k % 3 else 'no'},{HOSPITALS[k % 3]}" for k in range(60)]
    (path / "people.csv").write_text("\n".join(["age,ill,hospital", *rows]) + "\n")
    config = RunConfig().replace(
        **{
            "title": "Ill <or> not",
            "rounds": 2,
            "data.name": str(path / "people.csv"),
            "data.columns": "y=ill,owner=hospital",
            "data.types": "age=0:100,ill=no|yes",
            "partition.name": "by-owner",
            "partition.clients": 3,
            "evaluate.every": 0,
            "noise.delta": 1e-4,
            **settings,
        }
    )
    fedsim.run(config, out=path / "run")
    return fedsim.load(path / "run")


def words_of(bundle: Path) -> str:
    page = (bundle / "statement.html").read_text(encoding="utf-8")
    body = page.partition("<body>")[2]
    assert "<script" not in page
    assert not re.search(r"\b(src|href)=", page)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def published(saved: fedsim.SavedRun, path: Path, noun: str = "") -> str:
    return words_of(publish(saved, path / "bundle", noun))


def test_a_clients_page_says_what_its_statement_does_in_the_owners_word(tmp_path: Path) -> None:
    saved = run_of(tmp_path, **CLIENTS, **ENTROPY)
    words, statement = published(saved, tmp_path), saved.record.statements[0]
    assert "Privacy statement: Ill <or> not" in words
    assert f"{statement.epsilon:.3g} epsilon 0.0001 delta 2 releases 3 hospitals" in words
    assert "Whether the data of one hospital were used." in words
    assert "if that hospital had contributed nothing" in words  # zero-out
    assert "Not against the server" in words
    missed = math.floor(1000 * float(statement.tradeoff(0.01))) / 10
    assert f"miss at least {missed:g} % of the true ones" in words
    assert statement.head in words
    assert "simulation" not in words
    # No value and no name of the data: names of hospitals are values of a column.
    assert not {*words.split()} & {*HOSPITALS}


def test_figures_are_never_rounded_in_favour_of_the_run(tmp_path: Path) -> None:
    saved = run_of(tmp_path, **CLIENTS, **ENTROPY)
    words, epsilon = published(saved, tmp_path), saved.record.statements[0].epsilon
    (factor,) = re.findall(r"by a factor of at most ([\d.,]+)\. ", words)
    assert math.exp(epsilon) <= float(factor.replace(",", "")) < 1.1 * math.exp(epsilon)
    ((doubled, delta),) = re.findall(
        r"guarantee is weaker: epsilon ([\d.]+) and delta ([\d.]+)\. ", words
    )
    assert 2 * epsilon <= float(doubled) < 2.2 * epsilon
    group_delta = (1 + math.exp(epsilon)) * 1e-4
    assert group_delta <= float(delta) < 1.1 * group_delta


def test_a_simulated_run_says_first_that_it_is_no_evidence(tmp_path: Path) -> None:
    saved = run_of(tmp_path, **CLIENTS)
    words = published(saved, tmp_path)
    assert "This is a simulation, and no evidence." in words
    assert words.index("no evidence") < words.index("What is protected")
    assert "epsilon (simulated)" in words
    assert "whose final hash is not published" in words
    assert not re.search("[0-9a-f]{32}", words)  # the seed could be found from one


def test_records_are_protected_from_the_server_and_somebody_with_several_less(
    tmp_path: Path,
) -> None:
    words = published(run_of(tmp_path, **EXAMPLES, **ENTROPY), tmp_path)
    assert "Whether one record was used." in words
    assert "also against the server, and against other hospitals" in words
    assert "Somebody with several records is protected less." in words
    assert "(declared)" not in words


def test_with_both_levels_only_the_clients_figures_are_published(tmp_path: Path) -> None:
    saved = run_of(tmp_path, **CLIENTS, **EXAMPLES, **ENTROPY)
    words = published(saved, tmp_path)
    assert words.count("What is protected") == 1
    assert "Single records are protected in addition" in words
    assert f"{saved.example_privacy.epsilon:.3g}" not in words.split()


def test_metrics_without_noise_are_named_and_not_shown(tmp_path: Path) -> None:
    shown = {"evaluate.clients-every": 1, "evaluate.unprotected": True, "evaluate.every": 1}
    saved = run_of(tmp_path, **CLIENTS, **ENTROPY, **shown)
    words = published(saved, tmp_path)
    assert "Without noise, and not covered: accuracy, loss" in words
    measured = {
        text
        for row in saved.metrics
        for name, value in row.items()
        if name.startswith(("clients-", "test-", "train-")) and isinstance(value, float)
        for text in (repr(value), f"{value:.4g}")
        if len(text) > 4
    }
    assert measured
    assert not [value for value in measured if value in words]


def test_a_client_is_called_as_the_user_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = run_of(tmp_path, **CLIENTS)
    run, out = str(tmp_path / "run"), str(tmp_path / "bundle")
    with pytest.raises(SystemExit):
        main(["export", run, "--public", "--client-noun", "city <b>", "--out", out])
    page = (tmp_path / "bundle" / "statement.html").read_text(encoding="utf-8")
    assert "city &lt;b&gt;" in page
    assert "<b>" not in page
    assert "companies" in board_page("x", saved.record.statements, "company")
    with pytest.raises(SystemExit):
        main(["export", run, "--to", "safetensors", "--client-noun", "city"])
    assert "--client-noun is for --public" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("z", "says"),
    [
        (1e8, "by a factor of at most 1. Smaller is better; with delta 0, an epsilon of 0"),
        (0.01, "so much that it is no useful limit"),
    ],
)
def test_extreme_figures_have_words_too(z: float, says: str, tmp_path: Path) -> None:
    words = published(run_of(tmp_path, **{**CLIENTS, "noise.multiplier": z}, **ENTROPY), tmp_path)
    assert says in words
    assert ("From about 10 on it excludes little" in words) == (z < 1)
    assert ("these figures guarantee nothing" in words) == (z < 1)


def test_a_client_who_is_a_person_has_nobody_elses_data(tmp_path: Path) -> None:
    words = published(run_of(tmp_path, **CLIENTS, **ENTROPY), tmp_path, "patient")
    assert "Whether the data of one patient were used." in words
    assert "data of a person" not in words


def test_what_a_run_assumes_of_devices_and_of_its_end_is_on_the_page(tmp_path: Path) -> None:
    devices = {"devices.availability": 0.9, "devices.dropout": 0.1}
    saved = run_of(tmp_path, **CLIENTS, **devices)
    words = published(saved, tmp_path)
    assert "devices, client.work" in saved.record.statements[0].added_sentence
    assert saved.record.statements[0].added_sentence in words
    assert words.index("What is assumed") < words.index("Which clients are available, drop out")
    assert "the seed, and with it the noise, could be found" not in words  # of the full statement


def test_rounds_that_are_charged_together_count_each(tmp_path: Path) -> None:
    together = {"noise.name": "tree", "rounds": 5}
    saved = run_of(tmp_path, **CLIENTS, **ENTROPY, **together)
    words, (statement,) = published(saved, tmp_path), saved.record.statements
    assert statement.cost.releases == 1  # one Gaussian
    assert " 5 releases 3 hospitals" in words
    assert "Epsilon counts all releases together: 5." in words
    assert statement.to_dict()["releases"] == 5
    assert any(sentence.startswith("5 releases;") for sentence in statement.sentences())
