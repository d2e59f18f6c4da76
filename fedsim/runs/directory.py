"""A run's directory: what is in it, which run may write there, and what an overwritten run leaves.

::

    config.toml         complete and resolved: reproduces the run
    metrics.csv         a row a round
    ledger.jsonl        every private release; clients' own are in clients/
    fingerprint.key     the run's key, 0600, by which it recognises its sums and files
    data-split.json     who held which examples, where data= or partition= was given from Python
    named-files.json    where the files are that config.toml names by relative paths
    manifest.json       digests of the files when the run ended (see `Manifest`)
    ledger.sig          its signature, where there is a key for one
    model.safetensors   the model
    summary.json        figures that are computed once, at the end
    report.html         the report
    done                how the run has ended, once it has
    checkpoint/         the states from which it can be resumed (see `Checkpoints`)
    tensorboard/        event files, where `log.to` asks for them
    clients/            the state of clients on this machine
    archive/1/ ...      ledgers of the runs that were overwritten here, with their configs
    .fedsim-run         marks the directory as a run's (see `RunLock`)

A directory is claimed before anything is written to it, and by one run at a time. Files of other
names are never touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.config.run_config import read_config
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor
from fedsim.privacy.digest import KEY, Fingerprints
from fedsim.privacy.durable import archive, archived, replace
from fedsim.privacy.manifest import LEDGER_KEY, MANIFEST, Manifest, private_key, signature
from fedsim.privacy.verification import METADATA
from fedsim.runs.metrics import MetricsFile
from fedsim.runs.run_lock import RunLock, is_marked

Ended = Literal["finished", "budget", "stopped", "interrupted", "dropped", "failed"]
"""How a run has ended; 'dropped' is by a sweep's halving."""


class Ending(NamedTuple):
    """How a run has ended, and a sentence if that was early."""

    ended: Ended
    why: str = ""


DATA_SPLIT = "data-split.json"

NAMED_FILES = "named-files.json"

RUNS = "FEDSIM_RUNS"
"""Environment variable: the directory in which each run of a SuperLink gets one of its own."""

OUT = "FEDSIM_OUT"
"""Environment variable: the directory, claimed already, of the one run of a SuperLink."""


class RunDirectory:
    """The directory of one run.

    Parameters
    ----------
    path : path
        Need not exist; nothing is written before `claim`. Not the empty string, which `Path` would
        take for the current directory.

    Attributes
    ----------
    metrics_file : MetricsFile
        What reads and writes ``metrics``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise FedsimError("a run's directory is ''; it must name one, which may be '.'.")
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.csv"
        self.ledger = self.path / "ledger.jsonl"
        self.manifest = self.path / MANIFEST
        self.signature = self.path / "ledger.sig"
        self.model = self.path / "model.safetensors"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.done = self.path / "done"
        self.checkpoint = self.path / "checkpoint"
        self.tensorboard = self.path / "tensorboard"
        self.clients = self.path / "clients"
        self.data_split = self.path / DATA_SPLIT
        self.archive = self.path / "archive"
        self.metrics_file = MetricsFile(self.metrics)
        self._lock = RunLock(self.path)
        self._of_ending = (self.done, self.summary, self.report, self.manifest, self.signature)
        self._own = (
            *(self.config, self.metrics, self.ledger, self.path / KEY, self.model),
            *(self.checkpoint, self.tensorboard, self.clients, self.data_split),
            *(self.path / NAMED_FILES, *self._of_ending),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)  # a lock stays with its process

    def check_free(self, overwrite: bool) -> None:
        """Refuse a directory that this run may not have; nothing is touched.

        Raises
        ------
        FedsimError
            If it holds a run, unless that may be overwritten; if another run is writing to it; if
            something in it that no run has written bears the name of a run's file; if it is a file.
        """
        with self._explained():
            if (self.path.exists() or self.path.is_symlink()) and not self.path.is_dir():
                raise FedsimError(f"--out {self.path} is a file; it must be a directory.")
            existing = [path.name for path in self._own if path.exists() or path.is_symlink()]
            if is_marked(self.path):
                self._refuse_in_use(self._lock.free())
                if existing and not overwrite:
                    raise FedsimError(
                        f"{self.path} already holds a run; choose another --out, or --resume or "
                        "--overwrite it."
                    )
            elif existing:
                raise FedsimError(
                    f"--out {self.path} holds {', '.join(existing)} and no run's marker "
                    f"({self._lock.path.name}), so these may be your own files; choose another "
                    "directory."
                )

    def holds_run(self) -> bool:
        """Whether there is a run here that can be resumed; nothing is touched.

        Raises
        ------
        FedsimError
            If another run is writing to it, it is a later fedsim's, or it lacks its config.
        """
        if not is_marked(self.path):
            return False
        if not self.config.exists():
            files = self._files()
            if files:
                raise FedsimError(
                    f"{self.path} holds {', '.join(files)} of a run and not its config.toml; put "
                    "that back, --overwrite the run, or choose another --out."
                )
            return False
        self._refuse_in_use(self._lock.free())
        return True

    @contextmanager
    def resumed(self, config_toml: str) -> Iterator[None]:
        """Have the directory of a run that is resumed, for as long as the context lasts.

        If it fails before a round is made, the directory is as it was found.

        Raises
        ------
        FedsimError
            If another run writes to it, or nothing can be written there.
        """
        try:
            with self._explained():
                self._refuse_in_use(self._lock.take())
                files = (self.config, *self._of_ending)
                before = {path: regular_files.read_bytes(path) for path in files if path.is_file()}
                made = self._made()
                replace(self.config, config_toml.encode())
                for path in self._of_ending:
                    path.unlink(missing_ok=True)
            try:
                yield
            except BaseException:
                if self._made() == made:
                    for path, content in before.items():
                        replace(path, content)
                raise
        finally:
            self._lock.release()

    def _made(self) -> list[int]:
        """Lengths of the files that grow with every round."""
        return [path.stat().st_size for path in (self.metrics, self.ledger) if path.is_file()]

    @contextmanager
    def claim(self, config_toml: str, *, overwrite: bool = False) -> Iterator[None]:
        """Have the directory for a new run, for as long as the context lasts.

        The ledgers of a run that is overwritten are kept in ``archive/``. If the new run fails
        before it has written a file, the directory is as it was found or, after an earlier run,
        an empty one that is marked as a run's.

        Raises
        ------
        FedsimError
            As `check_free` does, or if nothing can be written there.
        """
        new_directories = _missing(self.path)
        begun = False
        try:
            with self._explained():
                self._take(overwrite)
                replace(self.config, config_toml.encode())
                begun = True
            yield
        except BaseException:
            written_first = (self.config, self.path / NAMED_FILES)
            if begun and {*self._files()} <= {path.name for path in written_first}:
                for path in written_first:
                    path.unlink(missing_ok=True)
            self._lock.release(remove=not (self._files() or self.archive.exists()))
            for directory in new_directories:
                try:
                    directory.rmdir()
                except OSError:
                    break  # not empty, or never made
            raise
        finally:
            self._lock.release()

    def _take(self, overwrite: bool) -> None:
        self.check_free(overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_in_use(self._lock.take())
        if self._files() and not overwrite:
            # By a run that has begun and ended since the directory was looked at.
            self._lock.release()
            raise FedsimError(f"{self.path} already holds a run; choose another --out.")
        self._archive_ledgers()
        for path in self._own:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _archive_ledgers(self) -> None:
        """Move an earlier run's ledgers, with its config, to ``archive/``, where they count."""
        kinds = (self.ledger, self.manifest, self.signature, self.clients)
        if not any(path.exists() for path in kinds):
            return
        resolve_name("fedsim.runs.run_ledgers:charge_planned")(self.path)
        key = [self.path / KEY] if self.data_split.exists() else []  # without it no HMAC compares
        files = (self.config, self.data_split, *key, *kinds)
        archive(*(path for path in files if path.exists()))

    def save_model(
        self, arrays: Mapping[str, Tensor], about: Mapping[str, object] | None = None
    ) -> None:
        """Write model.safetensors; ``about`` says which release plan and ledger made it."""
        # Only now: what reads a directory need not wait for torch.
        from safetensors.torch import save

        tensors = {name: tensor.contiguous().cpu() for name, tensor in arrays.items()}
        # One entry: the order of several is not always the same.
        text = json.dumps(dict(about or {}), sort_keys=True, separators=(",", ":"))
        replace(self.model, save(tensors, metadata={METADATA: text}))

    def finish(self, ended: Ended, why: str) -> None:
        """Note how the run has ended; one that was interrupted can be resumed, and has not."""
        if ended != "interrupted":
            replace(self.done, json.dumps({"ended": ended, "why": why}).encode() + b"\n")

    def save_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json."""
        replace(self.summary, json.dumps(summary, indent=1).encode() + b"\n")

    def save_report(self, html: str) -> None:
        """Write report.html."""
        replace(self.report, html.encode())

    def seal(self) -> None:
        """Write the manifest of the files as they are now, and sign it where there is a key.

        Whatever changes one of these files afterwards has to seal them again.

        Raises
        ------
        FedsimError
            If ``noise.ledger-key`` of the config, or `LEDGER_KEY`, names a file that is no key.
        """
        config = read_config(self.config)
        clients = clients_ledgers(self.path, config)
        manifest = Manifest.of(self.path, clients, Fingerprints(self.path)).to_json().encode()
        key = str(config.get("noise.ledger-key") or os.environ.get(LEDGER_KEY, ""))
        signed = signature(private_key(Path(key)), manifest) if key else ""
        replace(self.manifest, manifest)
        if signed:
            replace(self.signature, signed.encode())

    def _files(self) -> list[str]:
        """Names of a run's files that are here."""
        return [path.name for path in self._own if path.exists()]

    def remains(self, rounds: Sequence[int]) -> str:
        """A sentence on what a run that has failed here leaves, with checkpoints of ``rounds``."""
        files = [name for name in self._files() if name != self.config.name]
        if not files:
            return f"Nothing of the run is left in {self.path}."
        start = f"from round {rounds[-1] + 1}" if rounds else "from its first round"
        return (
            f"{self.path} keeps {', '.join(files)}; `fedsim run {self.path} --resume` resumes it "
            f"{start}."
        )

    def copy_from(self, source: RunDirectory) -> None:
        """Copy a run's files from another directory on this machine."""
        for mine, theirs in zip(self._own, source._own, strict=True):
            if theirs.is_file():
                content = regular_files.read_bytes(theirs)
                replace(mine, content, mode=theirs.stat().st_mode & 0o777)

    def _refuse_in_use(self, ours: bool) -> None:
        if not ours:
            raise FedsimError(
                f"another run is writing to {self.path}; wait for its end, or choose another --out."
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in a sentence that the directory cannot be used, and why."""
        try:
            yield
        except OSError as error:
            raise FedsimError(
                f"--out {self.path} cannot be used ({error.strerror}); it must be a directory that "
                "can be written to."
            ) from None


def ending(path: Path) -> Ending:
    """How the run in a directory has ended."""
    try:
        written = json.loads(regular_files.read_text(path / "done"))
        return Ending(written["ended"], str(written["why"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Ending("interrupted", "The run has not come to its end.")


def clients_ledgers(run: Path, config: Mapping[str, Scalar]) -> Path | None:
    """Where a run's clients keep their ledgers, if that is on this machine."""
    state_dir = config.get("client.state-dir")
    pattern = "client-*.jsonl"
    for path in (*([Path(str(state_dir))] if state_dir else []), run / "clients"):
        if any(path.glob(pattern)) or archived(path / pattern):
            return path
    return None


def last_run(runs: Path, name: str) -> RunDirectory | None:
    """The latest run of this name among a SuperLink's, to resume it.

    Raises
    ------
    FedsimError
        If another run is writing to it.
    """
    found = [
        directory
        for directory in map(RunDirectory, runs.glob(f"{name}-*"))
        if re.fullmatch(rf"{re.escape(name)}-\d+", directory.path.name)
        and directory.config.is_file()
    ]
    last = max(found, key=lambda directory: directory.config.stat().st_mtime_ns, default=None)
    return last if last is not None and last.holds_run() else None


def _missing(path: Path) -> list[Path]:
    """Those of ``path`` and its parents that are not there, innermost first."""
    missing = []
    for directory in (path, *path.parents):
        if os.path.lexists(directory):
            break
        missing.append(directory)
    return missing
