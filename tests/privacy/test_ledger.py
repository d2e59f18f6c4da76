from __future__ import annotations

import inspect
import json
import math
from collections import Counter

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Event, Ledger

COHORT = PoissonCohort(0.2, 479)
DELTA = 1e-5


def release(round: int, z: float = 1.5) -> dict[str, object]:
    return {
        "round": round,
        "event": COHORT.event(z),
        "clip_norm": 1.0,
        "mechanism": "normalization",
        "entropy": "config",
        "draws": "seed-1",
    }


def written(path, rounds: int = 3) -> bytes:
    ledger = Ledger(path, delta=DELTA)
    for t in range(1, rounds + 1):
        ledger.record(**release(t))
    return path.read_bytes()


def spent(rounds: int, z: float = 1.5) -> float:
    return Accountant([COHORT.event(z, count=rounds)]).epsilon(DELTA)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_ledger_alone_recomputes_epsilon_as_dp_accounting_does(path):
    ledger = Ledger(path)
    for t in range(20):
        ledger.record(round=t, event=COHORT.event(1.5))
    for t in range(10):
        ledger.record(round=20 + t, event=COHORT.event(2.0))
    theirs = PLDAccountant(value_discretization_interval=1e-4)
    # From the file's own text, by somebody who does not know fedsim.
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    pairs = Counter((event["rate"], event["noise-multiplier"]) for event in events)
    for (rate, z), count in pairs.items():
        gaussian = dp_accounting.GaussianDpEvent(z)
        theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), count)
    assert Ledger.read(path).epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-4)


def test_the_line_is_on_disk_when_record_returns_and_says_everything(path):
    ledger = Ledger(path, delta=DELTA)
    assert not path.exists()
    assert ledger.record(**release(7))
    line = json.loads(path.read_bytes())
    assert line["round"] == 7
    assert (line["level"], line["entropy"]) == ("client", "config")
    assert (line["mechanism"], line["clip-norm"]) == ("normalization", 1.0)
    event = line["event"]
    assert (event["sampler"], event["adjacency"]) == ("poisson", "add-remove")
    assert (event["population"], event["noise-multiplier"]) == (479, 1.5)


def test_the_disk_is_synced_before_record_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(path.read_bytes()))
    Ledger(path).record(**release(1))
    assert synced
    assert synced[0] == path.read_bytes()


def test_a_ledger_goes_on_where_it_stopped(path):
    written(path, 3)
    again = Ledger(path, delta=DELTA)
    again.record(**release(4))
    assert again.epsilon() == spent(4)
    assert Ledger(path, delta=DELTA).epsilon() == spent(4)
    assert Ledger(path).heads[:-1] == again.heads[:3]


def test_a_round_run_again_with_the_same_draws_is_charged_once(path):
    written(path, 3)
    ledger = Ledger(path, delta=DELTA)
    for t in (2, 3):
        assert not ledger.record(**release(t))
    assert ledger.record(**release(4))
    assert ledger.epsilon() == spent(4)
    # Another run's draws, or another event, are another release.
    assert ledger.record(**{**release(4), "draws": "seed-2"})
    assert ledger.record(**{**release(4), "event": COHORT.event(1.6)})


def test_a_round_run_again_with_system_entropy_is_charged_again():
    ledger = Ledger(delta=DELTA)
    for _ in range(2):
        assert ledger.record(round=1, event=COHORT.event(1.5), entropy="system", draws="x")
    for _ in range(2):
        assert ledger.record(round=1, event=COHORT.event(1.5), entropy="config")
    assert ledger.epsilon() == spent(4)


@pytest.mark.parametrize("declared", [None, COHORT.event(1.5)])
def test_truncated_at_any_byte_a_ledger_never_counts_less(path, declared, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    data = written(path, 2)
    ends = [0, *(i + 1 for i, byte in enumerate(data) if byte == ord("\n"))]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends) - 1
        torn = cut not in ends
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
    for cut in range(ends[1] + 1, ends[2], 3):
        path.write_bytes(data[:cut])
        ledger = Ledger(path, delta=DELTA, declared=COHORT.event(1.5))
        for t in range(2, 5):
            planned = COHORT.event(1.5)
            assert not ledger.would_exceed(planned, spent(4), round=t, draws="seed-1")
            ledger.record(**release(t))
        for again in (ledger, Ledger(path, delta=DELTA)):
            assert again.epsilon() == spent(4)
            assert [entry.round for entry in again.charged] == [1, 2, 3, 4]


def test_a_torn_line_of_another_run_stays_charged(path):
    data = written(path, 2)
    path.write_bytes(data[:-20])
    ledger = Ledger(path, delta=DELTA)
    ledger.record(**{**release(2), "draws": "seed-2"})
    assert ledger.epsilon() == spent(3)
    path.write_bytes(data[:-20])
    ledger = Ledger(path, delta=DELTA)
    ledger.record(**{**release(2), "entropy": "system"})
    assert ledger.epsilon() == spent(3)
    assert Ledger(path, delta=DELTA).epsilon() == spent(3)


def test_a_torn_line_costs_at_least_any_event_known(path):
    ledger = Ledger(path, delta=DELTA)
    ledger.record(round=1, event=PoissonCohort(0.1, 100).event(1.0))
    ledger.record(round=2, event=PoissonCohort(0.3, 100).event(2.0, count=2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"rel')
    torn = Ledger(path, delta=DELTA).entries[-1].event
    assert (torn.rate, torn.noise_multiplier, torn.count) == (0.3, 1.0, 2)
    # Of a line without any event known, nothing can be said.
    path.write_bytes(b'{"kind":"rel')
    assert Ledger(path, delta=DELTA).epsilon() == math.inf


@given(st.data())
def test_no_flipped_byte_goes_unnoticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    content = bytearray(written(path, 3))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    if at == len(content) - 1:  # the last newline: a torn line, charged
        assert Ledger.read(path, delta=DELTA).epsilon() >= spent(3)
        return
    with pytest.raises(FedsimError, match=r"ledger .*line"):
        Ledger(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: lines[1:],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[0], *lines[1:]],
        lambda lines: [lines[0][:-30], *lines[1:]],
        lambda lines: [lines[0].replace(b'"noise-multiplier":1.5', b'"noise-multiplier":9.5')],
        lambda lines: [b"", *lines],
        lambda lines: [b"{}", *lines],
        lambda lines: [b"\xff\xfe", *lines],
    ],
    ids=["deleted", "first", "swapped", "doubled", "cut", "edited", "blank", "empty", "binary"],
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
        other.record(**release(t))
    theirs = (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], theirs[1], lines[2]]))
    with pytest.raises(FedsimError, match="line 2: it does not follow"):
        Ledger(path)


def test_two_writers_do_not_fork_the_chain(path):
    written(path, 1)
    first, second = Ledger(path), Ledger(path)
    first.record(**release(2))
    with pytest.raises(FedsimError, match="another process"):
        second.record(**release(3))
    assert Ledger(path).num_releases == 2


def test_reading_neither_needs_nor_allows_writing(path, tmp_path):
    written(path, 2)
    with pytest.raises(FedsimError, match="reading only"):
        Ledger.read(path).record(**release(3))
    with pytest.raises(FedsimError, match="there is no ledger"):
        Ledger.read(tmp_path / "none.jsonl")


def test_levels_and_adjacencies_do_not_mix(path):
    ledger = Ledger(path, delta=DELTA)
    ledger.record(**release(1))
    before = path.read_bytes()
    with pytest.raises(FedsimError, match="level is 'example'"):
        ledger.record(**{**release(2), "level": "example"})
    with pytest.raises(FedsimError, match="replace-one"):
        ledger.record(**{**release(2), "event": FixedCohort(5, 50).event(1.5)})
    assert path.read_bytes() == before


def test_a_budget_is_asked_before_and_not_spent_by_asking(path):
    event = COHORT.event(1.5)
    ledger = Ledger(path, delta=DELTA, max_epsilon=2.0)
    rounds = 0
    while not ledger.would_exceed(event):
        rounds += 1
        assert ledger.record(**release(rounds))
        assert ledger.epsilon() <= 2.0
    assert spent(rounds) <= 2.0 < spent(rounds + 1)
    # A round that stands there already costs nothing more.
    assert not ledger.would_exceed(event, round=rounds, draws="seed-1")


def test_a_release_without_guarantee_is_infinite_and_json_safe(path):
    ledger = Ledger(path, delta=DELTA)
    ledger.record(round=1, event=Event(noise_multiplier=0.0), clip_norm=math.inf)
    ledger.record(round=2, event=COHORT.event(1.0, sides={"loss": math.inf}))
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    again = Ledger.read(path, delta=DELTA)
    assert again.epsilon() == math.inf
    assert again.entries == ledger.entries
    said = again.statement()
    assert not said.private
    assert "No privacy guarantee" in str(said)
    assert json.loads(json.dumps(said.to_dict(), allow_nan=False))["epsilon"] == "inf"


def test_the_statement_names_what_it_covers(path):
    ledger = Ledger(path, delta=DELTA)
    assert "Nothing was released" in str(ledger.statement())
    for t in range(3):
        ledger.record(**release(t))
    said = str(ledger.statement())
    for part in (
        "sequence of global models",
        "client level",
        "add-remove",
        "Poisson",
        "3 releases",
        "seed",
        "Not covered: metrics",
        "cohort sizes",
        str(path),
    ):
        assert part in said, part
    example = Ledger(delta=DELTA)
    example.record(event=FixedCohort(5, 50).event(4.0), level="example", entropy="system")
    said = str(example.statement())
    for part in ("example level", "replace-one", "memory only", "Poisson cohorts of the same"):
        assert part in said, part


def test_a_checkpoint_restores_a_ledger_in_memory_and_checks_one_on_disk(path):
    written(path, 3)
    on_disk, in_memory = Ledger(path, delta=DELTA), Ledger(delta=DELTA)
    state = json.loads(json.dumps(on_disk.state_dict()))
    in_memory.load_state_dict(state)
    assert in_memory.entries == on_disk.entries
    assert in_memory.head == on_disk.head
    on_disk.record(**release(4))
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
    ledger = Ledger(delta=DELTA, max_epsilon=2.0, declared=cohort.event(1.5))
    ledger.compose(theirs, 10)
    assert ledger.epsilon() == spent(10)
    assert ledger.would_exceed(theirs, 1e-3)
    assert ledger.config.sampling_method is SamplingMethod.POISSON
    assert ledger.config.population_size == 480
    told = ledger.get_privacy_spent()
    assert (told.epsilon, told.num_releases) == (spent(10), 10)
    assert ledger.get_delta(told.epsilon) == pytest.approx(DELTA, rel=1e-6)
    # Undeclared, a partial sample is what Flower draws: of a fixed size.
    undeclared = Ledger(delta=DELTA)
    undeclared.compose(theirs)
    assert undeclared.entries[0].event == FixedCohort(96, 480).event(1.5)
    with pytest.raises(FedsimError, match="declared="):
        _ = undeclared.config
    everybody = Ledger(delta=DELTA, declared=FullCohort(480).event(1.5))
    assert everybody.config.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    assert everybody.config.sampling_method is SamplingMethod.NO_AMPLIFICATION
