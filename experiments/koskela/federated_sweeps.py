"""Koskela and Honkela's figures of final accuracies: 2a against randomness, 2b against the rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from experiments.curves import sweeps
from experiments.framework.base import Report, Table
from experiments.framework.config_runs import Score
from experiments.framework.spread import Difference, all_ahead, listed, over_seeds, paired
from experiments.koskela.federated_scores import (
    READINGS,
    SGD,
    STYLES,
    UNITS,
    FederatedScores,
    ahead,
    claims_of_readings,
    in_both_units,
)

DIVERGED = 15.0
"""Final accuracy (%) on ten classes up to which a rate counts as diverged."""


def over_rates(
    scores: FederatedScores,
    levels: Sequence[float],
    starts: Sequence[float],
    rates: Sequence[float],
) -> Report:
    """Figure 2b, with a picture for every randomness of ``levels``."""
    rows: list[list[str | float | None]] = []
    figures: dict[str, float] = {}
    pictures = {}
    steadier: dict[tuple[str, bool], list[Difference]] = {}
    for rho in levels:
        lines = {
            method: scores.over(method, tried, rho)
            for method, tried in (*((reading, starts) for reading in READINGS), (SGD, rates))
        }
        for x in sorted({*starts, *rates}):
            cells = [by_x[x].text if x in by_x else None for by_x in lines.values()]
            rows.append([f"{rho:g}", f"{x:g}", *cells])
        for name, by_x in lines.items():
            for x, score in by_x.items():
                figures[f"2b {name} {x:g} rho={rho:g}"] = score.mean
        of_sgd = list(lines[SGD].values())
        learnt = [score for score in of_sgd if score.mean > DIVERGED] or of_sgd[:1]
        for reading in READINGS:
            ranges = _ranges(list(lines[reading].values()))
            for every, tried_of_sgd in ((True, of_sgd), (False, learnt)):
                quarter = [value / 4 for value in _ranges(tried_of_sgd)]
                steadier.setdefault((reading, every), []).append(paired(quarter, ranges))
        pictures[f"figure2b-{100 * rho:g}"] = sweeps(
            f"Fig. 2b: accuracy against the rate, {100 * rho:g} % random\n{scores.where}",
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
        for claim in claims_of_readings(
            name,
            f"{which} ADADP's accuracy varies less than a quarter as much as SGD's, at every "
            "randomness",
            {
                reading: (
                    all_ahead(steadier[reading, every]),
                    "a quarter of SGD's range less ADADP's, in points: "
                    + listed(steadier[reading, every], [f"{100 * rho:g} %" for rho in levels]),
                )
                for reading in READINGS
            },
        )
    ]
    title = f"Fig. 2b: accuracy against the rate\n{scores.where}"
    columns = ["randomness", "rate", "ADADP from it (%)", "ADADP, kept (%)", "SGD with it (%)"]
    return Report([Table("figure2b", title, columns, rows)], figures, claims, pictures)


def over_randomness(
    scores: FederatedScores, randomness: Sequence[float], rates: Sequence[float]
) -> Report:
    """Figure 2a, from pathological (``randomness[0]``) to uniform data."""
    adadp = {unit: {rho: scores.adadp(rho, unit=unit) for rho in randomness} for unit in UNITS}
    tuned = {rho: scores.tuned(SGD, rates, rho) for rho in randomness}
    first, last = randomness[0], randomness[-1]
    uniform = tuned[last][0]
    lines = {
        _line(reading, unit): {rho: by_rho[rho][reading] for rho in randomness}
        for unit, by_rho in adadp.items()
        for reading in READINGS
    }
    lines["sgd tuned"] = {rho: score for rho, (_, score, _) in tuned.items()}
    lines["sgd fixed"] = {rho: scores.over(SGD, rates, rho)[uniform] for rho in randomness}
    drops = {
        name: [high - low for low, high in zip(by_x[first].finals, by_x[last].finals, strict=True)]
        for name, by_x in lines.items()
    }
    title = f"Fig. 2a: accuracy against randomness\n{scores.where}"
    rows = [
        [f"{rho:g}", *(by_x[rho].text for by_x in lines.values()), f"{tuned[rho][0]:g}"]
        for rho in randomness
    ]
    figures = {
        f"2a {name} rho={rho:g}": by_x[rho].mean
        for name, by_x in lines.items()
        for rho in randomness
    }
    figures |= {f"2a {name} drop": over_seeds(drop)[0] for name, drop in drops.items()}
    claims = []
    for name, how in (
        ("tuned", "its rate tuned at each randomness"),
        ("fixed", "its rate tuned on uniform data"),
    ):
        lost = drops[f"sgd {name}"]
        claims += claims_of_readings(
            f"2a-{name}",
            f"from uniform to pathological data SGD, {how}, loses more than ADADP",
            in_both_units(partial(_lost_more, lost, drops)),
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
        "randomness", "ADADP (%)", "ADADP, kept (%)", "ADADP, eta_0 of the sum (%)",
        "the same, kept (%)", "SGD, tuned (%)",
        f"SGD at {uniform:g} (%)", "tuned rate",
    ]  # fmt: skip
    table = Table("figure2a", title, columns, rows)
    choices = [choice for _, _, choice in tuned.values()]
    return Report([table], figures, claims, {"figure2a": picture}, choices)


def _line(reading: str, unit: str) -> str:
    return reading if unit == "mean" else f"{reading}, {unit}"


def _lost_more(
    lost: list[float], drops: Mapping[str, list[float]], reading: str, unit: str
) -> tuple[bool | None, str]:
    """Whether SGD lost more accuracy than ADADP, with one reading and unit of eta_0."""
    return ahead([paired(lost, drops[_line(reading, unit)])])


def _ranges(scores: Sequence[Score]) -> list[float]:
    """Range from the lowest to the highest final accuracy, seed by seed."""
    finals = np.array([score.finals for score in scores])
    return [float(width) for width in np.ptp(finals, axis=0)]
