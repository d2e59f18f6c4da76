"""Shows a verdict on a terminal and as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedsim.audit.findings import Finding, Part
from fedsim.audit.two_world import noticeable
from fedsim.audit.verdict import Verdict
from fedsim.reports.charts import Bars, Chart, Line, Lines
from fedsim.reports.pictures import picture


def tabulate(
    verdict: Verdict, assumptions: Mapping[str, str], *, everything: bool = False
) -> RenderableType:
    """Assumptions, tables of checks and attacks, and the verdict in one sentence.

    Checks are summed up by part of a release; listed are those that found a violation or could not
    be made, or all with ``everything``.
    """
    facts = Table.grid(padding=(0, 2))
    for attack in verdict.attacks:
        assumptions = {**assumptions, attack.finding.name: f"best score: {attack.score}"}
    for name, sentence in assumptions.items():
        facts.add_row(Text(name, style="dim"), sentence)
    parts: list[RenderableType] = [facts, Text()]
    if verdict.checks:
        parts.append(_parts(verdict))
        if shown := verdict.checks if everything else verdict.failed:
            parts.append(_checks(verdict, shown))
        idle = [finding for finding in verdict.checks if not finding.tested]
        parts += [Text(f"{one}: the likely cause: {one.cause}.") for one in verdict.failed]
        parts += [Text(f"{one}: not tested, {one.measured}.") for one in idle]
    if verdict.attacks:
        parts += [_attacks(verdict), Text(power_sentence(verdict), style="dim")]
    style = "bold green" if verdict.accepted else "bold red"
    return Group(*parts, Text(), Text(str(verdict), style=style))


def _table(caption: str, *names: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption_justify="left", caption=caption
    )
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _parts(verdict: Verdict) -> Table:
    """Table with one line for each part of a release."""
    risk = _p(verdict.risk_of_check)
    table = _table(
        f"A test detects a violation where p is at most {risk}, its share of the risk.",
        *("of", "tests", "not tested", "smallest p", ""),
    )
    for part in dict.fromkeys(finding.part for finding in _by_part(verdict.checks)):
        of_part = [finding for finding in verdict.checks if finding.part == part]
        idle = sum(not finding.tested for finding in of_part)
        least, bad = min(finding.p_value for finding in of_part), {*of_part} & {*verdict.failed}
        table.add_row(
            *(part, str(len(of_part) - idle), str(idle or ""), _p(least)),
            f"{len(bad)} found a violation" if bad else "ok",
            style="red" if bad else "",
        )
    return table


def power_sentence(verdict: Verdict, seed: int = 1) -> str:
    """Sentence on the smallest violation that this number of runs detects."""
    box, claim = next((attack.box for attack in verdict.attacks), None), verdict.claim
    # No Gaussian is (epsilon, 0)-private.
    if box is None or (claim.declared_epsilon is not None and claim.delta == 0):
        return ""
    runs = 2 * box.trials
    factor = noticeable(claim, runs, verdict.risk, seed)
    if factor is None:
        return f"{runs} runs do not detect noise that is ten times too small: use more (--runs)."
    return f"{runs} runs detect noise that is {factor:g} times too small, or a violation as large."


def _checks(verdict: Verdict, shown: Sequence[Finding]) -> Table:
    risk = verdict.risk_of_check
    table = _table(
        "Where a test detects a violation, what was found lies outside what is allowed.", "of"
    )
    for heading in ("test", "examined", "found", "allowed"):
        table.add_column(heading, overflow="fold")
    for heading in ("p", ""):
        table.add_column(heading, no_wrap=True)
    for check in _by_part(shown):
        bad, allowed = check.refutes(risk), check.limit(risk)
        measured = "as allowed" if check.measured == allowed else check.measured
        table.add_row(
            *(check.part, check.name, check.examined, measured, allowed, _p(check.p_value)),
            "violation" if bad else "ok" if check.tested else "not tested",
            style="red" if bad else "",
        )
    return table


def _by_part(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: get_args(Part).index(finding.part))


def _attacks(verdict: Verdict) -> Table:
    table = _table(f"An attack detects a violation where p is at most {_p(verdict.risk)}.")
    # Names may wrap, so that the table fits into 80 columns.
    table.add_column("attack")
    for heading in ("false pos.", "false neg.", "allowed", "p", "epsilon at least", "claimed"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for attack in verdict.attacks:
        finding = attack.finding
        table.add_row(
            finding.name,
            *attack.errors_in_words,
            finding.limit(verdict.risk),
            _p(finding.p_value),
            f"{attack.epsilon_bound:.2f}",
            f"{attack.claim.epsilon:.2f}",
            "violation" if finding.refutes(verdict.risk) else "ok",
        )
    return table


def _p(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.2g}" if value > 1e-11 else "< 1e-11"


def draw(verdict: Verdict, title: str) -> Figure:
    """Figure of the claim's trade-off curve, the attacks' error rates, and all p-values."""
    rates = np.unique(np.concatenate([np.geomspace(1e-4, 1, 200), np.linspace(0, 1, 100)]))
    claim = f"claim: epsilon {verdict.claim.epsilon:.3g} at delta {verdict.claim.delta:g}"
    lines = [
        Line(claim, rates.tolist(), verdict.claim.curve(rates).tolist(), reference=True),
        Line("random guessing", [0.0, 1.0], [1.0, 0.0], reference=True),
    ]
    for attack in verdict.attacks:
        if attack.box is not None:
            # From the rates as counted to their upper bounds: a violation ends below the curve.
            (x, y), (x_bound, y_bound) = attack.box.rates, attack.box.bounds
            lines.append(Line(attack.finding.name, [x, x_bound], [y, y_bound]))
    charts: list[Chart] = [
        Lines("Attacks", "false-positive rate", "false-negative rate", lines, square=True)
    ]
    if verdict.checks:
        checks = _by_part(verdict.checks)
        digits = [-math.log10(max(check.p_value, 1e-12)) for check in checks]
        limit = -math.log10(verdict.risk_of_check)
        heading = f"-log10 p; above {limit:.3g} is a violation"
        charts.append(Bars("Tests", "test", heading, list(map(str, checks)), digits))
    return picture(charts, f"{title}\n{verdict}")
