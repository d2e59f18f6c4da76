"""Das et al., Proposition 1: one local step or many, by heterogeneity and by the start's distance.

Client i minimises ``f_i(w) = sum_j h(a_ij . w - a_ij . w_i*)``, the least squares of `LeastSquares`
with Huber's loss h instead of the square, so that f_i is Lipschitz: its gradient is at most ``G =
threshold sqrt(m) s``, s being the largest singular value of an A_i, and its smoothness ``L = s^2``.
Clients send ``u_i = (w - w_E) / eta``, which is at most G E long: with C = G E nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure

from experiments.curves import log_ticks
from experiments.das.least_squares import Floats, LeastSquares
from experiments.framework.base import (
    FLAT,
    NOT_EMPTY,
    BestOfGrid,
    Experiment,
    ExperimentClaim,
    Members,
    Outcome,
    Report,
    Result,
    Settings,
    Table,
    as_table,
)
from experiments.framework.spread import Difference, paired, within
from fedsim.cohorts import FullCohort
from fedsim.privacy import calibrate
from fedsim.reports.plots import COLOURS, INK, grid
from fedsim.settings import Ge, Gt, Lt

LAST = 5  # last rounds whose mean is the gap at the end
PANEL = "Proposition 1"
SCHEDULED = "eta = rho / L, rounds by the theorem"
FIXED = "eta = rho / L, the same rounds"
TUNED = "eta tuned, the same rounds"
READINGS = {"scheduled": SCHEDULED, "fixed": FIXED, "tuned": TUNED}
"""What stays the same while E varies, by the result's key: the path eta E K, which the theorem's
own choice of K = L ||w_0 - w*|| / (G E rho^2) makes equal; eta and K; or K alone."""


@dataclass(frozen=True, kw_only=True)
class PropositionSettings(Settings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    local_steps : list of int
        Values of E, ascending; the last is at most 1 / (2 rho).
    heterogeneity, starts : list of float
        ``w_i* ~ heterogeneity N(0, I)``, and ``||w_0 - w*||``.
    lengths : list of float
        Grid of eta E L from which eta is tuned at every E.
    tuning_seeds : int
        Number of seeds (1, 2, ...) by which lengths are chosen; the ``seeds`` after them judge.
    """

    clients: Annotated[int, Ge(1)] = 100
    dimension: Annotated[int, Ge(2)] = 20
    columns: Annotated[int, Ge(1)] = 5
    threshold: Annotated[float, Gt(0)] = 1.0
    rounds: Annotated[int, Ge(LAST)] = 30
    epsilon: Annotated[float, Gt(0)] = 5.0
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-6
    problem_seed: Annotated[int, Ge(0)] = 1
    local_steps: Annotated[list[int], NOT_EMPTY]
    heterogeneity: Annotated[list[float], NOT_EMPTY]
    starts: Annotated[list[float], NOT_EMPTY]
    lengths: Annotated[list[float], NOT_EMPTY]
    tuning_seeds: Annotated[int, Ge(1)] = 2

    @property
    def rho(self) -> float:
        """``sqrt(d ln(1/delta)) / (n epsilon)``; the paper has a constant q under the root."""
        return math.sqrt(self.dimension * math.log(1 / self.delta)) / (self.clients * self.epsilon)

    def noise(self, rounds: int) -> float:
        """The noise multiplier of so many rounds with all clients."""
        return calibrate(
            target_epsilon=self.epsilon, cohort=FullCohort(), rounds=rounds, delta=self.delta
        )


@dataclass(frozen=True)
class HuberProblem:
    """The clients of `LeastSquares` with Huber's loss."""

    squares: LeastSquares
    threshold: float

    @cached_property
    def smoothness(self) -> float:
        """L, of every f_i."""
        return float(np.linalg.svd(self.squares.A, compute_uv=False).max() ** 2)

    @property
    def lipschitz(self) -> float:
        """G, of every f_i."""
        return self.threshold * math.sqrt(self.squares.m * self.smoothness)

    def gradients(self, w: Floats) -> Floats:
        """Gradients of all f_i, ``[n, S, d]``, each client at S points of its own."""
        slopes = np.clip(self._residuals(w), -self.threshold, self.threshold)
        return np.asarray(slopes @ self.squares.A.transpose(0, 2, 1))

    def values(self, w: Floats) -> Floats:
        """f at S points ``[S, d]``."""
        r = np.abs(self._residuals(np.broadcast_to(w, (self.squares.n, *w.shape))))
        h = self.threshold
        return np.asarray(np.where(r <= h, r * r / 2, h * r - h * h / 2).sum(2).mean(0))

    @cached_property
    def optimum(self) -> Floats:
        """w*, ``[1, d]``."""
        w = np.zeros((1, self.squares.d))
        for _ in range(20_000):
            gradient = self.gradients(np.broadcast_to(w, (self.squares.n, *w.shape))).mean(0)
            w = w - gradient / self.smoothness
            if np.linalg.norm(gradient) < 1e-12:
                break
        return w

    def _residuals(self, w: Floats) -> Floats:
        targets = np.einsum("ndm,nd->nm", self.squares.A, self.squares.optima)
        return np.asarray(w @ self.squares.A - targets[:, None, :])


def descend(
    problem: HuberProblem, start: Floats, *, eta: float, steps: int, noise: float, rounds: int,
    seeds: Sequence[int],
) -> Floats:  # fmt: skip
    """f at w_0, ..., w_K, ``[K + 1, seeds]``, of DP-FedAvg by its paper's Algorithm, line by line.

    ``noise`` is the noise multiplier z of the sum of u_i, each at most C = G E long.
    """
    n, d = problem.squares.n, problem.squares.d
    draws = [np.random.default_rng([seed, problem.squares.seed]) for seed in seeds]
    std = noise * problem.lipschitz * steps / n
    w = np.repeat(start, len(seeds), axis=0)
    values = [problem.values(w)]
    for _ in range(rounds):
        local = np.repeat(w[None], n, axis=0)
        for _ in range(steps):
            local = local - eta * problem.gradients(local)
        u = (w - local.mean(0)) / eta
        w = w - eta * (u + std * np.stack([draw.standard_normal(d) for draw in draws]))
        values.append(problem.values(w))
    return np.array(values)


def bound(
    problem: HuberProblem, *, distance: float, eta: float, steps: int, noise: float, rounds: int
) -> float:
    """A bound of E f(w_k) - f*, k drawn at random from 0 ... K - 1: Theorem 1's kind.

    From ``E||w_{k+1} - w*||^2 <= ||w_k - w*||^2 - 2 eta E <..> + eta^2 E||u + noise||^2`` with, for
    convex L-smooth f_i and eta <= 1 / L, ``<grad f_i(w_tau), w_k - w*> >= f_i(w_k) - f_i(w*) - (L
    eta tau)^2 (f_i(w_k) - min f_i)`` and ``||u_i||^2 <= 2 L E^2 (f_i(w_k) - min f_i)``; with x =
    eta L E and D = mean f_i(w*) - min f_i (here min f_i = 0) the sum over rounds gives

        (d^2 / (2 eta E K) + eta E p (z G / n)^2 / 2 + (x + x^2 / 3) D) / (1 - x - x^2 / 3),

    d being ||w_0 - w*|| and p the dimension. With eta E K = d / (G rho) its first two terms are G d
    rho, the theorem's leading one.
    """
    x = eta * problem.smoothness * steps
    heterogeneity = float(problem.values(problem.optimum)[0])
    per_client = noise * problem.lipschitz / problem.squares.n
    first = distance**2 / (2 * eta * steps * rounds)
    second = eta * steps * problem.squares.d * per_client**2 / 2
    return (first + second + (x + x * x / 3) * heterogeneity) / (1 - x - x * x / 3)


@dataclass(frozen=True)
class PropositionCell:
    """A problem: its start's distance, its heterogeneity, and the gain of the largest E over 1."""

    start: float
    measured_heterogeneity: float
    lower: Difference

    @property
    def ratio(self) -> float:
        """Heterogeneity over distance: the boundary is at one ratio, the proposition says."""
        return self.measured_heterogeneity / self.start

    @property
    def better(self) -> str | None:
        """Which is better: "many", "one", or neither, "level"; None where seeds leave it open."""
        if within([self.lower], -FLAT, FLAT):
            return "level"
        return {True: "many", False: "one", None: None}[self.lower.positive]


class Proposition(Experiment):
    """DP-FedAvg on `HuberProblem` with E varied, at every heterogeneity and start."""

    settings: PropositionSettings

    def members(self) -> Members:
        """A member for each heterogeneity and start."""
        common = as_table(self.settings, "heterogeneity", "starts", "experiment")
        return {
            _name(heterogeneity, start): {
                **common,
                "heterogeneity": heterogeneity,
                "start": start,
            }
            for heterogeneity in self.settings.heterogeneity
            for start in self.settings.starts
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Gaps of every seed: of an output drawn at random (its mean), and of the last rounds.

        ``scheduled`` and ``fixed`` have them by E, ``tuned`` by E and length; ``bounds`` by E, of
        ``scheduled``, whose numbers of rounds are ``rounds``.
        """
        s = self.settings
        squares = LeastSquares(
            s.clients, s.dimension, s.columns, settings["heterogeneity"], s.problem_seed
        )
        problem = HuberProblem(squares, s.threshold)
        least = float(problem.values(problem.optimum)[0])
        direction = np.random.default_rng(s.problem_seed).standard_normal((1, s.dimension))
        start = problem.optimum + settings["start"] * direction / np.linalg.norm(direction)
        seeds = range(1, s.tuning_seeds + s.seeds + 1)
        eta = s.rho / problem.smoothness
        rounds = {
            e: max(1, round(settings["start"] / (eta * e * problem.lipschitz * s.rho)))
            for e in s.local_steps
        }

        def gaps(steps: int, eta: float, rounds: int) -> dict[str, list[float]]:
            values = descend(
                problem, start, eta=eta, steps=steps, noise=s.noise(rounds), rounds=rounds,
                seeds=seeds,
            )  # fmt: skip
            over = values - least
            return {"drawn": over[:-1].mean(0).tolist(), "end": over[-LAST:].mean(0).tolist()}

        return {
            "apart": least,
            "lipschitz": problem.lipschitz,
            "rounds": {f"{e}": rounds[e] for e in s.local_steps},
            "scheduled": {f"{e}": gaps(e, eta, rounds[e]) for e in s.local_steps},
            "fixed": {f"{e}": gaps(e, eta, s.rounds) for e in s.local_steps},
            "tuned": {
                f"{e}": {
                    f"{length:g}": gaps(e, length / (e * problem.smoothness), s.rounds)
                    for length in s.lengths
                }
                for e in s.local_steps
            },
            "bounds": {
                f"{e}": bound(
                    problem,
                    distance=settings["start"],
                    eta=eta,
                    steps=e,
                    noise=s.noise(rounds[e]),
                    rounds=rounds[e],
                )
                for e in s.local_steps
            },
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """Which E is best in every cell, and the theorem's bound beside what is seen."""
        cells = {key: self._cells(results, key) for key in READINGS}
        return Report(
            tables=[
                *(self._table(results, key) for key in READINGS),
                self._table_of_bounds(results),
            ],
            figures={
                "rho": self.settings.rho,
                "largest E": 1 / (2 * self.settings.rho),
                **_ratios(cells["fixed"]),
            },
            claims=[*self._claims(cells), self._below_the_bound(results)],
            pictures={"boundary": self._picture(cells)},
            choices=[
                self._choice(results[_name(heterogeneity, start)], heterogeneity, start, e)
                for heterogeneity, start in self._problems
                for e in self.settings.local_steps
            ],
        )

    @property
    def _problems(self) -> list[tuple[float, float]]:
        return [(a, start) for a in self.settings.heterogeneity for start in self.settings.starts]

    def _choice(self, result: Result, heterogeneity: float, start: float, steps: int) -> BestOfGrid:
        """The length with the lowest gap on the tuning seeds; scores are decibels below 1."""
        scores = {
            length: -10 * math.log10(np.mean(self._tuning(result, steps, length)))
            for length in self.settings.lengths
        }
        return BestOfGrid(f"eta E L, {_name(heterogeneity, start)}, E = {steps}", scores)

    def _tuning(self, result: Result, steps: int, length: float) -> list[float]:
        gaps: list[float] = result["tuned"][f"{steps}"][f"{length:g}"]["drawn"]
        return gaps[: self.settings.tuning_seeds]

    def _gaps(
        self,
        results: Mapping[str, Result],
        key: str,
        heterogeneity: float,
        start: float,
        steps: int,
    ) -> dict[str, list[float]]:
        """Gaps of the fresh seeds, of the output drawn at random and at the end."""
        result = results[_name(heterogeneity, start)]
        gaps = result[key][f"{steps}"]
        if key == "tuned":
            gaps = gaps[f"{self._choice(result, heterogeneity, start, steps).value:g}"]
        return {output: of[self.settings.tuning_seeds :] for output, of in gaps.items()}

    def _cells(self, results: Mapping[str, Result], key: str) -> list[PropositionCell]:
        """By how much the largest E ends below E = 1 in every cell, in decibels."""
        one, many = self.settings.local_steps[0], self.settings.local_steps[-1]
        return [
            PropositionCell(
                start,
                float(results[_name(heterogeneity, start)]["apart"]),
                paired(
                    *(
                        [10 * math.log10(gap) for gap in gaps["drawn"]]
                        for gaps in (
                            self._gaps(results, key, heterogeneity, start, e) for e in (one, many)
                        )
                    )
                ),
            )
            for heterogeneity, start in self._problems
        ]

    def _claims(self, cells: Mapping[str, Sequence[PropositionCell]]) -> list[ExperimentClaim]:
        many = self.settings.local_steps[-1]
        open_setting = "what stays the same while E varies"
        return [
            ExperimentClaim.under(
                "many",
                PANEL,
                f"where heterogeneity is least against the start's distance, E = {many} is better "
                "than E = 1",
                open_setting,
                {READINGS[key]: _judged(min(of, key=_ratio), "many") for key, of in cells.items()},
            ),
            ExperimentClaim.under(
                "one",
                PANEL,
                "where it is most, E = 1 is better",
                open_setting,
                {READINGS[key]: _judged(max(of, key=_ratio), "one") for key, of in cells.items()},
            ),
            ExperimentClaim.under(
                "boundary",
                PANEL,
                f"one boundary, heterogeneity in proportion to distance, has the cells where E = "
                f"{many} is better below it and those where E = 1 is above it",
                open_setting,
                {READINGS[key]: _separated(of) for key, of in cells.items()},
            ),
        ]

    def _below_the_bound(self, results: Mapping[str, Result]) -> ExperimentClaim:
        shares = [
            float(np.mean(self._gaps(results, "scheduled", heterogeneity, start, e)["drawn"]))
            / results[_name(heterogeneity, start)]["bounds"][f"{e}"]
            for heterogeneity, start in self._problems
            for e in self.settings.local_steps
        ]
        return ExperimentClaim(
            "bound",
            "Theorem 1",
            "the gap of an output drawn at random is below the bound in every cell, at every E",
            max(shares) <= 1,
            f"{100 * min(shares):.2g} to {100 * max(shares):.2g} % of it",
        )

    def _table(self, results: Mapping[str, Result], key: str) -> Table:
        rows: list[list[str | float | None]] = []
        for heterogeneity, start in self._problems:
            gaps = [
                self._gaps(results, key, heterogeneity, start, e) for e in self.settings.local_steps
            ]
            rows.append(
                [
                    f"{results[_name(heterogeneity, start)]['apart']:.3g}",
                    f"{start:g}",
                    *(f"{np.mean(of['drawn']):.3g} / {np.mean(of['end']):.3g}" for of in gaps),
                ]
            )
        columns = ["mean f_i(w*) - min f_i", "||w_0 - w*||"]
        columns += [f"E = {e}" for e in self.settings.local_steps]
        title = (
            f"f - f*, {READINGS[key]}: of an output drawn at random / over the last {LAST} rounds"
        )
        return Table(key, title, columns, rows)

    def _table_of_bounds(self, results: Mapping[str, Result]) -> Table:
        rows: list[list[str | float | None]] = []
        for heterogeneity, start in self._problems:
            result = results[_name(heterogeneity, start)]
            seen = [
                self._gaps(results, "scheduled", heterogeneity, start, e)
                for e in self.settings.local_steps
            ]
            rows.append(
                [
                    f"{result['apart']:.3g}",
                    f"{start:g}",
                    f"{result['lipschitz'] * start * self.settings.rho:.3g}",
                    " / ".join(f"{count}" for count in result["rounds"].values()),
                    *(
                        f"{np.mean(of['drawn']):.3g} / {limit:.3g}"
                        for of, limit in zip(seen, result["bounds"].values(), strict=True)
                    ),
                ]
            )
        columns = ["mean f_i(w*) - min f_i", "||w_0 - w*||", "G ||w_0 - w*|| rho", "K"]
        columns += [f"E = {e}" for e in self.settings.local_steps]
        return Table(
            "bounds", f"{SCHEDULED}: gap of an output drawn at random / its bound", columns, rows
        )

    def _picture(self, cells: Mapping[str, Sequence[PropositionCell]]) -> Figure:
        many = self.settings.local_steps[-1]
        title = f"E = {many} against E = 1; the predicted slope, right up to a constant"
        figure, panels = grid(1, len(cells), title=title, width=11.5, height=4.2)
        styles = {
            "many": (f"E = {many} is better", COLOURS["normalization"], "o"),
            "one": ("E = 1 is better", COLOURS["clipping"], "s"),
            "level": (f"level to {FLAT:g} dB", COLOURS["third"], "^"),
            None: ("not decided", COLOURS["other"], "x"),
        }
        starts = np.array([min(self.settings.starts), max(self.settings.starts)])
        for panel, (key, of) in zip(panels, cells.items(), strict=True):
            for verdict, (label, colour, marker) in styles.items():
                chosen = [cell for cell in of if cell.better == verdict]
                panel.plot(
                    [cell.start for cell in chosen],
                    [cell.measured_heterogeneity for cell in chosen],
                    linestyle="none",
                    marker=marker,
                    color=colour,
                    label=label,
                )
            for constant in (0.1, 1, 10, 100):
                panel.plot(
                    starts, constant * starts, color=INK, linewidth=0.6, linestyle="--", zorder=0
                )
            panel.set_yscale("log")
            log_ticks(panel, self.settings.starts)
            panel.set_title(READINGS[key], fontsize=9)
            panel.set_xlabel("$\\|w_0 - w^*\\|$")
        panels[0].set_ylabel("heterogeneity: mean $f_i(w^*) - \\min f_i$")
        panels[0].legend(frameon=False, fontsize=8)
        return figure


def _name(heterogeneity: float, start: float) -> str:
    return f"heterogeneity={heterogeneity:g} start={start:g}"


def _ratio(cell: PropositionCell) -> float:
    return cell.ratio


def _judged(cell: PropositionCell, expected: str) -> Outcome:
    """Whether the expected one, "many" or "one", is better in a cell."""
    measured = f"{cell.measured_heterogeneity:.3g} at {cell.start:g}: lower by {cell.lower.text} dB"
    return None if cell.better is None else cell.better == expected, measured


def _separated(cells: Sequence[PropositionCell]) -> Outcome:
    """Whether one ratio of heterogeneity to distance separates the decided cells."""
    ratios = _ratios(cells)
    below, above = ratios["highest below"], ratios["lowest above"]
    if not math.isfinite(below) or not math.isfinite(above):
        return None, "one side of it has no cell"
    return below < above, f"ratios up to {below:.3g} below it, from {above:.3g} above it"


def _ratios(cells: Sequence[PropositionCell]) -> dict[str, float]:
    """The highest ratio where the largest E is better, and the lowest where E = 1 is."""
    many = [cell.ratio for cell in cells if cell.better == "many"]
    one = [cell.ratio for cell in cells if cell.better == "one"]
    return {
        "highest below": max(many, default=-math.inf),
        "lowest above": min(one, default=math.inf),
    }
