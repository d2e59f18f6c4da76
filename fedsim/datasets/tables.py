"""Tables of named columns: a CSV file, a folder of ``train.csv`` and ``test.csv``, a data frame.

A table becomes arrays: a column of numbers is one feature, scaled if it has a declared range; a
column of categories is one-hot features. Column types are declared (``types``) or inferred from
the data; if inferred, ``Arrays.found_in`` says so and a private run refuses them.
"""

from __future__ import annotations

import csv
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from fedsim import regular_files
from fedsim.datasets.array_checks import shortened
from fedsim.datasets.arrays import Arrays
from fedsim.datasets.column_types import (
    FEW_CATEGORIES,
    CategoryType,
    Column,
    NumberType,
    UnusableError,
    declared_types,
    found_type,
    is_missing,
    number,
    types_of_features,
)
from fedsim.errors import FedsimError

_log = logging.getLogger("fedsim")

TEST_EVERY = 5
"""Every fifth row of a table without a test table is a test example."""

MANY_CATEGORIES = 100
"""Categories of an input above which a warning asks whether it should be one."""

LARGE_SCALE = 10.0
"""Root mean square of an input above which training at usual learning rates diverges."""

Table = Mapping[str, Column]


def read_table(path: Path, columns: str, types: str, normalize: bool, protected: bool) -> Arrays:
    """Arrays of a CSV file, or of a folder of ``train.csv`` and ``test.csv``.

    The first line names the columns; the separator is a comma, semicolon or tab. For the other
    parameters see `arrays_of_tables`.

    Raises
    ------
    FedsimError
        If a file cannot be read or its lines do not have one value for each column; see also
        `arrays_of_tables`.
    """
    train, test = read_tables(path, protected)
    return arrays_of_tables(train, test, columns, types, normalize, protected, str(path))


def read_tables(path: Path, protected: bool) -> tuple[Table, Table | None]:
    """Columns of a CSV file, or of a folder's ``train.csv`` and ``test.csv``; see `read_csv`."""
    if path.is_dir():
        return read_csv(path / "train.csv", protected), read_csv(path / "test.csv", protected)
    return read_csv(path, protected), None


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
        Columns of equal lengths, as in a data frame. Without ``test``, every fifth row of
        ``train`` is a test example.
    columns : str
        ``"y=income,owner=hospital"``: the target's column, and further columns that are not
        inputs. ``"x=age+sex"`` names the inputs; without it they are all other columns. With
        ``"y=time+died"`` each example has several targets: numbers, or 0 and 1 for the first and
        second of two categories.
    types : str
        Column types: ``"age=0:100,sex=female|male,height=number"``. A column with a range is
        scaled to [0, 1]. A column not named here has numbers if all its values are numbers.
    normalize : bool
        Whether numbers without a declared range are normalised by the mean and the standard
        deviation of the training examples.
    protected : bool
        Whether a run protects the rows. Then every type must be declared, since nothing is taken
        from values. A value that is not of its column's type makes only its own example unusable,
        and no message contains it. An example without a value in a further column has an empty
        text there: it has no owner.
    where : str
        Name of the table in error messages.

    Raises
    ------
    FedsimError
        If a column is missing, a setting cannot be parsed, or a value is not of its column's type;
        with ``protected`` not for a value, but for a type that is not declared.
    """
    roles = _ColumnRoles.parse(columns, train, where, protected)
    declared = declared_types(types, roles.inputs, roles.targets, where)
    if protected:
        _refuse_found(roles, declared, normalize, where)
    if test is None:
        train, test = split_rows(train, where)
    roles.require_examples(train, test, where)
    kinds = {
        name: declared.get(name) or found_type(name, train[name], test[name], where)
        for name in (*roles.inputs, *roles.targets)
    }
    reader = _Reader(roles, kinds, _are_classes(roles, declared, train, test), where, declared)
    reader.require_numbers_or_labels()
    if reader.are_classes:
        reader.warn_of_amounts([*train[roles.targets[0]], *test[roles.targets[0]]])
    plain = {
        ours: plain_columns(train[name], test[name], name, where, protected)
        for ours, name in roles.others.items()
    }
    arrays = reader.arrays(train, "training", protected)
    arrays |= {ours: column for ours, (column, _) in plain.items()}
    found_in = {} if declared.keys() >= kinds.keys() else {"types": "train"}
    mean, std = None, None
    if normalize:
        mean, std = reader.scaling(arrays["x"])
        # Decided by the types alone: what a private run refuses must not depend on the values.
        if any(kinds[name].is_unscaled for name in roles.inputs):
            found_in["mean"] = "train"
    elif not protected:
        reader.warn_of_large_scales(train, arrays["x"])
    if not protected:
        reader.warn_of_identifiers(train)
    target = kinds[roles.targets[0]]
    is_single = len(roles.targets) == 1
    names = target.values if is_single and isinstance(target, CategoryType) else ()
    tests = reader.arrays(test, "test", protected)
    tests |= {ours: column for ours, (_, column) in plain.items()}
    return Arrays(
        arrays,
        tests,
        mean,
        std,
        classes=len(names),
        found_in=found_in,
        feature_names=tuple(
            one for name in roles.inputs for one in kinds[name].feature_names(name)
        ),
        class_names=names,
        columns=reader.descriptions(train, arrays["y"], normalize, protected),
    )


def _are_classes(roles: _ColumnRoles, declared: Collection[str], train: Table, test: Table) -> bool:
    """Whether a single target of undeclared type has whole numbers, which are classes then."""
    if len(roles.targets) > 1 or roles.targets[0] in declared:
        return False
    return all(_are_whole(part[roles.targets[0]]) for part in (train, test))


FOUND = {
    "types": "data.types does not say what every column of {name} holds: in a private run that is "
    "not taken from clients' data; it must be declared for each, as in "
    "'age=0:100,sex=female|male'.",
    "mean": "data.normalize = true takes mean and deviation from the training examples of {name}, "
    "and in a private run nothing is taken from clients' data; it must be false, with a range "
    "declared for each number, as in data.types = 'age=0:100'.",
}
"""Why a private run refuses a property that was found in a table of this name."""


def _refuse_found(
    roles: _ColumnRoles,
    declared: Mapping[str, NumberType | CategoryType],
    normalize: bool,
    where: str,
) -> None:
    """Refuse, before looking at any value, what would be found in the rows of a private run."""
    if not declared.keys() >= {*roles.inputs, *roles.targets}:
        # Names that the user has written; those of a file's first line might be somebody's values.
        lacking = [name for name in roles.declared_names if name not in declared]
        of_which = f" It lacks {shortened(lacking)}." if lacking else ""
        raise FedsimError(FOUND["types"].format(name=where) + of_which)
    if normalize and any(declared[name].is_unscaled for name in roles.inputs):
        raise FedsimError(FOUND["mean"].format(name=where))


def inputs_of_table(table: Table, features: Sequence[str], where: str) -> npt.NDArray[Any]:
    """Inputs ``[N, d]`` of a table's rows, as a data set with these features encodes them.

    Raises
    ------
    FedsimError
        If a column is missing, or a value is not of its column's type.
    """
    types = types_of_features(features, table, where)
    reader = _Reader(_ColumnRoles(tuple(types), (), {}), types, are_classes=False, where=where)
    return reader.inputs(table, "input", tolerant=False)


@dataclass(frozen=True)
class _ColumnRoles:
    """Which columns are the inputs and the targets, and the names of further columns.

    Attributes
    ----------
    inputs : tuple of str
        Names of the input columns.
    targets : tuple of str
        Names of the targets' columns.
    others : mapping of str to str
        Further columns: their name in fedsim (``owner``) to their name in the table.
    declared_names : tuple of str
        Those of the inputs and targets that the user has named.
    """

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    others: Mapping[str, str]
    declared_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *self.targets, *self.others.values())

    @classmethod
    def parse(cls, columns: str, table: Table, where: str, protected: bool) -> _ColumnRoles:
        pairs = [pair.partition("=") for pair in columns.split(",") if pair.strip()]
        named = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
        if "y" not in named or len(named) < len(pairs) or not all((*named, *named.values())):
            raise FedsimError(
                f"data.columns is '{columns}'; for {where} it must name the target's column, and "
                "may name others, each once, such as 'y=income,owner=hospital,x=age+sex'."
            )
        targets = [name.strip() for name in named.pop("y").split("+")]
        inputs = named.pop("x", "")
        others = [name for name in table if name not in (*targets, *named.values())]
        names = [name.strip() for name in inputs.split("+")] if inputs else others
        own = (*targets, *(names if inputs else ()))
        roles = cls(tuple(names), tuple(targets), named, own)
        for name, times in Counter((*names, *targets)).items():
            if times > 1:
                raise FedsimError(
                    f"data.columns is '{columns}'; '{name}' must be the target of {where} or an "
                    "input, and be named once."
                )
        for name in roles.names:
            if name not in table:
                # Without a line of names a file begins with somebody's values.
                known = "others" if protected else f"the columns {', '.join(map(str, table))}"
                raise FedsimError(
                    f"data.columns names '{name}', and {where} has {known}; it must be one of them."
                )
        if not roles.inputs:
            raise FedsimError(f"{where} has no column left for inputs; it must have one.")
        return roles

    def require_examples(self, train: Table, test: Table, where: str) -> None:
        for name in self.names:
            if name not in test:
                raise FedsimError(f"{where} has no column '{name}' among its test examples.")
        for split, part in (("training", train), ("test", test)):
            if not len(part[self.targets[0]]):
                raise FedsimError(f"{where} has no {split} examples; it must have some.")


@dataclass(frozen=True)
class _Reader:
    """Converts tables to arrays, given the types of their columns."""

    roles: _ColumnRoles
    types: Mapping[str, NumberType | CategoryType]
    are_classes: bool  # whether the target's numbers are class labels
    where: str
    declared: Collection[str] = ()  # columns whose types are declared

    def arrays(self, table: Table, split: str, tolerant: bool) -> dict[str, npt.NDArray[Any]]:
        """Arrays ``x`` [N, d] and ``y`` [N], or [N, K] of several targets, of a table."""
        if len(self.roles.targets) > 1:
            labels = [self._label(name, table, split, tolerant) for name in self.roles.targets]
            return {"x": self.inputs(table, split, tolerant), "y": np.stack(labels, axis=1)}
        (name,) = self.roles.targets
        target = self._read(name, table, split, tolerant)
        if self.are_classes:
            target = np.where(np.isnan(target), -1, target).astype(np.int64)
            if target.min(initial=0) < 0 and not tolerant:
                raise FedsimError(
                    f"{self.where} has the class {target.min()} in column '{name}'; "
                    "classes that are numbers must be from 0 up, unless they are declared as "
                    f"categories, such as data.types = '{name}=-1|1'."
                )
        elif isinstance(self.types[name], NumberType):
            target = target.astype(np.float32)
        return {"x": self.inputs(table, split, tolerant), "y": target}

    def _label(
        self, name: str, table: Table, split: str, tolerant: bool
    ) -> npt.NDArray[np.float32]:
        """One of several targets as numbers ``[N]``: of a category 0 or 1, NaN if it is unknown."""
        values = self._read(name, table, split, tolerant).astype(np.float32)
        is_category = isinstance(self.types[name], CategoryType)
        return np.where(values < 0, np.nan, values) if is_category else values

    def require_numbers_or_labels(self) -> None:
        """Refuse, among several targets, a category that is no label.

        Raises
        ------
        FedsimError
        """
        for name in self.roles.targets if len(self.roles.targets) > 1 else ():
            kind = self.types[name]
            if isinstance(kind, CategoryType) and kind.width != 2:
                raise FedsimError(
                    f"data.columns names several targets of {self.where}, and '{name}' has "
                    f"{kind.width:,} categories; each must be a number, or have two categories, as "
                    f"in data.types = '{name}=no|yes'."
                )

    def inputs(self, table: Table, split: str, tolerant: bool) -> npt.NDArray[Any]:
        """Array ``x`` [N, d] of a table."""
        features = [
            kind.features(self._read(name, table, split, tolerant))
            for name, kind in self._input_types()
        ]
        return np.concatenate(features, axis=1).astype(np.float32)

    def scaling(self, x: npt.NDArray[Any]) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of numbers without a range; 0 and 1 for other features."""
        unscaled = np.concatenate(
            [[kind.is_unscaled] * kind.width for _, kind in self._input_types()]
        )
        mean = np.where(unscaled, x.mean(0, dtype=np.float64), 0.0)
        std = np.where(unscaled, x.std(0, dtype=np.float64), 1.0)
        return mean.tolist(), np.where(std > 0, std, 1.0).tolist()

    def descriptions(
        self, table: Table, targets: npt.NDArray[Any], normalize: bool, protected: bool
    ) -> tuple[str, ...]:
        """What each column became, without anything that was found in protected rows."""
        others = {theirs: ours for ours, theirs in self.roles.others.items()}
        lines = []
        for name in table:
            if name in self.roles.targets:
                found = not protected and self.are_classes
                classes = f"class of {int(targets.max(initial=0)) + 1:,}" if found else ""
                words = f"target, {classes or self._target_words(name)}"
            elif name in self.roles.inputs:
                kind = self.types[name]
                words = kind.words + (", normalised" if normalize and kind.is_unscaled else "")
            else:
                words = others.get(name, "ignored")
            lines.append(f"{name}: {words}")
        return tuple(lines)

    def _target_words(self, name: str) -> str:
        kind = self.types[name]
        if len(self.roles.targets) > 1 and isinstance(kind, CategoryType):
            return f"0 for {kind.values[0]} and 1 for {kind.values[1]}"
        return kind.words

    def warn_of_identifiers(self, table: Table) -> None:
        """Warn of inputs that tell rows apart, or dates: numbers and categories cannot learn them.

        An identifier has a value of its own in every row, and is whole or a text.
        """
        suspects = {
            name: what
            for name in self.roles.inputs
            if name not in self.declared and (what := _no_input(table[name], self.types[name]))
        }
        if suspects:
            inputs = "+".join(name for name in self.roles.inputs if name not in suspects) or "..."
            _log.warning(
                "%s has %s, which are inputs now: leave them out by data.columns = '%s', or "
                "declare them by data.types.",
                self.where,
                " and ".join(f"{what} in column '{name}'" for name, what in suspects.items()),
                ",".join(
                    [f"y={'+'.join(self.roles.targets)}", f"x={inputs}"]
                    + [f"{ours}={theirs}" for ours, theirs in self.roles.others.items()]
                ),
            )

    def warn_of_amounts(self, targets: Column) -> None:
        """Warn if classes look like amounts: there are many, and some have no example."""
        classes = int(max(map(number, targets))) + 1
        if classes > max(FEW_CATEGORIES, len(set(map(number, targets)))):
            (name,) = self.roles.targets
            _log.warning(
                "%s has whole numbers up to %s in column '%s', so that the target is one of %s "
                "classes: if they are amounts, declare them by data.types = '%s=number', with "
                "task.loss = 'squared-error' and task.metrics = 'rmse', say.",
                self.where,
                f"{classes - 1:,}",
                name,
                f"{classes:,}",
                name,
            )

    def warn_of_large_scales(self, table: Table, x: npt.NDArray[Any]) -> None:
        """Warn of numbers so large that steps of a usual size diverge."""
        start, unscaled = 0, []
        for name, kind in self._input_types():
            values = x[:, start].astype(np.float64)
            is_large = kind.is_unscaled and len(x) and np.sqrt(np.mean(values**2)) > LARGE_SCALE
            if is_large and not _no_input(table[name], kind):
                unscaled.append((name, values.min(), values.max()))
            start += kind.width
        if unscaled:
            name, low, high = unscaled[0]
            _log.warning(
                "%s has numbers of a typical size above %g in %s, on which usual steps diverge: "
                "set data.normalize = true (normalize=True of from_table), or declare a range, as "
                "in data.types = '%s=%g:%g'.",
                self.where,
                LARGE_SCALE,
                ", ".join(name for name, _, _ in unscaled),
                name,
                low,
                high if high > low else low + 1,
            )

    def _input_types(self) -> list[tuple[str, NumberType | CategoryType]]:
        return [(name, self.types[name]) for name in self.roles.inputs]

    def _read(self, name: str, table: Table, split: str, tolerant: bool) -> npt.NDArray[Any]:
        values = table[name]
        try:
            return self.types[name].read(values, tolerant)
        except UnusableError as error:
            raise FedsimError(
                f"{self.where} has '{values[error.row]}' in column '{name}' of its {split} example "
                f"{error.row + 1}; it must be {error.wanted}."
            ) from None


_DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}")


def _no_input(values: Column, kind: NumberType | CategoryType) -> str:
    """What a column holds that is hardly an input; empty for others, and for few rows."""
    if len(values) <= FEW_CATEGORIES:
        return ""
    is_text = isinstance(kind, CategoryType)
    if is_text and all(_DATE.match(str(value).strip()) for value in values):
        return "dates"
    whole = is_text or _are_whole(values)
    if whole and len({str(value) for value in values}) == len(values):
        return "a value of its own in every row (an identifier?)"
    return f"{kind.width:,} categories" if is_text and kind.width > MANY_CATEGORIES else ""


def _are_whole(values: Column) -> bool:
    return all(number(value).is_integer() for value in values)


def plain_columns(
    train: Column, test: Column, name: str, where: str, protected: bool
) -> list[npt.NDArray[Any]]:
    """Both parts of a column as integers, if all their values are integers; otherwise as texts.

    With ``protected`` a missing value is an empty text, and all spellings of a number are one.

    Raises
    ------
    FedsimError
        Unless ``protected``, if a value is missing (all such rows would be one owner's), or if one
        number is written in two ways (which may or may not mean the same owner).
    """
    texts = [
        _texts(column, f"in column '{name}' of its {split} example", where, protected)
        for split, column in (("training", train), ("test", test))
    ]
    distinct = dict.fromkeys(chain(*texts))
    if protected:
        one_spelling = {text: _one_spelling(text) for text in distinct}
        texts = [[one_spelling[text] for text in part] for part in texts]
    else:
        _require_one_spelling(distinct, name, where)
    try:
        return [np.fromiter(map(int, part), np.int64, len(part)) for part in texts]
    except (ValueError, OverflowError):
        # Not arrays of fixed width, in which the longest text would determine every row's memory.
        return [np.array(part, dtype=object) for part in texts]


def _texts(column: Column, place: str, where: str, protected: bool) -> list[str]:
    """The values as texts; empty for missing ones, which are refused unless ``protected``."""
    texts = []
    for row, value in enumerate(column):
        is_text = isinstance(value, str) and bool(value.strip())
        if is_missing(value) and not is_text and not protected:
            raise FedsimError(
                f"{where} has no value {place} {row + 1}; fill it in, or leave out the row."
            )
        texts.append("" if is_missing(value) and not is_text else str(value).strip())
    return texts


def _require_one_spelling(texts: Iterable[str], name: str, where: str) -> None:
    written: dict[float | str, str] = {}
    for text in sorted(texts):
        if (other := written.setdefault(_number_or_text(text), text)) != text:
            raise FedsimError(
                f"{where} has '{other}' and '{text}' in column '{name}', which are one number; "
                "each must be written in one way."
            )


def _number_or_text(text: str) -> float | str:
    """The number that a text spells, of any length; the text itself if it is not a number."""
    try:
        return int(text)
    except ValueError:
        value = number(text)
        return value if math.isfinite(value) else text


def _one_spelling(text: str) -> str:
    """The text, or the shortest spelling of the number that it spells: 7 for 007 and 7.0."""
    value = _number_or_text(text)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def split_rows(table: Table, where: str) -> tuple[Table, Table]:
    """Split a table into training and test rows: every fifth is a test row."""
    columns = {name: np.asarray(column, dtype=object) for name, column in table.items()}
    count = len(next(iter(columns.values()), ()))
    if count < TEST_EVERY:
        raise FedsimError(
            f"{where} has {count} rows; it must have {TEST_EVERY} or more, as every fifth is a "
            "test example, or come with a table of test examples."
        )
    is_test = np.arange(count) % TEST_EVERY == TEST_EVERY - 1
    parts = [{name: c[own] for name, c in columns.items()} for own in (~is_test, is_test)]
    return parts[0], parts[1]


def read_csv(path: Path, protected: bool = False) -> dict[str, list[str]]:
    """Columns of a CSV file by name, as strings.

    With ``protected`` no row is refused: one that does not have a value for each column is a row of
    empty values, bytes that are not UTF-8 are replaced, and if a quotation mark is misplaced, each
    line is a row.
    """
    errors = "replace" if protected else "strict"
    try:
        with open(
            path, encoding="utf-8-sig", errors=errors, newline="", opener=regular_files.opener
        ) as file:
            header = file.readline()
            separator = max(",;\t", key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
            if not all(names) or len(set(names)) < len(names) or not names:
                start = "has none" if protected else f"begins with '{header.strip()[:80]}'"
                raise FedsimError(
                    f"{path} {start}; its first line must name the columns, each by a different "
                    "name (in pandas, to_csv(index=False))."
                )
            columns = _columns(file, separator, len(names), path, protected)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedsimError(
            f"{path} could not be read ({error}); it must be a table in UTF-8 whose first line "
            "names the columns."
        ) from None
    return dict(zip(names, columns, strict=True))


def _columns(
    file: TextIO, separator: str, count: int, path: Path, protected: bool
) -> list[list[str]]:
    """Values of ``count`` columns, from the file's next line on."""
    columns: list[list[str]] = [[] for _ in range(count)]
    known: dict[str, str] = {}  # interns equal strings, to save memory
    first = file.tell()
    rows = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
    try:
        for row in filter(None, rows):  # an empty line is no row
            if len(row) != count and not protected:
                raise FedsimError(
                    f"{path} has {len(row)} values in line {rows.line_num + 1}; there must be one "
                    f"for each of its {count} columns."
                )
            _append(row, columns, known)
    except csv.Error:
        if not protected:
            raise
        file.seek(first)
        columns = [[] for _ in range(count)]
        for row in _lines(file, separator):
            _append(row, columns, known)
    return columns


def _append(row: Sequence[str], columns: Sequence[list[str]], known: dict[str, str]) -> None:
    """Append a row to the columns; one of another length has no values."""
    values = row if len(row) == len(columns) else [""] * len(columns)
    for column, value in zip(columns, values, strict=True):
        column.append(known.setdefault(value, value))


def _lines(file: TextIO, separator: str) -> Iterator[list[str]]:
    """Values of each line that is not empty; none for a line that cannot be split."""
    for line in file:
        if line.strip("\r\n"):
            try:
                yield next(csv.reader([line], delimiter=separator, skipinitialspace=True))
            except csv.Error:
                yield []
