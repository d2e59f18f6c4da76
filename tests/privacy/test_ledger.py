from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import stat
from collections import Counter

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from ledger_helpers import COHORT, DELTA, ZEROED, release, spent, written

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
from fedsim.privacy.assumptions import DECLARED_SENTENCES
from fedsim.privacy.ledger import GENESIS, chained_line


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
    releases = [json.loads(line)["entry"]["releases"] for line in lines]
    events = [release["event"] for of_line in releases for release in of_line]
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
    ledger.record(Entry(**release(7)))
    header, line = (json.loads(line)["entry"] for line in path.read_bytes().splitlines())
    assert (header["kind"], header["version"], header["level"]) == ("ledger", 1, "client")
    assert (header["keeps"], header["client"], header["split"]) == ("log", None, {})
    (line,) = line["releases"]
    assert (line["round"], line["through"], line["clients"]) == (7, None, None)
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


@given(st.data())
def test_no_flipped_byte_that_the_hash_covers_goes_unnoticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    content = bytearray(written(path, 3))
    # Without the last newline, without which a line was never written to its end.
    at = data.draw(st.integers(0, len(content) - 2))
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
            lines[0],
            lines[1].replace(b'"noise-multiplier":1.5', b'"noise-multiplier":9.5'),
        ],
        lambda lines: [lines[0], b"", *lines[1:]],
        lambda lines: [lines[0], b"{}", *lines[1:]],
        lambda lines: [lines[0], b"\xff\xfe", *lines[1:]],
        lambda lines: [lines[0], b'{"entry":' + b"[" * 9999 + b',"hash":"', *lines[1:]],
    ],
    ids=["deleted", "swapped", "doubled", "cut", "edited", "blank", "empty", "binary", "deep"],
)
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
        ledger.record(Entry(**{**release(t), "entropy": "system"}))
    data = path.read_bytes()
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:2]))
    with pytest.raises(FedsimError, match="cut off while it was in use"):
        ledger.record(Entry(**{**release(3), "entropy": "system"}))
    path.unlink()
    with pytest.raises(FedsimError, match="removed while it was in use"):
        ledger.record(Entry(**{**release(3), "entropy": "system"}))


def test_a_chain_proves_nothing_against_forgers_but_its_head_does(path):
    """What the module says of an unsigned chain: kept here so that nobody believes more."""
    written(path, 3)
    ledger = Ledger(path)
    end = ledger.position
    forged, previous = [], GENESIS
    for line in path.read_bytes().splitlines():
        entry = {**json.loads(line)["entry"]}
        del entry["previous"]
        for released in entry.get("releases", ()):
            released["event"]["noise-multiplier"] = 99.0
        text, previous = chained_line(entry, previous)
        forged.append(text)
    path.write_bytes(b"".join(forged))
    assert Ledger(path, delta=DELTA).epsilon() < spent(3)
    assert Ledger(path).position != end
    with pytest.raises(FedsimError, match="does not continue the checkpoint's"):
        Ledger(path).check_extends(end)


def test_a_ledger_is_restored_where_it_continues_a_checkpoint(path):
    written(path, 2)
    end = Ledger(path).position
    assert end.lines == 3
    ledger = Ledger(path)
    ledger.record(Entry(**release(3)))
    ledger.check_extends(end)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    with pytest.raises(FedsimError, match="does not continue the checkpoint's, which had 3 lines"):
        Ledger(path).check_extends(end)


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
        ledger.record(Entry(**release(rounds)))
        assert ledger.epsilon() <= 2.0
    assert spent(rounds) <= 2.0 < spent(rounds + 1)
    assert ledger.would_exceed(Entry(**release(rounds)))


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
    ledger = Ledger(delta=DELTA, max_epsilon=2.0, declared_event=Event.of(cohort, 1.5))
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
    with pytest.raises(FedsimError, match="declared_event="):
        _ = undeclared.config
    everybody = Ledger(delta=DELTA, declared_event=Event.of(FullCohort(480), 1.5))
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

    ledger = Ledger(delta=DELTA, declared_event=Event.of(cohort, 1.5))
    ledger.compose(GaussianPrivacyEvent(1.5, sample_size=size, population_size=1000))
    assert ledger.entries[0].event.law == cohort.law()
    if size < 1000:
        larger = GaussianPrivacyEvent(1.5, sample_size=size + 1, population_size=1000)
        with pytest.raises(FedsimError, match="declare the law of the samples"):
            ledger.would_exceed(larger, 5.0)


def test_at_example_level_add_remove_is_refused():
    with pytest.raises(FedsimError, match="must be zero-out"):
        Ledger().record(Entry(event=Event.of(COHORT, 1.5), level="example"))
