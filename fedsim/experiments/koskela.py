"""Koskela and Honkela (arXiv 1809.03832): what their experiments here have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file
from torch import nn

from fedsim.build import Build
from fedsim.config import Scalar
from fedsim.drive import Row
from fedsim.errors import FedsimError
from fedsim.experiments.base import Result, Settings
from fedsim.experiments.config_runs import ConfigRuns, ConfigRunsSettings

__all__ = ["Koskela", "KoskelaSettings", "load_convolutions", "optimiser"]


class KoskelaSettings(ConfigRunsSettings):
    """Keys that the experiments share.

    ``convolutions`` is a safetensors file in the data directory with pre-trained weights for the
    layers that ``model.trainable`` leaves out; without it they stay as they are drawn.
    """

    convolutions: str = ""


class Koskela(ConfigRuns):
    """Runs whose frozen layers may come from a file, and whose rates are kept."""

    settings: KoskelaSettings
    settings_type: ClassVar[type[Settings]] = KoskelaSettings

    def member_settings(self, changes: dict[str, Scalar]) -> dict[str, Any]:
        """With the name of the file of frozen weights."""
        return {
            **super().member_settings(changes),
            "convolutions": self.settings.convolutions,
        }

    def build(self, settings: Mapping[str, Any]) -> Build:
        """With the frozen weights in the model."""
        build = super().build(settings)
        if settings["convolutions"]:
            load_convolutions(build.model, self.context.data / settings["convolutions"])
        return build

    def summary(self, rows: Sequence[Row]) -> Result:
        """With ADADP's rate by round, and the share of its iterations that were rejected."""
        adaptive = [row for row in rows if "train-eta" in row]
        accepted = sum(row["train-accepted"] for row in adaptive)
        rejected = sum(row["train-rejected"] for row in adaptive)
        return {
            **super().summary(rows),
            "eta": [float(row["train-eta"]) for row in adaptive],
            "rejected": rejected / (accepted + rejected) if accepted + rejected else None,
        }


def optimiser(name: str, rate: float) -> dict[str, Scalar]:
    """Keys that turn an ``adadp-lr`` run into one with another local algorithm."""
    if name == "adadp-lr":
        return {"client.lr": rate}
    # Keys that only ADADP has must not be left behind.
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
