"""What `benchmarks.peers` and `benchmarks.gpu` run, write and skip. Nothing is timed here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import example_privacy, gpu
from benchmarks.peers.__main__ import HEAD, KEY, read, table
from benchmarks.peers.fedsim_rounds import config
from benchmarks.peers.tasks import TASKS, Job, examples, train, write
from experiments.framework.run import load

ROOT = Path(__file__).parents[2]
FULL = ROOT / "experiments" / "koskela" / "koskela-federated-full"


def job(task: str, folder: Path, **settings: Any) -> Job:
    data = write(TASKS[task].scaled(0.004), folder, None)
    given: dict[str, Any] = {
        "task": task,
        "share": 0.004,
        "rounds": 2,
        "seconds": 600.0,
        "device": "cpu",
        "workers": 1,
        "data": str(data),
        "out": str(folder / "result.json"),
    }
    return Job(**given | settings)


def test_the_tasks_have_the_published_sizes() -> None:
    def parameters(name: str, trained: bool = False) -> int:
        found = TASKS[name].network().parameters()
        return sum(p.numel() for p in found if p.requires_grad or not trained)

    assert parameters("cifar10") == 1_626_442
    assert parameters("mnist") == 582_026
    assert parameters("lora") == pytest.approx(10e6, rel=0.05)
    assert parameters("lora", trained=True) == 8 * 2 * (2 * 4 * 320) + 320 * 10 + 10


def test_a_network_is_the_same_each_time_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other = (TASKS["mnist"].network().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.rand(3), expected)


def labels_of(arrays: Any) -> dict[bytes, int]:
    pairs = zip(arrays["x_train"], arrays["y_train"], strict=True)
    return {image.tobytes(): int(label) for image, label in pairs}


def test_real_examples_are_divided_among_the_clients(tmp_path: Path) -> None:
    rng, task = np.random.default_rng(0), replace(TASKS["mnist"], clients=3, examples=4)
    arrays = {
        "x_train": rng.integers(256, size=(20, 28, 28), dtype=np.uint8),
        "y_train": np.arange(20) % 10,
        "x_test": np.zeros((2, 28, 28), np.uint8),
        "y_test": np.zeros(2, int),
    }
    np.savez(tmp_path / "mnist.npz", **arrays)
    with np.load(write(task, tmp_path / "out", tmp_path)) as file:
        assert file["owner_train"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
        given, taken = labels_of(arrays), labels_of(file)
    assert len(taken) == 12
    assert taken.items() <= given.items()


def test_a_package_trains_on_what_fedsim_reads(tmp_path: Path) -> None:
    made = job("cifar10", tmp_path)
    x, y = examples(made).clients[1]
    assert x.shape == (50, 3, 32, 32)
    assert float(x.max()) <= 1
    with np.load(made.data) as file:
        assert np.array_equal(file["x_train"][50:100, :, :, 2] / np.float32(255), x[:, 2].numpy())
        assert np.array_equal(file["y_train"][50:100], y.numpy())
    model = made.described.network()
    before = model.state_dict()["0.weight"].clone()
    train(model, made, 1)
    assert not torch.equal(model.state_dict()["0.weight"], before)


def test_private_noise_is_the_same_for_all_packages(tmp_path: Path) -> None:
    task, settings = TASKS["cifar10-dp"], config(job("cifar10-dp", tmp_path, share=1.0))
    scale = settings.noise.multiplier * task.cohort / settings.noise.cohort_size
    assert scale == pytest.approx(task.multiplier)
    assert settings.mechanism.clip_norm == task.clip_norm
    assert settings.cohort.rate * task.clients == task.cohort


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_a_row_is_written_once_and_shown(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    command = ["benchmarks.peers", "--tasks", "cifar10", "--peers", "fedsim", "--share", "0.004"]
    command += ["--rounds", "2", "--rows", str(rows), "--write", str(page)]
    run(*command)
    (row,) = read(rows)
    assert row["rounds done"] == 2
    assert row["s a round"] > 0
    assert row["process MB"] > 100
    assert f"| {' | '.join(HEAD)} |" in page.read_text()
    assert "2 of 2" in page.read_text()
    written = rows.read_text()
    run(*command)
    assert rows.read_text() == written


def test_a_package_that_did_not_run_says_why() -> None:
    row = dict.fromkeys(KEY, 1) | {
        "task": "mnist",
        "share": 1.0,
        "peer": "pfl",
        "device": "cpu",
        "data": "synthetic",
        "date": "today",
        "load": 0.5,
        "failed": "pfl cannot be installed: no a|b",
    }
    last = table([row]).strip().splitlines()[-1]
    assert last.startswith("| pfl | not run: pfl cannot be installed: no a/b |")
    assert last.count("|") == len(HEAD) + 1


def piece(name: str, code: str) -> gpu.Piece:
    return gpu.Piece(name, ["-c", code], 0)


def states(out: Path) -> list[tuple[str, str]]:
    rows = map(json.loads, (out / "rows.jsonl").read_text().splitlines())
    return [(row["piece"], row["state"]) for row in rows]


def test_pieces_that_have_ended_are_skipped_and_others_go_on(tmp_path: Path) -> None:
    good, bad = piece("good", "print('a figure')"), piece("bad", "raise SystemExit('no figure')")
    long = (
        "import pathlib, time; p = pathlib.Path('PATH'); p.exists() or (p.touch(), time.sleep(99))"
    )
    slow = piece("slow", long.replace("PATH", str(tmp_path / "begun")))
    last = piece("last", "print('the end')")
    wanted = [good, bad, slow, last]
    assert not gpu.work(wanted, tmp_path, gpu.GRACE + 3)
    assert states(tmp_path) == [("good", "done"), ("bad", "failed"), ("slow", "unfinished")]
    assert gpu.work(wanted, tmp_path, gpu.GRACE + 100)
    assert states(tmp_path)[3:] == [("slow", "done"), ("last", "done")]
    text = (tmp_path / "output.md").read_text()
    assert "a figure" in text
    assert "no figure" in text
    assert "| slow | done |" in text
    gpu.forget(tmp_path / "rows.jsonl", ["bad"])
    assert gpu.work(wanted, tmp_path, gpu.GRACE + 100)
    assert states(tmp_path)[-1] == ("bad", "failed")


def test_packages_that_an_interpreter_lacks_come_from_an_environment_or_are_gone_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.missing() == []
    assert gpu.interpreter(tmp_path) == sys.executable
    lacking = ("flwr", "ray", "opacus")
    monkeypatch.setattr(gpu, "_is_installed", lambda name: name not in lacking)
    wanted = gpu.missing()
    assert [one.partition("==")[0] for one in wanted] == [*lacking]
    assert {*wanted} <= {*(ROOT / "constraints.txt").read_text().split()}
    monkeypatch.setattr(gpu, "environment", lambda place, *names: f"{place} {names}")
    assert gpu.interpreter(tmp_path) == f"{tmp_path / 'environment'} {(*wanted,)}"

    def offline(*_: object) -> str:
        raise subprocess.CalledProcessError(1, "pip", stderr="ERROR: no wheel")

    monkeypatch.setattr(gpu, "environment", offline)
    assert gpu.interpreter(tmp_path) == sys.executable
    assert "no wheel" in capsys.readouterr().out


def test_private_steps_are_measured_where_opacus_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {"fedsim": "print(3.5, 20)", "Opacus": "import opacus_of_nobody"}

    def one(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        return started([sys.executable, "-c", lines[command[-2]]], **settings)

    started = subprocess.run
    monkeypatch.setattr(example_privacy, "WAYS", dict.fromkeys(lines))
    monkeypatch.setattr(example_privacy.subprocess, "run", one)
    monkeypatch.setattr(sys, "argv", ["", "--models", "mlp"])
    example_privacy.main()
    out = capsys.readouterr().out
    assert "mlp, fedsim: 3.5 ms, 20 MiB" in out
    assert "mlp, Opacus: ModuleNotFoundError: No module named 'opacus_of_nobody'" in out


def test_a_piece_without_enough_time_is_not_begun(tmp_path: Path) -> None:
    assert not gpu.work([replace(piece("a", ""), least=50.0)], tmp_path, gpu.GRACE + 40)
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_pieces_of_a_device_name_runs_that_exist(tmp_path: Path) -> None:
    named = [*load(FULL).members()]
    wanted = gpu.pieces("cuda", tmp_path, tmp_path, tiny=False)
    patterns = [one.command[one.command.index("--only") + 1] for one in wanted if "Fig" in one.name]
    found = [[name for name in named if fnmatchcase(name, pattern)] for pattern in patterns]
    assert all(found)
    assert len({name for part in found for name in part}) == sum(map(len, found))
    assert sum(map(len, found[:3])) == 30
    assert sum(map(len, found)) == 120
    assert len({one.name for one in wanted}) == len(wanted)
