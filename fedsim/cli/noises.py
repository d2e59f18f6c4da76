"""`fedsim privacy CONFIG --noises`: a comparison of kinds of noise at one epsilon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedsim import registry
from fedsim.cli.console import Output, check_out
from fedsim.config import RunConfig
from fedsim.config.plan import resolve_bands, uncalibrated_plan
from fedsim.errors import FedsimError
from fedsim.privacy.assumptions import large_delta
from fedsim.privacy.noise import Correlated
from fedsim.privacy.plan import ReleasePlan
from fedsim.reports.charts import Line, Lines
from fedsim.reports.pictures import picture
from fedsim.reports.plots import save


@dataclass(frozen=True)
class NoisePlan:
    """A config's release plan with one kind of noise, calibrated to the config's epsilon."""

    name: str
    plan: ReleasePlan[Any]

    @property
    def cumulative_deviations(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Standard deviation, over C, of the noise in the sum of rounds 1 .. t, for each t."""
        deviations = np.sqrt(self.plan.noise.variances(self.plan.rounds or 1))
        return np.asarray(self.plan.noise.multiplier * deviations)

    @property
    def error(self) -> float:
        """Root mean square of `cumulative_deviations` over rounds."""
        return float(np.sqrt(np.square(self.cumulative_deviations).mean()))

    @property
    def coefficients(self) -> str:
        """First four coefficients of correlated noise, as text; empty for other noise."""
        noise = self.plan.noise
        if not isinstance(noise, Correlated):
            return ""
        numbers = noise.coefficients.split()
        return " ".join(f"{float(n):.3g}" for n in numbers[:4]) + " ..." * (len(numbers) > 4)


def show_noises(source: Path | None, overrides: list[str], picture: Path | None) -> None:
    """Print the table, and draw the picture if it has a path.

    Raises
    ------
    FedsimError
        If the source is no config, or claims no privacy at client level.
    """
    if picture is not None:
        check_out(picture, ".png", "--picture")
    if source is None or source.suffix != ".toml":
        raise FedsimError(
            f"--noises compares plans of a config; {source or 'the source'} must be a .toml file."
        )
    config = resolve_bands(RunConfig.load(source, overrides))
    if not config.private:
        raise FedsimError(
            "--noises compares the noise of the server's releases; mechanism.name and "
            "noise.multiplier, or noise.target-epsilon, must claim privacy for clients."
        )
    delta = config.noise.delta
    epsilon = config.noise.target_epsilon or _plan_of(config).epsilon(delta)
    plans = sorted(_plans(config, epsilon, delta), key=lambda candidate: candidate.error)
    console = Output()
    title = f"epsilon {epsilon:.4g} at delta {delta:g}, {config.rounds:,} rounds"
    console.print(_table(plans, title))
    console.print(
        "The error is the standard deviation of the noise in the sum of all releases up to a round "
        "(root mean square over rounds), which a server that adds up updates has in its model, in "
        "units of the clip norm. Correlated noise needs a constant clip norm, as with clipping."
    )
    if warning := large_delta(config.noise.delta, "client", config.partition.clients):
        console.print(warning)
    if picture is not None:
        _draw(plans, f"Noise in the model at epsilon {epsilon:.4g}", picture)
        console.print_files({picture: "the picture"})


def _plans(config: RunConfig, epsilon: float, delta: float) -> Iterator[NoisePlan]:
    """The config's plan with each of fedsim's own kinds of noise, calibrated to an epsilon."""
    noise = config.noise
    settings = (setting.key for setting in noise.declared_settings(noise.name))
    own_keys = {noise.key(key) for key in (*settings, "options")}
    others = {k: value for k, value in config.to_run_config().items() if k not in own_keys}
    for name in registry.names("noise"):
        changed = config
        if name != noise.name:
            changed = RunConfig.from_run_config({**others, "noise.name": name})
        if name not in registry.plugins("noise"):
            yield NoisePlan(name, _plan_of(changed).calibrated(epsilon, delta))


def _plan_of(config: RunConfig) -> ReleasePlan[Any]:
    return uncalibrated_plan(config, config.mechanism.make())


def _table(plans: Sequence[NoisePlan], title: str) -> Table:
    independent = next(candidate.error for candidate in plans if candidate.name == "independent")
    table = Table(title=title)
    for name in ("noise", "error", "of independent", "multiplier", "amplified", "coefficients"):
        table.add_column(name, justify="left" if name in ("noise", "coefficients") else "right")
    for candidate in plans:
        table.add_row(
            candidate.name,
            f"{candidate.error:.4g}",
            f"{candidate.error / independent:.2f}",
            f"{candidate.plan.noise.multiplier:.4g}",
            "yes" if candidate.plan.amplified else "no",
            candidate.coefficients,
        )
    return table


def _draw(plans: Sequence[NoisePlan], title: str, path: Path) -> None:
    lines = [
        Line(
            candidate.name,
            list(range(1, len(candidate.cumulative_deviations) + 1)),
            candidate.cumulative_deviations.tolist(),
        )
        for candidate in plans
    ]
    y = "standard deviation of the noise, over C"
    save(picture([Lines(title, "round", y, lines, from_zero=True)], title), path)
