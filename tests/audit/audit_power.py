"""Detection and false-alarm rates of the white-box audit, on planted bugs and on honest configs.

    PYTHONPATH=tests/audit python tests/audit/audit_power.py
        [--seeds 6] [--honest 10] [--only WORD] [--checks] [--out FILE]

Every planted bug (`tests/audit/bugs.py`) is audited with the demo's config, at several seeds;
then configs without a bug, to count false alarms. CPU seconds are those of one audit, without
imports. With ``--checks`` the attacks on federations and on one run are left out, and the remaining
checks must refute at the p-value that they would need with them.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from whitebox.config_audit import audit_config

from fedsim.audit.verdict import SHARE_OF_CHECKS
from fedsim.config import RunConfig

ROOT = Path(__file__).parents[2]
HONEST = {
    "demo": [],
    "quantile": ["mechanism.name=quantile-clipping"],
    "adaclip": ["mechanism.name=adaclip"],
    "full participation": ["cohort.name=full", "cohort.rate=", "noise.target-epsilon=8.0"],
    "shares": ["mechanism.name=clipping", "noise.placement=client", "rounds=20"],
    "example level": [
        "mechanism.name=none",
        "noise.target-epsilon=",
        "partition.clients=10",
        "cohort.name=full",
        "cohort.rate=",
        "mechanism.clip-norm=",
        "client.batch-size=20",
        "client.mechanism.name=clipping",
        "client.noise.target-epsilon=4.0",
        "rounds=10",
    ],
}


def main() -> None:
    """Print one line per audit and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--honest", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--named", type=int, default=0, help="only so many bugs")
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import leaks  # noqa: F401 - registers its bugs
    from bugs import BUGS

    lines = ["| planted | caught | seen by | CPU s |", "| --- | --- | --- | --- |"]
    seeds = range(options.first, options.first + options.seeds)
    for name, plant in list(BUGS.items())[: options.named or None]:
        if options.only in name and options.seeds:
            lines.append(_row(name, _audits(plant, [], seeds, options.checks)))
    lines += ["", "| honest | false alarms | seen by | CPU s |", "| --- | --- | --- | --- |"]
    for name, changes in HONEST.items():
        if options.only in name and options.honest:
            seeds = range(options.first, options.first + options.honest)
            lines.append(_row(name, _audits(nullcontext, changes, seeds, options.checks)))
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def _audits(plant, changes, seeds, checks) -> list[tuple[tuple[str, ...], float]]:  # type: ignore[no-untyped-def]
    outcomes = []
    for seed in seeds:
        config = RunConfig.load(ROOT / "experiments" / "demo.toml", changes)
        start = time.process_time()
        with plant():
            try:
                refuting = _refuting(config, seed, checks)
            except Exception as error:
                refuting = (f"an exception: {type(error).__name__}: {error}",)
        outcomes.append((refuting, time.process_time() - start))
        print(f"{len(outcomes)}: {outcomes[-1]}", file=sys.stderr, flush=True)
    return outcomes


def _refuting(config: RunConfig, seed: int, checks: bool) -> tuple[str, ...]:
    if not checks:
        return audit_config(config, seed=seed)[0].refuting
    verdict, _ = audit_config(config, seed=seed, runs=0, canaries=0)
    risk = SHARE_OF_CHECKS * verdict.risk_of_check
    return tuple(str(check) for check in verdict.checks if check.refutes(risk))


def _row(name: str, outcomes: list[tuple[tuple[str, ...], float]]) -> str:
    caught = sum(bool(refuting) for refuting, _ in outcomes)
    seen = sorted({by for refuting, _ in outcomes for by in refuting})
    shown = "; ".join(seen[:3]) + (f"; {len(seen) - 3} more" if len(seen) > 3 else "")
    seconds = sum(seconds for _, seconds in outcomes) / len(outcomes)
    row = f"| {name} | {caught} of {len(outcomes)} | {shown} | {seconds:.1f} |"
    print(row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    main()
