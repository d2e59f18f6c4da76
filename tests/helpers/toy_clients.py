"""Clients whose answers have closed forms, for the engines' tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedsim.array_types import Ints
from fedsim.engines import array_record, tensors
from fedsim.federation.exchange import Instructions, Recipients
from fedsim.rows import Layout
from fedsim.rows.block import Block, BlockTrainer


@dataclass
class ToyTrainer(BlockTrainer):
    """Client k's update is -(w - k) / 2 plus keyed noise; clients in `raising` raise."""

    population: int = 7
    block_size: int = 3
    d: int = 4
    raising: frozenset[int] = frozenset()
    calls: list[list[int]] = field(default_factory=list)

    def _blocks(self, client_ids: Ints) -> Iterator[Ints]:
        for start in range(0, len(client_ids), self.block_size):
            block = client_ids[start : start + self.block_size]
            self.calls.append(block.tolist())
            if self.raising & set(block.tolist()):
                raise RuntimeError("out of luck")
            yield block

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        for ids in self._blocks(client_ids):
            rows = torch.stack([self.row(vector, k, round) for k in ids.tolist()])
            yield Block.sent(ids, rows, self._metrics(ids))

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        for ids in self._blocks(client_ids):
            yield Block.sent(ids, None, self._metrics(ids))

    def row(self, vector: Tensor, client: int, round: int) -> Tensor:
        draws = np.random.default_rng([5, round, client]).random(self.d)
        return -(vector - client) / 2 + torch.from_numpy(draws).to(vector.dtype)

    def _metrics(self, ids: Ints) -> dict[str, np.ndarray]:
        return {"num-examples": ids + 1.0, "loss": ids / 10.0}


def toy_instructions(
    ids: list[int], grid, message_type: str = "train", round: int = 1, d: int = 4
) -> Instructions:
    vector = torch.arange(d, dtype=torch.float32)
    arrays = {"w": vector.reshape(2, d // 2)}
    nodes = grid.client_ids()
    return Instructions(
        message_type=message_type,
        round=round,
        arrays=array_record(arrays),
        vector=vector,
        recipients=Recipients(
            np.array(ids, dtype=np.int64), np.array([nodes[k] for k in ids], dtype=np.uint64)
        ),
        config=ConfigRecord({"server-round": round}),
        layout=Layout.of(arrays) if message_type == "train" else None,
    )


def training(vector: Tensor, round: int = 1) -> Instructions:
    """Instructions to train from these parameters, without messages."""
    nobody = Recipients(np.empty(0, np.int64), np.empty(0, np.uint64))
    layout = Layout.of({"w": vector})
    return Instructions("train", round, ArrayRecord(), vector, nobody, ConfigRecord(), layout)


def toy_app() -> ClientApp:
    """Ordinary Flower app: client k moves its parameters half of the way to k."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        # What a careless client does: it empties the payload it was given, as Flower's own
        # to_numpy_ndarrays(keep_input=False) would (which collects garbage every time, too).
        record = message.content["arrays"]
        names = list(record)
        arrays = [record.pop(name).numpy() for name in names]
        k = context.node_config["partition-id"]
        for array in arrays:
            array += (k - array) / 2
        seen = int(context.state["seen"]["rounds"]) + 1 if "seen" in context.state else 1
        context.state["seen"] = MetricRecord({"rounds": seen})
        metrics = MetricRecord({"num-examples": k + 1, "rounds": seen})
        named = dict(zip(names, map(torch.from_numpy, arrays), strict=True))
        return Message(
            RecordDict({"arrays": array_record(named), "metrics": metrics}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        k = context.node_config["partition-id"]
        loss = float((tensors(message.content["arrays"])["w"] - k).square().mean())
        metrics = MetricRecord({"num-examples": k + 1, "loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app
