"""The ledger: every release is written down before anything leaves the place that adds the noise.

A ledger is a file of JSON lines, chained by hashes. The first one, the header, says the format, the
level, how clients were dealt, and which of two kinds the ledger is:

- A *log* is of runs whose noise follows from a known seed. It protects nobody, so that nothing has
  to be proved: a resumed run cuts the log back to its checkpoint, and writes the same lines again.
- *Evidence* is of noise from the operating system. Each line is appended, and none is ever cut,
  replaced or taken for another: a round that is drawn again is another line, and costs a release.

The loop that writes one (`fedsim.federation`, or yours)::

    ledger.record(entry, budget=budget)   # under a lock: check the budget, write, sync
    release(noisy_sum)                    # only then

A line is ``{"entry": {"releases": [...], "previous": "..."}, "hash": "...", "noted": {...}}``. The
hash covers the bytes of the entry, which contain the hash of the line before. The notes (time,
host, run) are covered by no hash, so that equal runs have equal heads. A last line that is cut
short belongs to something that never left: a writer drops it, and readers ignore it.

A chain proves that no line was damaged, lost or swapped by accident. It contains no secret: anyone
who can write the file can write a forged chain, or cut off its end. To detect that, compare its
head with a copy kept elsewhere (`fedsim verify RUN`), or sign it.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import socket
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, NoReturn, Self

from fedsim.arguments import as_text, check_arguments, expected, require
from fedsim.errors import BudgetSpentError, FedsimError
from fedsim.privacy import durable
from fedsim.privacy.accountant import Cost, check_delta
from fedsim.privacy.claims import costliest
from fedsim.privacy.entry import Entry, History, Kind
from fedsim.privacy.events import Event
from fedsim.privacy.flower_records import event_of, privacy_config, privacy_spent
from fedsim.privacy.laws import FixedSizeLaw
from fedsim.privacy.laws.base import Level, check_level
from fedsim.privacy.laws.declared import NAME, DeclaredLaw
from fedsim.privacy.records import read_record, to_json
from fedsim.privacy.statement import Statement
from fedsim.settings import check_settings

if TYPE_CHECKING:
    from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent

    from fedsim.privacy.plan import MechanismLike, ReleasePlan

LedgerKind = Literal["log", "evidence"]
"""Kind of a ledger."""
VERSION = 1
"""Format of ledgers."""
GENESIS = "0" * 64
"""Previous hash of the first line."""
_LINE_START = '{"entry":'
_HEADER_START = b'{"entry":{"kind":"ledger","version":'


@dataclass(frozen=True)
class LedgerPosition:
    """Position in a ledger: hash of the last line before it, and number of lines."""

    head: str = GENESIS
    lines: int = 0


@dataclass(frozen=True, kw_only=True)
class Header:
    """First line of a ledger: what all its lines have in common.

    Attributes
    ----------
    version : int
    keeps : "log" or "evidence"
    level : "client" or "example"
        What a row of its releases is.
    client : int or None
        The one client of a node's own ledger.
    split : mapping
        How clients were dealt: the population, and the settings of the split. Empty if unknown.
    """

    version: int = VERSION
    keeps: LedgerKind
    level: Level
    client: int | None = None
    split: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def line_and_hash(self) -> tuple[bytes, str]:
        """The header's line, newline included, and its hash."""
        return chained_line({"kind": "ledger", **to_json(self)}, GENESIS)

    @classmethod
    def parse(cls, line: bytes) -> tuple[Header, str]:
        """Parse the first line: the header, and its hash.

        Raises
        ------
        FedsimError
            If it is no header, or of a format that this fedsim does not know.
        """
        if not line.startswith(_HEADER_START):
            raise FedsimError(
                "it is not a ledger; a ledger is a file that fedsim wrote, such as "
                "runs/NAME/ledger.jsonl."
            )
        data, _, head = parse_line(line, GENESIS)
        if (version := data.get("version")) != VERSION:
            raise FedsimError(
                f"its format is {version}, and this fedsim reads format {VERSION}: read it with "
                "the fedsim that wrote it."
            )
        del data["kind"]
        return read_record(cls, data, "its header"), head


def chained_line(
    entry: Mapping[str, Any], previous: str, noted: Mapping[str, Any] | None = None
) -> tuple[bytes, str]:
    """One line, newline included, and its hash."""
    # Numbers may be NumPy's, which json cannot write.
    body = json.dumps(
        {**entry, "previous": previous},
        separators=(",", ":"),
        allow_nan=False,
        default=operator.methodcaller("item"),
    )
    digest = hashlib.sha256(body.encode()).hexdigest()
    unhashed = json.dumps(dict(noted or {}), separators=(",", ":"), allow_nan=False)
    return f'{_LINE_START}{body},"hash":"{digest}","noted":{unhashed}}}\n'.encode(), digest


def parse_line(line: bytes, previous: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Entry, notes and hash of a line, given the hash of the line before.

    Raises
    ------
    FedsimError
        If it is no line that `chained_line` wrote after the one of hash ``previous``.
    """
    try:
        text = line.decode("ascii")
        if not text.startswith(_LINE_START):
            raise ValueError(text)
        entry, end = _DECODER.raw_decode(text, len(_LINE_START))
    except (ValueError, RecursionError):
        raise FedsimError("it is not a ledger's line.") from None
    # The hash is of the bytes in the file, not of the parsed entry written again: a line that was
    # only respelled is detected, and another version's spelling of numbers is not an error.
    digest = hashlib.sha256(text[len(_LINE_START) : end].encode()).hexdigest()
    seal = f',"hash":"{digest}"'
    if not isinstance(entry, dict) or not text.startswith(seal, end):
        raise FedsimError("its hash does not match its content.")
    try:
        noted = _DECODER.decode(f"{{{text[end + len(seal) + 1 :]}")
    except (ValueError, RecursionError):
        noted = None
    if not isinstance(noted, dict) or not isinstance(noted.get("noted"), dict):
        raise FedsimError("the notes beside its entry cannot be read.")
    if entry.pop("previous", None) != previous:
        raise FedsimError("it does not follow the line before it.")
    return entry, noted["noted"], digest


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of a ledger")


# Python's json would accept NaN and infinities, which JSON does not have.
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True)
class Budget:
    """The most that any owner in a ledger may spend.

    Attributes
    ----------
    epsilon, delta : float
    key : str
        Name of the setting that gives epsilon, for messages.
    """

    epsilon: float
    delta: float
    key: str = "max-epsilon"

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.epsilon > 0:  # no cost would exceed NaN
            raise FedsimError(f"{self.key} is {self.epsilon}; it must be above 0.")
        check_delta(self.delta)

    def message(self, entry: Entry, client: int | None = None, ledger: Path | None = None) -> str:
        """Why the release of an entry may not be made: a sentence without its full stop.

        It names the path of ``ledger``, except for a client's entry: that sentence is sent to the
        server, which must not see a node's paths.
        """
        subject = "a release" if entry.round is None else f"round {entry.round}"
        evaluation = "the evaluation of " if entry.kind == "evaluation" else ""
        of_client = "" if client is None else f" of client {client}"
        place = "" if ledger is None or client is not None else f" in ledger {ledger}"
        return (
            f"{evaluation}{subject} would exceed {self.key} = {self.epsilon}{of_client} at delta = "
            f"{self.delta}{place}"
        )


class OverBudgetError(BudgetSpentError):
    """Raised if a line would exceed a budget; nothing was written.

    Attributes
    ----------
    owners : tuple of int or None
        Those whose budget it would exceed: clients, at example level.
    """

    owners: tuple[int | None, ...] = (None,)


class RunProgress(NamedTuple):
    """How far a run has come in a ledger, for one kind of release and one owner.

    Attributes
    ----------
    last_round : int
        Largest round that has a line; 0 without any.
    paid_through : int
        Last round that is paid for in advance; 0 if none is.
    """

    last_round: int = 0
    paid_through: int = 0

    def was_drawn(self, round: int) -> bool:
        """Whether the round, or a later one, has been drawn before."""
        return 0 < round <= self.last_round

    def is_paid(self, round: int) -> bool:
        """Whether an earlier round's line pays for the round."""
        return 0 < round <= self.paid_through


class Ledger:
    """Record of all releases, written before each of them; gives epsilon at any time.

    A loop that writes one; its lines are public, and depend on no row::

        ledger = Ledger("ledger.jsonl", delta=1e-5, max_epsilon=8.0)
        for number in range(1, rounds + 1):
            total = bounded_sum(sampled(number))  # secret
            with ledger.release(plan, number):  # locked: budget, line, sync; or BudgetSpentError
                model += noisy_mean(total)  # only now may anything leave
        print(ledger.epsilon(), ledger.statement())  # from the lines alone

    A ledger at client level has one owner, all clients together; one at example level has an owner
    for each client, whose data are disjoint, so that its epsilon is that of the client that has
    spent most. It implements Flower's ``flwr.serverapp.PrivacyAccountant`` protocol, so that
    Flower's own DP strategies can use it too.

    Each process has the lines it has read in memory. Before it adds one it locks the file and reads
    what others have added since, so that the chain, the budget and the new line are of one state.

    Parameters
    ----------
    path : path or None
        File to continue or, at the first record, to create. None: in memory only.
    delta : float or None
        Default delta of every epsilon.
    max_epsilon : float or None
        Default budget of `record` and `would_exceed`.
    declared_event : Event or None
        Cost of one planned round, from which Flower's protocol takes sampling and population.
    keeps : "log" or "evidence", optional
        Its kind; by default a log of releases whose noise follows from a config's seed, and
        evidence of all others.
    split : mapping, optional
        How clients were dealt. A file with another split is refused: its client 7 is another one.
    client : int, optional
        The one client of a node's own ledger.
    read_only : bool
        Whether nothing is recorded.

    Attributes
    ----------
    header : Header or None
        None until something is recorded.
    lines : list of bytes
        All lines, the header's included, without newlines.
    heads : list of str
        Hash of each line: the earlier heads of a ledger that was extended are among them.
    entries : list of Entry
    histories : dict
        `History` of each owner; the owner is None at client level.

    Raises
    ------
    FedsimError
        If the file is no ledger, was changed after it was written, or is of another kind or split;
        or if the declared event does not compose with it.
    """

    @check_arguments
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        delta: float | None = None,
        max_epsilon: float | None = None,
        declared_event: Event | None = None,
        keeps: LedgerKind | None = None,
        split: Mapping[str, str | int | float | bool] | None = None,
        client: int | None = None,
        read_only: bool = False,
    ) -> None:
        if delta is not None:
            check_delta(delta)
        if max_epsilon is not None and not max_epsilon > 0:
            raise FedsimError(f"max_epsilon is {max_epsilon}; it must be above 0.")
        self.path = None if path is None else Path(path)
        self.delta, self.max_epsilon, self.declared_event = delta, max_epsilon, declared_event
        self.read_only = read_only
        self._keeps, self._client = keeps, client
        self._split = None if split is None else dict(split)
        self._clear()
        if self.path is not None and self.path.is_dir():
            raise FedsimError(
                f"the ledger's path, {self.path}, is a directory; it must be a file, such as "
                f"{self.path / 'ledger.jsonl'}."
            )
        if self.path is not None and self.path.exists():
            with durable.locked(self.path, write=False) as file:
                self._load(file.read())
        if keeps is not None:
            self._check_header(keeps)
        if declared_event is not None:  # refuse adjacencies that do not compose before any release
            self.history.accountant_with(Entry(event=declared_event))

    @classmethod
    @check_arguments
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        delta: float | None = None,
        declared_event: Event | None = None,
    ) -> Self:
        """Open an existing ledger read-only.

        Raises
        ------
        FedsimError
            If the file does not exist, is no ledger, or was changed after it was written.
        """
        if not Path(path).is_file():
            raise FedsimError(f"there is no ledger at {path}.")
        return cls(path, delta=delta, declared_event=declared_event, read_only=True)

    def _clear(self) -> None:
        """Forget all lines."""
        self.header: Header | None = None
        self.lines: list[bytes] = []
        self.heads: list[str] = []
        self.entries: list[Entry] = []
        self.histories: dict[int | None, History] = {}
        self._progress: dict[tuple[str | None, Kind, int | None], RunProgress] = {}
        self._runs: list[str | None] = []  # the run of each line
        self._laws: dict[str, Any] = {}  # JSON of users' laws in earlier lines, by digest
        self._size = 0  # bytes of the complete lines read so far

    # -- what it says -------------------------------------------------------------------

    @property
    def head(self) -> str:
        """Hash of the last line, which covers the whole ledger."""
        return self.heads[-1] if self.heads else GENESIS

    @property
    def position(self) -> LedgerPosition:
        """Hash of the last line, and number of lines."""
        return LedgerPosition(self.head, len(self.heads))

    @property
    def level(self) -> Level:
        """What a row is; "client" until something is recorded."""
        return "client" if self.header is None else self.header.level

    @property
    def keeps(self) -> LedgerKind | None:
        """Its kind; None if it was not given and nothing is recorded."""
        return self._keeps if self.header is None else self.header.keeps

    @property
    def private_evidence(self) -> bool:
        """Whether it proves what protected real people: evidence that must not be lost."""
        return self.header is not None and any(
            entry.entropy == "system" and entry.event.private for entry in self.entries
        )

    @property
    def history(self) -> History:
        """History of its one owner; at example level of the client that has spent most."""
        return self._costliest(self.delta or 1e-5)

    def _costliest(self, delta: float) -> History:
        if len(self.histories) > 1:
            return costliest(list(self.histories.values()), delta)
        return next(iter(self.histories.values()), History())

    def progress(
        self, run: str | None, kind: Kind = "release", client: int | None = None
    ) -> RunProgress:
        """How far a run has come."""
        return self._progress.get((run, kind, client), RunProgress())

    @property
    def last_round(self) -> int:
        """Number of the last round in this ledger; 0 if there is none."""
        return max((entry.round or 0 for entry in self.entries), default=0)

    def cost(self, delta: float | None = None) -> Cost:
        """Epsilon charged so far, with its accounting method and the figures to compare it with."""
        delta = self._delta(delta)
        return self._costliest(delta).accountant.cost(delta)

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon charged so far; takes milliseconds for any number of rounds."""
        delta = self._delta(delta)
        return self._costliest(delta).accountant.epsilon(delta)

    def statement(self, delta: float | None = None) -> Statement:
        """The privacy statement in words and numbers."""
        return statement_of([self], self._delta(delta))

    def would_exceed(
        self,
        event: Entry | Event | GaussianPrivacyEvent,
        max_epsilon: float | None = None,
        count: int = 1,
        *,
        budget: Budget | None = None,
    ) -> bool:
        """Whether a release would exceed a budget; nothing is recorded.

        Parameters
        ----------
        event : Entry, Event or GaussianPrivacyEvent
        max_epsilon : float, optional
            Budget at the ledger's delta, instead of the ledger's own.
        count : int
            How often it is released.
        budget : Budget, optional
            Budget at a delta of its own; not together with ``max_epsilon``.
        """
        if budget is not None and max_epsilon is not None:
            raise FedsimError(f"max_epsilon is {max_epsilon} beside a budget; give one of the two.")
        budget = budget or self._budget(max_epsilon)
        self.refresh()
        if not isinstance(event, Entry):
            event = Entry(event=event_of(event, self.declared_event), level=self.level)
        planned = replace(event, event=event.event.times(count))
        return bool(self.owners_over_budget(budget, [planned]))

    def _budget(self, max_epsilon: float | None = None) -> Budget:
        limit = self.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise FedsimError("max_epsilon was given neither to the ledger nor to would_exceed.")
        return Budget(limit, self._delta(None))

    def _delta(self, delta: float | None) -> float:
        value = self.delta if delta is None else delta
        if value is None:
            raise FedsimError("delta was given neither to the ledger nor to this question.")
        return value

    # -- recording ----------------------------------------------------------------------

    def record(self, *entries: Entry, budget: Budget | None = None) -> None:
        """Record a release. When this returns, the line is on disk and the release may be made.

        Parameters
        ----------
        entries : Entry
            One or more of one run, written as one line.
        budget : Budget, optional
            Budget, instead of the ledger's own. Checking it and writing the line are one act, under
            one lock.

        Raises
        ------
        OverBudgetError
            If the budget does not allow it.
        FedsimError
            If the kind, split, level or adjacency is not that of the ledger, or if the file was
            changed by something other than a ledger.
        """
        for entry in entries:
            require("entry", entry, expected(Entry))
        require("budget", budget, expected(Budget | None))
        self.record_due(lambda: entries, budget)

    def record_due(
        self, entries: Callable[[], Sequence[Entry]], budget: Budget | None = None
    ) -> None:
        """Record what is due by the lines that are there: `record`, for costs that depend on them.

        Whether a round was drawn or paid before is thus seen in the file that the line enters, and
        not in an earlier state of it.

        Parameters
        ----------
        entries : callable
            Called under the lock, when all lines of others have been read; perhaps more than once.
            If it returns none, nothing is written.

        Raises
        ------
        OverBudgetError, FedsimError
            As `record` does.
        """
        budget = self._budget_or_default(budget)
        self._write(lambda: self._within_budget(entries(), budget))

    def affordable_entries(
        self,
        entries_for: Callable[[int], Sequence[Entry]],
        rounds: int,
        budget: Budget | None = None,
    ) -> Sequence[Entry]:
        """Entries that charge as many rounds of a plan as the budget affords, and at least one.

        Parameters
        ----------
        entries_for : callable
            Entries that charge so many rounds.
        rounds : int
            Number of rounds of the plan.
        """
        budget = self._budget_or_default(budget)
        if budget is None or not self.owners_over_budget(budget, entries_for(rounds)):
            return entries_for(rounds)
        affordable = bisect(
            [*range(1, rounds)],
            False,
            key=lambda n: bool(self.owners_over_budget(budget, entries_for(n))),
        )
        return entries_for(max(affordable, 1))

    def _budget_or_default(self, budget: Budget | None) -> Budget | None:
        if budget is None and self.max_epsilon not in (None, math.inf):
            return self._budget()
        return budget

    def _within_budget(self, entries: Sequence[Entry], budget: Budget | None) -> Sequence[Entry]:
        """The entries, unless the budget does not allow them."""
        if budget is not None and (over := self.owners_over_budget(budget, entries)):
            error = OverBudgetError(f"{budget.message(entries[0], over[0], self.path)}.")
            error.owners = over
            raise error
        return entries

    def owners_over_budget(
        self, budget: Budget, entries: Sequence[Entry]
    ) -> tuple[int | None, ...]:
        """Owners whose budget these entries would exceed, by the lines that were read."""
        charged: dict[int | None, list[Entry]] = defaultdict(list)
        for entry in entries:
            for owner in entry.owners:
                charged[owner].append(entry)
        empty, costs, over = History(), {}, []
        for owner, of_owner in charged.items():
            history = self.histories.get(owner, empty)
            # Of owners that have spent the same, the cost is computed once.
            key = (frozenset(history.counts.items()), tuple(entry.event for entry in of_owner))
            if key not in costs:
                costs[key] = history.accountant_with(*of_owner).epsilon(budget.delta)
            if costs[key] > budget.epsilon:
                over.append(owner)
        return tuple(over)

    def _write(self, entries: Callable[[], Sequence[Entry]]) -> None:
        """Add a line of what ``entries`` returns, which is called under the lock, if of any."""
        if self.read_only:
            raise FedsimError(f"ledger {self.path} was opened for reading only.")
        if self.path is None:
            self._append(*self._new_lines(entries()))
            return
        # Another process may create the file at any time: whatever happens between a look at it and
        # the lock, the attempt starts again from the file's new state.
        while True:
            if not self.path.exists():
                if self.header is not None:
                    raise FedsimError(f"ledger {self.path} was removed while it was in use.")
                lines = self._new_lines(entries())
                if not lines:
                    return
                if durable.create(self.path, b"".join(lines)):
                    self._append(*lines)
                    return
            else:
                with self._locked() as file:
                    if lines := self._new_lines(entries()):
                        durable.append(file, b"".join(lines))
                        self._append(*lines)
                    return

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file, locked and read to its end; a last line that is cut short is dropped."""
        assert self.path is not None
        with durable.locked(self.path) as file:
            self._catch_up(file)
            if os.fstat(file.fileno()).st_size > self._size:
                file.truncate(self._size)
            yield file

    def _new_lines(self, entries: Sequence[Entry]) -> list[bytes]:
        """The line of these entries, behind a header if there is none yet; none without any."""
        if not entries:
            return []
        first = entries[0]
        keeps: LedgerKind = self._keeps or ("log" if first.entropy == "config" else "evidence")
        self._check_header(keeps)
        for entry in entries:
            check_level(entry.level, entry.event.adjacency)
            if self.header is not None and entry.level != self.level:
                raise FedsimError(
                    f"level is {entry.level!r}; ledger {self.path or 'in memory'} is about "
                    f"{self.level} level, and guarantees of different levels do not add up."
                )
        for owner in {owner for entry in entries for owner in entry.owners}:
            of_owner = [entry for entry in entries if owner in entry.owners]
            self.histories.get(owner, History()).accountant_with(*of_owner)
        lines, head = [], self.head
        if self.header is None:
            header, head = Header(
                keeps=keeps, level=first.level, client=self._client, split=self._split or {}
            ).line_and_hash()
            lines.append(header)
        noted = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "host": socket.gethostname(),
            "run": first.run,
        }
        releases = {"releases": [self._entry_json(entry) for entry in entries]}
        return [*lines, chained_line(releases, head, noted)[0]]

    def _check_header(self, keeps: LedgerKind) -> None:
        """Refuse a ledger of another kind, split or client than this writer's.

        Raises
        ------
        FedsimError
        """
        header = self.header
        if header is None:
            return
        if header.keeps != keeps:
            kinds = {
                "log": "a log of simulated releases (noise.entropy = 'config')",
                "evidence": "evidence of releases with noise from the operating system",
            }
            raise FedsimError(
                f"{self._name} is {kinds[header.keeps]}, and this one would be {kinds[keeps]}; "
                "they are never mixed: name another ledger (privacy.ledger, --out)."
            )
        if self._client is not None and header.client != self._client:
            raise FedsimError(
                f"{self._name} is that of client {header.client}, and not of client {self._client}."
            )
        if self._split is not None and dict(header.split) != self._split:
            keys = dict.fromkeys([*header.split, *self._split])
            key = next(k for k in keys if header.split.get(k) != self._split.get(k))
            before, now = (
                as_text(split[key]) if key in split else "unset"
                for split in (header.split, self._split)
            )
            raise FedsimError(
                f"{key} = {now}; it must be {before}, as in {self._name}: with another value "
                "other people are its clients, and the costs of the runs to a client cannot be "
                "added up; name another ledger (privacy.ledger)."
            )

    @contextmanager
    def release(self, plan: ReleasePlan[MechanismLike], round: int) -> Iterator[Entry]:
        """Record a round of a training loop that is not fedsim's, before its release.

        Sampling and noise are declared by the user. A round that is repeated after an
        interruption is charged again::

            with ledger.release(plan, round):
                model += noisy_mean(updates)

        Parameters
        ----------
        plan : ReleasePlan
        round : int
            From 1 on.

        Yields
        ------
        Entry
            The entry, whose line is on disk.

        Raises
        ------
        BudgetSpentError
            If the budget does not allow it.
        FedsimError
            As `record` does.
        """
        plan.check_entropy("system")
        made = replace(plan.entry(plan.event(), round=round), declared_by_user=True)

        def due() -> Sequence[Entry]:
            nonlocal made
            event = plan.charge(round, redrawn=self.progress(None).was_drawn(round))
            made = replace(made, event=event)
            return [made]

        self.record_due(due)
        yield made

    # -- the file -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the lines that other processes have added since."""
        if self.path is None or not self.path.exists():
            return
        if self.path.stat().st_size != self._size:
            with durable.locked(self.path, write=False) as file:
                self._catch_up(file)

    def _catch_up(self, file: BinaryIO) -> None:
        """Read the lines that were added since; of a log, what another run has cut off too."""
        size = os.fstat(file.fileno()).st_size
        is_log = self.header is not None and self.header.keeps == "log"
        if size < self._size and not is_log:
            raise FedsimError(f"ledger {self.path} was cut off while it was in use.")
        file.seek(max(self._size - len(self.lines[-1]) - 1, 0) if self.lines else 0)
        data = file.read()
        if self.lines and data.startswith(self.lines[-1] + b"\n"):
            self._load(data[len(self.lines[-1]) + 1 :])
        elif is_log or not self.lines:
            file.seek(0)
            self._clear()
            self._load(file.read())
        else:
            raise self._changed("its last line was replaced.")

    def _load(self, data: bytes) -> None:
        """Take further bytes of the file; a last line that is cut short is ignored."""
        *lines, tail = data.split(b"\n")
        if self.header is None and not lines:
            raise FedsimError(
                f"{self._name} is {'cut off' if tail else 'empty'}, or is not a ledger; fedsim "
                "never writes one so: restore it."
            )
        self._append(*(line + b"\n" for line in lines))

    def _append(self, *lines: bytes) -> None:
        """Take complete lines, each with its newline."""
        for line in lines:
            if self.header is None:
                try:
                    self.header, head = Header.parse(line[:-1])
                except FedsimError as error:
                    raise FedsimError(f"{self._name}: {error}") from None
                run = None
            else:
                run, head = self._append_releases(line[:-1])
            self.lines.append(line[:-1])
            self.heads.append(head)
            self._runs.append(run)
            self._size += len(line)

    def _append_releases(self, line: bytes) -> tuple[str | None, str]:
        """Take the entries of a line; its run and its hash."""
        try:
            data, noted, head = parse_line(line, self.head)
            run = noted.get("run")
            if set(data) != {"releases"} or not isinstance(data["releases"], list):
                raise FedsimError("it has no releases.")
            entries = [
                Entry.from_dict(self._with_law(entry), run if isinstance(run, str) else None)
                for entry in data["releases"]
            ]
            if wrong := [entry for entry in entries if entry.level != self.level]:
                raise FedsimError(
                    f"level is {wrong[0].level!r}, in a ledger of {self.level} level."
                )
        except FedsimError as error:
            raise self._changed(f"line {len(self.lines) + 1}: {error}") from None
        for entry in entries:
            self._add_entry(entry)
        return run, head

    def _add_entry(self, entry: Entry) -> None:
        law = entry.event.law
        if isinstance(law, DeclaredLaw):
            self._laws[law.digest] = law.to_dict()
        self.entries.append(entry)
        for owner in entry.owners:
            if owner not in self.histories:
                self.histories[owner] = History()
            self.histories[owner].add(entry)
            key = (entry.run, entry.kind, owner)
            before = self._progress.get(key, RunProgress())
            self._progress[key] = RunProgress(
                max(before.last_round, entry.round or 0),
                max(before.paid_through, entry.through or 0),
            )

    def _entry_json(self, entry: Entry) -> dict[str, Any]:
        """The entry's JSON; a user's law that an earlier line has in full is given by digest."""
        data, law = entry.to_dict(), entry.event.law
        if isinstance(law, DeclaredLaw) and law.digest in self._laws:
            data["event"]["law"] = {"name": NAME, "as": law.digest}
        return data

    def _with_law(self, data: object) -> dict[str, Any]:
        """Inverse of `_entry_json`."""
        if not isinstance(data, dict):
            raise FedsimError("an entry is no table.")
        event = data.get("event")
        law = event.get("law") if isinstance(event, dict) else None
        if not isinstance(law, dict) or "as" not in law:
            return data
        if law["as"] not in self._laws:
            raise FedsimError("its law is in no earlier line.")
        return {**data, "event": {**data["event"], "law": self._laws[law["as"]]}}

    @property
    def _name(self) -> str:
        return f"ledger {self.path}" if self.path is not None else "the ledger's state"

    def _changed(self, reason: str) -> FedsimError:
        return FedsimError(
            f"{self._name}, {reason} A ledger that was changed after it was written proves nothing."
        )

    # -- checkpoints --------------------------------------------------------------------

    def extends(self, position: LedgerPosition) -> bool:
        """Whether its first lines are those of a ledger that was at this position."""
        return not position.lines or self.heads[position.lines - 1 : position.lines] == [
            position.head
        ]

    def check_extends(self, position: LedgerPosition) -> None:
        """Refuse a ledger that does not extend that of a checkpoint, which was at this position.

        Raises
        ------
        FedsimError
            If lines of the checkpoint are missing, or changed.
        """
        self.refresh()
        if not self.extends(position):
            raise self._not_extended(position)

    def _not_extended(self, position: LedgerPosition) -> FedsimError:
        return FedsimError(
            f"ledger {self.path or 'in memory'} does not continue the checkpoint's, which had "
            f"{position.lines} lines up to {position.head}; restore the one that the run wrote."
        )

    def resume(self, position: LedgerPosition, run: str) -> None:
        """Prepare for a run that is resumed from a checkpoint, made at this position of the ledger.

        A log loses the run's own lines after it, as far back as they are its last lines. Nothing is
        cut from evidence.

        Raises
        ------
        FedsimError
            If lines of the checkpoint are missing, or changed.
        """
        self.check_extends(position)
        if self.header is None or self.header.keeps == "evidence":
            return
        if self.path is None:
            self._truncate(self._own_suffix(position, run))
            return
        with self._locked() as file:
            if not self.extends(position):  # another process has cut it since
                raise self._not_extended(position)
            count = self._own_suffix(position, run)
            if count < len(self.lines):
                file.truncate(sum(len(line) + 1 for line in self.lines[:count]))
                os.fsync(file.fileno())
                self._truncate(count)

    def read_up_to(self, position: LedgerPosition) -> None:
        """Read it only up to a position that it had; the file is unchanged."""
        if position.lines and self.extends(position):
            self._truncate(position.lines)

    def _own_suffix(self, position: LedgerPosition, run: str) -> int:
        """Number of lines that remain without the run's own last ones after a checkpoint."""
        count = len(self.lines)
        while count > max(position.lines, 1) and self._runs[count - 1] == run:
            count -= 1
        return count

    def _truncate(self, count: int) -> None:
        """Forget the lines after the first ``count`` ones."""
        kept = self.lines[:count]
        self._clear()
        self._append(*(line + b"\n" for line in kept))

    def state_dict(self) -> dict[str, object]:
        """The ledger's lines, for a checkpoint."""
        return {"lines": [line.decode() for line in self.lines]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load a checkpointed ledger.

        A ledger on disk is never replaced: it must extend the checkpointed one, and its later
        lines stay charged.

        Raises
        ------
        FedsimError
            If the lines are not a ledger's, or are not the beginning of the one on disk.
        """
        lines = state.get("lines")
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise FedsimError("a ledger's state must hold its lines.")
        data = [line.encode() for line in lines]
        if self.path is None:
            self._clear()
            self._append(*(line + b"\n" for line in data))
        elif self.lines[: len(data)] != data:
            raise FedsimError(f"ledger {self.path} does not continue the checkpointed one.")

    # -- Flower's PrivacyAccountant protocol --------------------------------------------

    @property
    def config(self) -> PrivacyConfig:
        """The ledger's settings as Flower's record.

        Raises
        ------
        FedsimError
            If there is no delta, or no declared event with a population.
        """
        return privacy_config(self.declared_event, self.delta, self.max_epsilon)

    @property
    def num_releases(self) -> int:
        """Mechanism invocations charged."""
        return self.history.accountant.releases

    def compose(self, event: Event | GaussianPrivacyEvent, count: int = 1) -> None:
        """Record an event for Flower: without round or run, and without a budget.

        Independent sampling is then declared by the user, since Flower's own strategies draw a
        fixed number of clients.
        """
        own_event = event_of(event, self.declared_event).times(count)
        is_declared = not isinstance(event, Event) and own_event.law.rate < 1
        is_declared = is_declared and not isinstance(own_event.law, FixedSizeLaw)
        entry = Entry(event=own_event, declared_by_user=is_declared)
        self._write(lambda: [entry])

    def get_epsilon(self, delta: float) -> float:
        """`epsilon`."""
        return self.epsilon(delta)

    def get_delta(self, epsilon: float) -> float:
        """Smallest delta known at this epsilon."""
        return self.history.accountant.delta(epsilon)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """`cost` as Flower's record."""
        return privacy_spent(self.cost(delta))


def statement_of(ledgers: Sequence[Ledger], delta: float, place: str | None = None) -> Statement:
    """The statement over one or more ledgers, all of whose owners have disjoint data.

    Parameters
    ----------
    ledgers : sequence of Ledger
        One, or the ledgers of several nodes.
    delta : float
    place : str, optional
        Description of where several ledgers are.
    """
    histories = {
        id(history): (ledger, owner)
        for ledger in ledgers
        for owner, history in ledger.histories.items()
    }
    every = [history for ledger in ledgers for history in ledger.histories.values()]
    worst, entries = History(), []
    if every:
        worst = costliest(every, delta)
        of_worst, owner = histories[id(worst)]
        entries = [entry for entry in of_worst.entries if owner in entry.owners]
    single = ledgers[0] if len(ledgers) == 1 and place is None else None
    if single is not None and single.path is not None:
        place = str(single.path)
    return Statement.from_history(
        worst,
        entries,
        delta,
        level=ledgers[0].level,
        owners=len(every),
        rows=min(filter(None, (history.rows for history in every)), default=None),
        ledger=place,
        head="" if single is None or not single.heads else single.head,
        lines=0 if single is None else len(single.heads),
    )
