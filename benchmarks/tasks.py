"""Results and cost of the examples' tasks on each engine and level.

Makes the table of benchmarks/results/tasks.md.

    python -m benchmarks.tasks                              # all of them, and a new table
    python -m benchmarks.tasks --tasks tabular --engines local ray

Each cell is one command, in a copy of the example's folder with few examples and clients, as the
table states. Runs have a few rounds, the same on all engines. CPU seconds are those of the command
and of every process that it starts, including start-up.
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
PAGE = ROOT / "benchmarks" / "results" / "tasks.md"
BEGIN, END = "<!-- made by python -m benchmarks.tasks -->\n", "<!-- end -->\n"
ENGINES = ("local", "ray", "simulation", "deployment")
# A deployment draws from system entropy by default; here all engines must give the same bytes.
COMMON = ["noise.entropy=config", "engine.device=cpu"]
SETTINGS = {"ray": ["engine.workers=2", "engine.cpus-per-worker=0.1"]}
# mechanism.weighting is unset first: it is a setting of mechanism "none" only.
CLIENT = [
    "mechanism.weighting=",
    "mechanism.name=clipping",
    "mechanism.clip-norm=0.5",
    "noise.multiplier=0.3",
]
EXAMPLE = ["client.mechanism.name=clipping", "client.noise.multiplier=0.7"]
# The table shows metrics of clients' own test examples, which no noise protects.
SHOWN = ["evaluate.unprotected=true"]


@dataclass(frozen=True)
class Row:
    """A run of the table.

    Attributes
    ----------
    task, config : str
        The example's folder, and a config in it.
    method : str
        Name of the method in the table.
    level : str
        Level of privacy: none, client or example.
    clients, rounds : int
    column : str
        Column of metrics.csv that is shown.
    settings : tuple of str
        Settings in addition to the config's.
    """

    task: str
    config: str
    method: str
    level: str
    clients: int
    rounds: int
    column: str
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the row in the table."""
        return self.task if self.method == "run" else f"{self.task}: {self.method}"

    @property
    def all_settings(self) -> list[str]:
        """All settings in addition to the config's."""
        return [f"rounds={self.rounds}", f"partition.clients={self.clients}", *self.settings]


ADDED = {"none": [], "client": [*CLIENT, *SHOWN], "example": [*EXAMPLE, *SHOWN]}


def _levels(
    task: str,
    config: str,
    column: str,
    *settings: str,
    clients: int,
    rounds: int,
    levels: str = "none client example",
    method: str = "",
) -> Iterator[Row]:
    for level in levels.split():
        changes = (*settings, *ADDED[level])
        yield Row(task, config, method or config, level, clients, rounds, column, changes)


SMALL: dict[str, dict[str, object]] = {
    "tabular": {"SHARES": (0.5, 0.3, 0.2)},
    "personal": {"WRITERS": 4},
    "text": {"MODULES": ["argparse", "calendar", "csv"], "MOST": 12, "LENGTH": 8},
    "pfl": {"MODULES": ["argparse", "calendar", "enum"], "USERS": 1, "MOST": 4, "IMAGES": 200},
}
"""Constants of a task's make_data.py that are replaced, to make its data smaller."""
FIRST = {"adapter": "transformer"}
"""The run whose model another run starts from, by the latter's config."""
IMAGES = ("data.name=made-up.npz", "cohort.size=2")
FEDREP = ("client.name=fedrep", "client.head-steps=8", "client.head-lr=0.3")
ROWS = [
    *_levels("tabular", "run", "test-auc", clients=3, rounds=5),
    *_levels("regression", "run", "test-r2", clients=5, rounds=5),
    *_levels("labels", "run", "test-f1", clients=5, rounds=5),
    *_levels("personal", "fedavg", "clients-accuracy", clients=4, rounds=5),
    *_levels("personal", "fedper", "clients-accuracy", clients=4, rounds=5),
    *_levels("personal", "fedper", "clients-accuracy", *FEDREP, clients=4, rounds=5,
             levels="none client", method="fedrep"),
    *_levels("personal", "fedbn", "clients-accuracy", clients=4, rounds=5, levels="none client"),
    *_levels("personal", "ditto", "clients-accuracy", clients=4, rounds=5, levels="none client"),
    *_levels("drift", "fedavg", "test-accuracy", clients=10, rounds=5, levels="none"),
    *_levels("drift", "fedavg", "test-accuracy", "cohort.size=2", clients=3, rounds=5,
             levels="client example"),
    *_levels("drift", "scaffold", "test-accuracy", clients=10, rounds=5, levels="none"),
    *_levels("drift", "fednova", "test-accuracy", clients=10, rounds=5, levels="none"),
    *_levels("text", "lstm", "test-perplexity", clients=3, rounds=3),
    *_levels("text", "transformer", "test-perplexity", clients=3, rounds=3),
    *_levels("text", "adapter", "test-perplexity", clients=3, rounds=3, levels="none client"),
    *_levels("resnet", "run", "test-accuracy", *IMAGES, "client.steps=2", "client.epochs=1",
             "data.normalize=false", "client.batch-size=2", clients=2, rounds=1,
             levels="none client"),
    *_levels("pfl", "cifar10", "test-accuracy", *IMAGES, clients=2, rounds=2,
             levels="none client"),
    *_levels("pfl", "words", "test-perplexity", clients=3, rounds=2, levels="none client"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tasks = list(dict.fromkeys(row.task for row in ROWS))
    parser.add_argument("--tasks", nargs="*", default=tasks, choices=tasks)
    parser.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES)
    methods = list(dict.fromkeys(row.method for row in ROWS))
    parser.add_argument("--methods", nargs="*", default=methods, choices=methods)
    levels = ["none", "client", "example"]
    parser.add_argument("--levels", nargs="*", default=levels, choices=levels)
    options = parser.parse_args()
    # Processes that a command leaves running become children of this one, to be waited for and
    # counted.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    cells = json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / task
            shutil.copytree(ROOT / "examples" / task, folder)
            _make_data(folder, SMALL.get(task, {}))
            for row in ROWS:
                asked = row.level in options.levels and row.method in options.methods
                if row.task != task or not asked:
                    continue
                if row.config in FIRST:
                    _run_first(task, FIRST[row.config], folder)
                for engine in options.engines:
                    cell = measure(row, engine, folder)
                    cells[_key(row, engine)] = cell
                    print(row.name, row.level, engine, cell, flush=True)
                    _keep(cells)
    PAGE.write_text(page())


def _key(row: Row, engine: str) -> str:
    return f"{row.task}: {row.method}: {row.level}: {engine}"


def _run_first(task: str, config: str, folder: Path) -> None:
    """Run a config whose model another one starts from, unless that was done."""
    row = next(r for r in ROWS if (r.task, r.config, r.level) == (task, config, "none"))
    out = folder / "runs" / f"{task}-{config}"
    if not out.exists():
        subprocess.run(
            _command(row, "local", out),
            cwd=folder,
            env=_environment(),
            check=True,
            capture_output=True,
        )


def _command(row: Row, engine: str, out: Path) -> list[str]:
    command = [sys.executable, "-m", "fedsim", "run", f"{row.config}.toml", "--out", str(out)]
    settings = [*COMMON, *SETTINGS.get(engine, []), *row.all_settings]
    for setting in (f"engine.name={engine}", *settings):
        command += ["--set", setting]
    return command


def _environment() -> dict[str, str]:
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def measure(row: Row, engine: str, folder: Path) -> dict[str, object]:
    """Result and cost of a command, or the sentence with which it refuses."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    ended = subprocess.run(
        _command(row, engine, out),
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
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


def _make_data(folder: Path, small: dict[str, object]) -> None:
    if not (folder / "make_data.py").exists():
        return
    code = (
        "import runpy, sys; made = runpy.run_path('make_data.py'); "
        f"made['main'].__globals__.update({small!r}); made['main']()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)


def _wait_for_all(seconds: float = 30.0) -> None:
    """Wait until no process is left that the command started."""
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
    """The page, with the table made from the stored results."""
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
        "| task | level | clients x rounds | epsilon | measured | reached | model | "
        + " | ".join(f"{engine}, CPU s" for engine in ENGINES)
        + " |"
    )
    yield "| --- " * (7 + len(ENGINES)) + "|"
    for row in ROWS:
        by_engine = {engine: cells.get(_key(row, engine)) for engine in ENGINES}
        told = [cell for cell in by_engine.values() if cell is not None and "reached" in cell]
        if not told:
            continue
        size = f"{row.clients} x {row.rounds}"
        epsilon = f"{told[0]['epsilon']:.3g}" if row.level != "none" else ""
        reached, model = f"{told[0]['reached']:.4g}", f"`{str(told[0]['model'])[:8]}`"
        shown = [row.name, row.level, size, epsilon, row.column, reached, model]
        costs = [_cost(cell, told[0]) for cell in by_engine.values()]
        yield f"| {' | '.join([*shown, *costs])} |"


def _cost(cell: dict[str, object] | None, first: dict[str, object]) -> str:
    if cell is None:
        return "-"
    if "refused" in cell:
        return "refused"
    same = all(cell[key] == first[key] for key in ("reached", "epsilon", "model"))
    return f"{cell['cpu']}" if same else f"{cell['cpu']} (another model: {cell['reached']:.4g})"


if __name__ == "__main__":
    main()
