"""Secure aggregation: the same sum as in the clear, whoever drops out, and nothing but the sum."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedsim import RunConfig
from fedsim.deploy.policy import Policy
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.aggregation.secagg import client as secagg_client
from fedsim.federation.aggregation.secagg.protocol import (
    PRIME,
    RECORD,
    agreed_key,
    join_secret,
    mask,
    new_key,
    new_seed,
    public_key,
    seal,
    split_secret,
    stage_of,
    unseal,
)
from fedsim.federation.aggregation.secagg.server import unmasked
from fedsim.federation.arrays import tensors
from fedsim.federation.flower_internals import BUDGET_SPENT, TIMED_OUT, error_reply
from fedsim.privacy import Accountant, Ledger
from fedsim.privacy.placement import SecureAggregation
from fedsim.runs.resolve import Resolved, make_strategy, resolve
from fedsim.runs.runner import secure_aggregation_app
from fedsim.strategies import DPFedAvg

CLIENTS, THRESHOLD = 6, 4
CONFIG = RunConfig.parse(
    {
        "rounds": 2,
        "partition": {"clients": CLIENTS, "max-examples": 30},
        "model": {"name": "softmax"},
        "mechanism": {"name": "clipping", "private-scalar": "loss"},
        "noise": {"multiplier": 1.0, "placement": "client"},
        "secagg": {"threshold": THRESHOLD, "colluders": 1},
        "engine": {"device": "cpu"},
    }
)
STAGES = ("keys", "shares", "masked", "unmask")


class Unsteady(LocalGrid):
    """Loses the replies of some clients at some stages; keeps all that the server receives."""

    def __init__(self, resolved: Resolved, lost: dict[str, set[int]]) -> None:
        super().__init__(secure_aggregation_app(resolved), num_nodes=CLIENTS)
        self.lost, self.received = lost, defaultdict[str, list[Message]](list)

    def changed(self, stage: str, reply: Message) -> Message | None:
        """The reply that arrives in the place of another."""
        client = reply.metadata.src_node_id - 2
        return None if client in self.lost.get(stage, ()) else reply

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked = list(messages)
        replies = super().send_and_receive(asked, timeout=timeout)
        if not asked or (stage := stage_of(asked[0])) is None:
            return replies
        kept = [new for reply in replies if (new := self.changed(stage, reply)) is not None]
        self.received[stage] += kept
        return kept


def model_of(strategy: DPFedAvg, grid: LocalGrid, resolved: Resolved) -> bytes:
    result = strategy.start(grid, resolved.initial_arrays, resolved.config.rounds)
    return b"".join(tensor.numpy().tobytes() for tensor in tensors(result.arrays).values())


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    return resolve(CONFIG)


@pytest.mark.parametrize(
    "lost",
    [
        {},
        {"keys": {1, 4}},
        {"shares": {0}},
        {"masked": {2, 5}},
        {"unmask": {3, 4}},
        {"keys": {0}, "masked": {5}},
        {"shares": {1}, "masked": {2}, "unmask": set()},
    ],
)
def test_the_model_is_that_of_the_same_shares_in_the_clear(
    resolved: Resolved, lost: dict[str, set[int]]
) -> None:
    masked = model_of(make_strategy(resolved), Unsteady(resolved, lost), resolved)
    gone = set().union(*(lost.get(stage, set()) for stage in STAGES[:3]))
    in_clear = make_strategy(resolved)
    # In the clear the same clients do not take part.
    in_clear.participants.replying = lambda number, ids: ~np.isin(ids, list(gone))
    assert masked == model_of(in_clear, LocalGrid(resolved.trainer), resolved)


@pytest.mark.parametrize("stage", STAGES)
def test_a_round_of_too_few_is_lost_and_charged(resolved: Resolved, stage: str) -> None:
    strategy = make_strategy(resolved)
    start = b"".join(t.numpy().tobytes() for t in tensors(resolved.initial_arrays).values())
    assert model_of(strategy, Unsteady(resolved, {stage: {0, 2, 5}}), resolved) == start
    assert [entry.round for entry in strategy.ledger.entries] == [1, 2]
    assert any("nothing was released" in line for line in strategy.progress())
    in_clear = make_strategy(resolved)
    in_clear.participants.replying = lambda number, ids: ids < THRESHOLD - 1
    assert model_of(in_clear, LocalGrid(resolved.trainer), resolved) == start
    assert in_clear.ledger.head == strategy.ledger.head or stage == "unmask"


class Watching(Unsteady):
    """Counts a ledger's lines on disk when the messages of a stage leave the server."""

    def __init__(self, resolved: Resolved, ledger: Path) -> None:
        super().__init__(resolved, {})
        self.ledger, self.seen = ledger, list[tuple[str | None, int]]()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked = list(messages)
        entries = Ledger.read(self.ledger).entries if self.ledger.exists() else []
        self.seen.append((stage_of(asked[0]) if asked else None, len(entries)))
        return super().send_and_receive(asked, timeout=timeout)


def test_a_round_is_charged_before_any_stage_of_it_leaves_the_server(
    resolved: Resolved, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger.jsonl"
    grid = Watching(resolved, ledger)
    model_of(make_strategy(resolved, Ledger(ledger, delta=1e-5)), grid, resolved)
    stages = [seen for seen in grid.seen if seen[0] is not None]
    assert stages == [(stage, number) for number in (1, 2) for stage in STAGES]


def test_a_round_beyond_the_budget_asks_nobody_for_anything(
    resolved: Resolved, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    once = Accountant([resolved.plan.charge(1)]).epsilon(1e-5)
    grid = Watching(resolved, path)
    strategy = make_strategy(resolved, Ledger(path, delta=1e-5, max_epsilon=1.01 * once))
    model_of(strategy, grid, resolved)
    assert [stage for stage, _ in grid.seen if stage is not None] == list(STAGES)
    assert [entry.round for entry in Ledger.read(path).entries] == [1]


class Failing(Unsteady):
    """Two clients answer a stage with errors: a spent budget, and a missed deadline."""

    def __init__(self, resolved: Resolved, stage: str) -> None:
        super().__init__(resolved, {})
        self._stage = stage

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked = list(messages)
        replies = list(super().send_and_receive(asked, timeout=timeout))
        if not asked or stage_of(asked[0]) != self._stage:
            return replies
        codes = {2: BUDGET_SPENT, 3: TIMED_OUT}  # by node id
        failed = [
            error_reply(message, codes[node], "no")
            for message in asked
            if (node := message.metadata.dst_node_id) in codes
        ]
        return [r for r in replies if r.metadata.src_node_id not in codes] + failed


@pytest.mark.parametrize("stage", STAGES[:3])
def test_errors_keep_their_reasons(resolved: Resolved, stage: str) -> None:
    strategy = make_strategy(resolved)
    model_of(strategy, Failing(resolved, stage), resolved)
    assert strategy.report is not None
    reasons = {name: count for name, count in strategy.report.reasons.items() if count}
    assert reasons == {"budget": 1, "timeout": 1}


def test_a_client_that_fails_when_its_share_is_in_the_sum_has_not_failed(
    resolved: Resolved, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = make_strategy(resolved)
    with caplog.at_level("WARNING", "fedsim"):
        model = model_of(strategy, Failing(resolved, "unmask"), resolved)
    assert model == model_of(make_strategy(resolved), LocalGrid(resolved.trainer), resolved)
    report = strategy.report
    assert report is not None
    assert (report.usable, report.failed, report.summed) == (CLIENTS, 0, CLIENTS)
    assert not any(report.reasons.values())
    assert "client 1 does not help to unmask the sum, which its share is part of" in caplog.text
    assert "out of the round" not in caplog.text


def test_a_client_that_fails_at_the_last_stage_of_a_round_that_is_lost_has_failed(
    resolved: Resolved,
) -> None:
    class Lost(Failing):
        def changed(self, stage: str, reply: Message) -> Message | None:
            lost = stage == "unmask" and reply.metadata.src_node_id > 4
            return None if lost else super().changed(stage, reply)

    strategy = make_strategy(resolved)
    model_of(strategy, Lost(resolved, "unmask"), resolved)
    report = strategy.report
    assert report is not None
    reasons = {name: count for name, count in report.reasons.items() if count}
    assert (report.usable, report.summed) == (0, 0)
    assert reasons == {"budget": 1, "timeout": 1, "missing": CLIENTS - 2}


def test_the_server_receives_keys_sealed_shares_and_uniform_words(resolved: Resolved) -> None:
    grid = Unsteady(resolved, {})
    model_of(make_strategy(resolved), grid, resolved)
    names = {"keys": {"mask-key", "channel-key"}, "shares": {"sealed"}}
    names |= {"masked": {"masked"}, "unmask": {"shares"}}
    for stage in STAGES:
        assert len(grid.received[stage]) == CLIENTS * CONFIG.rounds
        for reply in grid.received[stage]:
            assert set(reply.content) == {RECORD}
            assert set(reply.content[RECORD]) == names[stage]
    words = b"".join(reply.content[RECORD]["masked"] for reply in grid.received["masked"])
    counts = np.bincount(np.frombuffer(words, dtype=np.uint8), minlength=256)
    expected = len(words) / 256
    chi_square = float(np.square(counts - expected).sum() / expected)
    assert abs(chi_square - 255) < 6 * np.sqrt(2 * 255)
    vectors = [reply.content[RECORD]["masked"] for reply in grid.received["masked"]]
    assert len(set(vectors)) == len(vectors)


def test_the_shares_of_the_fewest_honest_survivors_bring_the_noise() -> None:
    quiet = CONFIG.replace(**{"mechanism.private-scalar": "", "client.lr": 1e-9, "rounds": 1})
    made = resolve(quiet)
    start = np.concatenate([t.numpy().ravel() for t in tensors(made.initial_arrays).values()])
    for gone, survivors in ((0, CLIENTS), (2, THRESHOLD)):
        strategy = make_strategy(made)
        strategy.participants.replying = lambda number, ids, gone=gone: ids >= gone
        end = np.frombuffer(model_of(strategy, LocalGrid(made.trainer), made), dtype=np.float32)
        noise = (end - start).astype(np.float64) * CLIENTS
        # One deviation of 650 numbers' deviation is 3 %.
        expected = np.sqrt(survivors / (THRESHOLD - 1))
        assert noise.std() == pytest.approx(expected, rel=0.12)


class Hostile(Unsteady):
    """Some clients answer a stage with anything."""

    def __init__(self, resolved: Resolved, stage: str, draws: random.Random) -> None:
        super().__init__(resolved, {})
        self._stage, self._draws = stage, draws

    def changed(self, stage: str, reply: Message) -> Message | None:
        if stage != self._stage or reply.metadata.src_node_id > 3:
            return reply
        content = self._draws.choice(
            [
                RecordDict(),
                RecordDict({RECORD: ConfigRecord({})}),
                RecordDict({RECORD: MetricRecord({"masked": 1})}),
                RecordDict({RECORD: ArrayRecord()}),
                RecordDict({RECORD: ConfigRecord({"masked": b"", "shares": [b"x"], "sealed": 3})}),
                RecordDict(
                    {RECORD: ConfigRecord({"mask-key": bytes(32), "channel-key": bytes(32)})}
                ),
                RecordDict(
                    {
                        name: ConfigRecord(
                            {
                                key: [self._draws.randbytes(len(e)) for e in value]
                                if isinstance(value, list)
                                else self._draws.randbytes(len(value))
                                for key, value in record.items()
                            }
                        )
                        for name, record in reply.content.items()
                    }
                ),
            ]
        )
        reply.content = content
        return reply


@pytest.mark.spanning
@pytest.mark.parametrize(("stage", "seed"), [*itertools.product(STAGES, range(6))])
def test_whatever_some_clients_answer_the_run_goes_on(
    resolved: Resolved, stage: str, seed: int
) -> None:
    strategy = make_strategy(resolved)
    model_of(strategy, Hostile(resolved, stage, random.Random(seed)), resolved)
    assert strategy.rounds_done == CONFIG.rounds
    assert len(strategy.ledger.entries) == CONFIG.rounds


# -- the client ----------------------------------------------------------------------------------


class Party:
    """One client's side, asked stage by stage."""

    def __init__(self, client: int) -> None:
        self.client, self.context = client, Context(1, client + 2, {}, RecordDict(), {})

    def ask(self, stage: str, context: bytes = b"c", **entries: Any) -> dict[str, Any]:
        record = ConfigRecord({"stage": stage, "context": context, **entries})
        message = Message(RecordDict({RECORD: record}), self.client + 2, "train")
        words = np.full(5, self.client + 1, dtype=np.uint64)
        reply = secagg_client.answer(message, self.context, self.client, 3, lambda: words)
        return dict(reply[RECORD])


def ready(count: int = 4, until: str = "unmask") -> tuple[list[Party], dict[str, Any]]:
    """Parties that have answered all stages before one, and what they were asked."""
    parties = [Party(client) for client in range(count)]
    keys = [party.ask("keys") for party in parties]
    listed = {
        "clients": list(range(count)),
        "mask-keys": [k["mask-key"] for k in keys],
        "channel-keys": [k["channel-key"] for k in keys],
    }
    if until == "shares":
        return parties, listed
    sealed = [party.ask("shares", **listed)["sealed"] for party in parties]
    if until == "masked":
        return parties, {"sealed": sealed, **listed}
    masked = {}
    for party in parties:
        others = [k for k in range(count) if k != party.client]
        received = [sealed[k][party.client] for k in others]
        masked[party.client] = party.ask("masked", senders=others, sealed=received)["masked"]
    return parties, {"masked": masked, **listed}


def test_what_clients_answer_unmasks_their_sum_and_that_alone() -> None:
    for survivors in ([0, 1, 2, 3], [0, 1, 3]):
        parties, seen = ready()
        answers = {k: parties[k].ask("unmask", survivors=survivors)["shares"] for k in survivors}
        gathered = {
            other: {k + 1: int.from_bytes(answers[k][other]) for k in survivors[:3]}
            for other in range(4)
        }
        masked = {k: np.frombuffer(seen["masked"][k], dtype="<u8") for k in survivors}
        keys = dict(enumerate(seen["mask-keys"]))
        total = unmasked(masked, gathered, keys, b"c")
        assert (total == sum(k + 1 for k in survivors)).all()
        # Of another set of survivors the masks do not cancel.
        fewer = {k: masked[k] for k in survivors[1:]}
        with pytest.raises(FedsimError, match=r"do not fit|do not give"):
            unmasked(fewer, gathered, keys, b"c")


def test_a_client_unmasks_once_and_never_out_of_turn() -> None:
    parties, _ = ready()
    parties[0].ask("unmask", survivors=[0, 1, 2])
    with pytest.raises(FedsimError, match="out of turn, or repeated"):
        parties[0].ask("unmask", survivors=[0, 1, 3])
    assert not parties[0].context.state  # nothing of the round is left
    with pytest.raises(FedsimError, match="out of turn"):
        parties[1].ask("masked", senders=[], sealed=[])
    with pytest.raises(FedsimError, match="out of turn"):
        parties[1].ask("unmask", context=b"another", survivors=[0, 1, 2])


@pytest.mark.parametrize("survivors", [[0, 1], [1, 2, 3], [0, 1, 2, 9], [0, 0, 1, 2], "0", [True]])
def test_survivors_are_enough_of_this_round(survivors: Any) -> None:
    parties, _ = ready()
    with pytest.raises(FedsimError):
        parties[0].ask("unmask", survivors=survivors)


def test_keys_and_shares_that_were_changed_are_refused() -> None:
    parties, listed = ready(until="shares")
    other = public_key(new_key())
    for name in ("mask-keys", "channel-keys"):
        with pytest.raises(FedsimError, match="another key of this client"):
            parties[0].ask("shares", **{**listed, name: [other, *listed[name][1:]]})
        doubled = [*listed[name][:2], listed[name][1], *listed[name][3:]]
        with pytest.raises(FedsimError, match="one twice"):
            parties[0].ask("shares", **{**listed, name: doubled})
    few = {name: listed[name][:2] for name in listed}
    with pytest.raises(FedsimError, match=r"at least secagg\.threshold = 3"):
        parties[0].ask("shares", **few)
    zero = [listed["channel-keys"][0], bytes(32), *listed["channel-keys"][2:]]
    with pytest.raises(FedsimError, match="a public key of secure aggregation is invalid"):
        parties[0].ask("shares", **{**listed, "channel-keys": zero})
    parties, seen = ready(until="masked")
    others = [1, 2, 3]
    received = [seen["sealed"][k][0] for k in others]
    with pytest.raises(FedsimError, match="changed in transit"):
        parties[0].ask("masked", senders=others, sealed=[received[1], received[0], received[2]])
    with pytest.raises(FedsimError, match="of another round, or too short"):
        parties[0].ask("masked", senders=[1], sealed=received[:1])


# -- primitives ----------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32), st.integers(2, 6), st.integers(0, 4), st.randoms())
def test_any_so_many_shares_give_the_secret(
    secret: bytes, threshold: int, more: int, draws: random.Random
) -> None:
    shares = split_secret(secret, threshold, threshold + more)
    assert all(0 <= share < PRIME for share in shares)
    points = draws.sample(range(1, threshold + more + 1), threshold)
    assert join_secret({point: shares[point - 1] for point in points}) == secret
    with pytest.raises(FedsimError, match="do not fit"):
        join_secret({point: shares[point - 1] for point in points[1:]})


def test_keys_agree_and_seals_hold() -> None:
    one, two = new_key(), new_key()
    key = agreed_key(one, public_key(two), b"purpose")
    assert key == agreed_key(two, public_key(one), b"purpose")
    assert key != agreed_key(two, public_key(one), b"another")
    sealed = seal(key, b"text", b"context")
    assert unseal(key, sealed, b"context") == b"text"
    for wrong in (sealed[:-1] + bytes([sealed[-1] ^ 1]), b"", sealed[1:]):
        with pytest.raises(FedsimError, match="changed in transit"):
            unseal(key, wrong, b"context")
    with pytest.raises(FedsimError, match="changed in transit"):
        unseal(key, sealed, b"another")
    assert (mask(key, 3) == mask(key, 5)[:3]).all()
    assert len({new_seed(), new_seed(), new_key(), new_key()}) == 4


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"secagg.threshold": 7}, "secagg.threshold is 7; it must be at most 6, the mean number"),
        ({"secagg.threshold": 0, "secagg.colluders": 1}, "unless secagg.threshold is above 0"),
        ({"secagg.threshold": 1, "secagg.colluders": 0}, "it must be at least 2, and more than"),
        ({"secagg.colluders": 4}, "it must be at least 2, and more than the colluders"),
        ({"noise.placement": "server"}, "noise.placement = 'client'"),
        ({"evaluate.unprotected": True}, "evaluate.unprotected is true"),
        ({"engine.name": "ray", "secagg.simulate": True}, "and 'ray' never does"),
    ],
)
def test_configs_say_what_secure_aggregation_needs(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FedsimError) as error:
        CONFIG.replace(**changes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "cohort",
    [
        {"cohort.name": "fixed", "cohort.size": 3},
        {"cohort.name": "poisson", "cohort.rate": 0.5},
        {"cohort.name": "cyclic", "cohort.groups": 2},
    ],
)
def test_a_cohort_in_which_most_rounds_would_be_lost_is_refused(cohort: dict[str, Any]) -> None:
    with pytest.raises(FedsimError, match=r"threshold is 4; it must be at most 3, the mean number"):
        make_strategy(resolve(CONFIG.replace(**cohort)))


@pytest.mark.parametrize(("threshold", "colluders"), [(1, 0), (3, 3), (3, 4), (0, 0), (3, -1)])
def test_somebody_honest_is_in_every_sum(threshold: int, colluders: int) -> None:
    with pytest.raises(FedsimError, match="more than the colluders"):
        SecureAggregation(threshold, colluders)


def test_against_the_server_sampling_amplifies_nothing() -> None:
    sampled = CONFIG.replace(**{"cohort.name": "fixed", "cohort.size": 4})
    outside = sampled.replace(**{"secagg.observer": "outsider"})
    plans = [resolve(config).plan for config in (sampled, outside)]
    assert [plan.event().law.rate for plan in plans] == [1, pytest.approx(4 / 6)]
    assert [plan.event().law.adjacency for plan in plans] == ["replace-one"] * 2
    statements = [str(make_strategy(resolve(c)).privacy_statement()) for c in (sampled, outside)]
    assert len(statements) == 2


@pytest.mark.parametrize(
    "cohort", [{"name": "poisson", "rate": 0.7}, {"name": "cyclic", "rate": 0.7, "groups": 1}]
)
def test_a_secret_size_that_models_would_show_is_refused(cohort: dict[str, Any]) -> None:
    # A share's noise is fixed, so that the variance of a sum follows from how many are in it.
    keys = {f"cohort.{key}": value for key, value in cohort.items()}
    assert resolve(CONFIG.replace(**keys)).plan.cohort_known
    with pytest.raises(FedsimError, match=r"observer = 'outsider' .* it must be 'server'"):
        CONFIG.replace(**keys, **{"secagg.observer": "outsider"})
    plan = resolve(CONFIG.replace(**keys)).plan
    with pytest.raises(FedsimError, match=r"observer = 'outsider' .* it must be 'server'"):
        replace(plan, cohort_known=False)


def test_a_node_may_send_nothing_but_masked_shares() -> None:
    strict, usual = Policy(secure_aggregation=True), Policy()
    open_run = CONFIG.replace(**{"secagg.threshold": 0, "secagg.colluders": 0})
    strict.check_masked(masked=True, config=CONFIG)
    usual.check_masked(masked=False, config=open_run)
    with pytest.raises(FedsimError, match=r"here secagg\.threshold must be set"):
        strict.check_masked(masked=False, config=open_run)
    with pytest.raises(FedsimError, match="asks for this node's share without a mask"):
        usual.check_masked(masked=False, config=CONFIG)
