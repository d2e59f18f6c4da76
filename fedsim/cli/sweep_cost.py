"""Joint privacy cost of the runs of a sweep, as `fedsim sweep` prints it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedsim.config.release_keys import split_settings
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.privacy import Cost
    from fedsim.runs.record import RunRecord
    from fedsim.runs.sweep import SweepRun


def print_cost(
    console: Console, grid: Sequence[SweepRun], records: Sequence[RunRecord], where: Path
) -> None:
    """Print the joint cost of the private runs at each level, if several have released anything.

    It is that of their plans, whichever rounds they made.
    """
    from fedsim.reports.sweep import joint_cost, joint_example_cost

    runs = [run for run in grid if (where / run.label / "config.toml").exists()]
    private = [run for run in runs if run.config.private]
    protecting = [run for run in runs if run.config.client.private]
    if len(private) > 1:
        delta = max(run.config.noise.delta for run in private)
        console.print(
            f"Each private run is (epsilon, {delta:g})-differentially private with the epsilon of "
            f"its line. {_joint(private, lambda runs: joint_cost(runs, delta), 'client')}"
        )
    if len(protecting) > 1:
        delta = max(run.config.client.noise.delta for run in protecting)
        console.print(_joint(protecting, lambda runs: joint_example_cost(runs, delta), "example"))
    if len(private) > 1 and any(record.last("simulated") for record in records):
        console.print(
            "These are simulated: the noise follows from the runs' seeds. For real data set "
            "noise.entropy = 'system'.",
            style="yellow",
        )


def _joint(
    runs: Sequence[SweepRun], cost_of: Callable[[Sequence[SweepRun]], Cost], level: str
) -> str:
    """Sentence on the joint cost of all runs for data that is in all of them."""
    if len({tuple(split_settings(run.config).items()) for run in runs}) > 1:
        return (
            f"There is no figure for all of them together at {level} level: they split examples "
            "among clients differently (seed, data or partition), so that one client's examples "
            "belong to many clients in another run. Choose among runs of one split, or partition "
            "by owners."
        )
    try:
        cost = cost_of(runs)
    except FedsimError as error:
        return f"Choosing the best one uses all {len(runs)} of them, which have no figure: {error}"
    return (
        f"Choosing the best one uses all {len(runs)} of them, whose plans together cost, by "
        f"composition, epsilon = {cost.epsilon:.4g} at delta = {cost.delta:g} ({level} level)."
    )
