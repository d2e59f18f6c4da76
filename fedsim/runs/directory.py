"""What a run leaves behind: its directory, and how each file in it is written.

::

    config.toml         complete and resolved: reproduces the run
    metrics.csv         a row a round
    ledger.jsonl        every private release; clients' own are in clients/
    fingerprint.key     the run's key, 0600, by which it recognises its sums and files
    manifest.json       what the files were when the run ended (see `Manifest`)
    ledger.sig          its signature, where there is a key for one
    model.safetensors   the model
    summary.json        what was measured once, at the end
    report.html         all of it to look at
    done                how the run has ended, once it has
    checkpoint/         what the run has reached, to go on from (see `Checkpoints`)
    tensorboard/        event files, where `log.to` asks for them
    clients/            what clients keep between rounds, on this machine
    archive/1/ ...      ledgers of the runs that were overwritten here, with their configs
    .fedsim-run         says that all this is a run's, and that nothing else here is

A directory is claimed before anything is written to it, and by one run at a time.
"""

from __future__ import annotations

import csv
import hmac
import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, cast

from safetensors.torch import save as serialise
from torch import Tensor

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.digest import KEY, Fingerprints
from fedsim.privacy.manifest import MANIFEST
from fedsim.privacy.verification import METADATA
from fedsim.runs.checkpoints import Checkpoints, RunState
from fedsim.runs.record import ending
from fedsim.runs.run_lock import RunLock, is_marked

RUNS = "FEDSIM_RUNS"
"""Environment variable: the directory in which each run of a SuperLink gets one of its own."""

OUT = "FEDSIM_OUT"
"""Environment variable: the directory, claimed already, of the one run of a SuperLink."""

Row = Mapping[str, float | int]
Ended = Literal["finished", "budget", "stopped", "interrupted", "dropped", "failed"]


class RunDirectory:
    """The directory of one run.

    Parameters
    ----------
    path : path
        Need not exist; nothing is written before `claim`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.csv"
        self.ledger = self.path / "ledger.jsonl"
        self.key = self.path / KEY
        self.manifest = self.path / MANIFEST
        self.signature = self.path / "ledger.sig"
        self.model = self.path / "model.safetensors"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.done = self.path / "done"
        self.checkpoint = self.path / "checkpoint"
        self.tensorboard = self.path / "tensorboard"
        self.clients = self.path / "clients"
        self.archive = self.path / "archive"
        self.checkpoints = Checkpoints(self.checkpoint)
        self._marker = RunLock(self.path)
        self._columns: tuple[str, ...] = ()

    def check_free(self, overwrite: bool) -> None:
        """Refuse a directory that this run may not have; nothing is touched.

        Raises
        ------
        FedsimError
            If it holds a run, unless that may be overwritten; if somebody is writing to it; if
            something in it that no run has written bears the name of a run's file; if it is a file.
        """
        try:
            self._check_free(overwrite)
        except OSError as error:
            raise self._unusable(error) from None

    def _check_free(self, overwrite: bool) -> None:
        if (self.path.exists() or self.path.is_symlink()) and not self.path.is_dir():
            raise FedsimError(f"--out {self.path} is a file; it must be a directory.")
        taken = [path.name for path in self._own if path.exists() or path.is_symlink()]
        if not is_marked(self.path):
            if taken:
                raise FedsimError(
                    f"--out {self.path} holds {', '.join(taken)} and no run's marker "
                    f"({self._marker.path.name}), so that these may be somebody's own; choose "
                    "another directory."
                )
            return
        if not self._marker.free():
            raise self._in_use()
        if taken and not overwrite:
            raise FedsimError(
                f"{self.path} already holds a run; choose another --out, or --resume or "
                "--overwrite it."
            )

    def holds_run(self) -> bool:
        """Whether a run has begun here that can be gone on with; nothing is touched.

        Raises
        ------
        FedsimError
            If somebody is writing to it, it is a later fedsim's, or it lacks its config.
        """
        if not is_marked(self.path):
            return False
        if not self.config.exists():
            left = [path.name for path in self._own if path.exists()]
            if left:
                raise FedsimError(
                    f"{self.path} holds {', '.join(left)} of a run and not its config.toml; put "
                    "that back, --overwrite the run, or choose another --out."
                )
            return False
        if not self._marker.free():
            raise self._in_use()
        return True

    @contextmanager
    def resumed(self, config_toml: str) -> Iterator[None]:
        """Take the directory of a run to go on with it, as long as the context lasts.

        Raises
        ------
        FedsimError
            If another run writes to it, or nothing can be written there.
        """
        try:
            if not self._marker.take():
                raise self._in_use()
            _replace(self.config, config_toml.encode())
            for of_its_end in (
                self.done, self.summary, self.report, self.manifest, self.signature
            ):  # fmt: skip
                of_its_end.unlink(missing_ok=True)
        except OSError as error:
            self._marker.release()
            raise self._unusable(error) from None
        try:
            yield
        finally:
            self._marker.release()

    @contextmanager
    def claim(self, config_toml: str, *, overwrite: bool = False) -> Iterator[None]:
        """Take the directory for a run, which has it to itself as long as the context lasts.

        Of a run that is overwritten the ledgers are kept in ``archive/``. If the new run fails
        before it has left anything, the directory is given back as it was found or, after an
        earlier run, as a run's that is empty.

        Raises
        ------
        FedsimError
            As `check_free` does, or if nothing can be written there.
        """
        new_directories = _missing(self.path)
        try:
            self._take(config_toml, overwrite)
        except OSError as error:
            self._abandon(new_directories)
            raise self._unusable(error) from None
        except FedsimError:
            self._abandon(new_directories)
            raise
        try:
            yield
        except BaseException:
            if not any(path.exists() for path in self._own if path != self.config):
                self.config.unlink(missing_ok=True)
                self._abandon(new_directories)
            raise
        finally:
            self._marker.release()

    def _take(self, config_toml: str, overwrite: bool) -> None:
        self._check_free(overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._marker.take():
            raise self._in_use()
        if any(path.exists() for path in self._own) and not overwrite:
            # By a run that has begun and ended since the directory was looked at.
            self._marker.release()
            raise FedsimError(f"{self.path} already holds a run; choose another --out.")
        self._put_away()
        _replace(self.config, config_toml.encode())

    def _put_away(self) -> None:
        """Archive an earlier run's ledgers, with its config; remove its other files."""
        kinds = (self.ledger, self.manifest, self.signature, self.clients)
        ledgers = [path for path in kinds if path.exists()]
        if ledgers:
            self.archive.mkdir(exist_ok=True)
            numbers = [int(path.name) for path in self.archive.iterdir() if path.name.isdecimal()]
            kept = self.archive / str(max(numbers, default=0) + 1)
            kept.mkdir()
            for path in (self.config, *ledgers):
                if path.exists():
                    path.rename(kept / path.name)
        for path in self._own:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _abandon(self, new_directories: Sequence[Path]) -> None:
        """Give back what holds no file of a run; ``made`` are the directories made for it."""
        empty = not any(path.exists() for path in (*self._own, self.archive))
        self._marker.release(remove=empty)
        for directory in new_directories:
            try:
                directory.rmdir()
            except OSError:
                return  # somebody else's by now, or never made

    def start_metrics(self, columns: Sequence[str], rows: Iterable[Row] = ()) -> None:
        """Begin metrics.csv, with the columns that it will have to its end, and these rows."""
        self._columns = tuple(columns)
        lines = [_csv_line([row.get(column, "") for column in columns]) for row in rows]
        _replace(self.metrics, b"".join([_csv_line(self._columns), *lines]))

    def rows(self) -> list[dict[str, float | int]]:
        """The rows of metrics.csv that are there whole; a column that a round lacks is left out.

        Raises
        ------
        FedsimError
            If something in it is no number.
        """
        try:
            return [{key: _number(text) for key, text in row.items()} for row in self._texts()]
        except (ValueError, TypeError, csv.Error) as error:
            raise self._damaged(str(error)) from None

    def rows_before(self, state: RunState) -> list[dict[str, float | int]]:
        """The rows of metrics.csv before a checkpoint's own; none if the file was removed.

        Raises
        ------
        FedsimError
            If they are not the ones that the run had written then.
        """
        rows = self.rows()[: state.metrics_length - 1]
        if state.metrics_code and self.metrics.exists():
            code = self.rows_code()
            for row in self._texts()[: len(rows)]:
                code.update(row_text(row))
            if code.hexdigest() != state.metrics_code:
                why = f"its rows up to round {state.round} are not those that the run wrote"
                raise self._damaged(why)
        return rows

    def rows_code(self) -> hmac.HMAC:
        """HMAC of rows, to be updated with the `row_text` of each."""
        return Fingerprints(self.path).code()

    def _texts(self) -> list[dict[str, str]]:
        try:
            text = regular_files.read_bytes(self.metrics).decode()
        except FileNotFoundError:
            return []
        whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(whole)]

    def _damaged(self, why: str) -> FedsimError:
        return FedsimError(
            f"{self.metrics} is damaged ({why}); put back the one that the run wrote, or remove "
            "it, and with it the rows of the rounds so far."
        )

    def add_row(self, row: Row) -> None:
        """Append one round to metrics.csv: a column that it lacks stays empty."""
        unknown = [key for key in row if key not in self._columns]
        if unknown:
            raise ValueError(f"metrics.csv has no column {unknown[0]!r}.")
        line = _csv_line([row.get(column, "") for column in self._columns])
        with _named(self.metrics), open(self.metrics, "ab", opener=regular_files.opener) as file:
            file.write(line)

    def sync_metrics(self) -> None:
        """Let the rows that are there outlive the machine, as the checkpoint after them does."""
        with _named(self.metrics), open(self.metrics, "ab", opener=regular_files.opener) as file:
            os.fsync(file.fileno())

    def save_model(
        self, arrays: Mapping[str, Tensor], about: Mapping[str, object] | None = None
    ) -> None:
        """Write model.safetensors; ``about`` says which release plan and ledger made it."""
        tensors = {name: tensor.contiguous().cpu() for name, tensor in arrays.items()}
        # One entry: the order of several is not always the same.
        text = json.dumps(dict(about or {}), sort_keys=True, separators=(",", ":"))
        _replace(self.model, serialise(tensors, metadata={METADATA: text}))

    def finish(self, ended: Ended, why: str) -> None:
        """Say that the run has come to its end, and how; one that was interrupted has not."""
        if ended != "interrupted":
            _replace(self.done, json.dumps({"ended": ended, "why": why}).encode() + b"\n")

    def ending(self) -> tuple[Ended, str]:
        """How the run has ended, and a sentence if that was early."""
        ended, why = ending(self.path)
        return cast(Ended, ended), why

    def save_manifest(self, manifest: str, signature: str) -> None:
        """Write manifest.json and, if it is signed, ledger.sig."""
        _replace(self.manifest, manifest.encode())
        if signature:
            _replace(self.signature, signature.encode())

    def save_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json."""
        _replace(self.summary, json.dumps(summary, indent=1).encode() + b"\n")

    def save_report(self, html: str) -> None:
        """Write report.html."""
        _replace(self.report, html.encode())

    def remains(self) -> str:
        """What a run that has failed here leaves, in a sentence."""
        try:
            files = [path.name for path in self._own if path != self.config and path.exists()]
            rounds = self.checkpoints.rounds()
        except OSError:
            files, rounds = [], []
        if not files:
            return f"Nothing of the run is left in {self.path}."
        goes_on = f"from round {rounds[-1] + 1}" if rounds else "from its first round"
        return (
            f"{self.path} keeps {', '.join(files)}; `fedsim run {self.path} --resume` goes on "
            f"{goes_on}."
        )

    def copy_from(self, source: RunDirectory) -> None:
        """Take over what a run has left in a directory on this machine."""
        for mine, theirs in zip(self._own, source._own, strict=True):
            if theirs.is_file():
                _replace(mine, regular_files.read_bytes(theirs), mode=theirs.stat().st_mode & 0o777)

    @property
    def _own(self) -> tuple[Path, ...]:
        """What in the directory is the run's."""
        return (
            self.config,
            self.metrics,
            self.ledger,
            self.key,
            self.manifest,
            self.signature,
            self.model,
            self.summary,
            self.report,
            self.done,
            self.checkpoint,
            self.tensorboard,
            self.clients,
        )

    def _in_use(self) -> FedsimError:
        return FedsimError(
            f"another run is writing to {self.path}; wait for its end, or choose another --out."
        )

    def _unusable(self, error: OSError) -> FedsimError:
        return FedsimError(
            f"--out {self.path} cannot be used ({error.strerror}); it must be a directory that can "
            "be written to."
        )


def last_run(runs: Path, name: str) -> RunDirectory | None:
    """The run of this name that began last of a SuperLink's, to go on with.

    Raises
    ------
    FedsimError
        If somebody is writing to it.
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


def row_text(row: Mapping[str, object]) -> bytes:
    """A row as it stands in metrics.csv, whatever the order of the columns."""
    return "".join(f"{key}={row[key]}\n" for key in sorted(row)).encode() + b"\n"


def _number(text: str) -> float | int:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _csv_line(values: Sequence[object]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerow(values)
    return text.getvalue().encode()


def _replace(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file so that it is there whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with _named(path):
        try:
            with open(part, "wb", opener=partial(os.open, mode=mode)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of writing a file, which name no file themselves, name ``path``."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
