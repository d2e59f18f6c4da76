"""A run that is resumed on other data than it began with: drawn anew and charged, or refused."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_runs import killed_in

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.directory import RunDirectory

CLIENTS = {"mechanism.name": "clipping", "noise.multiplier": 1.0}
EXAMPLES = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
LEVELS: dict[str, dict[str, Any]] = {
    "clients": CLIENTS,
    "examples": EXAMPLES,
    "both": {**CLIENTS, **EXAMPLES},
    "shares": {**CLIENTS, "noise.placement": "client"},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 3, 60)
    path = tmp_path / "data.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    return path


def edited(path: Path) -> None:
    """Every client has another first example."""
    arrays = dict(np.load(path))
    arrays["x_train"] = arrays["x_train"] + np.float32(0.25)
    np.savez(path, **arrays)


def config(data: Path, **settings: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "rounds": 5,
            "data": {"name": str(data), "classes": 3},
            "partition": {"clients": 6},
            "client": {"batch-size": 5},
            "cohort": {"name": "full"},
            "checkpoint": {"every": 2},
            "engine": {"device": "cpu"},
        }
    ).replace(**settings)


def killed(plan: RunConfig, out: Path) -> None:
    """Run until round 4 is to be kept: its lines and those of round 3 are behind a checkpoint."""
    with killed_in(4):
        fedsim.run(plan, out=out)
    assert Checkpoints(RunDirectory(out).checkpoint).rounds() == [2]


def released(out: Path) -> list[tuple[int, int]]:
    entries = Ledger.read(out / "ledger.jsonl").entries
    return [(entry.round, entry.attempt) for entry in entries]


@pytest.mark.spanning
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_under_a_seed_other_data_are_refused_and_the_same_go_on(level, workers, data, tmp_path):
    plan = config(data, **LEVELS[level], **{"engine.workers": workers})
    out, before = tmp_path / "run", data.read_bytes()
    killed(plan, out)
    edited(data)
    with pytest.raises(FedsimError, match=r"round 3 was recorded .* for another sum: data, code"):
        fedsim.run(plan, out=out, resume=True)
    assert released(out) == [(t, 0) for t in (1, 2, 3, 4)]
    data.write_bytes(before)
    assert fedsim.run(plan, out=out, resume=True).ended == "finished"
    assert released(out) == [(t, 0) for t in (1, 2, 3, 4, 5)]
    whole = fedsim.run(plan, out=tmp_path / "whole")
    assert whole.ended == "finished"
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert models[0] == models[1]


@pytest.mark.spanning
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_under_system_entropy_other_data_are_another_attempt(level, workers, data, tmp_path):
    settings = {"engine.workers": workers, "noise.entropy": "system"}
    plan = config(data, **LEVELS[level], **settings)
    out = tmp_path / "run"
    killed(plan, out)
    edited(data)
    result = fedsim.run(plan, out=out, resume=True)
    assert result.ended == "finished"
    assert released(out) == [(1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (4, 1), (5, 0)]
    if level == "clients":
        assert result.privacy.cost.releases == 7
    for path in (out / "clients").glob("client-*.jsonl"):
        entries = Ledger.read(path).entries
        assert sum(entry.round == 3 for entry in entries) == 2
        assert {entry.attempt for entry in entries if entry.round == 4} == {0, 1}


def test_two_runs_of_one_config_on_an_edited_file_are_charged_twice(data, tmp_path):
    plan = config(data, **CLIENTS)
    out = tmp_path / "run"
    first = fedsim.run(plan, out=out)
    edited(data)
    second = fedsim.run(plan, out=out, overwrite=True)
    assert second.privacy.cost.releases == 2 * first.privacy.cost.releases
    said = str(second.privacy)
    assert "Two runs of one seed on different data share their noise" in said
    assert "publish at most one of them" in said
    assert 'With noise.entropy = "system"' in said


def test_at_a_client_two_runs_of_one_config_are_charged_twice(data, tmp_path):
    plan = config(data, **EXAMPLES, **{"client.state-dir": str(tmp_path / "state")})
    fedsim.run(plan)
    once = {path.name: Ledger.read(path).num_releases for path in ledgers(tmp_path)}
    fedsim.run(plan, out=tmp_path / "run")
    assert {p.name: Ledger.read(p).num_releases for p in ledgers(tmp_path)} == {
        name: 2 * count for name, count in once.items()
    }


def ledgers(path: Path) -> list[Path]:
    return sorted((path / "state").glob("client-*.jsonl"))


def test_no_file_but_the_key_is_needed_to_tell_sums_apart_and_it_is_the_owners(data, tmp_path):
    plan = config(data, **CLIENTS)
    notes = []
    for name in ("one", "two"):
        fedsim.run(plan, out=tmp_path / name)
        assert stat.S_IMODE((tmp_path / name / "fingerprint.key").stat().st_mode) == 0o600
        lines = (tmp_path / name / "ledger.jsonl").read_text().splitlines()[1:]
        notes.append([json.loads(line)["noted"]["sum"] for line in lines])
    # Equal sums; without the key nobody sees that.
    assert len({*notes[0], *notes[1]}) == 10
    heads = [Ledger.read(tmp_path / name / "ledger.jsonl").head for name in ("one", "two")]
    assert heads[0] == heads[1]


def test_another_path_is_another_release(data):
    from fedsim.runs.resolve import resolve

    plan = config(data, **CLIENTS)
    auto, plain = resolve(plan), resolve(plan.replace(**{"client.path": "plain"}))
    resolved = resolve(auto.config)
    assert auto.release == resolved.release
    assert auto.trainer.path.name == resolved.trainer.path.name != "plain"
    assert auto.release != plain.release
    assert auto.trainer.randomness.release == auto.release


@pytest.mark.parametrize("damage", ["doubled", "cut", "flipped", "swapped", "shortened", "header"])
def test_damaged_metrics_are_refused_before_anything_changes(damage, data, tmp_path):
    out = tmp_path / "run"
    fedsim.run(config(data, **CLIENTS), out=out)
    path = out / "metrics.csv"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    at = lines[3].index(b"0.")
    changed = {
        "doubled": [*lines[:3], *lines[2:]],
        "cut": [*lines[:3], lines[3][: at + 3], *lines[4:]],
        "flipped": [*lines[:3], lines[3][:at] + b"9" + lines[3][at + 1 :], *lines[4:]],
        "swapped": [*lines[:2], lines[3], lines[2], *lines[4:]],
        "shortened": lines[:3],
        "header": [lines[0].replace(b"test-loss", b"test-lots"), *lines[1:]],
    }[damage]
    path.write_bytes(b"".join(changed))
    files = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    longer = config(data, **CLIENTS, rounds=6)
    with pytest.raises(FedsimError, match=r"metrics\.csv is damaged .*restore .* or remove it"):
        fedsim.run(longer, out=out, resume=True)
    assert files == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    path.write_bytes(whole)
    assert len(fedsim.run(longer, out=out, resume=True).metrics) == 7
