"""What `benchmarks.quickstarts` measures with: turns, clocks, data. Nothing is timed here."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.quickstarts import networks
from benchmarks.quickstarts.__main__ import table
from benchmarks.quickstarts.examples import write_mnist, write_pfllib
from benchmarks.quickstarts.stamps import cpu_seconds
from benchmarks.quickstarts.turns import PackageCommand, RoundTimes, in_turns, ratios

SIDE = """
import sys
from benchmarks.quickstarts.stamps import Stamps

name, log, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
stamps = Stamps()
evaluate = stamps.evaluation(lambda: print("what the package says"))
for _ in range(rounds):
    stamps.boundary()
    with open(log, "a") as file:
        file.write(name)
    evaluate()
stamps.stop()
stamps.report(accuracy=[0.5] * rounds)
"""


def side(name: str, folder: Path, rounds: int) -> PackageCommand:
    log = str(folder / "order")
    return PackageCommand(name, (sys.executable, "-c", SIDE, name, log, str(rounds)), folder)


def test_sides_take_turns_and_the_first_round_is_not_counted(tmp_path: Path) -> None:
    times = in_turns([side("a", tmp_path, 4), side("b", tmp_path, 4)], 3, tmp_path)
    assert (tmp_path / "order").read_text() == "baabbaab"
    for one in times:
        assert len(one.wall) == len(one.cpu) == len(one.evaluation) == 3
        assert one.accuracy == [0.5] * 4
        walls = zip(one.wall, one.evaluation, strict=True)
        assert all(0 < spent <= wall for wall, (spent, _) in walls)
    assert (tmp_path / "a.log").read_text() == "what the package says\n" * 4


def test_a_side_that_ends_early_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"b has ended; see .*b\.log"):
        in_turns([side("a", tmp_path, 4), side("b", tmp_path, 2)], 3, tmp_path)


def test_the_cpu_clock_counts_what_a_process_has_started() -> None:
    def usage() -> float:
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        found = [resource.getrusage(who) for who in whose]
        return sum(one.ru_utime + one.ru_stime for one in found)

    before, ours = usage(), cpu_seconds()
    work = "sum(k * k for k in range(2_000_000))"
    subprocess.run([sys.executable, "-c", work], check=True)
    assert cpu_seconds() - ours == pytest.approx(usage() - before, abs=0.05)


def test_ratios_are_of_turns_and_not_of_medians() -> None:
    assert ratios([1.0, 4.0, 9.0], [2.0, 4.0, 6.0]) == "1.00 (0.50 to 1.50)"


def test_the_table_has_a_line_a_side_and_no_ratio_of_a_side_with_itself() -> None:
    ours = RoundTimes([2.0], [1.0], [(0.5, 0.25)], [0.1])
    theirs = RoundTimes([3.0], [2.0], [(0.5, 0.5)], [0.125])
    sides = [PackageCommand(name, (), Path()) for name in ("fedsim", "other")]
    lines = table(sides, [ours, theirs]).splitlines()
    assert lines[2] == "| fedsim | 1 | 2 | 0.75 |  |  |  | 0.100 |"
    assert "| 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) | 0.67 (0.67 to 0.67) |" in lines[3]


def test_torchvision_reads_the_files_of_mnist_as_its_own(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    random = np.random.default_rng(0)
    arrays = {
        "x_train": random.integers(0, 256, (6, 28, 28), dtype=np.uint8),
        "y_train": np.arange(6),
        "x_test": random.integers(0, 256, (4, 28, 28), dtype=np.uint8),
        "y_test": np.arange(4),
    }
    np.savez(tmp_path / "mnist.npz", **arrays)
    write_mnist(tmp_path / "mnist.npz", tmp_path / "MNIST" / "raw", share=0.5)
    for split, count in (("train", 3), ("test", 2)):
        read = datasets.MNIST(tmp_path, train=split == "train", download=True)
        np.testing.assert_array_equal(read.data.numpy(), arrays[f"x_{split}"][:count])
        assert read.targets.tolist() == list(range(count))


def write_split(folder: Path, sizes: list[int]) -> None:
    """As PFLlib's script writes one: a pickled dict a client, a third as many to test."""
    for name, share in (("train", 1), ("test", 3)):
        (folder / name).mkdir(parents=True)
        for client, size in enumerate(sizes):
            x = np.full((size // share, 1, 28, 28), client / 10, dtype=np.float32)
            y = np.arange(size // share) % 10
            np.savez_compressed(folder / name / f"{client}.npz", data={"x": x, "y": y})


def test_a_split_of_pfllib_keeps_each_client_its_examples(tmp_path: Path) -> None:
    write_split(tmp_path / "split", [9, 3])
    write_pfllib(tmp_path / "split", tmp_path, clients=2)
    with np.load(tmp_path / "clients.npz") as file, np.load(tmp_path / "judged.npz") as judged:
        assert file["owner_train"].tolist() == [0] * 9 + [1] * 3
        np.testing.assert_array_equal(
            file["x_train"][:, 0, 0], (file["owner_train"] / 10).astype(np.float32)
        )
        # All that PFLlib evaluates: the clients' test examples, then their training examples.
        assert len(file["x_test"]) == len(file["y_test"]) == 4 + 12
        np.testing.assert_array_equal(judged["x"][:, 0], file["x_test"][:4])
        np.testing.assert_array_equal(judged["y"], file["y_test"][:4])


@pytest.mark.parametrize(
    ("network", "shape", "count"),
    [(networks.mnist(), (1, 28, 28), 582_026), (networks.cifar(), (3, 32, 32), 62_006)],
)
def test_networks_have_the_parameters_of_the_quick_starts(
    network: nn.Module, shape: tuple[int, ...], count: int
) -> None:
    assert sum(p.numel() for p in network.parameters()) == count
    assert network(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.slow
def test_fedsims_side_makes_its_rounds_of_such_a_split(tmp_path: Path) -> None:
    write_split(tmp_path / "split", [9] * 20)
    write_pfllib(tmp_path / "split", tmp_path, clients=20)
    module = (sys.executable, "-m", "benchmarks.quickstarts.fedsim_rounds")
    command = (*module, "pfllib", str(tmp_path), "--rounds", "2")
    (times,) = in_turns([PackageCommand("fedsim", command, tmp_path)], 1, tmp_path)
    assert len(times.accuracy) == 3  # of the initial model, and after each round
    assert times.evaluation[0][0] > 0
