"""Processes of this machine that train: the bytes of one process, whoever dies, hangs or raises."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_cases import slow_but
from toy_clients import ToyTrainer, toy_instructions

import fedsim
from fedsim.cohorts import FixedCohort
from fedsim.engines import LocalGrid, array_record
from fedsim.errors import FedsimError
from fedsim.federation.engines.forked import CAN_FORK, SharedValue, helpful_workers
from fedsim.federation.engines.workers import pack, unpack
from fedsim.mechanisms import (
    AdaClip,
    Clipping,
    NoPrivacy,
    Normalization,
    QuantileClipping,
)
from fedsim.rows.block import Block, BlockTrainer
from fedsim.strategies import ClientMetrics, DPFedAvg, Median
from fedsim.training.batches import multiplications

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="processes cannot be forked here")

D = 7


@dataclass
class Faulty(BlockTrainer):
    """Client k sends a vector of its own; some end their process, hang, raise or exit."""

    population: int = 30
    dies: frozenset[int] = frozenset()
    once: str = ""
    hangs: frozenset[int] = frozenset()
    raises: frozenset[int] = frozenset()
    exits: frozenset[int] = frozenset()
    poisons: frozenset[int] = frozenset()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def train(self, vector, client_ids, round):
        for start in range(0, len(client_ids), 4):
            ids = client_ids[start : start + 4]
            for client in ids.tolist():
                self._misbehave(client)
            rows = torch.stack([torch.sin(vector * (k + 1) + round) for k in ids.tolist()])
            rows[np.isin(ids, list(self.poisons))] = torch.nan
            yield Block.sent(ids, rows, {"num-examples": ids + 1.0, "loss": ids / 7.0})

    def _misbehave(self, client):
        if client in self.hangs:
            time.sleep(60)
        if client in self.raises:
            raise ArithmeticError("out of luck")
        if client in self.exits:
            sys.exit(3)
        if client in self.dies and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            os._exit(1)

    def evaluate(self, vector, client_ids, round):
        losses = (client_ids + 1.0) * float(vector.double().sum())
        yield Block.sent(client_ids, None, {"num-examples": client_ids + 1.0, "loss": losses})


def run(grid, mechanism=None, noise=1.0, rounds=3, timeout=60.0, **settings):
    """Digest of the model, what was counted, and the metrics."""
    strategy = DPFedAvg(
        mechanism=Clipping(0.5) if mechanism is None else mechanism,
        cohort=FixedCohort(20, 30),
        noise_multiplier=noise,
        seed=1,
        metrics=ClientMetrics(unprotected=True),
        fraction_evaluate=0.5,
        **settings,
    )
    reports = []

    def on_round(number, result):
        report = strategy.report
        reports.append((report.usable, {k: v for k, v in report.reasons.items() if v}))

    initial = array_record({"w": torch.linspace(0, 1, D)})
    result = strategy.start(grid, initial, rounds, timeout=timeout, on_round=on_round)
    weights = hashlib.sha256(result.arrays["w"].numpy().tobytes()).hexdigest()
    metrics = [
        {number: dict(record) for number, record in records.items()}
        for records in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp)
    ]
    return weights, reports, metrics


MECHANISMS = {
    "clipping": (Clipping(0.5), 1.0),
    "normalization": (Normalization(0.3), 1.0),
    "quantile": (QuantileClipping(initial_clip_norm=0.5), 1.0),
    "adaclip": (AdaClip(), 1.0),
    "uniform": (NoPrivacy("uniform"), 0.0),
    "median, which needs the rows": (Median(), 0.0),
    "by examples": (NoPrivacy("num-examples"), 0.0),
}


@pytest.mark.spanning
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_bytes_of_one_process(name, workers):
    mechanism, noise = MECHANISMS[name]
    with LocalGrid(Faulty(), workers=workers) as grid:
        assert run(grid, mechanism, noise) == run(LocalGrid(Faulty()), mechanism, noise)


def test_clients_shares_have_the_bytes_of_one_process():
    with LocalGrid(Faulty(), workers=2) as grid:
        shared = run(grid, placement="client")
    assert shared == run(LocalGrid(Faulty()), placement="client")


def test_a_worker_that_dies_is_replaced_and_its_clients_trained_again(tmp_path):
    trainer = Faulty(dies=frozenset(range(10)), once=str(tmp_path / "died"))
    with LocalGrid(trainer, workers=2) as grid:
        assert run(grid) == run(LocalGrid(Faulty()))
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("fault", slow_but(4, ["raises", "exits", "dies", "poisons", "hangs"]))
def test_clients_that_fail_take_nobody_with_them(fault):
    failing = frozenset({3, 8})
    with LocalGrid(Faulty(**{fault: failing}), workers=2) as grid:
        timeout = 0.5 if fault == "hangs" else 60.0
        weights, reports, _ = run(grid, rounds=2, timeout=timeout)
    expected, expected_reports, _ = run(LocalGrid(Faulty(raises=failing)), rounds=2)
    assert weights == expected
    reason = {
        "raises": "raised",
        "exits": "raised",
        "dies": "missing",
        "poisons": "non-finite",
        "hangs": "timeout",
    }[fault]
    assert reports == [
        (usable, {reason: reasons["raised"]} if reasons else {})
        for usable, reasons in expected_reports
    ]
    assert any(reasons for _, reasons in reports)


class Deviceless(Faulty):
    """Cannot be copied into a worker."""

    def copy_for(self, device):
        raise ArithmeticError("there is no room")


def test_a_worker_that_cannot_begin_ends_the_run_with_what_it_raised():
    # Its clients have not failed: their rounds would release noise alone, one after another.
    with LocalGrid(Deviceless(), workers=2) as grid, pytest.raises(FedsimError, match="no room"):
        run(grid)


def test_messages_made_of_the_replies_carry_each_clients_parameters():
    initial = array_record({"w": torch.linspace(0, 1, D)})
    updates = {}
    for workers in (1, 2):
        strategy = DPFedAvg(
            mechanism=Clipping(0.5), cohort=FixedCohort(20, 30), noise_multiplier=1.0, seed=1
        )
        with LocalGrid(Faulty(), workers=workers) as grid:
            asked = strategy.configure_train(1, initial, _no_config(), grid)
            messages = list(grid.send_and_receive(asked))
        updates[workers] = {
            m.metadata.src_node_id: m.content["arrays"]["w"].numpy().tobytes() for m in messages
        }
    assert updates[1] == updates[2]
    assert len(updates[1]) == 20


def _no_config():
    from flwr.app import ConfigRecord

    return ConfigRecord()


def test_a_round_that_nobody_finished_leaves_nothing_to_the_next():
    strategy = DPFedAvg(
        mechanism=Clipping(0.5), cohort=FixedCohort(20, 30), noise_multiplier=1.0, seed=2
    )
    with LocalGrid(Faulty(), workers=2) as grid:
        initial = array_record({"w": torch.linspace(0, 1, D)})
        asked = strategy.configure_train(1, initial, _no_config(), grid)
        next(grid.send_and_receive(asked).blocks())
        grid._open = None
        assert run(grid) == run(LocalGrid(Faulty()))


def test_workers_end_with_their_grid():
    grid = LocalGrid(Faulty(), workers=2)
    run(grid, rounds=1)
    pids = [worker.pid for worker in grid._pool.workers]
    grid.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


SCRIPT = """
    import sys
    sys.path[:0] = {paths!r}
    from test_workers import Faulty, run
    from fedsim.engines import LocalGrid
    grid = LocalGrid(Faulty(hangs=frozenset(range(30)) if {hangs} else frozenset()), workers=2)
    if {hangs}:
        from fedsim.federation.engines import dispatch
        ask = dispatch.Dispatch._ask
        def logged(self, assignment, *arguments):
            ask(self, assignment, *arguments)
            print(assignment.worker.pid, flush=True)
        dispatch.Dispatch._ask = logged
    print(run(grid, rounds=1)[0])
"""


def script(hangs: bool) -> str:
    return textwrap.dedent(SCRIPT.format(paths=sys.path, hangs=hangs))


@pytest.mark.slow
def test_a_script_from_standard_input_needs_no_main_that_can_be_imported():
    done = subprocess.run(
        [sys.executable, "-"], input=script(False), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [run(LocalGrid(Faulty()), rounds=1)[0]]
    assert "resource_tracker" not in done.stderr
    assert "Traceback" not in done.stderr


def test_workers_end_when_the_process_that_forked_them_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", script(True)], stdout=subprocess.PIPE, text=True
    ) as driver:
        pids = [int(driver.stdout.readline()) for _ in range(2)]
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    deadline = time.monotonic() + 20
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_shared_values_come_back_as_they_were_also_where_they_grow():
    shared = SharedValue()
    first = {"a": np.arange(5.0), "b": [1, "two", np.zeros((3, 4), dtype=np.int8)]}
    for value in (first, {"a": np.ones(100_000), "b": []}, first):
        got = shared.get(shared.put(value))
        assert np.array_equal(got["a"], value["a"])
        assert got["b"][:2] == value["b"][:2]
        assert all(map(np.array_equal, got["b"][2:], value["b"][2:]))


def test_workers_are_sent_the_parameters_once_and_nothing_of_the_messages():
    grid = LocalGrid(ToyTrainer(population=300))
    asked = replace(
        toy_instructions(list(range(300)), grid, d=50_000),
        records={"state": array_record({"s": torch.zeros(50_000)})},
        numbers={"declared": [2**40] * 300},
    )
    assert len(list(asked)) == 300  # the messages are stored in `asked` from here on
    sent = asked.for_workers(sum_rows=False)
    size = sum(memoryview(piece).nbytes for piece in pack(sent))
    assert size < sent.vector.nbytes + 4000
    returned = unpack(pack(sent), copied=True)
    assert returned.config == asked.config
    assert torch.equal(returned.vector, asked.vector)
    assert returned.layout == asked.layout


def test_a_value_of_a_class_without_a_name_goes_by_value():
    class Nameless:
        def __init__(self):
            self.array = np.arange(3)

    shared = SharedValue()
    assert shared.get(shared.put(Nameless())).array.tolist() == [0, 1, 2]


def test_small_rounds_are_left_to_one_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    cpu = torch.device("cpu")
    softmax = multiplications(torch.nn.Linear(784, 10), torch.zeros(2, 784))
    assert softmax == 3 * 7850
    assert helpful_workers(softmax * 60, 100, cpu) == 1
    assert helpful_workers(3 * 269_322 * 60, 50, cpu) == 4
    assert helpful_workers(1e12, 5, cpu) == 5
    assert helpful_workers(1e12, 100, cpu) == 16
    assert helpful_workers(1e12, 100, torch.device("cuda")) == 1


def test_a_convolutions_work_counts_its_places():
    conv = torch.nn.Conv2d(3, 8, 3, bias=False)
    assert multiplications(conv, torch.zeros(2, 3, 10, 10)) == 3 * 8 * 3 * 3 * 3 * 8 * 8


def test_workers_beside_a_gpu_are_refused_in_a_sentence():
    grid = LocalGrid(Faulty(device=torch.device("cuda")), workers=2)
    with pytest.raises(FedsimError, match=r"engine.workers is 2 on a cuda device; it must be 1"):
        run(grid)


KEEPS = {
    "clients keep a momentum": {"client": {"lr": 0.2, "momentum": 0.9, "state": "client"}},
    "clients protect examples": {
        "client": {
            "lr": 0.2,
            "batch-size": 5,
            "mechanism": {"name": "clipping"},
            "noise": {"multiplier": 1.0},
        }
    },
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_clients_keep_and_spend_does_not_depend_on_workers(name, tmp_path):
    seen = []
    for workers in (1, 2):
        tree = {
            "rounds": 3,
            "partition": {"clients": 8},
            "engine": {"workers": workers, "device": "cpu"},
            **KEEPS[name],
        }
        out = tmp_path / str(workers)
        fedsim.run(fedsim.RunConfig.parse(tree), out=out)
        spent = sorted(path.name for path in (out / "clients").glob("*.jsonl"))
        model = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
        ledger = (out / "ledger.jsonl").read_text().count("release")
        seen.append((model, ledger, spent))
    assert seen[0] == seen[1]


def test_a_trainer_without_a_population_is_refused() -> None:
    class Countless(BlockTrainer):
        def train(self, vector, client_ids, round):
            yield from ()

        def evaluate(self, vector, client_ids, round):
            yield from ()

    with pytest.raises(FedsimError, match="derive a class with population, train and evaluate"):
        LocalGrid(Countless())
