"""Checks that plain arrays form a data set, block by block so that no mapped file is copied."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedsim.array_types import Array
from fedsim.errors import FedsimError, printable
from fedsim.named_tensors import require_names

AxisOrder = Literal["auto", "as-is"]

MAX_CLASSES = 1_000_000
"""A larger class or token is taken for a mistake: models have an output or a row for each."""

UNUSABLE = "unusable"
"""Column that marks a private run's examples which cannot be used; see `with_unusable`."""

MAX_CHANNELS = 4
PIECE_BYTES = 2**26


def checked_split(
    split: str, arrays: Mapping[str, Array], layout: AxisOrder, where: str, protected: bool = False
) -> _Arrays:
    """Arrays of one split in shapes and dtypes that torch takes.

    Parameters
    ----------
    split : "train" or "test"
    arrays : mapping of name to array
        ``x``, or each of several inputs as ``x_NAME``, and ``y``; ``mask`` and named columns, if
        there are any.
    layout : "auto" or "as-is"
        Whether floating-point arrays of 3 or 4 dimensions are read as images.
    where : str
        Name of the data in error messages.
    protected : bool
        Whether to accept numbers that are not finite, and labels and tokens out of range, since the
        examples, training or test, are those of persons whom a run protects.

    Raises
    ------
    FedsimError
        If an array has the wrong dtype, shape or values, or the lengths of the arrays differ.
    """
    if not isinstance(arrays, Mapping):
        raise FedsimError(
            f"{where}: its {split} examples are {type(arrays).__name__}; they must be a mapping of "
            "names ('x', 'y', ...) to arrays."
        )
    inputs = input_names(arrays)
    missing = [] if "y" in arrays else ["y"]
    for key in missing if inputs else ["x"]:
        raise FedsimError(f"{where} lacks {key}_{split}.")
    require_names([name.removeprefix("x_") for name in inputs if name != "x"], where)
    checked = {key: np.asanyarray(array) for key, array in arrays.items()}
    y = checked["y"]
    for name in inputs:
        x = checked[name]
        checked[name] = _inputs(f"{name}_{split}", x, layout, where, protected)
        if not protected:
            _require_finite(f"{name}_{split}", checked[name], None, where)
    mask = checked.get("mask")
    if mask is not None:
        checked["mask"] = mask = _mask(f"mask_{split}", mask, y, where, protected)
    checked["y"] = _targets(f"y_{split}", y, where, protected)
    if not protected:
        _require_finite(f"y_{split}", checked["y"], mask, where)
    for name in inputs:
        require_targets(f"{name}_{split}", split, len(checked[name]), len(y), where)
    for name in checked.keys() - {*inputs, "y", "mask"}:
        checked[name] = _column(f"{name}_{split}", checked[name], len(y), where)
    return checked


def input_names(names: Collection[str]) -> list[str]:
    """Which arrays of a split are a model's inputs: ``x``, or else all ``x_NAME``, sorted."""
    return ["x"] if "x" in names else sorted(name for name in names if name.startswith("x_"))


def require_targets(key: str, split: str, examples: int, targets: int, where: str) -> None:
    """Raise FedsimError unless a split has a target for each of its examples."""
    if examples != targets:
        raise FedsimError(
            f"{where} has {examples} examples in {key} but {targets} labels in y_{split}; "
            "there must be one label or other target for each example."
        )


_Arrays = dict[str, Array]


def _inputs(key: str, array: Array, layout: AxisOrder, where: str, protected: bool) -> Array:
    """Checked inputs: images (moved to channels first), features, or tokens."""
    kind = array.dtype.kind
    if kind not in "uifb":
        raise FedsimError(
            f"{where} has {key} of dtype {array.dtype}; images must be uint8 (0 to 255), "
            "features numbers or booleans, tokens integers (which data.tokenizer makes of texts)."
        )
    image = array.dtype == np.uint8 and array.ndim > 2
    floating = kind == "f"
    least = 2 if key in ("x_train", "x_test") else 1  # one of several may be a number
    if array.ndim < least or 0 in array.shape or (image and array.ndim > 4):
        raise FedsimError(
            f"{where} has {key} of shape {array.shape}; images must be [N, H, W] or "
            "[N, H, W, C], features [N, d], tokens [N, L], with none of these zero."
        )
    pictures = image or (floating and layout == "auto" and array.ndim in (3, 4))
    channels_first = array.ndim == 4 and array.shape[3] > MAX_CHANNELS >= array.shape[1]
    if pictures and channels_first and layout == "auto":
        raise FedsimError(
            f"{where} has {key} of shape {array.shape}, which looks channels first; images must "
            "be [N, H, W] or [N, H, W, C], channels last, unless data.layout = 'as-is'."
        )
    array = _plain(key, array, where, protected)
    if pictures and array.ndim == 3:
        array = array[:, None]
    elif pictures and array.ndim == 4 and not channels_first:
        array = array.transpose(0, 3, 1, 2)
    return _contiguous(array)


def _targets(key: str, array: Array, where: str, protected: bool) -> Array:
    """Checked targets: classes as integers, numbers and booleans as floating point."""
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
    """Boolean mask of the targets that count; if protected, any integer but 0 means True."""
    fits = 2 <= array.ndim <= y.ndim and array.shape == y.shape[: array.ndim]
    # The values of a protected mask are not looked at: no refusal may depend on training data.
    low, high = (0, 1) if protected or array.dtype.kind not in "bui" else _extremes(array, None)
    if not fits or array.dtype.kind not in "bui" or high > 1:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape} and dtype {array.dtype}; the "
            f"targets have shape {y.shape}; it must hold one boolean for each target of an example."
        )
    if low < 0:
        raise FedsimError(f"{where} has numbers below 0 in {key}; it must hold booleans.")
    return array if array.dtype.kind == "b" else array.astype(np.bool_)


def _column(key: str, array: Array, count: int, where: str) -> Array:
    plain = array.dtype.kind in "uifbUS" or is_texts(array)
    if array.shape != (count,) or not plain:
        raise FedsimError(
            f"{where} has {key} of shape {array.shape} and dtype {array.dtype}; a column must have "
            f"one number or string for each of the {count} examples."
        )
    return np.asarray(array)


def is_texts(array: Array) -> bool:
    """Whether an array holds Python strings, which take no more memory than their own lengths."""
    return array.dtype.hasobject and all(isinstance(value, str) for value in array.ravel())


def torch_dtype(array: Array) -> np.dtype[Any]:
    """The dtype nearest to an array's that torch supports, in this machine's byte order."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "u" and size > 1:
        return np.dtype(np.int64)
    return np.dtype(f"f{min(size, 8)}") if kind == "f" else array.dtype.newbyteorder("=")


def _plain(key: str, array: Array, where: str, protected: bool) -> Array:
    """The array in a dtype and byte order that torch supports; copied only if it must change."""
    kind, wanted = array.dtype.kind, torch_dtype(array)
    if array.dtype == wanted:
        return array
    if isinstance(array, np.memmap):
        raise FedsimError(
            f"{where} has {key} of dtype {array.dtype}, which cannot be memory-mapped; it must be "
            "float, uint8, or signed integers, in this machine's byte order."
        )
    # Too large labels of a private run stay too large or become negative: `with_unusable` finds
    # both.
    if kind == "u" and not protected and int(array.max(initial=0)) >= MAX_CLASSES:
        raise FedsimError(
            f"{where} has the label {array.max()} in {key}; labels must be below {MAX_CLASSES:,}."
        )
    with np.errstate(over="ignore"):  # overflow gives infinity, which is refused later
        return array.astype(wanted)


def _contiguous(array: Array) -> Array:
    """The array in C order and writable, as torch requires; a mapped file is left as it is."""
    if isinstance(array, np.memmap):
        return array
    return np.require(array, requirements=["C", "W"])


@dataclass(frozen=True)
class Size:
    """Number of classes or tokens, and the split it was found in ("" if it was declared)."""

    size: int
    found_in: Literal["", "train", "test"] = ""


def found_vocabulary(
    vocabulary: int | Mapping[str, int],
    train: _Arrays,
    test: _Arrays,
    where: str,
    protected: bool = False,
) -> dict[str, Size]:
    """Number of tokens of each array of inputs, by the array's name; see `found_size`.

    Parameters
    ----------
    vocabulary : int, or (of several inputs) a mapping of their names to int
        Declared numbers; 0 to use the number found in the data. One number is for all inputs that
        are integers.

    Raises
    ------
    FedsimError
        As of `found_size`, and if an input is declared that does not exist.
    """
    inputs = input_names(train)
    if isinstance(vocabulary, Mapping):
        if unknown := [name for name in vocabulary if f"x_{name}" not in inputs]:
            raise FedsimError(
                f"{where} has vocabulary_{unknown[0]}, but no input of that name; its inputs are "
                f"{', '.join(name.removeprefix('x_') for name in inputs)}."
            )
        declared = {name: vocabulary.get(name.removeprefix("x_"), 0) for name in inputs}
    else:
        tokens = [name for name in inputs if train[name].dtype.kind == "i"] or inputs
        declared = {name: vocabulary if name in tokens else 0 for name in inputs}
    return {
        name: found_size(name, number, train, test, where, protected)
        for name, number in declared.items()
    }


def found_size(
    name: str, declared: int, train: _Arrays, test: _Arrays, where: str, protected: bool = False
) -> Size:
    """Number of classes or tokens; 0 if the targets are not classes or the inputs not tokens.

    With ``protected`` no example is refused, and the number is taken from the test examples if
    they have any: nothing that is visible then depends on the training data.

    Parameters
    ----------
    name : "y" or name of an array of inputs
        Array in which to count.
    declared : int
        The declared number; 0 to use the number found in the data.

    Raises
    ------
    FedsimError
        If there are more than declared, or a label or token is negative or too large.
    """
    key, noun = ("classes", "label") if name == "y" else ("vocabulary", "token")
    arrays = train[name], test[name]
    if not 0 <= declared <= MAX_CLASSES:
        raise FedsimError(
            f"data.{key} of {where} is {declared:,}; it must be between 0 (not declared) and "
            f"{MAX_CLASSES:,}."
        )
    # uint8 inputs are images, never tokens; uint8 targets are classes.
    if arrays[0].dtype.kind not in ("iu" if name == "y" else "i"):
        if declared:
            remedy = ", as y.astype('int64') has them, or y.argmax(1) of one-hot rows"
            remedy *= name == "y"
            raise FedsimError(
                f"data.{key} is {declared:,}, but {name}_train of {where} is {arrays[0].dtype}; "
                f"{noun}s must be whole numbers{remedy}."
            )
        return Size(0)
    limit = declared or MAX_CLASSES
    allowed = f"below {limit:,}" + (f", the declared {key}" if declared else "")
    most = []
    for split, columns, array in zip(("train", "test"), (train, test), arrays, strict=True):
        low, high = _extremes(array, columns.get("mask") if name == "y" else None)
        if protected:
            # Clamped, not refused: an error would depend on protected data.
            most.append(min(max(high + 1, int(split == "train")), MAX_CLASSES))
            continue
        if low < 0 or high >= limit:
            remedy = f", and mask_{split} must be false where one is ignored, as -100 is in torch"
            least = "integers from 0 up" + remedy * (name == "y" and array.ndim > 1)
            value, must = (low, least) if low < 0 else (high, allowed)
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
            f"{where} has a mask that leaves out every {noun}; one must count, or data.{key} must "
            "be declared."
        )
    return Size(max(most), "train" if most[0] > most[1] else "test")


def with_unusable(arrays: _Arrays, sizes: Mapping[str, Size], split: str) -> _Arrays:
    """Arrays of a split with labels and tokens outside ``sizes`` set to 0, their examples marked.

    They are set to 0 so that no model looks up a row that does not exist. An array that has such
    values is copied, unless it is copy-on-write memory of a mapped file. The boolean column
    `UNUSABLE` marks the examples concerned; it is left out where there are none. Of test examples
    it also marks those with numbers that are not finite. Of training examples it need not: these
    make their client's update not finite, or their own gradient count as zero.
    """
    made, marks = dict(arrays), arrays.get(UNUSABLE)
    unusable = np.zeros(len(arrays["y"]), dtype=np.bool_)
    if marks is not None and marks.dtype.kind == "b":  # marked already, in a client's own file
        unusable |= marks
    for name, found in sizes.items():
        array, size, stop = arrays[name], found.size, 0
        for piece, counts in _pieces(array, arrays.get("mask") if name == "y" else None):
            start, stop = stop, stop + len(piece)
            if not size or (piece.min() >= 0 and piece.max() < size):
                continue
            wrong = _where_counted((piece < 0) | (piece >= size), counts)
            if made[name] is array and getattr(array, "mode", "") != "c":
                made[name] = array.copy()
            made[name][start:stop][wrong] = 0
            unusable[start:stop] |= _any_of_example(wrong)
        if split == "test":
            unusable |= not_finite(array, arrays.get("mask") if name == "y" else None)
    return made | {UNUSABLE: unusable} if unusable.any() else made


def not_finite(array: Array, mask: Array | None = None) -> npt.NDArray[np.bool_]:
    """Which examples ``[N]`` have numbers that count and are not finite."""
    found = np.zeros(len(array), dtype=np.bool_)
    if array.dtype.kind == "f":
        stop = 0
        for piece, counts in _pieces(array, mask):
            start, stop = stop, stop + len(piece)
            found[start:stop] = _any_of_example(_where_counted(~np.isfinite(piece), counts))
    return found


def _where_counted(wrong: Array, mask: Array | None) -> Array:
    """``wrong`` where the mask counts; it may lack the last dimensions, which it then gets."""
    if mask is None:
        return wrong
    counts = mask.reshape(*mask.shape, *[1] * (wrong.ndim - mask.ndim))
    return np.asarray(wrong & counts)


def _any_of_example(wrong: Array) -> Array:
    return np.asarray(wrong.reshape(len(wrong), -1).any(axis=1))


def _extremes(array: Array, mask: Array | None) -> tuple[int, int]:
    """Smallest (at most 0) and largest of the integers that count; 0 and -1 if none do."""
    low, high = 0, -1
    for piece, counts in _pieces(array, mask):
        values = piece if counts is None else piece[counts]
        if values.size:
            low, high = min(low, int(values.min())), max(high, int(values.max()))
    return low, high


def _require_finite(key: str, array: Array, mask: Array | None, where: str) -> None:
    if not_finite(array, mask).any():
        raise FedsimError(
            f"{where} has NaN or infinite numbers in {key}; every feature and every target that "
            "counts must be finite."
        )


def _pieces(array: Array, mask: Array | None) -> Iterator[tuple[Array, Array | None]]:
    """The array and its mask in blocks of rows of about `PIECE_BYTES`, which bounds temporaries."""
    width = max(1, array.nbytes // max(len(array), 1))
    rows = max(1, PIECE_BYTES // width)
    for start in range(0, len(array), rows):
        piece = array[start : start + rows]
        yield piece, None if mask is None else mask[start : start + rows]


TINY = 1e-20


def statistics(
    mean: Sequence[float] | None, std: Sequence[float] | None, inputs: Array | None, where: str
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Checked mean and standard deviation, one number per channel or feature.

    ``inputs`` are None if a model has several, which are not normalised.

    Raises
    ------
    FedsimError
        If they do not fit the inputs, or the inputs are tokens or sequences.
    """
    if mean is None and std is None:
        return None, None
    if inputs is None:
        raise FedsimError(
            f"{where} has a mean and std, and several inputs by name; only one, x, is normalised."
        )
    normal = inputs.ndim in (2, 4) and inputs.dtype.kind != "i"
    channels = inputs.shape[1]
    given = [
        np.asarray(() if numbers is None else numbers, dtype=np.float64) for numbers in (mean, std)
    ]
    # Within [1e-20, 1e20], so that float32 holds them and the normalised inputs.
    usable = all(
        numbers.shape == (channels,) and (abs(numbers) <= 1 / TINY).all() for numbers in given
    )
    if not normal or not usable or not (given[1] >= TINY).all():
        shown = [None if numbers is None else list(numbers)[:8] for numbers in (mean, std)]
        raise FedsimError(
            f"{where} has mean {shown[0]} and std {shown[1]}; normalising needs images or features "
            f"[N, d], and, in both, one number for each of the {channels} channels or features, of "
            f"{1 / TINY:g} at most, and std at least {TINY:g}."
        )
    return tuple(given[0].tolist()), tuple(given[1].tolist())


def shortened(names: Sequence[str]) -> str:
    """A list of names for a sentence; long lists are cut."""
    shown = printable(", ".join(names[:10]), 400)
    return f"{shown[:300]}, ..." if len(names) > 10 or len(shown) > 300 else shown or "none"
