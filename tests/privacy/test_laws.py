from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Entry, Event, Law, Ledger
from fedsim.privacy.events import shipped_laws, simple_laws
from fedsim.privacy.laws import DeclaredLaw, FixedSizeLaw, FullLaw, PoissonLaw
from fedsim.privacy.losses import ORDERS, DiscretePair, SampledGaussian

DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class Own(Law):
    """Poisson's, under a name of its own; ``known``: whether it gives its pairs."""

    name = "own"
    q: float = 0.1
    known: bool = True

    @property
    def rate(self):
        return self.q

    def rdp(self, noise_multiplier):
        return PoissonLaw(rate=self.q).rdp(noise_multiplier)

    def pairs(self, noise_multiplier):
        return SampledGaussian(self.q, noise_multiplier).both_directions if self.known else None

    @property
    def label(self):
        return "own"

    def sentence(self, row):
        return f"{row}s in a way of its own"


def spent(law: Law, z: float, rounds: int) -> float:
    return Accountant([Event(noise_multiplier=z, law=law, count=rounds)]).epsilon(DELTA)


@pytest.mark.parametrize(("q", "z", "rounds"), [(0.1, 1.1, 100), (0.01, 0.7, 1000), (0.5, 3.0, 1)])
def test_a_discretised_law_costs_no_less_than_itself_and_hardly_more(q, z, rounds):
    exact = spent(PoissonLaw(rate=q), z, rounds)
    assert exact <= spent(Own(q=q), z, rounds) <= exact * 1.005


def test_a_users_law_is_evaluated_at_no_noise_and_at_nothing_but_noise():
    silent, bare = (Event(noise_multiplier=z, law=Own()) for z in (math.inf, 0.0))
    assert Event.from_dict(json.loads(json.dumps(silent.to_dict()))) == silent
    assert Accountant([silent]).epsilon(DELTA) == 0.0
    assert Accountant([bare]).epsilon(DELTA) == math.inf


def test_a_law_without_pairs_is_accounted_for_by_its_renyi_curve():
    event = Event(noise_multiplier=1.1, law=Own(known=False), count=50)
    cost = Accountant([event]).cost(DELTA)
    shipped = Accountant([Event(noise_multiplier=1.1, law=PoissonLaw(rate=0.1), count=50)])
    assert (cost.method, cost.epsilon) == ("rdp", shipped.cost(DELTA).rdp_epsilon)


def test_a_users_law_becomes_data_that_a_ledger_gives_back():
    event = Event(noise_multiplier=1.1, law=Own(population=50), sides={"loss": 9.0})
    assert isinstance(event.law, DeclaredLaw)
    assert event.law.noise_multiplier == event.total_noise_multiplier
    again = Event.from_dict(json.loads(json.dumps(event.to_dict())))
    assert again == event
    assert hash(again) == hash(event)
    assert Accountant([again]).epsilon(DELTA) == Accountant([event]).epsilon(DELTA)


def test_a_ledger_is_continued_and_read_with_a_law_that_stands_there_once(tmp_path):
    event = Event(noise_multiplier=1.1, law=Own())
    ledger = Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    for t in (1, 2):
        ledger.record(Entry(event=event, round=t, entropy="config", run="r"))
    again = Ledger(tmp_path / "ledger.jsonl", delta=DELTA)
    again.record(Entry(event=event, round=3, entropy="config", run="r"))
    lines = again.path.read_bytes().splitlines(keepends=True)
    assert len(lines[1]) > 20 * len(lines[2]) > 20 * len(lines[3]) / 2
    assert Ledger.read(again.path).epsilon(DELTA) == spent(Own(), 1.1, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"curve": [1.0]}, {"curve": [-1.0] * len(ORDERS)}, {"curve": "many"},
        {"added": None}, {"inclusion_rate": 0.0}, {"noise_multiplier": True},
        {"title": 3}, {"adjacency": "friends"}, {"removed": {"start": 0}}, {"more": 1},
    ],
)  # fmt: skip
def test_a_law_in_a_ledger_that_is_no_law_is_refused(change):
    data = Event(noise_multiplier=1.1, law=Own()).to_dict()
    with pytest.raises(FedsimError):
        Event.from_dict({**data, "law": {**data["law"], **change}})


def test_a_law_that_is_data_says_nothing_of_less_noise():
    law = Event(noise_multiplier=1.1, law=Own()).law
    with pytest.raises(FedsimError, match=r"known only at its author's noise multiplier, 1\.1"):
        spent(law, 1.0, 5)
    assert spent(law, 2.0, 5) == spent(law, 1.1, 5)


@pytest.mark.slow
def test_many_noises_of_a_users_law_are_still_an_upper_bound(monkeypatch):
    zs = np.linspace(1.0, 1.2, 16)
    events = [Event(noise_multiplier=float(z), law=Own()) for z in zs]
    shipped = [replace(event, law=PoissonLaw(rate=0.1)) for event in events]
    exact = Accountant(shipped).epsilon(DELTA)
    monkeypatch.setattr("fedsim.privacy.accountant.MAX_EXACT", 15)
    assert Accountant(events).epsilon(DELTA) >= exact * (1 - 1e-3)


def test_a_law_that_cannot_be_evaluated_gets_a_sentence():
    class Mutable(Own):
        __hash__ = None

    with pytest.raises(FedsimError, match="Mutable cannot be evaluated"):
        Event(noise_multiplier=1.0, law=Mutable())


def test_every_law_of_fedsims_own_is_found_by_its_name():
    own = {
        "allocation",
        "buffered",
        "correlated",
        "cyclic",
        "fixed",
        "full",
        "known-allocation",
        "poisson",
        "separated",
        "shuffle",
    }
    assert set(shipped_laws()) == own
    # A command line can say none of those that are around another one.
    assert own - set(simple_laws()) == {"correlated", "known-allocation"}
    laws = [FixedSizeLaw(size=3, population=9), PoissonLaw(rate=0.3), FullLaw(population=4)]
    for law in laws:
        assert shipped_laws()[law.name] is type(law)
        event = Event(noise_multiplier=1.0, law=law)
        assert Event.from_dict(event.to_dict()) == event


def test_a_discrete_pair_is_a_pair_of_distributions():
    pair = Event(noise_multiplier=1.1, law=Own()).law.pairs(1.1)[0]
    assert isinstance(pair, DiscretePair)
    losses, upper, lower = pair.distributions()
    finite = np.isfinite(losses)
    assert upper.sum() == pytest.approx(1)
    assert lower.sum() == pytest.approx(1)
    assert np.allclose(upper[finite], np.exp(losses[finite]) * lower[finite], rtol=1e-6)


def test_a_users_law_is_declared_whoever_writes_it_down():
    ledger = Ledger(delta=DELTA)
    ledger.record(Entry(event=Event(noise_multiplier=1.1, law=PoissonLaw(rate=0.1)), round=1))
    assert not ledger.statement().declared_by_user
    ledger.record(Entry(event=Event(noise_multiplier=1.1, law=Own()), round=2))
    statement = ledger.statement()
    assert statement.declared_by_user
    assert "declared by the user" in statement.epsilon_label
    assert "Declared by the user: that the sampler" in str(statement)
