"""Xu et al., Fig. 1: private descent on the Beale function with uniform and adaptive noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes

from experiments.framework.base import Result
from fedsim.cohorts import FullCohort
from fedsim.mechanisms import (
    AdaptiveNoise,
    Clipping,
    Mechanism,
    NoiseSource,
    NoPrivacy,
    Releaser,
)
from fedsim.privacy import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.reports.plots import COLOURS, INK, curve_style
from fedsim.rows import DenseRows, Layout

Floats = npt.NDArray[np.float64]

MINIMUM = np.array([3.0, 0.5])
METHODS = {
    "free": ("no noise", COLOURS["fedavg"]),
    "uniform": ("uniform noise (clipping)", COLOURS["clipping"]),
    "adaptive": ("adaptive noise, released statistics", COLOURS["adaclip"]),
    "raw": ("adaptive noise as printed (not private)", COLOURS["literal"]),
}
_CONSTANTS = (1.5, 2.25, 2.625)


EVERY = 5  # steps between two stored distances


def beale(x: Any, y: Any) -> Any:
    """``sum_k (c_k - x + x y^k)^2``, zero at (3, 1/2)."""
    return sum((c - x + x * y**k) ** 2 for k, c in enumerate(_CONSTANTS, 1))


def gradient(w: Floats) -> Floats:
    """Gradient ``[2]`` at ``w [2]``."""
    x, y = w
    terms = [(k, c - x + x * y**k) for k, c in enumerate(_CONSTANTS, 1)]
    return np.array(
        [
            sum(2 * term * (y**k - 1) for k, term in terms),
            sum(2 * term * x * k * y ** (k - 1) for k, term in terms),
        ]
    )


def descend(settings: Mapping[str, Any]) -> Result:
    """Run RMSProp on released gradients; a gradient is one row, and each step one release.

    The paper's step: ``E <- (1 - gamma) E + gamma g~^2``, ``w <- w - eta g~ / sqrt(E + eps0)``.
    """
    mechanism, z = _mechanism(settings)
    layout = Layout.of({"w": torch.zeros(2, dtype=torch.float64)})
    plan = ReleasePlan(
        level="example", sampler=FullCohort(1), mechanism=mechanism, noise=Independent(z)
    )
    releaser = Releaser(plan, layout)
    state, randomness = mechanism.init(layout), Randomness(settings["seed"])
    w, second = np.array(settings["start"]), np.zeros(2)
    path = [w.tolist()]
    for step in range(1, settings["steps"] + 1):
        total = releaser.start(state)
        total.add(DenseRows(torch.from_numpy(gradient(w))[None]))
        source = NoiseSource(randomness.generator(Purpose.NOISE, level="example", round=step))
        release = releaser.release(total, source)
        state, noisy = release.state, release.mean.numpy()
        second = (1 - settings["gamma"]) * second + settings["gamma"] * noisy**2
        w = w - settings["rate"] * noisy / np.sqrt(second + 1e-8)
        path.append(w.tolist())
    distance = np.linalg.norm(np.array(path) - MINIMUM, axis=1)
    result = {"end": float(distance[-1]), "distance": distance[::EVERY].tolist()}
    return {**result, "path": path} if settings["seed"] == 1 else result


def _mechanism(settings: Mapping[str, Any]) -> tuple[Mechanism, float]:
    z = settings["noise-multiplier"]
    if settings["method"] == "free":
        return NoPrivacy("uniform"), 0.0
    if settings["method"] == "uniform":
        return Clipping(settings["clip-norm"]), z
    adaptive = AdaptiveNoise(
        clip_norm=settings["clip-norm"],
        threshold=settings["threshold"],
        beta=settings["beta"],
        decay=settings["decay"],
        floor=settings["floor"],
        unsafe_non_private_raw_statistics=settings["method"] == "raw",
    )
    return adaptive, z


def draw(space: Axes, curves: Axes, runs: Mapping[str, list[Result]]) -> None:
    """Draw each method's path of the first seed over the contours, and distances of all seeds."""
    x, y = np.meshgrid(np.linspace(-0.5, 4.5, 220), np.linspace(-1.5, 2.4, 200))
    levels = np.geomspace(0.05, 2e3, 16)
    space.contour(x, y, beale(x, y), levels=levels, colors="#cccccc", linewidths=0.6)
    for method, (label, colour) in METHODS.items():
        path = np.array(runs[method][0]["path"])
        space.plot(*path.T, **curve_style(colour), linewidth=1.1, label=label)
        space.plot(*path[-1], "o", color=colour, markersize=4)
        distance = np.array([run["distance"] for run in runs[method]])
        steps = EVERY * np.arange(distance.shape[1])
        curves.plot(steps, np.median(distance, 0), **curve_style(colour), label=label)
        low, high = np.quantile(distance, [0.25, 0.75], axis=0)
        curves.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    space.plot(*np.array(runs["free"][0]["path"][0]), "s", color=INK, markersize=5)
    space.plot(*MINIMUM, "*", color=INK, markersize=11)
    space.set_xlabel("x")
    space.set_ylabel("y")
    space.set_xlim(-0.5, 4.5)
    space.set_ylim(-1.5, 2.4)
    space.set_title("Fig. 1: Beale function, first seed", fontsize=10)
    curves.set_title("distance to (3, .5): median and quartiles", fontsize=10)
    curves.set_xlabel("iteration")
    curves.set_ylim(bottom=0)
    curves.legend(frameon=False, fontsize=8)
