"""The table about evaluation: when, by which clients, and which metrics are released."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedsim.config.privacy_sections import Multiplier
from fedsim.config.tables import ConfigTable, Needs
from fedsim.config.values import split_top_level
from fedsim.settings import Doc, Ge, Gt, Le, Lt, NotAllowedError, Text

Ends = tuple[float, float]

_RANGE = re.compile(r"([^()\s]+) *\(([^(),]+),([^(),]+)\)")


def read_ranges(text: str) -> dict[str, Ends]:
    """Lower and upper ends by names, of ``"loss(0,5), rmse(0,10)"``.

    Raises
    ------
    NotAllowedError
        If it is of another form, or a range is empty.
    """
    return dict(map(_read_range, filter(None, split_top_level(text))))


def _read_range(part: str) -> tuple[str, Ends]:
    written = _RANGE.fullmatch(part)
    with_numbers = written is not None and all(map(_is_number, written.groups()[1:]))
    if written is None or not with_numbers or not float(written[2]) < float(written[3]):
        raise NotAllowedError(
            "names with their ranges, the smaller number first, such as 'loss(0,5), rmse(0,10)'"
        )
    return written[1], (float(written[2]), float(written[3]))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _evenly(value: object) -> str:
    """Ranges in canonical form, so that equal ranges are equal strings."""
    if not isinstance(value, str):
        raise NotAllowedError("a string")
    return ", ".join(
        f"{name}({low:g},{high:g})" for name, (low, high) in read_ranges(value).items()
    )


@dataclass(frozen=True, init=False)
class EvaluateSection(ConfigTable):
    """How often the model is evaluated."""

    table: ClassVar[str] = "evaluate"
    every: Annotated[
        int, Ge(0), Doc("The model is tested every so many rounds, and in the last; 0 for never.")
    ] = 1
    clients_every: Annotated[
        int,
        Ge(0),
        Doc("Clients test it on their own examples every so many rounds; 0 for never."),
    ] = 0
    fraction: Annotated[
        float, Needs("clients-every"), Gt(0), Le(1), Doc("The share of clients that test it.")
    ] = 1.0
    private: Annotated[
        bool,
        Doc(
            "Whether their metrics are released as noisy means over clients: an evaluation is one "
            "more release of a run with client-level privacy, charged to its ledger and budget."
        ),
    ] = False
    multiplier: Annotated[
        Multiplier,
        Needs("private"),
        Doc(
            "Noise multiplier of such a release, whose metrics are bounded together; if unset, "
            "with noise.target-epsilon, it follows from target-share."
        ),
    ] = None
    target_share: Annotated[
        float,
        Needs("private"),
        Gt(0),
        Lt(1),
        Doc(
            "The share of noise.target-epsilon that all these releases would cost alone; the rest "
            "is for the rounds."
        ),
    ] = 0.1
    ranges: Annotated[
        str,
        Needs("private"),
        Text(_evenly, str),
        Doc(
            "Ranges to which metrics are clamped, such as 'loss(0,5)'. Metrics between 0 and 1 "
            "have that range; a metric without a range is not released."
        ),
    ] = ""
    quantiles: Annotated[
        bool,
        Needs("private"),
        Doc("Whether quantiles over clients are released too: p10, median and p90."),
    ] = False
    unprotected: Annotated[
        bool, Doc("Allow metrics of clients' data, without noise, in a private run.")
    ] = False

    def declared_ranges(self) -> dict[str, Ends]:
        """Lower and upper ends by metrics' names."""
        return read_ranges(self.ranges)
