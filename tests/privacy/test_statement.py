from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ledger_helpers import COHORT, DELTA, ZEROED, release

from fedsim.cohorts import CyclicCohort, FixedCohort, FullCohort, PoissonCohort, SeparatedCohort
from fedsim.privacy import Accountant, Entry, Event, Ledger
from fedsim.privacy.assumptions import ReleaseSetting
from fedsim.privacy.laws import FullLaw, PoissonLaw
from fedsim.privacy.ledger import statement_of
from fedsim.privacy.losses import gaussian_delta
from fedsim.privacy.statement import SEEDED


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_release_without_guarantee_is_infinite_and_json_safe(path):
    ledger = Ledger(path, delta=DELTA)
    ledger.record(
        Entry(round=1, event=Event(noise_multiplier=0.0, law=PoissonLaw()), clip_norm=math.inf)
    )
    ledger.record(Entry(round=2, event=replace(Event.of(COHORT, 1.0), sides={"loss": math.inf})))
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
        ledger.record(Entry(**release(t)))
    said = str(ledger.statement())
    for part in (
        "sequence of global models",
        "client level",
        "add-remove",
        "Poisson",
        "3 releases",
        "seed",
        "simulated",
        'noise.entropy = "system"',
        "any membership-inference attack misses at least",
        "Adversary: anyone who sees the models",
        "the declared population (479 clients)",
        "Not covered: what the operator sees",
        str(path),
        ledger.head,
    ):
        assert part in said, part
    example = Ledger(delta=DELTA)
    example.record(
        Entry(event=Event.of(FixedCohort(5, 50), 4.0), level="example", entropy="system")
    )
    said = str(example.statement())
    for part in ("example level", "replace-one", "memory only", "Poisson cohorts of the same"):
        assert part in said, part


def test_the_statement_says_what_the_server_and_colluders_see_of_shares():
    ledger = Ledger(delta=DELTA)
    cohort = FullCohort(100)
    ledger.record(Entry(round=1, event=Event.of(cohort, 1.0), placement="client"))
    said = str(ledger.statement())
    # 4.3772 with all shares, 4.6530 with 10 of 100 known: the table of the noise shares.
    assert "epsilon 4.377 with none missing" in said
    assert "epsilon 4.653 with a tenth" in said
    assert "z sqrt((r-D-k)/r)" in said
    alone = Accountant([Event.of(FullCohort(), 0.1)]).epsilon(DELTA)
    assert f"epsilon {alone:.4g}" in said


def single_shares(cohort, z: float, rounds: int, delta: float, declared: bool = False) -> float:
    """Epsilon against a server that sees them, as the statement says."""
    ledger = Ledger(delta=delta)
    for t in range(1, rounds + 1):
        entry = Entry(round=t, event=Event.of(cohort, z), placement="client")
        ledger.record(replace(entry, declared_by_user=declared))
    return float(re.search(r"z / sqrt\(r\), epsilon ([\d.]+)", str(ledger.statement()))[1])


@pytest.mark.parametrize(("n", "q", "z", "rounds"), [(50, 0.02, 4.0, 20), (1000, 0.1, 10.0, 100)])
def test_a_single_share_is_one_of_a_cohort_that_its_client_is_in(n, q, z, rounds):
    said, delta = single_shares(PoissonCohort(q, n), z, rounds, 1e-3), 1e-3
    # Delta over the cohorts of a client that is in all rounds.
    cohorts = 1 + np.random.default_rng(0).binomial(n - 1, q, (2000, rounds))
    assert np.mean([gaussian_delta(np.sqrt(r) / z, said) for r in cohorts.sum(1)]) <= delta
    # Of the expected cohort it is more.
    expected = Accountant([Event(noise_multiplier=z / np.sqrt(n * q), count=rounds)])
    less = expected.epsilon(delta)
    assert np.mean([gaussian_delta(np.sqrt(r) / z, less) for r in cohorts.sum(1)]) > delta
    everybody = Accountant([Event(noise_multiplier=z / np.sqrt(n), count=rounds)]).epsilon(delta)
    assert single_shares(PoissonCohort(q, n), z, rounds, delta, declared=True) == pytest.approx(
        everybody, rel=1e-3
    )


@pytest.mark.parametrize(
    "cohort", [CyclicCohort(groups=3, rate=0.5, population=30), SeparatedCohort(3, population=30)]
)
def test_shares_of_rounds_that_are_charged_together_have_a_statement(cohort):
    ledger = Ledger(delta=DELTA)
    for t in range(1, 7):
        event = Event.of(cohort, 4.0)
        ledger.record(Entry(round=t, event=event.times(t % 3 == 1), placement="client"))
    alone = Accountant([Event(noise_multiplier=4 / np.sqrt(30), count=2)]).epsilon(DELTA)
    assert f"at z / sqrt(r), epsilon {alone:.4g}" in str(ledger.statement())


@pytest.mark.parametrize("public", [{}, {"secagg-threshold": 4, "secagg-colluders": 0}])
def test_nothing_is_promised_against_a_server_that_saw_some_updates(public):
    ledger = Ledger(delta=DELTA)
    event = Event.of(FullCohort(100), 5.0)
    ledger.record(Entry(round=1, event=event))
    ledger.record(Entry(round=2, event=event, placement="client", public=public))
    said = str(ledger.statement())
    assert "in 1 of these 2 releases it saw the clients' updates before the noise" in said
    assert "masked" not in said
    assert "none missing" not in said


def test_of_runs_with_different_thresholds_only_what_all_of_them_allow_is_promised():
    ledger = Ledger(delta=DELTA)
    for threshold, colluders in ((4, 1), (10, 6)):
        public = {"secagg-threshold": threshold, "secagg-colluders": colluders}
        event = Event.of(FullCohort(10), 5.0)
        ledger.record(Entry(round=1, event=event, placement="client", public=public))
    said = str(ledger.statement())
    assert "sums of at least 4 masked shares (secure aggregation), and up to 1 clients" in said
    assert "the fewest honest clients of a sum, 3, bring" in said


def test_what_a_user_declares_and_what_was_only_probed_is_said():
    ledger = Ledger(delta=DELTA)
    ledger.record(
        Entry(event=ZEROED, level="example", declared_by_user=True, public={"rows": "probed"})
    )
    said = str(ledger.statement())
    assert "Declared by the user" in said
    assert "probed on the model" in said
    assert "Simulated" not in said
    assert ledger.entries[0].declared_by_user


@pytest.mark.parametrize(("delta", "warned"), [(0.01, True), (0.02, True), (0.0099, False)])
def test_a_delta_that_lets_somebody_be_published_whole_is_warned_of(delta, warned):
    clients = Ledger(delta=delta)
    clients.record(Entry(event=Event.of(FullCohort(100), 3.0)))
    warning = f"delta = {delta:g} is at least 1 / 100, the population"
    assert (warning in str(clients.statement())) == warned
    few, many = Ledger(delta=delta), Ledger(delta=delta)
    for ledger, examples, multiplier in ((few, 100, 9.0), (many, 5000, 3.0)):
        event = Event(noise_multiplier=multiplier, law=FullLaw(adjacency="zero-out"))
        ledger.record(Entry(event=event, level="example", public={"examples": examples}))
    # The smallest client's, whoever pays most.
    said = str(statement_of([few, many], delta))
    assert ("is at least 1 / 100, a client's examples" in said) == warned


def test_what_runs_of_one_seed_share_is_said_in_the_words_of_the_readme():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert SEEDED in " ".join(readme.split())
    for entropy in ("config", "system"):
        ledger = Ledger(delta=DELTA)
        ledger.record(Entry(round=1, event=Event.of(COHORT, 1.0), entropy=entropy))
        assert (SEEDED in str(ledger.statement())) == (entropy == "config")


def of_one_round(**fields):
    """The statement of one round under Poisson sampling, with these fields of its entry."""
    ledger = Ledger(delta=DELTA)
    ledger.record(Entry(round=1, event=Event.of(COHORT, 1.0), **fields))
    return ledger.statement()


def test_what_does_not_apply_to_a_run_is_not_said():
    said = of_one_round()
    # Of a ledger alone neither the network nor the metrics are known.
    for part in ("Assumed: that all nodes", "if the run has released any without noise"):
        assert part in str(said)
    plain = str(replace(said, run=ReleaseSetting(network=False)))
    for part in ("Assumed", "metrics", "without noise", "share", "secure", "Declared", "devices"):
        assert part not in plain, part
    assert "Assumed: that all nodes" in str(replace(said, run=ReleaseSetting(network=True)))
    full = Ledger(delta=DELTA)
    full.record(Entry(event=Event.of(FullCohort(100), 3.0)))
    assert "sampling rate" not in str(full.statement())
    assert "the sampling rate" in plain


def test_metrics_that_a_run_has_released_are_named():
    facts = ReleaseSetting(network=False, without_noise=("auc, f1 of clients' own evaluations",))
    said = replace(of_one_round(), run=facts)
    named = "metrics that the run has released without noise (auc, f1 of clients' own evaluations)"
    assert f"; {named}." in str(said)
    assert said.to_dict()["not-covered"][1] == named
    noisy = replace(of_one_round(kind="evaluation"), run=ReleaseSetting(noisy=("accuracy", "loss")))
    assert "the noisy metrics of clients' evaluations (accuracy, loss) is (" in str(noisy)


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (9.0, "any attack misses nearly everybody (98.6 %)"),  # Phi(2.3263 - 1 / noise)
        (1.0, "any attack misses at least 90.7 %"),
        (0.01, "this protects nobody"),
    ],
)
def test_what_an_attack_finds_is_said_in_words_where_it_is_everybody_or_nobody(noise, words):
    event = Event(noise_multiplier=noise, law=FullLaw(adjacency="zero-out"))
    ledger = Ledger(delta=DELTA)
    ledger.record(Entry(round=1, event=event))
    said = ledger.statement()
    assert words in said.summary()[2]
    assert ("this protects nobody" in str(said)) == (noise == 0.01)


def test_a_run_that_finds_the_sampled_ones_for_certain_protects_nobody():
    ledger = Ledger(delta=1e-4)
    for t in (1, 2):
        ledger.record(Entry(round=t, event=Event.of(PoissonCohort(0.2, 479), 0.02)))
    # A client is in one of two rounds with probability 1 - .8 ** 2.
    assert ledger.statement().tradeoff.brief() == (
        "An attack may find 36.1 % of people for certain: this protects nobody."
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "the server, which sees clients' updates"),
        ({"placement": "client"}, "clients, to add their noise; the server sees each"),
        (
            {"placement": "client", "public": {"secagg-threshold": 4, "secagg-colluders": 0}},
            "the server, to follow the protocol",
        ),
        ({"level": "example", "event": ZEROED}, "nobody but the client itself"),
    ],
)
def test_five_lines_fit_a_terminal_and_say_who_is_trusted(fields, words):
    ledger = Ledger(delta=DELTA)
    event = Event.of(COHORT, 1.0)
    ledger.record(Entry(**{"round": 1, "event": event, "entropy": "config", **fields}))
    lines = ledger.statement().summary()
    assert len(lines) == 4  # and the command that explains them
    assert max(map(len, lines)) <= 74  # in a panel of 80 columns
    assert f"Trusted: {words}" in lines[3]
    assert "(simulated) = " in lines[0]
    assert "noise from a known seed" in lines[0]
