"""Verification of a run's files: ledgers, model, config, metrics and signature must agree."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.claims import costliest
from fedsim.privacy.entry import Entry, History
from fedsim.privacy.laws.base import Level
from fedsim.privacy.ledger import Ledger, LedgerPosition
from fedsim.privacy.manifest import MANIFEST, Manifest, check_signature, file_digest

METADATA = "fedsim"
"""Key in a model file's metadata under which its ledger's end is stored."""


@dataclass(frozen=True)
class FileCheck:
    """Result of one check of a run's files.

    Attributes
    ----------
    subject : str
        Short name of what was run_check.
    passed : bool
    detail : str
        What was found, or what is wrong.
    """

    subject: str
    passed: bool
    detail: str


def run_check(subject: str, compare: Callable[[], str], path: Path | None = None) -> FileCheck:
    """Run a check: its detail is what ``compare`` returns, or the message of its `FedsimError`.

    ``path`` is put before such a message.
    """
    try:
        return FileCheck(subject, True, compare())
    except FedsimError as error:
        return FileCheck(subject, False, f"{path}: {error}" if path else str(error))


def verify(
    directory: Path,
    ledgers: Mapping[Level, Path],
    deltas: Mapping[Level, float],
    *,
    run: str | None = None,
    public_key: Path | None = None,
) -> list[FileCheck]:
    """Compare the files in a run's directory with its ledgers, its manifest and a signature.

    Chains, manifest, model, config and metrics are always run_check; a file that is missing,
    unreadable or shorter than the ledger fails. What else lies there is not covered.

    Parameters
    ----------
    directory : path
        Directory of the run.
    ledgers : mapping of level to path
        The server's ledger (``client``), and the clients' (``example``) if they have one.
    deltas : mapping of level to float
        Deltas of the epsilons in its metrics.
    run : str, optional
        The run's id, by which its lines are known in a ledger that several runs share.
    public_key : path, optional
        Public key of the signature that there must be.

    Raises
    ------
    FedsimError
        If a ledger cannot be read.
    """
    opened = {level: Ledger.read(path) for level, path in ledgers.items()}
    server = opened["client"]
    manifest: Manifest | None = None
    rows: list[dict[str, str]] = []

    def compare_manifest() -> str:
        nonlocal manifest
        manifest = Manifest.read(directory / MANIFEST)
        if set(manifest.ledgers) != set(opened):
            named = " and ".join(sorted(manifest.ledgers)) or "no"
            raise FedsimError(f"it names {named} ledgers, and there are {' and '.join(opened)}.")
        found = [_compare_end(manifest.ledgers[level], opened[level]) for level in opened]
        return found[0]

    def compare_metrics() -> str:
        rows.extend(_rows(directory / "metrics.csv"))
        # Of the last line: evidence keeps later rounds that were drawn before a crash.
        numbers = [entry.round for entry in _entries_of_run(server, run) if entry.round]
        reached = numbers[-1] if numbers else 0
        if int(rows[-1]["round"] if rows else 0) != reached:
            raise FedsimError(
                f"the rows end at round {rows[-1]['round'] if rows else 0}, and the ledger at "
                f"round {reached}; rows are missing or of another run (one that was interrupted "
                "is complete once it is resumed)."
            )
        found = f"{len(rows)} row{'s' * (len(rows) != 1)} up to round {reached}"
        columns = {"client": "epsilon", "example": "example-epsilon"}
        for level, ledger in opened.items() if rows else ():
            found += _compare_epsilon(rows[-1], columns[level], ledger, run, deltas[level])
        return _compare_bytes(directory / "metrics.csv", manifest, found)

    model, config = directory / "model.safetensors", directory / "config.toml"
    subjects = {"client": "chain", "example": "chain of examples"}
    checks = [FileCheck(subjects[level], True, _chain(ledger)) for level, ledger in opened.items()]
    checks += [
        run_check("manifest", compare_manifest, directory / MANIFEST),
        run_check("model", lambda: _compare_model(model, server, manifest), model),
        run_check("config", lambda: _compare_config(config, manifest), config),
        run_check("metrics", compare_metrics, directory / "metrics.csv"),
    ]
    if public_key is not None:
        fault = _wrong_signature(directory, public_key)
        checks.append(FileCheck("signature", fault is None, fault or f"is that of {public_key}"))
    return checks


def _chain(ledger: Ledger) -> str:
    return f"{len(ledger.heads)} lines, final hash {ledger.head}"


def _compare_end(end: LedgerPosition, ledger: Ledger) -> str:
    """Compare a ledger's end when the run ended with the ledger, which other runs may extend."""
    if end == ledger.position:
        return "names this ledger's final hash and number of lines"
    if ledger.extends(end):
        return f"names line {end.lines} of this ledger, which other runs have extended"
    raise FedsimError(f"it names {end.lines} lines and final hash {end.head}, not this ledger's.")


def _compare_model(path: Path, ledger: Ledger, manifest: Manifest | None) -> str:
    stored = model_metadata(path)
    try:
        end = LedgerPosition(str(stored["ledger-head"]), int(stored["ledger-lines"]))
    except (KeyError, TypeError, ValueError):
        raise FedsimError("it names no ledger.") from None
    return _compare_bytes(path, manifest, _compare_end(end, ledger))


def _compare_config(path: Path, manifest: Manifest | None) -> str:
    try:
        regular_files.read_toml(path)
    except FileNotFoundError:
        raise FedsimError("there is none; restore what the run wrote.") from None
    except (OSError, ValueError):
        raise FedsimError("it cannot be read as TOML.") from None
    return _compare_bytes(path, manifest, "can be read")


def _compare_bytes(path: Path, manifest: Manifest | None, found: str) -> str:
    """Compare a readable file's digest with the manifest's; returns the check's detail."""
    if manifest is None:
        return found
    if file_digest(path) != manifest.sha256.get(path.name):
        raise FedsimError("it was changed or replaced after the run wrote it.")
    return f"{found}; has the digest that the manifest names"


def _entries_of_run(ledger: Ledger, run: str | None) -> list[Entry]:
    return [entry for entry in ledger.entries if run is None or entry.run == run]


def _compare_epsilon(
    row: Mapping[str, str], column: str, ledger: Ledger, run: str | None, delta: float
) -> str:
    """Compare the last row's epsilon with the ledger; empty without a guarantee.

    The row was written after the run's last line. Other runs may have written since, before it or
    after: its epsilon lies between that of the lines until then and that of all lines.
    """
    own = [i for i, e in enumerate(ledger.entries) if run is None or e.run == run]
    high = ledger.epsilon(delta)
    if math.isinf(high) or not own:
        return ""
    if not row.get(column):
        raise FedsimError(f"the row of round {row['round']} has no {column}.")
    histories: dict[int | None, History] = {}
    for entry in ledger.entries[: own[-1] + 1]:
        for owner in entry.owners:
            histories.setdefault(owner, History()).add(entry)
    low = costliest([*histories.values()], delta).accountant.epsilon(delta)
    stated = float(row[column])
    if not low * (1 - 1e-6) <= stated <= high * (1 + 1e-6):
        raise FedsimError(
            f"{column} is {stated:.6g} after round {row['round']}; by the ledger it is {low:.6g}."
        )
    return f", {column} {stated:.6g}"


def _rows(path: Path) -> list[dict[str, str]]:
    """Rows of a complete metrics.csv: numbers only, one row for each round.

    Raises
    ------
    FedsimError
        If the file is missing, damaged or incomplete.
    """
    try:
        text = regular_files.read_bytes(path).decode()
        table = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except FileNotFoundError:
        raise FedsimError("there is none; restore what the run wrote.") from None
    except (OSError, ValueError, csv.Error):
        raise FedsimError("it cannot be read as CSV.") from None
    if not table or "round" not in table[0] or not text.endswith("\n"):
        raise FedsimError("it is cut off, or not one that a run wrote.")
    header, *lines = table
    if any(len(line) != len(header) for line in lines):
        raise FedsimError("a row does not have as many numbers as there are columns.")
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    try:
        _ = [float(number) for line in lines for number in line if number]
        rounds = [int(row["round"]) for row in rows]
    except ValueError:
        raise FedsimError("a value in it is not a number.") from None
    first = 0 if rounds[:1] == [0] else 1
    if rounds != list(range(first, first + len(rounds))):
        raise FedsimError("its rounds are not consecutive; a row is missing or duplicated.")
    return rows


def _wrong_signature(run: Path, public_key: Path) -> str | None:
    try:
        text = regular_files.read_text(run / "ledger.sig")
        manifest = regular_files.read_bytes(run / MANIFEST)
    except (OSError, UnicodeDecodeError):
        return f"there is no ledger.sig, or no {MANIFEST}, in {run}"
    return check_signature(text, public_key, manifest)


def model_metadata(path: Path) -> dict[str, Any]:
    """Metadata of a model file about the run that wrote it; read without torch.

    Raises
    ------
    FedsimError
        If it is no model file, or no run of fedsim wrote it.
    """
    try:
        with safe_open(regular_files.require(path), framework="numpy") as file:
            metadata = json.loads((file.metadata() or {})[METADATA])
    except FileNotFoundError:
        raise FedsimError(
            "there is none; a run that was killed has one once it is resumed."
        ) from None
    except OSError as error:
        raise FedsimError(f"it cannot be read ({error.strerror}).") from None
    except (SafetensorError, ValueError, KeyError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise FedsimError("it is not the model of a run that fedsim made.")
    return metadata
