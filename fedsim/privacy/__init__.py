"""Privacy accounting: events in, (epsilon, delta) out.

A sampler emits the event of its draw, a ledger records it before the release, and an accountant
composes all events. Nothing here loads torch or Flower.

Read `plan` first: what is released, and how its rounds are charged. Then read `laws.base` with one
law, `laws.poisson`: the cost of a draw. `accountant` composes costs, by `pld` or by the curves in
`losses`. `ledger` records them (`entry` is what a line says), `statement` says what they add up to,
and `verification` checks files. Correlated noise is in `noise`, from `noise.base` on.
"""

from __future__ import annotations

from fedsim.arguments import explain_calls
from fedsim.privacy.accountant import Accountant, Cost
from fedsim.privacy.calibration import (
    Answer,
    Question,
    calibrate,
    calibrate_events,
    cost,
    epsilon,
    rounds_within,
    rounds_within_events,
)
from fedsim.privacy.claims import worst_client
from fedsim.privacy.entry import Entropy, Entry
from fedsim.privacy.events import Event
from fedsim.privacy.groups import group_epsilon
from fedsim.privacy.laws import Adjacency, Law, Level
from fedsim.privacy.ledger import Budget, Ledger
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import DeclaredMechanism, ReleasePlan
from fedsim.privacy.selection import selection_epsilon
from fedsim.privacy.statement import Statement, statements_to_show
from fedsim.privacy.tradeoff import TradeOff, tradeoff

__all__ = [
    "Accountant",
    "Adjacency",
    "Answer",
    "Budget",
    "Cost",
    "DeclaredMechanism",
    "Entropy",
    "Entry",
    "Event",
    "Independent",
    "Law",
    "Ledger",
    "Level",
    "Question",
    "ReleasePlan",
    "Statement",
    "TradeOff",
    "calibrate",
    "calibrate_events",
    "cost",
    "epsilon",
    "group_epsilon",
    "rounds_within",
    "rounds_within_events",
    "selection_epsilon",
    "statements_to_show",
    "tradeoff",
    "worst_client",
]

explain_calls(__name__)
