"""Koskela and Honkela's federated figures: 1a, 1b, 2a, 2b and 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from experiments.framework.base import Report, Result
from experiments.framework.config_runs import ConfigRunsSettings
from experiments.koskela.common import KNOWN_KEEPS, Koskela, adadp, constant_rate, units
from experiments.koskela.federated_rounds import over_batches, over_rounds, with_adam
from experiments.koskela.federated_scores import (
    ADAM,
    SGD,
    FederatedScores,
    keep_of,
    plan_name,
    readings_of,
)
from experiments.koskela.federated_sweeps import over_randomness, over_rates
from fedsim.config import Scalar


@dataclass(frozen=True, kw_only=True)
class KoskelaFederatedSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    mixed : float
        Randomness of the clients' data in figures 1a, 2b and 3.
    randomness : list of float
        Values of randomness in figure 2a, ascending.
    batches : list of int
        Batch sizes in figure 1b; a client makes one pass over its examples per round in any case.
    keeps : list of str
        Which iterates ADADP keeps (of `KEEPS`); a verdict must be the same with each.
    starts : list of float
        Values of eta_0 for ADADP in figure 2b, at every randomness.
    rates, adam_rates : list of float
        Grids of constant rates for SGD and Adam; the best by final test accuracy is chosen.
    """

    mixed: float = 0.33
    randomness: list[float]
    batches: list[int]
    keeps: Annotated[list[str], KNOWN_KEEPS] = field(default_factory=lambda: ["half"])
    starts: list[float]
    rates: list[float]
    adam_rates: list[float]


class KoskelaFederated(Koskela):
    """Federated averaging with ADADP, SGD and Adam as the clients' optimiser."""

    settings: KoskelaFederatedSettings
    last: ClassVar[int] = 5

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """All runs that the figures show, each once."""
        s, batch = self.settings, self._batch
        shown = [(rho, batch) for rho in (s.mixed, *s.randomness)]
        shown += [(0.0, batch) for batch in s.batches]
        methods = readings_of(s.keeps)
        points = [
            (method, rate, rho, batch)
            for rho, batch in shown
            for method, rates in (
                (SGD, s.rates),
                *((method, units(self._start, batch).values()) for method in methods),
            )
            for rate in rates
        ]
        points += [
            (method, eta, rho, batch)
            for method in methods
            for eta in s.starts
            for rho in sorted({s.mixed, *s.randomness})
        ]
        points += [(ADAM, rate, s.mixed, batch) for rate in s.adam_rates]
        return {
            plan_name(method, rate, rho, batch): {
                **self._changes(method, rate),
                "partition.randomness": rho,
                "client.batch-size": batch,
            }
            for method, rate, rho, batch in points
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """A table and a picture per figure, and the paper's claims about each."""
        s = self.settings
        scores = FederatedScores(
            self.scores(results),
            self._start,
            self._batch,
            self.where("examples a client", "rounds"),
            s.keeps,
        )
        reports = [
            over_rounds(scores, s.mixed, s.rates),
            over_rates(scores, sorted({s.mixed, *s.randomness}), s.starts, s.rates),
        ]
        if s.adam_rates:
            reports.append(with_adam(scores, s.mixed, s.adam_rates))
        if s.batches:
            reports.append(over_batches(scores, s.batches, s.rates))
        if s.randomness:
            reports.append(over_randomness(scores, s.randomness, s.rates))
        figures = {
            f"{reading} rejected (%)": 100 * self._rejected(results, reading)
            for reading in scores.readings
        }
        return Report(
            tables=[table for figure in reports for table in figure.tables],
            figures=figures | {k: v for figure in reports for k, v in figure.figures.items()},
            claims=[claim for figure in reports for claim in figure.claims],
            pictures={k: v for figure in reports for k, v in figure.pictures.items()},
            choices=[choice for figure in reports for choice in figure.choices],
        )

    @property
    def _start(self) -> float:
        return float(self.base.client.lr)

    @property
    def _batch(self) -> int:
        return self.base.client.batch_size

    def _rejected(self, results: Mapping[str, Result], reading: str) -> float:
        """Share of rejected iterations, in figure 1a's setting."""
        name = plan_name(reading, self._start, self.settings.mixed, self._batch)
        shares = [float(result["rejected"]) for result in self.of_plan(results, name)]
        return sum(shares) / len(shares)

    def _changes(self, method: str, rate: float) -> dict[str, Scalar]:
        """Config keys of a run with this method and rate."""
        if method in (SGD, ADAM):
            return constant_rate(method, rate)
        state = "client" if method.endswith("kept") else "reset"
        limit = float(self.base.client.eta_max)
        return {"client.state": state, **adadp(rate, keep_of(method), limit)}
