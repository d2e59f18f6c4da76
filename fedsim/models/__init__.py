"""Models: those of published papers, small standard ones, and a user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.lazy import lazy_names

if TYPE_CHECKING:
    from fedsim.models.construction import OFFERED, build
    from fedsim.models.hugging_face import give_logits
    from fedsim.models.normalization import (
        fix_normalisation,
        keep_statistics,
        localise,
        refuse_running_statistics,
        running_statistics,
    )
    from fedsim.models.parameters import (
        call_with,
        converted,
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
    "converted",
    "fix_normalisation",
    "freeze",
    "give_logits",
    "keep_statistics",
    "load_weights",
    "localise",
    "matching",
    "refuse_other_than_numbers",
    "refuse_running_statistics",
    "refuse_unusable_parameters",
    "running_statistics",
    "values_of",
]

__getattr__ = lazy_names(__name__, __file__)
