"""The audit: attacks and checks of a strategy's claim, and the verdict that follows."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedsim.audit.claim import Claim
from fedsim.audit.findings import Finding
from fedsim.audit.two_world import Attack
from fedsim.errors import FedsimError

# Checks get a small share: where there is a violation, their exact p-values are far below it.
# Attacks need more, as their bounds are conservative.
SHARE_OF_CHECKS = 0.1


@dataclass(frozen=True)
class Verdict:
    """Result of an audit.

    Attributes
    ----------
    claim : Claim
        Claim of the first attack's runs.
    attacks : tuple of Attack
    checks : tuple of Finding
        Checks of whole runs: noise, sampling, one client's influence, charges.
    confidence : float
        Lower bound on the probability that a true claim is accepted.
    """

    claim: Claim
    attacks: tuple[Attack, ...]
    checks: tuple[Finding, ...]
    confidence: float

    @property
    def risk(self) -> float:
        """Risk of each attack: they share the attacks' part of the risk equally (Bonferroni)."""
        return risk_of_attack(self.confidence, len(self.attacks), bool(self.checks))

    @property
    def risk_of_check(self) -> float:
        """Risk of each check: together they have a tenth of the risk, without attacks all."""
        share = SHARE_OF_CHECKS if self.attacks else 1.0
        return (1 - self.confidence) * share / max(len(self.checks), 1)

    @property
    def refuting(self) -> tuple[str, ...]:
        """Names of the attacks and checks that detected a violation."""
        attacks = [attack.finding for attack in self.attacks]
        names = [finding.name for finding in attacks if finding.refutes(self.risk)]
        return (*names, *map(str, self.failed))

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Checks that detected a violation."""
        return tuple(check for check in self.checks if check.refutes(self.risk_of_check))

    @property
    def accepted(self) -> bool:
        """Whether no attack and no check refuted the claim."""
        return not self.refuting

    @property
    def epsilon_bound(self) -> float:
        """Largest lower bound on epsilon of the attacks."""
        return max((attack.epsilon_bound for attack in self.attacks), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The verdict for JSON."""
        return {
            "accepted": self.accepted,
            "verdict": str(self),
            "confidence": self.confidence,
            "epsilon": self.claim.epsilon if math.isfinite(self.claim.epsilon) else None,
            "delta": self.claim.delta,
            "epsilon-at-least": self.epsilon_bound,
            "violations": [
                {
                    "of": f.part,
                    "test": f.name,
                    "found": f.measured,
                    "likely-cause": f.cause,
                    "p": f.p_value,
                }
                for f in self.failed
            ],
            "attacks": [
                {"name": f.name, "p": f.p_value, "violation": f.refutes(self.risk)}
                for f in (attack.finding for attack in self.attacks)
            ],
            "tests": len(self.checks),
        }

    def __str__(self) -> str:
        claimed = f"(epsilon, delta) = ({self.claim.epsilon:.3g}, {self.claim.delta:g})"
        level = f"at {self.confidence:.4g} confidence."
        if not self.accepted:
            return f"Violation of {claimed} detected by {' and '.join(self.refuting)}, {level}"
        made = [f"{len(self.attacks)} attacks"] * bool(self.attacks)
        made += [f"{len(self.checks)} tests"] * bool(self.checks)
        return f"No violation of {claimed} detected by {' and '.join(made)}, {level}"


def risk_of_attack(confidence: float, attacks: int, checked: bool) -> float:
    """Each attack's share of the risk that a true claim is rejected."""
    return (1 - confidence) * (1 - SHARE_OF_CHECKS * checked) / max(attacks, 1)


def check_numbers(confidence: float, runs: int | None, canaries: int = 0) -> None:
    """Refuse arguments with which an audit says nothing; ``runs`` is None without worlds."""
    if not 0 < confidence < 1:
        raise FedsimError(f"confidence is {confidence}; it must lie strictly between 0 and 1.")
    if runs is not None and runs < 20:
        raise FedsimError(f"runs is {runs}; it must be at least 20.")
    if canaries < 0:
        raise FedsimError(f"canaries is {canaries}; it must be at least 0.")


@contextmanager
def silenced_logs() -> Iterator[None]:
    """Silence logs of rounds, and warnings about clients that fail on purpose."""
    logs = [logging.getLogger(name) for name in ("fedsim", "flwr")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
