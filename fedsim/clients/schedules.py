"""Schedules of the learning rate over rounds, or over a client's local steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from fedsim.arguments import check_arguments
from fedsim.clients.base import Step
from fedsim.errors import FedsimError
from fedsim.settings import MAX_FLOAT, Doc, Text, check_settings

Shape = Literal["constant", "inverse", "exponential", "cosine", "staircase", "warm-up"]
Over = Literal["round", "step"]


@dataclass(frozen=True)
class Schedule:
    """Factor of a learning rate, as a function of the round or the local step.

    With ``t`` the number of earlier rounds, or of earlier local steps in the round:

    - ``constant``: 1
    - ``inverse``: ``1 / (1 + decay t)``
    - ``exponential``: ``decay^t``
    - ``cosine``: ``(1 + cos(pi min(t, length) / length)) / 2``
    - ``staircase``: ``decay^floor(t / length)``
    - ``warm-up``: ``min((t + 1) / length, 1)``

    Parameters
    ----------
    shape : str
        One of the above.
    decay : float
    length : int
    over : "round" or "step"
    """

    shape: Shape = "constant"
    decay: float = 1.0
    length: int = 1
    over: Over = "round"

    def __post_init__(self) -> None:
        check_settings(self, "schedule's ")
        if not 0 <= self.decay < math.inf:
            raise FedsimError(f"schedule's decay is {self.decay}; it must be zero or positive.")
        min_length = 2 if self.shape == "cosine" else 1  # after its length a cosine is zero
        if self.length < min_length:
            raise FedsimError(
                f"schedule's length is {self.length}; for '{self.shape}' it must be at least "
                f"{min_length}."
            )

    def __call__(self, at: Step) -> float:
        """The factor at this step.

        Raises
        ------
        FedsimError
            If it is too large: with a ``decay`` above 1 the factor grows without a limit.
        """
        t = at.index if self.over == "step" else max(at.round - 1, 0)
        if self.shape == "inverse":
            return 1.0 / (1.0 + self.decay * t)
        if self.shape == "cosine":
            return (1.0 + math.cos(math.pi * min(t, self.length) / self.length)) / 2.0
        if self.shape == "warm-up":
            return min((t + 1) / self.length, 1.0)
        if self.shape == "constant":
            return 1.0
        times = t // self.length if self.shape == "staircase" else t
        # Compared by logarithms, since a power above all floats raises an OverflowError.
        if self.decay > 1 and times * math.log(self.decay) > math.log(MAX_FLOAT):
            raise FedsimError(
                f"schedule '{self}' is above {MAX_FLOAT:g} at {self.over} {t + 1}; its decay "
                "must be lower."
            )
        return float(self.decay**times)

    def __str__(self) -> str:
        """Text that `parse` reads."""
        if self == CONSTANT:
            return ""
        settings = vars(self).items()
        changed = [f"{k}={v}" for k, v in settings if k != "shape" and v != getattr(CONSTANT, k)]
        return f"{self.shape}({', '.join(changed)})" if changed else self.shape

    @classmethod
    @check_arguments
    def parse(cls, text: str) -> Schedule:
        """Read a schedule from a config: ``"inverse(decay=0.1, over=step)"``, or empty.

        Raises
        ------
        FedsimError
            If the text is malformed.
        """
        if not text.strip():
            return cls()
        match = re.fullmatch(r"([^()]*)(?:\(([^()]*)\))?", text.strip())
        if match is None:
            raise FedsimError(f"schedule '{text}' must be of the form shape, or shape(key=value).")
        shape, arguments = match[1], match[2] or ""
        values: dict[str, float | int | str] = {}
        for setting in filter(None, (piece.strip() for piece in arguments.split(","))):
            key, _, value = (side.strip() for side in setting.partition("="))
            try:
                read = {"decay": float, "length": int, "over": str}[key]
                values[key] = read(value)
            except (KeyError, ValueError):
                raise FedsimError(
                    f"schedule '{text}' has '{setting}'; allowed are decay=NUMBER, length=INTEGER "
                    "and over=round or over=step."
                ) from None
        return cls(shape.strip(), **values)  # type: ignore[arg-type]


CONSTANT = Schedule()


LocalSchedule = Annotated[
    Schedule,
    Text(Schedule.parse, str),
    Doc(
        "A schedule that multiplies lr, such as 'cosine(length=100)' over rounds, or "
        "'inverse(decay=0.1, over=step)' over local steps; also exponential, staircase and "
        "warm-up."
    ),
]
"""Type of a client algorithm's field for a schedule."""
