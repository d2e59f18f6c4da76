"""The trainer as a Flower ClientApp."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from clients_helpers import make_data, make_mlp
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.app.metadata import Metadata

from fedsim.clients import SGD
from fedsim.federation.engines.client_app import TimeIsUp, client_app, time_limit
from fedsim.federation.flower_internals import TIMED_OUT
from fedsim.randomness import Randomness
from fedsim.rows.block import RUN
from fedsim.training import Trainer


@pytest.fixture
def trainer():
    return Trainer(make_mlp(), SGD(lr=0.1), make_data([5, 6, 7]), randomness=Randomness(1))


def ask(app, kind, content, partition=2):
    context = Context(
        run_id=1,
        node_id=5,
        node_config={"partition-id": partition} if partition is not None else {},
        state=RecordDict(),
        run_config={},
    )
    metadata = Metadata(
        run_id=1,
        message_id="m",
        src_node_id=1,
        dst_node_id=5,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=60.0,
        message_type=kind,
    )
    return app(Message(content=content, metadata=metadata), context).content


def content_of(trainer, vector, round=3):
    return RecordDict(
        {
            "arrays": ArrayRecord(trainer.layout.unflatten(vector)),
            "config": ConfigRecord({"server-round": round}),
        }
    )


def test_the_reply_recovers_the_bytes_of_the_blocks_row(trainer):
    vector = trainer.initial()
    reply = ask(client_app(lambda _: trainer), "train", content_of(trainer, vector))
    sent = trainer.layout.flatten(reply["arrays"].to_torch_state_dict())
    blocks = trainer.train(vector, np.arange(3), 3)
    rows = torch.cat([block.rows for block in blocks])
    assert torch.equal(sent - vector, rows[2])
    assert reply["metrics"]["num-examples"] == 7


def test_entries_that_are_not_trained_go_back_as_they_came(trainer):
    content = content_of(trainer, trainer.initial())
    arrays = content["arrays"].to_torch_state_dict() | {"counter": torch.tensor([7])}
    content["arrays"] = ArrayRecord(arrays)
    reply = ask(client_app(lambda _: trainer), "train", content)
    assert list(reply["arrays"]) == list(arrays)
    assert reply["arrays"]["counter"].numpy() == [7]


def test_evaluate_replies_loss_and_accuracy(trainer):
    vector = trainer.initial()
    reply = ask(client_app(lambda _: trainer), "evaluate", content_of(trainer, vector))
    (block,) = trainer.evaluate(vector, np.array([2]), 3)
    assert dict(reply["metrics"]) == {k: v[0] for k, v in block.metrics.items()}
    assert set(reply["metrics"]) == {"num-examples", "loss", "accuracy"}


def test_a_client_evaluates_what_it_keeps_of_the_same_run(trainer, tmp_path):
    state = {"state": "client", "personal": ("3.weight",), "state_dir": tmp_path}

    def new_trainer(_):  # one for each message, as on nodes
        return Trainer(trainer.model, SGD(lr=0.1), trainer.data, randomness=Randomness(1), **state)

    def metrics_of(kind, run):
        content = content_of(trainer, trainer.initial())
        content["config"][RUN] = run
        return dict(ask(client_app(new_trainer), kind, content)["metrics"])

    initial = metrics_of("evaluate", "one")
    metrics_of("train", "one")
    assert metrics_of("evaluate", "one")["loss"] < initial["loss"]
    assert metrics_of("evaluate", "two") == initial


def test_query_replies_the_client_id(trainer):
    reply = ask(client_app(lambda _: trainer), "query", RecordDict())
    assert reply["metrics"]["client-id"] == 2


def test_a_node_without_a_partition_id_is_told_so(trainer):
    with pytest.raises(ValueError, match="partition-id"):
        ask(client_app(lambda _: trainer), "query", RecordDict(), partition=None)


def test_code_that_exits_is_an_error_like_any_other_and_ends_no_worker(trainer):
    def exits(_):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="the client's code exited with 3"):
        ask(client_app(exits), "train", content_of(trainer, trainer.initial()))


def replied(app, trainer):
    content = content_of(trainer, trainer.initial())
    metadata = {"src_node_id": 1, "dst_node_id": 5, "message_id": "m", "group_id": "", "run_id": 1}
    asked = Message(
        content=content,
        metadata=Metadata(
            **metadata,
            reply_to_message_id="",
            created_at=time.time(),
            ttl=60.0,
            message_type="train",
        ),
    )
    return app(asked, Context(1, 5, {"partition-id": 2}, RecordDict(), {}))


def hangs_in_its_own_handler(_):
    try:
        time.sleep(3600)
    except Exception:  # code that goes on after whatever happens
        time.sleep(3600)


def test_a_client_that_hangs_is_ended_at_its_own_time_and_the_next_message_is_not(trainer):
    before = signal.getsignal(signal.SIGALRM)
    app = client_app(hangs_in_its_own_handler, seconds_for=lambda _: 0.2)
    reply = replied(app, trainer)
    assert reply.error.code == TIMED_OUT
    assert "0.2 s" in reply.error.reason
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
    in_time = replied(client_app(lambda _: trainer, seconds_for=lambda _: 3600.0), trainer)
    assert not in_time.has_error()


@pytest.fixture
def nodes_timer():
    """As in a deployment, where a node ends its tasks after an hour."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_limit_holds_beside_another_timer_which_goes_on(nodes_timer):
    """In a deployment engine.timeout ended no client that hung."""
    nodes_timer(1000.0)
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeIsUp), time_limit(0.2):
        time.sleep(5)
    assert 990 < signal.getitimer(signal.ITIMER_REAL)[0] < 1000 - 0.19
    assert signal.getsignal(signal.SIGALRM) is handler


def test_another_timer_that_repeats_goes_on_repeating(nodes_timer):
    signal.setitimer(signal.ITIMER_REAL, 1000.0, 500.0)
    with time_limit(10.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 500


def test_another_timer_that_ends_first_is_left_alone(nodes_timer):
    nodes_timer(1000.0)
    with time_limit(2000.0):
        assert 990 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000


def test_outside_the_main_thread_nothing_is_limited():
    def waits():
        with time_limit(0.01):
            time.sleep(0.05)
        return "whole"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(waits).result() == "whole"
