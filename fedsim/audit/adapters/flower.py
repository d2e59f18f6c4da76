"""A target from a Flower strategy, with or without client mods, on a grid in this process."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


def strategy_target(
    make: Callable[[Any], Any],
    mods: Callable[[Any], Sequence[Mod]] = lambda federation: (),
) -> Callable[[Any], Any]:
    """Make a target that runs a strategy over clients whose updates are known.

    Parameters
    ----------
    make : callable
        Makes a fresh strategy for a synthetic federation.
    mods : callable
        Makes the client mods for a synthetic federation, the outermost first.
    """

    def target(federation: Any) -> Any:
        # Flower's strategies draw clients and noise from these global generators.
        random.seed(federation.seed)
        np.random.seed(federation.seed % 2**32)  # noqa: NPY002
        models: list[Any] = []

        def look(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if server_round:
                models.append(arrays.to_numpy_ndarrays())
                # A round whose cohort is empty sends no messages.
                grid.sampled += [[]] * (server_round - len(grid.sampled))
            return None

        _identify()
        grid = _Federation(federation, mods(federation))
        initial = ArrayRecord([np.array(array) for array in federation.initial])
        with _Silence():
            make(federation).start(grid, initial, num_rounds=federation.rounds, evaluate_fn=look)
        return {"models": models, "sampled": grid.sampled}

    return target


class _Federation(Grid):
    """Grid of clients that reply at once with their update and reported number of examples."""

    def __init__(self, federation: Any, mods: Sequence[Mod]) -> None:
        self.sampled: list[list[int]] = []
        self._federation = federation
        self._train = self._update
        for mod in reversed(mods):
            self._train = _before(mod, self._train)
        self._contexts = {
            node: Context(1, node, {}, RecordDict(), {}) for node in self.get_node_ids()
        }

    def set_run(self, run: Any, *_: Any, **__: Any) -> None:
        """Do nothing; strategies call it."""

    @property
    def run(self) -> Any:
        """Not used."""
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Not used: strategies make their messages themselves."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Ids of all nodes; client i is node i + 1."""
        return list(range(1, self._federation.population + 1))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Not used: strategies call `send_and_receive`."""
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Not used: strategies call `send_and_receive`."""
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Replies to training messages; none to others, such as evaluation."""
        training = [m for m in messages if m.metadata.message_type.startswith("train")]
        if not training:
            return []
        self.sampled.append([m.metadata.dst_node_id - 1 for m in training])
        return [self._train(m, self._contexts[m.metadata.dst_node_id]) for m in training]

    def _update(self, message: Message, context: Context) -> Message:
        client = message.metadata.dst_node_id - 1
        ((name, sent),) = message.content.array_records.items()
        update = self._federation.update(client)
        arrays = {
            key: Array(np.asarray(sent[key].numpy() + move))
            for key, move in zip(sent.keys(), update, strict=True)
        }
        metrics = MetricRecord({"num-examples": float(self._federation.examples[client])})
        content = RecordDict({name: ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)


def _identify() -> None:
    """Set the process's identity, which newer Flower releases need to make messages."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    for name in ("run_id", "node_id", "task_id"):
        setattr(TaskIdentity, name, 1)


def _before(mod: Mod, train: Callable[[Message, Context], Message]) -> Any:
    return lambda message, context: mod(message, context, train)


class _Silence:
    """Context that silences Flower's log."""

    def __enter__(self) -> None:
        self._log = logging.getLogger("flwr")
        self._level = self._log.level
        self._log.setLevel(logging.CRITICAL + 1)

    def __exit__(self, *_: object) -> None:
        self._log.setLevel(self._level)
