"""Koskela and Honkela (arXiv 1809.03832): what their experiments here have in common.

Every member is one run of the experiment's ``run.toml`` with some keys changed, the same as
``fedsim run`` would do it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file
from torch import nn

from fedsim.build import Build
from fedsim.config import RunConfig, Scalar
from fedsim.drive import drive
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.experiments.base import Context, Experiment, Member, Result, Settings, over_seeds

__all__ = ["Koskela", "KoskelaSettings", "Score", "load_convolutions", "optimiser"]

Floats = npt.NDArray[np.float64]


class KoskelaSettings(Settings):
    """Keys that the experiments share; ``run.toml`` beside the file is the run they vary.

    ``rounds`` and ``max-examples`` change the run where they are not 0. ``convolutions`` is a
    safetensors file in the data directory with pre-trained weights for the layers that
    ``model.trainable`` leaves out; without it they stay as they are drawn.
    """

    rounds: int = 0
    max_examples: int = 0
    convolutions: str = ""


@dataclass(frozen=True)
class Score:
    """Test accuracy (%) of one plan over the seeds.

    Attributes
    ----------
    mean, spread : float
        Of the final accuracy; the spread is the standard deviation.
    curve : float64 ``[points]``
        Mean over seeds, by round.
    rounds : int64 ``[points]``
    """

    mean: float
    spread: float
    curve: Floats
    rounds: npt.NDArray[np.int64]

    @property
    def text(self) -> str:
        """For a table's cell."""
        return f"{self.mean:.2f} ± {self.spread:.2f}"


class Koskela(Experiment):
    """Members are runs; subclasses say which."""

    settings: KoskelaSettings
    settings_type: ClassVar[type[Settings]] = KoskelaSettings
    last: ClassVar[int] = 1
    """Rounds that a final accuracy is the mean of."""

    def __init__(self, settings: KoskelaSettings, context: Context) -> None:
        super().__init__(settings, context)
        changes: dict[str, Scalar] = {}
        if settings.rounds:
            changes["rounds"] = settings.rounds
        if settings.max_examples:
            changes["partition.max-examples"] = settings.max_examples
        self.base = RunConfig.load(context.directory / "run.toml").replace(**changes)

    @abstractmethod
    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Keys that each member changes, by the member's name without its seed."""

    def members(self) -> list[Member]:
        """All plans with the first seed, then with the second, and so on."""
        plans = self.plans()
        return [
            Member(f"{name} seed={seed}", self._member_settings({**plan, "seed": seed}))
            for seed in range(1, self.settings.seeds + 1)
            for name, plan in plans.items()
        ]

    def _member_settings(self, changes: dict[str, Scalar]) -> dict[str, Any]:
        run = self.base.replace(**changes).to_run_config()
        # Where the data lie says nothing about a result.
        del run["data.dir"]
        return {"run": run, "convolutions": self.settings.convolutions}

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Test accuracy by round; the rate, the share of rejected iterations and epsilon."""
        config = RunConfig.from_run_config({**settings["run"], "data.dir": str(self.context.data)})
        build = Build(config)
        if settings["convolutions"]:
            load_convolutions(build.model, self.context.data / settings["convolutions"])
        rows = drive(build, LocalGrid(build.trainer)).metrics
        measured = [row for row in rows if "test-accuracy" in row]
        trained = [row for row in rows if "train-eta" in row]
        accepted = sum(row["train-accepted"] for row in trained)
        rejected = sum(row["train-rejected"] for row in trained)
        return {
            "rounds": [int(row["round"]) for row in measured],
            "accuracy": [float(row["test-accuracy"]) for row in measured],
            "eta": [float(row["train-eta"]) for row in trained],
            "rejected": rejected / (accepted + rejected) if trained else None,
            "epsilon": rows[-1].get("example-epsilon") if rows else None,
        }

    def scores(self, results: Mapping[str, Result]) -> dict[str, Score]:
        """Of every plan, over the seeds."""
        return {name: self._score(self.of_plan(results, name)) for name in self.plans()}

    def of_plan(self, results: Mapping[str, Result], name: str) -> list[Result]:
        """Results of one plan, seed by seed."""
        return [results[f"{name} seed={s}"] for s in range(1, self.settings.seeds + 1)]

    def _score(self, results: Sequence[Result]) -> Score:
        curves = 100 * np.array([result["accuracy"] for result in results])
        mean, spread = over_seeds(curves[:, -self.last :].mean(axis=1))
        return Score(mean, spread, curves.mean(axis=0), np.array(results[0]["rounds"]))


def optimiser(name: str, rate: float) -> dict[str, Scalar]:
    """Keys that turn an ``adadp-lr`` run into one with another local algorithm."""
    if name == "adadp-lr":
        return {"client.lr": rate}
    # Keys that only ADADP has must not be left behind; the state is kept in private runs.
    return {
        "client.name": name,
        "client.lr": rate,
        "client.eta-max": 0.0,
        "client.adapt-rounds": 0,
    }


def load_convolutions(model: nn.Module, path: Path) -> None:
    """Give a model's frozen parameters the values in a safetensors file.

    Raises
    ------
    FedsimError
        If there is no such file, or it lacks one of them or has another shape for it.
    """
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if not path.is_file():
        raise FedsimError(
            f"convolutions = '{path.name}', but there is no {path}; it must hold pre-trained "
            f"{', '.join(frozen)}, which do not come with fedsim."
        )
    values = load_file(path)
    for name, parameter in frozen.items():
        if name not in values or values[name].shape != parameter.shape:
            found = tuple(values[name].shape) if name in values else "nothing"
            raise FedsimError(
                f"{path} has {found} for '{name}'; it must be {tuple(parameter.shape)}."
            )
        parameter.data.copy_(values[name])
