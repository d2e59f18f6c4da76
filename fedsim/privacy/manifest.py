"""The manifest of a run: what its files were when it ended, so that others are recognised.

``manifest.json`` names the ledger's head and number of lines, SHA-256 digests of what may be shown
to anybody (model, configs), HMACs of the other files under the run's own key (``fingerprint.key``:
no digest without a key is written of what may follow from protected data), and the heads of the
archived ledgers and of the clients' ledgers. It says nothing that is not in those files; a
signature of it (``ledger.sig``) covers them all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from fedsim import regular_files
from fedsim.errors import FedsimError
from fedsim.privacy.archive import ARCHIVE
from fedsim.privacy.chain import GENESIS
from fedsim.privacy.fingerprint import Fingerprints

__all__ = ["KEYED", "MANIFEST", "End", "Manifest", "end_of", "file_digest"]

MANIFEST = "manifest.json"
FORMAT = 1
KEYED = ("metrics.csv", "summary.json", "done")
"""Files whose HMAC is in the manifest."""

_PLAIN = ("model.safetensors", "config.toml")
_HASH = re.compile(rb'"hash":"([0-9a-f]{64})"')


@dataclass(frozen=True)
class End:
    """Where a ledger ended: the hash of its last line, and how many there were."""

    head: str
    lines: int


@dataclass(frozen=True)
class Manifest:
    """What a run's files were.

    Attributes
    ----------
    ledger : End
    sha256 : mapping of path to digest
        Of model and config, and of the configs of overwritten runs.
    hmac : mapping of path to HMAC
        Of the files of `KEYED` that there were.
    archive : mapping of path to End
        Of the ledgers of overwritten runs.
    clients : mapping of client id to End
        Of the ledgers of clients that protect their examples, where they are on this machine.
    """

    ledger: End
    sha256: Mapping[str, str]
    hmac: Mapping[str, str]
    archive: Mapping[str, End] = field(default_factory=dict)
    clients: Mapping[str, End] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Path, clients: Path | None, fingerprints: Fingerprints) -> Self:
        """The manifest of a run's directory as it is now.

        Parameters
        ----------
        run : path
        clients : path or None
            Where its clients' ledgers are.
        fingerprints : Fingerprints
            Under the run's key.

        Raises
        ------
        OSError
            If a file cannot be read.
        """
        ledgers = {} if clients is None else {_client(p): p for p in clients.glob("client-*.jsonl")}
        archived = sorted((run / ARCHIVE).rglob("*.jsonl"))
        return cls(
            ledger=end_of(run / "ledger.jsonl"),
            sha256={_inside(run, path): file_digest(path) for path in _plain_files(run)},
            hmac={
                name: fingerprints.of([name.encode(), regular_files.read_bytes(run / name)])
                for name in KEYED
                if (run / name).is_file()
            },
            archive={_inside(run, path): end_of(path) for path in archived},
            clients={client: end_of(path) for client, path in sorted(ledgers.items())},
        )

    def to_json(self) -> str:
        """What stands in the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """A manifest from its file.

        Raises
        ------
        FedsimError
            If there is none, or it is damaged or of another format.
        """
        try:
            data = json.loads(regular_files.read_text(path))
            if (written := data.pop("format")) != FORMAT:
                raise FedsimError(
                    f"its format is {written!r}; this fedsim reads {FORMAT}: verify the run with "
                    "the fedsim that made it."
                )
            return cls(
                ledger=_end(data.pop("ledger")),
                archive={name: _end(end) for name, end in data.pop("archive").items()},
                clients={name: _end(end) for name, end in data.pop("clients").items()},
                **{name: _texts(values) for name, values in data.items()},
            )
        except FileNotFoundError:
            raise FedsimError(
                "there is none: it was deleted, or the run was killed or made by an older fedsim; "
                "`fedsim run ... --resume` writes one."
            ) from None
        except FedsimError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise FedsimError("it is not one that fedsim wrote.") from None


def end_of(path: Path) -> End:
    """Where a ledger of any format ends, by its last whole line; nothing else of it is checked."""
    if not path.is_file():
        return End(GENESIS, 0)
    lines = regular_files.read_bytes(path).split(b"\n")[:-1]
    hashes = _HASH.findall(lines[-1]) if lines else []
    return End(hashes[-1].decode() if hashes else GENESIS, len(lines))


def _plain_files(run: Path) -> Iterator[Path]:
    yield from (run / name for name in _PLAIN if (run / name).is_file())
    yield from sorted((run / ARCHIVE).glob(f"*/{_PLAIN[1]}"))


def _inside(run: Path, path: Path) -> str:
    return path.relative_to(run).as_posix()


def _client(path: Path) -> str:
    return path.stem.removeprefix("client-")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb", opener=regular_files.opener) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _end(data: Any) -> End:
    end = End(**data)
    if not isinstance(end.head, str) or type(end.lines) is not int:
        raise TypeError(data)
    return end


def _texts(data: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for text in data.values()):
        raise TypeError(data)
    return dict(data)
