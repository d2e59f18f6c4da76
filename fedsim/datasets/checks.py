"""Whether plain arrays are a data set, found out in pieces: a mapped file is never copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError

Array = npt.NDArray[Any]
Layout = Literal["auto", "as-is"]

MOST_CLASSES = 1_000_000
"""A larger class or token is a mistake: models have an output or a row for each."""

UNUSABLE = "unusable"
"""The column of training examples whose label, or a token of theirs, is none that there is."""

MOST_CHANNELS = 4
PIECE_BYTES = 2**26


def checked_split(
    split: str, arrays: Mapping[str, Array], layout: Layout, where: str, protected: bool = False
) -> _Arrays:
    """Arrays of one split in shapes and dtypes that torch takes.

    Parameters
    ----------
    split : "train" or "test"
    arrays : mapping of name to array
        See `Dataset.of`.
    protected : bool
        Whether its numbers need not be finite, nor its labels and tokens below a number.

    Raises
    ------
    FedsimError
        If an array is not what it must be, or they do not belong together.
    """
    if not isinstance(arrays, Mapping):
        raise FedsimError(
            f"{where}: its {split} examples are {type(arrays).__name__}; they must be a mapping of "
            "names ('x', 'y', ...) to arrays."
        )
    missing = [key for key in ("x", "y") if key not in arrays]
    if missing:
        raise FedsimError(f"{where} lacks {missing[0]}_{split}.")
    checked = {key: np.asanyarray(array) for key, array in arrays.items()}
    x, y = checked["x"], checked["y"]
    checked["x"] = _inputs(f"x_{split}", x, layout, where, protected)
    if not protected:
        _require_finite(f"x_{split}", checked["x"], None, where)
    mask = checked.get("mask")
    if mask is not None:
        checked["mask"] = mask = _mask(f"mask_{split}", mask, y, where, protected)
    checked["y"] = _targets(f"y_{split}", y, where, protected)
    if not protected:
        _require_finite(f"y_{split}", checked["y"], mask, where)
    require_targets(split, len(x), len(y), where)
    for name in checked.keys() - {"x", "y", "mask"}:
        checked[name] = _column(f"{name}_{split}", checked[name], len(x), where)
    return checked


def require_targets(split: str, examples: int, targets: int, where: str) -> None:
    """Raise FedsimError unless a split has a target for each of its examples."""
    if examples != targets:
        raise FedsimError(
            f"{where} has {examples} examples in x_{split} but {targets} labels in y_{split}; "
            "there must be one label or other target for each example."
        )


_Arrays = dict[str, Array]


def _inputs(key: str, array: Array, layout: Layout, where: str, protected: bool) -> Array:
    """Images channels first, numbers, or tokens."""
    kind = array.dtype.kind
    if kind not in "uif":
        raise FedsimError(
            f"{where} has {key} of dtype {array.dtype}; images must be uint8 (0 to 255), "
            "features float32 or float64, tokens integers."
        )
    image = array.dtype == np.uint8
    floating = kind == "f"
    if array.ndim < 2 or 0 in array.shape or (image and array.ndim > 4):
        raise FedsimError(
            f"{where} has {key} of shape {array.shape}; images must be [N, H, W] or "
            "[N, H, W, C], features [N, d], tokens [N, L], with none of these zero."
        )
    if array.ndim == 2 and image:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape} and dtype uint8; flat features [N, d] "
            "must be float32 or float64, tokens int64, and images [N, H, W] or [N, H, W, C]."
        )
    pictures = image or (floating and layout == "auto" and array.ndim in (3, 4))
    if pictures and array.ndim == 4 and array.shape[3] > MOST_CHANNELS >= array.shape[1]:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape}, which looks channels first; images must "
            "be [N, H, W] or [N, H, W, C], channels last."
        )
    array = _plain(key, array, where, protected)
    if pictures and array.ndim == 3:
        array = array[:, None]
    elif pictures and array.ndim == 4:
        array = array.transpose(0, 3, 1, 2)
    return _contiguous(array)


def _targets(key: str, array: Array, where: str, protected: bool) -> Array:
    """Classes as int64, numbers floating."""
    if array.dtype.kind not in "uifb":
        raise FedsimError(
            f"{where} has {key} of dtype {array.dtype}; labels must be integers from 0 up, and "
            "other targets floating numbers, or booleans [N, K]."
        )
    if array.ndim == 0 or 0 in array.shape[1:]:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape}; labels must be [N], or [N, L] for the "
            "positions of sequences, other targets [N] or [N, K]."
        )
    if array.dtype.kind == "b":
        return array.astype(np.float32)
    return _contiguous(_plain(key, array, where, protected))


def _mask(key: str, array: Array, y: Array, where: str, protected: bool) -> Array:
    """Which targets count, as booleans; of protected examples any number but 0 says so."""
    fits = 2 <= array.ndim <= y.ndim and array.shape == y.shape[: array.ndim]
    low, high = (0, 1) if protected or array.dtype.kind not in "bui" else _extremes(array, None)
    if not fits or array.dtype.kind not in "bui" or high > 1:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape} and dtype {array.dtype}; it must hold "
            f"booleans, one for each target of an example, for these targets {y.shape}."
        )
    if low < 0:
        raise FedsimError(f"{where} has numbers below 0 in {key}; it must hold booleans.")
    return array if array.dtype.kind == "b" else array.astype(np.bool_)


def _column(key: str, array: Array, count: int, where: str) -> Array:
    if array.shape != (count,) or array.dtype.kind not in "uifbUS":
        raise FedsimError(
            f"{where} has {key} of shape {array.shape} and dtype {array.dtype}; a column must have "
            f"one number or string for each of the {count} examples."
        )
    return np.asarray(array)


def _plain(key: str, array: Array, where: str, protected: bool) -> Array:
    """In a dtype and byte order that torch computes with; only a copy where it is another."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    wanted = np.dtype(f"f{min(size, 8)}" if kind == "f" else array.dtype.newbyteorder("="))
    if kind == "u" and size > 1:
        wanted = np.dtype(np.int64)
    if array.dtype == wanted:
        return array
    if isinstance(array, np.memmap):
        raise FedsimError(
            f"{where} has {key} of dtype {array.dtype}, which cannot stay in its file; it must be "
            "float, uint8, or signed integers, in this machine's byte order."
        )
    # Protected ones that are too large stay so, or turn negative: both are found unusable.
    if kind == "u" and not protected and int(array.max(initial=0)) >= MOST_CLASSES:
        raise FedsimError(
            f"{where} has the label {array.max()} in {key}; labels must be below {MOST_CLASSES:,}."
        )
    with np.errstate(over="ignore"):  # what is too large is infinite, and refused as that
        return array.astype(wanted)


def _contiguous(array: Array) -> Array:
    """As torch likes it in memory; what is in a file stays there unchanged."""
    if isinstance(array, np.memmap):
        return array
    # A copy where need be: torch wants memory that it may write to.
    return np.require(array, requirements=["C", "W"])


@dataclass(frozen=True)
class Size:
    """How many classes or tokens there are, and the split that tells; "" if that is declared."""

    size: int
    found_in: Literal["", "train", "test"] = ""


def found_size(
    key: str, declared: int, train: _Arrays, test: _Arrays, where: str, protected: bool = False
) -> Size:
    """How many classes or tokens there are; 0 where targets or inputs are not of that kind.

    Of ``protected`` training examples none is refused, and none tells where test examples do.

    Raises
    ------
    FedsimError
        If there are others than declared, or ones that cannot be.
    """
    name, noun = ("y", "label") if key == "classes" else ("x", "token")
    arrays = train[name], test[name]
    if not 0 <= declared <= MOST_CLASSES:
        raise FedsimError(
            f"{where} declares {declared} {key}; there must be at most {MOST_CLASSES:,}."
        )
    # Eight bits without a sign are images among inputs, and classes among targets.
    if arrays[0].dtype.kind not in ("iu" if name == "y" else "i"):
        if declared:
            remedy = ", as y.astype('int64') has them, or y.argmax(1) of one-hot rows"
            remedy *= name == "y"
            raise FedsimError(
                f"{where} declares {declared} {key}, but its {name}_train is {arrays[0].dtype}, "
                f"which are no {noun}s: these are whole numbers{remedy}."
            )
        return Size(0)
    limit = declared or MOST_CLASSES
    allowed = f"below {limit:,}" + (f", the declared {key}" if declared else "")
    most = []
    for split, columns, array in zip(("train", "test"), (train, test), arrays, strict=True):
        low, high = _extremes(array, columns.get("mask") if name == "y" else None)
        if protected and split == "train":
            most.append(min(max(high + 1, 1), MOST_CLASSES))
            continue
        if low < 0 or high >= limit:
            value, must = (low, "integers from 0 up") if low < 0 else (high, allowed)
            raise FedsimError(
                f"{where} has the {noun} {value} in {name}_{split}; {noun}s must be {must}."
            )
        most.append(high + 1)
    if declared:
        return Size(declared)
    if protected and most[1]:
        return Size(most[1], "test")
    if not max(most):
        raise FedsimError(
            f"{where} has a mask that leaves no {noun} at all; one must count, or data.{key} must "
            "be declared."
        )
    return Size(max(most), "train" if most[0] > most[1] else "test")


def with_unusable(train: _Arrays, sizes: Mapping[str, Size]) -> _Arrays:
    """Training arrays without labels or tokens outside ``sizes``, and a column of whose were.

    0 is in their place, so that nothing is ever looked up outside a model's rows; an array that
    has some is copied, unless it is a file's own copy-on-write memory. No column where nobody has
    any.
    """
    made, marks = dict(train), train.get(UNUSABLE)
    unusable = np.zeros(len(train["x"]), dtype=np.bool_)
    if marks is not None and marks.dtype.kind == "b":  # as a file says that was split by clients
        unusable |= marks
    for name, size in (("y", sizes["classes"].size), ("x", sizes["vocabulary"].size)):
        array, stop = train[name], 0
        for piece, counts in _pieces(array, train.get("mask") if name == "y" else None):
            start, stop = stop, stop + len(piece)
            if not size or (piece.min() >= 0 and piece.max() < size):
                continue
            wrong = (piece < 0) | (piece >= size)
            if counts is not None:
                wrong &= counts.reshape(*counts.shape, *[1] * (wrong.ndim - counts.ndim))
            if made[name] is array and getattr(array, "mode", "") != "c":
                made[name] = array.copy()
            made[name][start:stop][wrong] = 0
            unusable[start:stop] |= wrong.reshape(len(piece), -1).any(axis=1)
    return made | {UNUSABLE: unusable} if unusable.any() else made


def _extremes(array: Array, mask: Array | None) -> tuple[int, int]:
    """Smallest and largest of the integers that count; 0 and -1 if none do."""
    low, high = 0, -1
    for piece, counts in _pieces(array, mask):
        values = piece if counts is None else piece[counts]
        if values.size:
            low, high = min(low, int(values.min())), max(high, int(values.max()))
    return low, high


def _require_finite(key: str, array: Array, mask: Array | None, where: str) -> None:
    if array.dtype.kind != "f":
        return
    for piece, counts in _pieces(array, mask):
        if not np.isfinite(piece if counts is None else piece[counts]).all():
            raise FedsimError(
                f"{where} has NaN or infinite numbers in {key}; every feature and every target "
                "that counts must be finite."
            )


def _pieces(array: Array, mask: Array | None) -> Iterator[tuple[Array, Array | None]]:
    """The array by rows, so that no copy of a part is larger than some megabytes."""
    width = max(1, array.nbytes // max(len(array), 1))
    rows = max(1, PIECE_BYTES // width)
    for start in range(0, len(array), rows):
        piece = array[start : start + rows]
        yield piece, None if mask is None else mask[start : start + rows]


TINY = 1e-20


def statistics(
    mean: Sequence[float] | None, std: Sequence[float] | None, inputs: Array, where: str
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Checked mean and standard deviation, one number a channel or a feature.

    Raises
    ------
    FedsimError
        If they do not fit the inputs, or these are no numbers.
    """
    if mean is None and std is None:
        return None, None
    normal = inputs.ndim in (2, 4) and inputs.dtype.kind != "i"
    channels = inputs.shape[1]
    given = [np.asarray(() if one is None else one, dtype=np.float64) for one in (mean, std)]
    # Of a size that float32 holds, and what is divided by it too.
    usable = all(one.shape == (channels,) and (abs(one) <= 1 / TINY).all() for one in given)
    if not normal or not usable or not (given[1] >= TINY).all():
        shown = [None if one is None else list(one)[:8] for one in (mean, std)]
        raise FedsimError(
            f"{where} has mean {shown[0]} and std {shown[1]}; normalising needs images or features "
            f"[N, d], and of both one number for each of the {channels} channels or features, of "
            f"{1 / TINY:g} at most, and std at least {TINY:g}."
        )
    return tuple(given[0].tolist()), tuple(given[1].tolist())
