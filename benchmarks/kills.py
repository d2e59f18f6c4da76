"""Runs that die at fifty instants, are resumed, and held against one that did not.

    python -m benchmarks.kills [--out benchmarks/results/kills.txt]

Each run is a fork of this process, so that a kill costs no imports. Killed are: the local engine at
random instants and before random steps that touch the disk; in the middle of a checkpoint, of a
ledger's line and of a metrics row; on a full disk; by SIGTERM; a run on Ray. Two more lose a
worker of Ray's, which they outlive.
What a resume leads to must be the reference's parameters, rows and charges, and equal heads of
ledgers but where a line was torn.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger, durable
from fedsim.runs import artefacts, checkpoint
from fedsim.runs.artefacts import RunDirectory

CONFIG = RunConfig.parse(
    {
        "rounds": 12,
        "partition": {"clients": 30, "max-examples": 600},
        "client": {"name": "adadp-lr", "state": "client", "batch-size": 5},
        "cohort": {"name": "poisson", "rate": 0.5},
        "mechanism": {"name": "quantile-clipping", "bit-noise": 0.5},
        "noise": {"multiplier": 1.0},
        "server": {"momentum": 0.9},
        "evaluate": {"every": 5},
        "checkpoint": {"every": 2},
        "engine": {"device": "cpu"},
    }
)

Before = Callable[[random.Random, float], object]
"""Prepares the death of the process that calls it, in a run of so many seconds."""


def run(directory: Path, engine: str = "local") -> None:
    config = CONFIG.replace(**{"engine.name": engine})
    if engine == "ray":
        config = config.replace(**{"engine.workers": 2})
    fedsim.run(config, out=directory, resume=True)


def forked(do: Callable[[], object]) -> int:
    """Status of a child that does this and nothing else, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        status = 1
        try:
            do()
            status = 0
        except (OSError, FedsimError) as error:
            print(f"    {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_in(seconds: float, number: int = signal.SIGKILL) -> None:
    """Let this process be sent a signal after a while."""
    target = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(target, number)
        os._exit(0)


def at_an_instant(chosen: random.Random, seconds: float, number: int = signal.SIGKILL) -> None:
    """Some instant of some round but the last two: before the run's end, however fast it goes."""
    left, delay = chosen.randrange(CONFIG.rounds - 2), chosen.uniform(0, seconds / CONFIG.rounds)
    start_metrics, add_row = RunDirectory.start_metrics, RunDirectory.add_row

    def started(directory: RunDirectory, *arguments: Any) -> None:
        start_metrics(directory, *arguments)
        count()

    def added(directory: RunDirectory, *arguments: Any) -> None:
        add_row(directory, *arguments)
        count()

    def count() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            kill_in(delay, number)

    RunDirectory.start_metrics = started  # type: ignore[method-assign, assignment]
    RunDirectory.add_row = added  # type: ignore[method-assign, assignment]


def by_sigterm(chosen: random.Random, seconds: float) -> None:
    at_an_instant(chosen, seconds, signal.SIGTERM)


def before_a_step(chosen: random.Random, seconds: float) -> None:
    left = chosen.randrange(120)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for owner, name in (
        (os, "fsync"), (os, "replace"), (os, "link"), (Path, "rename"), (Path, "unlink"),
        (Path, "mkdir"), (shutil, "rmtree"), (RunDirectory, "add_row"),
    ):  # fmt: skip
        setattr(owner, name, counted(getattr(owner, name)))


def in_a_checkpoint(chosen: random.Random, seconds: float) -> None:
    left, written = chosen.randrange(1, 6), checkpoint._write_synced

    def torn(path: Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            path.write_bytes(content[: chosen.randrange(len(content))])
            os.kill(os.getpid(), signal.SIGKILL)
        written(path, content)

    checkpoint._write_synced = torn


def in_a_ledgers_line(chosen: random.Random, seconds: float) -> None:
    left, append = chosen.randrange(1, 11), durable.append

    def torn(file: Any, data: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            file.seek(0, os.SEEK_END)
            file.write(data[: chosen.randrange(1, len(data))])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        append(file, data)

    durable.append = torn


def in_a_row(chosen: random.Random, seconds: float) -> None:
    left, csv_line = chosen.randrange(3, 13), artefacts._csv_line

    def torn(values: Any) -> bytes:
        nonlocal left
        left -= 1
        line = csv_line(values)
        if left:
            return line
        kill_in(0.02)
        return line[: len(line) // 2]

    artefacts._csv_line = torn


def on_a_full_disk(chosen: random.Random, seconds: float) -> None:
    size = chosen.choice([1000, 3000, 3500, 5000, 6000])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def of_ray(chosen: random.Random, seconds: float) -> None:
    kill_in(chosen.uniform(3, 12))


def of_a_ray_worker(chosen: random.Random, seconds: float) -> None:
    from fedsim.engines.ray import RayGrid

    blocks, left = RayGrid._blocks, chosen.randrange(1, 10)

    def losing(self: Any, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            import ray

            ray.kill(self._workers[0].actor)
        return blocks(self, *arguments)

    RayGrid._blocks = losing  # type: ignore[method-assign, assignment]


DEATHS: list[tuple[str, Before, str, int]] = [
    ("SIGKILL at a random instant", at_an_instant, "local", 16),
    ("SIGKILL before a step to the disk", before_a_step, "local", 10),
    ("in the middle of a checkpoint", in_a_checkpoint, "local", 5),
    ("in the middle of a ledger's line", in_a_ledgers_line, "local", 5),
    ("in the middle of a metrics row", in_a_row, "local", 4),
    ("no file may grow: a full disk", on_a_full_disk, "local", 4),
    ("SIGTERM at a random instant", by_sigterm, "local", 4),
    ("SIGKILL of a run on Ray", of_ray, "ray", 2),
    ("a Ray worker lost", of_a_ray_worker, "ray", 2),
]


def reached(directory: Path) -> dict[str, Any]:
    ledger = Ledger.read(RunDirectory(directory).ledger, delta=1e-5)
    operators = ("seconds", "clients-per-second", "epsilon")
    rows = RunDirectory(directory).rows()
    return {
        "model": {
            name: tensor.numpy().tobytes()
            for name, tensor in load_file(RunDirectory(directory).model).items()
        },
        "rows": [{k: v for k, v in row.items() if k not in operators} for row in rows],
        "charged": [(entry.round, entry.event) for entry in ledger.charged],
        "last epsilon": rows[-1]["epsilon"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    lines = [f"{'death':36} {'runs':>5} {'died':>5} {'same':>5} {'equal heads':>12}"]
    with tempfile.TemporaryDirectory(prefix="fedsim-kills-") as temporary:
        root = Path(temporary)
        forked(lambda: run(root / "warm"))
        started = time.perf_counter()
        forked(lambda: run(root / "reference"))
        seconds = time.perf_counter() - started
        expected = reached(root / "reference")
        heads = Ledger.read(root / "reference" / "ledger.jsonl").heads
        everything: Counter[str] = Counter()
        for name, prepare, engine, count in DEATHS:
            seen: Counter[str] = Counter()
            for number in range(count):
                directory = root / f"{prepare.__name__}-{number}"

                seen["runs"] += 1
                chosen = random.Random(f"{arguments.seed} {name} {number}")
                seen["died"] += (
                    forked(partial(_die, prepare, chosen, seconds, directory, engine)) != 0
                )
                status = forked(partial(run, directory))
                seen["same"] += status == 0 and reached(directory) == expected
                seen["heads"] += Ledger.read(directory / "ledger.jsonl").heads == heads
            everything += seen
            lines.append(_line(name, seen))
            print(lines[-1], flush=True)
    lines.append(_line("all", everything))
    text = "\n".join([f"A run of 12 rounds, {seconds:.1f} s; seed {arguments.seed}.", "", *lines])
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


def _die(
    prepare: Before, chosen: random.Random, seconds: float, directory: Path, engine: str
) -> None:
    prepare(chosen, seconds)
    run(directory, engine)


def _line(name: str, seen: Counter[str]) -> str:
    return f"{name:36} {seen['runs']:5} {seen['died']:5} {seen['same']:5} {seen['heads']:12}"


if __name__ == "__main__":
    main()
