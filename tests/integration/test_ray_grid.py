"""RayGrid with real Ray workers: one Ray for the whole module."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp

from fedsim.engines import LocalGrid, array_record
from fedsim.errors import FedsimError
from fedsim.federation.engines.ray import RayGrid
from fedsim.federation.engines.workers import pack, unpack
from fedsim.federation.exchange import Instructions, Recipients
from fedsim.rows import Layout
from fedsim.rows.block import Block, BlockTrainer


@dataclass
class Digest(BlockTrainer):
    """Client k sends a vector of its own; some end their process, hang or raise."""

    population: int = 24
    deadly: frozenset[int] = frozenset()
    once: str = ""
    slow: frozenset[int] = frozenset()

    def train(self, vector, client_ids, round):
        for start in range(0, len(client_ids), 5):
            ids = client_ids[start : start + 5]
            for client in ids.tolist():
                if client in self.slow:
                    time.sleep(60)
                if client in self.deadly and (not self.once or not Path(self.once).exists()):
                    if self.once:
                        Path(self.once).touch()
                    os._exit(1)
            rows = torch.stack([torch.sin(vector * (k + 1) + round) for k in ids.tolist()])
            metrics = {"num-examples": ids + 1.0}
            yield Block.sent(ids, rows, metrics)

    evaluate = train


def ask(grid, ids=range(24)) -> Instructions:
    vector = torch.linspace(0, 1, 50)
    ids = np.array(list(ids), dtype=np.int64)
    return Instructions(
        message_type="train",
        round=3,
        arrays=array_record({"w": vector}),
        vector=vector,
        recipients=Recipients(ids, (ids + 2).astype(np.uint64)),
        config=ConfigRecord({"server-round": 3}),
        layout=Layout.of({"w": vector}),
    )


def rows_of(grid, timeout=None) -> dict[int, bytes | None]:
    got: dict[int, bytes | None] = {}
    for block in grid.send_and_receive(ask(grid), timeout=timeout).blocks():
        for index, client in enumerate(block.client_ids.tolist()):
            assert client not in got
            got[client] = block.rows[index].numpy().tobytes() if block.ok[index] else None
    return got


@pytest.fixture(scope="module")
def expected(ray_runtime):
    return rows_of(LocalGrid(Digest()))


@pytest.fixture(scope="module")
def ray_runtime():
    ray = pytest.importorskip("ray")
    # Test classes are no package that workers could import.
    import ray.cloudpickle as cloudpickle

    cloudpickle.register_pickle_by_value(__import__(__name__))
    with pytest.MonkeyPatch.context() as alone:
        alone.delenv("RAY_ADDRESS", raising=False)  # which would name a cluster to join
        own = RayGrid(Digest(), workers=1)
    with own:
        yield
    assert not ray.is_initialized()


@pytest.mark.slow
def test_workers_give_the_bytes_of_the_local_engine_round_after_round(expected):
    with RayGrid(Digest(), workers=3, cpus_per_worker=0.1) as grid:
        assert rows_of(grid) == expected
        assert rows_of(grid) == expected


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_clients_trained_again(tmp_path, expected):
    trainer = Digest(deadly=frozenset({7}), once=str(tmp_path / "died"))
    with RayGrid(trainer, workers=2, cpus_per_worker=0.1) as grid:
        assert rows_of(grid) == expected
    assert (tmp_path / "died").exists()


@pytest.mark.slow
def test_a_client_that_always_kills_its_worker_contributes_nothing(expected):
    trainer = Digest(deadly=frozenset({7}))
    with RayGrid(trainer, workers=1, cpus_per_worker=0.1, retries=1) as grid:
        assert rows_of(grid) == {**expected, 7: None}


@pytest.mark.slow
def test_a_client_that_does_not_finish_in_time_does_not_hold_up_the_run(expected):
    with RayGrid(Digest(slow=frozenset({7})), workers=2, cpus_per_worker=0.1) as grid:
        assert rows_of(grid, timeout=4.0) == {**expected, 7: None}


def test_an_app_is_sent_to_the_engines_that_run_apps():
    with pytest.raises(FedsimError, match="LocalGrid"):
        RayGrid(ClientApp())


def test_large_tensors_are_packed_apart_and_once_and_parameters_come_as_copies():
    data = torch.arange(1 << 19, dtype=torch.float32)
    model = torch.nn.Linear(1000, 600)
    value = {"a": data, "b": data, "model": model, "small": torch.ones(3)}
    pieces = pack(value, by_value=True)
    assert [len(piece) for piece in pieces[1:]] == [4 << 19, 4 * 600 * 1000]
    read = unpack(pieces, copied=False)
    assert read["a"].data_ptr() == data.data_ptr()
    assert unpack(pieces, copied=True)["a"].data_ptr() != data.data_ptr()
    assert torch.equal(read["b"], data)
    assert torch.equal(read["model"].weight, model.weight)
    assert read["model"].weight.requires_grad
    with torch.no_grad():
        read["model"].weight.zero_()
    assert model.weight.abs().sum() > 0
