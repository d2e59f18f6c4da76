"""What goes beside a round's sum, and aggregations that take more than one stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid, array_record, tensors
from fedsim.errors import FedsimError
from fedsim.federation.aggregation.server_sum import ServerSum
from fedsim.federation.exchange import Instructions
from fedsim.federation.extras import Extra, RoundResult
from fedsim.federation.replies import Reply
from fedsim.federation.round_report import failures_in
from fedsim.mechanisms import Clipping
from fedsim.rows.block import Block, BlockTrainer
from fedsim.strategies import DPFedAvg

CLIENTS = 5
INITIAL = array_record({"w": torch.zeros(3, dtype=torch.float64)})


class Rows(BlockTrainer):
    """Client k's row is k / 10 in every entry; all of them come in one block."""

    population = CLIENTS

    def train(self, vector, client_ids, round):
        rows = torch.from_numpy(client_ids[:, None] / 10).expand(-1, 3).contiguous()
        yield Block.sent(client_ids, rows, {"number": client_ids.astype(float)})

    def evaluate(self, vector, client_ids, round):
        raise NotImplementedError


def app() -> ClientApp:
    """The same clients as Flower's, which answer a stage of their own before they train."""
    made = ClientApp()

    @made.train()
    def _train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        config = message.content.config_records["config"]
        if "stage" in config:
            return Message(
                RecordDict({"metrics": MetricRecord({"ready": client})}), reply_to=message
            )
        sent = message.content.array_records["arrays"]
        moved = {n: Array((t + client / 10).numpy()) for n, t in tensors(sent).items()}
        metrics = MetricRecord({"number": float(client)})
        content = RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})
        return Message(content, reply_to=message)

    return made


def strategy(**settings) -> DPFedAvg:
    return DPFedAvg(
        mechanism=Clipping(1.0),
        cohort=FullCohort(CLIENTS),
        noise_multiplier=1.0,
        seed=1,
        **settings,
    )


class Watching(Extra):
    """Notes what it takes of whom, and when."""

    def __init__(self, name: str, log: list, ledger=None) -> None:
        self.name, self.log, self.ledger = name, log, ledger

    def send(self, instructions: Instructions) -> Instructions:
        self.log.append((self.name, "send"))
        return instructions

    def receive(self, reply: Reply) -> None:
        if 2 in reply.block.metrics["number"]:
            raise RuntimeError("cannot read what client 2 says")
        self.log.append((self.name, reply.block.client_ids.tolist()))

    def finish(self, result: RoundResult) -> RoundResult:
        self.log.append((self.name, "finish", len(self.ledger.entries)))
        return result


@pytest.mark.parametrize("client", [Rows(), app()], ids=["block", "messages"])
def test_an_extra_that_raises_fails_that_client_and_leaves_the_release_as_it_is(client) -> None:
    plain = strategy()
    expected = plain.start(LocalGrid(client, num_nodes=CLIENTS), INITIAL, 1)
    watched, log = strategy(), []
    watched.extras["watching"] = Watching("one", log, watched.ledger)
    reached = watched.start(LocalGrid(client, num_nodes=CLIENTS), INITIAL, 1)
    assert [ids for _, ids, *_ in log if isinstance(ids, list)] == [[0], [1], [3], [4]]
    assert (watched.report.usable, watched.report.failed) == (CLIENTS - 1, 1)
    assert watched.report.reasons["malformed"] == 1
    assert torch.equal(tensors(reached.arrays)["w"], tensors(expected.arrays)["w"])
    assert watched.ledger.head == plain.ledger.head


class Unreadable(Extra):
    """Raises at whatever clients report."""

    def receive(self, reply: Reply) -> None:
        raise RuntimeError("cannot read what clients say")


def test_a_round_in_which_all_clients_failed_in_an_extra_alone_is_not_noise_alone() -> None:
    watched = strategy()
    watched.extras["unreadable"] = Unreadable()
    watched.start(LocalGrid(Rows()), INITIAL, 1)
    report = watched.report
    assert (report.usable, report.failed, report.summed) == (0, CLIENTS, CLIENTS)
    assert not any("noise alone" in line for line in watched.progress())
    assert "noise alone" not in failures_in([{**report.row(), "epsilon": 1.0}])
    nobody = {**report.row(), "summed": 0, "epsilon": 1.0, "update-norm": 0.1}
    assert "noise alone" in failures_in([nobody])


@pytest.mark.parametrize("client", [Rows(), app()], ids=["trainer", "app"])
def test_parameters_that_nobody_could_train_are_refused_before_the_first_round(client) -> None:
    evaluated = []
    whole = array_record({"w": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(FedsimError, match="no floating-point parameter to train"):
        strategy().start(
            LocalGrid(client, num_nodes=CLIENTS),
            whole,
            1,
            evaluate_fn=lambda *_: evaluated.append(1),
        )
    assert not evaluated


def test_extras_run_in_the_order_of_their_list_and_finish_after_the_ledgers_line() -> None:
    watched, log = strategy(), []
    for name in ("one", "two"):
        watched.extras[name] = Watching(name, log, watched.ledger)
    watched.start(LocalGrid(Rows()), INITIAL, 2)
    assert [entry for entry in log if entry[1] in ("send", "finish")] == [
        ("one", "send"), ("two", "send"), ("one", "finish", 1), ("two", "finish", 1),
        ("one", "send"), ("two", "send"), ("one", "finish", 2), ("two", "finish", 2),
    ]  # fmt: skip


class TwoStages(ServerSum):
    """Asks who is ready before it has them train."""

    def request(self) -> Instructions:
        self.second = super().request()
        self.heard: list[set[float]] = []
        return self.stage(ConfigRecord({**self.second.config, "stage": "ready"}))

    def stage(self, config: ConfigRecord) -> Instructions:
        return replace(self.second, config=config)

    def next_stage(self, replies):
        if self.heard:
            return None
        records = (reply.content.metric_records["metrics"] for reply in replies)
        self.heard.append({record["ready"] for record in records})
        return self.stage(self.second.config)


def test_a_round_goes_through_every_stage_of_its_aggregation() -> None:
    made: list[TwoStages] = []

    def aggregation(*arguments) -> TwoStages:
        made.append(TwoStages(*arguments))
        return made[-1]

    one, two = strategy(), strategy()
    two.aggregation = aggregation
    expected = one.start(LocalGrid(app(), num_nodes=CLIENTS), INITIAL, 2)
    reached = two.start(LocalGrid(app(), num_nodes=CLIENTS), INITIAL, 2)
    assert [each.heard for each in made] == [[set(range(CLIENTS))]] * 2
    assert torch.equal(tensors(reached.arrays)["w"], tensors(expected.arrays)["w"])
    assert not np.allclose(tensors(reached.arrays)["w"], 0)


def test_an_aggregation_is_printed_before_it_has_a_sum() -> None:
    one = strategy()
    one.configure_train(1, INITIAL, ConfigRecord(), LocalGrid(app(), num_nodes=CLIENTS))
    assert repr(one._pending).startswith("ServerSum(")


def test_a_loop_with_one_stage_is_refused_by_an_aggregation_that_takes_several() -> None:
    two = strategy()
    two.aggregation = TwoStages
    with pytest.raises(FedsimError, match="TwoStages asks clients in several stages"):
        Strategy.start(two, LocalGrid(app(), num_nodes=CLIENTS), INITIAL, 1)
    assert not two.ledger.entries
    assert two.rounds_done == 0
