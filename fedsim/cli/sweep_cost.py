"""Joint privacy cost of the runs of a sweep, as `fedsim sweep` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedsim.config.plan import all_planned_releases, stopping
from fedsim.config.release_keys import split_settings
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.runs.record import RunRecord
    from fedsim.runs.sweep import SweepRun

MOST_OUTCOMES = 10**100
"""Cap on the number of outcomes; with more, the share of delta would underflow."""


def print_examples_cost(console: Console, grid: Sequence[SweepRun], where: Path) -> None:
    """Print the joint cost at example level, if several runs' clients protect their examples."""
    from fedsim.privacy import Ledger
    from fedsim.privacy.client_ledgers import run_of
    from fedsim.reports.sweep import joint_example_cost

    protecting = [member for member in grid if member.config.client.private]
    if len(protecting) < 2:
        return
    rounds_left, runs = Counter[Path](), list[str | None]()
    for member in protecting:
        run = where / member.label
        ledger = run / "ledger.jsonl"
        made = 0
        if ledger.exists():
            server = Ledger.read(ledger)
            made = server.rounds_made
            runs.append(run_of(server))
        directory = Path(member.config.client.state_dir or run / "clients")
        rounds_left[directory] += member.config.rounds - made
    delta = max(member.config.client.noise.delta for member in protecting)
    same_clients = len({split_settings(member.config) for member in protecting}) == 1
    outcome_count = possible_outcomes(protecting)
    cost = joint_example_cost(
        rounds_left, delta, outcome_count, same_examples=same_clients, runs=runs
    )
    console.print(
        f"The {len(protecting)} runs whose clients protect their examples cost together, by "
        f"composition, epsilon = {cost.epsilon:.4g} at delta = {delta} (example level, for the "
        f"examples of the client that spends most).{_shared_delta(outcome_count)}"
    )


def print_cost(
    console: Console, grid: Sequence[SweepRun], records: Sequence[RunRecord], where: Path
) -> None:
    """Print the joint cost of the private runs, if several of them have released anything."""
    from fedsim.privacy.durable import archived

    ledgers = {
        where / member.label / "ledger.jsonl": member for member in grid if member.config.private
    }
    # A run that failed before its first row of metrics may have charged a release to its ledger.
    released = {path: m for path, m in ledgers.items() if path.exists() or archived(path)}
    if len(released) < 2:
        return
    delta = max(member.config.noise.delta for member in ledgers.values())
    console.print(
        f"Each private run is (epsilon, {delta:g})-differentially private with the epsilon of its "
        f"line. {joint_cost_sentence(released, delta)}"
    )
    if any(record.last("simulated") for record in records):
        console.print(
            "These are simulated: the noise follows from the runs' seeds. For real data set "
            "noise.entropy = 'system'.",
            style="yellow",
        )


def joint_cost_sentence(released: Mapping[Path, SweepRun], delta: float) -> str:
    """Sentence on the joint cost of all runs for a client whose data is in all of them."""
    from fedsim.reports.sweep import joint_cost

    if len({split_settings(member.config) for member in released.values()}) > 1:
        return (
            "There is no figure for all of them together: they split examples among clients "
            "differently (seed, data or partition), so that one client's examples belong to many "
            "clients in another run. Choose among runs of one split, or partition by owners."
        )
    outcome_count = possible_outcomes(released.values())
    planned = {path: all_planned_releases(member.config) for path, member in released.items()}
    sentence_start = f"Choosing the best one uses all {len(released)} of them, which together"
    try:
        cost = joint_cost(planned, delta, outcome_count)
    except FedsimError as error:
        return f"{sentence_start} have no figure: {error}"
    return (
        f"{sentence_start} cost, by composition, epsilon = {cost.epsilon:.4g}."
        f"{_shared_delta(outcome_count)}"
    )


def possible_outcomes(runs: Iterable[SweepRun]) -> int:
    """Upper bound on the number of different sets of releases, if releases may end runs."""
    count = 1
    for run in runs:
        count *= max(stopping(run.config.to_run_config()).possible_ends, 1)
    return min(count, MOST_OUTCOMES)


def _shared_delta(outcome_count: int) -> str:
    if outcome_count == 1:
        return ""
    return (
        " Which runs ended early follows from what was released: half of delta is shared "
        "among all possible outcomes."
    )
