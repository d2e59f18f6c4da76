"""DP-SGD: SGD on clipped and noised per-example gradients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedsim.clients.privacy import ExamplePrivacy
from fedsim.clients.sgd import SGD
from fedsim.mechanisms import Clipping

__all__ = ["DPSGD"]


@dataclass(frozen=True)
class DPSGD(SGD):
    """DP-SGD (Abadi et al. 2016) as a client's algorithm: `SGD` with `ExamplePrivacy`.

    Any other local algorithm is made private by giving `ExamplePrivacy` to the trainer.

    Parameters
    ----------
    lr, momentum, weight_decay, schedule : as `SGD`
    clip_norm : float
        C, of one example's gradient.
    noise_multiplier : float
    sampling : "poisson" or "shuffle"
    delta : float
    ledger_dir : path, optional
    """

    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    sampling: Literal["poisson", "shuffle"] = "poisson"
    delta: float = 1e-5
    ledger_dir: Path | None = None

    @property
    def privacy(self) -> ExamplePrivacy:
        """Clipping at C, Gaussian noise, one ledger a client."""
        return ExamplePrivacy(
            Clipping(self.clip_norm),
            self.noise_multiplier,
            sampling=self.sampling,
            delta=self.delta,
            ledger_dir=self.ledger_dir,
        )
