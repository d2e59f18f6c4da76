from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedsim
from fedsim import RunConfig
from fedsim.cohorts import PoissonCohort
from fedsim.errors import FedsimError
from fedsim.federation.arrays import tensors
from fedsim.privacy import epsilon
from fedsim.rows.block import Block
from fedsim.runs import runner
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.resolve import CentralEvaluation, make_strategy, resolve
from fedsim.runs.round_rows import row_columns
from fedsim.strategies import RoundReport
from fedsim.training import Trainer

BASE = RunConfig().replace(
    **{
        "rounds": 3,
        "partition.clients": 60,
        "cohort.name": "poisson",
        "cohort.rate": 0.3,
        "mechanism.name": "clipping",
        "noise.multiplier": 1.0,
        "client.lr": 0.5,
        "client.batch-size": 5,
    }
)


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (3, 3), (0, 8), (20, 8)])
def test_the_global_model_is_evaluated_by_as_many_threads_as_there_are_workers(
    workers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.runs.resolve.usable_cores", lambda: 8)
    config = BASE.replace(**{"engine.workers": workers, "data.validation": 0.1})
    evaluation = CentralEvaluation(resolve(config))
    assert [t.evaluation.threads for t in evaluation.trainers.values()] == [threads, threads]


@pytest.mark.parametrize(("can_fork", "workers"), [(True, 3), (False, 1)])
def test_the_rule_takes_one_process_where_forked_ones_could_not_train(
    can_fork: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "helpful_workers", lambda *_: 3)
    monkeypatch.setattr(runner, "can_train_forked", lambda _: can_fork)
    assert runner._grid(resolve(BASE.replace(**{"engine.workers": 0})))._workers == workers


RICH: list[dict[str, Any]] = [
    {"mechanism.name": "quantile-clipping", "mechanism.bit-noise": 2.0},
    {"mechanism.name": "adaptive-noise", "mechanism.per-layer": True},
    {"mechanism.name": "none", "noise.multiplier": "", "client.name": "adadp-lr"},
    {"mechanism.private-scalar": "loss", "noise.placement": "client"},
    {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0, "evaluate.every": 2},
    {
        "mechanism.name": "none",
        "noise.multiplier": "",
        "client.name": "adadp-lr",
        "client.state": "client",
    },
]


_WITHOUT_PRIVACY = {"mechanism.name": "none", "noise.multiplier": "", "cohort.rate": 1.0}
_PRIVATE_EXAMPLES = _WITHOUT_PRIVACY | {
    "client.mechanism.name": "clipping",
    "client.noise.multiplier": 1.0,
}


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (_WITHOUT_PRIVACY, True),
        ({}, False),  # private clients: their rates are theirs
        ({"evaluate.unprotected": True}, True),
        (_PRIVATE_EXAMPLES, False),
        (_PRIVATE_EXAMPLES | {"evaluate.unprotected": True}, True),
    ],
)
def test_rates_at_their_limit_are_said_once_where_a_run_shows_what_clients_report(
    keys: dict[str, Any], shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    at_once = {"client.name": "adadp-lr", "client.lr": 0.5, "client.eta-max": 0.5}
    easy = {"client.tol": 1e9, "partition.max-examples": 600}  # every iteration raises the rate
    result = fedsim.run(BASE.replace(**at_once, **easy, **keys))
    said = [record.message for record in caplog.records if "eta-max" in record.message]
    share = [row.get("train-at-limit") for row in result.metrics if row["round"]]
    assert share == [1.0] * 3 if shown else share == [None] * 3
    assert len(said) == shown
    if shown:
        assert said[0] == (
            "round 1: the learning rates of clients with 100 % of the examples stand at "
            "client.eta-max, 0.5; a larger limit lets them grow."
        )


def test_a_run_leaves_its_artefacts(tmp_path: Path) -> None:
    result = fedsim.run(BASE, out=tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [
        ".fedsim-run",
        "checkpoint",
        "config.toml",
        "done",
        "ledger.jsonl",
        "manifest.json",
        "metrics.csv",
        "model.safetensors",
        "report.html",
        "summary.json",
    ]
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["round"]) for row in rows] == [0, 1, 2, 3]
    assert float(rows[-1]["test-accuracy"]) == result.metrics[-1]["test-accuracy"]
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(model[name], value) for name, value in tensors(result.arrays).items())
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


def test_the_resolved_config_reproduces_the_run_to_the_byte(tmp_path: Path) -> None:
    fedsim.run(BASE, out=tmp_path / "first")
    again = RunConfig.load(tmp_path / "first" / "config.toml")
    assert again.client.path != "auto"
    assert again.client.block_size > 0
    fedsim.run(again, out=tmp_path / "second")
    first, second = ((tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("block_size", [1, 7])
def test_the_block_size_changes_no_byte(block_size: int) -> None:
    usual = fedsim.run(BASE)
    other = fedsim.run(BASE.replace(**{"client.block-size": block_size}))
    assert all(
        torch.equal(value, tensors(other.arrays)[name])
        for name, value in tensors(usual.arrays).items()
    )


def test_the_statement_names_epsilon_level_and_adjacency() -> None:
    result = fedsim.run(BASE)
    expected = epsilon(
        noise_multiplier=1.0, cohort=PoissonCohort(rate=0.3), rounds=3, delta=BASE.noise.delta
    )
    assert result.privacy.epsilon == pytest.approx(expected, rel=1e-6)
    assert (result.privacy.level, result.privacy.adjacency) == ("client", "add-remove")
    assert result.metrics[-1]["epsilon"] == pytest.approx(expected, rel=1e-6)


def test_a_target_epsilon_is_met_and_not_undershot() -> None:
    config = BASE.replace(**{"noise.multiplier": "", "noise.target-epsilon": 3.0})
    spent = fedsim.run(config).privacy.epsilon
    assert 3.0 * 0.98 < spent <= 3.0


def test_a_run_stopped_by_its_budget_keeps_the_model_and_says_so(tmp_path: Path) -> None:
    budget = epsilon(
        noise_multiplier=1.0, cohort=PoissonCohort(rate=0.3), rounds=2, delta=BASE.noise.delta
    )
    config = BASE.replace(**{"noise.max-epsilon": budget * 1.0001})
    result = fedsim.run(config, out=tmp_path / "run")
    assert result.ended == "budget"
    assert "round 3 would exceed" in result.why
    assert result.privacy.epsilon <= budget * 1.0001
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert [row["round"] for row in result.metrics] == [0, 1, 2]


def test_a_run_without_privacy_says_that_there_is_none() -> None:
    config = RunConfig().replace(**{"rounds": 1, "partition.clients": 5})
    result = fedsim.run(config)
    assert result.privacy.epsilon == float("inf")
    assert "train-loss" in result.metrics[-1]


def test_a_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    config = BASE.replace(**{"data.name": "mnist", "data.dir": str(tmp_path / "none")})
    with pytest.raises(FedsimError, match="mnist"):
        fedsim.run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_keeps_the_model_of_the_last_whole_round(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_round(self, status: RunStatus) -> None:
            if status.round == 2:
                raise KeyboardInterrupt

    result = fedsim.run(BASE, out=tmp_path / "run", callbacks=[Interrupt()])
    two = fedsim.run(BASE.replace(rounds=2))
    assert result.ended == "interrupted"
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(model[name], value) for name, value in tensors(two.arrays).items())


def test_trainable_patterns_freeze_the_rest() -> None:
    config = BASE.replace(**{"model.name": "mlp", "model.widths": "8", "model.trainable": "fc2.*"})
    result = fedsim.run(config)
    assert sorted(tensors(result.arrays)) == ["fc2.bias", "fc2.weight"]


def test_a_run_that_starts_from_a_files_weights_freezes_and_saves_them(tmp_path: Path) -> None:
    mlp = {"model.name": "mlp", "model.widths": "8"}
    public = RunConfig().replace(
        **mlp, **{"rounds": 1, "partition.clients": 1, "data.train": ":300"}
    )
    fedsim.run(public, out=tmp_path / "public")
    weights = str(tmp_path / "public" / "model.safetensors")
    private = BASE.replace(
        **mlp,
        **{
            "data.train": "300:",
            "model.weights": weights,
            "model.weights-for": "fc1.*",
            "model.trainable": "fc2.*",
        },
    )
    result = fedsim.run(private, out=tmp_path / "private")
    before, after = load_file(weights), load_file(tmp_path / "private" / "model.safetensors")
    assert sorted(after) == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    assert torch.equal(after["fc1.weight"], before["fc1.weight"])
    assert torch.equal(after["fc2.weight"], tensors(result.arrays)["fc2.weight"])
    assert not torch.equal(after["fc2.weight"], before["fc2.weight"])
    again = private.replace(**{"model.weights": str(tmp_path / "private" / "model.safetensors")})
    assert fedsim.run(again.replace(**{"model.weights-for": ""})).metrics[0][
        "test-loss"
    ] == pytest.approx(float(result.metrics[-1]["test-loss"]))


def test_weights_that_are_not_there_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match=r"model\.weights"):
        fedsim.run(BASE.replace(**{"model.weights": "nowhere.safetensors"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_columns_of_metrics_are_the_plans_whatever_clients_call_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Trainer.train

    def evil(self: Trainer, *arguments: Any) -> Iterator[Block]:
        for block in honest(self, *arguments):
            theirs = {"round": 0.5, "epsilon": 0.0, "x\r\n9,9": 1.0, "a" * 9999: 2.0}
            more = {name: np.full(len(block.client_ids), v) for name, v in theirs.items()}
            yield replace(block, metrics={**block.metrics, **more})

    monkeypatch.setattr(Trainer, "train", evil)
    config = BASE.replace(**{"evaluate.unprotected": True, "evaluate.clients-every": 2})
    result = fedsim.run(config, out=tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        columns = file.readline().strip().split(",")
    quantiles = ("", "-min", "-p10", "-median", "-p90", "-max")
    assert columns == [
        *("round", "test-loss", "test-accuracy", "train-loss", "train-num-examples"),
        "clients-num-examples",
        *(f"clients-accuracy{quantile}" for quantile in quantiles),
        *(f"clients-loss{quantile}" for quantile in quantiles),
        *("epsilon", "simulated", "declared"),
        *RoundReport.columns,
        *("clip-norm", "update-norm", "bytes-down", "bytes-up"),
        *("clients-per-second", "seconds"),
    ]
    assert all(set(row) <= set(columns) for row in result.metrics)
    assert set().union(*result.metrics) == set(columns)
    assert [row["round"] for row in result.metrics] == [0, 1, 2, 3]


def test_a_callback_that_fails_does_not_end_the_run_and_its_own_frames_are_logged(caplog) -> None:
    class Failing(Callback):
        def on_round(self, status: RunStatus) -> None:
            raise OSError("the terminal is gone")

    assert fedsim.run(BASE, callbacks=[Failing()]).ended == "finished"
    frames = [line for line in caplog.text.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1
    assert "in on_round" in frames[0]


@pytest.mark.parametrize(
    "answer", [{"accuracy": 0.9}, 0.9, np.array([True, False]), torch.ones(2), np.bool_(False), ""]
)
def test_an_answer_that_is_no_reason_does_not_stop_the_run(answer: Any, caplog) -> None:
    """What another callback returns before it, or at the end, changes nothing either."""

    class Answering(Callback):
        def on_round(self, status: RunStatus) -> Any:
            return answer

        def on_end(self, status: RunStatus) -> Any:
            return answer

    class Counting(Callback):
        rounds = 0

        def on_round(self, status: RunStatus) -> None:
            self.rounds += 1

    counting = Counting()
    assert fedsim.run(BASE, callbacks=[Answering(), counting]).ended == "finished"
    assert counting.rounds == 4
    assert caplog.text.count("Answering failed") == (not isinstance(answer, str | np.bool_))


@pytest.mark.parametrize("answer", [True, np.bool_(True), torch.tensor(True)])
def test_a_truth_value_of_any_library_stops_the_run(answer: Any) -> None:
    class Answering(Callback):
        def on_round(self, status: RunStatus) -> Any:
            return answer

    assert fedsim.run(BASE, callbacks=[Answering()]).ended == "stopped"


def test_a_callback_cannot_change_the_record(tmp_path: Path) -> None:
    class Adding(Callback):
        def on_round(self, status: RunStatus) -> None:
            status.row["mine"] = status.row["round"] = 2.0
            status.arrays.clear()

    result = fedsim.run(BASE, callbacks=[Adding()], out=tmp_path)
    assert result.ended == "finished"
    assert [row["round"] for row in result.metrics] == [0, 1, 2, 3]
    assert all("mine" not in row for row in result.metrics)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    config = BASE.replace(**{"rounds": np.int64(1), "client.lr": np.float32(0.5)})
    assert (type(config.rounds), config.client.lr) == (int, 0.5)
    assert fedsim.run(config, out=tmp_path).ended == "finished"


@pytest.mark.parametrize("settings", RICH, ids=lambda settings: " ".join(settings))
def test_every_column_is_filled_by_some_round(settings: dict[str, Any]) -> None:
    config = BASE.replace(**settings)
    resolved = resolve(config)
    columns = row_columns(resolved, make_strategy(resolved))
    assert set().union(*fedsim.run(config).metrics) == set(columns)


def test_a_fresh_run_begins_anew_where_an_earlier_ones_clients_kept_something(tmp_path) -> None:
    config = BASE.replace(
        **{
            "rounds": 2,
            "client.name": "adam",
            "client.state": "client",
            "client.state-dir": str(tmp_path / "kept"),
        }
    )
    first = fedsim.run(config.replace(rounds=3))
    once = fedsim.run(config)
    for before, after in zip(first.metrics, once.metrics, strict=False):
        assert after.get("update-norm") == before.get("update-norm")
    # Each run's state has a directory of its own, in the one of their name.
    assert len(list((tmp_path / "kept" / config.name).iterdir())) == 2


def test_a_central_evaluation_is_of_the_shared_model_wherever_clients_keep_theirs(
    tmp_path: Path,
) -> None:
    config = RunConfig.parse(
        {
            "seed": 11,
            "rounds": 3,
            "data": {"name": "digits"},
            "partition": {"name": "dirichlet", "clients": 4},
            "model": {"name": "softmax"},
            "client": {"name": "ditto", "state": "client"},
            "mechanism": {"name": "none"},
        }
    )
    kept_in_files = config.replace(**{"client.state-dir": str(tmp_path / "kept")})
    accuracies = [
        [row["test-accuracy"] for row in fedsim.run(c, out=tmp_path / name).metrics]
        for name, c in (("memory", config), ("files", kept_in_files))
    ]
    assert accuracies[0] == accuracies[1]


@pytest.mark.parametrize("setting", ["dtype", "products", "autocast", "inference", "device"])
def test_what_a_caller_has_set_for_torch_changes_no_byte_of_a_run(setting: str) -> None:
    examples = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
    config = BASE.replace(**examples, rounds=1)
    usual = tensors(fedsim.run(config).arrays)
    with ExitStack() as stack:
        if setting == "dtype":
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, torch.float32)
        elif setting == "device":
            torch.set_default_device("meta")
            stack.callback(torch.set_default_device, None)
        elif setting == "products":
            torch.set_float32_matmul_precision("medium")
            stack.callback(torch.set_float32_matmul_precision, "highest")
        elif setting == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        else:
            stack.enter_context(torch.inference_mode())
        before = torch.get_default_dtype(), torch.get_default_device()
        arrays = fedsim.run(config).arrays
        assert (torch.get_default_dtype(), torch.get_default_device()) == before
    assert all(torch.equal(usual[name], value) for name, value in tensors(arrays).items())


def test_a_plan_charged_ahead_shows_what_its_rounds_so_far_cost() -> None:
    """Sensitivities of the first rounds of C over all: epsilon by the Gaussian's exact curve."""
    apart = {"rounds": 6, "cohort.name": "cyclic", "cohort.rate": 1.0, "cohort.groups": 2}
    for name, shown in (("lambda-cgd", True), ("banded", True), ("independent", False)):
        result = fedsim.run(BASE.replace(**apart, **{"noise.name": name}))
        rows = [row for row in result.metrics if row["round"] > 0]
        assert all(("epsilon-so-far" in row) == shown for row in rows)
        if shown:
            so_far = [row["epsilon-so-far"] for row in rows]
            assert so_far == sorted(so_far)
            assert so_far[0] < so_far[-1] == rows[0]["epsilon"] == rows[-1]["epsilon"]
