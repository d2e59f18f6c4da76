"""Two estimates of Koskela and Honkela: the error's expansion, and how far noise drifts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from experiments.framework.base import (
    NOT_EMPTY,
    Experiment,
    ExperimentClaim,
    Members,
    Report,
    Result,
    Settings,
    Table,
    seeds_text,
)
from experiments.koskela.common import KEEPS
from fedsim.clients import AdadpLR, Step
from fedsim.clients.base import DenseGradient
from fedsim.settings import Ge, Gt

EXAMPLES, DIMENSION = 50, 10  # of the logistic regression
SUBSTEPS = 64  # of Runge and Kutta's method, for the gradient flow over one step


@dataclass(frozen=True, kw_only=True)
class KoskelaOrdersSettings(Settings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    rates : list of float
        Values of eta, each half of the one before.
    iterations : list of int
        Values of T, ascending.
    dimension : int
        d of the noise, whose gradients are ``N(0, I)``.
    tol : float
    within : float
        Relative difference that counts as equal.
    """

    rates: Annotated[list[float], NOT_EMPTY]
    iterations: Annotated[list[int], NOT_EMPTY]
    dimension: Annotated[int, Ge(1)] = 10_000
    tol: Annotated[float, Gt(0)] = 1.0
    within: Annotated[float, Gt(0)] = 0.02


class KoskelaOrders(Experiment):
    """`AdadpLR` itself, on a smooth function without noise, and on nothing but noise."""

    settings: KoskelaOrdersSettings

    def members(self) -> Members:
        """The halvings of eta, then the drift by iterate and seed."""
        s = self.settings
        return {"halvings": {"kind": "halvings", "rates": s.rates}} | {
            _name(keep, seed): {
                "kind": "drift",
                "keep": keep,
                "seed": seed,
                "iterations": s.iterations,
                "dimension": s.dimension,
                "tol": s.tol,
            }
            for keep in KEEPS
            for seed in range(1, s.seeds + 1)
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Rests by eta, or the root mean square of theta's coordinates by T."""
        return _halvings(settings) if settings["kind"] == "halvings" else _drift(settings)

    def report(self, results: Mapping[str, Result]) -> Report:
        """Both as tables."""
        s, halvings = self.settings, results["halvings"]
        rows: list[list[str | float | None]] = []
        ratios = {
            name: [a / b for a, b in zip(halvings[name], halvings[name][1:], strict=False)]
            for name in ("error", "rest")
        }
        for k, rate in enumerate(s.rates):
            row: list[str | float | None] = [f"{rate:g}"]
            for name in ("error", "rest"):
                fell = f"{ratios[name][k - 1]:.2f}" if k else ""
                row += [f"{halvings[name][k]:.3g}", fell]
            rows.append(row)
        drifts = {
            keep: np.array([results[_name(keep, k)]["drift"] for k in range(1, s.seeds + 1)])
            for keep in KEEPS
        }
        predicted = {
            "full": np.sqrt(2 * np.array(s.iterations) / s.dimension) * s.tol,
            "half": np.sqrt(np.array(s.iterations) / s.dimension) * s.tol,
        }
        off = {keep: float(np.abs(drifts[keep] / predicted[keep] - 1).max()) for keep in KEEPS}
        drift_rows: list[list[str | float | None]] = [
            [
                f"{count}",
                *(
                    f"{value:.4g}"
                    for keep in KEEPS
                    for value in (drifts[keep][:, k].mean(), predicted[keep][k])
                ),
            ]
            for k, count in enumerate(s.iterations)
        ]
        last = ratios["rest"][-1]
        return Report(
            tables=[
                Table(
                    "halvings",
                    "Errors of one step by eta, and the factor by which a halving makes them less",
                    ["eta", "full less half", "factor", "rest", "factor"],
                    rows,
                ),
                Table(
                    "drift",
                    f"Root mean square of theta's coordinates after T iterations of noise alone, "
                    f"d = {s.dimension:,}, mean of {seeds_text(s.seeds)}",
                    ["T", "full", "sqrt(2 T) tol / sqrt(d)", "half", "sqrt(T) tol / sqrt(d)"],
                    drift_rows,
                ),
            ],
            figures={f"rest {k + 1}": ratio for k, ratio in enumerate(ratios["rest"])}
            | {f"drift {keep}": 100 * off[keep] for keep in KEEPS},
            claims=[
                ExperimentClaim(
                    "rest",
                    "The error's expansion",
                    "what twice the difference of half steps and full step leaves of the full "
                    "step's error falls by a factor of 8 with eta's halving, within "
                    f"{100 * s.within:g} % at the last",
                    abs(last / 8 - 1) <= s.within,
                    ", ".join(f"{ratio:.2f}" for ratio in ratios["rest"]),
                ),
                *(
                    ExperimentClaim(
                        f"drift-{keep}",
                        "The derivation of tol",
                        f"{KEEPS[keep]}: noise moves a coordinate by {formula} in T iterations, "
                        f"within {100 * s.within:g} %",
                        off[keep] <= s.within,
                        f"{100 * off[keep]:.2f} % off at most",
                    )
                    for keep, formula in (
                        ("full", "sqrt(2 T) tol / sqrt(d)"),
                        ("half", "sqrt(T) tol / sqrt(d)"),
                    )
                ),
            ],
        )


def _name(keep: str, seed: int) -> str:
    return f"drift keep={keep} seed={seed}"


def _halvings(settings: Mapping[str, Any]) -> Result:
    """Of one iteration without noise: ``||full - hat||``, and ``||flow - (2 hat - full)||``."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, DIMENSION, generator=generator, dtype=torch.float64)
    y = (torch.rand(EXAMPLES, generator=generator) < 0.5).double()
    start = torch.randn(DIMENSION, generator=generator, dtype=torch.float64)

    def gradient(theta: Tensor) -> Tensor:
        return x.T @ (torch.sigmoid(x @ theta) - y) / EXAMPLES

    errors, rests = [], []
    for rate in settings["rates"]:
        full, half = (_iteration(keep, rate, start, gradient) for keep in ("full", "half"))
        errors.append(float(torch.linalg.vector_norm(full - half)))
        ahead = _flow(start, rate, gradient)
        rests.append(float(torch.linalg.vector_norm(ahead - (2 * half - full))))
    return {"error": errors, "rest": rests}


def _iteration(
    keep: str, rate: float, start: Tensor, gradient: Callable[[Tensor], Tensor]
) -> Tensor:
    algorithm = _algorithm(keep, rate, tol=1.0)
    state = algorithm.init(start[None], _numbers(algorithm))
    for index in range(2):
        at = algorithm.point(state)[0]
        algorithm.step(state, DenseGradient(gradient(at)[None]), Step(1, index))
    return algorithm.finish(state)[0]


def _flow(theta: Tensor, time: float, gradient: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient flow of ``theta`` after ``time``."""
    h = time / SUBSTEPS
    for _ in range(SUBSTEPS):
        a = gradient(theta)
        b = gradient(theta - h / 2 * a)
        c = gradient(theta - h / 2 * b)
        theta = theta - h / 6 * (a + 2 * b + 2 * c + gradient(theta - h * c))
    return theta


def _drift(settings: Mapping[str, Any]) -> Result:
    """From theta = 0 and the rate at which the error of noise alone is tol."""
    d, tol = settings["dimension"], settings["tol"]
    algorithm = _algorithm(settings["keep"], math.sqrt(2 / d) * tol, tol)
    theta = torch.zeros(1, d, dtype=torch.float64)
    state = algorithm.init(theta, _numbers(algorithm))
    generator = torch.Generator().manual_seed(settings["seed"])
    drift = []
    for iteration in range(1, max(settings["iterations"]) + 1):
        for index in range(2):
            noise = torch.randn(1, d, generator=generator, dtype=torch.float64)
            algorithm.step(state, DenseGradient(noise), Step(1, index))
        if iteration in settings["iterations"]:
            drift.append(float(torch.linalg.vector_norm(algorithm.finish(state))) / math.sqrt(d))
    return {"drift": drift}


def _algorithm(keep: str, rate: float, tol: float) -> AdadpLR:
    return AdadpLR(lr=rate, tol=tol, keep="full" if keep == "full" else "half", discard=False)


def _numbers(algorithm: AdadpLR) -> dict[str, Tensor]:
    return {
        name: torch.tensor([value], dtype=torch.float64)
        for name, value in algorithm.numbers().items()
    }
