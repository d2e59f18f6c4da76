"""Private selection: makes a random number of runs in a hidden directory, keeps only the best."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.config.release_keys import split_settings
from fedsim.errors import FedsimError
from fedsim.privacy.laws.selection import Selection
from fedsim.runs.callbacks import Measure
from fedsim.runs.data_split import resolve_data
from fedsim.runs.directory import RunDirectory
from fedsim.runs.factories import release_plan
from fedsim.runs.resolve import resolve
from fedsim.runs.summary import rewrite_page
from fedsim.runs.sweep.running import run_sweep
from fedsim.runs.sweep.search import SweepRun, comparison_measure, require_validation

SELECTED = "selected"
"""Directory of the best run, in the sweep's directory."""


@dataclass(frozen=True)
class RandomStopping:
    """Makes a random number of runs with randomly drawn settings, and keeps the best.

    Guarantee: the published run costs what its plan with this selection says, if all runs cost
    the same and are compared on examples that no client has. The duration of the command is not
    covered: it reveals something about the number of runs.

    Parameters
    ----------
    selection : Selection
    """

    selection: Selection

    def members(self, grid: Sequence[SweepRun]) -> list[SweepRun]:
        """The runs to draw from, each with the selection in its config.

        Raises
        ------
        FedsimError
            If a run is not private, would repeat its noise, or costs more or less than the others.
        """
        keys = {
            "privacy.selection": self.selection.distribution,
            "privacy.selection-mean": self.selection.mean,
        }
        for config in (run.config for run in grid):
            if not config.private or config.client.private:
                raise FedsimError(
                    "--select is for runs that are private at client level only (mechanism.name, "
                    "noise.multiplier; client.mechanism.name = 'none')."
                )
            if config.noise.entropy != "system":
                raise FedsimError(
                    f"noise.entropy = '{config.noise.entropy}'; with --select it must be 'system': "
                    "settings may be drawn twice, and their noise must not be the same."
                )
        members = [SweepRun(run.point, run.config.replace(**keys)) for run in grid]
        events = {release_plan(run.config).event() for run in members}
        clients = {(run.config.seed, split_settings(run.config)) for run in members}
        if len(events) > 1 or len(clients) > 1:
            raise FedsimError(
                "--select draws among runs that cost the same and have the same clients; no axis "
                "may change the seed, the data, the partition, the rounds, the cohort or the noise."
            )
        return members

    def run(self, grid: Sequence[SweepRun], out: Path) -> Path | None:
        """Make the runs, and move the best one's directory to ``out / "selected"``.

        Returns
        -------
        path or None
            None if nothing is published: no run was drawn, or none succeeded.

        Raises
        ------
        FedsimError
            If the runs cannot be compared, or ``out`` already has a selection.
        """
        members = self.members(grid)
        hidden, selected = out / ".selection", out / SELECTED
        for path in (hidden, selected):
            if path.exists():
                raise FedsimError(
                    f"{path} is left from an earlier selection, which cannot be resumed: "
                    "choose another --out."
                )
        first = members[0].config
        require_validation(first, "--select")
        measure = comparison_measure(resolve(first, data=resolve_data(first)), "--select")
        generator = np.random.default_rng(secrets.randbits(128))
        drawn = generator.integers(len(members), size=self.selection.draw(generator))
        hidden.mkdir(parents=True, mode=0o700)
        try:
            best = self._best([members[index] for index in drawn.tolist()], hidden, measure)
            if best is not None:
                best.rename(selected)
                rewrite_page(selected)
        finally:
            # The number of runs and the others' results must stay secret.
            shutil.rmtree(hidden)
        return None if best is None else selected

    def _best(self, drawn: Sequence[SweepRun], hidden: Path, measure: Measure) -> Path | None:
        # Random names: the index of the published run among the draws would be another release.
        runs = [SweepRun({"draw": secrets.token_hex(8)}, run.config) for run in drawn]
        outcomes = run_sweep(runs, hidden) if runs else {}
        best, best_value = None, None
        for run in runs:
            rows = RunDirectory(hidden / run.label).metrics_file.rows()
            if outcomes[run.label].ended == "failed" or not rows:
                continue
            if measure.improves(rows[-1], best_value):
                best, best_value = hidden / run.label, rows[-1][measure.name]
        return best
