"""Privacy accounting: events in, (epsilon, delta) out.

A cohort emits the event of its draw, a ledger writes it down before the release, and an
accountant says what all of it has cost. Nothing here loads torch or Flower.

To read it, begin with `plan`, what is released and how its rounds are charged, and `laws.base` with
one law, `laws.poisson`: what a draw costs. `accountant` composes such costs, by `pld` or the curves
in `losses`. `ledger` writes them down (`entry` is a line's content, `ledger_lines` and
`ledger_file` its form), `statement` says what they amount to, and `verification` whether files
agree. The families of correlated noise are in `noise`, from `noise.base` on.
"""

from __future__ import annotations

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
from fedsim.privacy.client_ledgers import ClientLedgers
from fedsim.privacy.entry import Entropy, Entry
from fedsim.privacy.events import Event
from fedsim.privacy.laws import Adjacency, Law, Level
from fedsim.privacy.ledger import Ledger
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import DeclaredBound, ReleasePlan
from fedsim.privacy.statement import Statement, claimed
from fedsim.privacy.tradeoff import TradeOff, tradeoff

__all__ = [
    "Accountant",
    "Adjacency",
    "Answer",
    "ClientLedgers",
    "Cost",
    "DeclaredBound",
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
    "claimed",
    "cost",
    "epsilon",
    "rounds_within",
    "rounds_within_events",
    "tradeoff",
    "worst_client",
]
