"""Claims of a target, read from a file or command line, as events of the accountant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from fedsim import regular_files
from fedsim.array_types import Floats
from fedsim.audit.claim import Claim
from fedsim.errors import FedsimError
from fedsim.privacy import Adjacency, Event
from fedsim.privacy.laws import Sampler
from fedsim.privacy.laws.fixed import FixedSize
from fedsim.privacy.laws.full import Full
from fedsim.privacy.laws.poisson import Poisson
from fedsim.privacy.losses import gaussian_mu
from fedsim.settings import Ge, Gt, Le, Lt, read_settings, settings_of


class ReleaseClaim(Protocol):
    """What an audit must know of a target's claim: its federation, and what it promises."""

    @property
    def population(self) -> int:
        """How many rows the attacked federation has."""

    @property
    def rounds(self) -> int:
        """Number of releases, one after another."""

    @property
    def rate(self) -> float:
        """Expected share of rows in a round."""

    @property
    def clip_norm(self) -> float:
        """C, the largest L2 norm of a row."""

    @property
    def noise_multiplier(self) -> float | None:
        """Standard deviation of the noise on the sum, over C; None if it is not known."""

    @property
    def epsilon(self) -> float | None:
        """An epsilon that is claimed beside a noise multiplier, to be checked against it."""

    @property
    def adjacency(self) -> Adjacency:
        """Which federations are neighbours."""

    @property
    def row(self) -> Literal["client", "example"]:
        """What a row is."""

    @property
    def adaptive(self) -> bool:
        """Whether the clip norm follows the norms of rows from round to round."""

    @property
    def white_noise(self) -> bool:
        """Whether noise has one size in all coordinates, so that the audit may test its law."""

    @property
    def shift(self) -> float | None:
        """How far one row may move a round on average, in standard deviations of Gaussian noise.

        None if that is not one number.
        """

    @property
    def claim(self) -> Claim:
        """The claim with its trade-off curve."""

    @property
    def round_event(self) -> Event:
        """Event of one round, whose law says how rows are sampled."""

    def independent_rounds(self, moves: Floats) -> Floats:
        """Transform ``moves [..., rounds, d]`` so that noise of different rounds is independent."""


@dataclass(frozen=True, kw_only=True)
class TargetClaim:
    """Claim about a target's releases, as somebody states it.

    With a noise multiplier, releases are claimed to be sampled Gaussians of sensitivity C. With an
    epsilon only, all rounds together are claimed to be (epsilon, delta)-private, with any noise.
    """

    noise_multiplier: Annotated[float | None, Gt(0)] = None
    """Standard deviation of the noise on the sum, over the clip norm."""
    epsilon: Annotated[float | None, Gt(0)] = None
    """Epsilon of all rounds together, as the target claims it."""
    delta: Annotated[float, Ge(0), Lt(1)] = 1e-5
    """The delta of that epsilon."""
    clip_norm: Annotated[float, Gt(0)] = 1.0
    """The largest L2 norm of a row."""
    rounds: Annotated[int, Ge(1)] = 1
    """Number of releases, one after another."""
    sampling: Literal["poisson", "fixed", "full"] = "full"
    """How the rows of a round are drawn."""
    rate: Annotated[float, Gt(0), Le(1)] = 1.0
    """The sampling rate: the share of rows in a round."""
    adjacency: Literal["add-remove", "zero-out", "replace-one"] = "add-remove"
    """Which data sets are neighbours."""
    row: Literal["client", "example"] = "client"
    """The level of the guarantee: a client or an example."""
    population: Annotated[int, Ge(3)] = 20
    """How many rows the attacked federation has."""
    adaptive: bool = False
    """Whether the clip norm follows the norms of rows from round to round."""
    source: str = ""
    """Where the claim is made (a page, a line of code), for the report."""

    @classmethod
    def read(cls, path: Path | None, options: Mapping[str, Any]) -> TargetClaim:
        """Read a claim from a TOML file and options, which override it.

        Raises
        ------
        FedsimError
            If nothing is claimed, or something impossible.
        """
        known = {setting.key for setting in settings_of(cls)}
        values: dict[str, Any] = {}
        if path is not None:
            try:
                values = regular_files.read_toml(path)
            except (OSError, ValueError) as error:
                raise FedsimError(f"--claim is {path}, which cannot be read: {error}.") from error
        values |= {key: value for key, value in options.items() if value is not None}
        for key in values:
            if key not in known:
                raise FedsimError(
                    f"claim.{key} is not a key of a claim; the keys are {', '.join(sorted(known))}."
                )
        return cls(**read_settings(settings_of(cls), values, "claim"))

    def __post_init__(self) -> None:
        if self.noise_multiplier is None and self.epsilon is None:
            raise FedsimError(
                "claim.noise-multiplier and claim.epsilon are not set; one of them must be: there "
                "is nothing to audit."
            )
        if (self.sampling == "full") != (self.rate == 1):
            raise FedsimError(
                f"claim.sampling is '{self.sampling}' and claim.rate {self.rate:g}; the rate must "
                "be 1 for 'full', and below 1 otherwise."
            )
        if (self.sampling == "fixed") != (self.adjacency == "replace-one") and self.rate < 1:
            raise FedsimError(
                f"claim.sampling is '{self.sampling}' and claim.adjacency '{self.adjacency}'; a "
                "fixed number of rows goes with 'replace-one', Poisson sampling with the others."
            )
        rows = self.rate * self.population
        if self.sampling == "fixed" and abs(rows - round(rows)) > 1e-6 * rows:
            raise FedsimError(
                f"claim.rate is {self.rate:g} and claim.population {self.population}, which gives "
                f"{rows:g} rows a round; with claim.sampling 'fixed' it must be a whole number."
            )

    @property
    def sampler(self) -> Sampler:
        """Sampler of the rows of a round."""
        n, adjacency = self.population, self.adjacency
        if adjacency == "replace-one":
            size = round(self.rate * n)
            return FixedSize(size, n) if self.rate < 1 else Full(n, adjacency=adjacency)
        return Poisson(self.rate, n, adjacency=adjacency)

    @property
    def sensitivity(self) -> float:
        """Largest move of the sum by one row, in units of C."""
        return 2.0 if self.adjacency == "replace-one" else 1.0

    @property
    def shift(self) -> float | None:
        """How far one row may move a round on average, in standard deviations of Gaussian noise.

        None if only (epsilon, 0) is claimed, which no Gaussian satisfies.
        """
        if self.noise_multiplier is not None:
            return self.rate * self.sensitivity / self.noise_multiplier
        if self.delta == 0:
            return None
        assert self.epsilon is not None
        return gaussian_mu(self.epsilon, self.delta) / math.sqrt(self.rounds)

    @property
    def white_noise(self) -> bool:
        """Whether the noise is known, so that its law can be tested."""
        return self.noise_multiplier is not None

    @property
    def round_event(self) -> Event:
        """Event of one round."""
        return Event.of(self.sampler, self.noise_multiplier or 0.0)

    def independent_rounds(self, moves: Floats) -> Floats:
        """The moves: noise is claimed to be independent."""
        return moves

    @property
    def claim(self) -> Claim:
        """The claim with its trade-off curve: of the Gaussians, or of (epsilon, delta)-privacy."""
        if self.noise_multiplier is None:
            return Claim((), self.delta, self.epsilon)
        event = Event.of(self.sampler, self.noise_multiplier)
        return Claim((event.times(self.rounds),), self.delta)

    @property
    def assumptions(self) -> dict[str, str]:
        """The audit's assumptions, by subject."""
        z = self.noise_multiplier
        what = f"epsilon {self.epsilon} at delta {self.delta:g}"
        if z is not None:
            what = f"noise multiplier {z:g}, clip norm {self.clip_norm:g}"
        rows = f"{self.sampling} sampling at rate {self.rate:g}, {self.adjacency} neighbours"
        return {
            "claim": f"{what}; {self.rounds} rounds; {rows}",
            **({"source": self.source} if self.source else {}),
            "federation": f"{self.population} {self.row}s whose rows are made up",
        }
