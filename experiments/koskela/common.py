"""Koskela and Honkela (arXiv 1809.03832): what their experiments here have in common."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.framework.base import Result
from experiments.framework.config_runs import ConfigRuns
from fedsim.config import Scalar
from fedsim.runs.artefacts import Row

__all__ = ["Koskela", "optimiser"]


class Koskela(ConfigRuns):
    """Runs whose rates are kept."""

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
        "client.eta-max": "",
        "client.adapt-rounds": "",
    }
