"""What tables say of a bound, at either level."""

from __future__ import annotations

from typing import Annotated, ClassVar

from fedsim import registry
from fedsim.config.choices import Choice
from fedsim.settings import Doc

__all__ = ["BoundingSection"]


class BoundingSection(Choice):
    """How rows are bounded before they enter one noisy sum, at either level."""

    kind: ClassVar[str] = "mechanism"
    name: Annotated[str, Doc("The bound; 'none' for no privacy.")] = "none"
    per_layer: Annotated[
        bool, Doc("Whether every layer is bounded, summed and noised on its own.")
    ] = False

    @property
    def gives_none(self) -> bool:
        """Whether it is a bound that protects nobody, whatever the noise."""
        return self.is_robust or bool(getattr(self, "unsafe_non_private_raw_statistics", False))

    @property
    def is_robust(self) -> bool:
        """Whether it is no bound of rows in a sum, but a mean that needs them all."""
        if self.name not in registry.names(self.kind):
            return False
        thing = registry.find(self.kind, self.name, f"{self.table}.name")
        return bool(getattr(thing, "protects_nobody", False))
