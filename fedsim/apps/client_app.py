"""The ClientApp that Flower's runtimes load.

A deployed SuperNode starts a process for every message, so torch is imported only where
there is something to train: saying who one is takes a tenth of the time.
"""

from __future__ import annotations

import functools

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsim.apps.identity import client_id

__all__ = ["app"]

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which client this node is."""
    metrics = MetricRecord({"client-id": client_id(context.node_config)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this node's data."""
    return _client()(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on this node's data."""
    return _client()(message, context)


@functools.cache
def _client() -> ClientApp:
    from fedsim.apps.node import mechanism_for, trainer_for
    from fedsim.engines.client_app import client_app

    return client_app(trainer_for, mechanism_for)
