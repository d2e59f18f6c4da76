"""Files of benchmarks as their publishers write them: LEAF's JSON and TensorFlow Federated's HDF5.

LEAF's ``preprocess.sh`` writes ``train/*.json`` and ``test/*.json``, each ``{"users": [...],
"user_data": {user: {"x": [...], "y": [...]}}}``. TFF's archives have ``<name>_train.h5`` and
``<name>_test.h5`` with ``examples/<client>/<field>``. Either way an example's owner is the user or
client that it stands under.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import optional_packages, regular_files
from fedsim.array_types import Array, Ints
from fedsim.datasets.arrays import cause
from fedsim.errors import FedsimError
from fedsim.process import refuse_larger_than_memory

SplitArrays = dict[str, Array]
SPLITS = ("train", "test")


def missing(name: str, folder: Path, files: str, command: str) -> FedsimError:
    """The error for a data set whose files are not in its folder, with what fetches them there."""
    return FedsimError(
        f"data.name is '{name}', but '{folder}' does not have {files}; set data.dir to the folder "
        f"that has '{folder.name}', or fetch them: {in_folder(command, folder)}"
    )


def in_folder(command: str, folder: Path) -> str:
    """A shell command with its ``{folder}``."""
    return command.format(folder=shlex.quote(str(folder)))


def tff_command(*archives: str) -> str:
    """The shell command that fetches archives of TensorFlow Federated into ``{folder}``."""
    address = "https://storage.googleapis.com/tff-datasets-public"
    fetches = (f"curl -fL {address}/{a}.tar.bz2 | tar -xj -C {{folder}}" for a in archives)
    return " && ".join(("mkdir -p {folder}", *fetches))


@contextmanager
def reading(path: Path, wanted: str, protected: bool) -> Iterator[None]:
    """Turn whatever a parser raises about a file into one sentence, without values if private.

    Raises
    ------
    FedsimError
    """
    try:
        yield
    except (FedsimError, MemoryError):
        raise
    except Exception as error:
        # The file is untrusted: JSON, HDF5 and NumPy may raise any type of exception.
        why = "" if protected else f" ({cause(error)})"
        raise FedsimError(f"{path} could not be read{why}; it must be {wanted}.") from None


def labels(values: Any) -> Ints:
    """Classes ``[N]`` as integers; what is no whole number is -1, which is no class."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    whole = np.isfinite(numbers) & (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**31)
    return np.where(whole, numbers, -1).astype(np.int64)


def joined(owners: Iterable[tuple[str, SplitArrays]]) -> SplitArrays:
    """One array a field, of all owners in their order, and the column ``owner``.

    Raises
    ------
    ValueError
        If there are no examples, or an owner's arrays differ in length.
    """
    names: list[str] = []
    parts: list[SplitArrays] = []
    counts: list[int] = []
    for owner, arrays in owners:
        lengths = {len(array) for array in arrays.values()}
        if len(lengths) > 1:
            raise ValueError("an owner's fields differ in length")
        if lengths != {0}:
            names.append(owner)
            parts.append(arrays)
            counts.append(*lengths)
    if not parts:
        raise ValueError("it has no examples")
    owner_column = {"owner": np.repeat(np.array(names), counts)}
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} | owner_column


@dataclass(frozen=True)
class Leaf:
    """LEAF's JSON.

    Attributes
    ----------
    convert : callable
        Arrays of a user's ``x`` and ``y``, which have one entry an example.
    classes, vocabulary : int
        Numbers of classes and tokens; 0 if it has none.
    """

    convert: Callable[[Any, Any], SplitArrays]
    classes: int
    vocabulary: int = 0

    @property
    def files(self) -> str:
        """What its files are called."""
        return "LEAF's train/*.json and test/*.json"

    def place(self, folder: Path) -> Path | None:
        """The folder with its files: this one, or ``data`` in it, where LEAF writes them."""
        for place in (folder, folder / "data"):
            if all(any((place / split).glob("*.json")) for split in SPLITS):
                return place
        return None

    def read(self, place: Path, split: str, protected: bool) -> SplitArrays:
        """Arrays of a split.

        Raises
        ------
        FedsimError
            If a file is none of LEAF's.
        """
        owners = []
        for path in sorted((place / split).glob("*.json")):
            wanted = (
                "LEAF's JSON, {'users': [...], 'user_data': {user: {'x': [...], 'y': [...]}}}, "
                "for this data set"
            )
            with reading(path, wanted, protected):
                content = json.loads(regular_files.read_bytes(path))
                if len({*content["users"]}) < len(content["users"]):
                    raise ValueError("it lists a user twice")
                for user in content["users"]:
                    data = content["user_data"][user]
                    owners.append((str(user), self.convert(data["x"], data["y"])))
        with reading(place / split, "a folder of LEAF's JSON with users' examples", protected):
            return joined(owners)


@dataclass(frozen=True)
class TFF:
    """TensorFlow Federated's HDF5; it needs h5py.

    Attributes
    ----------
    stem : str
        Its files are ``<stem>_train.h5`` and ``<stem>_test.h5``.
    fields : tuple of str
        What is read of each client.
    convert : callable
        Arrays of a client's fields, each with one entry an example.
    classes, vocabulary : int
        Numbers of classes and tokens; 0 if it has none.
    """

    stem: str
    fields: tuple[str, ...]
    convert: Callable[..., SplitArrays]
    classes: int
    vocabulary: int = 0

    @property
    def files(self) -> str:
        """What its files are called."""
        return f"TensorFlow Federated's {self.stem}_train.h5 and {self.stem}_test.h5"

    def place(self, folder: Path) -> Path | None:
        """The folder, if it has its files."""
        has_files = all((folder / f"{self.stem}_{split}.h5").is_file() for split in SPLITS)
        return folder if has_files else None

    def read(self, place: Path, split: str, protected: bool) -> SplitArrays:
        """Arrays of a split.

        Raises
        ------
        FedsimError
            If h5py is not installed, or the file is none of TFF's.
        """
        path = place / f"{self.stem}_{split}.h5"
        with self.clients(path, protected) as clients:
            sizes = (data[field].nbytes for data in clients.values() for field in self.fields)
            refuse_larger_than_memory(sum(sizes), str(path))
            return joined(
                (client, self.convert(*(data[field][()] for field in self.fields)))
                for client, data in clients.items()
            )

    @contextmanager
    def clients(self, path: Path, protected: bool) -> Iterator[Any]:
        """Clients of a file: a mapping of their ids to mappings of fields."""
        optional_packages.require(str(path), "h5py")
        import h5py

        fields = " and ".join(self.fields)
        wanted = f"TensorFlow Federated's HDF5, with {fields} in examples/<client>"
        with reading(path, wanted, protected), h5py.File(regular_files.require(path), "r") as file:
            yield file["examples"]
