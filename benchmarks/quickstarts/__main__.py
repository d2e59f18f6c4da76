"""Seconds per round of two quick starts, by the packages' own code and by fedsim, in turns.

    python -m benchmarks.quickstarts --data /data --pfllib PFLlib
    python -m benchmarks.quickstarts --data /data --flower flower/examples/quickstart-pytorch

PFLlib is a checkout of its repository, Flower's example a copy of its folder; both run unchanged,
in environments that are created in build/quickstarts and use this one's torch. The folder of --data
has mnist.npz and cifar10.npz, with uint8 arrays x_train, y_train, x_test and y_test. The first
round of each side, which starts its processes, is not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median

from benchmarks.environments import environment
from benchmarks.quickstarts.examples import write_mnist, write_pfllib
from benchmarks.quickstarts.turns import ROOT, PackageCommand, RoundTimes, in_turns, ratios

BUILD = ROOT / "build" / "quickstarts"
PACKAGES = {
    "pfllib": ("ujson", "h5py", "calmsize", "cvxpy"),
    "flower": ("flwr-datasets==0.6.1",),
}
"""Requirements of each that this environment lacks."""
ALONE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables of every side: no network is used, and nothing is written to checkouts."""


def pfllib_sides(given: argparse.Namespace) -> list[PackageCommand]:
    """fedsim and PFLlib, on the examples that PFLlib's script has split among 20 clients."""
    rounds = ("--rounds", str(given.rounds + 1))
    python = environment(BUILD / "pfllib", *PACKAGES["pfllib"])
    module = (python, "-m", "benchmarks.quickstarts.pfllib_rounds")
    command = (*module, "--pfllib", str(given.pfllib.absolute()), *rounds)
    folder = BUILD / f"mnist-{given.share:g}"
    # PFLlib reads ../dataset, and its script writes the data set to the folder it runs in.
    for name in ("system", "dataset"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "judged.npz").exists():
        raw = folder / "dataset" / "MNIST" / "rawdata" / "MNIST" / "raw"
        write_mnist(given.data / "mnist.npz", raw, given.share)
        prepare((*command, "--split", "noniid", "-", "dir"), folder / "dataset")
        write_pfllib(folder / "dataset" / "MNIST", folder, clients=20)
    return [
        fedsim_side("pfllib", folder, rounds, given),
        PackageCommand("PFLlib", command, folder / "system", variables(folder, given)),
    ]


def flower_sides(given: argparse.Namespace) -> list[PackageCommand]:
    """fedsim, and the example's apps on a `LocalGrid` and on Flower's Ray simulation, as sides."""
    rounds = ("--rounds", str(given.rounds + 1))
    python = environment(BUILD / "flower", *PACKAGES["flower"])
    module = (python, "-m", "benchmarks.quickstarts.flower_rounds")
    command = (*module, "--example", str(given.flower.absolute()), *rounds)
    folder = BUILD / f"cifar10-{given.share:g}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "judged.npz").exists():
        arrays = given.data.absolute() / "cifar10.npz"
        prepare((*command, "--arrays", str(arrays), "--share", str(given.share)), folder)
    own = variables(folder, given)
    return [
        fedsim_side("flower", folder, rounds, given),
        PackageCommand("Flower's apps on LocalGrid", (*command, "--grid", "local"), folder, own),
        PackageCommand("Flower's apps on Ray", (*command, "--cpus", str(given.cpus)), folder, own),
    ]


def fedsim_side(
    quickstart: str, folder: Path, rounds: tuple[str, ...], given: argparse.Namespace
) -> PackageCommand:
    module = (sys.executable, "-m", "benchmarks.quickstarts.fedsim_rounds")
    workers = ("--workers", str(given.workers))
    command = (*module, quickstart, str(folder), *rounds, *workers)
    return PackageCommand("fedsim", command, folder, variables(folder, given))


def variables(folder: Path, given: argparse.Namespace) -> dict[str, str]:
    """A side's environment variables, in addition to this process's."""
    threads = {"OMP_NUM_THREADS": str(given.threads)} if given.threads else {}
    return ALONE | threads | {"HF_HOME": str(folder / "hub")}


def prepare(command: tuple[str, ...], folder: Path) -> None:
    """Make a package's data with its own code, in a folder.

    Raises
    ------
    subprocess.CalledProcessError
        If it fails.
    """
    own = {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hub")}
    subprocess.run(command, cwd=folder, env={**os.environ, **ALONE, **own}, check=True)


def table(sides: list[PackageCommand], times: list[RoundTimes]) -> str:
    """One line per side: median seconds, and the median of the turns' ratios with their range."""
    head = (
        "| | CPU s a round | wall s a round | CPU s of training | fedsim's CPU s as a fraction "
        "| of training alone | wall s as a fraction | accuracy by round |"
    )
    ours = times[0]
    lines = [head, "|" + " --- |" * 8]
    for side, theirs in zip(sides, times, strict=True):
        seconds = [f"{median(values):.3g}" for values in (theirs.cpu, theirs.wall, theirs.training)]
        pairs = (ours.cpu, theirs.cpu), (ours.training, theirs.training), (ours.wall, theirs.wall)
        compared = ["" if theirs is ours else ratios(*pair) for pair in pairs]
        accuracy = " ".join(f"{share:.3f}" for share in theirs.accuracy)
        lines.append("| " + " | ".join([side.name, *seconds, *compared, accuracy]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the arrays")
    parser.add_argument("--pfllib", type=Path, help="a checkout of PFLlib")
    parser.add_argument("--flower", type=Path, help="a checkout of examples/quickstart-pytorch")
    parser.add_argument("--rounds", type=int, default=5, help="that are counted")
    parser.add_argument("--share", type=float, default=1.0, help="of the data set's examples")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0 for its default")
    parser.add_argument("--workers", type=int, default=1, help="of fedsim; 0 for its default")
    parser.add_argument("--cpus", type=int, default=1, help="of a client on Ray; Flower's are 2")
    given = parser.parse_args()
    if given.pfllib is None and given.flower is None:
        parser.error("there is nothing to measure: --pfllib or --flower is needed.")
    chosen = {"pfllib": pfllib_sides, "flower": flower_sides}
    for name in (name for name in chosen if getattr(given, name) is not None):
        sides = chosen[name](given)
        before = os.getloadavg()[0]
        times = in_turns(sides, given.rounds, sides[0].folder)
        versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "flwr"))
        print(
            f"\n{name}: {given.rounds} rounds a side, {given.share:g} of the examples, "
            f"{os.cpu_count()} cores, load {before:.1f} to {os.getloadavg()[0]:.1f}, {versions}\n"
        )
        print(table(sides, times), flush=True)


if __name__ == "__main__":
    main()
