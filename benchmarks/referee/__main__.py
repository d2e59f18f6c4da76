"""Audit released packages, each in an environment of its own; print and write a table.

    python -m benchmarks.referee                  # all rows; about a minute each
    python -m benchmarks.referee --only "opacus|own loop" --seeds 5

Environments are made in build/referee, from the package index, without torch, numpy and what they
share: a path file lends them this environment's. A row is one target at one version; its claim is
what its documentation says.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import environment
from fedsim.audit import Verdict
from fedsim.audit.outside import TargetClaim, audit_target, opened
from fedsim.errors import FedsimError
from fedsim.federation.engines.process import use_one_thread

HERE = Path(__file__).parent
ENVIRONMENTS = Path("build/referee")
TABLE = HERE.parent / "results" / "referee.md"


@dataclass(frozen=True)
class Row:
    """A target at a version, and what it claims.

    Attributes
    ----------
    documented : tuple of str
        Causes that the package's documentation discloses.
    """

    name: str
    package: str
    version: str
    target: str
    claim: dict[str, Any]
    source: str
    documented: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """As pip has it; empty for this environment's."""
        return f"{self.package}=={self.version}" if self.version else ""


def rows(pattern: str) -> Iterator[Row]:
    """Those in whose package, version and name a regular expression is found."""
    for entry in tomllib.loads((HERE / "table.toml").read_text())["row"]:
        versions = entry.pop("versions")
        entry["documented"] = tuple(entry.get("documented", ()))
        for version in versions:
            row = Row(**entry, version=version)
            if re.search(pattern, f"{row.package} {row.version} {row.name}"):
                yield row


def interpreter(row: Row) -> str:
    """That of the row's environment."""
    if not row.requirement:
        return sys.executable
    directory = ENVIRONMENTS / row.requirement.replace("==", "-")
    return environment(directory, row.requirement, dependencies=row.package != "opacus")


def audited(row: Row, seed: int, seconds: float) -> Verdict:
    """The verdict on one row.

    Raises
    ------
    FedsimError
        If it could not be tested.
    subprocess.CalledProcessError
        If its package could not be installed.
    """
    claim = TargetClaim.read(None, {**row.claim, "source": row.source})
    name = f"{HERE / 'targets' / row.target}"
    with opened(name, interpreter(row)) as target:
        return audit_target(target, claim, seconds=seconds, seed=1 + 1_000_000_000 * seed)


def causes(verdict: Verdict) -> dict[str, str]:
    """What was measured, by its likely cause: variants of one cause count once."""
    return {finding.cause: finding.measured for finding in reversed(verdict.failed)}


def line(row: Row, seed: int, seconds: float) -> dict[str, Any]:
    """What one audit says, as the table has it."""
    told: dict[str, Any] = {"row": f"{row.package} {row.version}".strip(), "name": row.name}
    try:
        verdict = audited(row, seed, seconds)
    except FedsimError as error:
        return told | {"verdict": "not tested", "why": str(error), "causes": {}}
    except subprocess.CalledProcessError as error:
        why = f"{row.requirement} cannot be installed: {str(error.stderr).strip()[-200:]}"
        return told | {"verdict": "not tested", "why": why, "causes": {}}
    named = causes(verdict)
    held = "held" if verdict.accepted else "as documented"
    violated = not verdict.accepted and not (named and named.keys() <= set(row.documented))
    return told | {
        "verdict": "violated" if violated else held,
        "epsilon": verdict.claim.epsilon,
        "at-least": verdict.epsilon_bound,
        "causes": named
        or ({} if verdict.accepted else {"two worlds": ", ".join(verdict.refuting)}),
    }


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table; a row that was audited with several seeds has its worst audit, and how many."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for told in lines:
        rows.setdefault((told["row"], told["name"]), []).append(told)
    head = (
        "| package | target | verdict | epsilon claimed | at least | likely causes, as measured |"
    )
    text = [head, "| --- | --- | --- | --- | --- | --- |"]
    for told in map(_worst, rows.values()):
        words = "; ".join(f"**{cause}** ({measured})" for cause, measured in told["causes"].items())
        figures = [f"{told[key]:.3g}" if key in told else "" for key in ("epsilon", "at-least")]
        cells = [told["row"], told["name"], told["verdict"], *figures, words or told.get("why", "")]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def _worst(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    order = ("held", "as documented", "violated", "not tested")
    worst = max(seeds, key=lambda told: (order.index(told["verdict"]), told.get("at-least", 0)))
    alike = sum(told["verdict"] == worst["verdict"] for told in seeds)
    of = f" ({alike} of {len(seeds)})" if len(seeds) > 1 else ""
    return worst | {"verdict": worst["verdict"] + of}


def main() -> None:
    """Audit the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="a regular expression for package, version, name"
    )
    parser.add_argument("--seeds", type=int, default=1, help="audits of each row")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each audit, about")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    given = parser.parse_args()
    use_one_thread()
    lines = []
    for row in rows(given.only):
        for seed in range(given.seeds):
            told = line(row, seed, given.seconds)
            lines.append(told)
            print(json.dumps(told), flush=True)
    if given.write:
        TABLE.write_text(markdown(lines))
    print(markdown(lines))


if __name__ == "__main__":
    main()
