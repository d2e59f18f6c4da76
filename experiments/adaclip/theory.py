"""Pichapati et al.: closed forms of their analysis, beside simulations with fedsim's own parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.framework.base import (
    Experiment,
    ExperimentClaim,
    Members,
    Report,
    Result,
    Row,
    Settings,
    Table,
)
from fedsim.mechanisms import AdaClip
from fedsim.reports.plots import COLOURS, curve_style, grid
from fedsim.strategies import sgd

NOISE, ESTIMATE, BOUND, MOMENTUM = "noise", "estimate", "bound", "momentum"
ERRORS = 4.0  # standard errors within which a simulation agrees with a closed form


@dataclass(frozen=True, kw_only=True)
class TheorySettings(Settings):
    """Keys of ``experiment.toml``; ``seeds`` is the number of runs of the descent."""

    draws: int
    noise_multiplier: float
    gammas: list[float]
    dimensions: list[int]
    steps: int
    rate: float
    momenta: list[float]


class Theory(Experiment):
    """Four checks, of seconds each."""

    settings: TheorySettings

    def members(self) -> Members:
        """One for every gamma, dimension and momentum."""
        settings = self.settings
        z, draws, steps = settings.noise_multiplier, settings.draws, settings.steps
        rows = {"draws": draws, "noise-multiplier": z}
        descent = {"steps": steps, "rate": settings.rate, "seeds": settings.seeds}
        return {
            **{
                f"{part} gamma={gamma:g}": {"part": part, "gamma": gamma, **rows}
                for part in (NOISE, ESTIMATE)
                for gamma in settings.gammas
            },
            **{
                f"{BOUND} d={d}": {"part": BOUND, "dimension": d, "noise-multiplier": z, **descent}
                for d in settings.dimensions
            },
            **{
                f"{MOMENTUM} {momentum:g}": {"part": MOMENTUM, "momentum": momentum, "draws": draws}
                for momentum in settings.momenta
            },
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """One check."""
        match settings["part"]:
            case "noise":
                return distortion(
                    settings["gamma"], settings["noise-multiplier"], settings["draws"]
                )
            case "estimate":
                return variances(settings["gamma"], settings["noise-multiplier"], settings["draws"])
            case "bound":
                return descents(
                    settings["dimension"],
                    settings["noise-multiplier"],
                    settings["rate"],
                    settings["steps"],
                    settings["seeds"],
                )
            case _:
                return momentum_noise(settings["momentum"], settings["draws"])

    def report(self, results: Mapping[str, Result]) -> Report:
        """A table, a picture and the claims of every check."""
        settings = self.settings
        noise = [results[f"{NOISE} gamma={gamma:g}"] for gamma in settings.gammas]
        estimate = [results[f"{ESTIMATE} gamma={gamma:g}"] for gamma in settings.gammas]
        bound = [results[f"{BOUND} d={d}"] for d in settings.dimensions]
        momentum = [results[f"{MOMENTUM} {momentum:g}"] for momentum in settings.momenta]
        return Report(
            tables=[
                _table(NOISE, "gamma", settings.gammas, noise),
                _table(ESTIMATE, "gamma", settings.gammas, estimate),
                _table(BOUND, "d", settings.dimensions, bound),
                _table(MOMENTUM, "momentum", settings.momenta, momentum),
            ],
            figures={},
            claims=[
                _within_errors(
                    "identity", "Noise and clipping",
                    "E ||g~ - g||^2 is the square that clipping loses plus z^2 ||b||^2",
                    [(one["measured"], one["closed"], one["error"]) for one in noise],
                ),
                ExperimentClaim(
                    "clipped", "Noise and clipping",
                    "at most a share gamma of rows is clipped (Markov)",
                    all(one["clipped"] <= g for one, g in zip(noise, settings.gammas, strict=True)),
                    "; ".join(
                        f"gamma = {g:g}: {one['clipped']:.4f}"
                        for one, g in zip(noise, settings.gammas, strict=True)
                    ),
                ),
                _within_errors(
                    "estimate", "Estimate of the variance",
                    "without clipping, (g~ - m)^2 - z^2 b^2 estimates the variance without bias",
                    [(estimate[-1]["measured"], estimate[-1]["closed"], estimate[-1]["error"])],
                ),
                ExperimentClaim(
                    "bound", "Convergence",
                    "the mean squared gradient is below the bound, for both b in every dimension",
                    all(
                        one[f"{b} measured"] <= one[f"{b} bound"]
                        for one in bound for b in ("adaclip", "isotropic")
                    ),
                    "; ".join(
                        f"d = {d}: {one['adaclip measured']:.3g} <= {one['adaclip bound']:.3g}, "
                        f"{one['isotropic measured']:.3g} <= {one['isotropic bound']:.3g}"
                        for d, one in zip(settings.dimensions, bound, strict=True)
                    ),
                ),
                _within_errors(
                    "momentum", "Momentum",
                    "momentum b scales the noise of a step by sqrt((1 - b) / (1 + b))",
                    [(one["measured"], one["closed"], one["error"]) for one in momentum],
                ),
            ],
            pictures={"theory": _picture(settings.dimensions, bound)},
        )  # fmt: skip


def gradients(draws: int, d: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Rows ``[draws, d]`` with means and standard deviations that differ by coordinate."""
    mean = torch.linspace(-1, 1, d, dtype=torch.float64)
    s = torch.logspace(0, -2, d, dtype=torch.float64)
    generator = np.random.Generator(np.random.Philox(key=1))
    normal = torch.from_numpy(generator.standard_normal((draws, d)))
    return mean + s * normal, mean, s


def released(gamma: float, z: float, draws: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Rows, each released alone by AdaCliP at the true m and s.

    Returns
    -------
    The rows, g~ without noise, g~, s, and the share of clipped rows.
    """
    rows, mean, s = gradients(draws)
    mechanism = AdaClip(1.0, gamma=gamma, h2=1.0)
    round_state = mechanism.round_state({"m": mean, "s": s})
    whitened = (rows - mean) * round_state["scale"]
    lengths = torch.linalg.vector_norm(whitened, dim=1)
    bounded = whitened * (1 / lengths).clamp(max=1.0)[:, None]
    noise = np.random.Generator(np.random.Philox(key=2)).standard_normal(rows.shape)
    silent = mechanism.restore(bounded, round_state)
    noisy = mechanism.restore(bounded + z * torch.from_numpy(noise), round_state)
    return rows, silent, noisy, s, float((lengths > 1).double().mean())


def distortion(gamma: float, z: float, draws: int) -> Result:
    """``E ||g~ - g||^2``, its part by clipping, and its part by noise in closed form."""
    rows, silent, noisy, s, clipped = released(gamma, z, draws)
    lost = (silent - rows).square().sum(1)
    total = (noisy - rows).square().sum(1)
    added = z**2 * float(s.sum()) ** 2 / gamma
    return {
        "clipping": float(lost.mean()),
        "noise": added,
        "closed": float(lost.mean()) + added,
        "measured": float(total.mean()),
        # The rows are the same on both sides, so that only the noise's draws tell them apart.
        "error": float((total - lost).std()) / math.sqrt(draws),
        "clipped": clipped,
    }


def variances(gamma: float, z: float, draws: int) -> Result:
    """The sum of AdaCliP's estimates of variances of single releases, and of the true variances."""
    mechanism = AdaClip(1.0, gamma=gamma, h1=1e-60, h2=1e60, beta2=0.0, clamp="post")
    _, _, noisy, s, clipped = released(gamma, z, draws)
    _, mean, _ = gradients(1)
    round_state = mechanism.round_state({"m": mean, "s": s})
    estimates = (noisy - mean).square() - (z * round_state["b"]).square()
    return {
        "closed": float(s.square().sum()),
        "measured": float(estimates.sum(1).mean()),
        "error": float(estimates.sum(1).std()) / math.sqrt(draws),
        "clipped": clipped,
    }


def descents(d: int, z: float, rate: float, steps: int, runs: int) -> Result:
    """Mean squared gradients of ``f = ||theta||^2 / 2``, with noise of both b, and their bound.

    Gradients vary in one coordinate by 1 and in the others by .01, b does not change, and nothing
    is clipped. With ``rate <= 1 / L``, L = 1, smoothness gives
    ``mean_t E ||grad f||^2 <= 2 (f(theta_0) - f*) / (rate T) + L rate (sigma_g^2 + z^2 ||b||^2)``.
    """
    s = torch.full((d,), 0.01, dtype=torch.float64)
    s[0] = 1.0
    generator = np.random.Generator(np.random.Philox(key=3))
    start = torch.from_numpy(generator.standard_normal((runs, d))) / math.sqrt(d)
    result: Result = {}
    for name, b in (
        ("adaclip", s.sqrt() * s.sum().sqrt()),
        ("isotropic", torch.full_like(s, float(torch.linalg.vector_norm(s)))),
    ):
        theta, squares = start, torch.zeros(runs, dtype=torch.float64)
        for _ in range(steps):
            squares += theta.square().sum(1)
            drawn = torch.from_numpy(generator.standard_normal((2, runs, d)))
            theta = theta - rate * (theta + s * drawn[0] + z * b * drawn[1])
        variance = float(s.square().sum()) + z**2 * float(b.square().sum())
        first = float(start.square().sum(1).mean()) / 2
        result[f"{name} measured"] = float(squares.mean()) / steps
        result[f"{name} bound"] = 2 * first / (rate * steps) + rate * variance
    return result


def momentum_noise(momentum: float, draws: int) -> Result:
    """Standard deviation of a step of SGD with momentum over that of one without, in noise alone.

    The rate is times ``1 - momentum``, so that both move as far.
    """
    optimizer, generator = sgd(1 - momentum, momentum), np.random.Generator(np.random.Philox(key=4))
    vector = torch.zeros(draws, dtype=torch.float64)
    for _ in range(math.ceil(12 / (1 - momentum)) if momentum else 1):  # until it is stationary
        before = vector
        vector = optimizer.step(vector, torch.from_numpy(generator.standard_normal(draws)))
    return {
        "closed": math.sqrt((1 - momentum) / (1 + momentum)),
        "measured": float((vector - before).std()),
        "error": math.sqrt((1 - momentum) / (1 + momentum) / (2 * draws)),
    }


def _within_errors(
    name: str, panel: str, says: str, pairs: list[tuple[float, float, float]]
) -> ExperimentClaim:
    """Claim that simulations agree with closed forms."""
    return ExperimentClaim(
        name,
        panel,
        says,
        all(abs(measured - closed) <= ERRORS * error for measured, closed, error in pairs),
        "; ".join(
            f"{measured:.5g} ± {error:.2g}, closed form {closed:.5g}"
            for measured, closed, error in pairs
        ),
    )


def _table(name: str, what: str, values: list[Any], results: list[Result]) -> Table:
    rows: list[Row] = [
        [f"{value:g}", *(f"{number:.5g}" for number in result.values())]
        for value, result in zip(values, results, strict=True)
    ]
    return Table(name, TITLES[name], [what, *results[0]], rows)


TITLES = {
    NOISE: "E ||g~ - g||^2: its parts, their sum, and a simulation",
    ESTIMATE: "Sum over coordinates of the variance, and of its estimates",
    BOUND: "Mean squared gradient and its bound, with AdaCliP's b and with clipping's",
    MOMENTUM: "Noise of a step, as a share of that without momentum",
}


def _picture(dimensions: list[int], bound: list[Result]) -> Figure:
    title = "What the bound of a descent says of the dimension"
    figure, (axis,) = grid(1, 1, title=title, width=6, height=4)
    for name, label, colour in (
        ("isotropic", "clipping's b", COLOURS["clipping"]),
        ("adaclip", "AdaCliP's b", COLOURS["adaclip"]),
    ):
        measured = [one[f"{name} measured"] for one in bound]
        axis.plot(dimensions, measured, **curve_style(colour), label=f"{label}, measured")
        axis.plot(
            dimensions,
            [one[f"{name} bound"] for one in bound],
            "--",
            color=colour,
            label=f"{label}, bound",
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("dimension")
    axis.set_ylabel("mean squared gradient")
    axis.legend(frameon=False, fontsize=8)
    return figure
