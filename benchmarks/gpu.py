"""Everything that waits for a GPU, in order, in pieces of at most ten minutes.

    python -m benchmarks.gpu --out gpu --data data           # again, until all have ended
    python -m benchmarks.gpu --out gpu --device cpu --tiny   # the same pieces on a CPU, to try them

The pieces: private steps beside Opacus, the tests of `make test-gpu`, ordinary models beside a
plain loop, the tables of peers, and Figs. 1a and 2a of `koskela-federated-full`. Each adds a row to
rows.jsonl in --out when it ends, and output.md there is made from the rows. Pieces that have ended,
well or not, are skipped; --again runs one again. A piece that is stopped by its time goes on with
the next call: peers after the rows that they have, an experiment after its finished runs and its
checkpoints. All of it is in --out, which may be carried from one machine to the next.

What of Flower, Ray, Opacus and pytest this interpreter lacks is installed into an environment of
its own in --out, which uses this one's torch. Without an index, pip takes wheels that were brought,
by PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels; where it can, it downloads them:

    pip download -d wheels "flwr[simulation]==1.39.0" opacus==1.6.0 pytest hypothesis pfl==0.6.0

What cannot be installed is said, and the pieces that do without it run. The experiment needs
CIFAR-10 in --data, and is done with three runs at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.environments import environment
from benchmarks.peers.__main__ import processor
from benchmarks.peers.tasks import TASKS

ROOT = Path(__file__).parents[1]
MOST = 600.0
"""Seconds of a piece, and of a call."""
GRACE = 20.0
"""Seconds that an interrupted piece has to end."""
SECONDS = {"cifar10": 120, "cifar10-dp": 60}
"""Seconds of each package's rounds, by task; 30 of the others."""
KEPT = 60
"""Lines of a piece's output in its row."""
PINNED = ("flwr", "ray", "opacus", "pytest", "hypothesis")
"""Packages in the versions of constraints.txt, which has no word on the torch of a GPU."""


@dataclass(frozen=True)
class Piece:
    """A command that ends, or goes on when it is called again.

    Attributes
    ----------
    name : str
    command : list of str
        Arguments of the interpreter.
    least : float
        Seconds without which it is not begun.
    """

    name: str
    command: list[str]
    least: float


def pieces(device: str, out: Path, data: Path, tiny: bool) -> list[Piece]:
    """All pieces, in order."""
    privacy = ["-m", "benchmarks.example_privacy", "--device", device]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    # A file without such tests may need a package that is not there.
    tests += ["--continue-on-collection-errors"]
    folders = ["tests/training/test_gpu.py"] if tiny else ["tests/training", "tests/integration"]
    models = ["-m", "benchmarks.ordinary_models", "--json", "--device", device]
    models += ["--models", "cnn-narrow", "--pairs", "2"] if tiny else ["--pairs", "7"]
    return [
        Piece("private steps", [*privacy, *(["--models", "mlp"] if tiny else [])], 60),
        *(Piece(f"tests: {folder}", [*tests, folder], 60) for folder in folders),
        *(
            Piece(f"ordinary models, batches of {batch}", [*models, "--batch", str(batch)], 60)
            for batch in ((10,) if tiny else (10, 64))
        ),
        *(peers(task, device, out, data, tiny) for task in (["cifar10"] if tiny else TASKS)),
        *figures(device, out, data, tiny),
    ]


def peers(task: str, device: str, out: Path, data: Path, tiny: bool) -> Piece:
    """One task's table."""
    command = ["-m", "benchmarks.peers", "--tasks", task, "--device", device]
    command += ["--rows", str(out / f"peers-{task}.jsonl")]
    if tiny:
        command += ["--peers", "fedsim", "--share", "0.01", "--rounds", "2"]
    else:
        command += ["--seconds", str(SECONDS.get(task, 30))]
    if not tiny and (data / f"{TASKS[task].source}.npz").exists():
        command += ["--data", str(data)]
    return Piece(f"peers: {task}", command, 180)


def figures(device: str, out: Path, data: Path, tiny: bool) -> list[Piece]:
    """Figs. 1a and 2a, one piece for each curve: 1a's first, which 2a shows too."""
    name = "plans-digits" if tiny else "koskela-federated-full"
    command = ["-m", "fedsim", "experiment", name, "--data", str(data)]
    command += ["--set", f"engine.device={device}", "--out", str(out / name)]
    if tiny:
        one = ["--again", "--only", "without noise seed=1", "--workers", "1"]
        return [Piece("one run of plans-digits", [*command, *one], 60)]
    found = []
    for rho in ("0.33", "0", "0.67", "1"):
        figure = "Figs. 1a and 2a" if rho == "0.33" else "Fig. 2a"
        # eta_0 of the mean gradient and of the sum; all of SGD's rates, of which the best counts.
        for curve_name in ("adadp full* rate=0.1", "adadp full* rate=1", "sgd rate=*"):
            only = ["--only", f"{curve_name} rho={rho} B=10 *", "--workers", "3"]
            title = f"{figure}, randomness {rho}: {curve_name}"
            found.append(Piece(title, [*command, *only], 240))
    return found


def missing() -> list[str]:
    """Requirements of the pieces that this interpreter does not meet at all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0]: line.partition(" ")[0] for line in lines}
    wanted = {re.split(r"[<>=]", line)[0]: line for line in project["dependencies"]}
    wanted |= {name: pins[name] for name in PINNED}
    return [line for name, line in wanted.items() if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def interpreter(out: Path) -> str:
    """This interpreter, or one of an environment that has what this one lacks."""
    if not (lacking := missing()):
        return sys.executable
    print(f"In {out / 'environment'}: {', '.join(lacking)}", flush=True)
    try:
        return environment(out / "environment", *lacking)
    except subprocess.CalledProcessError as error:
        print(f"{error.stderr or error}\nGoing on without them.", flush=True)
        return sys.executable


def run(piece: Piece, out: Path, seconds: float, python: str = sys.executable) -> dict[str, Any]:
    """Run a piece, interrupt it after some seconds, and describe what happened."""
    began = time.perf_counter()
    log = out / "log"
    own = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as lines:
        process = subprocess.Popen(
            [python, *piece.command],
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=lines,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            stop(process)
            state = "unfinished"
        except BaseException:
            stop(process)
            raise
        else:
            state = "failed" if process.returncode else "done"
    output = log.read_text(errors="replace").splitlines()[-KEPT:]
    return {
        "piece": piece.name,
        "state": state,
        "seconds": round(time.perf_counter() - began, 1),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "place": place(),
        "command": " ".join(piece.command),
        "output": output,
    }


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a piece as Ctrl-C does, and end all its processes if it does not end."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def place() -> str:
    """The GPU, as nvidia-smi describes it, or the processor; with Python's version."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        gpu = "no GPU"
    return f"{gpu}; {processor()}; Python {platform.python_version()}"


def read(rows: Path) -> dict[str, dict[str, Any]]:
    """The last row of each piece."""
    found = rows.read_text().splitlines() if rows.exists() else []
    return {row["piece"]: row for row in map(json.loads, found)}


def page(found: dict[str, dict[str, Any]]) -> str:
    """The rows in Markdown: a summary, and what each piece printed last."""
    text = ["| piece | state | seconds | date | machine |", f"|{' --- |' * 5}"]
    for row in found.values():
        cells = (row["piece"], row["state"], row["seconds"], row["date"], row["place"])
        text.append(f"| {' | '.join(map(str, cells))} |")
    for row in found.values():
        text += ["", f"## {row['piece']}", "", f"`python {row['command']}`", "", "```text"]
        text += [*row["output"], "```"]
    return "\n".join(text) + "\n"


def work(wanted: Sequence[Piece], out: Path, seconds: float, python: str = sys.executable) -> bool:
    """Run the pieces that have not ended, in order, for so many seconds; whether all have."""
    end, rows = time.perf_counter() + seconds, out / "rows.jsonl"
    for piece in wanted:
        if read(rows).get(piece.name, {}).get("state") in ("done", "failed"):
            continue
        left = min(MOST, end - time.perf_counter()) - GRACE
        if left < min(piece.least, MOST - GRACE):
            print(f"Next is {piece.name}; call this again.", flush=True)
            return False
        print(f"{piece.name}, for at most {left:.0f} s", flush=True)
        row = run(piece, out, left, python)
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        (out / "output.md").write_text(page(read(rows)))
        print("\n".join([*row["output"], f"{row['state']} after {row['seconds']:g} s"]), flush=True)
        if row["state"] == "unfinished":
            return False
    print("All pieces have ended.")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where data sets are kept")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=MOST - 10, help="of this call")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes")
    parser.add_argument("--again", nargs="+", default=[], metavar="PIECE", help="run these again")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    wanted = pieces(given.device, out, given.data.absolute(), given.tiny)
    unknown = set(given.again) - {piece.name for piece in wanted}
    if unknown:
        parser.error(
            f"{', '.join(sorted(unknown))}: no such piece; they are "
            f"{', '.join(piece.name for piece in wanted)}."
        )
    forget(out / "rows.jsonl", given.again)
    began = time.perf_counter()
    python = interpreter(out)
    work(wanted, out, given.seconds - (time.perf_counter() - began), python)


def forget(rows: Path, names: Sequence[str]) -> None:
    """Drop the rows of these pieces."""
    kept = [row for row in read(rows).values() if row["piece"] not in names]
    if names:
        rows.write_text("".join(json.dumps(row) + "\n" for row in kept))


if __name__ == "__main__":
    main()
