"""What a sweep found: a table of its members, a picture over one axis, and its price."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedsim.config import Scalar
from fedsim.privacy import Accountant, ClientLedgers, Cost, Ledger
from fedsim.reports.palette import SERIES
from fedsim.reports.plots import curve_style, grid
from fedsim.reports.series import lowest_is_best

__all__ = ["MemberLine", "draw", "examples_price", "price", "read_line", "to_csv"]


@dataclass(frozen=True)
class MemberLine:
    """What one member reached.

    Attributes
    ----------
    point : mapping of key to value
    accuracy : float
        On the test examples, after the last round.
    mean_accuracy : float
        Mean of the last five evaluations.
    loss : float
    epsilon : float or None
        None for a member that is not private.
    simulated : bool
        Whether its noise follows from its seed.
    validation : float or None
        By what members are chosen between: the mean of the last five evaluations on the examples
        held out, larger where a member is better; None where none are held out.
    """

    point: dict[str, Scalar]
    accuracy: float
    mean_accuracy: float
    loss: float
    epsilon: float | None
    simulated: bool = False
    validation: float | None = None


def read_line(point: dict[str, Scalar], directory: Path) -> MemberLine:
    """The line of a member whose artefacts are in ``directory``."""
    with (directory / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("test-loss")]
    if not rows:
        return MemberLine(point, np.nan, np.nan, np.nan, None)
    last = rows[-1]
    tail = [float(row.get("test-accuracy") or "nan") for row in rows[-5:]]
    spent = last.get("epsilon")
    return MemberLine(
        point=point,
        accuracy=tail[-1],
        mean_accuracy=float(np.mean(tail)),
        loss=float(last["test-loss"]),
        epsilon=float(spent) if spent else None,
        simulated=last.get("simulated") == "1",
        validation=_validation(rows[-5:]),
    )


def _validation(rows: Sequence[Mapping[str, str]]) -> float | None:
    """The mean of a metric on validation examples, or of the loss where that is all there is."""
    columns = [name for name in rows[-1] if name.startswith("validation-") and rows[-1][name]]
    if not columns:
        return None
    column = next((name for name in columns if name != "validation-loss"), columns[0])
    mean = float(np.mean([float(row[column]) for row in rows if row[column]]))
    return -mean if lowest_is_best(column) else mean


def to_csv(lines: Sequence[MemberLine]) -> str:
    """All lines as CSV text."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    figures = ["test-accuracy", "test-accuracy-last-five", "test-loss", "epsilon", "simulated"]
    writer.writerow([*lines[0].point, *figures])
    for line in lines:
        epsilon = "" if line.epsilon is None else line.epsilon
        simulated = "" if line.epsilon is None else int(line.simulated)
        values = [line.accuracy, line.mean_accuracy, line.loss, epsilon, simulated]
        writer.writerow([*line.point.values(), *values])
    return text.getvalue()


def price(ledgers: Sequence[Path], delta: float) -> Cost:
    """What all members together cost: the composition of all their releases at ``delta``."""
    accountant = Accountant()
    for path in ledgers:
        for entry in Ledger.read(path).charged:
            accountant.add(entry.event)
    return accountant.cost(delta)


def examples_price(directories: Sequence[Path], delta: float) -> Cost:
    """The same at example level, of the client that pays most; from clients' ledgers."""
    clients: dict[int | None, Accountant] = {}
    for directory in dict.fromkeys(directories):
        for ledger in ClientLedgers(directory, delta=delta, read_only=True).everyone():
            for entry in ledger.charged:
                clients.setdefault(entry.client, Accountant()).add(entry.event)
    costs = [accountant.cost(delta) for accountant in clients.values()]
    return max(costs, key=lambda cost: cost.epsilon, default=Accountant().cost(delta))


def draw(lines: Sequence[MemberLine], axis: str, title: str) -> Figure:
    """Accuracy over one axis: a curve for each setting of the others, seeds averaged."""
    figure, (axes,) = grid(1, 1, title=title, width=7.0, height=4.4)
    curves: dict[str, dict[Scalar, list[float]]] = {}
    for line in lines:
        others = {k: v for k, v in line.point.items() if k not in (axis, "seed")}
        name = ", ".join(f"{key} = {value}" for key, value in others.items())
        curves.setdefault(name, {}).setdefault(line.point[axis], []).append(line.mean_accuracy)
    values = list(dict.fromkeys(line.point[axis] for line in lines))
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    x = [float(v) for v in values] if numeric else list(range(len(values)))
    for index, (name, curve) in enumerate(curves.items()):
        y = np.array([np.mean(curve.get(value, [np.nan])) for value in values])
        low = np.array([np.min(curve.get(value, [np.nan])) for value in values])
        high = np.array([np.max(curve.get(value, [np.nan])) for value in values])
        style = curve_style(SERIES[index % len(SERIES)])
        axes.errorbar(x, y, [y - low, high - y], **style, capsize=3, label=name or None)
    if numeric and min(x) > 0 and max(x) / min(x) >= 20:
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(x, [str(value) for value in values])
    axes.set_xlabel(axis)
    axes.set_ylabel("test accuracy, mean of the last five evaluations")
    if any(len(scores) > 1 for curve in curves.values() for scores in curve.values()):
        axes.set_title("mean over seeds; bars: the lowest and highest seed", fontsize=9, loc="left")
    if any(curves):
        axes.legend(fontsize=8, frameon=False)
    return figure
