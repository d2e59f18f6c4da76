"""What is charged once, and what is charged or refused: check and record are one act."""

from __future__ import annotations

import json
import multiprocessing
import stat
from pathlib import Path

import pytest
from ledger_helpers import COHORT, DELTA, ZEROED, release, spent, written

from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.privacy import Accountant, ClientLedgers, Entry, Event, Ledger
from fedsim.privacy.durable import archive

FORK = multiprocessing.get_context("fork")
ROUNDS = 6


def client_release(round: int, run: str | None, fingerprint: str = "f", entropy: str = "config"):
    return Entry(
        round=round, client=0, level="example", event=ZEROED, entropy=entropy,
        release="digest", fingerprint=fingerprint, run=run,
    )  # fmt: skip


def _spend_client(directory: Path, budget: float, run: int, start) -> None:
    ledgers = ClientLedgers(directory, delta=DELTA, max_epsilon=budget)
    start.wait()
    for t in range(ROUNDS):
        try:
            ledgers.record(client_release(t, f"run {run}"))
        except BudgetSpentError:
            break


def _spend_server(path: Path, budget: float, run: int, start) -> None:
    ledger = Ledger(path, delta=DELTA, max_epsilon=budget)
    start.wait()
    for t in range(ROUNDS):
        try:
            ledger.record(Entry(**{**release(t), "release": f"run {run}"}))
        except BudgetSpentError:
            break


@pytest.mark.parametrize("spend", [_spend_client, _spend_server])
def test_processes_that_share_a_ledger_never_spend_more_than_its_budget(tmp_path, spend):
    """Three processes spent 3.709 of 2.6 where each checked, and then wrote."""
    event = ZEROED if spend is _spend_client else Event.of(COHORT, 1.5)
    budget = Accountant([event] * 7).epsilon(DELTA)
    start = FORK.Barrier(3)
    place = tmp_path if spend is _spend_client else tmp_path / "ledger.jsonl"
    processes = [FORK.Process(target=spend, args=(place, budget, k, start)) for k in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    (path,) = tmp_path.glob("*.jsonl")
    ledger = Ledger.read(path, delta=DELTA)
    assert ledger.num_releases == 7
    assert ledger.epsilon() == budget


def _continue_old(path: Path, run: int, start) -> None:
    ledger = Ledger(path, delta=DELTA)
    start.wait()
    ledger.record(Entry(**{**release(1), "release": f"run {run}"}))


def test_processes_that_continue_an_old_ledger_archive_it_once(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes((Path(__file__).parent / "format1" / "ledger.jsonl").read_bytes())
    before = Ledger.read(path, delta=DELTA).num_releases
    start = FORK.Barrier(3)
    processes = [FORK.Process(target=_continue_old, args=(path, k, start)) for k in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert Ledger.read(path, delta=DELTA).num_releases == before + 3
    assert len(list((tmp_path / "archive").iterdir())) == 1


def test_a_round_gone_through_again_is_charged_once_only_with_the_same_sum(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, delta=DELTA)
    one, other = (ledger.fingerprint([text]) for text in (b"a sum", b"another sum"))
    assert ledger.record(Entry(**release(1), sum=one))
    again = Ledger(path, delta=DELTA)
    assert not again.would_exceed(
        Entry(event=Event.of(COHORT, 1.5), round=1, release="seed-1", entropy="config"), spent(1)
    )
    assert not again.record(Entry(**release(1), sum=again.fingerprint([b"a sum"])))
    before = path.read_bytes()
    for changed in ({"sum": other}, {}):
        with pytest.raises(FedsimError, match=r"round 1 was recorded .* for another sum: data"):
            again.record(Entry(**release(1), **changed))
    assert path.read_bytes() == before
    assert again.epsilon() == spent(1)


def test_under_system_entropy_another_attempt_is_numbered_and_charged(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    drawn = {**release(1), "entropy": "system"}
    for text in (b"a sum", b"a sum", b"another"):
        assert ledger.record(Entry(**drawn, sum=ledger.fingerprint([text])))
    assert [entry.attempt for entry in ledger.entries] == [0, 1, 2]
    assert ledger.epsilon() == spent(3)


def test_a_sum_is_noted_keyed_and_outside_the_hash(tmp_path):
    paths = [tmp_path / name / "ledger.jsonl" for name in ("one", "two")]
    codes = []
    for path in paths:
        ledger = Ledger(path, delta=DELTA)
        codes.append(ledger.fingerprint([b"a sum"]))
        ledger.record(Entry(**release(1), sum=codes[-1]))
        line = json.loads(path.read_text().splitlines()[-1])
        assert line["noted"]["sum"] == codes[-1]
        assert "sum" not in line["entry"]
        key = path.parent / "fingerprint.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert codes[0] != codes[1]
    assert Ledger.read(paths[0]).heads == Ledger.read(paths[1]).heads


def test_what_an_archived_run_released_is_charged_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path, 2)
    archive(path)
    ledger = Ledger(path, delta=DELTA, max_epsilon=spent(3))
    assert ledger.record(Entry(**release(1)))
    assert ledger.would_exceed(
        Entry(event=Event.of(COHORT, 1.5), round=2, release="seed-1", entropy="config")
    )


def test_at_a_client_a_round_of_another_run_is_charged_and_of_other_data_refused(tmp_path):
    ledgers = ClientLedgers(tmp_path, delta=DELTA)
    ledgers.record(client_release(1, "run 1"))
    ledgers.record(client_release(1, "run 1"))  # resumed
    assert ledgers.of(0).num_releases == 1
    ledgers.record(client_release(1, "run 2"))  # whatever it repeats
    assert ledgers.of(0).num_releases == 2
    with pytest.raises(FedsimError, match=r"round 1 of client 0 was recorded .* another sum"):
        ledgers.record(client_release(1, "run 1", "other data"))
    for _ in range(2):  # drawn anew, and charged each time
        ledgers.record(client_release(2, "run 1", "other data", "system"))
    assert [entry.attempt for entry in ledgers.of(0).entries] == [0, 0, 0, 1]


def test_a_line_without_a_sum_of_an_older_fedsim_is_not_taken_for_the_same(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path, 2)
    ledger = Ledger(path, delta=DELTA)
    with pytest.raises(FedsimError, match=r"fedsim's version have changed"):
        ledger.record(Entry(**release(2), sum=ledger.fingerprint([b"a sum"])))


def test_a_line_cut_behind_its_hash_is_completed_whatever_its_sum_was(tmp_path):
    """It was not whole, so nothing had been released."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, delta=DELTA)
    for t in (1, 2):
        ledger.record(Entry(**release(t), sum=ledger.fingerprint([b"%d" % t])))
    data = path.read_bytes()
    for cut in range(data.rindex(b'"hash"') + 8, len(data), 7):
        path.write_bytes(data[:cut])
        ledger = Ledger(path, delta=DELTA)
        assert ledger.epsilon() == pytest.approx(spent(2), rel=1e-12)
        assert ledger.record(Entry(**release(2), sum=ledger.fingerprint([b"edited"])))
        assert ledger.epsilon() == spent(2)
