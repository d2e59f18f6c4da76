"""Types of a table's columns: numbers or categories, declared or inferred from the values."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsim.errors import FedsimError

_log = logging.getLogger("fedsim")

MAX_CATEGORIES = 1000
FEW_CATEGORIES = 20

Column = Sequence[Any]  # numbers, or any values that are compared by their text


@dataclass(frozen=True)
class NumberType:
    """A column of numbers, scaled to [0, 1] where a range ``low`` to ``high`` is declared."""

    low: float = math.nan
    high: float = math.nan
    width: ClassVar[int] = 1

    @property
    def is_unscaled(self) -> bool:
        """Whether the numbers are used as they are: no range is declared to scale them from."""
        return math.isnan(self.low)

    def read(self, values: Column, protected: bool) -> npt.NDArray[Any]:
        """Numbers ``[N]``; with a declared range, clipped to it and scaled to [0, 1].

        With ``protected``, a value that is not a number becomes NaN; so does one that is too large
        for float32, if no range is declared.

        Raises
        ------
        UnusableError
            If ``protected`` is false, and a value is not a finite number, or is too large for
            float32 while no range is declared.
        """
        numbers = np.fromiter(map(number, values), dtype=np.float64, count=len(values))
        unusable = ~np.isfinite(numbers)
        if unusable.any() and not protected:
            raise UnusableError(int(unusable.argmax()), "a finite number")
        if not self.is_unscaled:
            return (np.clip(numbers, self.low, self.high) - self.low) / (self.high - self.low)
        too_large = abs(numbers) > np.finfo(np.float32).max
        if too_large.any() and not protected:
            raise UnusableError(int(too_large.argmax()), "from -3.4e38 to 3.4e38, as in float32")
        return np.where(too_large, np.nan, numbers)

    @property
    def words(self) -> str:
        """The type in words."""
        return (
            "number" if self.is_unscaled else f"number scaled from {self.low:.15g}:{self.high:.15g}"
        )

    def features(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The numbers as one feature, ``[N, 1]``."""
        return numbers[:, None]

    def feature_names(self, column: str) -> list[str]:
        """Name of the feature; its range, by which it is scaled, is part of the name."""
        scale = "" if self.is_unscaled else f" scaled from {self.low:.15g}:{self.high:.15g}"
        return [column + scale]


@dataclass(frozen=True)
class CategoryType:
    """A column of categories, declared or found in the data."""

    values: tuple[str, ...] = ()
    is_unscaled: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """Number of features: one for each category."""
        return len(self.values)

    def read(self, values: Column, protected: bool) -> npt.NDArray[Any]:
        """Indices ``[N]`` into ``values``; with ``protected``, -1 for an unknown value.

        Raises
        ------
        UnusableError
            If a value is unknown and ``protected`` is false.
        """
        places = {value: place for place, value in enumerate(self.values)}
        codes = np.fromiter((places.get(str(v).strip(), -1) for v in values), np.int64, len(values))
        if codes.min(initial=0) < 0 and not protected:
            raise UnusableError(int(codes.argmin()), f"one of {', '.join(self.values)}")
        return codes

    @property
    def words(self) -> str:
        """The type in words."""
        return f"category of {self.width:,} values"

    def features(self, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """One-hot rows ``[N, width]``; all zero for an unknown category."""
        one_hot: npt.NDArray[Any] = codes[:, None] == np.arange(self.width)
        return one_hot

    def feature_names(self, column: str) -> list[str]:
        """Names of the features, one for each category."""
        return [f"{column}={value}" for value in self.values]


def declared_types(
    text: str, inputs: Sequence[str], targets: Sequence[str], where: str
) -> dict[str, NumberType | CategoryType]:
    """Parse ``data.types``: the declared types of inputs and targets, by column name.

    Raises
    ------
    FedsimError
        If it cannot be parsed, names a column twice, or names one that is not used.
    """
    types: dict[str, NumberType | CategoryType] = {}
    for pair in _parts(text, ",") if text.strip() else ():
        name, _, kind = (part.strip() for part in pair.partition("="))
        if name not in (*inputs, *targets):
            raise FedsimError(
                f"data.types names '{name}', which is neither an input nor the target of {where}; "
                f"it must be one of {', '.join((*inputs, *targets))}."
            )
        if name in types:
            raise FedsimError(
                f"data.types names '{name}' twice; it must give each column one type."
            )
        types[name] = _declared_type(name, kind)
        if name in targets and isinstance(types[name], NumberType) and kind != "number":
            raise FedsimError(
                f"data.types has '{name}={kind}', a range, for the target, which is not scaled; it "
                "must be number, or categories such as no|yes."
            )
    return types


def types_of_features(
    features: Sequence[str], columns: Collection[str], where: str
) -> dict[str, NumberType | CategoryType]:
    """Types of the columns that became these features, read from the features' names.

    Raises
    ------
    FedsimError
        If a feature is of none of the ``columns``.
    """
    types: dict[str, NumberType | CategoryType] = {}
    categories: dict[str, list[str]] = {}
    for feature in features:
        column, is_scaled, scale = feature.rpartition(" scaled from ")
        if feature in columns:
            types[feature] = NumberType()
        elif is_scaled and column in columns:
            types[column] = NumberType(*map(float, scale.split(":")))
        else:
            of_category = [name for name in columns if feature.startswith(f"{name}=")]
            if not of_category:
                raise FedsimError(
                    f"{where} has the columns {', '.join(columns)}, and none is that of the input "
                    f"'{feature}'; it must have each column that the model was trained on."
                )
            column = max(of_category, key=len)
            categories.setdefault(column, []).append(feature.removeprefix(f"{column}="))
            types[column] = CategoryType(tuple(categories[column]))
    return types


def _declared_type(name: str, kind: str) -> NumberType | CategoryType:
    if kind == "number":
        return NumberType()
    values = tuple(value.strip() for value in _parts(kind, "|"))
    if len(values) > 1 and len(set(values)) == len(values):
        return CategoryType(values)
    low, _, high = kind.partition(":")
    if -math.inf < number(low) < number(high) < math.inf:
        return NumberType(float(low), float(high))
    raise FedsimError(
        f"data.types has '{name}={kind}'; it must be number, a range such as 0:100, or different "
        "categories such as no|yes."
    )


def _parts(text: str, separator: str) -> list[str]:
    """Parts of a text between separators; a separator after a backslash belongs to its part."""
    parts = re.split(rf"(?<!\\){re.escape(separator)}", text)
    return [part.replace(f"\\{separator}", separator) for part in parts]


def found_type(name: str, train: Column, test: Column, where: str) -> NumberType | CategoryType:
    """Infer a column's type: numbers if all values are numbers, otherwise categories.

    Raises
    ------
    FedsimError
        If a value is missing, or there are too many categories.
    """
    is_number = []
    for split, column in (("training", train), ("test", test)):
        for row, value in enumerate(column):
            parsed = math.nan if isinstance(value, bool) else number(value)
            if math.isnan(parsed) and is_missing(value):
                raise FedsimError(
                    f"{where} has no value in column '{name}' of its {split} example {row + 1}; "
                    "fill it in, leave out the row or the column, or declare the column's "
                    "categories (data.types)."
                )
            is_number.append(not math.isnan(parsed))
    if all(is_number):
        return NumberType()
    values = sorted({str(value).strip() for column in (train, test) for value in column})
    if len(values) > MAX_CATEGORIES:
        raise FedsimError(
            f"{where} has {len(values):,} different texts in column '{name}', and at most "
            f"{MAX_CATEGORIES:,} are allowed; name inputs without it, as in data.columns = "
            "'x=age+sex,y=ill'."
        )
    if any(is_number):
        text = [*train, *test][is_number.index(False)]
        _log.warning(
            "%s has numbers in column '%s', but also '%s', so that each of its %s values is a "
            "category: if the column is meant to hold numbers, correct the values that are not.",
            where,
            name,
            text,
            f"{len(values):,}",
        )
    elif not any(math.isnan(number(value.replace(",", "."))) for value in values):
        _log.warning(
            "%s has '%s' in column '%s', and each of its values is a category: if they are "
            "numbers, write decimals after a point, and no commas between thousands.",
            where,
            values[0],
            name,
        )
    return CategoryType(tuple(values))


def is_missing(value: object) -> bool:
    """Whether a value of a file or a data frame is missing."""
    text = str(value).strip()
    return value is None or text in ("", "<NA>", "NaT") or text.lower() == "nan"


def number(value: object) -> float:
    """The value as a float; NaN if it is not a number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
    except OverflowError:  # a Python integer beyond float64's range
        return math.inf


class UnusableError(Exception):
    """Raised for a value that does not fit its column's type."""

    def __init__(self, row: int, wanted: str) -> None:
        self.row, self.wanted = row, wanted
