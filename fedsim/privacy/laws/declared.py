"""Laws that fedsim does not ship, stored as data in events and ledgers.

A ledger is verified from its contents, never by importing code. A user's law is therefore
evaluated once for each noise multiplier, when an event is made: its Rényi curve exactly, its
dominating pairs on a grid of losses, rounded up. Everything later uses these numbers alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, get_args

import numpy as np

from fedsim.array_types import Floats
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import Adjacency, Inclusion, Law
from fedsim.privacy.losses import ORDERS, DiscretePair, DominatingPair
from fedsim.privacy.pld import discretised
from fedsim.privacy.records import to_json

NAME = "declared"
"""Name of every such law in a ledger."""


@dataclass(frozen=True, kw_only=True)
class DeclaredLaw(Law):
    """A user's law at one noise multiplier: its Rényi curve and discretised dominating pairs.

    Attributes
    ----------
    title, label_text, sentence_text : str
        The user's law's `name`, `label` and `sentence` (with ``{row}`` for the kind of row).
    noise_multiplier : float
        Multiplier at which it was evaluated. The same cost is charged for more noise.
    inclusion_rate : float
        Its `rate`.
    two : float or None
    size : int or None
        The fields of its `Inclusion`; ``two`` is None if it has none.
    curve : tuple of float
        Rényi divergences at `fedsim.privacy.losses.ORDERS`.
    removed, added : DiscretePair or None
        Dominating pairs for removing and for adding a row; both None where unknown.
    """

    neighbours = get_args(Adjacency)

    title: str
    label_text: str
    sentence_text: str
    noise_multiplier: float
    inclusion_rate: float
    two: float | None
    size: int | None
    curve: tuple[float, ...]
    removed: DiscretePair | None = None
    added: DiscretePair | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = [pair for pair in (self.removed, self.added) if pair is not None]
        losses = [loss for pair in pairs for loss in (*pair.probs, pair.infinite)]
        if len(self.curve) != len(ORDERS) or not all(value >= 0 for value in self.curve):
            raise FedsimError(
                f"the law '{self.title}' has a Rényi curve of {len(self.curve)} numbers; it must "
                f"have {len(ORDERS)}, none below 0."
            )
        if not 0 < self.inclusion_rate <= 1 or not self.noise_multiplier >= 0:
            raise FedsimError(f"the law '{self.title}' has a rate or a noise out of range.")
        is_complete = len(pairs) != 1 and all(pair.probs and pair.step > 0 for pair in pairs)
        if not is_complete or not all(0 <= loss <= 1 for loss in losses):
            raise FedsimError(f"the pairs of the law '{self.title}' are not distributions.")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The user's law's own name."""
        return self.title

    @property
    def rate(self) -> float:
        """Probability that a row is sampled, as the law's author declares it."""
        return self.inclusion_rate

    def gaussian(self, noise_multiplier: float) -> None:
        """None: only the stored numbers are known, not whether they are a Gaussian's."""

    def _check(self, noise_multiplier: float) -> None:
        if noise_multiplier < self.noise_multiplier * (1 - 1e-12):
            raise FedsimError(
                f"the law '{self.title}' is known only at its author's noise multiplier, "
                f"{self.noise_multiplier:g}; its cost at a smaller one, {noise_multiplier:g}, is "
                "unknown: ask with the config that names it."
            )

    def pairs(self, noise_multiplier: float) -> tuple[DominatingPair, DominatingPair] | None:
        """Dominating pairs, at no less noise than that of the evaluation; None where unknown."""
        self._check(noise_multiplier)
        if self.removed is None or self.added is None:
            return None
        return self.removed, self.added

    def rdp(self, noise_multiplier: float) -> Floats:
        """Rényi curve, at no less noise than that of the evaluation."""
        self._check(noise_multiplier)
        return np.array(self.curve)

    def inclusion(self, population: int) -> Inclusion | None:
        """Inclusion probabilities; None where the law's author declares none."""
        return None if self.two is None else Inclusion(self.rate, self.two, self.size)

    def comparable(self, other: Law) -> bool:
        """Only with an equal law."""
        return self == other

    @property
    def is_gaussian(self) -> bool:
        """False: unknown, and so not assumed."""
        return False

    @property
    def label(self) -> str:
        """Short description, for tables."""
        return self.label_text

    def sentence(self, row: str) -> str:
        """How a ``row`` is sampled: a phrase of the privacy statement."""
        return self.sentence_text.replace("{row}", row)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the law's JSON, by which later ledger lines refer to the one that holds it."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The law as JSON, for the ledger."""
        # Keys with underscores: the digests in existing ledgers were computed from these.
        return {"name": NAME, **{key.replace("-", "_"): v for key, v in to_json(self).items()}}


def as_data(law: Law, noise_multiplier: float) -> DeclaredLaw:
    """The data of a user's law, which need only fedsim's code.

    Raises
    ------
    FedsimError
        If a user's law cannot be evaluated to a curve and pairs.
    """
    try:
        return _evaluated(law, noise_multiplier)
    except TypeError as error:
        raise FedsimError(
            f"the law {type(law).__name__} cannot be evaluated ({error}); it must be a frozen "
            "dataclass derived from fedsim.privacy.laws.Law."
        ) from error


@lru_cache(maxsize=256)
def _evaluated(law: Law, noise_multiplier: float) -> DeclaredLaw:
    """Evaluate a user's law at one noise multiplier."""
    # A law need not handle the limits: without noise the cost is infinite, with infinite noise 0.
    curve, pairs = np.full(len(ORDERS), 0.0 if noise_multiplier else math.inf), None
    if 0 < noise_multiplier < math.inf:
        curve, pairs = np.asarray(law.rdp(noise_multiplier)), law.pairs(noise_multiplier)
    tested = law.inclusion(law.population) if law.population is not None else None
    return DeclaredLaw(
        title=law.name,
        label_text=law.label,
        sentence_text=law.sentence("{row}"),
        noise_multiplier=float(noise_multiplier),
        inclusion_rate=float(law.rate),
        two=None if tested is None else float(tested.pair),
        size=None if tested is None else tested.size,
        population=law.population,
        adjacency=law.adjacency,
        curve=tuple(curve.tolist()),
        removed=None if pairs is None else discretised(pairs[0]),
        added=None if pairs is None else discretised(pairs[1]),
    )
