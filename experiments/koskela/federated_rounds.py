"""Koskela and Honkela's figures over rounds: 1a and 3 at one randomness, 1b at several batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from experiments.curves import Curve, curves
from experiments.framework.base import ExperimentClaim, Report, Table
from experiments.framework.config_runs import Score
from experiments.framework.spread import Difference, paired
from experiments.koskela.common import left_open, units
from experiments.koskela.federated_scores import (
    ADAM,
    OPEN,
    READINGS,
    SGD,
    STYLES,
    UNITS,
    FederatedScores,
    ahead,
)


def over_rounds(scores: FederatedScores, mixed: float, rates: Sequence[float]) -> Report:
    """Figure 1a: ADADP against SGD at every rate, with randomness ``mixed`` of clients' data."""
    title = f"Fig. 1a: {100 * mixed:g} % random\n{scores.where}"
    return _against(scores, "1a", title, SGD, mixed, rates)


def with_adam(scores: FederatedScores, mixed: float, rates: Sequence[float]) -> Report:
    """Figure 3: ADADP against Adam at every rate."""
    title = f"Fig. 3: Adam, {100 * mixed:g} % random\n{scores.where}"
    return _against(scores, "3", title, ADAM, mixed, rates)


def _against(
    scores: FederatedScores,
    figure: str,
    title: str,
    other: str,
    mixed: float,
    rates: Sequence[float],
) -> Report:
    """ADADP against another method at each of its rates."""
    word, digits = {SGD: ("SGD", "{:g}".format), ADAM: ("Adam", _power)}[other]
    adadp = {unit: scores.adadp(mixed, unit=unit) for unit in UNITS}
    rate, tuned, chosen = scores.tuned(other, rates, mixed)
    by_rate = scores.over(other, rates, mixed)
    rows: list[list[str | float | None]] = [
        [
            READINGS[reading].replace("$\\eta$", "eta"),
            f"{units(scores.start, scores.batch)[unit]:g} ({UNITS[unit]})",
            score.text,
        ]
        for unit, of_unit in adadp.items()
        for reading, score in of_unit.items()
    ]
    rows += [
        [f"{word}, best" if tried == rate else word, f"{tried:.3g}", score.text]
        for tried, score in by_rate.items()
    ]
    lines = [
        *_tuned(word, by_rate, rate, digits),
        *(
            Curve(READINGS[reading], score, STYLES[reading])
            for reading, score in adadp["mean"].items()
        ),
    ]
    return Report(
        tables=[Table(f"figure{figure}", title, ["method", "rate", "final accuracy (%)"], rows)],
        figures={f"{figure} {reading}": score.mean for reading, score in adadp["mean"].items()}
        | {f"{figure} {other}": tuned.mean},
        claims=[
            ExperimentClaim.under(
                figure,
                f"Fig. {figure}",
                f"at {100 * mixed:g} % random, ADADP ends above {word} with its best rate",
                left_open(OPEN, scores.keeps),
                scores.in_every_reading(
                    lambda reading, unit: ahead([paired(adadp[unit][reading].finals, tuned.finals)])
                ),
            )
        ],
        pictures={f"figure{figure}": curves(title, [("", lines)], xlabel="round")},
        choices=[chosen],
    )


def _tuned(
    method: str, by_rate: Mapping[float, Score], best: float, text: Callable[[float], str]
) -> list[Curve]:
    """Curves of a method: its other rates in the background, then the best one."""
    others = [rate for rate in by_rate if rate != best]
    label = f"{method}, {text(min(others))} to {text(max(others))}" if others else ""
    lines = [Curve("" if k else label, by_rate[rate], "other") for k, rate in enumerate(others)]
    return [*lines, Curve(f"{method}, tuned: {text(best)}", by_rate[best], "sgd")]


def _power(rate: float) -> str:
    return f"$10^{{{math.log10(rate):.1f}}}$"


def over_batches(scores: FederatedScores, batches: Sequence[int], rates: Sequence[float]) -> Report:
    """Figure 1b: clients with a pair of classes each; one panel per batch size."""
    title = f"Fig. 1b: every client its own classes\n{scores.where}"
    rows: list[list[str | float | None]] = []
    panels = []
    figures: dict[str, float] = {}
    gains: dict[tuple[str, str], list[Difference]] = {}
    choices = []
    for batch in batches:
        adadp, summed = (scores.adadp(0.0, batch, unit) for unit in UNITS)
        rate, sgd, chosen = scores.tuned(SGD, rates, 0.0, batch)
        choices.append(chosen)
        cells = [score.text for score in (*adadp.values(), *summed.values(), sgd)]
        rows.append([str(batch), *cells, f"{rate:g}"])
        figures |= {f"1b {reading} B={batch}": score.mean for reading, score in adadp.items()}
        figures[f"1b sgd B={batch}"] = sgd.mean
        for unit, of_unit in zip(UNITS, (adadp, summed), strict=True):
            for reading, score in of_unit.items():
                gain = paired(score.finals, sgd.finals)
                gains.setdefault((reading, unit), []).append(gain)
        lines = [Curve(f"SGD, tuned: {rate:g}", sgd, "sgd")]
        lines += [
            Curve(READINGS[reading], score, STYLES[reading]) for reading, score in adadp.items()
        ]
        panels.append((f"|B| = {batch}", lines))
    claim = ExperimentClaim.under(
        "1b",
        "Fig. 1b",
        "with a pair of classes a client, ADADP ends above rate-tuned SGD at every |B|",
        left_open(OPEN, scores.keeps),
        scores.in_every_reading(
            lambda reading, unit: ahead(gains[reading, unit], [f"|B| = {b}" for b in batches])
        ),
    )
    columns = ["|B|", *scores.columns, "SGD (%)", "SGD's rate"]
    table = Table("figure1b", title, columns, rows)
    picture = curves(title, panels, xlabel="round")
    return Report([table], figures, [claim], {"figure1b": picture}, choices)
