"""Devices that come and go, do more or less work, and take their time: against plain loops."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_data, make_mlp

import fedsim
from fedsim import RunConfig
from fedsim.clients import SGD
from fedsim.cohorts import PoissonCohort
from fedsim.config.devices import Devices, work_counts
from fedsim.errors import FedsimError
from fedsim.privacy import epsilon
from fedsim.randomness import Draws, Randomness
from fedsim.runs.resolve import make_strategy, resolve
from fedsim.runs.sweep import grid_runs, run_sweep
from fedsim.training import Trainer

BASE = RunConfig().replace(
    **{"rounds": 4, "partition.clients": 12, "client.batch-size": 10, "evaluate.every": 4}
)
PRIVATE = {
    "mechanism.name": "clipping",
    "noise.multiplier": 1.0,
    "cohort.name": "poisson",
    "cohort.rate": 0.5,
}


def devices_of(examples=len, size: int = 4, **settings: float) -> Devices:
    keys = {f"devices.{key.replace('_', '-')}": value for key, value in settings.items()}
    return Devices(7, BASE.replace(**keys).devices, examples, examples, size, size)


@pytest.mark.parametrize("path", ["plain", "func", "layered"])
@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_clients_with_work_of_their_own_do_what_a_plain_loop_does(path: str, unit: str) -> None:
    counts, sizes = [3, 1, 5, 2, 1, 4], [9, 7, 9, 4, 12, 9]
    data = make_data(sizes, dtype=torch.float64)
    model = make_mlp(dtype=torch.float64)
    trainer = Trainer(
        copy.deepcopy(model),
        SGD(lr=0.3),
        data,
        batch_size=4,
        path=path,
        randomness=Randomness(3),
        counts=counts,
        **{unit: 1},
    )
    ids = np.arange(len(sizes))
    rows = joined(trainer.train(trainer.initial(), ids, 1), ids)[0]
    for client in ids:
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.3)
        draws = Draws(Randomness(3), level="example", amplified=False, client=int(client))
        left = counts[client] if unit == "steps" else 10**6
        for epoch in range(counts[client]):
            order = data.indices[client]
            if len(order) > 4:
                order = order[draws.generator(1, epoch).permutation(len(order))]
            for start in range(0, len(order), 4):
                if left == 0:
                    break
                left -= 1
                batch = torch.from_numpy(order[start : start + 4])
                optimizer.zero_grad()
                F.cross_entropy(trained(data.x[batch]), data.y[batch]).backward()
                optimizer.step()
        pairs = zip(trained.parameters(), model.parameters(), strict=True)
        expected = torch.cat([(after - before).detach().reshape(-1) for after, before in pairs])
        torch.testing.assert_close(rows[client], expected, rtol=0, atol=1e-12)


def test_work_is_drawn_from_the_seed_or_read_and_refused_at_example_level(tmp_path: Path) -> None:
    drawn = work_counts("whole(1,5)", 12, seed=1)
    assert drawn is not None
    assert set(drawn.tolist()) <= set(range(1, 6))
    assert len(set(drawn.tolist())) > 2
    assert (
        drawn == resolve(BASE.replace(**{"client.work": "whole(1,5)"})).trainer.workload.counts
    ).all()
    written = tmp_path / "work.txt"
    written.write_text("\n".join(str(1 + k % 3) for k in range(12)))
    read = resolve(BASE.replace(**{"client.work": str(written)})).trainer
    assert read.workload.counts is not None
    assert read.workload.counts.tolist() == [1, 2, 3] * 4
    assert (read.costs(np.arange(3)) == read.costs(np.zeros(3, np.int64)) * [1, 2, 3]).all()
    written.write_text("1 2 3")
    with pytest.raises(FedsimError, match="has 3 numbers"):
        resolve(BASE.replace(**{"client.work": str(written)})).trainer  # noqa: B018
    for bad in ("whole(0,3)", "whole(5,2)", "normal(1,2)"):
        with pytest.raises(FedsimError, match=r"client\.work"):
            BASE.replace(**{"client.work": bad})
    protected = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
    with pytest.raises(FedsimError, match=r"client\.work .* declared constant"):
        BASE.replace(**{"client.work": "whole(1,5)"}, **protected)


def test_who_is_not_there_counts_as_missing_and_the_event_stays_the_cohorts(tmp_path: Path) -> None:
    trace = np.zeros((2, 12), dtype=bool)
    trace[0, :6], trace[1, 3:] = True, True
    np.save(tmp_path / "trace.npy", trace)
    config = BASE.replace(**PRIVATE, **{"devices.trace": str(tmp_path / "trace.npy")})
    result = fedsim.run(config)
    strategy = make_strategy(resolve(config))
    for row in result.metrics[1:]:
        number = int(row["round"])
        cohort = strategy.participants.cohort(number)
        there = int(trace[(number - 1) % 2][cohort].sum())
        assert (row["asked"], row["usable"]) == (len(cohort), there)
        assert row["failed-missing"] == len(cohort) - there
        assert row["bytes-down"] == row["bytes-up"] == there * 650 * 4
    assert "devices" in str(result.privacy)
    assert result.privacy.epsilon == pytest.approx(
        epsilon(
            noise_multiplier=1.0,
            cohort=PoissonCohort(rate=0.5, population=12),
            rounds=4,
            delta=1e-5,
        ),
        rel=1e-6,
    )


def test_who_is_not_there_does_not_evaluate_either(tmp_path: Path) -> None:
    trace = np.zeros((3, 12), dtype=bool)
    trace[0, :6], trace[2, 3:] = True, True
    np.save(tmp_path / "trace.npy", trace)
    config = BASE.replace(
        **{"evaluate.clients-every": 1, "devices.trace": str(tmp_path / "trace.npy"), "rounds": 3}
    )
    resolved = resolve(config)
    sizes = [len(part) for part in (resolved.trainer.test or resolved.trainer.data).indices]
    counted = [row.get("clients-num-examples", 0) for row in fedsim.run(config).metrics[1:]]
    assert counted == [sum(sizes[:6]), 0, sum(sizes[3:])]
    devices = devices_of(availability=0.7, dropout=0.2)
    ids = np.arange(40)
    for number in range(1, 5):  # it is the same device in one round
        replying = devices.replying(number, ids)
        assert (devices.reachable(number, ids) == replying).all()


@pytest.mark.parametrize("mechanism", ["none", "median"])
def test_rounds_in_which_nobody_is_there_are_no_failed_ones(mechanism: str, tmp_path: Path) -> None:
    trace = np.zeros((4, 12), dtype=bool)
    trace[0] = trace[3] = True
    np.save(tmp_path / "trace.npy", trace)
    config = BASE.replace(
        **{
            "mechanism.name": mechanism,
            "devices.trace": str(tmp_path / "trace.npy"),
            "server.max-failed-rounds": 1,
        }
    )
    rows = fedsim.run(config).metrics[1:]
    assert [row["usable"] for row in rows] == [12, 0, 0, 12]
    assert [row["failed-missing"] for row in rows] == [0, 12, 12, 0]
    assert [row["update-norm"] > 0 for row in rows] == [True, False, False, True]


def test_only_those_that_took_part_move_the_model_and_keep_state(tmp_path: Path) -> None:
    trace = np.zeros((1, 12), dtype=bool)
    trace[0, [2, 5, 7]] = True
    np.save(tmp_path / "trace.npy", trace)
    kept = {"client.name": "adadp-lr", "client.state": "client"}
    config = BASE.replace(**kept, **{"devices.trace": str(tmp_path / "trace.npy")})
    whole = tmp_path / "whole"
    fedsim.run(config, out=whole)
    resolved = resolve(config)
    fedsim.run(config.replace(rounds=2), out=tmp_path / "cut")
    fedsim.run(config, out=tmp_path / "cut", resume=True)
    models = [path / "model.safetensors" for path in (whole, tmp_path / "cut")]
    assert models[0].read_bytes() == models[1].read_bytes()
    vector = resolved.trainer.initial()
    trainer = resolved.trainer
    for number in range(1, 5):
        blocks = list(trainer.train(vector, np.array([2, 5, 7]), number))
        rows = torch.cat([block.rows for block in blocks]).double()
        sizes = torch.from_numpy(np.concatenate([b.metrics["num-examples"] for b in blocks]))
        vector = vector + ((rows * sizes[:, None]).sum(0) / sizes.sum()).float()
    assert sorted(trainer.client_state.store.client_ids.tolist()) == [2, 5, 7]
    saved = fedsim.load(whole)
    end = torch.cat([p.detach().flatten() for p in saved.model.parameters()])
    torch.testing.assert_close(end, vector, rtol=0, atol=1e-5)


def test_a_device_is_there_and_drops_out_as_often_as_is_said() -> None:
    devices = devices_of(availability=0.7, dropout=0.2)
    ids = np.arange(40)
    counts = np.stack([devices.replying(number, ids) for number in range(1, 51)])
    # Of 2000 draws at 0.56 the share has a standard deviation of 0.011.
    assert counts.mean() == pytest.approx(0.7 * 0.8, abs=0.045)
    assert (counts == [devices.replying(k, ids) for k in range(1, 51)]).all()
    alone = np.array([devices.replying(3, ids[k : k + 1])[0] for k in range(40)])
    assert (alone == counts[2]).all()


def test_a_rounds_virtual_time_is_that_of_its_slowest_device() -> None:
    ids, megabyte = np.arange(20), 10**6
    work = {"examples": lambda clients: 10.0 + clients, "size": megabyte}
    clock = {"seconds_per_example": 0.5, "bandwidth": 8.0, "spread": 0.3}
    devices = devices_of(**work, **clock)
    assert devices.replying(1, ids).all()
    seconds = devices.seconds(ids)
    assert devices.load["virtual-seconds"] == seconds.max()
    assert (devices.load["bytes-down"], devices.load["bytes-up"]) == (20 * megabyte, 20 * megabyte)
    # The median device: 1 megabyte a second, 2 seconds for both ways, and half a second an example.
    median = devices_of(**work, seconds_per_example=0.5, bandwidth=8.0)
    assert median.seconds(ids) == pytest.approx(2 + 0.5 * (10 + ids))
    one_each = devices_of(np.ones_like, seconds_per_example=1.0, spread=0.3)
    assert np.log(one_each.seconds(np.arange(500))).std() == pytest.approx(0.3, rel=0.12)
    deadline = float(np.median(seconds))
    late = devices_of(**work, **clock, deadline=deadline)
    assert (late.replying(1, ids) == (seconds <= deadline)).all()
    assert late.load["virtual-seconds"] == deadline


def test_devices_that_would_decide_by_data_or_do_nothing_are_refused() -> None:
    clocked = {"devices.seconds-per-example": 0.1, "devices.deadline": 2.0}
    for changes, words in (
        ({**PRIVATE, **clocked}, r"devices\.deadline = 2\.0; .* how many examples"),
        ({"devices.deadline": 2.0}, r"devices\.deadline = 2\.0; it must be 0 while"),
        ({"devices.trace": "t.npy", "devices.availability": 0.5}, r"devices\.availability"),
        ({"engine.name": "deployment", "devices.dropout": 0.5}, r"whose devices are real"),
    ):
        with pytest.raises(FedsimError, match=words):
            BASE.replace(**changes)
    with pytest.raises(FedsimError, match=r"devices\.trace = 'none\.npy' cannot be read"):
        fedsim.run(BASE.replace(**{"devices.trace": "none.npy"}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.replace(b"}", b" "),
        lambda file: file[:-3],
        lambda file: b"1 0 1 0\n",
        lambda file: b"",
    ],
    ids=["header", "cut", "text", "empty"],
)
def test_a_file_that_is_no_trace_is_one_sentence(spoil, tmp_path: Path) -> None:
    file = tmp_path / "trace.npy"
    np.save(file, np.ones((3, 12), dtype=bool))
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(FedsimError, match=r"devices\.trace = .* must be an \.npy file of truth"):
        fedsim.run(BASE.replace(**{"devices.trace": str(file)}))


def test_members_of_a_sweep_with_devices_end_as_they_do_alone(tmp_path: Path) -> None:
    changes = {"client.work": "whole(1,3)", "devices.availability": 0.6, "devices.dropout": 0.1}
    grid = grid_runs(BASE.replace(**changes), {"seed": [1, 2]})
    run_sweep(grid, tmp_path)
    for number, member in enumerate(grid):
        fedsim.run(member.config, out=tmp_path / f"alone-{number}")
        models = [
            tmp_path / name / "model.safetensors" for name in (member.label, f"alone-{number}")
        ]
        assert models[0].read_bytes() == models[1].read_bytes()
