"""Koskela and Honkela's figures over rounds: 1a and 3 at one randomness, 1b at several batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from experiments.framework.base import Report, Table
from experiments.framework.config_runs import Score
from experiments.framework.curves import Curve, curves
from experiments.framework.spread import Difference, all_ahead, listed, paired
from experiments.koskela.federated_scores import (
    ADAM,
    READINGS,
    SGD,
    STYLES,
    FederatedScores,
    claims_of_readings,
    signed,
)

__all__ = ["over_batches", "over_rounds", "with_adam"]


def over_rounds(scores: FederatedScores, mixed: float, rates: Sequence[float]) -> Report:
    """Figure 1a: ADADP beside SGD at every rate, clients' data ``mixed`` so far."""
    title = f"Fig. 1a: {100 * mixed:g} % random\n{scores.where}"
    return _against(scores, "1a", title, SGD, mixed, rates)


def with_adam(scores: FederatedScores, mixed: float, rates: Sequence[float]) -> Report:
    """Figure 3: ADADP beside Adam at every rate."""
    title = f"Fig. 3: Adam, {100 * mixed:g} % random\n{scores.where}"
    return _against(scores, "3", title, ADAM, mixed, rates)


def _against(
    scores: FederatedScores, figure: str, title: str, other: str, mixed: float,
    rates: Sequence[float],
) -> Report:  # fmt: skip
    """ADADP beside another method at each of its rates."""
    word, digits = {SGD: ("SGD", "{:g}".format), ADAM: ("Adam", _power)}[other]
    adadp = scores.adadp(mixed)
    rate, tuned, chosen = scores.tuned(other, rates, mixed)
    by_rate = scores.over(other, rates, mixed)
    rows: list[list[str | float | None]] = [
        [READINGS[reading].replace("$\\eta$", "eta"), f"{scores.start:g}", score.text]
        for reading, score in adadp.items()
    ]
    rows += [
        [f"{word}, best" if tried == rate else word, f"{tried:.3g}", score.text]
        for tried, score in by_rate.items()
    ]
    lines = [
        *_tuned(word, by_rate, rate, digits),
        *(Curve(READINGS[reading], score, STYLES[reading]) for reading, score in adadp.items()),
    ]
    return Report(
        tables=[Table(f"figure{figure}", title, ["method", "rate", "final accuracy (%)"], rows)],
        figures={f"{figure} {reading}": score.mean for reading, score in adadp.items()}
        | {f"{figure} {other}": tuned.mean},
        claims=claims_of_readings(
            figure,
            f"at {100 * mixed:g} % random, ADADP ends above {word} with its best rate",
            {
                reading: signed([paired(score.finals, tuned.finals)])
                for reading, score in adadp.items()
            },
        ),
        pictures={f"figure{figure}": curves(title, [("", lines)], xlabel="round")},
        choices=[chosen],
    )


def _tuned(
    method: str, by_rate: Mapping[float, Score], best: float, text: Callable[[float], str]
) -> list[Curve]:
    """The best rate, before the others in the background."""
    others = [rate for rate in by_rate if rate != best]
    label = f"{method}, {text(min(others))} to {text(max(others))}" if others else ""
    lines = [Curve("" if k else label, by_rate[rate], "other") for k, rate in enumerate(others)]
    return [*lines, Curve(f"{method}, tuned: {text(best)}", by_rate[best], "sgd")]


def _power(rate: float) -> str:
    return f"$10^{{{math.log10(rate):.1f}}}$"


def over_batches(scores: FederatedScores, batches: Sequence[int], rates: Sequence[float]) -> Report:
    """Figure 1b: a pair of classes a client, a panel a batch."""
    title = f"Fig. 1b: every client its own classes\n{scores.where}"
    rows: list[list[str | float | None]] = []
    panels = []
    figures: dict[str, float] = {}
    gains: dict[str, list[Difference]] = {reading: [] for reading in READINGS}
    choices = []
    for batch in batches:
        adadp = scores.adadp(0.0, batch)
        rate, sgd, chosen = scores.tuned(SGD, rates, 0.0, batch)
        choices.append(chosen)
        rows.append([str(batch), *(score.text for score in adadp.values()), sgd.text, f"{rate:g}"])
        figures |= {f"1b {reading} B={batch}": score.mean for reading, score in adadp.items()}
        figures[f"1b sgd B={batch}"] = sgd.mean
        for reading, score in adadp.items():
            gains[reading].append(paired(score.finals, sgd.finals))
        lines = [Curve(f"SGD, tuned: {rate:g}", sgd, "sgd")]
        lines += [
            Curve(READINGS[reading], score, STYLES[reading]) for reading, score in adadp.items()
        ]
        panels.append((f"|B| = {batch}", lines))
    claims = claims_of_readings(
        "1b",
        "with a pair of classes a client, ADADP ends above rate-tuned SGD at every |B|",
        {
            reading: (all_ahead(gain), listed(gain, [f"|B| = {batch}" for batch in batches]))
            for reading, gain in gains.items()
        },
    )
    columns = ["|B|", "ADADP (%)", "ADADP, kept (%)", "SGD (%)", "SGD's rate"]
    table = Table("figure1b", title, columns, rows)
    picture = curves(title, panels, xlabel="round")
    return Report([table], figures, claims, {"figure1b": picture}, choices)
