"""client-metrics.csv: metrics by client and round, in runs without privacy."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from killed_runs import killed_in

import fedsim
from fedsim import RunConfig
from fedsim.datasets import from_table
from fedsim.runs.metrics import QUANTILES

HOSPITALS = ("north", "east", "south", "west")
CONFIG = RunConfig().replace(
    **{
        "rounds": 5,
        "partition.name": "by-owner",
        "partition.clients": 4,
        "task.metrics": "accuracy, auc",
        "evaluate.clients-every": 2,
        "checkpoint.every": 1,
        "engine.device": "cpu",
    }
)


def table() -> dict[str, object]:
    rng = np.random.default_rng(0)
    age = rng.integers(20, 90, 120)
    return {
        "age": age.tolist(),
        "ill": ["yes" if a > 55 else "no" for a in age],
        "hospital": [HOSPITALS[i] for i in rng.integers(0, 4, 120)],
    }


def people():
    return from_table(
        table(), columns="y=ill,owner=hospital", types="age=0:100,ill=no|yes", protected=True
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path / "client-metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_each_evaluation_of_each_client_is_a_row_from_which_means_and_quantiles_follow(tmp_path):
    result = fedsim.run(CONFIG, data=people(), out=tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    # Owners in increasing order are the clients.
    assert [(row["round"], row["client"], row["owner"]) for row in rows] == [
        (str(number), str(client), owner)
        for number in (2, 4)
        for client, owner in enumerate(sorted(HOSPITALS))
    ]
    assert list(rows[0])[3:] == ["num-examples", "loss", "accuracy", "auc"]
    for line in result.metrics:
        of_round = [row for row in rows if int(row["round"]) == line["round"]]
        assert bool(of_round) == ("clients-loss" in line)
        if of_round:
            counts = [int(row["num-examples"]) for row in of_round]
            assert sum(counts) == line["clients-num-examples"]
            for name in ("loss", "accuracy"):
                values = [float(row[name]) for row in of_round]
                assert np.average(values, weights=counts) == pytest.approx(line[f"clients-{name}"])
                ends = np.quantile(values, [0, 0.1, 0.5, 0.9, 1])
                own = [line[f"clients-{name}-{end}"] for end in QUANTILES]
                assert ends == pytest.approx(own)


@pytest.mark.parametrize("until", [3, 4])
def test_a_resumed_run_cuts_its_rows_back_to_the_checkpoint(until, tmp_path):
    fedsim.run(CONFIG, data=people(), out=tmp_path / "whole")
    with killed_in(until):
        fedsim.run(CONFIG, data=people(), out=tmp_path / "killed")
    path = tmp_path / "killed" / "client-metrics.csv"
    with open(path, "a", newline="") as file:
        file.write("4,0,ea")  # as a crash of the machine leaves it
    fedsim.run(CONFIG, data=people(), out=tmp_path / "killed", resume=True)
    assert path.read_bytes() == (tmp_path / "whole" / "client-metrics.csv").read_bytes()


@pytest.mark.parametrize(("every", "kept"), [(3, {"2"}), (5, set())])
def test_a_run_that_is_resumed_without_evaluations_has_rows_of_its_own_rounds_only(
    every, kept, tmp_path
):
    path, config = tmp_path / "run", CONFIG.replace(**{"checkpoint.every": every})
    with killed_in(4):
        fedsim.run(config, data=people(), out=path)
    assert {row["round"] for row in rows_of(path)} == {"2", "4"}
    quiet = config.replace(**{"evaluate.clients-every": 0})
    fedsim.run(quiet, data=people(), out=path, resume=True)
    rows = rows_of(path) if (path / "client-metrics.csv").exists() else []
    assert {row["round"] for row in rows} == kept


@pytest.mark.parametrize(
    "settings",
    [
        {"evaluate.clients-every": 0},
        {"mechanism.name": "clipping", "noise.multiplier": 1.0, "evaluate.unprotected": True},
        {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
        | {"evaluate.unprotected": True},
    ],
)
def test_nothing_is_written_of_clients_that_are_protected_or_do_not_evaluate(settings, tmp_path):
    fedsim.run(CONFIG.replace(**settings), data=people(), out=tmp_path / "run")
    assert not (tmp_path / "run" / "client-metrics.csv").exists()


def test_without_owners_clients_are_numbers_and_every_block_size_gives_the_same_bytes(tmp_path):
    files = []
    for size in (1, 3):
        config = CONFIG.replace(**{"partition.name": "iid", "client.block-size": size})
        fedsim.run(config, data=people(), out=tmp_path / str(size))
        files.append((tmp_path / str(size) / "client-metrics.csv").read_bytes())
    assert files[0] == files[1]
    assert files[0].startswith(b"round,client,num-examples,loss,accuracy,auc\r\n2,0,")


def test_a_new_run_in_the_same_directory_begins_the_file_again(tmp_path):
    fedsim.run(CONFIG, data=people(), out=tmp_path / "run")
    quiet = CONFIG.replace(**{"evaluate.clients-every": 0})
    fedsim.run(quiet, data=people(), out=tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / "client-metrics.csv").exists()
