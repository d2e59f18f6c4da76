"""`Dataset` and `Split`: examples with their targets, for training and for testing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.array_types import Array
from fedsim.datasets.array_checks import (
    AxisOrder,
    Size,
    checked_split,
    found_size,
    found_vocabulary,
    input_names,
    shortened,
    statistics,
    with_unusable,
)
from fedsim.errors import FedsimError
from fedsim.lazy import Tensor, torch
from fedsim.named_tensors import NamedTensors, by_name
from fedsim.settings import check_settings


@dataclass(frozen=True, eq=False)
class Split:
    """N examples with their targets.

    Attributes
    ----------
    x : Tensor ``[N, ...]``, or NamedTensors
        Inputs: uint8 images ``[N, C, H, W]``, which become floating point (divided by 255) only
        when a batch is gathered; features, which are floating numbers of any shape, or uint8
        ``[N, d]`` or booleans; or other integers, which are tokens. `NamedTensors`
        are for a model with several inputs: ``model.forward(**batch)``, where booleans stay
        booleans.
    y : Tensor ``[N, ...]``
        Targets: integers are classes, of an example or of each of its positions; floating numbers
        are regression targets, one or a vector per example.
    mask : bool Tensor, or None
        Which targets count: of the shape of ``y``, or of its first dimensions.
    columns : mapping of name to array ``[N]``
        Further values per example, such as its ``owner``. In a private run the boolean column
        ``unusable`` marks examples with a label or token out of range, and test examples with
        numbers that are not finite. The clients of such training examples fail, or at example
        level their gradients count as zero. Such test examples are left out of metrics, and their
        clients fail where they evaluate.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = self.x.tensors if isinstance(self.x, NamedTensors) else {"x": self.x}
        for name, tensor in (*inputs.items(), ("y", self.y), ("mask", self.mask)):
            if not isinstance(tensor, torch.Tensor) and not (name == "mask" and tensor is None):
                raise FedsimError(
                    f"{name} of a Split is {type(tensor).__name__}; it must be a torch.Tensor, or "
                    "NamedTensors as x (Dataset.from_arrays takes arrays)."
                )
        counts = {"y": len(self.y)} | ({} if self.mask is None else {"mask": len(self.mask)})
        counts |= {f"x['{name}']": len(tensor) for name, tensor in inputs.items()}
        if not isinstance(self.columns, Mapping):
            raise FedsimError(
                f"columns of a Split are {type(self.columns).__name__}; they must be a mapping of "
                "names to NumPy arrays."
            )
        for name, column in self.columns.items():
            if not isinstance(column, np.ndarray) or column.ndim != 1:
                raise FedsimError(
                    f"columns['{name}'] of a Split is {type(column).__name__}; it must be a NumPy "
                    "array with one value an example."
                )
            counts[name] = len(column)
        for name, count in counts.items():
            if count != len(self.x):
                raise FedsimError(
                    f"{name} of a Split has {count} entries; it must have one for each of the "
                    f"{len(self.x)} examples of x."
                )

    def __len__(self) -> int:
        return len(self.x)

    def arrays(self) -> dict[str, Array]:
        """Its arrays by their names in a file, without ``_train`` or ``_test``."""
        tensors = {"x": self.x}
        if isinstance(self.x, NamedTensors):
            tensors = {f"x_{name}": one for name, one in self.x.tensors.items()}
        tensors |= {"y": self.y} if self.mask is None else {"y": self.y, "mask": self.mask}
        return {**self.columns, **{k: t.detach().cpu().numpy() for k, t in tensors.items()}}

    def to(self, device: torch.device | str) -> Split:
        """Move every tensor to ``device``; dtypes stay."""
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), mask=mask)

    def __getitem__(self, rows: slice | Tensor) -> Split:
        """Examples at these rows: a view for a slice, a copy for a tensor of positions."""
        mask = None if self.mask is None else self.mask[rows]
        host = rows if isinstance(rows, slice) else rows.cpu().numpy()
        columns = {name: column[host] for name, column in self.columns.items()}
        return Split(self.x[rows], self.y[rows], mask, columns)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples.

    Attributes
    ----------
    name : str
        Its name, as the user wrote it.
    train, test : Split
        Of equal shapes but for the number of examples.
    num_classes : int
        Number of classes: targets are 0 .. ``num_classes`` - 1. 0 if targets are not classes.
    vocabulary : int, or mapping of str to int
        Number of tokens: inputs are 0 .. ``vocabulary`` - 1. 0 if inputs are not tokens. Of several
        inputs the number of each that is tokens, by name.
    mean, std : tuple of float, or None
        One number per channel of images (after division by 255), or per feature: a batch is
        normalised to ``(x - mean) / std``. None: batches are not normalised.
    source : str
        Where the data was read from.
    found_in : mapping of str to "train" or "test"
        Properties that were found in the data instead of being declared, and the split they were
        found in: ``classes`` and ``vocabulary`` ("train" only if the training examples have more
        of them than the test examples), and ``types`` and ``mean`` of tables.
    feature_names, class_names : tuple of str
        Of a table: names of its features ("age", "sex=f"), and the target's categories in their
        order. Empty for other data.
    columns : tuple of str
        Of a table: what each column became, one text each. Empty for other data.
    public : Tensor ``[2 or more, ...]``, or None
        Public inputs, on which models are tried in place of made-up ones.
    """

    name: str
    train: Split
    test: Split
    num_classes: int = 0
    vocabulary: int | Mapping[str, int] = 0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    source: str = ""
    found_in: Mapping[str, str] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    public: Tensor | NamedTensors | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        for name, train, test in (
            ("x", self.train.x, self.test.x),
            ("y", self.train.y, self.test.y),
        ):
            if by_name(_example_shape, train) != by_name(_example_shape, test):
                shapes = (by_name(lambda one: list(one.shape), values) for values in (train, test))
                raise FedsimError(
                    f"{self.name} has {name} of shape {next(shapes)} for training and "
                    f"{next(shapes)} for testing; only the number of examples may differ."
                )

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; a class without a name is called by its number."""
        return class_labels(self.class_names, self.num_classes)

    def misfit(self, own: Dataset) -> tuple[str, str] | None:
        """Why a model trained on ``own`` cannot take this data set; None if it can.

        Returns
        -------
        pair of str, or None
            What this data set has, and what the model takes instead.
        """
        named = (
            ("features", self.feature_names, own.feature_names),
            ("classes", self.class_names, own.class_names),
        )
        for noun, theirs, known in named:
            if theirs and known and theirs != known:  # as many categories may be other ones
                hint = "data.types declares what columns hold"
                return f"the {noun} {shortened(theirs)}", f"knows {shortened(known)} ({hint})"
        x, y, own_x, own_y = self.train.x, self.train.y, own.train.x, own.train.y
        if self.input_shape != own.input_shape:
            return f"examples of shape {self.input_shape}", f"takes {own.input_shape}"
        if by_name(_kind, x) != by_name(_kind, own_x):
            return f"examples of dtype {by_name(_dtype, x)}", f"takes {by_name(_dtype, own_x)}"
        if isinstance(self.vocabulary, Mapping) and isinstance(own.vocabulary, Mapping):
            for name, tokens in self.vocabulary.items():
                if tokens > own.vocabulary.get(name, tokens):
                    return f"{tokens} tokens of {name}", f"knows {own.vocabulary[name]}"
        if self.num_classes > own.num_classes and own.num_classes:
            return f"{self.num_classes} classes", f"knows {own.num_classes}"
        if y.shape[1:] != own_y.shape[1:] or _kind(y) != _kind(own_y):
            return (
                f"targets of shape {('N', *y.shape[1:])} and dtype {_dtype(y)}",
                f"was trained for {('N', *own_y.shape[1:])} of dtype {_dtype(own_y)}",
            )
        return None

    def checked(self, *, protected: bool) -> Dataset:
        """The data set, after a check that labels and tokens are within its numbers of them.

        `of` checks its arrays itself; this is for a `Dataset` that a user constructed directly, or
        that `ranged` has reduced. Numbers of classes and tokens that were not declared are counted
        again. For a private run (``protected``) nothing depends on the training examples: those
        numbers are counted in the test examples, if they have any, and an example out of that
        range becomes ``unusable`` (see `Split`).

        Raises
        ------
        FedsimError
            If a label or token is negative or too large, unless ``protected``.
        """
        train, test = self.train.arrays(), self.test.arrays()
        about = train, test, f"data {self.name}", protected
        sizes = dict.fromkeys(("y", *input_names(train)), Size(0))
        if self.num_classes:
            declared = 0 if "classes" in self.found_in else self.num_classes
            sizes["y"] = found_size("y", declared, *about)
        if self.vocabulary:
            vocabulary = 0 if "vocabulary" in self.found_in else self.vocabulary
            sizes |= found_vocabulary(vocabulary, *about)
        return replace(
            self,
            train=_split(with_unusable(train, sizes, "train")) if protected else self.train,
            test=_split(with_unusable(test, sizes, "test")) if protected else self.test,
            num_classes=sizes["y"].size,
            vocabulary=_vocabulary(sizes),
            found_in=_found_in(self.found_in, sizes),
        )

    @property
    def input_shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """Shape of one example: ``(C, H, W)``, ``(d,)``, ``(L,)`` for tokens, or any other.

        Of several inputs a dict of their shapes.
        """
        shape: tuple[int, ...] | dict[str, tuple[int, ...]] = by_name(_example_shape, self.train.x)
        return shape

    @property
    def num_outputs(self) -> int:
        """Outputs that a model needs per target: one per class, or per number of a vector."""
        if self.num_classes:
            return self.num_classes
        return int(self.train.y.shape[-1]) if self.train.y.dim() > 1 else 1

    def to(self, device: torch.device | str) -> Dataset:
        """Move every tensor to ``device``; dtypes stay."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def ranged(self, train: str = "", test: str = "") -> Dataset:
        """Keep only these examples of each split, as ``start:stop``; either end may be left out.

        Raises
        ------
        FedsimError
            If a split has no such examples.
        """
        return replace(
            self,
            train=self.train[_range("data.train", train, self.train, self.name)],
            test=self.test[_range("data.test", test, self.test, self.name)],
        )

    @classmethod
    def from_arrays(
        cls,
        name: str,
        train: Mapping[str, Array | Mapping[str, Array]],
        test: Mapping[str, Array | Mapping[str, Array]],
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        classes: int = 0,
        vocabulary: int | Mapping[str, int] = 0,
        layout: AxisOrder = "auto",
        source: str = "",
        protected: bool = False,
        found_in: Mapping[str, str] | None = None,
        feature_names: Sequence[str] = (),
        class_names: Sequence[str] = (),
        columns: Sequence[str] = (),
    ) -> Dataset:
        """Build a data set from plain arrays, after checking them; copied only to convert.

        Parameters
        ----------
        train, test : mapping of name to array
            ``x``, the inputs: uint8 images ``[N, H, W]`` or ``[N, H, W, C]`` (channels last);
            features ``[N, d]``, floating, uint8 or booleans, or floating images laid out like the
            uint8 ones; or integers, which are tokens, ``[N, L]`` say. In place of ``x``, for a
            model of several inputs, an array ``x_NAME`` for each, or a mapping of names to arrays
            as ``x``; they may also be ``[N]``. ``y``, the targets: integers (classes) ``[N]`` or,
            for each position of a sequence, ``[N, L]``; floating numbers ``[N]`` or vectors
            ``[N, K]``; or booleans ``[N, K]``, which are numbers 0 and 1. ``mask``, if there, says
            which targets count: booleans of the shape of ``y``, or of its first dimensions.
            Anything else is a column ``[N]`` of numbers or strings, ``owner`` for one.
        mean, std : sequence of float
            One number per channel or feature (see `Dataset`).
        classes, vocabulary : int
            Declared numbers of classes and tokens; 0 to use the numbers found in the data. Of
            several inputs a mapping may declare the number of each, by name.
        layout : "auto" or "as-is"
            Whether floating ``[N, H, W]`` and ``[N, H, W, C]`` are images; "as-is" leaves the
            dimensions of floating inputs as they are, and those of uint8 images whose channels
            are first.
        source : str
            Name of the data in error messages; empty for ``name``.
        protected : bool
            Whether to accept examples whose numbers are not finite, or whose labels or tokens are
            out of range; see `load`.
        found_in : mapping of str to str
            Other properties found in the examples, each with its split: "train" or "test".
        feature_names, class_names : sequence of str
            Names of the inputs, in order, and of the classes; empty if there are none.
        columns : sequence of str
            Of a table: what each column became.

        Raises
        ------
        FedsimError
            If an array has another dtype or shape, a number that is not finite or a class or token
            out of range, or if the lengths or shapes of the arrays do not match.
        """
        where = source or name
        given = {"train": _flat(train), "test": _flat(test)}
        splits = {
            split: checked_split(split, arrays, layout, where, protected)
            for split, arrays in given.items()
        }
        first, second = splits["train"], splits["test"]
        inputs = input_names(first)
        if inputs != (others := input_names(second)):
            raise FedsimError(
                f"{where} has the inputs {', '.join(inputs)} for training but {', '.join(others)} "
                "for testing; they must be the same."
            )
        for key in (*inputs, "y"):
            a, b = (np.asanyarray(given[split][key]) for split in ("train", "test"))
            if a.shape[1:] != b.shape[1:] or a.dtype.kind != b.dtype.kind:
                raise FedsimError(
                    f"{where} has {key}_train of shape {a.shape} ({a.dtype}) but {key}_test of "
                    f"shape {b.shape} ({b.dtype}); only the number of examples may differ."
                )
        sizes = {
            "y": found_size("y", classes, first, second, where, protected),
            **found_vocabulary(vocabulary, first, second, where, protected),
        }
        if protected:
            first = with_unusable(first, sizes, "train")
            second = with_unusable(second, sizes, "test")
        return cls(
            name,
            _split(first),
            _split(second),
            sizes["y"].size,
            _vocabulary(sizes),
            *statistics(mean, std, first.get("x"), where),
            source=source,
            found_in=_found_in(found_in or {}, sizes),
            feature_names=tuple(feature_names),
            class_names=tuple(class_names),
            columns=tuple(columns),
        )


def class_labels(names: Sequence[str], classes: int) -> tuple[str, ...]:
    """Names of the first ``classes`` classes; their numbers where names are missing."""
    return (*names[:classes], *map(str, range(len(names), classes)))


def _kind(values: Tensor) -> str:
    """Kind of a tensor's numbers; tokens, classes and images may have several dtypes."""
    if values.dtype == torch.uint8 and values.dim() == 4:
        return "image"
    is_number = values.is_floating_point() or values.dtype in (torch.uint8, torch.bool)
    return "number" if is_number else "integer"


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _found_in(others: Mapping[str, str], sizes: Mapping[str, Size]) -> dict[str, str]:
    """Properties that were not declared, and their split: the sizes, and ``others``."""
    found = {k: split for k, split in others.items() if k not in ("classes", "vocabulary")}
    for name, size in sizes.items():
        key = "classes" if name == "y" else "vocabulary"
        if size.found_in and found.get(key) != "train":
            found[key] = size.found_in
    return found


def _vocabulary(sizes: Mapping[str, Size]) -> int | dict[str, int]:
    """Number of tokens, or of each of several inputs that are tokens."""
    if "x" in sizes:
        return sizes["x"].size
    inputs = {name.removeprefix("x_"): size.size for name, size in sizes.items() if name != "y"}
    return {name: size for name, size in inputs.items() if size}


def _example_shape(values: Tensor) -> tuple[int, ...]:
    return tuple(values.shape[1:])


def _flat(arrays: Mapping[str, Array | Mapping[str, Array]]) -> Mapping[str, Array]:
    """Arrays of a split by name, of which several inputs may have been given as a mapping."""
    inputs = arrays.get("x") if isinstance(arrays, Mapping) else None
    if not isinstance(inputs, Mapping):
        return arrays  # type: ignore[return-value]
    flat: dict[str, Any] = {name: array for name, array in arrays.items() if name != "x"}
    return flat | {f"x_{name}": array for name, array in inputs.items()}


def _split(arrays: Mapping[str, Array]) -> Split:
    inputs = input_names(arrays)
    tensors = {
        name: torch.from_numpy(arrays[name]) for name in (*inputs, "y", "mask") if name in arrays
    }
    columns = {name: array for name, array in arrays.items() if name not in tensors}
    by_input = {name.removeprefix("x_"): tensors[name] for name in inputs}
    x = by_input["x"] if inputs == ["x"] else NamedTensors(by_input)
    return Split(x, tensors["y"], tensors.get("mask"), columns)


def _range(key: str, text: str, split: Split, name: str) -> slice:
    if not text:  # all examples, or none
        return slice(None)
    count = len(split)
    written = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", text)
    first, end = (int(written[1] or 0), int(written[2] or count)) if written else (0, 0)
    if not first < end <= count:
        raise FedsimError(
            f"{key} = '{text}'; it must be start:stop with start below stop, within 0:{count}"
            f", the {'training' if key == 'data.train' else 'test'} examples of {name}."
        )
    return slice(first, end)
