"""Packages on the same tasks: seconds a round, updates a second, GPU use, memory, accuracy.

    python -m benchmarks.peers --tasks cifar10 --peers fedsim pfl --rounds 5
    python -m benchmarks.peers --device cuda --seconds 120 --rows gpu.jsonl --write gpu-peers.md

Each package runs in a process of its own, and all but fedsim in environments that are created in
build/peers and use this one's torch. Without an index, pip takes wheels that were brought:
PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels. A row is written to --rows when it ends; a call with the same
settings runs only the rows that are not there. Examples are synthetic unless --data is a folder
with cifar10.npz and mnist.npz, of uint8 arrays x_train, y_train, x_test and y_test.

The first round of each, which starts its processes and compiles or captures its steps, is reported
as the start, and not counted in seconds a round. Accuracy, of the final model on the same test
examples, checks that the same work was done. Central privacy has the same bound and noise in all
packages that have it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engines import Memory
from benchmarks.environments import environment
from benchmarks.peers.tasks import TASKS, Job, write

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "peers"
REQUIREMENTS = {
    "fedsim": "",
    "pfl": "pfl==0.6.0",
    "flower": "flwr[simulation]==1.42.0",
    "blazefl": "blazefl[contrib,reproducibility]==3.0.0",
}
KEY = ("task", "share", "peer", "device", "rounds", "seconds", "workers", "data")
"""Settings by which a row is found again."""
HEAD = [
    "package",
    "rounds",
    "start s",
    "s a round",
    "updates/s",
    "GPU %",
    "GPU MB",
    "process MB",
    "accuracy",
    "versions",
]

Row = dict[str, Any]


class GpuUse(threading.Thread):
    """Asks nvidia-smi for the GPU's use and memory, every half second.

    Attributes
    ----------
    use, memory : list of float
        Percent of the time in which a kernel ran, and MB in use by all processes.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.use: list[float] = []
        self.memory: list[float] = []
        self._over = threading.Event()

    def __enter__(self) -> GpuUse:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Ask until the block has ended."""
        query = "--query-gpu=utilization.gpu,memory.used"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        while not self._over.wait(0.5):
            line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            use, memory = line.splitlines()[0].split(",")
            self.use.append(float(use))
            self.memory.append(float(memory))


def run(job: Job, peer: str, python: str) -> Row:
    """Run a job in a package's environment, and measure it."""
    command = [python, "-m", f"benchmarks.peers.{peer}_rounds", str(job)]
    own = {
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "PFL_PYTORCH_DEVICE": job.device,
    }
    gpu, memory = GpuUse(), Memory()
    began = time.perf_counter()
    with memory:
        if job.device == "cuda":
            with gpu:
                done = subprocess.run(command, env={**os.environ, **own}, capture_output=True)
        else:
            done = subprocess.run(command, env={**os.environ, **own}, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit status {done.returncode}"}
    found = json.loads(Path(job.out).read_text())
    rounds: list[float] = found["seconds"]
    later = fmean(rounds[1:]) if len(rounds) > 1 else None
    whole = time.perf_counter() - began
    return {
        "rounds done": len(rounds),
        "start s": whole - sum(rounds[1:]),
        "s a round": later,
        "updates/s": later and job.described.cohort / later,
        "GPU %": fmean(gpu.use) if gpu.use else None,
        "GPU MB": max(gpu.memory) - gpu.memory[0] if gpu.memory else None,
        "process MB": memory.largest / 1e6,
        "accuracy": found["accuracy"],
        "versions": found["versions"],
        "processor": found["gpu"] or processor(),
    }


def processor() -> str:
    """Name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def measured(job: Job, peer: str, pythons: Mapping[str, str]) -> Row:
    """Make a package's environment and run the job there; a failure's last line is its result."""
    requirement = REQUIREMENTS[peer]
    try:
        python = pythons.get(peer) or (
            environment(BUILD / peer, requirement) if requirement else sys.executable
        )
    except subprocess.CalledProcessError as error:
        found = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR: ")]
        reason = found[-1].removeprefix("ERROR: ")[:200] if found else str(error)
        where = f"Python {platform.python_version()}"
        return {"failed": f"{requirement} cannot be installed for {where}: {reason}"}
    return run(job, peer, python)


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, a table for each task, device and size."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = ("task", "share", "device", "workers", "data", "processor")
        groups.setdefault(tuple(row.get(name) for name in key[:5]), []).append(row)
    text = []
    for group in groups.values():
        first = group[0]
        task = TASKS[first["task"]].scaled(first["share"])
        places = sorted({row["processor"] for row in group if "processor" in row})
        days = sorted({row["date"] for row in group})
        loads = [row["load"] for row in group]
        text += [
            f"## {first['task']} on {first['device']}, {first['data']} examples",
            "",
            f"{task.about[0].upper()}{task.about[1:]}: {task.clients:,} clients of "
            f"{task.examples:,} examples, {task.cohort} a round, batches of {task.batch}, rate "
            f"{task.lr:g}. {'; '.join(places) or 'nothing ran'}; {', '.join(days)}; load "
            f"{min(loads):.1f} to {max(loads):.1f} as rows began; workers {first['workers']}.",
            "",
            f"| {' | '.join(HEAD)} |",
            f"|{' --- |' * len(HEAD)}",
            *map(line, group),
            "",
        ]
    return "\n".join(text)


def line(row: Row) -> str:
    """A row's line; cells that do not apply are empty."""
    if "failed" in row:
        return f"| {row['peer']} | not run: {row['failed'].replace('|', '/')} |" + " |" * (
            len(HEAD) - 2
        )
    done = f"{row['rounds done']:,} of {row['rounds']:,}"
    figures = [row[name] for name in HEAD[2:8]]
    shown = ["" if value is None else f"{value:.3g}" for value in figures[:2]]
    shown += ["" if value is None else f"{value:,.0f}" for value in figures[2:]]
    cells = [row["peer"], done, *shown, f"{row['accuracy']:.3f}", row["versions"]]
    return f"| {' | '.join(cells)} |"


def read(path: Path) -> list[Row]:
    """Rows so far; the last one of the same settings counts."""
    found = path.read_text().splitlines() if path.exists() else []
    rows = (json.loads(one) for one in found)
    return list({tuple(row[name] for name in KEY): row for row in rows}.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    peers = list(REQUIREMENTS)
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=0, help="instead of the task's own")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="a run ends with the round after these"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the clients and the cohort")
    parser.add_argument("--workers", type=int, default=1, help="processes or threads, on a CPU")
    parser.add_argument("--data", type=Path, help="folder of the real data's arrays")
    parser.add_argument("--rows", type=Path, default=BUILD / "rows.jsonl")
    parser.add_argument("--write", type=Path, help="write the table of all rows to this file")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="PEER=PATH",
        help="interpreters that have a package already, such as blazefl=python3.14t",
    )
    given = parser.parse_args()
    pythons = {peer: path for peer, _, path in (one.partition("=") for one in given.python)}
    if not (pythons.keys() <= set(peers) and all(map(shutil.which, pythons.values()))):
        parser.error(f"--python must be PEER=PATH with an interpreter, of {', '.join(peers)}.")
    for name in given.tasks:
        for peer in given.peers:
            add_row(given, name, peer, pythons)
    rows = read(given.rows)
    if given.write:
        given.write.write_text(table(rows))
    print(table(rows))


def add_row(given: argparse.Namespace, name: str, peer: str, pythons: Mapping[str, str]) -> None:
    """Run one package on one task and add its row, unless it is there; failures are repeated."""
    rounds = given.rounds or TASKS[name].rounds
    real = bool(given.data and TASKS[name].source)
    values = (
        name,
        given.share,
        peer,
        given.device,
        rounds,
        given.seconds,
        given.workers,
        "real" if real else "synthetic",
    )
    row: Row = dict(zip(KEY, values, strict=True))
    finished = [one for one in read(given.rows) if "failed" not in one]
    if any(all(one[key] == row[key] for key in KEY) for one in finished):
        return
    row |= {"date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0]}
    data = write(TASKS[name].scaled(given.share), BUILD / "data", given.data)
    with tempfile.TemporaryDirectory() as place:
        job = Job(
            task=name,
            share=given.share,
            rounds=rounds,
            seconds=given.seconds,
            device=given.device,
            workers=given.workers,
            data=str(data.absolute()),
            out=str(Path(place) / "result.json"),
        )
        row |= measured(job, peer, pythons)
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    with given.rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(line(row), flush=True)


if __name__ == "__main__":
    main()
