"""A round costs what its cohort costs, however many clients there are."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from fedsim.cohorts import FixedCohort, PoissonCohort
from fedsim.engines import LocalGrid, array_record
from fedsim.errors import FedsimError
from fedsim.federation.engines.directory import ConsecutiveNodes
from fedsim.mechanisms import Clipping
from fedsim.rows.block import Block, BlockTrainer
from fedsim.strategies import DPFedAvg
from fedsim.training import ClientData
from fedsim.training.data import CHECKED_TOGETHER

POPULATION = 2_000_000


class Ones(BlockTrainer):
    population = POPULATION

    def train(self, vector, client_ids, round):
        rows = torch.ones(len(client_ids), len(vector))
        yield Block.sent(client_ids, rows, {"num-examples": np.ones(len(client_ids))})

    evaluate = train


@pytest.mark.parametrize(
    "cohort", [FixedCohort(20, POPULATION), PoissonCohort(1e-5, POPULATION)], ids=str
)
def test_no_round_goes_through_the_whole_population(monkeypatch, cohort):
    def never(self):
        raise AssertionError("all of the population was gone through")

    monkeypatch.setattr(ConsecutiveNodes, "__iter__", never)
    strategy = DPFedAvg(mechanism=Clipping(1.0), cohort=cohort, noise_multiplier=1.0, seed=1)
    strategy.start(LocalGrid(Ones()), array_record({"w": torch.zeros(3)}), 2)
    assert strategy.report is not None
    assert strategy.report.usable == strategy.report.asked > 0


MILLION = """
    import resource, sys
    import numpy as np
    import fedsim
    from pathlib import Path

    place, clients = Path(sys.argv[1]), 1_000_000
    shape = (20 * clients, 28, 28)
    # A file with holes: nothing of it is on the disk.
    np.lib.format.open_memmap(place / "x_train.npy", mode="w+", dtype=np.uint8, shape=shape)
    np.save(place / "y_train.npy", (np.arange(shape[0]) % 10).astype(np.uint8))
    np.save(place / "x_test.npy", np.zeros((10, 28, 28), np.uint8))
    np.save(place / "y_test.npy", np.arange(10).astype(np.uint8))
    config = fedsim.RunConfig.parse({
        "rounds": 3,
        "data": {"name": str(place), "classes": 10},
        "partition": {"clients": clients},
        "cohort": {"name": "fixed", "size": 100},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
        "evaluate": {"every": 0},
    })
    result = fedsim.run(config)
    assert [row["usable"] for row in result.metrics] == [100] * 3
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_a_million_clients_with_sixteen_gigabytes_of_examples_train_within_four(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MILLION), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 4.0


@pytest.mark.parametrize("client", [0, CHECKED_TOGETHER - 1, CHECKED_TOGETHER, 25_000])
@pytest.mark.parametrize("example", [-1, 7])
def test_the_client_of_many_whose_example_is_none_of_the_datas_is_named(client, example):
    indices = [np.array([3]), np.array([], dtype=np.int64)] * 15_000
    ClientData(torch.zeros(7, 2), torch.zeros(7), indices)
    indices[client] = np.array([2, example])
    with pytest.raises(FedsimError, match=rf"client {client} has an example outside 0 \.\. 6"):
        ClientData(torch.zeros(7, 2), torch.zeros(7), indices)
