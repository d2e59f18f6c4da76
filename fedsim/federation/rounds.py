"""The loop over rounds: as in Flower, plus rounds of several stages, resuming and early stops."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from functools import partial

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedsim.arguments import check_arguments
from fedsim.errors import FedsimError
from fedsim.federation.arrays import tensors
from fedsim.federation.exchange import Exchange
from fedsim.federation.state_tree import Tree
from fedsim.federation.strategy_checks import refuse_other_arrays
from fedsim.rows import Layout

_log = logging.getLogger("fedsim")


Rounds = Generator[Iterable[Message], Iterable[Message], Result]
"""Generator that yields messages to send, receives their replies, and returns the run's result."""


class ResumableStrategy(Strategy):
    """A Flower strategy that may stop early, and be resumed in another process.

    Attributes
    ----------
    protects : bool
        Whether the run claims privacy, at client or example level.
    rounds_done : int
        Number of the round that was aggregated last; 0 before the first.
    stopped : str or None
        Why the run has stopped early; None while it may continue.
    result : Result or None
        Result so far of `start`, available after an exception too.
    log : Logger
        Logger of the run: Flower's own once `start` was called.
    loop_has_stages : bool
        Whether the loop that drives the rounds asks for `next_stage`, as `rounds_of` does.
    """

    log: logging.Logger = _log
    loop_has_stages: bool = False
    protects: bool
    rounds_done: int = 0
    stopped: str | None = None
    result: Result | None = None
    _observer_failed: bool = False

    @abstractmethod
    def restore(self, state: Tree) -> None:
        """Continue from the state that an equal strategy had after a round."""

    def next_stage(self, replies: Iterable[Message]) -> Iterable[Message] | None:
        """Messages of the round's next stage, given these replies; None if it has no more stages.

        By default a round has one stage.
        """
        return None

    @abstractmethod
    def set_layout(self, server: dict[str, Tensor]) -> Layout:
        """Return the layout of a row of these parameters; raise if they cannot be trained."""

    @abstractmethod
    def progress(self) -> list[str]:
        """Log lines about the round that was aggregated last."""

    @check_arguments
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        first_round: int | None = None,
        state: Tree | None = None,
        on_round: Callable[[int, Result], None] | None = None,
    ) -> Result:
        """Run rounds up to ``num_rounds``, like Flower's ``start``, but stop at the budget.

        Parameters
        ----------
        timeout : float
            Seconds that a client may take. It is ignored in a private run whose grid has one
            deadline for the whole round, since one slow client could then exclude others.
        first_round : int, optional
            First round of a resumed run; by default the one after the last round of ``state``.
        state : mapping, optional
            `DPFedAvg.state` after the previous round, possibly from another process;
            ``initial_arrays`` are then the parameters after that round.
        on_round : callable, optional
            Called after each round with its number and the result so far. An exception that it
            raises is logged, and the run continues.

        Raises
        ------
        FedsimError
            If the initial arrays are not the parameters that the grid's clients train; or if
            ``first_round`` does not follow the last round of this strategy or of ``state``:
            momentum, bounds and budget would start from the beginning.
        """
        if num_rounds < 1:
            raise FedsimError(f"num_rounds is {num_rounds}; it must be at least 1.")
        if not timeout > 0:
            raise FedsimError(f"timeout is {timeout}; it must be above 0 seconds.")
        arrays = tensors(initial_arrays)
        refuse_other_arrays(arrays, getattr(grid, "layout", None))
        self.log = logging.getLogger("flwr")
        if state is not None:
            self.restore(state)
        elif first_round is None:
            first_round = 1
        if first_round is not None:
            self._check_first(first_round)
        self.set_layout(arrays)
        self.log.info("Starting %s strategy:", type(self).__name__)
        self.log.info("\t├──> Number of rounds: %s", num_rounds)
        rounds = rounds_of(
            self,
            grid,
            initial_arrays,
            range(self.rounds_done + 1, num_rounds + 1),
            train_config=train_config,
            evaluate_config=evaluate_config,
            evaluate_fn=evaluate_fn,
            on_round=partial(self._log_round, num_rounds, on_round),
        )
        return run_to_end(rounds, grid, round_timeout(grid, timeout, private=self.protects))

    def _log_round(
        self,
        num_rounds: int,
        observer: Callable[[int, Result], None] | None,
        server_round: int,
        result: Result,
    ) -> None:
        """Log a round as Flower does, and call the observer; its exceptions do not end the run."""
        self.log.info("[ROUND %s/%s]", server_round, num_rounds)
        # Computing the epsilon for these lines takes time, so skip it where they are not logged.
        for line in self.progress() if self.log.isEnabledFor(logging.INFO) else ():
            self.log.info("%s", line)
        for records in (
            result.train_metrics_clientapp,
            result.evaluate_metrics_clientapp,
            result.evaluate_metrics_serverapp,
        ):
            if server_round in records:
                self.log.info("\t└──> MetricRecord: %s", dict(records[server_round]))
        try:
            if observer is not None:
                observer(server_round, result)
        except Exception:
            if not self._observer_failed:
                self.log.warning("on_round failed; the run continues.", exc_info=True)
            self._observer_failed = True

    def _check_first(self, first_round: int) -> None:
        done = self.rounds_done
        if first_round == 1 and done:
            raise FedsimError(
                f"this strategy has done {done} rounds; a new run needs a new one, or its noise "
                "would be drawn twice."
            )
        if first_round != done + 1:
            raise FedsimError(
                f"first_round is {first_round}, but {done} rounds have been done here; give a new "
                f"strategy the state= that a run has after round {first_round - 1}, without which "
                "its momentum, bounds and budget would start from the beginning."
            )


@check_arguments
def rounds_of(
    strategy: ResumableStrategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    rounds: range,
    *,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    on_round: Callable[[int, Result], None] | None = None,
) -> Rounds:
    """Run the rounds of ``strategy`` as a generator; the caller sends the messages it yields.

    Several runs can thus advance in step over one grid. Ends early when the strategy has stopped.

    Parameters
    ----------
    grid : Grid
        Lists the available nodes; nothing is sent over it here.

    Returns
    -------
    generator of Result
        Its ``arrays`` are the last released parameters: the initial ones if no round succeeded.
    """
    strategy.loop_has_stages = True
    strategy.summary()
    # The strategy refers to it too, so that an exception does not lose the result so far.
    result = strategy.result = Result(arrays=initial_arrays)
    if rounds and rounds[0] == 1 and evaluate_fn is not None:
        _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, initial_arrays))
    for server_round in rounds:
        messages = strategy.configure_train(
            server_round, result.arrays, train_config or ConfigRecord(), grid
        )
        if _has_stopped(strategy):
            break
        replies = yield messages
        while (stage := strategy.next_stage(replies)) is not None:
            replies = yield stage
        arrays, metrics = strategy.aggregate_train(server_round, replies)
        if _has_stopped(strategy):
            break
        if arrays is not None:
            result.arrays = arrays
        _keep(result.train_metrics_clientapp, server_round, metrics)
        evaluators = strategy.configure_evaluate(
            server_round, result.arrays, evaluate_config or ConfigRecord(), grid
        )
        # Private metrics are released even if no client was sampled: silence would show that.
        replies = (yield evaluators) if evaluators else ()
        metrics = strategy.aggregate_evaluate(server_round, replies)
        _keep(result.evaluate_metrics_clientapp, server_round, metrics)
        if evaluate_fn is not None:
            central = evaluate_fn(server_round, result.arrays)
            _keep(result.evaluate_metrics_serverapp, server_round, central)
        if on_round is not None:
            on_round(server_round, result)
    return result


def _has_stopped(strategy: ResumableStrategy) -> bool:
    return strategy.stopped is not None


@check_arguments
def round_timeout(grid: Grid, timeout: float, *, private: bool) -> float | None:
    """``timeout``, or None where it would let one client of a private run exclude others.

    Where clients share workers, as in Flower's simulation, one deadline applies to the whole round:
    a client that is slow because of its data would decide whose updates are in the sum. fedsim's
    own engines measure from each client's start, and so does a deployment, whose nodes start when
    they receive their message.
    """
    if not private or getattr(grid, "times_each_client", False):
        return timeout
    _log.info(
        "timeout = %g s (engine.timeout) does not end a round here: one deadline for all of it "
        "would let a slow client of a private run shut others out. fedsim's own clients count it "
        "each from its own start.",
        timeout,
    )
    return None


@check_arguments
def run_to_end(rounds: Rounds, grid: Grid, timeout: float | None) -> Result:
    """Send every message of ``rounds`` over ``grid``, and return the result."""
    try:
        messages = next(rounds)
        while True:
            if isinstance(messages, Exchange):
                messages = rounds.send(messages.over(grid, timeout))
            else:
                messages = rounds.send(grid.send_and_receive(messages, timeout=timeout))
    except StopIteration as end:
        result: Result = end.value
        return result


def _keep(records: dict[int, MetricRecord], server_round: int, record: MetricRecord | None) -> None:
    if record is not None:
        records[server_round] = record
