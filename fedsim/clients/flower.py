"""The same trainer as an ordinary Flower ClientApp: a block of one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedsim.clients.trainer import Trainer
from fedsim.errors import FedsimError

__all__ = ["client_app"]


def client_app(trainer_for: Callable[[Context], Trainer]) -> ClientApp:
    """A ClientApp that trains and evaluates one client with `Trainer`.

    Parameters
    ----------
    trainer_for : callable
        Gives the trainer for a node's context. It is called once a message, so cache what is
        expensive. The client is the node's ``partition-id``.

    Returns
    -------
    ClientApp
        ``train`` replies all parameters, as ordinary Flower clients do, and ``num-examples``,
        ``loss`` and what the algorithm reports; ``evaluate`` replies ``num-examples``, ``loss``
        and ``accuracy``; ``query`` replies ``client-id``.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trainer, ids = trainer_for(context), _client_ids(context)
        key, arrays = _arrays(message)
        vector = _vector(trainer, arrays)
        local = trainer.fit(vector, ids, _round(message))
        # Entries that are not trained go back as they came.
        reply = ArrayRecord(dict(arrays))
        for entry, (name, value) in zip(
            trainer.layout.entries, trainer.layout.unflatten(local.theta[0]).items(), strict=True
        ):
            reply[name] = Array(value.to(entry.dtype).cpu().numpy())
        metrics = _metrics({name: float(column[0]) for name, column in local.metrics.items()})
        return Message(RecordDict({key: reply, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        trainer, ids = trainer_for(context), _client_ids(context)
        _, arrays = _arrays(message)
        (block,) = trainer.evaluate(_vector(trainer, arrays), ids, _round(message))
        metrics = _metrics({name: float(column[0]) for name, column in block.metrics.items()})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"client-id": int(_client_ids(context)[0])})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def _client_ids(context: Context) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    client = context.node_config.get("partition-id")
    if not isinstance(client, int) or isinstance(client, bool):
        raise FedsimError(
            f"node-config 'partition-id' is {client!r}; it must be this client's id, an integer."
        )
    return np.array([client], dtype=np.int64)


def _arrays(message: Message) -> tuple[str, ArrayRecord]:
    records = message.content.array_records
    if len(records) != 1:
        raise FedsimError(f"a message carries {len(records)} array records; it must carry one.")
    return next(iter(records.items()))


def _vector(trainer: Trainer, arrays: ArrayRecord) -> Tensor:
    return trainer.layout.flatten(arrays.to_torch_state_dict())


def _round(message: Message) -> int:
    records: list[ConfigRecord] = list(message.content.config_records.values())
    for record in records:
        value = record.get("server-round")
        if isinstance(value, int):
            return value
    return 0


def _metrics(values: dict[str, float]) -> MetricRecord:
    count = int(values.pop("num-examples"))
    return MetricRecord({"num-examples": count, **values})
