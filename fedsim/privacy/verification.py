"""Verification of a run's files: ledgers, model, config, metrics and signature must agree."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.privacy.client_ledgers import ClientLedgers, run_of
from fedsim.privacy.digest import Fingerprints
from fedsim.privacy.entry import History
from fedsim.privacy.ledger import Ledger
from fedsim.privacy.ledger_lines import End
from fedsim.privacy.manifest import (
    KEYED,
    LEDGER,
    MANIFEST,
    Manifest,
    check_signature,
    file_digest,
)

METADATA = "fedsim"
"""Key in a model file's metadata under which its ledger's end is stored."""

_METRICS = KEYED[0]

# Rows whose epsilon is recomputed, evenly spread; the manifest covers all rows.
_COMPUTED = 200


@dataclass(frozen=True)
class FileCheck:
    """Result of one check of a run's files.

    Attributes
    ----------
    subject : str
        Short name of what was checked.
    passed : bool
    detail : str
        What was found, or what is wrong.
    """

    subject: str
    passed: bool
    detail: str


def checked(subject: str, compare: Callable[[], str], path: Path | None = None) -> FileCheck:
    """Run a check: its detail is what ``compare`` returns, or the message of its `FedsimError`.

    ``path`` is put before such a message.
    """
    try:
        return FileCheck(subject, True, compare())
    except FedsimError as error:
        return FileCheck(subject, False, f"{path}: {error}" if path else str(error))


def verify(
    directory: Path,
    delta: float,
    clients: Path | None = None,
    public_key: Path | None = None,
    *,
    examples_delta: float | None = None,
    stopping: Stopping = FIXED,
) -> list[FileCheck]:
    """Compare the files in a run's directory with its ledger, its manifest and a signature.

    Chain, manifest, model, config and metrics are always checked; a file that is missing,
    unreadable or shorter than the ledger fails.

    Parameters
    ----------
    directory : path
        Directory of the run.
    delta : float
        Delta of the epsilons in its metrics.
    clients : path, optional
        Directory of its clients' ledgers.
    public_key : path, optional
        Public key of the signature that there must be.
    examples_delta : float, optional
        Delta of the examples' epsilons in its metrics, if it is another.
    stopping : Stopping
        How the run may end early, as it was before the first round.

    Raises
    ------
    FedsimError
        If a ledger cannot be read.
    """
    ledger = Ledger.read(directory / LEDGER)
    manifest: Manifest | None = None
    rows: list[dict[str, str]] = []

    def compare_manifest() -> str:
        nonlocal manifest
        manifest = Manifest.read(directory / MANIFEST)
        return _compare_end(manifest.ledger, ledger)

    def compare_metrics() -> str:
        rows.extend(_rows(directory / _METRICS))
        return _compare_metrics(rows, ledger, delta, stopping)

    model, config = directory / "model.safetensors", directory / "config.toml"
    checks = [
        FileCheck("chain", True, _chain(ledger)),
        checked("manifest", compare_manifest, directory / MANIFEST),
        checked("model", lambda: _compare_model(model, ledger, manifest), model),
        checked("config", lambda: _compare_config(config, manifest), config),
        checked("metrics", compare_metrics, directory / _METRICS),
    ]
    if manifest is not None:
        checks += _other_files(directory, clients, manifest)
    if clients is not None or (manifest is not None and manifest.clients):
        place = directory / "clients" if clients is None else clients
        opened = ClientLedgers(place, delta=examples_delta or delta, read_only=True)
        of_run = replace(stopping, run=run_of(ledger))
        checks += _client_ledgers(opened, rows, manifest, of_run)
    if public_key is not None:
        fault = _wrong_signature(directory, public_key)
        checks.append(FileCheck("signature", fault is None, fault or f"is that of {public_key}"))
    return checks


def _chain(ledger: Ledger) -> str:
    lines = f"{len(ledger.heads)} lines"
    if ledger.ends_incomplete:
        return f"{lines}, the last of which is incomplete and is charged; it has no hash on disk"
    return f"{lines}, final hash {ledger.head}"


def _compare_end(end: End, ledger: Ledger) -> str:
    if end == ledger.end:
        return "names this ledger's final hash and number of lines"
    if ledger.continues(end):
        raise FedsimError(f"it names line {end.lines}; the ledger has {len(ledger.heads)}.")
    raise FedsimError(f"it names {end.lines} lines and final hash {end.head}, not this ledger's.")


def _compare_model(path: Path, ledger: Ledger, manifest: Manifest | None) -> str:
    stored = model_metadata(path)
    try:
        end = End(str(stored["ledger-head"]), int(stored["ledger-lines"]))
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


def _other_files(directory: Path, clients: Path | None, manifest: Manifest) -> Iterator[FileCheck]:
    """Checks of the run's other files, and of its archive, against the manifest."""
    try:
        current = Manifest.of(directory, clients, Fingerprints(directory, read_only=True))
    except (OSError, FedsimError) as error:
        yield FileCheck("files", False, f"they cannot be compared with the manifest: {error}")
        return
    changes = _changes(manifest.hmac, current.hmac)
    for name in KEYED:
        if name in manifest.hmac or name in changes:
            match = "has the HMAC that the manifest names"
            yield FileCheck(name, name not in changes, changes.get(name, match))
    if LEDGER in manifest.hmac and LEDGER in changes and current.ledger == manifest.ledger:
        words = "what its hashes do not cover (notes, a torn line) was changed since the run ended"
        yield FileCheck(LEDGER, False, words)
    configs = [name for name in _changes(manifest.sha256, current.sha256) if "/" in name]
    if changed := sorted([*configs, *_changes(manifest.archive, current.archive)]):
        yield FileCheck("archive", False, f"missing, changed or added: {', '.join(changed)}")
    elif manifest.archive:
        many = f"{len(manifest.archive)} ledger{'s' * (len(manifest.archive) > 1)} of earlier runs"
        yield FileCheck("archive", True, f"holds the {many} that the manifest names")


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, str]:
    """What happened to each file that is not as it was when the run ended, by name."""
    return {
        name: f"{'missing' if name not in now else 'changed' if name in before else 'added'} "
        "since the run ended"
        for name in {*before, *now}
        if before.get(name) != now.get(name)
    }


def _compare_metrics(
    rows: Sequence[dict[str, str]], ledger: Ledger, delta: float, stopping: Stopping
) -> str:
    """Compare metrics.csv's rounds, and the epsilon spent after each, with the ledger.

    A row was written when its round's last line was the ledger's last line, apart from lines of
    later rounds that a resumed run found there already.
    """
    entries = [entry for entry in ledger.history.of_this_run if entry.round is not None]
    last = entries[-1].round if entries else 0
    reached = int(rows[-1]["round"]) if rows else 0
    if reached != last:
        raise FedsimError(
            f"the rows end at round {reached}, and the ledger at round {last}; rows are "
            "missing or of another run (one that was interrupted is complete once it is resumed)."
        )
    total = ledger.epsilon(delta)
    summary = f"{len(rows)} row{'s' * (len(rows) != 1)} up to round {last}"
    if math.isinf(total):
        return summary
    stated = total
    is_torn = any(entry.kind == "torn" for entry in ledger.entries)
    by_round = {int(row["round"]): row for row in rows}
    for number, spent in _spent_by_round(ledger, delta, stopping):
        row = by_round.get(number)
        if row is None or not row.get("epsilon"):
            raise FedsimError(f"round {number} has no row with an epsilon.")
        stated = float(row["epsilon"])
        # A torn line may have been charged when a row was written, and settled since.
        upper = max(total, spent) if is_torn else spent
        if not spent * (1 - 1e-6) <= stated <= upper * (1 + 1e-6):
            raise FedsimError(
                f"epsilon is {stated:.6g} after round {number}; by the ledger it is {spent:.6g}."
            )
    return f"{summary}, epsilon {stated:.6g}"


def _spent_by_round(
    ledger: Ledger, delta: float, stopping: Stopping
) -> Iterator[tuple[int, float]]:
    """Rounds of this run, about `_COMPUTED` of them, and epsilon as of the last line of each.

    If releases may end the run, only the last round: epsilon then depends on the planned number
    of rounds, which may have been raised after earlier rows were written.
    """
    history = History(ledger.history.archived)
    entries = ledger.history.of_this_run
    last = {entry.round: index for index, entry in enumerate(entries) if entry.round is not None}
    rounds = sorted(last)
    computed = set(rounds[-1:])
    if not stopping.possible_ends:
        computed |= set(rounds[:: max(1, len(rounds) // _COMPUTED)])
    for index, entry in enumerate(entries):
        history.add_unchecked(entry)
        if entry.round in computed and last[entry.round] == index:
            yield entry.round, stopping.after(entry.round).epsilon(history, delta)


def _client_ledgers(
    clients: ClientLedgers,
    rows: Sequence[dict[str, str]],
    manifest: Manifest | None,
    stopping: Stopping,
) -> Iterator[FileCheck]:
    """Checks of the clients' ledgers, which later runs may have extended, but not shortened."""
    ledgers = clients.with_releases()
    named = {} if manifest is None else manifest.clients
    place = clients.directory or Path()
    missing = [name for name in named if not (place / f"client-{name}.jsonl").is_file()]
    are_extended = manifest is None
    try:
        if missing:
            raise FedsimError(
                f"the manifest names ledgers of clients {', '.join(missing)}, which are missing in "
                f"{place}; restore them, there or in client.state-dir."
            )
        for client, end in named.items():
            clients.of(int(client)).check_continues(end)
            are_extended |= clients.of(int(client)).end != end
        summary = f"{len(ledgers)} ledgers in {place}"
        yield FileCheck("clients' chains", True, summary)
    except (FedsimError, ValueError) as error:
        yield FileCheck("clients' chains", False, str(error))
    stated = [float(row["example-epsilon"]) for row in rows if row.get("example-epsilon")]
    if not stated or not ledgers:
        return
    spent = clients.epsilon(stopping=stopping.after(int(rows[-1]["round"])))
    # Later runs may only have added to what was spent.
    passed = stated[-1] <= spent * (1 + 1e-6)
    passed &= are_extended or math.isclose(stated[-1], spent, rel_tol=1e-6)
    summary = f"the examples' epsilon is {stated[-1]:.6g}"
    yield FileCheck(
        "metrics", passed, summary if passed else f"{summary}; by their ledgers it is {spent:.6g}."
    )


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
