"""client-metrics.csv: what each client's evaluations measured, in a run without privacy."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedsim import regular_files
from fedsim.federation.client_metrics import ClientEvaluation
from fedsim.partitions import ByOwner
from fedsim.privacy.durable import named_errors, replace
from fedsim.runs.data_split import partition_of
from fedsim.runs.resolve import Resolved


class ClientRows:
    """The rows of one run: one for each evaluation (`evaluate.clients_every`) and client.

    Columns are ``round``, ``client`` (its number), ``owner`` (where clients are the owners of a
    column, and the examples are on this machine), ``num-examples``, ``loss`` and the metrics.
    A round's rows are in the order of the clients, so that they have the same bytes on any engine.

    Parameters
    ----------
    resolved : Resolved
    path : Path
        The file, which exists only in a run without privacy whose clients evaluate.
    """

    def __init__(self, resolved: Resolved, path: Path) -> None:
        config = resolved.config
        self.path = path
        self._owners = _owners(resolved)
        self._columns: tuple[str, ...] = ()
        if config.evaluate.clients_every and not config.protects:
            owner = ("owner",) if self._owners else ()
            measured = ("num-examples", "loss", *sorted(resolved.trainer.metrics))
            self._columns = ("round", "client", *owner, *measured)

    def start(self, done: int) -> None:
        """Begin the file, or cut that of a resumed run back to its first ``done`` rounds."""
        kept = [row for row in self._read() if row.get("round", "").isdigit()]
        kept = [row for row in kept if int(row["round"]) <= done]
        columns = tuple(dict.fromkeys([*self._columns, *(kept[0] if kept else ())]))
        if columns:
            replace(self.path, _lines([columns, *(_values(row, columns) for row in kept)]))
        else:  # all rows, if any, are of rounds that are made again without evaluations
            self.path.unlink(missing_ok=True)
        if self._columns:
            self._columns = columns

    def append(self, evaluation: ClientEvaluation, server_round: int) -> None:
        """Append the rows of a round, if its clients have evaluated."""
        if not self._columns or evaluation.last_round != server_round:
            return
        lines = []
        for client, metrics in sorted(evaluation.by_client.items()):
            known = {"round": server_round, "client": client, **self._owners.get(client, {})}
            count = {"num-examples": int(metrics.get("num-examples", 0))}
            lines.append(_values({**metrics, **count, **known}, self._columns))
        # Appended only: a file that was removed must not return without its header.
        with named_errors(self.path), open(self.path, "r+b", opener=regular_files.opener) as file:
            file.seek(0, os.SEEK_END)
            file.write(_lines(lines))

    def sync(self) -> None:
        """Sync the rows to disk, before a checkpoint from which the run may be resumed."""
        if self._columns:
            with named_errors(self.path), open(self.path, "rb", opener=regular_files.opener) as f:
                os.fsync(f.fileno())

    def _read(self) -> list[dict[str, str]]:
        """The complete rows as texts; empty if there is no file."""
        try:
            text = regular_files.read_bytes(self.path).decode()
        except FileNotFoundError:
            return []
        # The last line may be half-written.
        complete = io.StringIO(text[: text.rfind("\n") + 1], newline="")
        return list(csv.DictReader(complete))


def _owners(resolved: Resolved) -> dict[int, dict[str, str]]:
    """The owner of each client's examples, as the column of its name; empty without owners."""
    data, partition = resolved.data, partition_of(resolved.config, resolved.overrides)
    if not isinstance(partition, ByOwner) or not len(data.dataset.train):
        return {}
    column = data.dataset.train.columns[partition.column]
    return {
        client: {"owner": str(column[indices[0]])}
        for client, indices in enumerate(data.client_indices)
        if len(indices)
    }


def _values(row: Mapping[str, object], columns: Sequence[str]) -> list[object]:
    return [row.get(column, "") for column in columns]


def _lines(rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
