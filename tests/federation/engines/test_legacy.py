"""Apps in Flower's old style, with client_fn and server_fn, run in one process too."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.mechanisms import Clipping
from fedsim.strategies import DPFedAvg


class Halfway(NumPyClient):
    def __init__(self, k: int) -> None:
        self.k = k

    def fit(self, parameters, config):
        return [array + (self.k - array) / 2 for array in parameters], self.k + 1, {}

    def evaluate(self, parameters, config):
        return float(np.mean((parameters[0] - self.k) ** 2)), self.k + 1, {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_legacy_app_trains_to_the_weighted_mean():
    seen = []

    def client_fn(context: Context):
        return Halfway(int(context.node_config["partition-id"])).to_client()

    class Watched(FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            parameters, metrics = super().aggregate_fit(server_round, results, failures)
            from flwr.common import parameters_to_ndarrays

            seen.append(parameters_to_ndarrays(parameters)[0])
            assert not failures
            return parameters, metrics

    def server_fn(context: Context):
        start = ndarrays_to_parameters([np.zeros(2)])
        return ServerAppComponents(
            strategy=Watched(initial_parameters=start, min_available_clients=3),
            config=ServerConfig(num_rounds=2),
        )

    grid = LocalGrid(ClientApp(client_fn=client_fn), num_nodes=3)
    ServerApp(server_fn=server_fn)(grid, Context(1, 0, {}, RecordDict(), {}))
    # (0 * 1 + 0.5 * 2 + 1 * 3) / 6, and then halfway from there.
    assert seen[0] == pytest.approx([4 / 6] * 2)
    assert seen[1] == pytest.approx([4 / 6 / 2 + 4 / 6] * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_legacy_client_trains_with_our_strategy_by_the_names_of_its_records():
    def client_fn(context: Context):
        return Halfway(int(context.node_config["partition-id"])).to_client()

    made = DPFedAvg(
        mechanism=Clipping(100.0), cohort=FullCohort(3), noise_multiplier=1e-9, seed=1,
        arrayrecord_key="fitins.parameters", configrecord_key="fitins.config",
    )  # fmt: skip
    grid = LocalGrid(ClientApp(client_fn=client_fn), num_nodes=3)
    result = made.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
    assert made.report is not None
    assert made.report.usable == 3
    # The mean of 0, 1/2 and 1, and then halfway from there.
    assert result.arrays.to_numpy_ndarrays()[0] == pytest.approx([0.75] * 2, abs=1e-5)
