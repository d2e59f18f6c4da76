"""Reports of rounds: usable and failed clients, reasons, and when a run has failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedsim.array_types import Ints
from fedsim.errors import RunFailedError as RunFailedError
from fedsim.rows.block import REASONS, Block, Reason

_log = logging.getLogger("fedsim")


_ADVICE: Mapping[Reason, str] = {
    "missing": "the nodes may be down, or too slow",
    "raised": "the log, or that of the node, says what was raised",
    "budget": "client.noise.max-epsilon allows them no further round",
    "timeout": "engine.timeout may be too short",
    "malformed": "the clients may run another app, or train another model",
    "non-finite": "the loss may not be finite where clients start (0/0, or inputs that are too "
    "large), or client.lr, server.lr or another learning rate may be too high",
}


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round; for the operator, and not covered by the guarantee.

    Attributes
    ----------
    round : int
    asked : int
        Clients in the sampled cohort, available or not.
    usable, failed : int
        Clients of the cohort that replied usably, and that did not.
    summed : int
        Clients whose rows are in the sum, including those that failed only in an extra.
    reasons : mapping of Reason to int
        Number of failed clients by reason; ``duplicate`` and ``unknown`` count replies of
        clients that had replied before, and of nodes that were not asked.
    ignored : int
        Connected nodes that are no clients of the run: their key is unknown or a duplicate, their
        claimed id is invalid or a duplicate, or it is beyond the population.
    info : mapping of name to float
        Numbers about the release, from the mechanism (`Release.info` and the means of its scalars).
    update_norm : float, optional
        L2 norm of the released mean: post-processing, not a release of its own.
    """

    round: int
    asked: int
    usable: int
    failed: int
    reasons: Mapping[Reason, int] = field(default_factory=dict)
    summed: int = 0
    ignored: int = 0
    info: Mapping[str, float] = field(default_factory=dict)
    update_norm: float | None = None

    columns: ClassVar[tuple[str, ...]] = (
        "asked",
        "usable",
        "failed",
        "summed",
        *(f"failed-{reason}" for reason in REASONS),
        "ignored-nodes",
    )
    """Names of the counts of `row`, the same in every run."""

    def __str__(self) -> str:
        failed = f" ({describe_reasons(self.reasons)})" if self.failed else ""
        return f"{self.usable} of {self.asked} clients drawn are usable{failed}"

    def row(self) -> dict[str, int]:
        """The counts, as in metrics.csv."""
        reasons = (self.reasons.get(reason, 0) for reason in REASONS)
        counts = (self.asked, self.usable, self.failed, self.summed, *reasons, self.ignored)
        return dict(zip(self.columns, counts, strict=True))


def empty_sum(released: bool) -> str:
    """Sentence about a private round that has no client's row in its sum."""
    if released:
        return "no client was usable: noise alone was released, and charged"
    return "fewer clients than secagg.threshold: nothing was released, and the round is charged"


def empty_round(row: Mapping[str, float]) -> str:
    """`empty_sum` for a row of a run's metrics; empty if the round has rows or is not private."""
    summed = row.get("summed", row.get("usable", 0))  # older runs have no column "summed"
    if "epsilon" not in row or not row.get("asked", 0) or summed:
        return ""
    return empty_sum("update-norm" in row)  # every release has a norm, also one of noise alone


def failures_in(rows: Iterable[Mapping[str, float]]) -> str:
    """Sentences about failures and ignored nodes in a run's metrics; empty if there are none.

    Examples
    --------
    >>> failures_in([{"asked": 5, "usable": 5, "ignored-nodes": 2}])
    'Up to 2 nodes at once were ignored (ignored-nodes in metrics.csv); the log says why.'
    >>> failures_in([{"asked": 5, "usable": 4, "failed": 1, "failed-timeout": 1}])
    'Clients failed once (timeout 1; engine.timeout may be too short).'
    """
    rows = list(rows)
    failed = int(sum(row.get("failed", 0) for row in rows))
    lost_rounds = sum(row.get("asked", 0) > 0 and not row.get("usable", 0) for row in rows)
    counts = reasons_in(rows)
    sentences = []
    if counts.total():
        lost_note = (
            f", all that were asked in {lost_rounds} round{'s' if lost_rounds != 1 else ''}"
            if lost_rounds
            else ""
        )
        times = "once" if failed == 1 else f"{failed} times"
        sentences.append(
            f"Clients failed {times} ({describe_reasons(counts, advise=True)}){lost_note}."
        )
    for event, count in Counter(filter(None, map(empty_round, rows))).items():
        sentences.append(f"In {'1 round' if count == 1 else f'{count} rounds'} {event}.")
    if ignored := int(max((row.get("ignored-nodes", 0) for row in rows), default=0)):
        nodes = f"{ignored} nodes at once were" if ignored > 1 else "1 node at once was"
        sentences.append(f"Up to {nodes} ignored (ignored-nodes in metrics.csv); the log says why.")
    return " ".join(sentences)


def reasons_in(rows: Iterable[Mapping[str, float]]) -> Counter[Reason]:
    """Total number of failures by reason, over rows of a run's metrics."""
    counts: Counter[Reason] = Counter()
    for row in rows:
        counts.update({reason: int(row.get(f"failed-{reason}", 0)) for reason in REASONS})
    return counts


class Tally:
    """Records the outcome of each client asked in one round; only its first reply counts.

    Parameters
    ----------
    asked : int64 ``[m]``
        Sorted ids of the clients asked.
    absent : int
        Number of sampled clients that were not available to be asked.
    """

    def __init__(self, asked: Ints, absent: int = 0) -> None:
        self.unknown = 0
        self.duplicates = 0
        self._asked = asked
        self._absent = absent
        # A client is missing until a reply of it has come.
        self._outcomes = np.full(len(asked), REASONS.index("missing"), dtype=np.int8)
        self._has_replied = np.zeros(len(asked), dtype=np.bool_)
        self._doubts: list[tuple[Ints, Tensor, Reason]] = []

    def expect(self, client: int) -> None:
        """Count one of the absent clients among those asked."""
        position = int(np.searchsorted(self._asked, client))
        self._asked = np.insert(self._asked, position, client)
        self._outcomes = np.insert(self._outcomes, position, REASONS.index("missing"))
        self._has_replied = np.insert(self._has_replied, position, False)
        self._absent -= 1

    def accept(self, block: Block) -> Block:
        """The part of a block that counts: clients asked, at their first reply, not failed."""
        position = np.searchsorted(self._asked, block.client_ids)
        is_asked = position < len(self._asked)
        is_asked[is_asked] = self._asked[position[is_asked]] == block.client_ids[is_asked]
        # Within a block client ids are unique, so that these are first replies within it too.
        first = is_asked.copy()
        first[is_asked] = ~self._has_replied[position[is_asked]]
        keep = first & block.ok
        self._has_replied[position[first]] = True
        self._outcomes[position[keep]] = _USABLE
        if keep.all():
            return block
        self.unknown += int((~is_asked).sum())
        self.duplicates += int((is_asked & ~first).sum())
        for client, reason in block.reasons.items():
            self._outcomes[position[first & (block.client_ids == client)]] = REASONS.index(reason)
        return block.select(keep)

    def reject(self, client_ids: Ints, reason: Reason) -> None:
        """Mark these clients, whose replies were taken, as failed."""
        self._outcomes[np.searchsorted(self._asked, client_ids)] = REASONS.index(reason)

    def reject_later(self, client_ids: Ints, usable: Tensor, reason: Reason) -> None:
        """`reject` the clients that are False in ``usable [n]``, once the report is made.

        Reading ``usable`` earlier would wait for the GPU after every block.
        """
        self._doubts.append((client_ids, usable, reason))

    def report(self, server_round: int) -> RoundReport:
        """The round's report, over all clients of the cohort."""
        for client_ids, usable, reason in self._doubts:
            self.reject(client_ids[~usable.cpu().numpy()], reason)
        self._doubts.clear()
        reason_codes = self._outcomes[self._outcomes != _USABLE]
        counts = np.bincount(reason_codes, minlength=len(REASONS)).tolist()
        reasons = dict(zip(REASONS, counts, strict=True))
        reasons["missing"] += self._absent
        failed = sum(reasons.values())
        reasons["duplicate"] += self.duplicates
        reasons["unknown"] += self.unknown
        sampled = len(self._asked) + self._absent
        return RoundReport(server_round, sampled, sampled - failed, failed, reasons)


_USABLE = -1


class Failures:
    """Counts consecutive rounds in which every client that was asked failed.

    Parameters
    ----------
    allowed : int or None
        Number of such rounds in a row that fails the run. None in a private run, which they never
        end: whether it continues must not depend on clients' data.
    """

    def __init__(self, allowed: int | None) -> None:
        self._allowed = allowed
        self._consecutive = 0
        self._reasons: Counter[Reason] = Counter()

    def state(self) -> dict[str, Any]:
        """The counts, for a checkpoint."""
        return {"in-a-row": self._consecutive, "reasons": dict(self._reasons)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._consecutive = state["in-a-row"]
        self._reasons = Counter(state["reasons"])

    def record(self, report: RoundReport, *, lost: bool) -> None:
        """Count a round, and log its failures.

        Raises
        ------
        RunFailedError
            If the round was ``lost``, and makes too many lost rounds in a row.
        """
        if report.failed:
            failed = (report.failed, report.asked, describe_reasons(report.reasons))
            _log.info("round %s: %s of %s failed: %s.", report.round, *failed)
        self._consecutive = self._consecutive + 1 if lost else 0
        if not lost:
            self._reasons.clear()
            return
        self._reasons.update(report.reasons)
        n = self._consecutive
        rounds = "round" if n == 1 else f"{n} rounds in a row, the last of them round"
        reasons = describe_reasons(self._reasons, advise=True)
        sentence = (
            f"every client that was asked failed in {rounds} {report.round}: {reasons}."
            if reasons
            else f"no client that was asked has an example to train on in {rounds} {report.round}."
        )
        if self._allowed is not None and self._consecutive >= self._allowed:
            raise RunFailedError(sentence)
        _log.warning("%s", sentence)


def describe_reasons(reasons: Mapping[Reason, int], *, advise: bool = False) -> str:
    """Counts by reason, most frequent first; with ``advise``, a hint at the likely cause too.

    Examples
    --------
    >>> describe_reasons({"timeout": 20, "raised": 1, "missing": 0}, advise=True)
    'timeout 20, raised 1; engine.timeout may be too short'
    """
    ranked: Iterable[tuple[Reason, int]] = sorted(reasons.items(), key=lambda item: -item[1])
    present = [(reason, count) for reason, count in ranked if count]
    text = ", ".join(f"{reason} {count}" for reason, count in present)
    advice = _ADVICE.get(present[0][0]) if present and advise else None
    return f"{text}; {advice}" if advice else text
