"""All checks of fedsim's strategies and clients: name, test, and likely cause of a violation.

Checks of the same sample are grouped; `whitebox.evidence` gathers the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from whitebox import grid_checks as grid
from whitebox import ledger_checks as ledger
from whitebox import plan_checks as plan

from fedsim.audit import catalogue as own
from fedsim.audit import noise_checks as noise
from fedsim.audit.findings import (
    Check,
    Finding,
    Part,
    SampleChecks,
    invariant,
    make_checks,
    untested,
)

Test = Callable[..., Finding]
TOO_LONG = "rows longer than C pass"
NOT_COVERED = "statistics are released without noise"


def omitted_checks(checks: Iterable[Check], examined: str, why: str) -> SampleChecks:
    """Checks whose sample could not be made, and why, for `findings`."""
    finding = untested(examined, why)
    return lambda: finding, [replace(check, test=lambda finding: finding) for check in checks]


def bound(name: str, cause: str = TOO_LONG) -> tuple[Check, ...]:
    """Check of how far something moved a release."""
    return make_checks("bound", (name, lambda found: found, cause))


def moved_by(row: str) -> tuple[Check, ...]:
    """Check of how far one row moved a release."""
    return bound(f"what one {row} moves", f"{TOO_LONG}, or noise is too small")


def _faults(part: Part, *rows: tuple[str, str, str]) -> tuple[Check, ...]:
    """Checks that no canary causes the named fault, from rows of name, expectation and cause."""

    def test(name: str, expected: str) -> Test:
        return lambda runs: invariant(runs.examined, runs.faults.get(name), expected)

    return tuple(Check(part, name, test(name, words), cause) for name, words, cause in rows)


# fmt: off
PRESENCE = make_checks("noise", ("presence", noise.presence, "noise is left out"))
FEW_COORDINATES = make_checks("noise",
    ("size in any direction", grid.covariance, "a direction without noise"))
SYSTEM_NOISE = make_checks("noise",
    ("noise with system entropy", plan.system_noise, "too few seeds"))
SEEDS = make_checks("noise", ("noise of different seeds", noise.repeats, "too few seeds"))
ANOTHER_RUN = make_checks("noise",
    ("noise of another run", noise.pairs, "noise is keyed by the seed alone"))
CLIENTS_RUN = (
    *make_checks("ledger",
        ("a line for every round", plan.line_for_every_round, "a release is not charged")),
    *make_checks("noise",
        ("noise of another client", plan.noise_of_clients, "clients share noise")),
)
RESUME = make_checks("noise",
    ("resume", plan.same_after_resume, "a resumed run draws noise again"))
ADDRESSES = make_checks("noise",
    ("addresses of draws", plan.addresses_once, "a random number is used twice"))

LOW_BITS = (
    *make_checks("noise", ("rounding to the grid", grid.rounding, "low bits show the sum")),
    *make_checks("noise",
        ("equal values", grid.equal_values, "noise has too few values"),
        ("low bits", grid.low_bits, "low bits show the sum"),
        ("low bits in pairs of rounds", grid.low_bits_of_pairs, "low bits are used again"),
        fits=grid.on_grid),
)
NOISE, DRAWS, DECLARED_LAW = own.NOISE, own.DRAWS, own.DECLARED_LAW
PARTICIPATIONS = make_checks("plan",
    ("rounds of each client", plan.participations,
     "rows are in more rounds than the plan counts on"))
PASSES = make_checks("sampler", ("passes", plan.passes, "batches overlap within a pass"))
SAME_COHORTS = make_checks("sampler",
    ("draws and data", plan.same_cohorts, "updates influence who is sampled"))
SYSTEM_COHORTS = make_checks("sampler",
    ("cohorts with system entropy", plan.system_cohorts, "too few seeds"))

FAILURES = make_checks("plan",
    ("several fail at once", plan.same_after_failures, "the denominator is counted"))
NOTHING_BUT_SUMS = make_checks("plan",
    ("nothing but the sum", plan.nothing_but_sums, "something is released beside the sum"))
LEAVES = make_checks("plan", ("what else leaves a round", plan.what_leaves, NOT_COVERED))
TOGETHER = bound("what one client moves, released scalars included")
TWO_WORLDS = make_checks("plan", ("two worlds", lambda found: found, "noise is too small"))

CANARIES = (
    *_faults("noise", ("earlier rounds", "the same in rounds without the canary",
                       "noise depends on updates")),
    *_faults("sampler", ("other clients", "the same other clients are sampled",
                         "updates influence who is sampled")),
    *_faults("bound", ("messages", "updates in messages add what blocks of rows add",
                       "rows count twice")),
    *_faults("plan",
        ("releases", "every round is released", "a client decides whether a round is released"),
        ("slowness", "a slow client excludes no other client", "a common deadline"),
        ("traces", "a client that adds nothing leaves no trace", "the denominator is counted")),
    *_faults("ledger", ("charges", "the same is charged", "updates influence what is charged")),
)
REPORTS = _faults("plan",
    ("what else leaves a round", "the same whatever an example is", NOT_COVERED))

LINES = (
    *make_checks("plan",
        ("rounds", partial(ledger.no_fault, ledger.missing_round, "as many as planned"),
         "data decide when a run ends")),
    *make_checks("ledger",
        ("a line for every release", partial(
            ledger.no_fault, ledger.uncharged_release, "one, written before the release is seen"),
         "a release is not charged"),
        ("what a line says", partial(
            ledger.no_fault, ledger.other_event, "what sampler, noise multiplier and bound give"),
         "another event is charged"),
        ("entropy of a run with a seed", partial(
            ledger.no_fault, ledger.other_entropy, "that of the config"),
         "noise that the seed determines is called secret"),
        ("one line, one release", partial(ledger.no_fault, ledger.second_line, "no round twice"),
         "a release is charged twice")),
)
CLAIM = make_checks("ledger",
    ("epsilon of the events", ledger.accounting, "the accountant counts too little"))
PROMISE = make_checks("ledger",
    ("epsilon of the run", ledger.epsilon_of_run, "another event is charged"))
BUDGET = make_checks("ledger",
    ("budget", ledger.budget, "a budget does not stop the run in time"))
# fmt: on
