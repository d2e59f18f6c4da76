"""Ways in which a run can die, as functions that prepare the death of the calling process."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.privacy import durable
from fedsim.runs import checkpoints, metrics
from fedsim.runs.metrics import MetricsFile

ROUNDS = 12

Before = Callable[[random.Random, float], object]
"""Prepares the death of the calling process, given random numbers and the run's usual seconds."""


def after(seconds: float, do: Callable[[], object]) -> None:
    """Let a forked process call ``do`` after some seconds."""
    if os.fork() == 0:
        # The child must not keep the run's files open: its lock would outlive the run.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        time.sleep(seconds)
        with suppress(OSError):
            do()
        os._exit(0)


def kill_in(seconds: float, number: int = signal.SIGKILL) -> None:
    """Send this process a signal after some seconds."""
    after(seconds, partial(os.kill, os.getpid(), number))


def at_an_instant(
    chosen: random.Random, seconds: float, happens: Callable[[float], object] = kill_in
) -> None:
    """Let it happen at a random instant of a random round, except the last two.

    Rounds are counted by rows of metrics, so that it happens before the run's end however fast
    the run is.
    """
    left, delay = chosen.randrange(ROUNDS - 2), chosen.uniform(0, seconds / ROUNDS)
    start, append = MetricsFile.start, MetricsFile.append

    def started(file: MetricsFile, *arguments: Any) -> None:
        start(file, *arguments)
        count()

    def added(file: MetricsFile, *arguments: Any) -> None:
        append(file, *arguments)
        count()

    def count() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            happens(delay)

    MetricsFile.start = started  # type: ignore[method-assign, assignment]
    MetricsFile.append = added  # type: ignore[method-assign, assignment]


def by_sigterm(chosen: random.Random, seconds: float) -> None:
    at_an_instant(chosen, seconds, partial(kill_in, number=signal.SIGTERM))


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
        (Path, "mkdir"), (shutil, "rmtree"), (MetricsFile, "append"),
    ):  # fmt: skip
        setattr(owner, name, counted(getattr(owner, name)))


def dying_in(
    call: int, write: Callable[..., None], tear: Callable[..., object]
) -> Callable[..., None]:
    """A replacement of ``write`` that in its n-th call (n is ``call``) tears the write and dies."""

    def writing(*arguments: Any) -> None:
        nonlocal call
        call -= 1
        if not call:
            tear(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)

    return writing


def in_a_checkpoint(chosen: random.Random, seconds: float) -> None:
    def tear(path: Path, content: bytes) -> None:
        path.write_bytes(content[: chosen.randrange(len(content))])

    checkpoints._write_synced = dying_in(chosen.randrange(1, 6), checkpoints._write_synced, tear)


def in_a_ledgers_line(chosen: random.Random, seconds: float) -> None:
    def tear(file: Any, line: bytes) -> None:
        file.seek(0, os.SEEK_END)
        file.write(line[: chosen.randrange(1, len(line))])
        file.flush()

    durable.append = dying_in(chosen.randrange(1, 11), durable.append, tear)


def in_a_row(chosen: random.Random, seconds: float) -> None:
    left, csv_line = chosen.randrange(3, 13), metrics._csv_line

    def torn(values: Any) -> bytes:
        nonlocal left
        left -= 1
        line = csv_line(values)
        if left:
            return line
        kill_in(0.02)  # from another process, once half of the line has been written
        return line[: len(line) // 2]

    metrics._csv_line = torn


def of_a_file_that_cannot_grow(chosen: random.Random, seconds: float) -> None:
    size = chosen.choice([1000, 3000, 3500, 5000, 6000])
    # With the signal ignored, a write beyond the limit fails with EFBIG instead.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def of_a_full_disk(chosen: random.Random, seconds: float) -> None:
    """Nothing to prepare: `SMALL_DISK` has mounted a disk that is too small."""


def of_a_read_only_disk(chosen: random.Random, seconds: float) -> None:
    """Trigger a file system error, on which the kernel makes the disk read-only at once."""
    broken = Path(f"/sys/fs/ext4/{DISK['device']}/trigger_fs_error")
    at_an_instant(chosen, seconds, partial(after, do=partial(broken.write_text, "1")))


def of_a_worker(chosen: random.Random, seconds: float) -> None:
    def killed(delay: float) -> None:
        parent = os.getpid()
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if children:
            after(delay, partial(os.kill, int(chosen.choice(children)), signal.SIGKILL))

    at_an_instant(chosen, seconds, killed)


def while_ray_starts(chosen: random.Random, seconds: float) -> None:
    kill_in(chosen.uniform(1, 6))


def of_a_ray_worker(chosen: random.Random, seconds: float) -> None:
    from fedsim.federation.engines.ray import RayGrid

    blocks, left = RayGrid._blocks, chosen.randrange(1, 10)

    def losing(self: Any, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            import ray

            ray.kill(self._pool.workers[0].actor)
        return blocks(self, *arguments)

    RayGrid._blocks = losing  # type: ignore[method-assign, assignment]


class Disk(NamedTuple):
    """How to mount a disk that will fail, and how to mend it."""

    mount: Callable[[random.Random, Path], None]
    mend: Callable[[Path], None]


DISK: dict[str, str] = {}
"""The mounted disk: its image file, and the name of its block device."""


def _call(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _mount_small(chosen: random.Random, place: Path) -> None:
    size = chosen.choice([16, 24, 32, 48, 64])
    _call("mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", place)


def _mend_small(place: Path) -> None:
    _call("mount", "-o", "remount,size=64m", place)


def _mount_fragile(chosen: random.Random, place: Path) -> None:
    image = place.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(32 << 20)
    _call("mkfs.ext4", "-q", image)
    _mount_image(image, place)


def _mount_image(image: Path, place: Path) -> None:
    _call("mount", "-o", "loop,errors=remount-ro", image, place)
    device = _call("findmnt", "-n", "-o", "SOURCE", place).strip()
    DISK.update(image=str(image), device=Path(device).name)


def _mend_fragile(place: Path) -> None:
    _call("umount", place)
    # Not checked: e2fsck returns 1 if it corrected errors.
    subprocess.run(["e2fsck", "-fy", DISK["image"]], capture_output=True, check=False)
    _mount_image(Path(DISK["image"]), place)


SMALL_DISK = Disk(_mount_small, _mend_small)
FRAGILE_DISK = Disk(_mount_fragile, _mend_fragile)


class Death(NamedTuple):
    """A way to die, the job of `benchmarks.kills.JOBS` that dies, how often, and on which disk."""

    name: str
    before: Before
    job: str
    times: int
    disk: Disk | None = None


DEATHS = [
    Death("SIGKILL at a random instant", at_an_instant, "rates", 10),
    Death("  clients protect their examples", at_an_instant, "examples", 4),
    Death("  SCAFFOLD", at_an_instant, "scaffold", 4),
    Death("  personal heads", at_an_instant, "heads", 4),
    Death("  on two workers", at_an_instant, "workers", 4),
    Death("  a sweep of four", at_an_instant, "sweep", 4),
    Death("SIGKILL before a step to the disk", before_a_step, "rates", 10),
    Death("  clients protect their examples", before_a_step, "examples", 4),
    Death("  a sweep of four", before_a_step, "sweep", 4),
    Death("in the middle of a checkpoint", in_a_checkpoint, "rates", 5),
    Death("in the middle of a ledger's line", in_a_ledgers_line, "rates", 5),
    Death("in the middle of a metrics row", in_a_row, "rates", 4),
    Death("no file may grow", of_a_file_that_cannot_grow, "rates", 4),
    Death("a full disk", of_a_full_disk, "rates", 4, SMALL_DISK),
    Death("a disk becomes read-only", of_a_read_only_disk, "rates", 4, FRAGILE_DISK),
    Death("SIGTERM at a random instant", by_sigterm, "rates", 4),
    Death("  SIGTERM on two workers", by_sigterm, "workers", 2),
    Death("  SIGTERM of a sweep of four", by_sigterm, "sweep", 2),
    Death("SIGKILL of a run on Ray", at_an_instant, "ray", 10),
    Death("SIGKILL while Ray starts", while_ray_starts, "ray", 2),
    Death("one of two workers is killed", of_a_worker, "workers", 4),
    Death("one of two Ray workers is killed", of_a_ray_worker, "ray", 2),
]
