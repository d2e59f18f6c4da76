"""Whether what a run left behind fits together: ledgers, model, metrics and signature."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.client_ledgers import ClientLedgers
from fedsim.privacy.ledger import Ledger
from fedsim.privacy.parallel import dearest
from fedsim.privacy.signing import check_signature
from fedsim.privacy.stopping import FIXED, Stopping

__all__ = ["METADATA", "Verified", "model_metadata", "verify"]

METADATA = "fedsim"
"""Name of the entry in a model file's metadata that is about its ledger."""

# A header of a model file beyond this is no header; so says the format itself.
LARGEST_HEADER = 100_000_000


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
    """Hold a run's ledger against its model, its metrics, its clients' ledgers and a signature.

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
        Whether what was released might end the run, as its config says.

    Raises
    ------
    FedsimError
        If a ledger cannot be read.
    """
    ledger = Ledger.read(directory / "ledger.jsonl")
    lines, head = len(ledger.heads), ledger.head
    checks = [Verified("chain", True, f"{lines} lines, head {head}")]
    checks.append(_of_model(directory / "model.safetensors", ledger))
    checks += _of_metrics(directory / "metrics.csv", ledger, delta, stopping)
    if clients is not None and clients.is_dir():
        delta = delta if examples_delta is None else examples_delta
        ledgers = ClientLedgers(clients, delta=delta, read_only=True).everyone()
        checks.append(Verified("clients' chains", True, f"{len(ledgers)} ledgers in {clients}"))
        checks += _of_client_metrics(directory / "metrics.csv", ledgers, delta, stopping)
    if public_key is not None:
        checks.append(_of_signature(directory / "ledger.sig", public_key, head, lines))
    return checks


def _of_model(path: Path, ledger: Ledger) -> Verified:
    subject = "model"
    try:
        stored = model_metadata(path)
        head, lines = str(stored["ledger-head"]), int(stored["ledger-lines"])
    except (FedsimError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, FedsimError) else "it names no ledger."
        return Verified(subject, False, f"{path}: {reason}")
    if (head, lines) == (ledger.head, len(ledger.heads)):
        return Verified(subject, True, "names this ledger's head and number of lines")
    if head in ledger.heads:
        return Verified(subject, False, f"names line {lines}; the ledger has {len(ledger.heads)}")
    return Verified(subject, False, f"names {lines} lines and the head {head}, which is not in it")


def _of_metrics(path: Path, ledger: Ledger, delta: float, stopping: Stopping) -> Iterator[Verified]:
    """What metrics.csv says was spent up to its last round, against the lines up to it."""
    rows = [row for row in _rows(path) if row.get("epsilon")]
    if not rows:
        return
    try:
        last, shown = int(rows[-1]["round"]), float(rows[-1]["epsilon"])
    except (ValueError, KeyError, TypeError):
        yield Verified("metrics", False, f"{path} has no round and epsilon in its last row")
        return
    late = {
        entry.identity or id(entry) for entry in ledger.of_this_run if (entry.round or 0) > last
    }
    upto = [entry for entry in ledger.charged if (entry.identity or id(entry)) not in late]
    accountant, event = Accountant(entry.event for entry in upto), upto[-1].event if upto else None
    spent = stopping.after(last).epsilon(accountant, event, delta)
    holds = shown == spent or math.isclose(shown, spent, rel_tol=1e-6)
    stored = f"epsilon {shown:.6g} after round {last}"
    yield Verified("metrics", holds, stored if holds else f"{stored}; the ledger says {spent:.6g}")


def _of_client_metrics(
    path: Path, ledgers: Sequence[Ledger], delta: float, stopping: Stopping
) -> Iterator[Verified]:
    """What metrics.csv says that examples had spent: ledgers may have gone on, not back."""
    shown = [float(row["example-epsilon"]) for row in _rows(path) if row.get("example-epsilon")]
    if shown and ledgers:
        worst = dearest(ledgers, delta, stopping)
        spent = stopping.epsilon(worst.accountant(), worst.last_event, delta)
        stored = f"examples' epsilon {shown[-1]:.6g}"
        holds = shown[-1] <= spent * (1 + 1e-6)
        yield Verified(
            "metrics", holds, stored if holds else f"{stored}; the ledgers say {spent:.6g}"
        )


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(regular_files.read_text(path).splitlines()))
    except (OSError, ValueError, csv.Error):
        return []


def _of_signature(path: Path, public_key: Path, head: str, lines: int) -> Verified:
    try:
        text = regular_files.read_text(path)
    except (OSError, UnicodeDecodeError):
        return Verified("signature", False, f"there is none at {path}")
    wrong = check_signature(text, public_key, head, lines)
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
