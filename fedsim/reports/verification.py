"""Verify a run's directory, its report included, by recomputing what the files claim."""

from __future__ import annotations

import html
import re
from pathlib import Path

from fedsim import regular_files
from fedsim.config.run_config import read_config
from fedsim.errors import FedsimError
from fedsim.privacy import Level
from fedsim.privacy.manifest import MANIFEST, Manifest
from fedsim.privacy.verification import FileCheck, run_check, verify
from fedsim.reports.run_page import run_page
from fedsim.runs.record import RunRecord
from fedsim.runs.run_ledgers import RunLedgers, delta_of, example_delta_of, ledger_paths
from fedsim.runs.run_lock import run_id

NOT_VERIFIED = (
    "Not covered: checkpoint/, which a resume checks itself; summary.json, but for what the report "
    "shows of it; clients/; and files that are not the run's."
)
"""What a verification of a run says nothing of."""

# The ledger's path is left out of the comparison: the run may have been moved.
_PLACE = re.compile(r"Ledger: [^<]*")


def verify_run(
    run: Path, public_key: Path | None = None, delta: float | None = None
) -> list[FileCheck]:
    """Checks of `verify` on a run's directory, at its config's deltas, and a check of its report.

    Parameters
    ----------
    run : path
        The run's directory.
    public_key : path, optional
        Key with which the signature of the manifest must verify.
    delta : float, optional
        Replaces the config's.

    Raises
    ------
    FedsimError
        If a ledger cannot be read.
    """
    try:
        config = read_config(run / "config.toml")
    except (OSError, FedsimError):
        config = {}  # reported by its own check
    paths = ledger_paths(config, run)
    deltas: dict[Level, float]
    deltas = {"client": delta_of(config), "example": example_delta_of(config)}
    checks = verify(
        run,
        {level: path for level, path in paths.items() if level == "client" or path.is_file()},
        deltas if delta is None else dict.fromkeys(deltas, delta),
        run=run_id(run),
        public_key=public_key,
    )
    return [*checks, run_check("report", lambda: _compare_report(run), run / "report.html")]


def _compare_report(run: Path) -> str:
    """Check that report.html follows from the other files; returns the finding.

    Raises
    ------
    FedsimError
        If it is missing or differs.
    """
    try:
        # As it was when the run ended: other runs may have extended its ledgers since.
        ends = Manifest.read(run / MANIFEST).ledgers if (run / MANIFEST).is_file() else None
        record = RunRecord.read(run, RunLedgers.read(run, ends=ends))
        page = regular_files.read_text(run / "report.html")
    except FileNotFoundError:
        if (run / "summary.json").exists():
            raise FedsimError(f"there is none; `fedsim report {run}` makes one.") from None
        return "there is none yet"
    except (OSError, ValueError) as error:
        raise FedsimError(f"it cannot be compared with the other files: {error}") from None
    if record.summary:
        agrees = _PLACE.sub("", page) == _PLACE.sub("", run_page(record))
    else:  # the page of an interrupted run may contain more than its files
        sentences = [line for s in record.statements for line in s.sentences()]
        agrees = all(_PLACE.sub("", line) in html.unescape(page) for line in sentences)
    if agrees:
        return "follows from the other files"
    raise FedsimError(
        f"it does not follow from the other files; `fedsim report {run}` makes one that does; a "
        "page of another version of fedsim may differ in its words."
    )
