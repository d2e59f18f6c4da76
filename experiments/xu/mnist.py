"""Xu et al. on MNIST: adaptive noise against clipping, over a grid of G, beta and rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from matplotlib.figure import Figure
from torch import Tensor

from experiments.adaclip.central import DenseNet, train
from experiments.adaclip.mnist import load_images
from experiments.framework.base import (
    NOT_EMPTY,
    BestOfGrid,
    Experiment,
    ExperimentClaim,
    Members,
    Outcome,
    Report,
    Result,
    Row,
    Settings,
    Table,
    as_table,
    seeds_text,
)
from experiments.framework.spread import mean_text, over_seeds, paired
from fedsim.cohorts import PoissonCohort
from fedsim.mechanisms import AdaptiveNoise, Clipping, Mechanism
from fedsim.privacy import Ledger, calibrate
from fedsim.reports.plots import COLOURS, grid
from fedsim.server_optimizers.base import StatefulOptimizer

CLIPPING = "clipping"
TUNING_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Switch:
    """When adaptive noise replaces clipping, and of what its statistics are.

    Attributes
    ----------
    threshold : float
        G.
    test : str
        ``AdaptiveNoise.switch``.
    raw : bool
        Statistics of un-noised gradients, as printed: not private.
    betas : list of float
        Values of beta; the common ones if it is empty.
    """

    name: str
    threshold: float
    test: str = "mean-square"
    raw: bool = False
    betas: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class XuMnistSettings(Settings):
    """Keys of ``experiment.toml``; ``seeds`` counts the fresh seeds, after the one that tunes."""

    examples: int
    batch: float
    epochs: int
    epsilon: float
    delta: float
    clip_norm: float
    gamma: float  # weight of the new square in RMSProp
    decay: float  # gamma'
    rates: Annotated[list[float], NOT_EMPTY]
    betas: Annotated[list[float], NOT_EMPTY]
    switches: Annotated[list[Switch], NOT_EMPTY]


class XuMnist(Experiment):
    """Softmax regression by private RMSProp; beta and rate are chosen for each switch."""

    settings: XuMnistSettings

    def members(self) -> Members:
        """Clipping at every rate, and every switch at every beta and rate, with one seed."""
        return {
            _name(*one): self._member(*one)
            for switch in (None, *self.settings.switches)
            for beta in self._betas(switch)
            for rate in self.settings.rates
            for one in [(switch, beta, rate, TUNING_SEED)]
        }

    def followers(self, results: Mapping[str, Result]) -> Members:
        """Fresh seeds of clipping and of every switch, at what was chosen."""
        return {
            _name(*one): self._member(*one)
            for seed in self._fresh
            for switch in (None, *self.settings.switches)
            for one in [(switch, *self._chosen(results, switch), seed)]
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """Train once: accuracy by epoch, and the share of steps with adaptive noise."""
        x, y, test = load_images("mnist", str(self.data), settings["examples"])
        z = calibrate(
            target_epsilon=settings["epsilon"],
            cohort=PoissonCohort(rate=settings["batch"] / len(y)),
            rounds=settings["epochs"] * round(len(y) / settings["batch"]),
            delta=settings["delta"],
        )
        outcome = train(
            DenseNet((x.shape[1], 10)),
            lambda index: x[index].double(),
            y,
            test,
            mechanism=_mechanism(settings),
            noise_multiplier=z,
            batch=settings["batch"],
            epochs=settings["epochs"],
            optimizer=PaperRMSProp(settings["rate"], settings["gamma"]),
            seed=settings["seed"],
            ledger=Ledger(delta=settings["delta"]),
        )
        return {"accuracy": outcome.accuracy, "adaptive": outcome.info.get("adaptive", 0.0)}

    def report(self, results: Mapping[str, Result]) -> Report:
        """The grid of the tuning seed, the fresh seeds, and the paper's claim for every G."""
        settings = self.settings
        baseline = self._finals(results, None)
        rows: list[Row] = [
            ["clipping", None, self._chosen(results, None)[1], None, mean_text(baseline), None]
        ]
        readings: dict[str, Outcome] = {}
        figures = {CLIPPING: over_seeds(baseline)[0]}
        for switch in settings.switches:
            finals, chosen = self._finals(results, switch), self._chosen(results, switch)
            gain = paired(finals, baseline)
            share = 100 * over_seeds([run["adaptive"] for run in self._judged(results, switch)])[0]
            cells = [f"{chosen[0]:g}", f"{chosen[1]:g}", f"{share:.0f} %"]
            rows.append([switch.name, *cells, mean_text(finals), gain.text])
            readings[switch.name] = gain.positive, f"{gain.text}, {share:.0f} % of steps adaptive"
            figures |= {switch.name: over_seeds(finals)[0], f"share {switch.name}": share}
        return Report(
            tables=[
                Table(
                    "fresh",
                    f"Test accuracy (%) at epsilon = {settings.epsilon:g}, mean ± s.d. of "
                    f"{seeds_text(settings.seeds)} at the best beta and rate",
                    ["method", "beta", "rate", "adaptive steps", "accuracy", "over clipping"],
                    rows,
                ),
                self._grid_table(results),
            ],
            figures=figures,
            claims=[
                ExperimentClaim.under(
                    "ahead",
                    "MNIST",
                    "adaptive noise ends above clipping at C, both with RMSProp",
                    "G",
                    readings,
                )
            ],
            pictures={"grid": self._picture(results)},
            choices=self._choices(results),
        )

    def _member(self, switch: Switch | None, beta: float, rate: float, seed: int) -> dict[str, Any]:
        table = as_table(
            self.settings, "experiment", "seeds", "rates", "betas", "switches", "decay"
        )
        common = {**table, "rate": rate, "seed": seed}
        if switch is None:
            return common
        noise = {
            "threshold": switch.threshold,
            "switch": switch.test,
            "raw": switch.raw,
            "beta": beta,
            "decay": self.settings.decay,
        }
        return {**common, "noise": noise}

    @property
    def _fresh(self) -> range:
        return range(TUNING_SEED + 1, TUNING_SEED + 1 + self.settings.seeds)

    def _betas(self, switch: Switch | None) -> list[float]:
        if switch is None:
            return [0.0]
        return switch.betas or self.settings.betas

    def _tuned(
        self, results: Mapping[str, Result], switch: Switch | None, beta: float, rate: float
    ) -> Result:
        return results[_name(switch, beta, rate, TUNING_SEED)]

    def _rates(
        self, results: Mapping[str, Result], switch: Switch | None, beta: float
    ) -> BestOfGrid:
        """Choice of the rate at one beta."""
        scores = {
            rate: 100 * self._tuned(results, switch, beta, rate)["accuracy"][-1]
            for rate in self.settings.rates
        }
        return BestOfGrid(f"rate of {_method(switch, beta)}", scores)

    def _best_beta(self, results: Mapping[str, Result], switch: Switch | None) -> BestOfGrid:
        """Choice of beta, each at its best rate."""
        by_beta = {beta: self._rates(results, switch, beta) for beta in self._betas(switch)}
        scores = {beta: choice.scores[choice.value] for beta, choice in by_beta.items()}
        return BestOfGrid(f"beta of {switch.name if switch else CLIPPING}", scores)

    def _chosen(self, results: Mapping[str, Result], switch: Switch | None) -> tuple[float, float]:
        """The best beta and its best rate."""
        beta = self._best_beta(results, switch).value
        return beta, self._rates(results, switch, beta).value

    def _choices(self, results: Mapping[str, Result]) -> list[BestOfGrid]:
        choices = []
        for switch in (None, *self.settings.switches):
            beta = self._best_beta(results, switch)
            choices += [beta, self._rates(results, switch, beta.value)]
        return [choice for choice in choices if len(choice.scores) > 1]

    def _judged(self, results: Mapping[str, Result], switch: Switch | None) -> list[Result]:
        chosen = self._chosen(results, switch)
        return [results[_name(switch, *chosen, seed)] for seed in self._fresh]

    def _finals(self, results: Mapping[str, Result], switch: Switch | None) -> list[float]:
        """Final accuracies (%) of the fresh seeds."""
        return [100 * run["accuracy"][-1] for run in self._judged(results, switch)]

    def _grid_table(self, results: Mapping[str, Result]) -> Table:
        switches = self.settings.switches
        betas = sorted({beta for switch in switches for beta in self._betas(switch)})
        rows: list[Row] = []
        for switch in switches:
            cells: list[str | float | None] = [switch.name]
            for beta in betas:
                if beta not in self._betas(switch):
                    cells.append(None)
                    continue
                choice = self._rates(results, switch, beta)
                share = self._tuned(results, switch, beta, choice.value)["adaptive"]
                cells.append(f"{choice.scores[choice.value]:.2f} ({100 * share:.0f} %)")
            rows.append(cells)
        title = "Accuracy (%) of the tuning seed, and the share of adaptive steps"
        return Table("grid", title, ["switch", *(f"beta {beta:g}" for beta in betas)], rows)

    def _picture(self, results: Mapping[str, Result]) -> Figure:
        title = "Xu et al. on MNIST: steps with adaptive noise"
        figure, (axis,) = grid(1, 1, title=title, width=7, height=4.2)
        for raw, colour, label in (
            (False, COLOURS["adaclip"], "released statistics"),
            (True, COLOURS["literal"], "statistics as printed (not private)"),
        ):
            runs = [
                self._tuned(results, switch, beta, self._rates(results, switch, beta).value)
                for switch in self.settings.switches
                for beta in self._betas(switch)
                if switch.raw == raw
            ]
            shares = [100 * run["adaptive"] for run in runs]
            ends = [100 * run["accuracy"][-1] for run in runs]
            axis.plot(shares, ends, "o", color=colour, label=label, markersize=5, alpha=0.8)
        clipping = self._rates(results, None, 0.0)
        axis.axhline(
            clipping.scores[clipping.value],
            color=COLOURS["clipping"],
            linestyle="--",
            linewidth=1,
            label="clipping",
        )
        axis.set_xlabel(
            "steps with adaptive noise (%); a point is one G and beta, at its best rate"
        )
        axis.set_ylabel("test accuracy (%), tuning seed")
        axis.legend(frameon=False, fontsize=8)
        return figure


@dataclass
class PaperRMSProp(StatefulOptimizer):
    """``E <- (1 - gamma) E + gamma g^2``, ``w <- w + eta g / sqrt(E + eps0)``, g a descent."""

    rate: float
    gamma: float

    def step(self, vector: Tensor, update: Tensor) -> Tensor:
        """New parameters."""
        second = self.moment("second", vector)
        second = (1 - self.gamma) * second + self.gamma * update.square()
        self.tensors = {"second": second}
        return vector + self.rate * update / (second + 1e-8).sqrt()


def _mechanism(settings: Mapping[str, Any]) -> Mechanism:
    if "noise" not in settings:
        return Clipping(settings["clip-norm"])
    noise = settings["noise"]
    return AdaptiveNoise(
        clip_norm=settings["clip-norm"],
        threshold=noise["threshold"],
        switch=noise["switch"],
        beta=noise["beta"],
        decay=noise["decay"],
        unsafe_non_private_raw_statistics=noise["raw"],
    )


def _method(switch: Switch | None, beta: float) -> str:
    return f"{switch.name}, beta = {beta:g}" if switch else CLIPPING


def _name(switch: Switch | None, beta: float, rate: float, seed: int) -> str:
    return f"{_method(switch, beta)}, rate={rate:g} seed={seed}"
