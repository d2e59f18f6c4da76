"""Koskela and Honkela's figures of final accuracies: 2a against randomness, 2b against the rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.curves import sweeps
from experiments.framework.base import ExperimentClaim, Report, Table
from experiments.framework.config_runs import Score
from experiments.framework.spread import Difference, over_seeds, paired
from experiments.koskela.common import left_open
from experiments.koskela.federated_scores import (
    OPEN,
    READINGS,
    SGD,
    STATES,
    STYLES,
    UNITS,
    FederatedScores,
    ahead,
)

DIVERGED = 15.0
"""Final accuracy (%) on ten classes up to which a rate counts as diverged."""
FLAT_PARTS = (0.125, 0.5)
"""Parts of SGD's range over the rates within which ADADP's counts as flat."""


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
    steadier: dict[str, list[Difference]] = {}
    for rho in levels:
        lines = {
            method: scores.over(method, tried, rho)
            for method, tried in (
                *((reading, starts) for reading in scores.readings),
                (SGD, rates),
            )
        }
        for x in sorted({*starts, *rates}):
            cells = [by_x[x].text if x in by_x else None for by_x in lines.values()]
            rows.append([f"{rho:g}", f"{x:g}", *cells])
        for name, by_x in lines.items():
            for x, score in by_x.items():
                figures[f"2b {name} {x:g} rho={rho:g}"] = score.mean
        of_sgd = list(lines[SGD].values())
        learnt = [score for score in of_sgd if score.mean > DIVERGED] or of_sgd[:1]
        for reading in scores.readings:
            ranges = _ranges(list(lines[reading].values()))
            for words, tried_of_sgd in (("all rates", of_sgd), ("where SGD learns", learnt)):
                for part in FLAT_PARTS:
                    of_range = [part * value for value in _ranges(tried_of_sgd)]
                    open_ = f"{STATES[reading]}, {words}, {part:g} of SGD's range"
                    steadier.setdefault(open_, []).append(paired(of_range, ranges))
        pictures[f"figure2b-{100 * rho:g}"] = sweeps(
            f"Fig. 2b: accuracy against the rate, {100 * rho:g} % random\n{scores.where}",
            [
                *(
                    (READINGS[reading], lines[reading], STYLES[reading])
                    for reading in scores.readings
                ),
                ("SGD, constant $\\eta$", lines[SGD], "sgd"),
            ],
            xlabel="$\\eta_0$ of ADADP, $\\eta$ of SGD",
            log=True,
        )
    claim = ExperimentClaim.under(
        "2b",
        "Fig. 2b",
        "over these rates ADADP's accuracy varies by less than a part of SGD's range, at every "
        "randomness",
        left_open("what counts as flat, SGD's rates, whether clients keep eta", scores.keeps),
        {
            reading: ahead(differences, [f"{100 * rho:g} %" for rho in levels])
            for reading, differences in steadier.items()
        },
    )
    title = f"Fig. 2b: accuracy against the rate\n{scores.where}"
    columns = ["randomness", "rate", *scores.columns[: len(scores.readings)], "SGD with it (%)"]
    return Report([Table("figure2b", title, columns, rows)], figures, [claim], pictures)


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
        for reading in scores.readings
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
    hows = {"tuned": "SGD tuned at each randomness", "fixed": "SGD tuned on uniform data"}
    outcomes = {
        f"{how}, {reading}": outcome
        for name, how in hows.items()
        for reading, outcome in scores.in_every_reading(
            lambda reading, unit, lost=drops[f"sgd {name}"]: ahead(  # type: ignore[misc]
                [paired(lost, drops[_line(reading, unit)])]
            )
        ).items()
    }
    claim = ExperimentClaim.under(
        "2a",
        "Fig. 2a",
        "from uniform to pathological data SGD loses more than ADADP",
        left_open(f"how SGD's rate is tuned, {OPEN}", scores.keeps),
        outcomes,
    )
    picture = sweeps(
        title,
        [
            *((READINGS[reading], lines[reading], STYLES[reading]) for reading in scores.readings),
            ("SGD, tuned at each randomness", lines["sgd tuned"], "sgd"),
            (f"SGD, tuned on uniform data: {uniform:g}", lines["sgd fixed"], "fixed"),
        ],
        xlabel="randomness of the clients' data",
    )
    columns = ["randomness", *scores.columns]
    columns += ["SGD, tuned (%)", f"SGD at {uniform:g} (%)", "tuned rate"]
    table = Table("figure2a", title, columns, rows)
    choices = [choice for _, _, choice in tuned.values()]
    return Report([table], figures, [claim], {"figure2a": picture}, choices)


def _line(reading: str, unit: str) -> str:
    return reading if unit == "mean" else f"{reading}, {unit}"


def _ranges(scores: Sequence[Score]) -> list[float]:
    """Range from the lowest to the highest final accuracy, seed by seed."""
    finals = np.array([score.finals for score in scores])
    return [float(width) for width in np.ptp(finals, axis=0)]
