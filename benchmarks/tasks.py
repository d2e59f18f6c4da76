"""What the examples' tasks reach and cost on each engine and level: the table of docs/tasks.md.

    python -m benchmarks.tasks                              # all of them, and the table anew
    python -m benchmarks.tasks --tasks tabular --engines local ray

Each cell is one command, in a copy of the example's folder with data as its tests make them. Runs
are a few rounds long, the same on all engines. CPU seconds are of the command and of every process
that it starts, with starting up.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results") / "tasks.json"
PAGE = ROOT / "docs" / "tasks.md"
BEGIN, END = "<!-- made by python -m benchmarks.tasks -->\n", "<!-- end -->\n"
ENGINES = ("local", "ray", "simulation", "deployment")
SETTINGS = {
    "local": [],
    "ray": ["engine.workers=2", "engine.cpus-per-worker=0.1"],
    "simulation": [],
    "deployment": [],
}
CLIENT = ["mechanism.name=clipping", "mechanism.clip-norm=0.5", "noise.multiplier=0.3"]
EXAMPLE = ["client.mechanism.name=clipping", "client.noise.multiplier=0.7"]
# Metrics of clients' own test examples are shown here, and no noise protects those.
SHOWN = ["evaluate.unprotected=true"]


@dataclass(frozen=True)
class Row:
    """A run of the table.

    Attributes
    ----------
    task, config : str
        The example's folder, and a file in it.
    level : str
    settings : tuple of str
        Beside those of the config.
    column : str
        Of metrics.csv, which is shown.
    """

    task: str
    config: str
    level: str
    settings: tuple[str, ...]
    column: str
    small: dict[str, int] | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.task}: {self.config}"


def _levels(
    task: str,
    config: str,
    column: str,
    *settings: str,
    small: dict[str, int] | None = None,
    levels: str = "none client example",
) -> Iterator[Row]:
    added = {"none": [], "client": [*CLIENT, *SHOWN], "example": [*EXAMPLE, *SHOWN]}
    for level in levels.split():
        yield Row(task, config, level, (*settings, *added[level]), column, small)


TEXT = {"MOST": 12, "LENGTH": 8}
PFL = {"MOST": 4, "IMAGES": 200}
IMAGES = ("data.name=made-up.npz", "client.steps=2", "client.epochs=1", "partition.clients=4")
ROWS = [
    *_levels("tabular", "run", "test-auc", "rounds=5"),
    *_levels("regression", "run", "test-r2", "rounds=5", "partition.clients=5"),
    *_levels("labels", "run", "test-f1", "rounds=5", "partition.clients=5"),
    *_levels("personal", "fedavg", "clients-accuracy", "rounds=5"),
    *_levels("personal", "fedper", "clients-accuracy", "rounds=5"),
    *_levels("personal", "fedbn", "clients-accuracy", "rounds=5", levels="none client"),
    *_levels("personal", "ditto", "clients-accuracy", "rounds=5", levels="none client"),
    *_levels("drift", "fedavg", "test-accuracy", "rounds=5"),
    *_levels("drift", "scaffold", "test-accuracy", "rounds=5", levels="none"),
    *_levels("drift", "fednova", "test-accuracy", "rounds=5", levels="none"),
    *_levels("text", "lstm", "test-perplexity", "rounds=3", small=TEXT),
    *_levels("text", "transformer", "test-perplexity", "rounds=3", small=TEXT),
    *_levels(
        "resnet", "run", "test-accuracy", "rounds=1", *IMAGES, "cohort.size=2",
        "data.normalize=false", "client.batch-size=2", levels="none client",
    ),
    *_levels("pfl", "cifar10", "test-accuracy", "rounds=2", *IMAGES, "cohort.size=2", small=PFL,
             levels="none"),
    *_levels("pfl", "words", "test-perplexity", "rounds=2", small=PFL, levels="none client"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tasks = list(dict.fromkeys(row.task for row in ROWS))
    parser.add_argument("--tasks", nargs="*", default=tasks, choices=tasks)
    parser.add_argument("--engines", nargs="*", default=ENGINES[:3], choices=ENGINES)
    levels = ["none", "client", "example"]
    parser.add_argument("--levels", nargs="*", default=levels, choices=levels)
    options = parser.parse_args()
    # What a command leaves running when it ends is ours to wait for, and to count.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    cells = json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / task
            shutil.copytree(ROOT / "examples" / task, folder)
            _make_data(folder, next(row.small or {} for row in ROWS if row.task == task))
            for row in (r for r in ROWS if r.task == task and r.level in options.levels):
                for engine in options.engines:
                    cell = measure(row, engine, folder)
                    cells[f"{row.name}: {row.level}: {engine}"] = cell
                    print(row.name, row.level, engine, cell, flush=True)
                    _keep(cells)
    PAGE.write_text(page())


def measure(row: Row, engine: str, folder: Path) -> dict[str, object]:
    """What a command reaches and costs, or the sentence with which it refuses."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "fedsim", "run", f"{row.config}.toml", "--out", str(out)]
    for setting in (f"engine.name={engine}", *SETTINGS[engine], *row.settings):
        command += ["--set", setting]
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    _wait_for_all()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if ended.returncode:
        return {"refused": ended.stderr.strip().splitlines()[-1]}
    with (out / "metrics.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    model = (out / "model.safetensors").read_bytes()
    return {
        "reached": float(last[row.column]),
        "epsilon": float(last.get("epsilon") or last.get("example-epsilon") or "inf"),
        "cpu": round(cpu, 1),
        "model": hashlib.sha256(model).hexdigest()[:16],
    }


def _make_data(folder: Path, small: dict[str, int]) -> None:
    if not (folder / "make_data.py").exists():
        return
    code = (
        "import runpy, sys; made = runpy.run_path('make_data.py'); "
        f"made['main'].__globals__.update({small!r}); made['main']()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)


def _wait_for_all(seconds: float = 30.0) -> None:
    """Until no process is left that the command has started."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)
        except ChildProcessError:
            return


def _keep(cells: dict[str, object]) -> None:
    told = {"machine": platform.processor() or platform.machine(), "cells": cells}
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")


def page() -> str:
    """docs/tasks.md with the table as the results say it."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return (
        before
        + BEGIN
        + "\n".join(_table(json.loads(RESULTS.read_text())["cells"]))
        + "\n"
        + END
        + after
    )


def _table(cells: dict[str, dict[str, object]]) -> Iterator[str]:
    yield (
        "| task | level | epsilon | measured | reached | "
        + " | ".join(f"{engine}, CPU s" for engine in ENGINES)
        + " |"
    )
    yield "| --- " * (5 + len(ENGINES)) + "|"
    for row in ROWS:
        by_engine = {e: cells.get(f"{row.name}: {row.level}: {e}") for e in ENGINES}
        told = [cell for cell in by_engine.values() if cell is not None and "reached" in cell]
        if not told:
            continue
        costs = [_cost(cell, told[0]) for cell in by_engine.values()]
        epsilon = f"{told[0]['epsilon']:.3g}" if row.level != "none" else ""
        reached = f"{told[0]['reached']:.4g}"
        yield " | ".join([f"| {row.name}", row.level, epsilon, row.column, reached, *costs]) + " |"


def _cost(cell: dict[str, object] | None, first: dict[str, object]) -> str:
    if cell is None:
        return "-"
    if "refused" in cell:
        return "refused"
    same = all(cell[key] == first[key] for key in ("reached", "epsilon", "model"))
    return f"{cell['cpu']}" if same else f"{cell['cpu']} (another model: {cell['reached']:.4g})"


if __name__ == "__main__":
    main()
