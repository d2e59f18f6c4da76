"""Xu et al.: Lemma 1's example, Theorem 1's epsilon and Fig. 1, recomputed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from experiments.framework.base import (
    Experiment,
    ExperimentClaim,
    Members,
    Report,
    Result,
    Settings,
    Table,
    as_table,
)
from experiments.framework.spread import Difference, listed, paired, within
from experiments.xu.beale import METHODS, descend, draw
from experiments.xu.formulas import (
    constraint,
    cosines,
    optimal_noise,
    paper_rdp,
    proportional_noise,
    theorem_1,
)
from fedsim.cohorts import FixedCohort, PoissonCohort
from fedsim.privacy import cost
from fedsim.reports.plots import grid
from fedsim.settings import Ge, Le

LEMMA_SEED = 2
AVERAGE = "which average of the cosine is meant"
SIGNAL, BOUNDS = np.array([10.0, 5.0]), np.array([12.0, 6.0])
NOISES = {
    "paper (17, 8.5)": np.array([17.0, 8.5]),
    "isotropic (13.5, 13.5)": np.array([13.5, 13.5]),
    "reversed (12.4, 24.8)": np.array([12.4, 24.8]),
    "exact sqrt(m) s": proportional_noise(BOUNDS),
    "optimal under Lemma 1": optimal_noise(BOUNDS),
}


PRINTED = {
    "paper (17, 8.5)": 0.52,
    "isotropic (13.5, 13.5)": 0.36,
    "reversed (12.4, 24.8)": 0.28,
}
"""Cosines that the paper gives for the first three noises."""


@dataclass(frozen=True, kw_only=True)
class XuSettings(Settings):
    """Keys of ``experiment.toml``; ``seeds`` is the number of seeds for the Beale function's noise.

    Attributes
    ----------
    digits : int
        Digits of Lemma 1's cosines, which sets the number of draws: their standard error is at most
        half a unit of the last digit, since a cosine's standard deviation is at most 1.
    """

    digits: Annotated[int, Ge(1), Le(3)]
    steps: int
    start: list[float]
    rate: float
    gamma: float
    noise_multiplier: float
    clip_norm: float
    threshold: float
    beta: float
    decay: float
    floor: float

    @property
    def draws(self) -> int:
        """Number of draws of each noise in Lemma 1's example, by the rule above."""
        return int((2 * 10**self.digits) ** 2)


class Xu(Experiment):
    """Formulas and a two-dimensional example, with fedsim's own mechanisms."""

    settings: XuSettings

    def members(self) -> Members:
        """Lemma 1, Theorem 1, and for each method the Beale function with all seeds."""
        toy = as_table(self.settings, "experiment", "digits")
        return {
            "lemma 1": {"part": "lemma", "draws": self.settings.draws, "seed": LEMMA_SEED},
            "theorem 1": {"part": "theorem"},
            **{f"beale {method}": {"part": "beale", **toy, "method": method} for method in METHODS},
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Compute one of the three parts."""
        match settings["part"]:
            case "lemma":
                return {
                    name: [
                        constraint(BOUNDS, sigma),
                        float((sigma**2).sum()),
                        *cosines(SIGNAL, sigma, settings["draws"], settings["seed"]),
                    ]
                    for name, sigma in NOISES.items()
                }
            case "theorem":
                return _epsilons()
            case _:
                seeds = range(1, settings["seeds"] + 1)
                return {"runs": [descend({**settings, "seed": seed}) for seed in seeds]}

    def report(self, results: Mapping[str, Result]) -> Report:
        """Two tables, the picture of trajectories, and the claims."""
        lemma, theorem = results["lemma 1"], results["theorem 1"]
        runs = {method: results[f"beale {method}"]["runs"] for method in METHODS}
        final = {m: float(np.median([run["end"] for run in r])) for m, r in runs.items()}
        figures = {f"cos {name}": values[2] for name, values in lemma.items()}
        figures |= {f"median cos {name}": values[3] for name, values in lemma.items()}
        figures |= dict(theorem.items())
        figures |= {f"beale {method}": value for method, value in final.items()}
        figures |= {f"sd of cos {name}": values[4] for name, values in lemma.items()}
        columns = [
            "noise", "sum s^2/sigma^2", "sum sigma^2", "mean cosine", "median cosine",
            "s.d. of a cosine", "printed",
        ]  # fmt: skip
        figure, axes = grid(
            1, 2, title="Xu et al.: private RMSProp on the Beale function", width=10, height=4.4
        )
        draw(axes[0], axes[1], runs)
        return Report(
            tables=[
                Table(
                    "lemma1",
                    "Lemma 1's example: s = (12, 6), f = (10, 5), sigma_* = 1",
                    columns,
                    [[name, *values, PRINTED.get(name)] for name, values in lemma.items()],
                    digits=4,
                ),
                Table(
                    "theorem1",
                    "The claim of (4.0, 1e-5): L = 600, N = 60000, sigma_* = .9, 1800 iterations",
                    ["accountant", "epsilon"],
                    [[name, value] for name, value in theorem.items()],
                    digits=3,
                ),
            ],
            figures=figures,
            claims=[*_claims(lemma, theorem, self.settings.draws), *_beale(runs)],
            pictures={"beale": figure},
        )


def _epsilons() -> Result:
    """Epsilon of 1800 iterations at delta = 1e-5, by accountant."""
    plan = {"noise_multiplier": 0.9, "rate": 0.01, "steps": 1800, "delta": 1e-5}
    poisson = cost(noise_multiplier=0.9, cohort=PoissonCohort(0.01), rounds=1800, delta=1e-5)
    fixed = FixedCohort(600, 60000)
    return {
        "Theorem 1, alpha = 6": theorem_1(**plan, alpha=6),  # type: ignore[arg-type]
        "Theorem 1, best order": min(
            theorem_1(**plan, alpha=order)  # type: ignore[arg-type]
            for order in range(2, 33)
        ),
        "Poisson RDP of 2017, alpha = 6": paper_rdp(**plan, alpha=6),  # type: ignore[arg-type]
        "Poisson RDP": float(poisson.rdp_epsilon or np.inf),
        "Poisson PLD": poisson.epsilon,
        # With half the sensitivity, the same noise is twice the multiplier.
        "without replacement, sensitivity C": cost(
            noise_multiplier=1.8, cohort=fixed, rounds=1800, delta=1e-5
        ).epsilon,
        "without replacement, sensitivity 2C": cost(
            noise_multiplier=0.9, cohort=fixed, rounds=1800, delta=1e-5
        ).epsilon,
    }


def _claims(lemma: Result, theorem: Result, draws: int) -> list[ExperimentClaim]:
    paper, isotropic, reversed_ = (lemma[name] for name in list(NOISES)[:3])
    ahead = _less(paper, isotropic, draws)
    return [
        ExperimentClaim(
            "lemma-1",
            "Lemma 1",
            "Lemma 1: the adaptive noise meets the constraint",
            paper[0] <= 1,
            f"{paper[0]:.4f} <= 1",
        ),
        ExperimentClaim.under(
            "cosine",
            "Lemma 1",
            "the adaptive noise keeps the direction better than isotropic (.52 to .36)",
            AVERAGE,
            {
                "mean": (
                    ahead.positive,
                    f"{paper[2]:.4f} to {isotropic[2]:.4f}, "
                    f"{ahead.mean:+.4f} [{ahead.low:+.4f}, {ahead.high:+.4f}]",
                ),
                "median": (paper[3] > isotropic[3], f"{paper[3]:.3f} to {isotropic[3]:.3f}"),
            },
        ),
        ExperimentClaim.under(
            "cosine-worst",
            "Lemma 1",
            "the reversed noise keeps it worst",
            AVERAGE,
            {
                average: (reversed_[k] < min(paper[k], isotropic[k]), f"{reversed_[k]:.3f}")
                for average, k in (("mean", 2), ("median", 3))
            },
        ),
        _printed(lemma, draws),
        ExperimentClaim(
            "theorem-1",
            "Theorem 1",
            "Theorem 1 gives epsilon = 4.0 at alpha = 6",
            theorem["Theorem 1, alpha = 6"] <= 4.05,
            f"{theorem['Theorem 1, alpha = 6']:.2f}; best {theorem['Theorem 1, best order']:.2f}",
        ),
        ExperimentClaim(
            "four-spent",
            "Theorem 1",
            "the run of the paper spends at most (4.0, 1e-5), by Poisson sampling",
            theorem["Poisson PLD"] <= 4.0,
            f"{theorem['Poisson PLD']:.2f} by PLD",
        ),
    ]


def _less(first: Sequence[float], second: Sequence[float], draws: int) -> Difference:
    """A noise's mean cosine minus another's, with the standard error of independent draws.

    The draws are the same for both, and their correlation would only narrow the interval.
    """
    error = math.hypot(first[4], second[4]) / math.sqrt(draws)
    return Difference(first[2] - second[2], error, draws)


def _printed(lemma: Result, draws: int) -> ExperimentClaim:
    """Claim that the printed cosines are the means or medians, to two digits."""
    away = [
        Difference(printed - lemma[name][2], lemma[name][4] / math.sqrt(draws), draws)
        for name, printed in PRINTED.items()
    ]
    medians = {name: lemma[name][3] for name in PRINTED}
    return ExperimentClaim.under(
        "cosine-printed",
        "Lemma 1",
        "the printed cosines are those of the three noises, to their two digits",
        AVERAGE,
        {
            "mean": (within(away, -0.005, 0.005), "printed less it: " + listed(away, PRINTED)),
            "median": (
                all(abs(printed - medians[name]) <= 0.005 for name, printed in PRINTED.items()),
                ", ".join(f"{median:.3f}" for median in medians.values()),
            ),
        },
    )


def _beale(runs: Mapping[str, list[Result]]) -> list[ExperimentClaim]:
    """Claims that adaptive noise ends nearer to the minimum, paired by seed."""

    def nearer(method: str) -> Difference:
        uniform, adaptive = ([run["end"] for run in runs[name]] for name in ("uniform", method))
        return paired(uniform, adaptive)

    says = "adaptive noise ends nearer to the minimum than uniform noise"
    return [
        ExperimentClaim(
            "beale", "Fig. 1", says, nearer("adaptive").positive, nearer("adaptive").text
        ),
        ExperimentClaim(
            "beale-raw",
            "Fig. 1",
            "the same with the printed statistics, which are not private",
            nearer("raw").positive,
            nearer("raw").text,
        ),
    ]
