"""A run's directory: its files, which run may write to it, and how a run is overwritten.

::

    config.toml         complete and resolved: reproduces the run
    metrics.csv         one row for each round
    client-metrics.csv  one row for each client's evaluation, in a run without privacy
    ledger.jsonl        every release
    ledger-examples.jsonl   every release of clients that protect their examples
    manifest.json       digests of the files when the run ended (see `Manifest`)
    ledger.sig          signature of the manifest, if there is a key for one
    model.safetensors   the model
    summary.json        figures that are computed once, at the end
    report.html         the report
    done                how the run ended; missing before its end
    checkpoint/         states from which the run can be resumed (see `Checkpoints`)
    tensorboard/        event files, if `log.to` asks for them
    clients/            state of the clients on this machine
    stop-RUN_ID         why to stop a federation's run, written by the process that submitted it
    .fedsim-run         marks the directory as a run's, and has its random id (see `RunLock`)

A run claims a directory before it writes to it; only one run at a time can. Files of other names
are never touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsim import regular_files
from fedsim.config.run_config import read_config
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor
from fedsim.privacy import Ledger
from fedsim.privacy.durable import replace
from fedsim.privacy.manifest import MANIFEST, Manifest, signature, signing_key
from fedsim.privacy.verification import METADATA
from fedsim.runs.metrics import MetricsFile
from fedsim.runs.run_ledgers import RunOutcome, ledger_paths
from fedsim.runs.run_lock import RunLock, is_marked, run_id

RUNS = "FEDSIM_RUNS"
"""Environment variable: directory in which each run of a SuperLink gets its own directory."""

OUT = "FEDSIM_OUT"
"""Environment variable: directory, already claimed, of the only run of a SuperLink."""


class RunDirectory:
    """The directory of one run.

    Parameters
    ----------
    path : path
        Need not exist; nothing is written before `claim`. The empty string is refused, since `Path`
        would take it for the current directory.

    Attributes
    ----------
    metrics_file : MetricsFile
        Reader and writer of metrics.csv.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise FedsimError("a run's directory is ''; it must name one, which may be '.'.")
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.csv"
        self.client_metrics = self.path / "client-metrics.csv"
        self.ledger = self.path / "ledger.jsonl"
        self.examples = self.path / "ledger-examples.jsonl"
        self.manifest = self.path / MANIFEST
        self.signature = self.path / "ledger.sig"
        self.model = self.path / "model.safetensors"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.done = self.path / "done"
        self.checkpoint = self.path / "checkpoint"
        self.tensorboard = self.path / "tensorboard"
        self.clients = self.path / "clients"
        self.metrics_file = MetricsFile(self.metrics)
        self._lock = RunLock(self.path)
        self._ending_files = (self.done, self.summary, self.report, self.manifest, self.signature)
        self._run_files = (
            *(self.config, self.metrics, self.client_metrics),
            *(self.ledger, self.examples, self.model),
            *(self.checkpoint, self.tensorboard, self.clients, *self._ending_files),
        )

    @property
    def run(self) -> str:
        """The run's random id.

        Raises
        ------
        FedsimError
            If the marker does not have one.
        """
        return run_id(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)  # a lock stays with its process

    def check_available(self, overwrite: bool) -> None:
        """Refuse a directory that a new run may not use, without touching it.

        Raises
        ------
        FedsimError
            If it has a run and ``overwrite`` is False, or evidence of private releases; if another
            run is writing to it; if it has no marker but other visible files, which may be the
            user's; if it is a file, or its name is not UTF-8.
        """
        if re.search(r"[\ud800-\udfff]", str(self.path)):  # bytes that are not UTF-8
            raise FedsimError(
                f"--out {self.path} is not valid UTF-8; it must be, or safetensors could not open "
                "the model and the checkpoints."
            )
        with self._explained():
            if (self.path.exists() or self.path.is_symlink()) and not self.path.is_dir():
                raise FedsimError(f"--out {self.path} is a file; it must be a directory.")
            existing = [path.name for path in self._run_files if path.exists() or path.is_symlink()]
            if is_marked(self.path):
                self._refuse_in_use(self._lock.is_free())
                if existing and not overwrite:
                    raise FedsimError(
                        f"{self.path} already holds a run; choose another --out, or --resume or "
                        "--overwrite it."
                    )
                self._refuse_evidence()
            else:
                refuse_foreign(self.path)

    def _refuse_evidence(self) -> None:
        """Refuse to overwrite the proof of what was released of real people."""
        ledgers = [self.ledger, self.examples, *sorted(self.clients.glob("client-*.jsonl"))]
        for path in ledgers:
            if not path.is_file():
                continue
            try:
                is_evidence = Ledger.read(path).private_evidence
            except FedsimError as error:
                raise FedsimError(
                    f"{error} It may be evidence, which is not overwritten; choose another --out."
                ) from None
            if is_evidence:
                raise FedsimError(
                    f"{path} is evidence of private releases, and is not overwritten; choose "
                    "another --out."
                )

    def holds_run(self) -> bool:
        """Whether there is a run here that can be resumed; touches nothing.

        Raises
        ------
        FedsimError
            If another run is writing to it, a later fedsim wrote it, or its config.toml is missing.
        """
        if not is_marked(self.path):
            return False
        if not self.config.exists():
            files = self._files()
            if files:
                raise FedsimError(
                    f"{self.path} holds {', '.join(files)} of a run but not its config.toml; "
                    "restore that, --overwrite the run, or choose another --out."
                )
            return False
        self._refuse_in_use(self._lock.is_free())
        return True

    @contextmanager
    def lock_for_resume(self, config_toml: str) -> Iterator[None]:
        """Lock the directory of a run to be resumed while the context lasts.

        If the resumed run fails before it makes a round, the directory is put back as it was. The
        same is done if a finished run was signed, and there is no key with which to sign it again.

        Raises
        ------
        FedsimError
            If another run writes to it, or nothing can be written there.
        """
        try:
            with self._explained():
                self._refuse_in_use(self._lock.acquire())
                files = (self.config, *self._ending_files)
                before = {path: regular_files.read_bytes(path) for path in files if path.is_file()}
                lines = self._round_lines()
            try:
                with self._explained():
                    replace(self.config, config_toml.encode())
                    for path in (*self._ending_files, *self._temporary_files()):
                        path.unlink(missing_ok=True)
                yield
                has_lost_signature = self.signature in before and not self.signature.exists()
                if has_lost_signature and before[self.config] == config_toml.encode():
                    self._restore_files(before, lines)
            except BaseException:
                self._restore_files(before, lines)
                raise
        finally:
            self._lock.release()

    def _restore_files(self, before: Mapping[Path, bytes], lines: Sequence[int]) -> None:
        """Write these files again, unless a round has been made since."""
        if self._round_lines() == lines:
            for path, content in before.items():
                # Files that did not change stay: where none can be written, none was changed.
                if not path.is_file() or regular_files.read_bytes(path) != content:
                    replace(path, content)

    def _round_lines(self) -> list[int]:
        """Number of lines of each file that grows with every round."""
        files = (path for path in (self.metrics, self.ledger) if path.is_file())
        return [len(regular_files.read_bytes(path).splitlines()) for path in files]

    @contextmanager
    def claim(self, config_toml: str, *, overwrite: bool = False) -> Iterator[None]:
        """Claim the directory for a new run, and lock it while the context lasts.

        If the new run fails before it writes a file, the directory is put back as it was; if it
        held an earlier run, it is left empty and marked as a run's.

        Raises
        ------
        FedsimError
            If the directory may not be used (see `check_available`) or cannot be written to.
        """
        new_directories = missing_directories(self.path)
        claimed = False
        try:
            with self._explained():
                self._acquire(overwrite)
                replace(self.config, config_toml.encode())
                claimed = True
            yield
        except BaseException:
            # The config is written before the first round: with no other file, nothing is lost.
            if claimed and {*self._files()} <= {self.config.name}:
                self.config.unlink(missing_ok=True)
            self._lock.release(remove=not self._files())
            for directory in new_directories:
                try:
                    directory.rmdir()
                except OSError:
                    break  # not empty, or never created
            raise
        finally:
            self._lock.release()

    def _acquire(self, overwrite: bool) -> None:
        self.check_available(overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_in_use(self._lock.acquire())
        if self._files() and not overwrite:
            # A run began and ended here between `check_available` and taking the lock.
            self._lock.release()
            raise FedsimError(f"{self.path} already holds a run; choose another --out.")
        self._lock.renew()
        for path in (*self._run_files, *self._temporary_files()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def save_model(
        self, arrays: Mapping[str, Tensor], about: Mapping[str, object] | None = None
    ) -> None:
        """Write model.safetensors; ``about`` is its metadata on the release and the ledger."""
        # Imported here: commands that only read a directory should not wait for torch.
        from safetensors.torch import save

        tensors = {name: tensor.contiguous().cpu() for name, tensor in arrays.items()}
        # One entry of JSON: safetensors does not keep the order of several, and bytes must repeat.
        text = json.dumps(dict(about or {}), sort_keys=True, separators=(",", ":"))
        replace(self.model, save(tensors, metadata={METADATA: text}))

    def finish(self, ending: RunOutcome) -> None:
        """Write how the run ended; an interrupted run has not ended, since it can be resumed."""
        if ending.ended != "interrupted":
            replace(self.done, json.dumps(ending._asdict()).encode() + b"\n")

    def save_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json."""
        replace(self.summary, json.dumps(summary, indent=1).encode() + b"\n")

    def save_report(self, html: str) -> None:
        """Write report.html."""
        replace(self.report, html.encode())

    def write_manifest(self) -> None:
        """Write the manifest of the current files, and sign it if there is a key.

        Code that changes one of these files afterwards must call this again.

        Raises
        ------
        FedsimError
            If ``noise.ledger-key`` of the config, or `LEDGER_KEY`, names a file that is no key.
        """
        config = read_config(self.config)
        manifest = Manifest.of(self.path, ledger_paths(config, self.path)).to_json().encode()
        key = signing_key(str(config.get("noise.ledger-key", "")))
        signed = signature(key, manifest) if key is not None else ""
        replace(self.manifest, manifest)
        if signed:
            replace(self.signature, signed.encode())

    def _files(self) -> list[str]:
        """Names of the run's files that exist."""
        return [path.name for path in self._run_files if path.exists()]

    def _temporary_files(self) -> list[Path]:
        """Temporary files of processes that were killed while they replaced a file of the run."""
        digits = 16 * "[0-9a-f]"
        names = (f".{path.name}.{digits}" for path in self._run_files)
        return [file for name in names for file in self.path.glob(name)]

    def remaining_files(self, rounds: Sequence[int]) -> str:
        """Sentence on what a failed run leaves here; it has checkpoints of ``rounds``."""
        files = [name for name in self._files() if name != self.config.name]
        if not files:
            return f"Nothing of the run is left in {self.path}."
        start = f"from round {rounds[-1] + 1}" if rounds else "from its first round"
        return (
            f"{self.path} keeps {', '.join(files)}; `fedsim run {self.path} --resume` resumes it "
            f"{start}."
        )

    def stop_request(self, run_id: int) -> Path:
        """File that asks the ServerApp of this Flower run to stop it, with the reason."""
        return self.path / f"stop-{run_id}"

    def copy_from(self, source: RunDirectory) -> None:
        """Copy a run's files from another directory on this machine."""
        for path, source_path in zip(self._run_files, source._run_files, strict=True):
            if source_path.is_file():
                content = regular_files.read_bytes(source_path)
                replace(path, content, mode=source_path.stat().st_mode & 0o777)

    def _refuse_in_use(self, lock_taken: bool) -> None:
        if not lock_taken:
            raise FedsimError(
                f"another run is writing to {self.path}; wait for its end, or choose another --out."
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError into the sentence that the directory cannot be used, and why."""
        try:
            yield
        except OSError as error:
            raise FedsimError(
                f"--out {self.path} cannot be used ({error.strerror}); it must be a directory that "
                "can be written to."
            ) from None


def refuse_foreign(out: Path) -> None:
    """Refuse a directory that is not empty and nothing of fedsim's, so that nothing is mixed in.

    Hidden files do not count: the system makes some.

    Raises
    ------
    FedsimError
    """
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    visible = [name for name in names if not name.startswith(".")]
    if visible:
        more = f" and {len(visible) - 3} more" if len(visible) > 3 else ""
        raise FedsimError(
            f"--out {out} holds {', '.join(visible[:3])}{more} but no run's marker "
            f"({regular_files.RUN_MARKER}), so these may be your own files; choose a new or an "
            "empty directory."
        )


def latest_run(runs: Path, name: str) -> RunDirectory | None:
    """The latest run of this name among a SuperLink's runs, to resume it; None without one.

    Raises
    ------
    FedsimError
        If another run is writing to it.
    """
    directories = [
        directory
        for directory in map(RunDirectory, runs.glob(f"{name}-*"))
        if re.fullmatch(rf"{re.escape(name)}-\d+", directory.path.name)
        and directory.config.is_file()
    ]
    last = max(directories, key=lambda directory: directory.config.stat().st_mtime_ns, default=None)
    return last if last is not None and last.holds_run() else None


def missing_directories(path: Path) -> list[Path]:
    """The directories among ``path`` and its parents that do not exist, innermost first."""
    missing = []
    for directory in (path, *path.parents):
        if os.path.lexists(directory):
            break
        missing.append(directory)
    return missing
