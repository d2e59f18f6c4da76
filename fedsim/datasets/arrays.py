"""Read a user's own arrays safely: without pickle, and without trusting the sizes a file claims.

An ``.npz`` is read into memory. Its directory and the arrays' headers are read first: they must
agree with each other and with the size of the file, since deflate, the only compression that NumPy
writes, packs at most about a thousandfold. A folder of ``.npy`` files is memory-mapped, so that
only what batches need is read from disk.
"""

from __future__ import annotations

import math
import mmap
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedsim import regular_files
from fedsim.array_types import Array
from fedsim.datasets.array_checks import require_targets, shortened
from fedsim.datasets.dataset import Dataset
from fedsim.errors import FedsimError
from fedsim.process import refuse_larger_than_memory

KEYS = ("x_train", "y_train", "x_test", "y_test")
SPLITS = ("train", "test")
STATISTICS = ("mean", "std")
DECLARED = ("classes", "vocabulary")

# 1032 : 1 is deflate's limit (zlib's technical notes); the rest allows for the entry's overhead.
DENSEST, MAX_HEADER = 1040, 2**16
MAX_STATISTICS = 10_000


@dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays and declared numbers in a file or a folder.

    Attributes
    ----------
    train, test : mapping of name to array
        ``x`` (or, of several inputs, each as ``x_NAME``), ``y``, and ``mask`` and other columns if
        the file has them.
    mean, std : list of float, or None
        Statistics for normalising; None if the file has none.
    classes, vocabulary : int
        Declared numbers of classes and tokens, of several inputs by name; 0 if not declared.
    found_in : mapping of str to "train" or "test"
        Properties found in the examples instead of being declared (``mean`` and ``types`` of
        tables), and the split in which they were found.
    feature_names, class_names : tuple of str
        Names of the inputs, in order, and of the classes; empty if there are none.
    columns : tuple of str
        Of a table: what each column became, one text each.
    """

    train: Mapping[str, Array]
    test: Mapping[str, Array]
    mean: list[float] | None = None
    std: list[float] | None = None
    classes: int = 0
    vocabulary: int | Mapping[str, int] = 0
    found_in: Mapping[str, str] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, Array]) -> Arrays:
        """Build it from arrays under their names in a file: ``x_train``, ``owner_test``, ...

        Raises
        ------
        TypeError, ValueError, OverflowError
            If a statistic is not numbers, or a declared number is not one whole number.
        """
        for name, array in arrays.items():
            _require_small(name, array.shape)
        train, test = (
            {name.removesuffix(end): array for name, array in arrays.items() if name.endswith(end)}
            for end in ("_train", "_test")
        )
        settings: dict[str, Any] = {k: _whole(k, arrays[k]) for k in DECLARED if k in arrays}
        if of_inputs := [name for name in arrays if is_vocabulary(name) and name not in DECLARED]:
            settings["vocabulary"] = {
                name.removeprefix("vocabulary_"): _whole(name, arrays[name]) for name in of_inputs
            }
        settings |= {k: [float(v) for v in arrays[k].ravel()] for k in STATISTICS if k in arrays}
        return cls(train, test, **settings)

    def dataset(self, name: str, **others: Any) -> Dataset:
        """Data set of these arrays; ``others`` (of `Dataset.from_arrays`) take precedence."""
        own = (*STATISTICS, *DECLARED, "found_in", "feature_names", "class_names", "columns")
        settings = {key: getattr(self, key) for key in own}
        return Dataset.from_arrays(name, self.train, self.test, **{**settings, **others})


def _whole(key: str, array: Array) -> int:
    number = array.ravel()[0]
    if array.dtype.kind not in "uif" or int(number) != number:
        raise ValueError(f"{key} is {number}, not a whole number")
    return int(number)


def read_npz(path: Path) -> Arrays:
    """Read the arrays of an ``.npz`` into memory.

    Raises
    ------
    FedsimError
        If the file cannot be read, is no ``.npz``, lacks a key, holds Python objects, claims
        more bytes than it can hold, or is larger than memory.
    """
    try:
        with open(path, "rb", opener=regular_files.opener) as file:
            if file.read(6) == b"\x93NUMPY":
                raise FedsimError(f"{path} holds one array; it must be an .npz with {_wanted()}.")
            with zipfile.ZipFile(file) as archive:
                names = _used(path, (name.removesuffix(".npy") for name in archive.namelist()))
                claims = {key: _claimed(archive, key) for key in names}
            _require_one_length({key: shape for key, (shape, _) in claims.items()}, path)
            refuse_larger_than_memory(sum(size for _, size in claims.values()), f"{path}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return Arrays.from_named_arrays({key: arrays[key] for key in names})
    except FedsimError:
        raise
    except Exception as error:
        # The file is untrusted: the zip and NumPy parsers may raise any type of exception.
        raise FedsimError(
            f"{path} could not be read ({cause(error)}); it must be an .npz of plain arrays with "
            f"{_wanted()}."
        ) from error


def read_folder(path: Path) -> Arrays:
    """Memory-map the arrays of a folder of ``.npy`` files; nothing is read before it is used.

    Raises
    ------
    FedsimError
        If a file is missing, cannot be read, holds Python objects, or claims more than it holds.
    """
    names = _used(path, sorted(file.stem for file in path.glob("*.npy")))
    arrays: dict[str, Array] = {}
    file = path
    try:
        for name in names:
            file = path / f"{name}.npy"
            _require_size(file)
            # "c" is copy-on-write: torch requires writable memory, and writes never reach the file.
            arrays[name] = np.lib.format.open_memmap(regular_files.require(file), mode="c")
            _expect_batches(arrays[name])
    except Exception as error:
        raise FedsimError(
            f"{file} could not be read ({cause(error)}); it must hold one plain array."
        ) from error
    try:
        return Arrays.from_named_arrays(arrays)
    except (TypeError, ValueError, OverflowError) as error:
        single = " and ".join(f"{name}.npy" for name in arrays if is_single(name))
        raise FedsimError(
            f"{single} of {path} could not be read ({cause(error)}); there must be numbers."
        ) from error


def _require_size(path: Path) -> None:
    """Refuse a shape beyond the file's size; NumPy would compute with it, and overflow."""
    with open(path, "rb", opener=regular_files.opener) as file:
        shape, size = _header(path.stem, file)
    if path.stat().st_size < size:
        raise ValueError(f"its header claims the shape {shape}, which the file does not hold")


def _expect_batches(array: Array) -> None:
    """Tell the system that access is random, so that it does not read ahead."""
    if isinstance(array, np.memmap) and hasattr(mmap, "MADV_RANDOM"):
        memory: mmap.mmap = array._mmap  # type: ignore[attr-defined]
        memory.madvise(mmap.MADV_RANDOM)


def _used(path: Path, names: Iterable[str]) -> list[str]:
    """Names of the arrays to read, after checking that the required ones are there."""
    distinct = list(dict.fromkeys(names))
    if missing := missing_keys(distinct):
        raise FedsimError(
            f"{path} lacks {', '.join(missing)} and holds {shortened(distinct)}; it must hold "
            f"{_wanted()}."
        )
    return [
        name
        for name in distinct
        if is_single(name) or (name.endswith(("_train", "_test")) and name.isprintable())
    ]


def missing_keys(names: Collection[str]) -> list[str]:
    """Those of `KEYS` that are not among the names; ``x_NAME_train`` stand for ``x_train``."""
    inputs = {f"x_{split}" for name in names for split in SPLITS if _is_input(name, split)}
    return [key for key in KEYS if key not in names and key not in inputs]


def _is_input(name: str, split: str) -> bool:
    return name.startswith("x_") and name.endswith(f"_{split}") and len(name) > len(f"x__{split}")


def is_vocabulary(name: str) -> bool:
    """Whether an array is a declared number of tokens, of all inputs or of one of several."""
    is_of_input = name.startswith("vocabulary_") and not name.endswith(("_train", "_test"))
    return name == "vocabulary" or is_of_input


def is_single(name: str) -> bool:
    """Whether an array is one for both splits: a statistic or a declared number."""
    return name in (*STATISTICS, *DECLARED) or is_vocabulary(name)


def _require_one_length(shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuse arrays of a split that differ in length, before any of them is read."""
    for split in ("train", "test"):
        inputs = (key for key in sorted(shapes) if _is_input(key, split))
        first = f"x_{split}" if f"x_{split}" in shapes else next(inputs)
        examples = (shapes[first] or (0,))[0]
        for key, shape in shapes.items():
            if not examples or not shape or not key.endswith(f"_{split}"):
                continue
            if key == f"y_{split}":
                require_targets(first, split, examples, shape[0], str(path))
            elif shape[0] != examples:
                raise FedsimError(
                    f"{path} has {key} of shape {shape}; it must have one entry for each of the "
                    f"{examples} examples of {first}."
                )


def _claimed(archive: zipfile.ZipFile, key: str) -> tuple[tuple[int, ...], int]:
    """Shape and size in bytes of an array by its header, checked against the archive's entry."""
    entry = archive.getinfo(f"{key}.npy")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{key} is compressed by a method other than deflate")
    if entry.file_size > DENSEST * entry.compress_size + MAX_HEADER:
        raise ValueError(f"{key} claims more bytes than its {entry.compress_size} can hold")
    with archive.open(entry) as file:
        shape, size = _header(key, file)
    if size != entry.file_size:
        raise ValueError(f"{key} has a header that does not fit its {entry.file_size} bytes")
    _require_small(key, shape)
    return shape, entry.file_size


def _header(key: str, file: IO[bytes]) -> tuple[tuple[int, ...], int]:
    """Shape of an array and size of its file in bytes, by the header that the file begins with."""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"{key} is in version {version} of NumPy's format")
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{key} holds Python objects")
    if any(length < 0 for length in shape):
        raise ValueError(f"{key} has the shape {shape}")
    return shape, file.tell() + math.prod(shape) * dtype.itemsize


def _require_small(key: str, shape: tuple[int, ...]) -> None:
    if key in STATISTICS and math.prod(shape) > MAX_STATISTICS:
        raise ValueError(f"{key} has the shape {shape}, not one number per channel or feature")
    if (key in DECLARED or is_vocabulary(key)) and math.prod(shape) != 1:
        raise ValueError(f"{key} has the shape {shape}, not one number")


def cause(error: Exception) -> str:
    """First 200 characters of a library's error, to be quoted inside a sentence."""
    return str(error).strip().replace("\n", " ").rstrip(".")[:200] or type(error).__name__


def _wanted() -> str:
    return f"{', '.join(KEYS[:-1])} and {KEYS[-1]}"
