"""State that clients have in common: averaged by the strategy, sent with the next round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedsim.cohorts import FullCohort
from fedsim.config import RunConfig
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.engines.client_app import client_app
from fedsim.federation.exchange import Instructions, Recipients
from fedsim.federation.extras import RoundResult, SharedClientState
from fedsim.federation.replies import Reply
from fedsim.mechanisms import Clipping, NoPrivacy
from fedsim.rows.block import Block
from fedsim.runs.resolve import Resolved, resolve, strategy_of
from fedsim.strategies import ClientTraining, DPFedAvg

TREE = {
    "seed": 5,
    "rounds": 4,
    "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6, "max-examples": 60},
    "model": {"name": "mlp", "widths": "8"},
    "client": {"name": "adadp-lr", "lr": 0.05, "state": "server", "batch-size": 8, "epochs": 2},
    "cohort": {"name": "poisson", "rate": 0.6},
    "engine": {"device": "cpu"},
}
PRIVATE = {"mechanism": Clipping(1.0), "noise_multiplier": 1.0}


def build(**settings) -> Resolved:
    return resolve(RunConfig.parse(TREE).replace(**settings))


def run(grid, strategy, arrays, rounds=4, state=None) -> tuple[dict[str, bytes], dict]:
    result = strategy.start(grid, arrays, rounds, state=state)
    state = strategy.state()["clients"]
    return {name: value.numpy().tobytes() for name, value in tensors(result.arrays).items()}, state


def block(values, name="eta") -> Block:
    n = len(values)
    metrics = {f"client-state.{name}": np.array(values), "num-examples": np.ones(n)}
    return Block.sent(np.arange(n), torch.zeros(n, 2), metrics)


PARAMETERS = array_record({"w": torch.zeros(2)})
RESULT = RoundResult(round=1, update=torch.zeros(2), count=1)


def sent(state: SharedClientState) -> dict[str, object]:
    """What clients of a round are told of it."""
    ids = np.arange(1)
    asked = Instructions(
        "train", 1, PARAMETERS, torch.zeros(2), Recipients(ids, ids), ConfigRecord()
    )
    return dict(state.send(asked).config)


def averaged(*blocks, usable=None) -> dict[str, float]:
    state = SharedClientState()
    for one in blocks:
        keep = torch.ones(len(one.client_ids)) > 0 if usable is None else torch.tensor(usable)
        state.take(Reply(replace(one, rows=None, usable=keep)))
    state.finish(RESULT)
    return state.values


def test_the_mean_is_exact_and_does_not_depend_on_order_or_blocks():
    values = [1e16, 1.0, -1e16, 0.1, 0.2]
    whole = averaged(block(values))
    assert whole == {"eta": pytest.approx(1.3 / 5)}
    assert averaged(block(values[::-1])) == whole
    assert averaged(block(values[:2]), block(values[2:])) == whole


def test_clients_without_a_usable_row_or_a_finite_state_have_no_part_in_the_mean():
    assert averaged(block([1.0, 2.0, 6.0]), usable=[True, False, True]) == {"eta": 3.5}
    assert averaged(block([1.0, np.nan, np.inf, 2.0])) == {"eta": 1.5}


def test_what_nobody_reports_stays_as_it_was():
    state = SharedClientState()
    for one, keep in ((block([0.5]), True), (block([0.7]), False), (block([0.3], name="b"), True)):
        state.take(Reply(replace(one, rows=None, usable=torch.tensor([keep]))))
        state.finish(RESULT)
    assert state.values == {"eta": 0.5, "b": 0.3}


def test_names_that_one_client_makes_up_are_not_sent_to_the_others():
    """Each would have been stored, and sent to every client in all later rounds."""
    hostile = block([0.5])
    made_up = {f"client-state.{'x' * 1000}{number}": np.ones(1) for number in range(500)}
    hostile = replace(hostile, metrics={**hostile.metrics, **made_up})
    assert averaged(block([0.5, 0.7, 0.9]), hostile, usable=None).keys() == {"eta"}


def test_a_round_that_is_configured_again_forgets_what_was_noted():
    state = SharedClientState()
    state.take(Reply(replace(block([9.0]), rows=None, usable=torch.tensor([True]))))
    assert sent(state) == {"client-state": True}
    state.take(Reply(replace(block([1.0]), rows=None, usable=torch.tensor([True]))))
    state.finish(RESULT)
    assert sent(state) == {"client-state": True, "client-state.eta": 1.0}


def test_every_client_gets_the_mean_of_the_last_rounds_and_of_nobody_who_failed():
    got: list[dict[int, object]] = [{}, {}, {}]

    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        config = message.content.config_records["config"]
        assert config["client-state"] is True
        got[config["server-round"] - 1][client] = config.get("client-state.eta")
        row = np.full(2, np.nan) if client == 0 else np.zeros(2)
        if client == 1:
            raise RuntimeError("no data")
        metrics = {"num-examples": 1, "client-state.eta": client + 0.5 * config["server-round"]}
        record = ArrayRecord({"w": Array(row)})
        return Message(
            RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=message
        )

    app = ClientApp()
    app.train()(train)
    strategy = DPFedAvg(
        mechanism=NoPrivacy("uniform"), cohort=FullCohort(4), fraction_evaluate=0.0,
        clients=ClientTraining(average_state=True),
    )  # fmt: skip
    initial = array_record({"w": torch.zeros(2, dtype=torch.float64)})
    result = strategy.start(LocalGrid(app, num_nodes=4), initial, 3)
    assert [set(each.values()) for each in got] == [{None}, {3.0}, {3.5}]
    assert all("client-state.eta" not in m for m in result.train_metrics_clientapp.values())


@pytest.mark.parametrize("block_size", [1, 4])
def test_blocks_and_messages_give_the_same_bytes_and_the_same_state(block_size):
    whole = build()
    expected = run(LocalGrid(whole.trainer), strategy_of(whole), whole.initial_arrays)
    assert expected[1]["eta"] != 0.05
    other = build(**{"client.block-size": block_size})
    blocks = LocalGrid(other.trainer)
    assert run(blocks, strategy_of(other), other.initial_arrays) == expected
    app = client_app(lambda _: other.trainer)
    messages = LocalGrid(app, num_nodes=6)
    assert run(messages, strategy_of(other), other.initial_arrays) == expected


def test_a_users_aggregation_gets_equal_metrics_from_blocks_and_messages():
    records: list[list[MetricRecord]] = []

    def aggregate(given: list[RecordDict], key: str) -> MetricRecord:
        records.append([record["metrics"] for record in given])
        return MetricRecord({"n": len(given)})

    whole = build()
    app = client_app(lambda _: whole.trainer)
    for grid in (LocalGrid(whole.trainer), LocalGrid(app, num_nodes=6)):
        strategy = DPFedAvg(
            mechanism=NoPrivacy("uniform"), cohort=FullCohort(6), fraction_evaluate=0.0,
            clients=ClientTraining(average_state=True), train_metrics_aggr_fn=aggregate,
        )  # fmt: skip
        strategy.start(grid, whole.initial_arrays, 2)
    assert records[:2] == records[2:]
    assert all(type(record["num-examples"]) is int for record in records[0])
    assert "client-state.eta" not in records[0][0]


def test_the_state_that_is_sent_is_what_the_clients_train_with():
    shared, reset = build(), build(**{"client.state": "reset"})
    arrays = shared.initial_arrays
    sent = run(LocalGrid(shared.trainer), strategy_of(shared), arrays)[0]
    result = strategy_of(reset).start(LocalGrid(reset.trainer), arrays, 4)
    assert sent != {k: v.numpy().tobytes() for k, v in tensors(result.arrays).items()}


def test_a_resumed_run_ends_with_the_same_bytes():
    whole, half, rest = build(), build(), build()
    expected = run(LocalGrid(whole.trainer), strategy_of(whole), whole.initial_arrays)
    first = strategy_of(half)
    reached = first.start(LocalGrid(half.trainer), half.initial_arrays, 2)
    second = strategy_of(rest)
    resumed = run(LocalGrid(rest.trainer), second, reached.arrays, state=first.state())
    assert resumed == expected


def test_a_private_run_refuses_to_average_what_clients_report():
    with pytest.raises(FedsimError, match=r"client\.state is 'server'.*client-level privacy"):
        DPFedAvg(cohort=FullCohort(3), clients=ClientTraining(average_state=True), **PRIVATE)
    with pytest.raises(FedsimError, match=r"client\.state is 'server'.*placement"):
        DPFedAvg(
            mechanism=NoPrivacy("uniform"), cohort=FullCohort(3),
            clients=ClientTraining(average_state=True),
            placement="client",
        )  # fmt: skip


def test_clients_that_count_on_a_private_server_are_refused_before_they_train():
    made = build()
    strategy = DPFedAvg(cohort=FullCohort(6), seed=1, **PRIVATE)
    with pytest.raises(FedsimError, match=r"client\.state is 'server'.*'reset' or 'client'"):
        strategy.start(LocalGrid(made.trainer), made.initial_arrays, 1)
    assert strategy.ledger.statement(1e-5).cost.epsilon == 0


@pytest.mark.parametrize("strategy", [FedAvg(), DPFedAvg(cohort=FullCohort(6), seed=1, **PRIVATE)])
def test_as_flower_clients_they_reply_with_that_sentence(strategy):
    made = build()
    grid = LocalGrid(client_app(lambda _: made.trainer), num_nodes=6)
    asked = strategy.configure_train(1, made.initial_arrays, ConfigRecord(), grid)
    replies = list(grid.send_and_receive(asked))
    assert replies
    assert all("client.state is 'server'" in reply.error.reason for reply in replies)


def test_clients_with_private_examples_may_say_what_they_ended_with():
    made = build(
        **{
            "client.mechanism.name": "clipping", "client.noise.multiplier": 1.0,
            "client.batch-size": 2, "partition.alpha": 100.0, "rounds": 2,
        }
    )  # fmt: skip
    _, state = run(LocalGrid(made.trainer), strategy_of(made), made.initial_arrays, 2)
    assert 0 < state["eta"] < 1


@pytest.mark.parametrize(
    ("key", "nonsense"),
    [
        ("round", "5"), ("round", -1), ("round", None), ("parameters", 5), ("mechanism", {"a": 1}),
        ("failures", None), ("optimizer", 5), ("clients", {"eta": "x"}), ("clients", 5),
        ("cohort", 5), ("stopped", 5), ("ledger", None), ("ledger", {"lines": 1}),
    ],
)  # fmt: skip
def test_a_state_of_nonsense_is_one_sentence(key, nonsense):
    made = build()
    first = strategy_of(made)
    reached = first.start(LocalGrid(made.trainer), made.initial_arrays, 1)
    second, state = strategy_of(made), {**first.state(), key: nonsense}
    with pytest.raises(FedsimError, match="state"):
        second.start(LocalGrid(made.trainer), reached.arrays, 2, state=state)


def test_vectors_of_another_size_than_an_algorithm_receives_are_refused():
    scaffold = {"client.name": "scaffold", "client.state": "client"}
    made = build(**scaffold, **{"mechanism.weighting": "uniform"})
    first = strategy_of(made)
    reached = first.start(LocalGrid(made.trainer), made.initial_arrays, 1)
    state = first.state()
    for wrong in (torch.zeros(3), 5):
        with pytest.raises(FedsimError, match="state= "):
            strategy_of(made).start(
                LocalGrid(made.trainer), reached.arrays, 2, state={**state, "vectors": wrong}
            )
    strategy_of(made).start(LocalGrid(made.trainer), reached.arrays, 2, state=state)
