"""Conformance of draws whose probabilities differ, by client and by round.

Each row is in independently with a probability of its own, so that centred indicators add up
to numbers that Bernstein's inequality bounds, whatever the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsim.audit.checks import Check, smallest
from fedsim.audit.draws import each_once
from fedsim.privacy import Event

__all__ = ["inclusion_checks"]

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def inclusion_checks(
    draws: Sequence[Sequence[Ids]], probabilities: Floats, event: Event
) -> list[Check]:
    """Sizes, frequencies, pairs and overlaps against what the sampler says of each.

    Parameters
    ----------
    draws : sequence of runs, each a sequence of int64 arrays
    probabilities : float64 ``[rounds, population]``
        Of one run; the same for all.
    event : Event
        What each round was charged as.
    """
    population = probabilities.shape[1]
    rounds = [np.asarray(ids, dtype=np.int64) for run in draws for ids in run]
    looked = f"{len(rounds):,} rounds over {population:,} clients"
    first = each_once(rounds, population, looked)
    highest = float(probabilities.max())
    charged = Check(
        "sampler", "charged rate", looked, f"the highest probability is {highest:.4g}",
        f"{event.rate:.4g} at most", 0.0 if highest > event.rate * (1 + 1e-12) else 1.0,
    )  # fmt: skip
    if not first.p_value:
        return [first, charged]
    asked = np.zeros((len(rounds), population))
    for row, ids in zip(asked, rounds, strict=True):
        row[ids] = 1
    p = np.concatenate([probabilities[: len(run)] for run in draws])
    centred, variances = asked - p, p * (1 - p)

    def compare(name: str, sums: Floats, spread: Floats, of: str) -> Check:
        bounds = _bernstein(sums, spread)
        worst = int(bounds.argmin())
        score = sums.flat[worst] / max(float(spread.flat[worst]), 1e-300) ** 0.5
        return Check(
            "sampler", name, f"{looked}, {sums.size:,} {of}",
            f"the oddest is {score:+.2f} standard errors off",
            "0, within what independent draws give", smallest(bounds),
        )  # fmt: skip

    clients, pairs = np.triu_indices(population, 1), np.triu_indices(len(rounds), 1)
    return [
        first,
        charged,
        compare("sizes", centred.sum(1), variances.sum(1), "rounds"),
        compare("how often each is asked", centred.sum(0), variances.sum(0), "clients"),
        compare(
            "pairs asked together",
            (centred.T @ centred)[clients], (variances.T @ variances)[clients], "pairs",
        ),
        compare(
            "overlap of rounds",
            (centred @ centred.T)[pairs], (variances @ variances.T)[pairs], "pairs of rounds",
        ),
    ]  # fmt: skip


def _bernstein(sums: Floats, variances: Floats) -> Floats:
    """Two-sided bounds on the p-values of sums of independent terms, none larger than one."""
    distance = np.abs(np.atleast_1d(sums))
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.square(distance) / (2 * (np.atleast_1d(variances) + distance / 3))
    return np.asarray(np.minimum(1.0, 2 * np.exp(-np.where(distance > 0, exponent, 0.0))))
