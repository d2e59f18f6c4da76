"""The rate at which private ADADP settles, from several starting rates and by formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.framework.base import ExperimentClaim, Report, Result, Table
from experiments.framework.config_runs import ConfigRunsSettings
from experiments.koskela.common import Koskela
from fedsim.config import RunConfig, Scalar
from fedsim.reports.plots import COLOURS, INK, curve_style, grid
from fedsim.runs.resolve import resolve


@dataclass(frozen=True, kw_only=True)
class KoskelaRateSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    starts : list of float
        Values of eta_0.
    sigmas : list of float
        Noise multipliers.
    settled : int
        The iteration after which all rates are expected to be equal; at least so many are run.
    within : float
        Relative difference from the formula that counts as equal.
    """

    starts: list[float]
    sigmas: list[float]
    settled: int = 50
    within: float = 0.02


def settled_rate(config: RunConfig, parameters: int) -> float:
    """Rate at which ADADP's err is tol under noise alone: ``sqrt(2) tol |B| / (sigma C sqrt(d))``.

    The two half steps differ from the full one by ``eta/2 (G2 - G1)``, whose noise has standard
    deviation ``sqrt(2) sigma C / |B|`` in each of d coordinates (before the factor ``eta/2``); as
    long as ``|theta| <= 1``, the norm of the difference is err.
    """
    client = config.client
    tol = 1.0 if client.tol is None else client.tol
    noise: float = (client.noise.multiplier or 0.0) * client.mechanism.clip_norm
    return math.sqrt(2) * tol * client.batch_size / (noise * math.sqrt(parameters))


class KoskelaRate(Koskela):
    """Runs with rounds of a few iterations, after each of which the client reports its rate."""

    settings: KoskelaRateSettings

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Every starting rate at every sigma."""
        return {
            _name(start, sigma): {
                "client.lr": start,
                "client.noise.multiplier": sigma,
            }
            for sigma in self.settings.sigmas
            for start in self.settings.starts
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """The result of the run, with the number of parameters."""
        return {
            **super().run(settings),
            "parameters": resolve(self.config_of(settings)).trainer.layout.d,
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """Rates at the iteration ``settled`` and at the end, against the formula's."""
        s = self.settings
        parameters = next(iter(results.values()))["parameters"]
        predicted = {
            sigma: settled_rate(self.base.replace(**{"client.noise.multiplier": sigma}), parameters)
            for sigma in s.sigmas
        }
        of_seeds = {
            (start, sigma): np.array([r["eta"] for r in self.of_plan(results, _name(start, sigma))])
            for sigma in s.sigmas
            for start in s.starts
        }
        rates = {key: by_seed.mean(axis=0) for key, by_seed in of_seeds.items()}
        settled = math.ceil(s.settled / self._iterations) - 1
        rows: list[list[str | float | None]] = []
        figures, claims = {}, []
        for sigma in s.sigmas:
            reached = [float(rates[start, sigma][settled]) for start in s.starts]
            figures[f"predicted sigma={sigma:g}"] = predicted[sigma]
            for start, rate in zip(s.starts, reached, strict=True):
                end = float(rates[start, sigma][-1])
                figures[f"eta sigma={sigma:g} from {start:g}"] = rate
                rows.append([f"{sigma:g}", f"{start:g}", rate, end, predicted[sigma]])
            settled_rates = np.array([of_seeds[start, sigma][:, settled] for start in s.starts])
            off = float(np.abs(settled_rates / predicted[sigma] - 1).max())
            claims.append(
                ExperimentClaim(
                    f"settles-sigma{sigma:g}",
                    "The settled rate",
                    f"at sigma = {sigma:g}, from every start and with every seed the rate is "
                    f"within {100 * s.within:g} % of the formula's after {s.settled} iterations",
                    off <= s.within,
                    f"{100 * off:.2f} % off at most",
                )
            )
        title = (
            f"ADADP's rate at iteration {(settled + 1) * self._iterations}, at the end, and by "
            f"formula (d = {parameters})"
        )
        columns = ["sigma", "eta_0", "eta", "eta at the end", "sqrt(2) tol |B| / (sigma C sqrt d)"]
        return Report(
            tables=[Table("rates", title, columns, rows, digits=5)],
            figures=figures,
            claims=claims,
            pictures={"rates": self._picture(rates, predicted)},
        )

    @property
    def _iterations(self) -> int:
        """Iterations per round, of two gradients each."""
        return self.base.client.steps // 2

    def _picture(
        self, rates: Mapping[tuple[float, float], np.ndarray], predicted: Mapping[float, float]
    ) -> Figure:
        s = self.settings
        figure, axes = grid(
            1,
            len(s.sigmas),
            title=f"ADADP's rate from {len(s.starts)} starts ({self.base.data.name})",
            width=max(4.2 * len(s.sigmas), 6.5),
        )
        colours = (COLOURS["normalization"], COLOURS["clipping"], COLOURS["third"])
        for panel, sigma in zip(axes, s.sigmas, strict=True):
            for k, start in enumerate(s.starts):
                values = [start, *rates[start, sigma]]
                panel.plot(
                    np.arange(len(values)) * self._iterations,
                    values,
                    **curve_style(colours[k % len(colours)]),
                    label=f"$\\eta_0$ = {start:g}",
                )
            panel.axhline(
                predicted[sigma],
                color=INK,
                linestyle="--",
                linewidth=1,
                label=f"formula: {predicted[sigma]:.4f}",
            )
            panel.set_yscale("log")
            panel.set_title(f"$\\sigma$ = {sigma:g}", fontsize=10)
            panel.set_xlabel("iteration")
            panel.legend(frameon=False, fontsize=8)
        axes[0].set_ylabel("$\\eta$")
        return figure


def _name(start: float, sigma: float) -> str:
    return f"from {start:g} sigma={sigma:g}"
