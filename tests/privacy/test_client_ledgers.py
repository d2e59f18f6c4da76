from __future__ import annotations

import stat

import pytest

from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, ClientLedgers, Entry, Event, Ledger
from fedsim.privacy.digest import Fingerprints
from fedsim.privacy.laws import PoissonLaw

DELTA = 1e-5


def event(rate: float, count: int = 1) -> Event:
    return Event(noise_multiplier=1.5, law=PoissonLaw(rate=rate, adjacency="zero-out"), count=count)


def release(round: int, client: int, rate: float = 0.1, fingerprint: str = "f", **named: object):
    given = {"entropy": "config", "release": "digest", "fingerprint": fingerprint}
    given |= {"round": round, "level": "example", "client": client}
    return Entry(event=event(rate), **(given | named))


def epsilon(*counts: tuple[float, int]) -> float:
    return Accountant([event(rate, count) for rate, count in counts]).epsilon(DELTA)


def test_a_reader_makes_no_key(tmp_path):
    with pytest.raises(FedsimError, match="is missing"):
        ClientLedgers(tmp_path, delta=DELTA, read_only=True).fingerprint([b"data"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_statement_is_that_of_the_client_that_has_spent_most(tmp_path, on_disk):
    ledgers = ClientLedgers(tmp_path / "clients" if on_disk else None, delta=DELTA)
    assert ledgers.statement() is None
    assert ledgers.epsilon() == 0.0
    for t in range(1, 6):
        ledgers.record(release(t, 0, 0.1))
        if t % 2:
            ledgers.record(release(t, 7, 0.2))
    ledgers.record(release(6, 9, 0.01))
    said = ledgers.statement()
    assert said.epsilon == ledgers.epsilon() == max(epsilon((0.1, 5)), epsilon((0.2, 3)))
    assert said.ledgers == 3
    assert said.cost.releases == 3
    assert "for the client that has spent most" in str(said)
    assert "one for each of 3 clients" in str(said)
    if on_disk:
        seen = ClientLedgers(tmp_path / "clients", delta=DELTA, read_only=True)
        assert seen.epsilon() == said.epsilon
        ledgers.record(release(7, 7, 0.2))
        assert seen.epsilon() == ledgers.epsilon() == epsilon((0.2, 4))


def test_events_of_different_kinds_add_up_within_a_client_only(tmp_path):
    ledgers = ClientLedgers(tmp_path, delta=DELTA)
    for t, rate in enumerate((0.1, 0.2, 0.3)):
        ledgers.record(release(t, 1, rate))
        ledgers.record(release(t, 2, 0.3))
    assert ledgers.epsilon() == epsilon((0.3, 3))
    ledgers.record(release(4, 1, 0.3))
    ledgers.record(release(5, 1, 0.3))
    assert ledgers.epsilon() == epsilon((0.1, 1), (0.2, 1), (0.3, 3))


def test_no_release_that_exceeds_a_clients_budget_is_recorded(tmp_path):
    budget = epsilon((0.1, 3))
    ledgers = ClientLedgers(tmp_path, delta=DELTA, max_epsilon=budget)
    for t in (1, 2, 3):
        assert ledgers.exceeded([release(t, 4)]) is None
        ledgers.record(release(t, 4))
    with pytest.raises(FedsimError, match=r"round 4 would exceed client\.noise\.max-epsilon") as e:
        ledgers.record(release(4, 4))
    assert str(tmp_path) not in str(e.value)  # which the client sends to the server
    assert "of client 4 at delta" in ledgers.exceeded([release(4, 3), release(4, 4)])
    # Run again, a release that was paid for costs nothing.
    ledgers.record(release(3, 4))
    assert Ledger.read(tmp_path / "client-4.jsonl", delta=DELTA).epsilon() == budget


def test_a_fingerprint_is_keyed_and_the_key_is_its_owners_alone(tmp_path):
    one, again = Fingerprints(tmp_path / "one"), Fingerprints(tmp_path / "one")
    other, memory = Fingerprints(tmp_path / "two"), Fingerprints(None)
    parts = [b"data", b"model"]
    assert one.of(parts) == again.of(parts)
    assert len({source.of(parts) for source in (one, other, memory, Fingerprints(None))}) == 4
    assert one.of([b"datam", b"odel"]) != one.of(parts)
    path = tmp_path / "one" / "fingerprint.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes()) == 32


def test_a_damaged_key_is_refused(tmp_path):
    Fingerprints(tmp_path).of([b"data"])
    (tmp_path / "fingerprint.key").write_bytes(b"short")
    with pytest.raises(FedsimError, match=r"has 5 bytes; a fingerprint's key must have 32"):
        Fingerprints(tmp_path).of([b"data"])


def test_ledgers_of_an_overwritten_run_count_for_clients_that_come_back_and_that_do_not(tmp_path):
    ledgers = ClientLedgers(tmp_path / "clients", delta=DELTA)
    for t in (1, 2):
        ledgers.record(release(t, 0, 0.3))
        ledgers.record(release(t, 1, 0.1))
    kept = tmp_path / "archive" / "1"
    kept.mkdir(parents=True)
    (tmp_path / "clients").rename(kept / "clients")
    ledgers = ClientLedgers(tmp_path / "clients", delta=DELTA)
    assert ledgers.epsilon() == epsilon((0.3, 2))
    ledgers.record(release(1, 1, 0.1))  # whatever it repeats, a new run is charged
    assert ledgers.of(1).epsilon() == epsilon((0.1, 3))
    assert ledgers.epsilon() == epsilon((0.3, 2))
