"""What holds of every ledger: both kinds, both levels, killed anywhere, shared by processes."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_helpers import COHORT, DELTA, ZEROED, spent

from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.federation.accounting import Accounting
from fedsim.mechanisms import Clipping
from fedsim.privacy import Accountant, Budget, Entry, Event, Ledger, durable
from fedsim.privacy.laws import Poisson
from fedsim.privacy.ledger import LedgerPosition, OverBudgetError
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness

FORK = multiprocessing.get_context("fork")
EVENT = Event.of(COHORT, 1.5)


def of_server(round: int, run: str = "a", entropy: str = "config") -> list[Entry]:
    return [Entry(round=round, event=EVENT, entropy=entropy, run=run)]


def of_examples(round: int, run: str = "a", entropy: str = "config") -> list[Entry]:
    """Two sizes of clients, one of which is in every other round only."""
    groups = [(0, 3)] if round % 2 else [(0, 3), (1, 2)]
    return [
        Entry(
            round=round,
            level="example",
            clients=clients,
            event=Event(noise_multiplier=1.5 + len(clients), law=ZEROED.law),
            entropy=entropy,
            run=run,
        )
        for clients in groups
    ]


LEVELS = pytest.mark.parametrize("entries_of", [of_server, of_examples])
ENTROPIES = pytest.mark.parametrize("entropy", ["config", "system"])


def written(path: Path, entries_of, rounds: int, entropy: str = "config") -> Ledger:
    ledger = Ledger(path, delta=DELTA)
    for number in range(1, rounds + 1):
        ledger.record(*entries_of(number, entropy=entropy))
    return ledger


@LEVELS
@ENTROPIES
def test_cut_at_any_byte_it_holds_its_complete_lines_and_goes_on(
    tmp_path, entries_of, entropy, monkeypatch
):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    path = tmp_path / "ledger.jsonl"
    whole = written(path, entries_of, 3, entropy)
    data, step = path.read_bytes(), 1 if entries_of is of_server else 7
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(0, len(data) + 1, step):
        path.write_bytes(data[:cut])
        complete = sum(end <= cut for end in ends)
        if not complete:  # the header comes to be there whole, with the first line
            with pytest.raises(FedsimError, match=r"is cut off|is empty"):
                Ledger.read(path)
            continue
        read = Ledger.read(path, delta=DELTA)
        assert read.heads == whole.heads[:complete]
        assert path.read_bytes() == data[:cut]  # a reader changes nothing
        end = Ledger.read(path).position
        for more in (complete, complete + 1):  # what a checkpoint or manifest may count
            assert (
                read.extends(LedgerPosition(whole.heads[more - 1 : more][0], more))
                == (more == complete)
                if more <= len(ends)
                else True
            )
        writer = Ledger(path, delta=DELTA)
        for number in range(complete, 4):
            writer.record(*entries_of(number, entropy=entropy))
        assert Ledger.read(path).heads == whole.heads == writer.heads
        assert end.lines == complete


class Killed(BaseException):
    """Stands for SIGKILL."""


class Deaths:
    """Ends the process at one of the calls by which a ledger writes, half a line included."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.left, self.append = number, durable.append
        for name in ("fsync", "link"):
            patch.setattr(os, name, self.killable(getattr(os, name)))
        patch.setattr(durable, "append", self.torn)

    def tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def killable(self, call):
        def killed(*args):
            self.tick()
            result = call(*args)
            self.tick()
            return result

        return killed

    def torn(self, file, data: bytes) -> None:
        if self.left <= 1:  # dies in the middle of the line
            file.seek(0, os.SEEK_END)
            file.write(data[: len(data) // 2])
            file.flush()
            self.left = 0
        self.tick()
        self.append(file, data)


def released_before_death(path: Path, entries_of, entropy: str, number: int) -> tuple[int, bool]:
    """How many of three rounds were released, and whether the process lived."""
    with pytest.MonkeyPatch.context() as patch:
        Deaths(patch, number)
        released = 0
        try:
            ledger = Ledger(path, delta=DELTA)
            for round_number in (1, 2, 3):
                ledger.record(*entries_of(round_number, entropy=entropy))
                released = round_number
        except Killed:
            return released, False
    return released, True


@LEVELS
@ENTROPIES
def test_killed_at_any_call_no_release_is_without_its_line(tmp_path, entries_of, entropy):
    lived, number = False, 0
    while not lived:
        path = tmp_path / f"{number}.jsonl"
        released, lived = released_before_death(path, entries_of, entropy, number)
        lines = {entry.round for entry in Ledger.read(path).entries} if path.exists() else set()
        assert lines >= {*range(1, released + 1)}
        Ledger(path).record(*entries_of(9, entropy=entropy))
        assert Ledger.read(path).entries[-1].round == 9
        number += 1
    assert number > 8


@given(
    kinds=st.lists(st.sampled_from("abcr"), min_size=1, max_size=14),
    entropy=st.sampled_from(["config", "system"]),
)
@settings(deadline=None)
def test_a_log_is_cut_by_its_own_run_and_evidence_only_grows(tmp_path_factory, kinds, entropy):
    """Runs a, b and c record in turns; r: a is killed, and resumes from its last checkpoint."""
    path = tmp_path_factory.mktemp("shared") / "ledger.jsonl"
    ledgers = {run: Ledger(path, delta=DELTA) for run in "abc"}
    rounds, checkpoint, before = dict.fromkeys("abc", 0), (LedgerPosition(), 0), b""
    for kind in kinds:
        if kind == "r":
            ledgers["a"] = Ledger(path, delta=DELTA)
            lines = list(ledgers["a"].lines)
            ledgers["a"].resume(checkpoint[0], "a")
            kept = ledgers["a"].lines
            assert kept == lines[: len(kept)]
            if entropy == "system":
                assert kept == lines
            else:  # a suffix of its own lines is gone, and nothing else
                assert all(b'"run":"a"' in line for line in lines[max(len(kept), 1) :])
                later = lines[max(checkpoint[0].lines, 1) :]
                assert (
                    len(kept) > len(lines) - len(later)
                    or not later
                    or (all(b'"run":"a"' in line for line in later))
                )
            rounds["a"] = checkpoint[1]
            continue
        rounds[kind] += 1
        ledgers[kind].record(*of_server(rounds[kind], kind, entropy))
        if kind == "a" and rounds["a"] % 2:
            checkpoint = (ledgers["a"].position, rounds["a"])
        data = path.read_bytes()
        if entropy == "system":
            assert data.startswith(before)
        before = data
    read = Ledger.read(path, delta=DELTA) if path.exists() else Ledger(delta=DELTA)
    # Whatever was cut, each round that a run is in has a line.
    for run, made in rounds.items():
        assert {e.round for e in read.entries if e.run == run} >= set(range(1, made + 1))
    assert read.epsilon() >= spent(sum(rounds.values())) * (1 - 1e-12)


@LEVELS
def test_equal_runs_have_equal_heads_and_a_log_killed_and_resumed_too(
    tmp_path, entries_of, monkeypatch
):
    one = written(tmp_path / "one", entries_of, 5)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    other = Ledger(tmp_path / "two")
    for number in (1, 2, 3, 4):
        other.record(*entries_of(number, run="another id"))
        if number == 2:
            checkpoint = other.position
    resumed = Ledger(tmp_path / "two")
    resumed.resume(checkpoint, "another id")
    assert len(resumed.lines) == 3
    for number in (3, 4, 5):
        resumed.record(*entries_of(number, run="another id"))
    assert Ledger.read(tmp_path / "two").heads == one.heads
    # From the start, where there is no checkpoint.
    resumed.resume(LedgerPosition(), "another id")
    for number in (1, 2, 3, 4, 5):
        resumed.record(*entries_of(number, run="another id"))
    assert Ledger.read(tmp_path / "two").heads == one.heads


def _spend(path: Path, budget: Budget, run: str, start, entries_of) -> None:
    ledger = Ledger(path, delta=DELTA)
    start.wait()
    for number in range(1, 8):
        try:
            ledger.record(*entries_of(number, run, "system"), budget=budget)
        except BudgetSpentError:
            break


@LEVELS
def test_three_processes_never_spend_more_than_one_budget(tmp_path, entries_of):
    """Three processes spent 3.709 of 2.6 where each checked, and then wrote."""
    path, event = tmp_path / "ledger.jsonl", entries_of(1)[0].event
    budget = Budget(Accountant([event] * 7).epsilon(DELTA), DELTA)
    start = FORK.Barrier(3)
    processes = [
        FORK.Process(target=_spend, args=(path, budget, str(k), start, entries_of))
        for k in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    ledger = Ledger.read(path, delta=DELTA)
    assert ledger.histories[entries_of(1)[0].owners[0]].counts[event] == 7
    assert ledger.epsilon() == budget.epsilon


def test_kinds_levels_and_splits_are_never_mixed(tmp_path):
    path = tmp_path / "log.jsonl"
    split = {"population": 4, "partition.name": "iid", "seed": 1}
    Ledger(path, split=split).record(*of_server(1))
    with pytest.raises(FedsimError, match=r"is a log of simulated releases .* never mixed"):
        Ledger(path).record(*of_server(1, entropy="system"))
    with pytest.raises(FedsimError, match="never mixed"):
        Ledger(path, keeps="evidence")
    with pytest.raises(FedsimError, match="guarantees of different levels do not add up"):
        Ledger(path).record(*of_examples(1))
    for key, value in (("population", 5), ("seed", 2), ("data.name", "mine")):
        with pytest.raises(FedsimError, match=rf"^{key} = .*; it must be .*as in ledger"):
            Ledger(path, keeps="log", split={**split, key: value})
    assert Ledger.read(path).header.split == split
    # A node keeps evidence, whatever the server says of its entropy, of its own client.
    node = Ledger(tmp_path / "client-7.jsonl", keeps="evidence", client=7)
    node.record(*of_examples(1))
    with pytest.raises(FedsimError, match="is that of client 7, and not of client 3"):
        Ledger(tmp_path / "client-7.jsonl", keeps="evidence", client=3)


def test_a_budget_names_the_clients_that_it_does_not_allow(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    for number in (1, 2, 3):
        ledger.record(*of_examples(number, entropy="system"))
    event = of_examples(1)[0].event
    budget = Budget(Accountant([event] * 3).epsilon(DELTA), DELTA, "client.noise.max-epsilon")
    data = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(OverBudgetError, match=r"client\.noise\.max-epsilon = .* of client 0 at"):
        ledger.record(*of_examples(4, entropy="system"), budget=budget)
    assert (tmp_path / "ledger.jsonl").read_bytes() == data
    assert ledger.owners_over_budget(budget, of_examples(4)) == (0, 3)


def test_a_plan_is_recorded_for_as_many_rounds_as_its_budget_affords(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    ledger.record(*of_server(1, "another run"))
    budget = Budget(spent(8) * 1.0001, DELTA)

    def entries(rounds: int) -> list[Entry]:
        return [
            Entry(round=1, through=rounds, event=EVENT.times(rounds), entropy="config", run="a")
        ]

    ledger.record_due(lambda: ledger.affordable_entries(entries, 20, budget), budget)
    assert ledger.progress("a") == (1, 7)
    assert ledger.epsilon() == pytest.approx(spent(8), rel=1e-12)
    with pytest.raises(BudgetSpentError):
        ledger.record_due(lambda: ledger.affordable_entries(entries, 20, budget), budget)
    assert ledger.affordable_entries(entries, 3)[-1].through == 3
    with pytest.raises(FedsimError, match="counts 0, and no earlier line charges the plan"):
        ledger.record(Entry(round=2, event=Event.of(COHORT, 2.0).times(0), entropy="config"))


def test_the_worst_client_is_stated_and_owners_add_up_by_themselves(tmp_path):
    ledger = written(tmp_path / "ledger.jsonl", of_examples, 4)
    both, even = of_examples(2)
    worst = Accountant([both.event.times(4)]).epsilon(DELTA)
    assert ledger.epsilon() == worst == ledger.statement().epsilon
    assert ledger.histories[1].accountant.epsilon(DELTA) == (
        Accountant([even.event.times(2)]).epsilon(DELTA)
    )
    assert "for the client that has spent most" in str(ledger.statement())
    again = Ledger.read(tmp_path / "ledger.jsonl", delta=DELTA)
    assert again.statement().to_dict() == ledger.statement().to_dict()


class Latecomer(Ledger):
    """A ledger to which another process adds a line at the last moment before the lock."""

    other = staticmethod(lambda: None)

    def _locked(self):
        other, self.other = self.other, lambda: None
        other()
        return super()._locked()


@pytest.mark.parametrize("whose", ["fedsim's strategies", "loops of others"])
def test_what_a_round_costs_is_seen_in_the_file_that_its_line_enters(tmp_path, whose):
    sampler = Poisson(0.1, 100)
    plan = ReleasePlan(
        level="client", sampler=sampler, mechanism=Clipping(1.0), noise=Independent(2.0), rounds=3,
        may_stop=True,
    )  # fmt: skip

    def recorder(kind: type[Ledger]):
        ledger = kind(tmp_path / "ledger.jsonl", delta=DELTA, keeps="evidence")
        if whose == "loops of others":
            return ledger, lambda number: ledger.release(plan, number).__enter__()
        accounting = Accounting(plan, DELTA, None, ledger, Randomness(None), run="a")
        return ledger, lambda number: accounting.record(number, 1.0)

    (_, first), (late, second) = recorder(Ledger), recorder(Latecomer)
    first(1)
    late.other = lambda: first(2)
    second(2)
    counts = [entry.event.count for entry in Ledger.read(tmp_path / "ledger.jsonl").entries]
    assert counts == [3, 0, 1]
