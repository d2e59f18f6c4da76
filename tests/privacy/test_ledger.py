from __future__ import annotations

import contextlib
import errno
import inspect
import json
import math
import os
import stat
from collections import Counter

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from ledger_helpers import COHORT, DELTA, ZEROED, release, spent, written
from slow_cases import slow_but

from fedsim.cohorts import (
    AllocationCohort,
    CyclicCohort,
    FixedCohort,
    FullCohort,
    PoissonCohort,
    SeparatedCohort,
)
from fedsim.errors import FedsimError
from fedsim.privacy import Budget, Entry, Event, Ledger
from fedsim.privacy.adversary import DECLARED_SENTENCES
from fedsim.privacy.ledger_lines import GENESIS, sealed_line


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_ledger_alone_recomputes_epsilon_as_dp_accounting_does(path):
    ledger = Ledger(path)
    for t in range(20):
        ledger.record(Entry(round=t, event=Event.of(COHORT, 1.5)))
    for t in range(10):
        ledger.record(Entry(round=20 + t, event=Event.of(COHORT, 2.0)))
    theirs = PLDAccountant(value_discretization_interval=1e-4)
    # From the file's own text, by somebody who does not know fedsim.
    _, *lines = path.read_text().splitlines()
    events = [json.loads(line)["entry"]["event"] for line in lines]
    pairs = Counter((event["law"]["rate"], event["noise-multiplier"]) for event in events)
    for (rate, z), count in pairs.items():
        gaussian = dp_accounting.GaussianDpEvent(z)
        theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), count)
    assert Ledger.read(path).epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-4)


@pytest.mark.parametrize("lines", [0, 1], ids=["new", "extended"])
def test_an_error_of_writing_names_the_ledger(lines, path, monkeypatch):
    ledger = Ledger(path)
    for t in range(lines):
        ledger.record(Entry(**release(t)))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*ledger\.jsonl'"):
        ledger.record(Entry(**release(lines)))


def test_the_line_is_on_disk_when_record_returns_and_says_everything(path):
    ledger = Ledger(path, delta=DELTA)
    assert not path.exists()
    assert ledger.record(Entry(**release(7)))
    header, line = (json.loads(line)["entry"] for line in path.read_bytes().splitlines())
    assert (header["kind"], header["version"], header["level"]) == ("ledger", 3, "client")
    assert (line["round"], line["release"], line["attempt"]) == (7, "seed-1", 0)
    assert (line["level"], line["entropy"]) == ("client", "config")
    assert (line["mechanism"], line["clip-norm"]) == ("normalization", 1.0)
    event = line["event"]
    assert (event["law"]["name"], event["law"]["adjacency"]) == ("poisson", "add-remove")
    assert (event["law"]["population"], event["noise-multiplier"]) == (479, 1.5)


def test_every_record_is_synced_before_it_returns_and_the_directory_of_a_new_file(
    path, monkeypatch
):
    synced: list[tuple[str, int]] = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append(("directory" if stat.S_ISDIR(status.st_mode) else "file", status.st_size))

    monkeypatch.setattr("os.fsync", fsync)
    ledger = Ledger(path)
    for t in (1, 2, 3):
        synced.clear()
        ledger.record(Entry(**release(t)))
        kinds = [kind for kind, _ in synced]
        assert kinds == (["file", "directory"] if t == 1 else ["file"])
        assert synced[0][1] == path.stat().st_size


def test_a_ledger_goes_on_where_it_stopped(path):
    written(path, 3)
    again = Ledger(path, delta=DELTA)
    again.record(Entry(**release(4)))
    assert again.epsilon() == spent(4)
    assert Ledger(path, delta=DELTA).epsilon() == spent(4)
    assert Ledger(path).heads == again.heads
    assert len(again.heads) == 5  # a header and four releases


def test_equal_runs_have_equal_heads_whenever_and_wherever_they_ran(tmp_path, monkeypatch):
    written(tmp_path / "one.jsonl")
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    written(tmp_path / "two.jsonl")
    one, two = (tmp_path / name for name in ("one.jsonl", "two.jsonl"))
    assert one.read_bytes() != two.read_bytes()
    assert Ledger.read(one).heads == Ledger.read(two).heads
    assert '"host":"elsewhere"' in two.read_text()


def test_a_round_run_again_with_the_same_draws_is_charged_once(path):
    written(path, 3)
    ledger = Ledger(path, delta=DELTA)
    for t in (2, 3):
        assert not ledger.record(Entry(**release(t)))
    assert ledger.record(Entry(**release(4)))
    assert ledger.epsilon() == spent(4)
    # Another run's draws, or another event, are another release.
    assert ledger.record(Entry(**{**release(4), "release": "seed-2"}))
    assert ledger.record(Entry(**{**release(4), "event": Event.of(COHORT, 1.6)}))
    assert ledger.record(Entry(**release(4), attempt=1))


def test_a_round_run_again_with_system_entropy_is_charged_again():
    ledger = Ledger(delta=DELTA)
    for _ in range(2):
        assert ledger.record(
            Entry(round=1, event=Event.of(COHORT, 1.5), entropy="system", release="x")
        )
    for _ in range(2):
        assert ledger.record(Entry(round=1, event=Event.of(COHORT, 1.5), entropy="config"))
    assert ledger.epsilon() == spent(4)


def json_ends(data: bytes) -> bool:
    """Whether the last line is torn behind its hash."""
    last = data.split(b"\n")[-1]
    _, found, rest = last.rpartition(b',"hash":"')
    return bool(found) and len(rest) >= 65


@pytest.mark.parametrize("declared", slow_but(1, [None, Event.of(COHORT, 1.5)]))
def test_truncated_at_any_byte_a_ledger_never_counts_less(path, declared, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    data = written(path, 2)
    ends = [0, *(i + 1 for i, byte in enumerate(data) if byte == ord("\n"))]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        if cut < ends[1]:  # the header comes to be there whole, with the first release
            for open_ in (Ledger, Ledger.read):
                with pytest.raises(FedsimError, match=r"is cut off|is empty"):
                    open_(path)
            continue
        whole = sum(end <= cut for end in ends) - 2
        torn = cut not in ends
        if torn and json_ends(data[:cut]):
            whole, torn = whole + 1, False  # all that the hash covers is there
        read = Ledger.read(path, delta=DELTA)
        assert path.read_bytes() == data[:cut]
        assert read.num_releases == whole + torn
        ledger = Ledger(path, delta=DELTA, declared=declared)
        assert ledger.num_releases == whole + torn
        assert ledger.epsilon() >= spent(whole + torn) if whole + torn else ledger.epsilon() == 0
        if torn and (whole or declared):
            assert ledger.epsilon() == pytest.approx(spent(whole + 1), rel=1e-12)
        # Repaired on disk: it opens again, whole, and stays as costly.
        again = Ledger(path, delta=DELTA)
        assert again.epsilon() == ledger.epsilon()
        assert again.entries == ledger.entries


def test_resumed_after_a_torn_line_a_run_ends_as_if_never_stopped(path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    data = written(path, 3)
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(ends[2] + 1, ends[3], 3):
        path.write_bytes(data[:cut])
        ledger = Ledger(path, delta=DELTA, declared=Event.of(COHORT, 1.5))
        for t in range(2, 5):
            planned = Event.of(COHORT, 1.5)
            assert not ledger.would_exceed(
                Entry(event=planned, round=t, release="seed-1", entropy="config"), spent(4)
            )
            ledger.record(Entry(**release(t)))
        for again in (ledger, Ledger(path, delta=DELTA)):
            assert again.epsilon() == spent(4)
            assert [entry.round for entry in again.charged] == [1, 2, 3, 4]


def test_a_torn_line_of_another_run_stays_charged(path):
    data = written(path, 2)
    cut = data.rindex(b'"hash"')
    path.write_bytes(data[:cut])
    ledger = Ledger(path, delta=DELTA)
    ledger.record(Entry(**{**release(2), "release": "seed-2"}))
    assert ledger.epsilon() == spent(3)
    path.write_bytes(data[:cut])
    ledger = Ledger(path, delta=DELTA)
    ledger.record(Entry(**{**release(2), "entropy": "system"}))
    assert ledger.epsilon() == spent(3)
    assert Ledger(path, delta=DELTA).epsilon() == spent(3)


def test_a_torn_line_costs_at_least_any_event_known(path):
    ledger = Ledger(path, delta=DELTA)
    ledger.record(Entry(round=1, event=Event.of(PoissonCohort(0.1, 100), 1.0)))
    ledger.record(Entry(round=2, event=Event.of(PoissonCohort(0.3, 100), 2.0, count=2)))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"entry":{"kind":"rel')
    torn = Ledger(path, delta=DELTA).entries[-1].event
    assert (torn.law.rate, torn.noise_multiplier, torn.count) == (0.3, 1.0, 2)
    # Of a line without any event known, nothing can be said.
    header = whole.splitlines(keepends=True)[0]
    path.write_bytes(header + b'{"entry":{"kind":"rel')
    assert Ledger(path, delta=DELTA).epsilon() == math.inf


@given(st.data())
def test_no_flipped_byte_that_the_hash_covers_goes_unnoticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    content = bytearray(written(path, 3))
    at = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    line_start = content.rfind(b"\n", 0, at) + 1
    beside = content.index(b',"noted":', line_start)
    content[at] ^= flip
    path.write_bytes(content)
    if at >= beside:
        # Time and host are covered by nothing; still nothing is ever counted for less.
        with contextlib.suppress(FedsimError):
            assert Ledger.read(path, delta=DELTA).epsilon() >= spent(3)
        return
    with pytest.raises(FedsimError, match=r"ledger "):
        Ledger(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines[:2], *lines[1:]],
        lambda lines: [*lines[:2], lines[2][:-30], *lines[3:]],
        lambda lines: [
            lines[0], lines[1].replace(b'"noise-multiplier":1.5', b'"noise-multiplier":9.5')
        ],
        lambda lines: [lines[0], b"", *lines[1:]],
        lambda lines: [lines[0], b"{}", *lines[1:]],
        lambda lines: [lines[0], b"\xff\xfe", *lines[1:]],
        lambda lines: [lines[0], b'{"entry":' + b"[" * 9999 + b',"hash":"', *lines[1:]],
    ],
    ids=["deleted", "swapped", "doubled", "cut", "edited", "blank", "empty", "binary", "deep"],
)  # fmt: skip
def test_a_changed_ledger_is_refused(path, change):
    lines = written(path, 4).splitlines()
    path.write_bytes(b"\n".join(change(lines)) + b"\n")
    before = path.read_bytes()
    for open_ in (Ledger, Ledger.read):
        with pytest.raises(FedsimError, match="proves nothing"):
            open_(path)
    assert path.read_bytes() == before


def test_lines_of_one_ledger_do_not_fit_into_another(path, tmp_path):
    lines = written(path, 3).splitlines(keepends=True)
    other = Ledger(tmp_path / "other.jsonl")
    for t in (5, 6, 7):
        other.record(Entry(**release(t)))
    theirs = (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], theirs[2], *lines[3:]]))
    with pytest.raises(FedsimError, match="line 3: it does not follow"):
        Ledger(path)


def test_two_writers_take_turns_on_one_chain(path):
    written(path, 1)
    first, second = Ledger(path, delta=DELTA), Ledger(path, delta=DELTA)
    first.record(Entry(**release(2)))
    second.record(Entry(**release(3)))
    assert not first.record(Entry(**release(3)))
    first.record(Entry(**release(4)))
    assert [entry.round for entry in Ledger(path).entries] == [1, 2, 3, 4]
    assert first.epsilon() == spent(4)
    second.refresh()
    assert second.epsilon() == spent(4)


def test_two_writers_of_a_new_ledger_make_one(path):
    first, second = Ledger(path), Ledger(path)
    first.record(Entry(**release(1)))
    second.record(Entry(**release(2)))
    assert Ledger(path).num_releases == 2


def test_a_ledger_cut_or_removed_while_in_use_is_noticed(path):
    ledger = Ledger(path)
    for t in (1, 2):
        ledger.record(Entry(**release(t)))
    data = path.read_bytes()
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:2]))
    with pytest.raises(FedsimError, match="cut off while it was in use"):
        ledger.record(Entry(**release(3)))
    path.unlink()
    with pytest.raises(FedsimError, match="removed while it was in use"):
        ledger.record(Entry(**release(3)))


def test_a_chain_proves_nothing_against_forgers_but_its_head_does(path):
    """What the module says of an unsigned chain: kept here so that nobody believes more."""
    written(path, 3)
    ledger = Ledger(path)
    end = ledger.end
    forged, previous = [], GENESIS
    for line in path.read_bytes().splitlines():
        entry = {**json.loads(line)["entry"]}
        del entry["previous"]
        if "event" in entry:
            entry["event"]["noise-multiplier"] = 99.0
        text, previous = sealed_line(entry, previous)
        forged.append(text)
    path.write_bytes(b"".join(forged))
    assert Ledger(path, delta=DELTA).epsilon() < spent(3)
    assert Ledger(path).end != end
    with pytest.raises(FedsimError, match="does not continue the checkpoint's"):
        Ledger(path).check_continues(end)


def test_a_ledger_is_restored_where_it_continues_a_checkpoint(path):
    written(path, 2)
    end = Ledger(path).end
    assert end.lines == 3
    ledger = Ledger(path)
    ledger.record(Entry(**release(3)))
    ledger.check_continues(end)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    with pytest.raises(FedsimError, match="does not continue the checkpoint's, which had 3 lines"):
        Ledger(path).check_continues(end)


def test_reading_neither_needs_nor_allows_writing(path, tmp_path):
    written(path, 2)
    with pytest.raises(FedsimError, match="reading only"):
        Ledger.read(path).record(Entry(**release(3)))
    with pytest.raises(FedsimError, match="there is no ledger"):
        Ledger.read(tmp_path / "none.jsonl")


def test_levels_and_adjacencies_do_not_mix(path):
    ledger = Ledger(path, delta=DELTA)
    ledger.record(Entry(**release(1)))
    before = path.read_bytes()
    with pytest.raises(FedsimError, match="level is 'example'"):
        ledger.record(Entry(**{**release(2), "level": "example", "event": ZEROED}))
    with pytest.raises(FedsimError, match="replace-one"):
        ledger.record(Entry(**{**release(2), "event": Event.of(FixedCohort(5, 50), 1.5)}))
    assert path.read_bytes() == before


def test_a_budget_is_asked_before_and_not_spent_by_asking(path):
    event = Event.of(COHORT, 1.5)
    ledger = Ledger(path, delta=DELTA, max_epsilon=2.0)
    rounds = 0
    while not ledger.would_exceed(event):
        rounds += 1
        assert ledger.record(Entry(**release(rounds)))
        assert ledger.epsilon() <= 2.0
    assert spent(rounds) <= 2.0 < spent(rounds + 1)
    # A round that stands there already costs nothing more.
    names = {"round": rounds, "release": "seed-1"}
    assert not ledger.would_exceed(Entry(event=event, entropy="config", **names))
    assert ledger.would_exceed(Entry(event=event, entropy="system", **names))


def test_an_entry_that_is_released_several_times_is_asked_about_as_its_event_is():
    ledger, event = Ledger(delta=DELTA), Event.of(COHORT, 1.5)
    for line in (event, Entry(event=event)):
        assert not ledger.would_exceed(line, 1.01 * spent(2), count=2)
        assert ledger.would_exceed(line, 1.01 * spent(2), count=3)


def test_of_a_budget_and_a_largest_epsilon_only_one_is_given():
    ledger, event = Ledger(delta=DELTA), Event.of(COHORT, 1.5)
    assert ledger.would_exceed(event, 1e-3)
    assert not ledger.would_exceed(event, budget=Budget(10.0, DELTA))
    with pytest.raises(FedsimError, match=r"max_epsilon is 0\.001 beside a budget"):
        ledger.would_exceed(event, 1e-3, budget=Budget(10.0, DELTA))


def test_a_checkpoint_restores_a_ledger_in_memory_and_checks_one_on_disk(path):
    written(path, 3)
    on_disk, in_memory = Ledger(path, delta=DELTA), Ledger(delta=DELTA)
    state = json.loads(json.dumps(on_disk.state_dict()))
    in_memory.load_state_dict(state)
    assert in_memory.entries == on_disk.entries
    assert in_memory.head == on_disk.head
    on_disk.record(Entry(**release(4)))
    on_disk.load_state_dict(state)  # the file is ahead, and stays charged
    assert on_disk.epsilon() == spent(4)
    path.unlink()
    with pytest.raises(FedsimError, match="does not continue"):
        Ledger(path).load_state_dict(state)


def test_it_satisfies_flowers_accountant_protocol():
    from flwr.serverapp import PrivacyAccountant

    members = [name for name in vars(PrivacyAccountant) if not name.startswith("_")]
    assert len(members) >= 9
    for name in members:
        theirs, ours = vars(PrivacyAccountant)[name], inspect.getattr_static(Ledger, name)
        if isinstance(theirs, property):
            assert isinstance(ours, property), name
            continue
        wanted = list(inspect.signature(theirs).parameters.values())
        given_ = list(inspect.signature(ours).parameters.values())
        assert [p.name for p in given_[: len(wanted)]] == [p.name for p in wanted], name
        assert [p.default for p in given_[: len(wanted)]] == [p.default for p in wanted], name
        extra = given_[len(wanted) :]
        assert all(p.default is not p.empty for p in extra), name


def test_flowers_events_are_accounted_for_by_the_declared_sampler():
    from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, SamplingMethod

    theirs = GaussianPrivacyEvent(noise_multiplier=1.5, sample_size=96, population_size=480)
    cohort = PoissonCohort(0.2, 480)
    ledger = Ledger(delta=DELTA, max_epsilon=2.0, declared=Event.of(cohort, 1.5))
    ledger.compose(theirs, 10)
    assert ledger.epsilon() == spent(10)
    assert ledger.would_exceed(theirs, 1e-3)
    assert ledger.config.sampling_method is SamplingMethod.POISSON
    assert ledger.config.population_size == 480
    told = ledger.get_privacy_spent()
    assert (told.epsilon, told.num_releases) == (spent(10), 10)
    assert ledger.get_delta(told.epsilon) == pytest.approx(DELTA, rel=1e-6)
    # What really draws is not seen here.
    assert DECLARED_SENTENCES["sampler"] in ledger.statement().sentences()
    # Undeclared, a partial sample is what Flower draws: of a fixed size.
    undeclared = Ledger(delta=DELTA)
    undeclared.compose(theirs)
    assert DECLARED_SENTENCES["sampler"] not in undeclared.statement().sentences()
    assert undeclared.entries[0].event == Event.of(FixedCohort(96, 480), 1.5)
    with pytest.raises(FedsimError, match="declared="):
        _ = undeclared.config
    everybody = Ledger(delta=DELTA, declared=Event.of(FullCohort(480), 1.5))
    assert everybody.config.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    assert everybody.config.sampling_method is SamplingMethod.NO_AMPLIFICATION


@pytest.mark.parametrize(
    ("cohort", "size"),
    [
        (CyclicCohort(10, 0.5, 1000), 50),
        (AllocationCohort(2, 10, population=1000), 200),
        (SeparatedCohort(5, 0.5, 1000), 1000),
        (FullCohort(1000), 1000),
    ],
)
def test_flowers_samples_may_not_be_larger_than_the_declared_law_covers(cohort, size):
    from flwr.serverapp import GaussianPrivacyEvent

    ledger = Ledger(delta=DELTA, declared=Event.of(cohort, 1.5))
    ledger.compose(GaussianPrivacyEvent(1.5, sample_size=size, population_size=1000))
    assert ledger.entries[0].event.law == cohort.law()
    if size < 1000:
        larger = GaussianPrivacyEvent(1.5, sample_size=size + 1, population_size=1000)
        with pytest.raises(FedsimError, match="declare the law of the samples"):
            ledger.would_exceed(larger, 5.0)


def test_at_example_level_add_remove_is_refused():
    with pytest.raises(FedsimError, match="must be zero-out"):
        Ledger().record(Entry(event=Event.of(COHORT, 1.5), level="example"))


def test_a_clients_release_is_the_same_only_under_its_fingerprint():
    ledger = Ledger(delta=DELTA)
    names = {"level": "example", "entropy": "config", "release": "r", "client": 3, "round": 1}
    for _ in range(2):
        assert ledger.record(Entry(event=ZEROED, **names))  # nobody vouches for its data
    assert ledger.record(Entry(event=ZEROED, fingerprint="a", **names))
    assert not ledger.record(Entry(event=ZEROED, fingerprint="a", **names))
    assert ledger.record(Entry(event=ZEROED, fingerprint="b", **names))
    assert ledger.num_releases == 4
