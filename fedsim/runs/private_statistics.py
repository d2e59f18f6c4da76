"""Private statistics of clients' data before any training, from one noisy sum.

They are computed by a run of one round, on the config's engine, whose model's parameters are the
sums (`fedsim.models.statistics_model`). So mechanism, noise, ledger and budget work as in any other
run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedsim.array_types import Floats
from fedsim.config import RunConfig
from fedsim.config.plan import cohort
from fedsim.config.privacy_sections import NoiseSection
from fedsim.datasets import Dataset
from fedsim.errors import FedsimError
from fedsim.federation.arrays import tensors
from fedsim.mechanisms.bounded_values import BINS, QUANTILES, Moments
from fedsim.models.statistics_model import Statistics
from fedsim.privacy import Budget, Entry, Ledger
from fedsim.rows import Layout
from fedsim.runs.data_split import resolve_data
from fedsim.runs.factories import release_plan
from fedsim.runs.metrics import finite_json
from fedsim.runs.record import RunResult
from fedsim.settings import read_setting, settings_of

DATA_KEYS = ("name", "seed", "data", "partition", "secagg", "engine")
"""Tables and keys of a config that are kept: on clients, their examples, and how to sum."""
EXAMPLES = "num-examples"


@dataclass(frozen=True)
class StatisticsRequest:
    """Which statistics to release, and their privacy budget.

    Parameters
    ----------
    target_epsilon, multiplier : float or None
        Exactly one must be given; it is for all statistics together, which are one release.
    inputs, targets : pair of float, or None
        Ranges to which values are clamped; None to leave them out. Shares of classes need no
        range.
    together : bool
        Whether all entries of an input are pooled into one statistic; else each feature or
        channel has its own.
    quantiles : bool
        Whether to estimate quantiles too.
    examples : int
        Clamp for a client's number of examples, to estimate its mean; 0 to leave it out.
    """

    target_epsilon: float | None = None
    multiplier: float | None = None
    inputs: tuple[float, float] | None = None
    targets: tuple[float, float] | None = None
    together: bool = False
    quantiles: bool = False
    examples: int = 0


@dataclass(frozen=True)
class Estimate:
    """An estimated statistic.

    Attributes
    ----------
    name : str
    value : float
        NaN if the noise is too large to estimate it.
    error : float
        Standard deviation due to the noise; NaN if no formula is known.
    """

    name: str
    value: float
    error: float


@dataclass(frozen=True)
class StatisticsPlan:
    """A run of one round whose model's parameters are statistics of a config's clients.

    Attributes
    ----------
    config : RunConfig
        The run's config.
    model : Statistics
    targets : Moments or None
        Sums of numeric targets; None without them.
    inputs, classes : sequence of str
        Names of the inputs with sums of their own, and of the classes.
    outputs : int
        Number of numbers in a target.
    """

    config: RunConfig
    model: Statistics
    targets: Moments | None
    inputs: Sequence[str]
    classes: Sequence[str]
    outputs: int

    @classmethod
    def from_config(cls, config: RunConfig, request: StatisticsRequest, dataset: Dataset) -> Self:
        """Make the plan for a config's clients.

        Raises
        ------
        FedsimError
            If no statistic is requested, or one that these data do not have.
        """
        shape, classes = dataset.input_shape, _has_classes(request, dataset)
        if isinstance(shape, dict):
            raise FedsimError(
                f"the data have the inputs {', '.join(shape)} by name; private statistics are of "
                "data with one, x."
            )
        model = Statistics(
            "none" if request.inputs is None else "together" if request.together else "each",
            *(request.inputs or (0.0, 1.0)),
            request.quantiles,
            "classes" if classes else "none" if request.targets is None else "numbers",
        )
        targets = request.targets and Moments("targets", *request.targets, request.quantiles)
        columns, outputs = model.columns(shape), dataset.num_outputs
        moments = columns + outputs * (targets is not None)
        # A row has this number of parts of norm 1 at most, so a norm of at most its square root.
        parts = classes + moments * sum(one.vector_count for one in model.moments.ranges)
        of_sums = _config(config, request, model, targets, math.sqrt(max(parts, 1)))
        inputs = _numbered("input", columns, model.inputs == "together")
        if model.inputs == "each" and dataset.feature_names:
            inputs = list(dataset.feature_names)
        return cls(of_sums, model, targets, inputs, dataset.labels if classes else (), outputs)

    def result_of(self, run: RunResult) -> StatisticsResult:
        """Compute the statistics from the run's release."""
        arrays, plan = tensors(run.arrays), release_plan(self.config)
        layout, mechanism = Layout.of(arrays), plan.mechanism
        clients = self.config.partition.clients
        multiplier = plan.multiplier_in_sum(clients)
        split = mechanism.noise_multipliers(multiplier, plan.denominator, layout)
        norm = mechanism.segments(layout)[0].mechanism.radius({}, layout.d)
        sums = layout.flatten(arrays).numpy() * plan.denominator
        reader = _Reader(sums, split["sum"] * float(norm))
        for name in self.inputs:
            reader.read_moments(replace(self.model.moments, name=name))
        for name in _numbered("target", self.outputs, self.outputs == 1) if self.targets else ():
            assert self.targets is not None
            reader.read_moments(replace(self.targets, name=name))
        if self.classes:
            reader.read_class_shares(self.classes)
        if mechanism.side_scalars:
            (side,) = mechanism.side_scalars
            error = split[side.name] * side.value_range.half / plan.denominator
            mean = float(run.metrics[-1][side.name])
            reader.estimates.append(Estimate("examples of a client", mean, error))
        return StatisticsResult(reader.estimates, reader.histograms, clients)


def private_dataset(config: RunConfig, request: StatisticsRequest) -> Dataset:
    """A config's data set, read as by the private run that releases its statistics.

    The config itself need not be private: nobody's examples may end the command, or be shown by it.

    Raises
    ------
    FedsimError
        As `resolve_data` does for a private run, or if the request does not set one cost.
    """
    private = _config(config, request, Statistics(), None, 1.0)
    return resolve_data(private.replace(**{"engine.device": "cpu"})).dataset


def refuse_spent_budget(config: RunConfig) -> None:
    """Refuse a budget that earlier releases in a shared ledger (privacy.ledger) have spent.

    Raises
    ------
    FedsimError
        If ``noise.max-epsilon`` does not allow one more release.
    """
    ledger, limit = Path(config.privacy.ledger), config.noise.max_epsilon
    if limit is None or not config.privacy.ledger or not ledger.is_file():
        return
    release = Entry(event=release_plan(config).charge(1))
    budget = Budget(limit, config.noise.delta, "noise.max-epsilon")
    if Ledger.read(ledger).would_exceed(release, budget=budget):
        raise FedsimError(
            f"{budget.message(release, ledger=ledger)}, where earlier releases count; nothing is "
            "released or written."
        )


def _has_classes(request: StatisticsRequest, dataset: Dataset) -> bool:
    """Whether to release shares of classes.

    Raises
    ------
    FedsimError
        If no statistic is requested, or one that these data do not have.
    """
    y = dataset.train.y
    classes = bool(dataset.num_classes) and y.dim() == 1
    if classes and request.targets is not None:
        raise FedsimError("--targets is a range, and these targets are classes; leave it out.")
    if request.targets is not None and not y.is_floating_point():
        raise FedsimError("--targets is a range, and these targets are not numbers; leave it out.")
    if dataset.vocabulary and request.inputs is not None:
        raise FedsimError("--inputs is a range, and these inputs are tokens; leave it out.")
    if not classes and (request.inputs, request.targets) == (None, None):
        raise FedsimError(
            "no statistic is requested; give --inputs LOW,HIGH or --targets LOW,HIGH."
        )
    return classes


def _config(
    config: RunConfig,
    request: StatisticsRequest,
    model: Statistics,
    targets: Moments | None,
    norm: float,
) -> RunConfig:
    """Config of the run: clients, data, engine and delta are the config's; the rest is fixed."""
    tree = config.to_tree()
    tables: dict[str, Any] = {key: tree[key] for key in DATA_KEYS}
    tables["data"] |= {"normalize": False, "validation": 0.0}
    # Not the keys of a kind of noise, such as its bands: one round's is independent.
    keys = {setting.key for setting in settings_of(NoiseSection)}
    keys -= {"name", "cohort-size", "cohort-population", "ledger-key"}
    noise = {key: tree["noise"][key] for key in keys}
    cost = {"multiplier": request.multiplier, "target-epsilon": request.target_epsilon}
    if len([value for value in cost.values() if value is not None]) != 1:
        raise FedsimError("give either --epsilon or --multiplier, which set the cost.")
    options = {"multiplier": "--multiplier", "target-epsilon": "--epsilon"}
    for setting in (s for s in settings_of(NoiseSection) if s.key in options):
        read_setting(setting, cost[setting.key], options[setting.key])
    mechanism: dict[str, Any] = {"name": "clipping", "clip-norm": norm}
    if request.examples:
        mechanism |= {"private-scalar": EXAMPLES, "private-scalar-high": float(request.examples)}
    loss: dict[str, Any] = {"loss": "statistics", "metrics": "", "quantiles": request.quantiles}
    if targets is not None:
        loss |= {"low": targets.low, "high": targets.high}
    # The same adjacency as the config's rounds, so that the costs add up.
    everybody: dict[str, Any] = {"name": "full"}
    if cohort(config).adjacency == "replace-one":
        everybody = {"name": "fixed", "size": config.partition.clients}
    return RunConfig.parse(
        {
            **tables,
            "rounds": 1,
            "model": {"name": "statistics", "dtype": "float64", **asdict(model)},
            "task": loss,
            "client": {"name": "sgd", "lr": 1.0, "batch-size": 0, "epochs": 1},
            "cohort": everybody,
            "mechanism": mechanism,
            "noise": noise | {k: "" if value is None else value for k, value in cost.items()},
            "privacy": {"ledger": config.privacy.ledger},
            "evaluate": {"every": 0},
        }
    )


def _numbered(name: str, count: int, is_single: bool) -> list[str]:
    if is_single:
        return [f"{name}s"] if name == "input" else [name]
    return [f"{name} {k}" for k in range(count)]


@dataclass(frozen=True)
class Histogram:
    """Histogram: ``below [BINS + 1]`` are the shares of examples below the edges of equal bins."""

    name: str
    low: float
    high: float
    below: Floats

    @property
    def shares(self) -> Floats:
        """Share of each bin ``[BINS]``."""
        return np.diff(self.below)

    @property
    def edges(self) -> Floats:
        """Edges of the bins ``[BINS + 1]``."""
        return np.linspace(self.low, self.high, BINS + 1)


@dataclass(frozen=True)
class StatisticsResult:
    """The statistics that a run has released.

    Attributes
    ----------
    estimates : list of Estimate
    histograms : list of Histogram
    clients : int
        Number of clients that the statistics are about.
    """

    estimates: list[Estimate]
    histograms: list[Histogram]
    clients: int

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; unknown numbers are None."""
        return {
            "clients": self.clients,
            "statistics": {
                one.name: finite_json({"value": one.value, "error": one.error})
                for one in self.estimates
            },
            "histograms": {
                one.name: {"edges": one.edges.tolist(), "shares": one.shares.tolist()}
                for one in self.histograms
            },
        }


class _Reader:
    """Reads estimates from noisy sums ``[d]``, in order; ``noise`` is each sum's deviation."""

    def __init__(self, sums: Floats, noise: float) -> None:
        self._unread, self._noise = sums, noise
        self.estimates: list[Estimate] = []
        self.histograms: list[Histogram] = []

    def _next(self, size: int) -> Floats:
        sums, self._unread = self._unread[:size], self._unread[size:]
        return sums

    def read_moments(self, moments: Moments) -> None:
        """Read mean, deviation and quantiles of one variable."""
        sums, noise = self._next(moments.size), self._noise
        value, square = moments.ranges
        first, second = sums[: value.size], sums[value.size :]
        count, mean = value.count(first), value.mean(first)
        mean_error = value.mean_error(mean, noise, count)
        deviation = moments.deviation(sums)
        square_error = square.mean_error(square.mean(second), noise, square.count(second))
        # `spread` is the error of the variance to first order. The square root changes by at most
        # the square root of a change, which bounds the error where the deviation is near 0.
        off_centre = mean - (moments.low + moments.high) / 2
        spread = math.hypot(square_error, 2 * off_centre * mean_error)
        error = min(spread / (2 * max(deviation, 1e-300)), math.sqrt(spread))
        self.estimates += [
            Estimate(f"{moments.name}: mean", mean, mean_error),
            Estimate(f"{moments.name}: standard deviation", deviation, error),
        ]
        if moments.quantiles:
            below = value.cumulative(first)
            self.histograms.append(Histogram(moments.name, moments.low, moments.high, below))
            for name, share in QUANTILES.items():
                estimate = value.quantile(first, share)
                self.estimates.append(Estimate(f"{moments.name}: {name}", estimate, math.nan))

    def read_class_shares(self, names: Sequence[str]) -> None:
        """Read the share of each class."""
        classes = len(names)
        sums = self._next(classes)
        count = max(float(sums.sum()), 1.0)
        for name, number in zip(names, sums.tolist(), strict=True):
            share = min(max(number / count, 0.0), 1.0)
            error = self._noise * math.hypot(1 - share, share * math.sqrt(classes - 1)) / count
            self.estimates.append(Estimate(f"class {name}: share", share, error))
