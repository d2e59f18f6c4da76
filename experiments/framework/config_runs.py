"""Experiments whose members are runs of one config, each with some keys changed.

The config is ``run.toml`` in the experiment's directory, and a member is run as ``fedsim run``
would run it: it has a run's directory below ``--out``, is resumed there from its checkpoint, and
its ledger is verified before its result is accepted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from experiments.framework.base import BestOfGrid, Experiment, Members, Result, Settings, digest
from experiments.framework.spread import mean_text, over_seeds
from fedsim.config import RunConfig, Scalar
from fedsim.config.release_keys import changed_keys
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.reports.verification import verify_run
from fedsim.runs.metrics import Row
from fedsim.runs.record import RunRecord, RunResult
from fedsim.runs.run_ledgers import ledger_paths
from fedsim.runs.runner import run as run_config

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ConfigRunsSettings(Settings):
    """Keys of every experiment of this kind.

    Attributes
    ----------
    pretraining : str
        A config in the directory of ``run.toml``. Its run is trained first, once, and members
        start from its model (`model.weights`).
    """

    pretraining: str = ""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A name, such as a method's, and the keys of the run that it changes."""

    name: str
    keys: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """Test accuracy (%) of one plan over the seeds.

    Attributes
    ----------
    finals : tuple of float
        Final accuracy of each seed, in their order.
    curve, deviation : float64 ``[points]``
        Mean and standard deviation over seeds, by round.
    rounds : int64 ``[points]``
        The rounds of the curve's points.
    """

    finals: tuple[float, ...]
    curve: Floats
    deviation: Floats
    rounds: npt.NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Mean of the final accuracies."""
        return over_seeds(self.finals)[0]

    @property
    def text(self) -> str:
        """Mean and standard deviation as text, for a table's cell."""
        return mean_text(self.finals)


@dataclass(frozen=True)
class LeaderboardEntry:
    """A method's runs, for a row of the leaderboard.

    Attributes
    ----------
    method, federation : str
    accuracies : mapping of str to float
        Test accuracy (%) by the member's name, one member a seed.
    """

    method: str
    federation: str
    accuracies: Mapping[str, float]


class ConfigRuns(Experiment):
    """Base class; subclasses define the changed keys (`plans`)."""

    settings: ConfigRunsSettings
    last: ClassVar[int] = 1
    """Number of last evaluated rounds over which a final accuracy is averaged."""

    weights: Path | None = None
    """The pretrained model, once it has been trained."""
    runs = Path("runs")

    @cached_property
    def base(self) -> RunConfig:
        """The run that is varied."""
        return RunConfig.load(self.directory / "run.toml")

    @cached_property
    def pretraining(self) -> RunConfig | None:
        """The run from whose model members start, if there is one."""
        name = self.settings.pretraining
        return RunConfig.load(self.directory / name) if name else None

    def prepare(self, out: Path) -> None:
        """Train the model that members start from, or continue to; once trained, it is kept."""
        self.runs = out.absolute() / "runs"
        if self.pretraining is not None:
            directory = self.runs / f"pretraining-{digest(chosen(self.pretraining))}"
            if not directory.is_dir():  # it has this name once it has finished
                unfinished = directory.with_name(f".{directory.name}")
                _finished(self.pretraining.replace(**{"data.dir": str(self.data)}), unfinished)
                unfinished.replace(directory)
            self.weights = directory / "model.safetensors"

    @abstractmethod
    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Keys that each member changes, by the member's name without its seed."""

    def members(self) -> Members:
        """All plans with the first seed, then with the second, and so on."""
        plans = self.plans()
        return {
            f"{name} seed={seed}": self.member_settings({**plan, "seed": seed})
            for seed in range(1, self.settings.seeds + 1)
            for name, plan in plans.items()
        }

    def member_settings(self, changes: dict[str, Scalar]) -> dict[str, Any]:
        """Keys of the run's config, without the data's folder, on which no result depends."""
        settings = {"run": chosen(self.base.replace(**changes))}
        if self.pretraining is not None:
            settings["run"].pop("model.weights", None)
            settings["pretraining"] = chosen(self.pretraining)
        return settings

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Run the member's config, or resume it; returns the `summary` of its metrics.

        A private run's result also has ``ledger``: the final hash of its ledger, or a digest of
        several ledgers' final hashes.

        Raises
        ------
        KeyboardInterrupt
            If the run was interrupted by Ctrl-C or SIGTERM, so that it has no result.
        FedsimError
            If the run's files do not agree with its ledger.
        """
        directory = self.runs / digest(settings)
        result = _finished(self.config_of(settings), directory)
        return self.summary(result.metrics) | _verified(directory)

    def config_of(self, settings: Mapping[str, Any]) -> RunConfig:
        """The config of a member."""
        # Members run in parallel processes already: workers within each would be too many.
        workers = {} if "engine.name" in self.engine else {"engine.workers": 1}
        weights = {} if self.weights is None else {"model.weights": str(self.weights)}
        where = {"data.dir": str(self.data), **workers, **self.engine, **weights}
        return RunConfig.from_run_config({**settings["run"], **where})

    def summary(self, rows: Sequence[Row]) -> Result:
        """Test accuracy by round, and the epsilon if there is one."""
        measured = [row for row in rows if "test-accuracy" in row]
        last: Row = rows[-1] if rows else {}
        return {
            "rounds": [int(row["round"]) for row in measured],
            "accuracy": [float(row["test-accuracy"]) for row in measured],
            "epsilon": last.get("epsilon", last.get("example-epsilon")),
        }

    def scores(self, results: Mapping[str, Result]) -> dict[str, Score]:
        """Score of every plan over its seeds."""
        by_plan = {name: self.of_plan(results, name) for name in self.plans()}
        return {name: self._score(of_plan) for name, of_plan in by_plan.items() if of_plan}

    def of_plan(self, results: Mapping[str, Result], name: str) -> list[Result]:
        """Results of one plan, seed by seed; with `partial`, only those that exist."""
        members = [f"{name} seed={seed}" for seed in range(1, self.settings.seeds + 1)]
        return [results[one] for one in members if one in results or not self.partial]

    def where(self, examples: str, rounds: str) -> str:
        """Short text on data and scale; ``examples`` and ``rounds`` name the units."""
        base, seeds = self.base, self.settings.seeds
        count = f"{base.partition.max_examples:,}" if base.partition.max_examples else "all"
        over = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
        return f"{base.data.name}, {count} {examples}, {base.rounds} {rounds}, {over}"

    def entries(self, results: Mapping[str, Result]) -> list[LeaderboardEntry]:
        """Rows of the leaderboard; most experiments have none."""
        return []

    def _score(self, results: Sequence[Result]) -> Score:
        curves = 100 * np.array([result["accuracy"] for result in results])
        finals = tuple(curves[:, -self.last :].mean(axis=1).tolist())
        mean, deviation = np.transpose([over_seeds(column) for column in curves.T])
        return Score(finals, mean, deviation, np.array(results[0]["rounds"]))


def best(of: str, by_value: Mapping[float, Score]) -> tuple[float, Score, BestOfGrid]:
    """The value with the highest score, that score, and the choice for the report."""
    choice = BestOfGrid(of, {value: score.mean for value, score in by_value.items()})
    return choice.value, by_value[choice.value], choice


def chosen(config: RunConfig) -> dict[str, Scalar]:
    """The keys that differ from their defaults, without the data's folder."""
    return {key: value for key, value in changed_keys(config).items() if key != "data.dir"}


def _verified(directory: Path) -> Result:
    """Verify a private run's files; returns its ledgers' final hash. Empty without privacy."""
    record = RunRecord.read(directory)
    if not record.private:
        return {}
    for one in verify_run(directory):
        if not one.passed:
            raise FedsimError(f"{directory}: {one.subject}: {one.detail}")
    paths = ledger_paths(record.config, directory).values()
    heads = [Ledger.read(path).head for path in paths if path.is_file()]
    return {"ledger": heads[0] if len(heads) == 1 else digest({"heads": heads})}


def _finished(config: RunConfig, directory: Path) -> RunResult:
    """The result of a run that is made, or resumed, in a directory."""
    result = run_config(config, out=directory, resume=True)
    if result.ended == "interrupted":
        raise KeyboardInterrupt
    return result
