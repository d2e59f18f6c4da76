"""Koskela and Honkela (arXiv 1809.03832): common code of the experiments on their paper."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.framework.base import Result
from experiments.framework.config_runs import ConfigRuns
from fedsim.config import Scalar
from fedsim.runs.metrics import Row


class Koskela(ConfigRuns):
    """Runs of a config whose results include ADADP's rates."""

    def summary(self, rows: Sequence[Row]) -> Result:
        """Also ADADP's rate by round, and the share of its iterations that were rejected."""
        adaptive = [row for row in rows if "train-eta" in row]
        accepted = sum(row["train-accepted"] for row in adaptive)
        rejected = sum(row["train-rejected"] for row in adaptive)
        return {
            **super().summary(rows),
            "eta": [float(row["train-eta"]) for row in adaptive],
            "rejected": rejected / (accepted + rejected) if accepted + rejected else None,
        }


def optimiser(name: str, rate: float, largest: float = 0.0) -> dict[str, Scalar]:
    """Keys that turn an ``adadp-lr`` run into one with another rate or local algorithm.

    ``largest`` is the run's own ``client.eta-max`` for ADADP, raised to ``rate`` if that is larger.
    """
    if name == "adadp-lr":
        above: dict[str, Scalar] = {"client.eta-max": rate} if rate > largest > 0 else {}
        return {"client.lr": rate, **above}
    # Keys of ADADP alone must be unset, or the config is refused.
    return {
        "client.name": name,
        "client.lr": rate,
        "client.keep": "",
        "client.eta-max": "",
        "client.adapt-rounds": "",
    }


def units(start: float, batch: int) -> dict[str, float]:
    """A starting rate converted to multiply a batch's mean gradient, for both possible units of it.

    The paper does not say whether its eta_0 multiplies the sum or the mean of a batch's gradients.
    """
    return {"mean": start, "sum": start * batch}
