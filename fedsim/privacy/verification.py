"""Whether what a run left behind fits together: ledgers, model, config, metrics and signature."""

from __future__ import annotations

import csv
import io
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.privacy.client_ledgers import ClientLedgers
from fedsim.privacy.digest import Fingerprints
from fedsim.privacy.ledger import Ledger
from fedsim.privacy.manifest import KEYED, MANIFEST, End, Manifest, check_signature, file_digest

METADATA = "fedsim"
"""Name of the entry in a model file's metadata that is about its ledger."""

# A header of a model file beyond this is no header; so says the format itself.
LARGEST_HEADER = 100_000_000
_METRICS = KEYED[0]

# Rows whose epsilon is computed again, evenly spread; the manifest covers all of them.
_COMPUTED = 200


@dataclass(frozen=True)
class Verified:
    """One thing that was looked at.

    Attributes
    ----------
    subject : str
    holds : bool
    seen : str
    """

    subject: str
    holds: bool
    seen: str


def verify(
    directory: Path,
    delta: float,
    clients: Path | None = None,
    public_key: Path | None = None,
    *,
    examples_delta: float | None = None,
    stopping: Stopping = FIXED,
) -> list[Verified]:
    """Compare what is in a run's directory with its ledger, its manifest and a signature.

    There is a line for the chain, the manifest, the model, the config and the metrics whatever is
    there; what is missing, unreadable or shorter than the ledger fails.

    Parameters
    ----------
    directory : path
        Of the run.
    delta : float
        At which its metrics say epsilon.
    clients : path, optional
        Where its clients' ledgers are.
    public_key : path, optional
        Whose signature there must be.
    examples_delta : float, optional
        At which they say the examples' epsilon, if at another delta.
    stopping : Stopping
        Before the first round.

    Raises
    ------
    FedsimError
        If a ledger cannot be read.
    """
    ledger = Ledger.read(directory / "ledger.jsonl")
    checks = [Verified("chain", True, f"{len(ledger.heads)} lines, head {ledger.head}")]
    manifest = None
    try:
        manifest = Manifest.read(directory / MANIFEST)
        checks.append(_of_ledger("manifest", manifest.ledger, ledger))
    except FedsimError as error:
        checks.append(Verified("manifest", False, f"{directory / MANIFEST}: {error}"))
    checks.append(_of_model(directory / "model.safetensors", ledger, manifest))
    checks.append(_of_config(directory / "config.toml", manifest))
    try:
        rows = _rows(directory / _METRICS)
        checks.append(_of_metrics(rows, ledger, delta, stopping))
    except FedsimError as error:
        rows = []
        checks.append(Verified("metrics", False, f"{directory / _METRICS}: {error}"))
    if manifest is not None:
        checks += _of_others(directory, clients, manifest)
    if clients is not None and clients.is_dir():
        delta = delta if examples_delta is None else examples_delta
        checks += _of_clients(clients, delta, rows, manifest, stopping)
    if public_key is not None:
        checks.append(_of_signature(directory, public_key))
    return checks


def _of_ledger(subject: str, end: End, ledger: Ledger) -> Verified:
    if (end.head, end.lines) == (ledger.head, len(ledger.heads)):
        return Verified(subject, True, "names this ledger's head and number of lines")
    if end.head in ledger.heads:
        return Verified(
            subject, False, f"names line {end.lines}; the ledger has {len(ledger.heads)}"
        )
    return Verified(
        subject, False, f"names {end.lines} lines and the head {end.head}, which is not in it"
    )


def _of_model(path: Path, ledger: Ledger, manifest: Manifest | None) -> Verified:
    subject = "model"
    try:
        stored = model_metadata(path)
        end = End(str(stored["ledger-head"]), int(stored["ledger-lines"]))
    except (FedsimError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, FedsimError) else "it names no ledger."
        return Verified(subject, False, f"{path}: {reason}")
    of_ledger = _of_ledger(subject, end, ledger)
    return _of_file(subject, path, manifest, of_ledger.seen) if of_ledger.holds else of_ledger


def _of_config(path: Path, manifest: Manifest | None) -> Verified:
    try:
        tomllib.loads(regular_files.read_text(path))
    except FileNotFoundError:
        return Verified("config", False, f"{path}: there is none; put back what the run wrote.")
    except (OSError, ValueError):
        return Verified("config", False, f"{path}: it cannot be read as TOML.")
    return _of_file("config", path, manifest, "can be read")


def _of_file(subject: str, path: Path, manifest: Manifest | None, seen: str) -> Verified:
    """Whether a file that can be read is the one that the run wrote."""
    if manifest is None:
        return Verified(subject, True, seen)
    if file_digest(path) != manifest.sha256.get(path.name):
        return Verified(subject, False, f"{path} was changed or replaced after the run wrote it")
    return Verified(subject, True, f"{seen}; its bytes are those that the manifest names")


def _of_others(directory: Path, clients: Path | None, manifest: Manifest) -> Iterator[Verified]:
    """What a run wrote beside its model and its config, and what it found in the archive."""
    try:
        now = Manifest.of(directory, clients, Fingerprints(directory, read_only=True))
    except (OSError, FedsimError) as error:
        yield Verified("files", False, f"they cannot be compared with the manifest: {error}")
        return
    for name in KEYED:
        before, after = manifest.hmac.get(name), now.hmac.get(name)
        if before == after and before is not None:
            yield Verified(name, True, "is the file that the manifest names")
        elif before != after:
            what = "is missing" if after is None else "was added" if before is None else "is other"
            yield Verified(name, False, f"{what} since the run ended")
    beside = {name for name in (*manifest.sha256, *now.sha256) if "/" in name}
    changed = [name for name in beside if manifest.sha256.get(name) != now.sha256.get(name)]
    ends = {*manifest.archive, *now.archive}
    changed += [name for name in ends if manifest.archive.get(name) != now.archive.get(name)]
    if changed:
        yield Verified("archive", False, f"missing, other or added: {', '.join(sorted(changed))}")
    elif ends:
        many = f"{len(ends)} ledger{'s' * (len(ends) > 1)} of earlier runs"
        yield Verified("archive", True, f"holds the {many} that the manifest names")


def _of_metrics(
    rows: Sequence[dict[str, str]], ledger: Ledger, delta: float, stopping: Stopping
) -> Verified:
    """What metrics.csv says of rounds, and of what had been spent after each, against the ledger.

    A row was written when the last line of its round was the ledger's last, but for later rounds
    of which a resumed run found lines already.
    """
    subject = "metrics"
    made = [entry for entry in ledger.history.of_this_run if entry.round is not None]
    last = made[-1].round if made else 0
    if not rows or int(rows[-1]["round"]) != last:
        reached = f"round {rows[-1]['round']}" if rows else "no round"
        return Verified(
            subject,
            False,
            f"the last row is of {reached}, and the ledger's last line of round {last}; rows are "
            "missing or of another run (one that was interrupted is whole once it is resumed)",
        )
    private = math.isfinite(ledger.epsilon(delta))
    total = shown = ledger.epsilon(delta) if private else math.inf
    by_round = {int(row["round"]): row for row in rows}
    for number, spent in _spent_by_round(ledger, delta, stopping) if private else ():
        row = by_round.get(number)
        if row is None or not row.get("epsilon"):
            return Verified(subject, False, f"round {number} has no row with an epsilon")
        shown = float(row["epsilon"])
        torn = any(entry.kind == "torn" for entry in ledger.entries)
        most = max(total, spent) if torn else spent
        if not spent * (1 - 1e-6) <= shown <= most * (1 + 1e-6):
            stored = f"epsilon {shown:.6g} after round {number}"
            return Verified(subject, False, f"{stored}; the ledger says {spent:.6g}")
    epsilon = f", epsilon {shown:.6g}" if private else ""
    return Verified(subject, True, f"{len(rows)} rows up to round {last}{epsilon}")


def _spent_by_round(
    ledger: Ledger, delta: float, stopping: Stopping
) -> Iterator[tuple[int, float]]:
    """Rounds of this run, at most `_COMPUTED`, and epsilon as of the last line of each.

    Of a run that releases may end only the last: earlier rows may be from before its number of
    rounds was raised, on which what they say depends.
    """
    spent = Accountant(entry.event for entry in ledger.history.before)
    entries = ledger.history.of_this_run
    last = {entry.round: index for index, entry in enumerate(entries) if entry.round is not None}
    rounds = sorted(last)
    computed = set(rounds[-1:])
    if not stopping.times:
        computed |= set(rounds[:: max(1, len(rounds) // _COMPUTED)])
    for index, entry in enumerate(entries):
        spent.add(entry.event)
        if entry.round in computed and last[entry.round] == index:
            yield entry.round, stopping.after(entry.round).epsilon(spent, entry.event, delta)


def _of_clients(
    directory: Path,
    delta: float,
    rows: Sequence[dict[str, str]],
    manifest: Manifest | None,
    stopping: Stopping,
) -> Iterator[Verified]:
    """Clients' ledgers, which other runs may have continued, never shortened, since."""
    clients = ClientLedgers(directory, delta=delta, read_only=True)
    ledgers = clients.everyone()
    unchanged = manifest is not None
    try:
        for client, end in {} if manifest is None else manifest.clients.items():
            clients.of(int(client)).restore({"head": end.head, "lines": end.lines})
            unchanged &= len(clients.of(int(client)).heads) == end.lines
        yield Verified("clients' chains", True, f"{len(ledgers)} ledgers in {directory}")
    except (FedsimError, ValueError) as error:
        yield Verified("clients' chains", False, str(error))
    shown = [float(row["example-epsilon"]) for row in rows if row.get("example-epsilon")]
    if not shown or not ledgers:
        return
    # A budget that ends a run is the server's.
    stopping = replace(stopping.after(int(rows[-1]["round"])), max_epsilon=None)
    worst = clients.worst(stopping).history
    spent = stopping.epsilon(worst.accountant, worst.last_event, delta)
    stored = f"examples' epsilon {shown[-1]:.6g}"
    holds = shown[-1] <= spent * (1 + 1e-6)
    holds &= not unchanged or math.isclose(shown[-1], spent, rel_tol=1e-6)
    yield Verified("metrics", holds, stored if holds else f"{stored}; the ledgers say {spent:.6g}")


def _rows(path: Path) -> list[dict[str, str]]:
    """Rows of a metrics.csv that is whole: every number legible, one row a round.

    Raises
    ------
    FedsimError
        If it is not.
    """
    try:
        text = regular_files.read_bytes(path).decode()
        table = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except FileNotFoundError:
        raise FedsimError("there is none; put back what the run wrote.") from None
    except (OSError, ValueError, csv.Error):
        raise FedsimError("it cannot be read as CSV.") from None
    if not table or "round" not in table[0] or not text.endswith("\n"):
        raise FedsimError("it is cut off, or not one that a run wrote.")
    header, *lines = table
    if any(len(line) != len(header) for line in lines):
        raise FedsimError("a row has not as many numbers as there are columns.")
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    try:
        _ = [float(number) for line in lines for number in line if number]
        rounds = [int(row["round"]) for row in rows]
    except ValueError:
        raise FedsimError("something in it is no number.") from None
    first = 0 if rounds[:1] == [0] else 1
    if rounds != list(range(first, first + len(rounds))):
        raise FedsimError("its rounds do not follow one another; a row is missing or doubled.")
    return rows


def _of_signature(run: Path, public_key: Path) -> Verified:
    try:
        text = regular_files.read_text(run / "ledger.sig")
        manifest = regular_files.read_bytes(run / MANIFEST)
    except (OSError, UnicodeDecodeError):
        return Verified(
            "signature", False, f"there is none, or no manifest that it is of, in {run}"
        )
    wrong = check_signature(text, public_key, manifest)
    return Verified("signature", wrong is None, wrong or f"is that of {public_key}")


def model_metadata(path: Path) -> dict[str, Any]:
    """What a model file says of the run that made it; torch is not needed for it.

    Raises
    ------
    FedsimError
        If it is no model file, or of no run.
    """
    try:
        with open(path, "rb", opener=regular_files.opener) as file:
            size = int.from_bytes(file.read(8), "little")
            if size > LARGEST_HEADER:
                raise ValueError(size)
            header = json.loads(file.read(size))
        metadata = json.loads(header["__metadata__"][METADATA])
    except FileNotFoundError:
        raise FedsimError(
            "there is none; a run that was killed has one once it is resumed."
        ) from None
    except OSError as error:
        raise FedsimError(f"it cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FedsimError("it is no model of a run that fedsim made.") from None
    if not isinstance(metadata, dict):
        raise FedsimError("it is no model of a run that fedsim made.")
    return metadata
