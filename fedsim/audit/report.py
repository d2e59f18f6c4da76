"""Shows a verdict on a terminal and as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedsim.audit.checks import Finding, Part
from fedsim.audit.claim import Claim
from fedsim.audit.clients import WORLDS
from fedsim.audit.two_world import Attack, noticeable
from fedsim.audit.verdict import Verdict
from fedsim.reports.plots import INK, SERIES, dress

_SENTENCES = {world.name: world.sentence for world in WORLDS}
_LEAST = 1e-3


def tabulate(
    verdict: Verdict, assumptions: Mapping[str, str], *, everything: bool = False
) -> RenderableType:
    """Assumptions, tables of checks and attacks, and the verdict in one sentence.

    Checks are summed up by part of a release; listed are those that found a violation or could not
    be made, or all with ``everything``.
    """
    facts = Table.grid(padding=(0, 2))
    for attack in verdict.two_worlds:
        name = attack.finding.name
        sentences = [words] if (words := _SENTENCES.get(name)) else []
        sentence = "; ".join([*sentences, f"best score: {attack.score}"])
        assumptions = {**assumptions, name: sentence}
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
    box, claim = next((attack.box for attack in verdict.two_worlds), None), verdict.claim
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
    """Figure of the claim's trade-off curve and the measured boxes, on linear and log axes."""
    # Room for a line of text for each bar.
    height = max(5.6, 1.5 + 0.125 * len(verdict.checks))
    figure = Figure(figsize=(16 if verdict.checks else 11, height), layout="constrained")
    widths = [5, 5, 5] if verdict.checks else [5, 5]
    plain, logarithmic, *others = figure.subplots(1, len(widths), width_ratios=widths)
    dress([plain, logarithmic, *others])
    for axes in others:
        _bars(axes, verdict)
    for axes, scale in ((plain, "linear"), (logarithmic, "log")):
        axes.set_xscale(scale)
        axes.set_yscale(scale)
        low = _LEAST if scale == "log" else 0.0
        axes.set_xlim(low, 1)
        axes.set_ylim(low, 1)
        _curve(axes, verdict.claim, low)
        for attack, colour in zip(verdict.two_worlds, SERIES, strict=False):
            _box(axes, attack, colour, low)
        axes.set_xlabel("false positive rate", color=INK)
    plain.set_ylabel("false negative rate", color=INK)
    # The lower left corner is seldom reached by attacks.
    logarithmic.legend(loc="lower left", frameon=False, fontsize=9)
    figure.supxlabel(
        "dots: error rates as counted; squares: their upper bounds, a violation in the shaded area",
        color=INK,
        fontsize=9,
    )
    figure.suptitle(f"{title}\n{verdict}", color=INK, fontsize=10, wrap=True)
    return figure


def _curve(axes: Axes, claim: Claim, low: float) -> None:
    x = np.unique(np.concatenate([np.geomspace(_LEAST / 10, 1, 400), np.linspace(0, 1, 200)]))
    y = claim.curve(x)
    axes.fill_between(x, y, low, color=SERIES[1], alpha=0.12, lw=0, label="violates the claim")
    label = f"claim: epsilon {claim.epsilon:.3g} at delta {claim.delta:g}"
    axes.plot(x, np.maximum(y, 1e-9), color=INK, lw=1.5, label=label)
    axes.plot(x, np.maximum(1 - x, 1e-9), color=INK, lw=0.8, ls=":", label="random guessing")


def _bars(axes: Axes, verdict: Verdict) -> None:
    """Bars of the findings' p-values; a bar beyond the line is a violation."""
    checks = _by_part(verdict.checks)
    digits = [-np.log10(max(check.p_value, 1e-12)) for check in checks]
    colours = [SERIES[1] if check in verdict.failed else SERIES[0] for check in checks]
    positions = range(len(digits))
    axes.barh(positions, digits, color=colours, height=0.7)
    axes.set_yticks(positions, list(map(str, checks)))
    axes.axvline(-np.log10(verdict.risk_of_check), color=INK, lw=1, ls=":")
    axes.set_ylim(len(digits) - 0.4, -0.6)
    axes.set_xlim(0, 12.5)
    axes.set_xlabel("-log10 p; a bar beyond the line is a violation", color=INK)
    axes.tick_params(labelsize=7)


def _box(axes: Axes, attack: Attack, colour: str, low: float) -> None:
    assert attack.box is not None
    (x, y), (x_bound, y_bound) = (
        np.maximum(corner, low) for corner in (attack.box.rates, attack.box.bounds)
    )
    axes.add_patch(Rectangle((x, y), x_bound - x, y_bound - y, color=colour, alpha=0.25, lw=0))
    axes.plot([x], [y], marker="o", ms=4, color=colour, ls="", clip_on=False)
    label = attack.finding.name
    axes.plot([x_bound], [y_bound], marker="s", ms=6, mfc="none", color=colour, ls="", label=label)
