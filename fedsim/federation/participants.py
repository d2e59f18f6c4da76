"""Participants of a round: sampling of cohorts and evaluators, and availability of clients."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid

from fedsim.array_types import Ints
from fedsim.errors import FedsimError
from fedsim.federation.buffered.schedule import ReleaseSchedule
from fedsim.federation.engines.directory import ClientDirectory, ConsecutiveNodes
from fedsim.federation.engines.streaming import StreamingGrid
from fedsim.federation.exchange import Recipients
from fedsim.privacy.laws import Participation, SamplerState, declared_population
from fedsim.privacy.plan import MechanismLike, ReleasePlan
from fedsim.randomness import Draws, Purpose, Randomness
from fedsim.settings import Ge, check_settings

_log = logging.getLogger("fedsim")

AvailabilityRule = Callable[[int, Ints], npt.NDArray[np.bool_]]
"""Function of ``(round, client ids [n])`` that returns which of them take part, bool ``[n]``."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Which clients can be reached, and how long a strategy continues without them.

    Parameters
    ----------
    replying : callable ``(round, client ids [n]) -> bool [n]``, optional
        Which of the sampled clients take part, for example from a trace of devices; the others
        count as missing. It must not depend on clients' data.
    reachable : callable ``(round, client ids [n]) -> bool [n]``, optional
        Which of the clients sampled for an evaluation can be reached, likewise.
    schedule : ReleaseSchedule, optional
        Of a buffered cohort: who trains which version when.
    real_time : bool
        With a buffered cohort: whether clients take real time, as they do over a network. Each has
        the seconds of the schedule, and is a zero in its release if it has not answered by then.
        Without a schedule a release is made of the answers that come first, which a private run
        may not.
    node_timeout : float
        Seconds to wait for ``min_available_nodes`` clients before a round.
    max_failed_rounds : int
        Number of consecutive rounds without a usable reply that fails a run without privacy; or
        all rounds of a shorter run.
    """

    replying: AvailabilityRule | None = None
    reachable: AvailabilityRule | None = None
    schedule: ReleaseSchedule | None = None
    real_time: bool = False
    node_timeout: Annotated[float, Ge(0)] = 180.0
    max_failed_rounds: Annotated[int, Ge(1)] = 3

    def __post_init__(self) -> None:
        check_settings(self)


class Participants:
    """Samples cohorts and evaluators from a declared population.

    Parameters
    ----------
    plan : ReleasePlan
        Its sampler, which must declare its population, is copied for the draws.
    randomness : Randomness
    min_available : int
        Number of clients to wait for before a round.
    availability : Availability
    private : bool
        If True, wait for them before the first round only: later, clients may have left because of
        their data, and one is enough.

    Attributes
    ----------
    replying, reachable
        As in ``availability``.
    ignored : int
        Number of nodes, at the last look, that are no clients of the run.
    """

    def __init__(
        self,
        plan: ReleasePlan[MechanismLike],
        randomness: Randomness,
        min_available: int,
        availability: Availability,
        *,
        private: bool,
    ) -> None:
        self.population = declared_population(plan.sampler)
        # A copy, since a sampler's state belongs to one run and the plan may be used in several.
        self._cohort = copy.deepcopy(plan.sampler)
        self._schedule, self._real_time = availability.schedule, availability.real_time
        self._randomness = randomness
        self._draws = Draws(randomness, level="client", amplified=plan.amplified)
        self._min_available = min_available
        self.replying, self.reachable = availability.replying, availability.reachable
        self._private = private
        # Whether the charge counts on a client being sampled in some rounds of the plan only.
        rounds = plan.rounds or 2
        self._limits_rounds = plan.sampler.participation(rounds) != Participation(rounds)
        self._has_begun = False
        self._warned = (0, 0)
        self._directory = ClientDirectory(timeout=availability.node_timeout)
        self.ignored = 0

    def nodes(self, grid: Grid) -> Mapping[int, int]:
        """Node id of each available client.

        Raises
        ------
        FedsimError
            If the run begins with clients beyond its population, or too few came in time.
        """
        available = self._directory.wait(grid, self._min_available)
        outsiders: list[int] = []
        # Do not loop over consecutive nodes: the time of a round must not grow with the population.
        if not isinstance(available, ConsecutiveNodes) or len(available) > self.population:
            outsiders = [client for client in available if client >= self.population]
            available = {
                client: node for client, node in available.items() if client < self.population
            }
        if outsiders and not self._has_begun:
            raise FedsimError(
                f"a node is client {outsiders[0]}, but population = {self.population} "
                "(partition.clients of a config, or what the cohort declares); "
                f"client ids must lie in 0 .. {self.population - 1}."
            )
        self.ignored = self._directory.ignored.total() + len(outsiders)
        self._warn(len(available), len(outsiders))
        if self._private:
            self._min_available = min(self._min_available, 1)
            # A client that comes back as another node must not get the rounds of a second client.
            directory = grid.directory if isinstance(grid, StreamingGrid) else self._directory
            directory.assigns_new_ids = not self._limits_rounds
        self._has_begun = True
        return available

    def _warn(self, available: int, outsiders: int) -> None:
        """Warn when the available nodes are not the population, once for each change."""
        absent = self.population - available
        if (absent, outsiders) == self._warned:
            return
        self._warned = (absent, outsiders)
        if absent:
            _log.warning(
                "%d of the population's %d clients are available; the others are sampled too, and "
                "count as missing: the mean is divided by the expected cohort in any case.",
                available,
                self.population,
            )
        if outsiders:
            _log.warning("%d nodes beyond the population have no part in the run.", outsiders)

    def available_recipients(
        self, server_round: int, cohort: Ints, grid: Grid, replying: AvailabilityRule | None
    ) -> Recipients:
        """The clients of a ``cohort`` that take part: available ones that reply, by ``replying``.

        Raises
        ------
        FedsimError
            If the nodes are no clients of this population, or too few came in time.
        """
        nodes, present = self.nodes(grid), cohort
        if not isinstance(nodes, ConsecutiveNodes) or len(nodes) < self.population:
            present = cohort[[client in nodes for client in cohort.tolist()]]
        if replying is not None:
            present = present[replying(server_round, present)]
        return Recipients(present, _node_ids(present, nodes), absent=len(cohort) - len(present))

    def cohort(self, server_round: int) -> Ints:
        """Sorted ids of this round's cohort, available or not: of those who begin in it.

        Raises
        ------
        FedsimError
            If the sampler draws a client that is not of its population.
        """
        if self._schedule is not None:
            return self._schedule.starting(server_round)[0]
        if self._real_time:  # they begin one by one (`ArrivingRequests`)
            return np.empty(0, dtype=np.int64)
        sampled = np.asarray(self._cohort.draw(server_round, self._draws))
        # A user's sampler may draw clients unsorted, and one twice; its event charges it once, so
        # that it must take part once.
        ids = np.unique(sampled) if (np.diff(sampled) <= 0).any() else sampled
        if len(ids) and not (ids.dtype.kind in "iu" and 0 <= ids[0] <= ids[-1] < self.population):
            raise FedsimError(
                f"{type(self._cohort).__name__} draws clients {ids[0]} to {ids[-1]} of type "
                f"{ids.dtype} in round {server_round}; they must be whole numbers in 0 .. "
                f"{self.population - 1}, of its population."
            )
        return ids.astype(np.int64, copy=False)

    def state(self) -> SamplerState:
        """The sampler's state; see `restore`."""
        return self._cohort.state()

    def restore(self, state: SamplerState) -> None:
        """Continue from `state`."""
        self._cohort.restore(state)

    def evaluators(self, server_round: int, grid: Grid, fraction: float) -> Recipients:
        """Sample a ``fraction`` of the available clients, at least one; keep the reachable ones."""
        nodes = self.nodes(grid)
        # Takes time and memory that grow with the population: the clients that a seed samples are
        # the first of a permutation of all.
        clients = np.array(sorted(nodes), dtype=np.int64)
        generator = self._randomness.generator(Purpose.EVALUATE, level="client", round=server_round)
        sampled = np.sort(generator.permutation(clients)[: max(1, round(fraction * len(clients)))])
        if self.reachable is not None:
            sampled = sampled[self.reachable(server_round, sampled)]
        return Recipients(sampled, _node_ids(sampled, nodes))


def _node_ids(clients: Ints, nodes: Mapping[int, int]) -> npt.NDArray[np.uint64]:
    """Node ids of ``clients [n]``, uint64 ``[n]``."""
    if isinstance(nodes, ConsecutiveNodes):
        return (nodes.first + clients).astype(np.uint64)
    return np.array([nodes[client] for client in clients.tolist()], dtype=np.uint64)
