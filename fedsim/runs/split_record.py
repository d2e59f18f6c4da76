"""Records which client has which examples, next to the ledgers, and compares it between runs.

The costs of two private runs to a client add up only if it has the same examples in both. Settings
are compared by value; Python objects by an HMAC of the examples and their assignment, under the
directory's key, since no unkeyed digest of protected data may be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from fedsim import regular_files
from fedsim.arguments import shown
from fedsim.config import RunConfig, Scalar
from fedsim.config.release_keys import split_settings
from fedsim.errors import FedsimError
from fedsim.privacy import durable
from fedsim.privacy.digest import KEY, Fingerprints
from fedsim.runs.directory import DATA_SPLIT
from fedsim.runs.resolve import Resolved


@dataclass(frozen=True)
class SplitRecord:
    """How examples were assigned to clients.

    Attributes
    ----------
    settings : mapping
        The config's values of `split_settings`, by dotted key.
    objects : str
        HMAC of the examples and of each client's, if ``data=`` or ``partition=`` was a Python
        object; empty otherwise.
    """

    settings: Mapping[str, Scalar] = field(default_factory=dict)
    objects: str = ""

    @classmethod
    def of(cls, resolved: Resolved, directory: Path) -> SplitRecord:
        """Make a run's record; the HMAC of Python objects uses the directory's key."""
        settings = dict(split_settings(resolved.config))
        contents = _contents(resolved) if _has_objects(resolved) else None
        return cls(settings, "" if contents is None else Fingerprints(directory).of(contents))

    @classmethod
    def read(cls, directory: Path) -> SplitRecord | None:
        """Read the record in a directory; None if there is none.

        Raises
        ------
        FedsimError
            If it is damaged.
        """
        try:
            return cls(**json.loads(regular_files.read_text(directory / DATA_SPLIT)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise FedsimError(
                f"{directory / DATA_SPLIT} is damaged ({error}); restore what the run wrote."
            ) from None

    def to_json(self) -> bytes:
        """Content of the record's file."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def write_record(resolved: Resolved, directory: Path) -> None:
    """Write the record of a private run with Python objects to the run's directory.

    Without such objects config.toml determines the split.
    """
    if resolved.config.protects and _has_objects(resolved):
        durable.replace(directory / DATA_SPLIT, SplitRecord.of(resolved, directory).to_json())


def holds_other_examples(resolved: Resolved, directory: Path) -> bool:
    """Whether the run recorded there had other objects; False if record or key are missing."""
    before = SplitRecord.read(directory)
    if before is None or not before.objects or not (directory / KEY).exists():
        return False
    return SplitRecord.of(resolved, directory).objects != before.objects


def refuse_other_split(resolved: Resolved, directory: Path, earlier_config: RunConfig) -> None:
    """Refuse to add a private run to one in which clients had other examples.

    Parameters
    ----------
    resolved : Resolved
    directory : path
        Directory of the earlier run's ledger.
    earlier_config : RunConfig
        The earlier run's config.

    Raises
    ------
    FedsimError
        If a setting of the split differs (the message names its key), if the earlier run had
        other Python objects, or if they cannot be compared.
    """
    if not (resolved.config.protects and earlier_config.protects):
        return
    earlier = SplitRecord.read(directory) or SplitRecord(dict(split_settings(earlier_config)))
    difference = _difference(resolved, earlier, directory)
    if difference is not None:
        name, value, old = difference
        raise FedsimError(
            f"{name} {value}; it must be {old}, as in the private run in {directory}: with another "
            "value examples are assigned to other clients, and the costs of the two runs to a "
            "client cannot be added up; choose another --out."
        )


def check_state_dir(resolved: Resolved, *, record: bool = False) -> None:
    """Refuse a ``client.state-dir`` whose ledgers belong to clients with other examples.

    Parameters
    ----------
    resolved : Resolved
    record : bool
        Whether to record this run's split there, if none is recorded yet.

    Raises
    ------
    FedsimError
        If the split differs; the message names ``client.state-dir`` and the key that differs.
    """
    config = resolved.config
    # In a deployment no examples are assigned: each node has its own.
    if not (config.client.private and config.client.state_dir) or not split_settings(config):
        return
    directory = Path(config.client.state_dir)
    # Created only if it is not there, and compared afterwards: of two runs that start at once, the
    # second is compared with the first one's record.
    if record and not (directory / DATA_SPLIT).exists():
        durable.create(directory / DATA_SPLIT, SplitRecord.of(resolved, directory).to_json())
    earlier = SplitRecord.read(directory)
    difference = None if earlier is None else _difference(resolved, earlier, directory)
    if difference is not None:
        name, value, old = difference
        raise FedsimError(
            f"client.state-dir = '{directory}' holds ledgers of clients whose {name} was {old}; "
            f"here {name} {value}, so that clients have other examples, and the runs' costs to a "
            "client cannot be added up; make them equal, or choose another client.state-dir."
        )


def _has_objects(resolved: Resolved) -> bool:
    return resolved.overrides.data is not None or resolved.overrides.partition is not None


def _difference(
    resolved: Resolved, earlier: SplitRecord, place: Path
) -> tuple[str, str, str] | None:
    """The first difference from an earlier split: its name, the new value, and the old one."""
    settings = dict(split_settings(resolved.config))
    for key in {**earlier.settings, **settings}:
        value, old = settings.get(key, "unset"), earlier.settings.get(key, "unset")
        if value != old:
            return key, f"= {shown(value)}", shown(old)
    if not earlier.objects and not _has_objects(resolved):
        return None
    # The HMACs are compared under the earlier run's key; without it they cannot be, and the run is
    # refused.
    comparable = earlier.objects and _has_objects(resolved) and (place / KEY).exists()
    if comparable and SplitRecord.of(resolved, place).objects == earlier.objects:
        return None
    value = "is another object from Python" if _has_objects(resolved) else "is left out"
    old = "the same object from Python" if earlier.objects else "left out"
    return "data= or partition=", value, old


def _contents(resolved: Resolved) -> Iterator[bytes]:
    """Bytes of the training examples and of each client's indices, for an HMAC."""
    train = resolved.data.dataset.train
    columns = [train.columns[name] for name in sorted(train.columns)]
    for values in (train.x, train.y, train.mask, *columns, *resolved.data.parts):
        if values is not None:
            array = values.cpu().numpy() if isinstance(values, Tensor) else values
            yield f"{array.dtype} {array.shape}".encode()
            yield repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
