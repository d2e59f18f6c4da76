"""The ClientApp that Flower's runtimes load.

Flower's simulation imports it in every worker, so torch is imported only when something is trained:
without it, answering which client a node is takes a tenth of the time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedsim.federation.engines.packed_messages import answer_packed
from fedsim.federation.flower_internals import client_id

if TYPE_CHECKING:
    from fedsim.deploy.policy import Policy


app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer which client this node is."""
    metrics = MetricRecord({"client-id": client_id(context.node_config)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _declared_seconds(context: Context) -> float:
    """Declared seconds of a buffered cohort's task in a deployment; 0 for none."""
    seconds = context.run_config.get("devices.duration", 0.0)
    is_real = context.run_config.get("engine.name") == "deployment"
    return float(seconds) if is_real and isinstance(seconds, int | float) else 0.0


def _held(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Mod that holds the answers of tasks whose seconds are declared; also those of a refusal."""
    from fedsim.federation.engines.client_app import hold_answers

    return hold_answers(_declared_seconds)(message, context, call_next)


@app.train(mods=[answer_packed, _held])
def train(message: Message, context: Context) -> Message:
    """Train on this node's data, if its policy allows it."""
    with _admitted(context) as policy:
        if policy is not None:
            from fedsim.config import RunConfig

            config = RunConfig.from_run_config(context.run_config)
            client = client_id(context.node_config)
            if policy.check_training(message, config, client):
                policy.join(client)
        reply = _client()(message, context)
        if policy is not None and not policy.answers_evaluation:
            _leave_metrics_out(reply)
        return reply


def _leave_metrics_out(reply: Message) -> None:
    """Remove from a reply the metrics of the client's data that the server's sum does not need."""
    from fedsim.federation.engines.client_app import AGGREGATED_METRICS

    for record in reply.content.metric_records.values() if reply.has_content() else ():
        for name in [name for name in record if not name.startswith(AGGREGATED_METRICS)]:
            del record[name]


@app.evaluate(mods=[answer_packed])
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on this node's data, if its policy allows it."""
    with _admitted(context) as policy:
        if policy is not None:
            from fedsim.config import RunConfig

            policy.check_evaluation(RunConfig.from_run_config(context.run_config))
        return _client()(message, context)


@contextmanager
def _admitted(context: Context) -> Iterator[Policy | None]:
    """Check a run against this node's policy, and yield the policy (None if the node has none).

    Within the context, a config can name only code that the node's owner allows.
    """
    from fedsim import allowed_code
    from fedsim.config import RunConfig
    from fedsim.deploy.policy import Policy

    with allowed_code.use(Policy.process_allowed_code()):
        config = RunConfig.from_run_config(context.run_config)
        policy = Policy.here(config)
        if policy is not None:
            policy.check(config)
        yield policy


@functools.cache
def _client() -> ClientApp:
    from fedsim.apps.node import mechanism_for, trainer_for
    from fedsim.config import RunConfig
    from fedsim.federation.engines.client_app import client_app

    def seconds_for(context: Context) -> float:
        limit = RunConfig.from_run_config(context.run_config).engine.timeout
        # After the task's declared seconds its update counts no more.
        return min(limit, _declared_seconds(context) or math.inf)

    def threshold_for(context: Context) -> int:
        return RunConfig.from_run_config(context.run_config).secagg.threshold

    return client_app(trainer_for, mechanism_for, seconds_for, threshold_for)
