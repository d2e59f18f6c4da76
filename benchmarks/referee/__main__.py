"""Audit released packages, each in an environment of its own; print and write a table.

    python -m benchmarks.referee                  # all rows; about a minute each
    python -m benchmarks.referee --only "opacus|own loop" --seeds 5

Audits made with --write NAME are stored in build/referee/NAME.jsonl and not repeated. Environments
are created in build/referee from the package index, except for packages that this environment has
in a suitable version, which a path file adds. A row is one target at one version; its claim is
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
from fedsim.audit import TargetClaim, Verdict, audit_target, open_target
from fedsim.errors import FedsimError
from fedsim.federation.engines.process import use_one_thread

HERE = Path(__file__).parent
ENVIRONMENTS = Path("build/referee")
RESULTS = HERE.parent / "results"


@dataclass(frozen=True)
class Row:
    """A target at a version, and its claim.

    Attributes
    ----------
    name : str
    package, version : str
        The package; an empty version means this environment's.
    target : str
        ``file:callable`` in ``targets``.
    claim : mapping of str to value
        Fields of `TargetClaim`.
    source : str
        Where the claim is documented.
    documented : tuple of str
        Causes of a violation that the package's documentation discloses.
    """

    name: str
    package: str
    version: str
    target: str
    claim: dict[str, Any]
    source: str
    documented: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Package and version."""
        return f"{self.package} {self.version}".strip()

    @property
    def requirement(self) -> str:
        """The requirement for pip; empty for this environment."""
        return f"{self.package}=={self.version}" if self.version else ""


def rows(pattern: str) -> Iterator[Row]:
    """Rows of table.toml whose package, version and name match a regular expression."""
    for entry in tomllib.loads((HERE / "table.toml").read_text())["row"]:
        versions = entry.pop("versions")
        entry["documented"] = tuple(entry.get("documented", ()))
        for version in versions:
            row = Row(**entry, version=version)
            if re.search(pattern, f"{row.package} {row.version} {row.name}"):
                yield row


def interpreter(row: Row) -> str:
    """The interpreter of the row's environment."""
    if not row.requirement:
        return sys.executable
    directory = ENVIRONMENTS / row.requirement.replace("==", "-")
    return environment(directory, row.requirement, dependencies=row.package != "opacus")


def audited(row: Row, seed: int, seconds: float, runs: int) -> Verdict:
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
    with open_target(name, interpreter(row)) as target:
        first = 1 + 1_000_000_000 * seed
        return audit_target(target, claim, seconds=seconds, runs=runs, seed=first)


def causes(verdict: Verdict) -> dict[str, str]:
    """What was measured, by its likely cause; variants of one cause are listed once."""
    return {finding.cause: finding.measured for finding in reversed(verdict.failed)}


def result(row: Row, seed: int, seconds: float, runs: int) -> dict[str, Any]:
    """Result of one audit, for the table."""
    base: dict[str, Any] = {"row": row.label, "name": row.name}
    try:
        verdict = audited(row, seed, seconds, runs)
    except FedsimError as error:
        return base | {"verdict": "not tested", "why": str(error), "causes": {}}
    except subprocess.CalledProcessError as error:
        why = f"{row.requirement} cannot be installed: {str(error.stderr).strip()[-200:]}"
        return base | {"verdict": "not tested", "why": why, "causes": {}}
    found = causes(verdict)
    held = "held" if verdict.accepted else "as documented"
    violated = not verdict.accepted and not (found and found.keys() <= set(row.documented))
    return base | {
        "verdict": "violated" if violated else held,
        "epsilon": verdict.claim.epsilon,
        "at-least": verdict.epsilon_bound,
        "causes": found
        or ({} if verdict.accepted else {"two worlds": ", ".join(verdict.refuting)}),
    }


def markdown(results: list[dict[str, Any]]) -> str:
    """The table; a row audited with several seeds shows its worst verdict, and how often."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in results:
        rows.setdefault((one["row"], one["name"]), []).append(one)
    alarms = sum(one["verdict"] != "held" for one in results)
    effort = " or ".join(sorted({one["effort"] for one in results}))
    words = f"{len(results)} audits of {len(rows)} targets, {effort} each; {alarms} do not hold."
    head = (
        "| package | target | verdict | epsilon claimed | at least | likely causes, as measured |"
    )
    text = [words, "", head, "| --- | --- | --- | --- | --- | --- |"]
    for one in map(_worst, rows.values()):
        words = "; ".join(f"**{cause}** ({measured})" for cause, measured in one["causes"].items())
        figures = [f"{one[key]:.3g}" if key in one else "" for key in ("epsilon", "at-least")]
        cells = [one["row"], one["name"], one["verdict"], *figures, words or one.get("why", "")]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def _worst(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    order = ("held", "as documented", "violated", "not tested")
    worst = max(seeds, key=lambda one: (order.index(one["verdict"]), one.get("at-least", 0)))
    alike = sum(one["verdict"] == worst["verdict"] for one in seeds)
    of = f" ({alike} of {len(seeds)})" if len(seeds) > 1 else ""
    return worst | {"verdict": worst["verdict"] + of}


def main() -> None:
    """Audit all rows, or those that match a pattern."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="a regular expression for package, version, name"
    )
    parser.add_argument("--seeds", type=int, default=1, help="audits of each row")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each audit, about")
    parser.add_argument(
        "--runs", type=int, default=0, help="of each attack; as many as fit in --seconds if 0"
    )
    parser.add_argument(
        "--write",
        metavar="NAME",
        help="write benchmarks/results/NAME.md; an earlier call of this name is continued",
    )
    options = parser.parse_args()
    use_one_thread()
    log = ENVIRONMENTS / f"{options.write}.jsonl" if options.write else None
    results = []
    if log and log.exists():
        results = [json.loads(line) for line in log.read_text().splitlines()]
    finished = {(one["row"], one["name"], one["seed"]) for one in results}
    effort = f"{options.runs} runs of each side of an attack"
    if not options.runs:
        effort = f"about {options.seconds:g} s"
    for row in rows(options.only):
        for seed in range(options.seeds):
            if (row.label, row.name, seed) in finished:
                continue
            one = result(row, seed, options.seconds, options.runs)
            results.append(one | {"seed": seed, "effort": effort})
            print(json.dumps(results[-1]), flush=True)
            if log:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a") as lines:
                    lines.write(json.dumps(results[-1]) + "\n")
    order = {(row.label, row.name): index for index, row in enumerate(rows(""))}
    results.sort(key=lambda one: order.get((one["row"], one["name"]), len(order)))
    if options.write:
        (RESULTS / f"{options.write}.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
