"""Das et al.: clipping and normalisation on the synthetic quadratic problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result as Trained

from experiments.das.least_squares import ClosedForm, LeastSquares, Watched, snr_of_normalization
from experiments.das.quadratic_pictures import curves, trajectories
from experiments.framework.base import (
    Experiment,
    ExperimentClaim,
    Members,
    Report,
    Result,
    Settings,
    Table,
    as_table,
    read_table,
    seeds_text,
)
from experiments.framework.spread import Difference, all_ahead, listed, over_seeds, paired
from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.federation.arrays import array_record, tensors
from fedsim.mechanisms import Clipping, Mechanism, Normalization
from fedsim.privacy import calibrate
from fedsim.settings import Ge, Gt, Lt
from fedsim.strategies import DPFedAvg

METHODS = ("clipping", "normalization")
COLUMNS = ("||w-w*||", "f-f*", "no noise")
TAIL = 25  # last rounds over which a final distance is averaged
EVERY = 5  # rounds between two stored values


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case: heterogeneity and start of the problem, rate, and clip norm.

    ``panel`` says whether it is a panel of the pictures and claims.
    """

    name: str
    heterogeneity: Annotated[float, Ge(0)] = 0.1
    start: Annotated[float, Gt(0)] = 1.0
    lr: Annotated[float, Gt(0)]
    clip_norm: Annotated[float, Gt(0)]
    panel: bool = False


@dataclass(frozen=True, kw_only=True)
class QuadraticSettings(Settings):
    """Keys of ``experiment.toml``."""

    clients: Annotated[int, Ge(1)] = 100
    dimension: Annotated[int, Ge(2)] = 200
    columns: Annotated[int, Ge(1)] = 20
    rounds: Annotated[int, Ge(1)] = 500
    steps: Annotated[int, Ge(1)] = 20
    epsilon: Annotated[float, Gt(0)] = 5.0
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-6
    problem_seed: Annotated[int, Ge(0)] = 1
    cases: list[Case]


class Quadratic(Experiment):
    """Runs of `DPFedAvg` in which the clients' steps are computed in closed form."""

    settings: QuadraticSettings

    def members(self) -> Members:
        """Each case and method: without noise (seed 0), then one run per seed."""
        common = as_table(self.settings, "cases", "seeds", "experiment")
        z = self.noise_multiplier
        return {
            f"{case.name} {method} seed={seed}": {
                **common,
                "case": as_table(case, "panel"),
                "method": method,
                "seed": seed,
                "noise-multiplier": z if seed else 0.0,
            }
            for case in self.settings.cases
            for method in METHODS
            for seed in range(self.settings.seeds + 1)
        }

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier z for full participation in all rounds."""
        return calibrate(
            target_epsilon=self.settings.epsilon,
            cohort=FullCohort(),
            rounds=self.settings.rounds,
            delta=self.settings.delta,
        )

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Distances to w*, gaps of f and SNRs, for every fifth round from 0."""
        return descend(settings)

    def report(self, results: Mapping[str, Result]) -> Report:
        """Final distances as a table, curves and trajectories as pictures."""
        ratio = snr_of_normalization(
            self.noise_multiplier, self.settings.clients, self.settings.dimension
        )
        figures = {"noise-multiplier": self.noise_multiplier, "snr-normalization": ratio}
        rows: list[list[str | float | None]] = []
        for case in self.settings.cases:
            row: list[str | float | None] = [case.name]
            for method in METHODS:
                runs = self._runs(results, case, method)
                distance, spread = over_seeds([run["end"] for run in runs])
                gap, _ = over_seeds([run["end-gap"] for run in runs])
                free = results[f"{case.name} {method} seed=0"]
                row += [f"{distance:.3f} ± {spread:.3f}", gap, free["end"]]
                figures[f"{case.name}/{method}"] = distance
            rows.append(row)
        columns = ["case"]
        columns += [f"{short} {quantity}" for short in ("clip", "norm") for quantity in COLUMNS]
        title = (
            f"Means of the last {TAIL} rounds, {seeds_text(self.settings.seeds)} of the noise; "
            "the distance without noise beside"
        )
        panels = self._panels
        data = {
            (case.name, method): self._runs(results, case, method)
            for case in panels
            for method in METHODS
        }
        return Report(
            tables=[Table("distances", title, columns, rows, digits=3)],
            figures=figures,
            claims=self._claims(results, ratio),
            pictures={
                "curves": curves([(c.name, _label(c)) for c in panels], data, ratio),
                "trajectories": trajectories([(c.name, _label(c)) for c in panels], data),
            },
        )

    def _runs(self, results: Mapping[str, Result], case: Case, method: str) -> list[Result]:
        seeds = range(1, self.settings.seeds + 1)
        return [results[f"{case.name} {method} seed={seed}"] for seed in seeds]

    def _nearer(self, results: Mapping[str, Result], end: str) -> list[Difference]:
        """Clipping's value of ``end`` minus normalisation's, panel by panel."""
        return [
            paired(*([run[end] for run in self._runs(results, case, method)] for method in METHODS))
            for case in self._panels
        ]

    @property
    def _panels(self) -> list[Case]:
        return [case for case in self.settings.cases if case.panel]

    def _claims(self, results: Mapping[str, Result], ratio: float) -> list[ExperimentClaim]:
        runs = {
            method: [
                run for case in self.settings.cases for run in self._runs(results, case, method)
            ]
            for method in METHODS
        }
        constant = max(abs(s - ratio) for run in runs["normalization"] for s in run["snr-range"])
        highest = max(max(run["snr-range"]) for run in runs["clipping"])
        lowest = min(min(run["snr-range"]) for run in runs["clipping"])
        distances, gaps = self._nearer(results, "end"), self._nearer(results, "end-gap")
        names = [case.name for case in self._panels]
        return [
            ExperimentClaim(
                "snr-constant",
                "Signal-to-noise ratio",
                "the SNR of normalised updates is one constant",
                constant < 1e-7,
                f"{ratio:.6f} in every round",
            ),
            ExperimentClaim(
                "snr-order",
                "Signal-to-noise ratio",
                "the SNR of clipped updates is never above it",
                highest <= ratio + 1e-7,
                f"between {lowest:.4f} and {highest:.4f}",
            ),
            ExperimentClaim(
                "normalization-nearer",
                "Distance by round",
                "normalisation ends nearer to w* than clipping, in every panel",
                all_ahead(distances),
                listed(distances, names),
            ),
            ExperimentClaim(
                "normalization-lower",
                "Trajectories",
                "the way of normalised updates ends at a lower f, in every panel",
                all_ahead(gaps),
                listed(gaps, names),
            ),
        ]


def descend(settings: Mapping[str, Any]) -> Result:
    """Run `DPFedAvg` on the problem once; see `Quadratic.run` for the result."""
    case = read_table(Case, settings["case"], "case")
    problem = LeastSquares(
        settings["clients"],
        settings["dimension"],
        settings["columns"],
        case.heterogeneity,
        settings["problem-seed"],
    )
    # The paper bounds u by C, but clients send w_E - w = -lr u: so the bound here is lr C, and a
    # server that adds the mean update corresponds to the paper's beta = lr.
    bound = case.lr * case.clip_norm
    mechanism: Mechanism = (
        Clipping(bound) if settings["method"] == "clipping" else Normalization(bound)
    )
    trainer = ClosedForm(problem, lr=case.lr, steps=settings["steps"])
    watched = Watched(trainer, mechanism)
    strategy = DPFedAvg(
        mechanism=mechanism,
        cohort=FullCohort(population=problem.n),
        noise_multiplier=settings["noise-multiplier"],
        delta=settings["delta"],
        seed=settings["seed"],
        fraction_evaluate=0.0,
    )
    path = [problem.start(case.start)]

    def on_round(round: int, trained: Trained) -> None:
        path.append(tensors(trained.arrays)["0.weight"].double().numpy().ravel())

    strategy.start(LocalGrid(watched), _arrays(path[0]), settings["rounds"], on_round=on_round)
    return _measures(problem, np.array(path), watched, bound, settings)


def _arrays(w: Any) -> ArrayRecord:
    return array_record({"0.weight": torch.from_numpy(w[None, :].astype(np.float32))})


def _measures(
    problem: LeastSquares,
    path: Any,
    watched: Watched,
    bound: float,
    settings: Mapping[str, Any],
) -> Result:
    """Result of a run from its path of parameters ``[rounds + 1, d]``.

    "along" and "off" are the components of ``w - w*`` along the initial one and orthogonal to it.
    """
    away = path - problem.optimum
    ahead = away[0] / np.linalg.norm(away[0])
    along = away @ ahead
    off = np.linalg.norm(away - along[:, None] * ahead, axis=1)
    distance = np.linalg.norm(away, axis=1)
    result: Result = {
        "end": float(distance[-TAIL:].mean()),
        "end-gap": float(np.mean([problem.gap(w) for w in path[-TAIL:]])),
        "rounds": list(range(0, len(path), EVERY)),
        "distance": distance[::EVERY].tolist(),
        "along": along[::EVERY].tolist(),
        "off": off[::EVERY].tolist(),
    }
    if settings["noise-multiplier"]:
        constant = snr_of_normalization(settings["noise-multiplier"], problem.n, problem.d)
        ratios = [constant * norm / bound for norm in watched.bounded]
        result |= {"snr": ratios[::EVERY], "snr-range": [min(ratios), max(ratios)]}
    return result


def _label(case: Case) -> str:
    return f"C = {case.clip_norm:g}, $\\eta$ = {case.lr:g}, {case.name.split()[0]}"
