"""Tables of named columns: a CSV file, a folder of ``train.csv`` and ``test.csv``, a data frame.

A table becomes arrays: numbers are features as they stand, or scaled; a category becomes one
feature for each of its values. What the columns hold is declared (``types``), or found in the data
and then named in ``Arrays.found_in``, so that a private run can refuse it.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsim import regular_files
from fedsim.datasets.arrays import Arrays
from fedsim.errors import FedsimError

_log = logging.getLogger("fedsim")

TEST_EVERY = 5
"""Of a table that comes in one piece, every fifth row is a test example."""

MOST_CATEGORIES = 1000
WILD = 10.0
"""A larger root mean square of an input makes steps of a usual size diverge."""

Column = Sequence[Any]  # of numbers, or of anything that is written as text
Table = Mapping[str, Column]


@dataclass(frozen=True)
class NumberType:
    """A column of numbers, scaled to [0, 1] where a range ``low`` to ``high`` is declared."""

    low: float = math.nan
    high: float = math.nan
    width: ClassVar[int] = 1

    @property
    def free(self) -> bool:
        """Whether no range is declared."""
        return math.isnan(self.low)

    def read(self, values: Column, protected: bool) -> npt.NDArray[Any]:
        """Numbers ``[N]``; one outside its range counts as the nearest end.

        With ``protected`` a value that is none is NaN.
        """
        numbers = np.fromiter(map(_number, values), dtype=np.float64, count=len(values))
        unusable = ~np.isfinite(numbers)
        if unusable.any() and not protected:
            raise _UnusableError(int(unusable.argmax()), "a finite number")
        if not self.free:
            numbers = (np.clip(numbers, self.low, self.high) - self.low) / (self.high - self.low)
        return numbers

    def features(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``[N, width]``: the numbers."""
        return numbers[:, None]


@dataclass(frozen=True)
class CategoryType:
    """A column of categories; of those found in the data where none are declared."""

    values: tuple[str, ...] = ()
    free: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """One feature for each category."""
        return len(self.values)

    def read(self, values: Column, protected: bool) -> npt.NDArray[Any]:
        """Positions ``[N]`` among ``values``; with ``protected`` -1 for another value."""
        places = {value: place for place, value in enumerate(self.values)}
        codes = np.fromiter((places.get(str(v), -1) for v in values), np.int64, len(values))
        if codes.min(initial=0) < 0 and not protected:
            raise _UnusableError(int(codes.argmin()), f"one of {', '.join(self.values)}")
        return codes

    def features(self, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``[N, width]``: one-hot; all zero where a category is none of the column's."""
        one_hot: npt.NDArray[Any] = codes[:, None] == np.arange(self.width)
        return one_hot


def read_table(path: Path, columns: str, types: str, normalize: bool, protected: bool) -> Arrays:
    """Arrays of a CSV file, or of a folder of ``train.csv`` and ``test.csv``.

    The first line names the columns, which commas, semicolons or tabs separate. The other
    parameters are those of `arrays_of_tables`.

    Raises
    ------
    FedsimError
        If a file cannot be read or its lines do not have one value for each column, or as
        `arrays_of_tables` does.
    """
    if path.is_dir():
        train, test = (_read_csv(path / f"{split}.csv") for split in ("train", "test"))
    else:
        train, test = _read_csv(path), None
    return arrays_of_tables(train, test, columns, types, normalize, protected, str(path))


def is_table(path: Path) -> bool:
    """Whether a path is a CSV file, or a folder of ``train.csv`` and ``test.csv``."""
    if path.is_dir():
        return (path / "train.csv").is_file() and (path / "test.csv").is_file()
    return path.suffix.lower() == ".csv"


def arrays_of_tables(
    train: Table,
    test: Table | None,
    columns: str,
    types: str,
    normalize: bool = False,
    protected: bool = False,
    where: str = "the table",
) -> Arrays:
    """Arrays of tables, for training and for testing.

    Parameters
    ----------
    train, test : mapping of name to column
        Columns of equal lengths, such as a data frame has. Without ``test`` every fifth row of
        ``train`` is a test example.
    columns : str
        ``"y=income,owner=hospital"``: the target's column, and any others that are no inputs.
        ``"x=age+sex"`` names the inputs; without it they are all columns that are not named.
    types : str
        What columns hold: ``"age=0:100,sex=female|male,height=number"``. A range is
        scaled to [0, 1]. A column that is not named is a number if all its training values are.
    normalize : bool
        Whether numbers without a declared range are normalised by the mean and the standard
        deviation of the training examples.
    protected : bool
        Whether a training value that cannot be is no error, but makes its example unusable.

    Raises
    ------
    FedsimError
        If a column lacks, a value is not of its column's type, or a setting cannot be read.
    """
    roles = _Roles.parse(columns, train, where)
    declared = _declared_types(types, roles, where)
    if test is None:
        train, test = _split_rows(train)
    for name in roles.names:
        if name not in test:
            raise FedsimError(f"{where} has no column '{name}' among its test examples.")
    kinds = {
        name: declared.get(name) or _found_type(name, train[name], test[name], where)
        for name in (*roles.inputs, roles.target)
    }
    columns_of_target = (train[roles.target], test[roles.target])
    are_classes = roles.target not in declared and all(map(_are_whole, columns_of_target))
    reader = _Reader(roles, kinds, are_classes, where)
    arrays = reader.arrays(train, "training", protected)
    found_in = {} if declared.keys() >= kinds.keys() else {"types": "train"}
    mean, std = None, None
    if normalize:
        mean, std = reader.scaling(arrays["x"])
        # Whatever the numbers happen to be: what is refused must not depend on them.
        if any(kinds[name].free for name in roles.inputs):
            found_in["mean"] = "train"
    elif not protected:
        reader.warn_of_wild_scales(arrays["x"])
    target = kinds[roles.target]
    classes = len(target.values) if isinstance(target, CategoryType) else 0
    tests = reader.arrays(test, "test", False)
    return Arrays(arrays, tests, mean, std, classes=classes, found_in=found_in)


@dataclass(frozen=True)
class _Roles:
    """Which columns are inputs, which is the target, and what others are called."""

    inputs: tuple[str, ...]
    target: str
    others: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, self.target, *self.others.values())

    @classmethod
    def parse(cls, columns: str, table: Table, where: str) -> _Roles:
        pairs = [pair.partition("=") for pair in columns.split(",") if pair.strip()]
        named = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
        if "y" not in named or not all(named) or not all(named.values()):
            raise FedsimError(
                f"data.columns is '{columns}'; for {where} it must name the target's column, and "
                "may name others, such as 'y=income,owner=hospital,x=age+sex'."
            )
        target, inputs = named.pop("y"), named.pop("x", "")
        others = [name for name in table if name not in (target, *named.values())]
        roles = cls(tuple(inputs.split("+")) if inputs else tuple(others), target, named)
        for name in roles.names:
            if name not in table:
                raise FedsimError(
                    f"data.columns names '{name}', and {where} has the columns "
                    f"{', '.join(map(str, table))}; it must be one of them."
                )
        if not roles.inputs:
            raise FedsimError(f"{where} has no column left for inputs; it must have one.")
        return roles


@dataclass(frozen=True)
class _Reader:
    """Reads tables whose columns are of known types."""

    roles: _Roles
    types: Mapping[str, NumberType | CategoryType]
    are_classes: bool  # the target's whole numbers
    where: str

    def arrays(self, table: Table, split: str, tolerant: bool) -> dict[str, npt.NDArray[Any]]:
        """``x`` [N, d], ``y`` [N] and other columns [N]."""
        features = [
            kind.features(self._read(name, table, split, tolerant))
            for name, kind in self._input_types()
        ]
        target = self._read(self.roles.target, table, split, tolerant)
        if self.are_classes:
            target = np.where(np.isnan(target), -1, target).astype(np.int64)
        elif isinstance(self.types[self.roles.target], NumberType):
            target = target.astype(np.float32)
        x = np.concatenate(features, axis=1).astype(np.float32)
        others = {ours: _plain_column(table[name]) for ours, name in self.roles.others.items()}
        return {"x": x, "y": target, **others}

    def scaling(self, x: npt.NDArray[Any]) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of numbers without a range; 0 and 1 of other features."""
        free = np.concatenate([[kind.free] * kind.width for _, kind in self._input_types()])
        mean = np.where(free, x.mean(0, dtype=np.float64), 0.0)
        std = np.where(free, x.std(0, dtype=np.float64), 1.0)
        return mean.tolist(), np.where(std > 0, std, 1.0).tolist()

    def warn_of_wild_scales(self, x: npt.NDArray[Any]) -> None:
        """Warn of numbers so large that steps of a usual size diverge."""
        start, wild = 0, []
        for name, kind in self._input_types():
            values = x[:, start].astype(np.float64)
            if kind.free and len(x) and np.sqrt(np.mean(values**2)) > WILD:
                wild.append((name, values.min(), values.max()))
            start += kind.width
        if wild:
            name, low, high = wild[0]
            _log.warning(
                "%s has numbers of a typical size above %g in %s, on which usual steps diverge: "
                "set data.normalize = true, or declare a range, as in data.types = '%s=%g:%g'.",
                self.where, WILD, ", ".join(name for name, _, _ in wild), name,
                low, high if high > low else low + 1,
            )  # fmt: skip

    def _input_types(self) -> list[tuple[str, NumberType | CategoryType]]:
        return [(name, self.types[name]) for name in self.roles.inputs]

    def _read(self, name: str, table: Table, split: str, tolerant: bool) -> npt.NDArray[Any]:
        values = table[name]
        try:
            return self.types[name].read(values, tolerant)
        except _UnusableError as error:
            raise FedsimError(
                f"{self.where} has '{values[error.row]}' in column '{name}' of its {split} example "
                f"{error.row + 1}; it must be {error.wanted}."
            ) from None


class _UnusableError(Exception):
    """A value that its column's type does not have."""

    def __init__(self, row: int, wanted: str) -> None:
        self.row, self.wanted = row, wanted


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _declared_types(text: str, roles: _Roles, where: str) -> dict[str, NumberType | CategoryType]:
    types: dict[str, NumberType | CategoryType] = {}
    for pair in text.split(",") if text.strip() else ():
        name, _, said = (part.strip() for part in pair.partition("="))
        if name not in (*roles.inputs, roles.target):
            raise FedsimError(
                f"data.types names '{name}', which is neither an input nor the target of {where}; "
                f"it must be one of {', '.join((*roles.inputs, roles.target))}."
            )
        types[name] = _declared_type(name, said)
        if name == roles.target and isinstance(types[name], NumberType) and said != "number":
            raise FedsimError(
                f"data.types has '{name}={said}', a range, for the target, which is not scaled; it "
                "must be number, or categories such as no|yes."
            )
    return types


def _declared_type(name: str, said: str) -> NumberType | CategoryType:
    if said == "number":
        return NumberType()
    if "|" in said and len(set(values := said.split("|"))) == len(values):
        return CategoryType(tuple(value.strip() for value in values))
    low, _, high = said.partition(":")
    if -math.inf < _number(low) < _number(high) < math.inf:
        return NumberType(float(low), float(high))
    raise FedsimError(
        f"data.types has '{name}={said}'; it must be number, a range such as 0:100, or different "
        "categories such as no|yes."
    )


def _found_type(name: str, train: Column, test: Column, where: str) -> NumberType | CategoryType:
    """Numbers where all values are; otherwise as many categories as occur."""
    if all(not math.isnan(_number(value)) for column in (train, test) for value in column):
        return NumberType()
    values = sorted({str(value) for column in (train, test) for value in column})
    if len(values) > MOST_CATEGORIES:
        raise FedsimError(
            f"{where} has {len(values):,} different texts in column '{name}', and there may be "
            f"{MOST_CATEGORIES:,}; name inputs without it, as in data.columns = 'x=age+sex,y=ill'."
        )
    return CategoryType(tuple(values))


def _are_whole(values: Column) -> bool:
    return all(_number(value).is_integer() for value in values)


def _plain_column(values: Column) -> npt.NDArray[Any]:
    """Integers where all are; otherwise texts."""
    array = np.asarray(values)
    if array.dtype.kind in "iub":
        return array
    texts = np.array([str(value) for value in values])
    try:
        return texts.astype(np.int64)
    except ValueError:
        return texts


def _split_rows(table: Table) -> tuple[Table, Table]:
    """Training and test rows of one table: every fifth is a test example."""
    columns = {name: np.asarray(column, dtype=object) for name, column in table.items()}
    count = len(next(iter(columns.values()), ()))
    is_test = np.arange(count) % TEST_EVERY == TEST_EVERY - 1
    parts = [{name: c[own] for name, c in columns.items()} for own in (~is_test, is_test)]
    return parts[0], parts[1]


def _read_csv(path: Path) -> dict[str, list[str]]:
    """Columns of text."""
    try:
        with open(path, encoding="utf-8-sig", newline="", opener=regular_files.opener) as file:
            header = file.readline()
            separator = max(",;\t", key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
            if not all(names) or len(set(names)) < len(names) or not names:
                raise FedsimError(
                    f"{path} begins with '{header.strip()[:80]}'; its first line must name the "
                    "columns, each by another name."
                )
            rows = csv.reader(file, delimiter=separator, strict=True)
            columns: list[list[str]] = [[] for _ in names]
            known: dict[str, str] = {}  # equal texts are one object
            for row in rows:
                if len(row) != len(names):
                    raise FedsimError(
                        f"{path} has {len(row)} values in line {rows.line_num + 1}; there must be "
                        f"one for each of its {len(names)} columns."
                    )
                for column, value in zip(columns, row, strict=True):
                    column.append(known.setdefault(value, value))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedsimError(
            f"{path} could not be read ({error}); it must be a table in UTF-8 whose first line "
            "names the columns."
        ) from None
    if not columns[0]:
        raise FedsimError(f"{path} has no rows; it must have a line for each example.")
    return dict(zip(names, columns, strict=True))
