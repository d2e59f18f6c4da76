"""A federation of ordinary Flower clients, one of which answers badly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsim.engines import LocalGrid

__all__ = ["SILENCES", "message_grid"]

Answer = Callable[[], RecordDict]


def _metrics(examples: float = 1.0) -> MetricRecord:
    return MetricRecord({"num-examples": examples})


def _arrays(*sizes: int) -> ArrayRecord:
    return ArrayRecord({f"entry{k}": Array(np.zeros(size)) for k, size in enumerate(sizes)})


SILENCES: Mapping[str, Answer] = {
    "answers nothing at all": lambda: RecordDict(),
    "answers no parameters": lambda: RecordDict({"metrics": _metrics()}),
    "answers other parameters": lambda: RecordDict(
        {"arrays": _arrays(3, 1), "metrics": _metrics()}
    ),
    "answers empty parameters": lambda: RecordDict(
        {"arrays": ArrayRecord(), "metrics": _metrics()}
    ),
    "answers a setting": lambda: RecordDict({"config": ConfigRecord({"num-examples": "many"})}),
}
"""What a client may send instead of its parameters."""


def message_grid(population: int, answer: Answer | None) -> LocalGrid:
    """Clients that reply the parameters they got; the last one replies ``answer``, or fails."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == population - 1:
            if answer is None:
                raise RuntimeError("the canary has no answer")
            return Message(answer(), reply_to=message)
        arrays = next(iter(message.content.array_records.values()))
        content = RecordDict({"arrays": arrays, "metrics": _metrics()})
        return Message(content, reply_to=message)

    return LocalGrid(app, num_nodes=population)
