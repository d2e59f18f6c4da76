from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ledger_helpers import COHORT, DELTA, release, spent, written

from fedsim.cohorts import FixedCohort, PoissonCohort
from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.privacy import Accountant, Entry, Event, Ledger
from fedsim.privacy.durable import archive
from fedsim.privacy.ledger_lines import GENESIS, sealed_line


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"PK\x03\x04" + bytes(300) + b"\n" + bytes(40), b"round,epsilon\n1,0.5\n"],
    ids=["empty", "text", "npz", "csv"],
)
def test_a_file_that_is_no_ledger_is_refused(path, content):
    path.write_bytes(content)
    for open_ in (Ledger, Ledger.read):
        with pytest.raises(FedsimError, match=r"no ledger|not a ledger"):
            open_(path)
    assert path.read_bytes() == content


def test_a_later_format_is_refused_by_its_number(path):
    data = written(path, 1)
    assert Ledger.read(path).entries[0].version == 3
    path.write_bytes(data.replace(b'"version":3', b'"version":4'))
    with pytest.raises(FedsimError, match="hash does not match"):
        Ledger(path)
    line, _ = sealed_line(
        {"kind": "ledger", "version": 4, "level": "client", "client": None}, GENESIS
    )
    path.write_bytes(line)
    with pytest.raises(FedsimError, match="its format is 4; this fedsim reads formats 1 to 3"):
        Ledger(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("round", "one"), ("round", -1), ("attempt", 1.5), ("level", "node"), ("entropy", "dice"),
        ("mechanism", 3), ("clip-norm", "large"), ("client", True), ("release", 7),
        ("fingerprint", []), ("placement", "cloud"), ("declared-by-user", 1), ("public", {"a": []}),
        ("event", []), ("event", {"sampler": "poisson"}), ("settles", None), ("kind", "gift"),
        ("surprise", 1),
    ],
)  # fmt: skip
def test_every_field_is_checked_though_the_line_be_sealed(path, field, value):
    written(path, 1)
    header, line = path.read_bytes().splitlines()
    entry = json.loads(line)["entry"]
    previous = entry.pop("previous")
    path.write_bytes(header + b"\n" + sealed_line({**entry, field: value}, previous)[0])
    with pytest.raises(FedsimError, match="line 2"):
        Ledger(path)


OLD = Path(__file__).parent / "format1"


def test_a_ledger_of_format_1_is_read_and_counted(path):
    shutil.copy(OLD / "ledger.jsonl", path)
    for open_ in (Ledger, Ledger.read):
        ledger = open_(path, delta=DELTA)
        assert ledger.epsilon() == spent(3)
        assert [entry.round for entry in ledger.charged] == [1, 2, 3]
        assert {entry.version for entry in ledger.charged} == {1}
    assert "format 1" in str(ledger.statement())


def test_a_client_ledger_of_format_1_is_read_as_zero_out(path):
    shutil.copy(OLD / "client-3.jsonl", path)
    statement = Ledger.read(path, delta=DELTA).statement()
    assert (statement.level, statement.adjacency) == ("example", "zero-out")
    assert "claimed add-remove; it is read as zero-out" in str(statement)
    assert "the number of every client's examples" in str(statement)


def test_a_ledger_of_format_1_is_archived_when_it_is_continued(path):
    shutil.copy(OLD / "ledger.jsonl", path)
    old = path.read_bytes()
    ledger = Ledger(path, delta=DELTA)
    assert path.read_bytes() == old  # opening changes nothing
    ledger.record(Entry(**release(3)))  # under whatever names: no release of format 1 is the same
    assert ledger.epsilon() == spent(4)
    assert (path.parent / "archive" / "1" / "ledger.jsonl").read_bytes() == old
    again = Ledger(path, delta=DELTA)
    assert again.epsilon() == spent(4)
    assert [entry.round for entry in again.entries] == [3]


@pytest.mark.parametrize("cut", [30, 200, 700])
def test_a_torn_ledger_of_format_1_counts_no_less(path, cut):
    data = (OLD / "ledger.jsonl").read_bytes()
    path.write_bytes(data[:-cut])
    ledger = Ledger(path, delta=DELTA, declared=Event.of(COHORT, 1.5))
    assert ledger.epsilon() >= spent(2 + (cut < 600))
    path.write_bytes(data.replace(b'"round":2', b'"round":9'))
    with pytest.raises(FedsimError, match="line 2: its hash does not match"):
        Ledger(path)


def test_what_is_archived_beside_a_ledger_counts_whatever_a_new_run_repeats(path):
    written(path, 3)
    heads = Ledger(path).heads
    archive(path)
    assert (path.parent / "archive" / "1" / "ledger.jsonl").is_file()
    ledger = Ledger(path, delta=DELTA)
    assert ledger.epsilon() == spent(3)
    for t in (1, 2, 3):
        assert ledger.record(Entry(**release(t)))
    assert ledger.heads == heads
    for again in (ledger, Ledger.read(path, delta=DELTA)):
        assert again.epsilon() == spent(6)
    archive(path)
    assert (path.parent / "archive" / "2" / "ledger.jsonl").is_file()
    last = Ledger(path, delta=DELTA)
    last.record(Entry(**{**release(1), "release": "third"}))
    assert last.epsilon() == spent(7)
    said = str(last.statement())
    assert "6 of the releases were made by earlier runs" in said
    assert f"this run's own would be epsilon {spent(1):.4g}" in said


def test_an_archive_counts_towards_the_budget(path):
    written(path, 3)
    archive(path)
    ledger = Ledger(path, delta=DELTA, max_epsilon=spent(3))
    new = {"round": 4, "release": "seed-1", "entropy": "config"}
    for t in (2, 4):  # also of a round that the archived run has made
        assert ledger.would_exceed(Entry(event=Event.of(COHORT, 1.5), **{**new, "round": t}))
        with pytest.raises(BudgetSpentError, match=r"would exceed max-epsilon"):
            ledger.record(Entry(**release(t)))
    assert not path.exists()


def test_an_archive_that_does_not_compose_is_refused_before_anything_is_written(path):
    written(path, 3)
    archive(path)
    with pytest.raises(FedsimError, match="replace-one"):
        Ledger(path, declared=Event.of(FixedCohort(5, 50), 1.5))
    assert not path.exists()


@pytest.mark.parametrize(
    "event",
    [Event.of(PoissonCohort(0.1, 100), 1.1), Event.of(FixedCohort(3, 50), 4.0, count=2)],
)
def test_a_ledger_of_format_2_is_read_and_continued(path, event):
    law, new = event.law, event.to_dict()
    flat = {
        "sampler": law.name, "adjacency": law.adjacency,
        "noise-multiplier": new["noise-multiplier"], "rate": law.rate,
        "size": getattr(law, "size", None), "population": law.population,
        "count": new["count"], "sides": {}, "guarantee": True,
    }  # fmt: skip
    header = {"kind": "ledger", "version": 2, "level": "client", "client": None}
    first, head = sealed_line(header, GENESIS)
    line, _ = sealed_line({**Entry(event=event, round=1).to_dict(), "event": flat}, head)
    path.write_bytes(first + line)
    ledger = Ledger(path)
    assert [(entry.event, entry.version) for entry in ledger.entries] == [(event, 2)]
    ledger.record(Entry(event=event, round=2))
    assert Ledger.read(path).epsilon(1e-5) == Accountant([event.times(2)]).epsilon(1e-5)
