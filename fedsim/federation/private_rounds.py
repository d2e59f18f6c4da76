"""A private round: sample, send, aggregate, record in the ledger, release, step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.federation import strategy_state
from fedsim.federation.accounting import Accounting
from fedsim.federation.aggregation.server_sum import (
    Aggregation,
    AggregationSettings,
    ServerSum,
)
from fedsim.federation.arrays import array_record, tensors, to_arrays
from fedsim.federation.client_metrics import ClientEvaluation
from fedsim.federation.client_settings import ClientTraining
from fedsim.federation.exchange import Instructions
from fedsim.federation.extras import Extra, RoundResult, receive_reply
from fedsim.federation.participants import Participants
from fedsim.federation.round_report import Failures, RoundReport
from fedsim.federation.rounds import ResumableStrategy
from fedsim.federation.state_tree import Tree
from fedsim.federation.strategy_checks import refuse_too_many, refuse_untrainable
from fedsim.mechanisms import Mechanism, State
from fedsim.mechanisms.base import state_on, without_noise
from fedsim.privacy import Ledger
from fedsim.privacy.ledger import LedgerPosition
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.rows import Layout
from fedsim.rows.block import RUN
from fedsim.server_optimizers import ServerOptimizer


class PrivateRounds(ResumableStrategy):
    """The rounds of a strategy, for any aggregation, extras and server optimiser.

    A round is `configure_train`, the stages of its aggregation, and `aggregate_train`. Accounting,
    ledger and budget are in these two, whatever loop calls them in turn. `DPFedAvg` sets the
    attributes from its keywords.

    Attributes
    ----------
    plan : ReleasePlan
        What every round releases, and what that costs.
    private, protects : bool
        Whether the run claims privacy at client level, and at either level.
    participants : Participants
        Samples cohorts, and finds which of their clients take part.
    aggregation : callable ``(settings, instructions, state, in_blocks)``
        Creates the aggregation of each round; its arguments are those of `ServerSum`.
    extras : dict of str to Extra
        Extras by their name in a checkpoint, in the order in which they are called.
    evaluation : ClientEvaluation
        Samples the clients that evaluate, and aggregates or releases their metrics.
    report : RoundReport or None
        What happened in the round aggregated last.
    """

    plan: ReleasePlan[Mechanism]
    delta: float
    ledger: Ledger
    randomness: Randomness
    private: bool
    server_optimizer: ServerOptimizer
    _accounting: Accounting
    _client_training: ClientTraining
    participants: Participants
    evaluation: ClientEvaluation
    _aggregation_settings: AggregationSettings
    aggregation: Aggregation
    extras: dict[str, Extra]
    _failures: Failures

    def __init__(self) -> None:
        self.report: RoundReport | None = None
        self._pending: ServerSum | None = None
        self._mechanism_state: State = {}
        # A row's layout, and its parameters as in a checkpoint; None before the first round.
        self._layout: Layout | None = None
        self._parameters: list[list[Any]] | None = None

    # -- training ---------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the cohort and make its messages; none if the budget does not allow a release.

        Raises
        ------
        ValueError
            If the round, or a later one, was aggregated before: its draws would be used twice.
        FedsimError
            If the aggregation takes several stages, and the loop has one, as Flower's loops do.
        """
        if server_round <= self.rounds_done:
            raise ValueError(
                f"round {server_round} cannot follow round {self.rounds_done}: its noise and "
                "cohort would be drawn twice; a new run needs a new strategy."
            )
        self._pending = None
        if self.stopped is not None or self._stops(self._accounting.refusal(server_round)):
            return []
        server = tensors(arrays)
        layout = self.set_layout(server)
        cohort, replying = self.participants.cohort(server_round), self.participants.replying
        recipients = self.participants.available_recipients(server_round, cohort, grid, replying)
        recipients, refusal = self._client_training.charge_recipients(
            recipients, server_round, private=self.private
        )
        if self._stops(refusal):
            return []
        released = self._model.flatten(server)
        vector = self.server_optimizer.starting_point(released)
        if vector is not released:
            arrays = array_record(to_arrays(vector, self._model, server))
        instructions = Instructions(
            message_type="train",
            round=server_round,
            arrays=arrays,
            vector=vector,
            recipients=recipients,
            config=config,
            layout=layout,
            keys=self._aggregation_settings.keys,
        )
        for extra in self.extras.values():
            instructions = extra.send(instructions)
        entries = {**instructions.config, RUN: self.run, "server-round": server_round}
        aggregation = self.aggregation(
            self._aggregation_settings,
            replace(instructions, config=ConfigRecord(entries)),
            self._mechanism_state,
            getattr(grid, "trains_blocks", False),
        )
        # A loop without stages would send the first stage only, and every round would be lost.
        if type(aggregation).next_stage is not ServerSum.next_stage and not self.loop_has_stages:
            raise FedsimError(
                f"{type(aggregation).__name__} asks clients in several stages, but this loop sends "
                f"one set of messages a round; run it by {type(self).__name__}.start(...) itself, "
                "not by a Flower strategy or workflow around it."
            )
        if aggregation.charged_before_request and self._recorded(server_round):
            return []
        self._pending = aggregation
        return aggregation.request()

    def next_stage(self, replies: Iterable[Message]) -> Iterable[Message] | None:
        """The messages of the round's next stage, if its aggregation takes several."""
        return None if self._pending is None else self._pending.next_stage(replies)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Bound and sum the updates, record the release in the ledger, make it, and step.

        Returns
        -------
        tuple
            New parameters, None if no release was made (for example because a client's own budget
            stops the run); and the training metrics, None in a private run without
            ``ClientMetrics(unprotected=True)``.

        Raises
        ------
        RunFailedError
            After ``Availability.max_failed_rounds`` rounds in a row without a usable reply, in a
            run without privacy.
        ValueError
            If this round was not configured, or has been aggregated before.
        """
        if self.stopped is not None:
            return None, None
        aggregation, self._pending = self._pending, None
        if aggregation is None or aggregation.instructions.round != server_round:
            raise ValueError(f"round {server_round} was not configured, or is aggregated already.")
        self.rounds_done = server_round
        for reply in aggregation.replies(replies):
            added = aggregation.add(reply)
            for extra in self.extras.values():
                failed = receive_reply(extra, added)
                aggregation.tally.reject(np.array(failed, dtype=np.int64), "malformed")
        report = aggregation.tally.report(server_round)
        summed = aggregation.total.count
        self.report = replace(report, summed=summed, ignored=self.participants.ignored)
        summing = aggregation.summing
        # On disk before the release exists: a crash from here on charges one too many, never less.
        if self._stops(self._client_training.budgets_spent(report)) or (
            not aggregation.charged_before_request and self._recorded(server_round)
        ):
            self.rounds_done = server_round - 1  # this round is not made
            return None, None
        if aggregation.why_lost is not None:
            self.log.warning(
                "round %s is lost, and charged: %s.", server_round, aggregation.why_lost
            )
            return None, None
        all_failed = summed == 0 and summing.asked > 0
        self._failures.record(self.report, lost=all_failed)
        # Whether noise is released must not depend on which clients failed.
        if all_failed and not self.private:
            return None, None
        return self._release(aggregation)

    def _release(self, aggregation: ServerSum) -> tuple[ArrayRecord, MetricRecord | None]:
        """Make the release that the ledger has recorded, and the server optimiser's step."""
        assert self.report is not None
        instructions, release = aggregation.instructions, aggregation.release()
        number, device = instructions.round, instructions.vector.device
        self._mechanism_state = state_on(release.state, device)
        result = RoundResult(number, release.mean.to(device), aggregation.total.count)
        for extra in self.extras.values():
            result = extra.finish(result)
        update, start = result.update, instructions.vector[: len(result.update)]
        vector = self.server_optimizer.step(start, update)
        sides = {name: float(mean) for name, mean in release.side_scalars.items()}
        self.report = replace(
            self.report, info={**release.info, **sides}, update_norm=float(update.norm())
        )
        arrays = array_record(to_arrays(vector, self._model, tensors(instructions.arrays)))
        return arrays, result.metrics

    def _recorded(self, server_round: int) -> bool:
        """Write the round's ledger line; True if the budget does not allow it, which stops the run.

        It is written before anything leaves the place that adds the noise.
        """
        assert self._layout is not None
        clip_norm = self.plan.mechanism.sensitivity(self._mechanism_state, self._layout)
        return self._stops(self._accounting.record(server_round, clip_norm))

    def _stops(self, reason: str | None) -> bool:
        """Stop the run if a reason is given; return whether one was."""
        if reason is not None:
            self.stopped = reason
            self.log.warning("stopping: %s.", reason)
        return reason is not None

    def check(self, arrays: ArrayRecord) -> None:
        """Raise now the errors that the first round would raise.

        Parameters
        ----------
        arrays : ArrayRecord
            The initial parameters.

        Raises
        ------
        FedsimError
            If the mechanism or the budget does not fit the model.
        """
        layout = self.set_layout(tensors(arrays))
        self.plan.mechanism.sensitivity(self._mechanism_state, layout)
        self._accounting.check()
        if (evaluations := self.evaluation.accounting) is not None:
            evaluations.check()

    def set_layout(self, server: dict[str, Tensor]) -> Layout:
        """The layout of a row, the same in all rounds; the first call initialises the state.

        Raises
        ------
        FedsimError
            If these parameters cannot be trained here, or differ from those of earlier rounds.
        """
        self._model = layout = Layout.of(server)
        for extra in self.extras.values():
            layout = extra.row_layout(layout)
        if layout == self._layout:
            return layout
        if self._layout is not None:
            raise FedsimError("the model's parameters changed names or shapes during the run.")
        refuse_untrainable(server, private=self.private)
        parameters = [[entry.name, list(entry.shape), str(entry.dtype)] for entry in layout.entries]
        if self._parameters is None:
            self._mechanism_state = self.plan.mechanism.init(layout)
        elif self._parameters != parameters:
            raise FedsimError("state= is of a model with other parameters than these.")
        device = next(iter(server.values())).device
        self._mechanism_state = state_on(self._mechanism_state, device)
        self._layout, self._parameters = layout, parameters
        # Raises if the noise cannot be split as the mechanism needs, before any client is asked.
        releaser = self._aggregation_settings.releaser(layout)
        refuse_too_many(self.plan.sampler, releaser.max_rows)
        return layout

    # -- state ------------------------------------------------------------------------

    @property
    def run(self) -> str:
        """Random id of the run, by which its ledger lines and its clients' state are known."""
        return self._accounting.run

    def begin(self, run: str) -> None:
        """Take the id of a run, which may have begun in another process without a checkpoint.

        What it has written into a log is cut off; in evidence it stays, and is charged.
        """
        self._accounting.run = run
        self.ledger.resume(LedgerPosition(), run)

    def charge_rest(self, rounds: int) -> None:
        """Charge the rest of so many planned rounds, since what was released has ended the run.

        If the run is resumed after all, it makes them at no further cost.
        """
        self._accounting.charge_rest(self.rounds_done, rounds)

    @property
    def mechanism_state(self) -> State:
        """The mechanism's state after the round aggregated last, as public as the releases."""
        return without_noise(self._mechanism_state)

    def state(self) -> Tree:
        """Everything but the parameters that a resumed run needs; see `restore`.

        Returns
        -------
        mapping of str to tensors, JSON values, and such mappings
            ``round``, the last one aggregated; ``parameters`` (names, shapes and dtypes),
            ``mechanism``, ``noise`` (secrets, until the plan's last round), ``plan`` (its rounds,
            where they are fixed before the first), ``cohort`` (the sampler's state), ``optimizer``,
            the state of each extra by its name, ``failures``, ``stopped``, and ``ledger``: the
            run's id, its head, and its lines if it is in memory only.
        """
        plan = self.plan
        mechanism, noise = self._mechanism_state, self._aggregation_settings.noise.state()
        if self.rounds_done >= (plan.rounds or math.inf) and self.randomness.seed is None:
            # No further round needs them, and with them noise could be subtracted from releases.
            mechanism, noise = without_noise(mechanism), None
        return {
            "round": self.rounds_done,
            "parameters": self._parameters,
            "mechanism": {name: value.clone() for name, value in mechanism.items()},
            **({} if noise is None else {"noise": noise}),
            **({"plan": strategy_state.plan_state(plan)} if plan.closed else {}),
            **{
                n: part
                for n, owner in self._stateful_parts.items()
                if (part := owner.state()) is not None
            },
            "stopped": self.stopped,
            "ledger": self._accounting.state(),
        }

    def restore(self, state: Tree) -> None:
        """Continue from `state`, in a strategy that was made with the same settings.

        With the operating system's entropy, all further rounds are drawn under a fresh secret.

        Raises
        ------
        FedsimError
            If it is no such state, or this strategy has done rounds of its own, or its ledger lacks
            releases that the state counts, or its plan does not continue that of the state. The
            strategy is then as it was.
        """
        strategy = type(self).__name__
        strategy_state.check_form(state, strategy)
        if self.rounds_done:
            raise FedsimError(
                f"this strategy has done {self.rounds_done} rounds; state= needs a new strategy."
            )
        with strategy_state.as_state_error(strategy):
            strategy_state.check_noise(state, self.plan, seeded=self.randomness.seed is not None)
            strategy_state.check_plan(self.plan, state)
            self._accounting.check_ledger(state["ledger"])
            strategy_state.check_shapes(state, self.plan.mechanism, self.server_optimizer)
            mechanism = {name: value.clone() for name, value in state["mechanism"].items()}
            noise = self._aggregation_settings.noise
            strategy_state.restore_parts({"noise": noise, **self._stateful_parts}, state)
        # From here on nothing raises.
        self._accounting.restore(state["ledger"])
        self._layout, self._parameters = None, state["parameters"]
        self._mechanism_state = mechanism
        self.rounds_done = self.evaluation.last_round = state["round"]
        self.stopped = state["stopped"]
        self._aggregation_settings.noise.renew_secret(self.rounds_done + 1)

    @property
    def _stateful_parts(self) -> dict[str, Any]:
        """The parts that have a state, by their names in a checkpoint."""
        return {
            "cohort": self.participants,
            "optimizer": self.server_optimizer,
            "failures": self._failures,
            **self.extras,
        }

    # -- evaluation by clients --------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages that ask clients to evaluate; none if the budget does not allow a release."""
        config = ConfigRecord({**config, RUN: self.run})
        try:
            return self.evaluation.configure(server_round, arrays, config, grid)
        except BudgetSpentError as error:
            self._stops(str(error))
            return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Means of the clients' metrics, noisy for private metrics.

        None if no client evaluated, or if the noise is too large to give any mean.
        """
        try:
            return self.evaluation.aggregate(server_round, replies)
        except BudgetSpentError as error:
            self._stops(str(error))
            return None
