"""The loop over rounds: Flower's own, with a first round, a callback and an early stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

__all__ = ["Rounds", "round_timeout", "rounds_of", "run_to_end"]

_log = logging.getLogger("fedsim")


class Stoppable(Protocol):
    """A Flower strategy that says when no further round will be made."""

    stopped: str | None
    result: Result | None

    def summary(self) -> None:
        """Log the settings."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As Flower's."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As Flower's."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As Flower's."""

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """As Flower's."""


Rounds = Generator[Iterable[Message], Iterable[Message], Result]
"""Gives messages to send, takes their replies, returns what the run reached."""


def rounds_of(
    strategy: Stoppable,
    grid: Grid,
    initial_arrays: ArrayRecord,
    rounds: range,
    *,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    on_round: Callable[[int, Result], None] | None = None,
) -> Rounds:
    """The rounds of ``strategy``, up to whoever sends its messages; several can go in step.

    Ends early when the strategy has stopped.

    Parameters
    ----------
    grid : Grid
        Knows the nodes; nothing is sent over it here.

    Returns
    -------
    generator of Result
        Its ``arrays`` are the parameters reached: the initial ones if no round succeeded.
    """
    strategy.summary()
    # Held by the strategy too, so that an exception does not lose what was reached.
    result = strategy.result = Result(arrays=initial_arrays)
    if rounds and rounds[0] == 1 and evaluate_fn is not None:
        _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, initial_arrays))
    for server_round in rounds:
        asked = strategy.configure_train(
            server_round, result.arrays, train_config or ConfigRecord(), grid
        )
        if strategy.stopped is not None:
            break
        arrays, metrics = strategy.aggregate_train(server_round, (yield asked))
        if arrays is not None:
            result.arrays = arrays
        _keep(result.train_metrics_clientapp, server_round, metrics)
        evaluators = strategy.configure_evaluate(
            server_round, result.arrays, evaluate_config or ConfigRecord(), grid
        )
        if evaluators:
            metrics = strategy.aggregate_evaluate(server_round, (yield evaluators))
            _keep(result.evaluate_metrics_clientapp, server_round, metrics)
        if evaluate_fn is not None:
            central = evaluate_fn(server_round, result.arrays)
            _keep(result.evaluate_metrics_serverapp, server_round, central)
        if on_round is not None:
            on_round(server_round, result)
    return result


def round_timeout(grid: Grid, timeout: float, *, private: bool) -> float | None:
    """``timeout``, but None where it would let one client of a private run shut others out.

    Flower's runtimes know one deadline for all of a round: a client that is slow because of
    its data would decide whose updates are in the sum. fedsim's own engines count from each
    client's start.
    """
    if not private or getattr(grid, "times_each_client", False):
        return timeout
    _log.info(
        "timeout = %g s (engine.timeout) is not used: here it would be one deadline for all of a "
        "round, by which a slow client of a private run would shut others out.",
        timeout,
    )
    return None


def run_to_end(rounds: Rounds, grid: Grid, timeout: float | None) -> Result:
    """Send every message of ``rounds`` over ``grid``; what they reached."""
    try:
        messages = next(rounds)
        while True:
            messages = rounds.send(grid.send_and_receive(messages, timeout=timeout))
    except StopIteration as end:
        result: Result = end.value
        return result


def _keep(records: dict[int, MetricRecord], server_round: int, record: MetricRecord | None) -> None:
    if record is not None:
        records[server_round] = record
