"""Who is there, who takes part and who evaluates: keyed draws over client ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid

from fedsim.cohorts import Cohort
from fedsim.engines.directory import ClientDirectory
from fedsim.errors import FedsimError
from fedsim.randomness import Draws, Purpose, Randomness
from fedsim.rows.exchange import Ids

__all__ = ["Participants", "node_ids"]


class Participants:
    """Draws cohorts and evaluation samples from a declared population.

    Parameters
    ----------
    cohort : Cohort
        With a population.
    randomness : Randomness
    min_available : int
        Clients to wait for before a round.
    timeout : float
        Seconds to wait for them.
    private : bool
        Then they are waited for before the first round only: later, clients may have left
        because of their data, and one is enough.
    amplified : bool
        Whether a private event counts on nobody knowing the cohort.
    """

    def __init__(
        self,
        cohort: Cohort,
        randomness: Randomness,
        min_available: int,
        timeout: float,
        *,
        private: bool,
        amplified: bool,
    ) -> None:
        assert cohort.population is not None
        self.population = cohort.population
        self._cohort = cohort
        self._randomness = randomness
        self._draws = Draws(randomness, level="client", amplified=amplified)
        self._min_available = min_available
        self._private = private
        self._directory = ClientDirectory(timeout=timeout)

    def nodes(self, grid: Grid) -> dict[int, int]:
        """Node id of each client that is there."""
        nodes = self._directory.wait(grid, self._min_available)
        if self._private:
            self._min_available = min(self._min_available, 1)
        stranger = next((client for client in nodes if client >= self.population), None)
        if stranger is not None:
            raise FedsimError(
                f"a node is client {stranger}, but cohort.population = {self.population}; client "
                f"ids must lie in 0 .. {self.population - 1}."
            )
        return nodes

    def cohort(self, server_round: int) -> Ids:
        """Sorted ids of this round's cohort, whether or not they are there."""
        return self._cohort.draw(server_round, self._draws)

    def evaluators(self, server_round: int, nodes: dict[int, int], fraction: float) -> Ids:
        """Sorted ids of ``fraction`` of those who are there, at least one."""
        clients = np.array(sorted(nodes), dtype=np.int64)
        generator = self._randomness.generator(Purpose.EVALUATE, level="client", round=server_round)
        return np.sort(generator.permutation(clients)[: max(1, round(fraction * len(clients)))])


def node_ids(clients: Ids, nodes: dict[int, int]) -> npt.NDArray[np.uint64]:
    """The nodes of ``clients [n]``, ``[n]``."""
    return np.array([nodes[client] for client in clients.tolist()], dtype=np.uint64)
