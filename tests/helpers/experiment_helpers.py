"""Run an experiment in a directory of a test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.framework.judge import Judged, judge
from experiments.framework.run import Stored, load, run_members


def run_experiment(
    directory: Path, out: Path, *, data: Path = Path("data"), workers: int = 1, **options: Any
) -> Judged:
    """As `fedsim experiment` does: run missing members, judge, and write the page into ``out``."""
    experiment = load(directory, data=data)
    for _ in run_members(experiment, out, workers=workers, **options):
        pass
    judged = judge(experiment, Stored.load(out), Stored.load(directory))
    judged.write(out)
    return judged


def write_judgement(directory: Path, more: str = "") -> None:
    """Write a judgement with one panel, which has no claims."""
    (directory / "judgement.toml").write_text(
        f'title = "T"\npaper-of = "das"\nabout = "A"\n{more}'
        '[[panels]]\nname = "Fig. 1"\nshows = "s"\nsetting = "s"\n'
    )
