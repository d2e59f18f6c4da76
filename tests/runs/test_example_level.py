"""Runs in which clients protect their examples, from the config to the statement."""

from __future__ import annotations

import json
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from typer.testing import CliRunner

import fedsim
from fedsim import RunConfig
from fedsim.cli.app import app
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.runs.resolve import resolve

BASE = RunConfig().replace(
    **{
        "rounds": 2,
        "partition.clients": 5,
        "client.name": "sgd",
        "client.batch-size": 41,
        "client.mechanism.name": "clipping",
        "client.noise.multiplier": 1.5,
    }
)


def rdp_epsilon(noise_multiplier: float, rate: float, count: int) -> float:
    accountant = dp_accounting.rdp.RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), count)
    return float(accountant.get_epsilon(1e-5))


def test_the_statement_is_about_examples_and_counts_every_invocation(tmp_path: Path) -> None:
    result = fedsim.run(BASE, out=tmp_path / "run")
    assert result.privacy.level == "example"
    # 1437 examples: clients have 287 or 288; 7 or 8 steps a round, at rate 41 / N_i.
    sizes = {len(part) for part in resolve(BASE).data.client_indices}
    worst = max(rdp_epsilon(1.5, 41 / size, 2 * -(-size // 41)) for size in sizes)
    assert result.privacy.cost.rdp_epsilon == pytest.approx(worst, rel=0.02)
    assert result.privacy.epsilon <= result.privacy.cost.rdp_epsilon
    assert result.metrics[-1]["example-epsilon"] == pytest.approx(result.privacy.epsilon)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_driver_writes_a_line_a_round_of_all_clients(tmp_path: Path, workers: int) -> None:
    result = fedsim.run(BASE.replace(**{"engine.workers": workers}), out=tmp_path / "run")
    ledger = Ledger.read(tmp_path / "run" / "ledger-examples.jsonl", delta=1e-5)
    assert (ledger.level, len(ledger.lines)) == ("example", 3)
    for number in (1, 2):
        entries = [entry for entry in ledger.entries if entry.round == number]
        assert sorted(c for entry in entries for c in entry.clients) == [0, 1, 2, 3, 4]
        assert len({entry.public["examples"] for entry in entries}) == len(entries) == 2
    spent = [history.accountant.epsilon(1e-5) for history in ledger.histories.values()]
    assert max(spent) == pytest.approx(result.privacy.epsilon, rel=1e-6)


def test_a_target_epsilon_holds_for_the_client_that_pays_most() -> None:
    config = BASE.replace(**{"client.noise.multiplier": "", "client.noise.target-epsilon": 2.0})
    spent = fedsim.run(config).privacy.epsilon
    assert 1.95 < spent <= 2.0


def test_both_levels_have_a_statement_each() -> None:
    config = BASE.replace(**{"mechanism.name": "clipping", "noise.multiplier": 1.0})
    result = fedsim.run(config)
    assert result.privacy.level == "client"
    assert result.example_privacy is not None
    assert result.example_privacy.level == "example"


def test_noise_that_tells_clients_sizes_is_refused_where_whole_clients_are_protected() -> None:
    both = {"mechanism.name": "clipping", "noise.multiplier": 1.0, "client.noise.multiplier": ""}
    with pytest.raises(FedsimError, match=r"client\.noise\.target-epsilon = 2.*how many examples"):
        BASE.replace(**both, **{"client.noise.target-epsilon": 2.0})


def test_a_batch_larger_than_a_clients_data_is_refused() -> None:
    with pytest.raises(FedsimError, match=r"client\.batch-size = 300.* at most 287"):
        fedsim.run(BASE.replace(**{"client.batch-size": 300}))


@pytest.mark.parametrize(
    "settings", [{"client.batch-size": 300}, {"client.noise.max-epsilon": 1e-3}]
)
def test_a_clients_size_refuses_no_run_that_protects_whole_clients(settings, tmp_path) -> None:
    both = {"mechanism.name": "clipping", "noise.multiplier": 1.0, "rounds": 2}
    config = BASE.replace(**both, **settings)
    local = fedsim.run(config, out=tmp_path / "local")
    assert local.ended == "finished"
    assert [entry.round for entry in Ledger.read(tmp_path / "local" / "ledger.jsonl").entries] == [
        1,
        2,
    ]
    workers = fedsim.run(config.replace(**{"engine.workers": 2}), out=tmp_path / "workers")
    assert workers.ended == "finished"
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "workers")]
    assert models[0] == models[1]


def test_one_clients_numbers_fail_that_client_alone_in_a_private_run(tmp_path) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 2
    owner = np.repeat(np.arange(6), 10)
    arrays = {"x_train": x, "y_train": y, "x_test": x[:10], "y_test": y[:10], "owner_train": owner}
    spoilt = {**arrays, "x_train": np.where((owner == 3)[:, None], np.nan, x).astype(np.float32)}
    for name, saved in (("sound", arrays), ("spoilt", spoilt)):
        np.savez(tmp_path / f"{name}.npz", **saved)
    config = RunConfig().replace(
        **{
            "rounds": 1, "data.name": str(tmp_path / "spoilt.npz"), "data.classes": 2,
            "partition.name": "by-owner", "partition.clients": 6, "cohort.name": "full",
            "client.batch-size": 5, "mechanism.name": "clipping", "noise.multiplier": 1.0,
            "engine.device": "cpu",
        }
    )  # fmt: skip
    free = {"mechanism.name": "none", "noise.multiplier": ""}
    with pytest.raises(FedsimError, match="NaN or infinite numbers in x_train"):
        fedsim.run(config.replace(**free))
    results = [
        fedsim.run(config, out=tmp_path / "local"),
        fedsim.run(config.replace(**{"engine.workers": 2}), out=tmp_path / "workers"),
    ]
    for result in results:
        assert result.ended == "finished"
        row = result.metrics[-1]
        assert (row["asked"], row["usable"], row["failed-non-finite"]) == (6, 5, 1)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "workers")]
    assert models[0] == models[1]


def test_without_noise_examples_have_no_guarantee() -> None:
    result = fedsim.run(BASE.replace(**{"client.noise.multiplier": 0.0}))
    assert result.privacy.epsilon == float("inf")
    assert "No privacy guarantee" in str(result.privacy)


def test_the_privacy_command_asks_each_level_at_its_own_delta(tmp_path: Path) -> None:
    both = {"mechanism.name": "clipping", "noise.multiplier": 1.0, "noise.delta": 1e-2}
    result = fedsim.run(BASE.replace(**both), out=tmp_path / "run")
    said = CliRunner().invoke(app, ["privacy", str(tmp_path / "run"), "--json"]).output
    told = {level["level"]: (level["epsilon"], level["delta"]) for level in json.loads(said)}
    shown = {s.level: (s.epsilon, s.delta) for s in (result.privacy, result.example_privacy)}
    assert told == shown
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert verified.exit_code == 0, verified.output


def test_a_run_whose_clients_ledger_is_gone_does_not_verify(tmp_path: Path) -> None:
    fedsim.run(BASE, out=tmp_path / "run")
    (tmp_path / "run" / "ledger-examples.jsonl").unlink()
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "run"), "--json"])
    (check,) = [c for c in json.loads(verified.output) if c["subject"] == "manifest"]
    assert (verified.exit_code, check["passed"]) == (1, False)
    assert "it names client and example ledgers, and there are client" in check["detail"]


def test_the_privacy_command_answers_for_examples(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE.to_toml())
    said = CliRunner().invoke(app, ["privacy", str(path)]).output
    spent = fedsim.run(BASE).privacy.epsilon
    assert f"{spent:.4f}" in said
    assert "example, zero-out" in said


def test_noise_drawn_as_on_a_gpu_is_another_release_at_the_same_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draws have the same bytes on a CPU, so that a GPU is not needed."""
    on_host = fedsim.run(BASE, out=tmp_path / "host")
    for module in ("local_rounds", "trainer"):
        monkeypatch.setattr(
            f"fedsim.training.{module}.draws_on_device", lambda _, entropy: entropy == "config"
        )
    assert not resolve(BASE.replace(**{"noise.entropy": "system"})).trainer.draws_noise_in_steps
    in_steps = [
        fedsim.run(BASE.replace(**{"client.block-size": size}), out=tmp_path / f"{size}")
        for size in (1, 5)
    ]
    # Whoever shares the block, and resumed or not; on a host's terms it is another run.
    fedsim.run(BASE.replace(rounds=1), out=tmp_path / "parts")
    in_steps.append(fedsim.run(BASE, out=tmp_path / "parts", resume=True))
    models = [
        np.concatenate([array.numpy().ravel() for array in result.arrays.values()])
        for result in (on_host, *in_steps)
    ]
    assert all(np.array_equal(model, models[1]) for model in models[1:])
    assert not np.array_equal(models[0], models[1])
    assert abs(models[0] - models[1]).max() < 1
    assert in_steps[0].privacy.epsilon == on_host.privacy.epsilon
    with pytest.raises(FedsimError, match="on a CPU or a GPU as it began"):
        fedsim.run(BASE.replace(rounds=3), out=tmp_path / "host", resume=True)
