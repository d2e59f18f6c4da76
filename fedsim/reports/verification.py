"""Whether a run fits together, its page included: what it claims is computed again."""

from __future__ import annotations

import html
import re
from pathlib import Path

from fedsim import regular_files
from fedsim.config import Scalar
from fedsim.config.plan import stopping
from fedsim.errors import FedsimError
from fedsim.privacy.verification import Verified, verify
from fedsim.reports.run_page import run_page
from fedsim.runs.record import RunRecord, clients_ledgers, read_config

# Where a ledger lies may have changed since, and is no claim.
_PLACE = re.compile(r"Ledger: [^<]*")


def verify_run(
    run: Path, public_key: Path | None = None, delta: float | None = None
) -> list[Verified]:
    """What `verify` finds in a run's directory, at the deltas of its config, and its report.

    Parameters
    ----------
    run : path
    public_key : path, optional
        Whose signature there must be.
    delta : float, optional
        In the place of the config's.

    Raises
    ------
    FedsimError
        If a ledger cannot be read.
    """
    try:
        config = read_config(run / "config.toml")
    except (OSError, FedsimError):
        config = {}  # its own line says so
    checks = verify(
        run,
        _delta(config, "noise.delta") if delta is None else delta,
        clients_ledgers(run, config),
        public_key,
        examples_delta=_delta(config, "client.noise.delta"),
        stopping=stopping(config),
    )
    return [*checks, _report(run)]


def _report(run: Path) -> Verified:
    """Whether report.html says what the other files say."""
    path = run / "report.html"
    try:
        record = RunRecord.read(run)
        page = regular_files.read_text(path)
    except FileNotFoundError:
        ended = (run / "summary.json").exists()
        seen = (
            f"there is none; `fedsim report {run}` makes one" if ended else "there is none as yet"
        )
        return Verified("report", not ended, seen)
    except (OSError, ValueError) as error:
        return Verified("report", False, f"it cannot be compared with the other files: {error}")
    if record.summary:
        holds = _PLACE.sub("", page) == _PLACE.sub("", run_page(record))
    else:  # of a run that was interrupted the page may say more than its files
        sentences = [line for s in record.statements for line in s.sentences()]
        holds = all(_PLACE.sub("", line) in html.unescape(page) for line in sentences)
    if holds:
        return Verified("report", True, "says what follows from the other files")
    return Verified(
        "report",
        False,
        f"{path} does not say what follows from the other files; `fedsim report {run}` makes one "
        "that does, and one of another version of fedsim may differ in its words",
    )


def _delta(config: dict[str, Scalar], key: str) -> float:
    value = config.get(key)
    return float(value) if isinstance(value, int | float) and 0 < value < 1 else 1e-5
