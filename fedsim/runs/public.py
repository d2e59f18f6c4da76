"""A bundle to publish: what the guarantee covers, and nothing that only the operator knows.

::

    model.safetensors   the last global model
    statement.txt       the privacy statements in words
    statement.json      the same for machines, with the ledger's head
    config.toml         what bears on the releases

Left out: metrics, ledgers, times, who took part, why clients failed, paths, engines, and the seed
where noise follows from it. Where whole clients are protected and their examples too, also what the
examples have cost: that follows from who took part, and from how many examples they have.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save_file

from fedsim.config import RunConfig, Scalar
from fedsim.config.digest import affects_release
from fedsim.errors import FedsimError
from fedsim.privacy import Statement
from fedsim.privacy.verification import METADATA
from fedsim.runs.saved import SavedRun

__all__ = ["publish"]

# These hold paths on the operator's machine: of a path, the last part is kept.
_PATHS = ("data.name", "model.weights", "client.work", "devices.trace")

_EXAMPLES_TOO = (
    "Clients protect their examples too: what that has cost follows from who took part, which is "
    "not told here."
)


def publish(saved: SavedRun, out: Path) -> Path:
    """Write the bundle of a private run.

    Parameters
    ----------
    saved : SavedRun
    out : path
        A directory that does not exist.

    Raises
    ------
    FedsimError
        If the run has no guarantee, or ``out`` is there.
    """
    covered = [s for s in saved.record.statements if s.private and s.cost.releases]
    statements = [s for s in covered if s.level == "client"] or covered
    if not statements:
        raise FedsimError(
            f"{saved.directory.path} has no guarantee of privacy: nothing of it is covered; "
            "--public is for runs with a mechanism and noise."
        )
    if os.path.lexists(out):
        raise FedsimError(f"--out {out} is there already; choose another directory.")
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True)
        # Without the metadata that the run gave it: a release digest can be searched for its seed.
        about = [{"head": s.head, "lines": s.lines, "level": s.level} for s in statements]
        save_file(
            saved.weights,
            part / "model.safetensors",
            metadata={METADATA: json.dumps(about, sort_keys=True)},
        )
        told = ["\n".join(_sentences(s)) for s in statements]
        told += [_EXAMPLES_TOO] if statements != covered else []
        (part / "statement.txt").write_text("\n\n".join(told) + "\n", encoding="utf-8")
        facts = [{k: v for k, v in s.to_dict().items() if k != "ledger"} for s in statements]
        (part / "statement.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        simulated = any(statement.simulated for statement in statements)
        settings = tomli_w.dumps(_public_config(saved.config, simulated))
        (part / "config.toml").write_text(settings, encoding="utf-8")
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _sentences(statement: Statement) -> list[str]:
    """The statement without where its ledger lies on the operator's machine."""
    return [line for line in statement.sentences() if not line.startswith("Ledger: ")]


def _public_config(config: RunConfig, simulated: bool) -> dict[str, Any]:
    """What bears on the releases: what a new key says does not is left out by itself."""
    tree: dict[str, Any] = {"title": config.title, "rounds": config.rounds}
    for key, value in config.to_run_config().items():
        if not affects_release(key) or (simulated and key == "seed"):
            continue
        *tables, last = key.split(".")
        branch = tree
        for table in tables:
            branch = branch.setdefault(table, {})
        branch[last] = _last_part(value) if key in _PATHS else value
    return tree


def _last_part(value: Scalar) -> Scalar:
    return Path(value).name if isinstance(value, str) and "/" in value else value
