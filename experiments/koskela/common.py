"""Koskela and Honkela (arXiv 1809.03832): common code of the experiments on their paper."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.framework.base import Result
from experiments.framework.config_runs import ConfigRuns
from fedsim.clients import AdadpLR
from fedsim.config import Scalar
from fedsim.runs.metrics import Row
from fedsim.settings import Constraint


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


KEEPS = {"full": "the full step", "half": "the half steps"}
"""Which iterate ADADP keeps, with labels: the paper's, everywhere, and the authors' code's."""


KNOWN_KEEPS = Constraint(
    lambda keeps: keeps and set(keeps) <= set(KEEPS), "a list of full, half, or both"
)


def left_open(settings: str, keeps: Sequence[str]) -> str:
    """What a verdict may turn with: ``settings``, and the iterate where both were run."""
    return settings + ", or the iterate, where paper and code differ" * (len(keeps) > 1)


def adadp(rate: float, keep: str, largest: float) -> dict[str, Scalar]:
    """Keys that give an ``adadp-lr`` run, which keeps the half steps, another rate and iterate.

    ``largest`` is the run's own ``client.eta-max``, raised to ``rate`` if that is larger. With the
    full step the default limit is used instead, so that nothing of the algorithm is overridden.
    """
    if keep == "half":
        return {"client.lr": rate, **({"client.eta-max": rate} if rate > largest else {})}
    limit = rate if rate > AdadpLR().eta_max else ""
    return {"client.lr": rate, "client.keep": "", "client.eta-max": limit}


def constant_rate(name: str, rate: float) -> dict[str, Scalar]:
    """Keys that turn an ``adadp-lr`` run into one of another local algorithm and rate."""
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
