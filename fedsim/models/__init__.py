"""Models: those of published papers, small standard ones, and a user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import names_of

if TYPE_CHECKING:
    from fedsim.models.construction import OFFERED, build
    from fedsim.models.normalization import (
        fix_normalisation,
        localise,
        refuse_running_statistics,
        statistics_of,
    )
    from fedsim.models.parameters import (
        call_with,
        freeze,
        load_weights,
        matching,
        refuse_other_than_numbers,
        refuse_unusable_parameters,
        values_of,
    )

__all__ = [
    "OFFERED",
    "build",
    "call_with",
    "fix_normalisation",
    "freeze",
    "load_weights",
    "localise",
    "matching",
    "refuse_other_than_numbers",
    "refuse_running_statistics",
    "refuse_unusable_parameters",
    "statistics_of",
    "values_of",
]

__getattr__ = names_of(__name__, __file__)
