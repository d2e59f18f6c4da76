"""Koskela and Honkela's federated figures: 1a, 1b, 2a, 2b and 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from experiments.framework.base import BestOfGrid, PaperClaim, Report, Result, Settings, Table
from experiments.framework.config_runs import ConfigRunsSettings, Score, best
from experiments.framework.curves import Curve, curves, sweeps
from experiments.framework.spread import Difference, all_ahead, listed, over_seeds, paired
from experiments.koskela.common import Koskela, optimiser
from fedsim.config import Scalar

__all__ = ["KoskelaFederated", "KoskelaFederatedSettings"]

SGD, ADAM = "sgd", "adam"
READINGS = {"adadp": "ADADP", "adadp kept": "ADADP, $\\eta$ kept"}
"""Clients start from eta_0 every round, or keep their eta: the paper does not say by_x."""
STYLES = {"adadp": "adadp", "adadp kept": "kept"}
DIVERGED = 15.0
"""A final accuracy (%) of ten classes below which a rate has not learnt."""


class KoskelaFederatedSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    mixed : float
        Randomness of the clients' data in figures 1a, 2b and 3.
    randomness : list of float
        Figure 2a's, ascending.
    batches : list of int
        Figure 1b's; every client goes through its examples once a round whatever the batch.
    starts : list of float
        eta_0 of ADADP in figure 2b, at every randomness.
    rates, adam_rates : list of float
        Constant rates that SGD and Adam choose among by their final test accuracy.
    """

    mixed: float = 0.33
    randomness: list[float]
    batches: list[int]
    starts: list[float]
    rates: list[float]
    adam_rates: list[float]


class KoskelaFederated(Koskela):
    """Federated averaging of ADADP, of SGD and of Adam."""

    settings: KoskelaFederatedSettings
    settings_type: ClassVar[type[Settings]] = KoskelaFederatedSettings
    last: ClassVar[int] = 5

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Everything that some figure shows, once."""
        s, batch = self.settings, self._batch
        shown = [(rho, batch) for rho in (s.mixed, *s.randomness)]
        shown += [(0.0, batch) for batch in s.batches]
        points = [
            (method, rate, rho, batch)
            for rho, batch in shown
            for method, rates in (
                (SGD, s.rates),
                *((reading, [self._start]) for reading in READINGS),
            )
            for rate in rates
        ]
        points += [
            (reading, eta, rho, batch)
            for reading in READINGS
            for eta in s.starts
            for rho in self._levels
        ]
        points += [(ADAM, rate, s.mixed, batch) for rate in s.adam_rates]
        return {
            _name(method, rate, rho, batch): {
                **_changes(method, rate),
                "partition.randomness": rho,
                "client.batch-size": batch,
            }
            for method, rate, rho, batch in points
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """A table and a picture a figure, and what the paper says about each."""
        scores = self.scores(results)
        reports = [self._over_rounds(scores), self._over_rates(scores)]
        if self.settings.batches:
            reports.append(self._over_batches(scores))
        if self.settings.randomness:
            reports.append(self._over_randomness(scores))
        figures = {
            f"{reading} rejected (%)": 100 * self._rejected(results, reading)
            for reading in READINGS
        }
        return Report(
            tables=[table for figure in reports for table in figure.tables],
            figures=figures | {k: v for figure in reports for k, v in figure.figures.items()},
            claims=[claim for figure in reports for claim in figure.claims],
            pictures={k: v for figure in reports for k, v in figure.pictures.items()},
            choices=[choice for figure in reports for choice in figure.choices],
        )

    @property
    def _levels(self) -> list[float]:
        """Every randomness that some figure shows."""
        return sorted({self.settings.mixed, *self.settings.randomness})

    @property
    def _start(self) -> float:
        return float(self.base.client.lr)

    @property
    def _batch(self) -> int:
        return self.base.client.batch_size

    @property
    def _where(self) -> str:
        return self.where("examples a client", "rounds")

    def _rejected(self, results: Mapping[str, Result], reading: str) -> float:
        """Share of rejected iterations at figure 1a's setting."""
        name = _name(reading, self._start, self.settings.mixed, self._batch)
        shares = [float(result["rejected"]) for result in self.of_plan(results, name)]
        return sum(shares) / len(shares)

    def _adadp(self, scores: Mapping[str, Score], rho: float, batch: int) -> dict[str, Score]:
        """Both readings, from the run's own eta_0."""
        return {reading: scores[_name(reading, self._start, rho, batch)] for reading in READINGS}

    def _best(
        self, scores: Mapping[str, Score], method: str, rates: Sequence[float], rho: float,
        batch: int,
    ) -> tuple[float, Score, BestOfGrid]:  # fmt: skip
        """The rate that ends highest, its score, and the choice for the judge."""
        by_rate = {rate: scores[_name(method, rate, rho, batch)] for rate in rates}
        return best(f"rate of {method} at {100 * rho:g} % random, |B| = {batch}", by_rate)

    def _over_rounds(self, scores: Mapping[str, Score]) -> Report:
        """Figure 1a, and figure 3 where there are rates for Adam."""
        s, batch = self.settings, self._batch
        adadp = self._adadp(scores, s.mixed, batch)
        rate, sgd, chosen = self._best(scores, SGD, s.rates, s.mixed, batch)
        choices = [chosen]
        sgds = {tried: scores[_name(SGD, tried, s.mixed, batch)] for tried in s.rates}
        adadp_lines = [
            Curve(READINGS[reading], score, STYLES[reading]) for reading, score in adadp.items()
        ]
        title = f"Fig. 1a: {100 * s.mixed:g} % random\n{self._where}"
        lines = [*_tuned("SGD", sgds, rate, "{:g}".format), *adadp_lines]
        pictures = {"figure1a": curves(title, [("", lines)], xlabel="round")}
        figures = {f"1a {reading}": score.mean for reading, score in adadp.items()} | {
            "1a sgd": sgd.mean
        }
        rows: list[list[str | float | None]] = [
            [_plain(reading), f"{self._start:g}", score.text] for reading, score in adadp.items()
        ]
        rows.append(["SGD", f"{rate:g}", sgd.text])
        claims = _both(
            "1a",
            f"at {100 * s.mixed:g} % random, ADADP ends above rate-tuned SGD",
            {
                reading: _signed([paired(score.finals, sgd.finals)])
                for reading, score in adadp.items()
            },
        )
        if s.adam_rates:
            adam_rate, adam, chosen = self._best(scores, ADAM, s.adam_rates, s.mixed, batch)
            choices.append(chosen)
            rows.append(["Adam", f"{adam_rate:.3g}", adam.text])
            figures["3 adam"] = adam.mean
            adams = {rate: scores[_name(ADAM, rate, s.mixed, batch)] for rate in s.adam_rates}
            pictures["figure3"] = curves(
                f"Fig. 3: Adam, {100 * s.mixed:g} % random\n{self._where}",
                [("", [*_tuned("Adam", adams, adam_rate, _power), *adadp_lines])],
                xlabel="round",
            )
            claims += _both(
                "3",
                "ADADP ends above Adam with its best rate",
                {
                    reading: _signed([paired(score.finals, adam.finals)])
                    for reading, score in adadp.items()
                },
            )
        table = Table("figure1a", title, ["method", "rate", "final accuracy (%)"], rows)
        return Report([table], figures, claims, pictures, choices)

    def _over_rates(self, scores: Mapping[str, Score]) -> Report:
        """Figure 2b, at every randomness."""
        s = self.settings
        rows: list[list[str | float | None]] = []
        figures: dict[str, float] = {}
        pictures = {}
        steadier: dict[tuple[str, bool], list[Difference]] = {}
        for rho in self._levels:
            lines = {
                method: {rate: scores[_name(method, rate, rho, self._batch)] for rate in rates}
                for method, rates in (*((name, s.starts) for name in READINGS), (SGD, s.rates))
            }
            for x in sorted({*s.starts, *s.rates}):
                cells = [by_x[x].text if x in by_x else None for by_x in lines.values()]
                rows.append([f"{rho:g}", f"{x:g}", *cells])
            for name, by_x in lines.items():
                for x, score in by_x.items():
                    figures[f"2b {name} {x:g} rho={rho:g}"] = score.mean
            of_sgd = list(lines[SGD].values())
            learnt = [score for score in of_sgd if score.mean > DIVERGED] or of_sgd[:1]
            for reading in READINGS:
                ranges = _ranges(list(lines[reading].values()))
                for every, tried in ((True, of_sgd), (False, learnt)):
                    quarter = [value / 4 for value in _ranges(tried)]
                    steadier.setdefault((reading, every), []).append(paired(quarter, ranges))
            pictures[f"figure2b-{100 * rho:g}"] = sweeps(
                f"Fig. 2b: accuracy against the rate, {100 * rho:g} % random\n{self._where}",
                [
                    ("ADADP, every round from $\\eta_0$", lines["adadp"], "adadp"),
                    ("ADADP, $\\eta$ kept from round to round", lines["adadp kept"], "kept"),
                    ("SGD, constant $\\eta$", lines[SGD], "sgd"),
                ],
                xlabel="$\\eta_0$ of ADADP, $\\eta$ of SGD",
                log=True,
            )
        claims = [
            claim
            for every, name, which in (
                (True, "2b", "over these rates"),
                (False, "2b-learnt", "leaving out rates at which SGD diverges,"),
            )
            for claim in _both(
                name,
                f"{which} ADADP's accuracy varies less than a quarter as much as SGD's, at every "
                "randomness",
                {
                    reading: (
                        all_ahead(steadier[reading, every]),
                        "a quarter of SGD's range less ADADP's, in points: "
                        + listed(
                            steadier[reading, every], [f"{100 * r:g} %" for r in self._levels]
                        ),
                    )
                    for reading in READINGS
                },
            )
        ]
        title = f"Fig. 2b: accuracy against the rate\n{self._where}"
        columns = [
            "randomness", "rate", "ADADP from it (%)", "ADADP, kept (%)", "SGD with it (%)",
        ]  # fmt: skip
        return Report([Table("figure2b", title, columns, rows)], figures, claims, pictures)

    def _over_batches(self, scores: Mapping[str, Score]) -> Report:
        """Figure 1b."""
        s = self.settings
        title = f"Fig. 1b: every client its own classes\n{self._where}"
        rows: list[list[str | float | None]] = []
        panels = []
        figures: dict[str, float] = {}
        gains: dict[str, list[Difference]] = {reading: [] for reading in READINGS}
        choices = []
        for batch in s.batches:
            adadp = self._adadp(scores, 0.0, batch)
            rate, sgd, chosen = self._best(scores, SGD, s.rates, 0.0, batch)
            choices.append(chosen)
            rows.append(
                [str(batch), *(score.text for score in adadp.values()), sgd.text, f"{rate:g}"]
            )
            figures |= {f"1b {reading} B={batch}": score.mean for reading, score in adadp.items()}
            figures[f"1b sgd B={batch}"] = sgd.mean
            for reading, score in adadp.items():
                gains[reading].append(paired(score.finals, sgd.finals))
            lines = [Curve(f"SGD, tuned: {rate:g}", sgd, "sgd")]
            lines += [
                Curve(READINGS[reading], score, STYLES[reading]) for reading, score in adadp.items()
            ]
            panels.append((f"|B| = {batch}", lines))
        claims = _both(
            "1b",
            "with a pair of classes a client, ADADP ends above rate-tuned SGD at every |B|",
            {
                reading: (all_ahead(gain), listed(gain, [f"|B| = {batch}" for batch in s.batches]))
                for reading, gain in gains.items()
            },
        )
        columns = ["|B|", "ADADP (%)", "ADADP, kept (%)", "SGD (%)", "SGD's rate"]
        table = Table("figure1b", title, columns, rows)
        picture = curves(title, panels, xlabel="round")
        return Report([table], figures, claims, {"figure1b": picture}, choices)

    def _over_randomness(self, scores: Mapping[str, Score]) -> Report:
        """Figure 2a."""
        s, batch = self.settings, self._batch
        adadp = {rho: self._adadp(scores, rho, batch) for rho in s.randomness}
        tuned = {rho: self._best(scores, SGD, s.rates, rho, batch) for rho in s.randomness}
        uniform = tuned[s.randomness[-1]][0]
        lines = {
            reading: {rho: adadp[rho][reading] for rho in s.randomness} for reading in READINGS
        }
        lines["sgd tuned"] = {rho: score for rho, (_, score, _) in tuned.items()}
        lines["sgd fixed"] = {rho: scores[_name(SGD, uniform, rho, batch)] for rho in s.randomness}
        first, last = s.randomness[0], s.randomness[-1]
        drops = {
            name: [
                high - low for low, high in zip(by_x[first].finals, by_x[last].finals, strict=True)
            ]
            for name, by_x in lines.items()
        }
        title = f"Fig. 2a: accuracy against randomness\n{self._where}"
        rows = [
            [f"{rho:g}", *(by_x[rho].text for by_x in lines.values()), f"{tuned[rho][0]:g}"]
            for rho in s.randomness
        ]
        figures = {
            f"2a {name} rho={rho:g}": by_x[rho].mean
            for name, by_x in lines.items()
            for rho in s.randomness
        }
        figures |= {f"2a {name} drop": over_seeds(drop)[0] for name, drop in drops.items()}
        claims = []
        for name, how in (
            ("tuned", "its rate tuned at each randomness"),
            ("fixed", "its rate tuned on uniform data"),
        ):
            lost = drops[f"sgd {name}"]
            claims += _both(
                f"2a-{name}",
                f"from uniform to pathological data SGD, {how}, loses more than ADADP",
                {reading: _signed([paired(lost, drops[reading])]) for reading in READINGS},
            )
        picture = sweeps(
            title,
            [
                *((READINGS[reading], lines[reading], STYLES[reading]) for reading in READINGS),
                ("SGD, tuned at each randomness", lines["sgd tuned"], "sgd"),
                (f"SGD, tuned on uniform data: {uniform:g}", lines["sgd fixed"], "fixed"),
            ],
            xlabel="randomness of the clients' data",
        )
        columns = [
            "randomness", "ADADP (%)", "ADADP, kept (%)", "SGD, tuned (%)",
            f"SGD at {uniform:g} (%)", "tuned rate",
        ]  # fmt: skip
        table = Table("figure2a", title, columns, rows)
        choices = [choice for _, _, choice in tuned.values()]
        return Report([table], figures, claims, {"figure2a": picture}, choices)


def _tuned(
    method: str, by_rate: Mapping[float, Score], best: float, text: Callable[[float], str]
) -> list[Curve]:
    """The best rate, before the others in the background."""
    others = [rate for rate in by_rate if rate != best]
    label = f"{method}, {text(min(others))} to {text(max(others))}" if others else ""
    lines = [Curve("" if k else label, by_rate[rate], "other") for k, rate in enumerate(others)]
    return [*lines, Curve(f"{method}, tuned: {text(best)}", by_rate[best], "sgd")]


def _changes(method: str, rate: float) -> dict[str, Scalar]:
    """Keys of a run with this method."""
    if method in READINGS:
        kept = method.endswith("kept")
        return {"client.state": "client" if kept else "reset", **optimiser("adadp-lr", rate)}
    return optimiser(method, rate)


def _signed(differences: Sequence[Difference]) -> tuple[bool | None, str]:
    """Whether all are above 0, and what they are."""
    return all_ahead(differences), "; ".join(difference.text for difference in differences)


def _ranges(scores: Sequence[Score]) -> list[float]:
    """From the lowest to the highest final accuracy, seed by seed."""
    finals = np.array([score.finals for score in scores])
    return [float(width) for width in np.ptp(finals, axis=0)]


def _both(
    name: str, says: str, verdicts: Mapping[str, tuple[bool | None, str]]
) -> list[PaperClaim]:
    """One claim for each reading of what becomes of eta."""
    ends = {"adadp": ("", "eta_0 anew every round"), "adadp kept": ("-kept", "eta kept")}
    return [
        PaperClaim(
            name + ends[reading][0],
            f"Fig. {name.partition('-')[0]}",
            f"{says} ({ends[reading][1]})",
            holds,
            seen,
        )
        for reading, (holds, seen) in verdicts.items()
    ]


def _name(method: str, rate: float, rho: float, batch: int) -> str:
    return f"{method} rate={rate:g} rho={rho:g} B={batch}"


def _plain(reading: str) -> str:
    return READINGS[reading].replace("$\\eta$", "eta")


def _power(rate: float) -> str:
    return f"$10^{{{math.log10(rate):.1f}}}$"
