"""Koskela and Honkela's private figures: 4 (against Adam) and 5 (against SGD tuned once)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from experiments.curves import Curve, curves
from experiments.framework.base import BestOfGrid, ExperimentClaim, Report, Result, Table
from experiments.framework.config_runs import ConfigRunsSettings, Score, best
from experiments.framework.spread import Difference, paired, within
from experiments.koskela.common import KEEPS, KNOWN_KEEPS, Koskela, adadp, constant_rate, left_open
from experiments.koskela.moments import moments_epsilon
from fedsim.config import Scalar

SGD, ADAM = "sgd", "adam"
NOISELESS = "adadp-lr full without noise"
REACHED = 96.0
"""Accuracy (%) that the paper's network reaches on MNIST without noise, it says."""
_START_STYLES = ("kept", "fifth")


@dataclass(frozen=True, kw_only=True)
class KoskelaPrivateSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    sigmas : list of float
        Noise multipliers; SGD's rate is tuned at the first.
    adam_sigmas : list of float
        The noise multipliers of figure 4, at which Adam is run.
    keeps : list of str
        Which iterates ADADP keeps (of `KEEPS`); a verdict must be the same with each.
    starts : list of float
        Values of eta_0 for ADADP in addition to the run's own, as multipliers of a batch's mean
        gradient. A verdict must be the same from all of them.
    rates, adam_rates : list of float
        Grids of constant rates for SGD and Adam; the best by final test accuracy is chosen.
        Without rates of SGD there is no figure 5.
    noiseless : int
        Epochs of ADADP without noise and clipping; 0 for no such runs.
    examples : int
        Number of private examples where ``run.toml`` takes all, for the moments accountant.
    margin : float
        Percentage points within which ADADP counts as good as another method in figure 4; judged
        with half and with twice as many.
    """

    sigmas: list[float]
    adam_sigmas: list[float]
    keeps: Annotated[list[str], KNOWN_KEEPS] = field(default_factory=lambda: ["half"])
    starts: list[float] = field(default_factory=list)
    rates: list[float]
    adam_rates: list[float]
    noiseless: int = 0
    examples: int = 0
    margin: float = 1.0


class KoskelaPrivate(Koskela):
    """One client that holds all data, with one round per epoch and example-level privacy."""

    settings: KoskelaPrivateSettings

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """ADADP and every rate of SGD at every sigma, and Adam at the sigmas of figure 4."""
        s = self.settings
        limit = float(self.base.client.eta_max)
        plans = {
            _adadp(keep, start, sigma): {
                **adadp(start, keep, limit),
                "client.noise.multiplier": sigma,
            }
            for keep in s.keeps
            for sigma in s.sigmas
            for start in self._starts
        }
        if s.noiseless:
            plans[NOISELESS] = adadp(self.base.client.lr, "full", limit) | {
                "rounds": s.noiseless,
                "client.adapt-rounds": "",
                "client.mechanism.name": "none",
                "client.mechanism.clip-norm": "",
                "client.noise.multiplier": "",
            }
        points = [(SGD, rate, sigma) for sigma in s.sigmas for rate in s.rates]
        points += [(ADAM, rate, sigma) for sigma in s.adam_sigmas for rate in s.adam_rates]
        return plans | {
            _name(method, rate, sigma): {
                **constant_rate(method, rate),
                "client.noise.multiplier": sigma,
            }
            for method, rate, sigma in points
        }

    def report(self, results: Mapping[str, Result]) -> Report:
        """Figures 4 and 5, with the epsilon of every sigma."""
        scores = self.scores(results)
        adadp = {sigma: scores[self._adadp(sigma)] for sigma in self.settings.sigmas}
        epsilons = {
            sigma: float(self.of_plan(results, self._adadp(sigma))[0]["epsilon"])
            for sigma in self.settings.sigmas
        }
        sections = []
        if self.settings.adam_sigmas:
            sections.append(self._against_adam(scores, adadp, epsilons))
        if self.settings.starts:
            sections.append(self._over_starts(scores))
        if self.settings.rates:
            sections.append(self._against_sgd(scores, adadp, epsilons))
        if self.settings.noiseless:
            sections.append(self._without_noise(scores[NOISELESS]))
        figures = {f"epsilon sigma={sigma:g}": value for sigma, value in epsilons.items()}
        figures |= {f"moments sigma={sigma:g}": self._moments(sigma) for sigma in epsilons}
        figures |= {f"adadp sigma={sigma:g}": score.mean for sigma, score in adadp.items()}
        return Report(
            tables=[table for section in sections for table in section.tables],
            figures=figures | {k: v for section in sections for k, v in section.figures.items()},
            claims=[claim for section in sections for claim in section.claims],
            pictures={k: v for section in sections for k, v in section.pictures.items()},
            choices=[choice for section in sections for choice in section.choices],
        )

    @property
    def _starts(self) -> list[float]:
        return list(dict.fromkeys([self.base.client.lr, *self.settings.starts]))

    @property
    def _margins(self) -> tuple[float, ...]:
        """Half and twice the margin: the paper gives none."""
        return self.settings.margin / 2, 2 * self.settings.margin

    def _adadp(self, sigma: float) -> str:
        """Name of ADADP from the run's own eta_0, with the first iterate of ``keeps``."""
        return _adadp(self.settings.keeps[0], self.base.client.lr, sigma)

    @property
    def _readings(self) -> dict[str, tuple[str, float]]:
        """Iterate and eta_0 of each reading, by words."""
        several = len(self.settings.keeps) > 1
        return {
            f"{KEEPS[keep]}, " * several + f"from {start:g}": (keep, start)
            for keep in self.settings.keeps
            for start in self._starts
        }

    @property
    def _where(self) -> str:
        return self.where("examples", "epochs")

    def _moments(self, sigma: float) -> float:
        """The epsilon that the moments accountant gives for as many releases."""
        base = self.base
        examples = self.settings.examples or base.partition.max_examples
        return moments_epsilon(
            sigma,
            rate=base.client.batch_size / examples,
            releases=base.rounds * math.ceil(examples / base.client.batch_size),
            delta=base.client.noise.delta,
        )

    def _against_adam(
        self,
        scores: Mapping[str, Score],
        adadp: Mapping[float, Score],
        epsilons: Mapping[float, float],
    ) -> Report:
        """Figure 4: ADADP against the two best rates of Adam."""
        s = self.settings
        title = f"Fig. 4: ADADP against Adam\n{self._where}"
        rows: list[list[str | float | None]] = []
        panels, figures, claims, choices = [], {}, [], []
        for sigma in s.adam_sigmas:
            ranked = _ranked(scores, ADAM, s.adam_rates, sigma)
            choices.append(_best(scores, ADAM, s.adam_rates, sigma)[2])
            adaptive = adadp[sigma]
            lines = [Curve("ADADP", adaptive, "adadp")]
            rows.append([f"{sigma:g}", "ADADP", None, adaptive.text])
            for start, style in zip(s.starts, _START_STYLES, strict=False):
                score = scores[_adadp(s.keeps[0], start, sigma)]
                lines.append(Curve(f"ADADP from {start:g}", score, style))
            for place, style, (rate, score) in zip(
                ("best", "second best"), ("sgd", "second"), ranked, strict=False
            ):
                rows.append([f"{sigma:g}", f"Adam, {place}", f"{rate:.3g}", score.text])
                figures[f"4 adam {place} sigma={sigma:g}"] = score.mean
                lines.append(Curve(f"Adam, {place}: {rate:.2g}", score, style))
            panels.append((_panel(sigma, epsilons[sigma]), lines))
            best, *others = (score for _, score in ranked)
            claims.append(
                self._from_all_starts(
                    f"4-best-sigma{sigma:g}",
                    "Fig. 4",
                    f"at sigma = {sigma:g}, ADADP is about as good as the best Adam",
                    scores,
                    sigma,
                    best,
                    self._margins,
                )
            )
            if others:
                claims.append(
                    self._from_all_starts(
                        f"4-second-sigma{sigma:g}",
                        "Fig. 4",
                        f"at sigma = {sigma:g}, ADADP is ahead of the second-best Adam",
                        scores,
                        sigma,
                        others[0],
                    )
                )
        table = Table("figure4", title, ["sigma", "method", "rate", "accuracy (%)"], rows)
        picture = curves(title, panels, xlabel="epoch", first=1)
        return Report([table], figures, claims, {"figure4": picture}, choices)

    def _from_all_starts(
        self, name: str, panel: str, says: str, scores: Mapping[str, Score], sigma: float,
        other: Score, margins: Sequence[float] = (0.0,),
    ) -> ExperimentClaim:  # fmt: skip
        """Claim that ADADP is ahead, or behind by no more than a margin, in every reading."""
        gaps = {
            reading: paired(scores[_adadp(keep, start, sigma)].finals, other.finals)
            for reading, (keep, start) in self._readings.items()
        }
        unit = left_open("the unit of eta_0", self.settings.keeps)
        return ExperimentClaim.under(
            name,
            panel,
            says,
            unit if margins == (0.0,) else f"what counts as good, and {unit}",
            {
                reading + f", within {_points(margin)}" * (margin > 0): (
                    within([gap], -margin, np.inf),
                    gap.text,
                )
                for reading, gap in gaps.items()
                for margin in margins
            },
        )

    def _over_starts(self, scores: Mapping[str, Score]) -> Report:
        """Table of ADADP's accuracy from each eta_0, and claims on the differences."""
        s = self.settings
        rows: list[list[str | float | None]] = []
        figures, claims = {}, []
        for sigma in s.sigmas:
            spans: dict[str, Difference] = {}
            for keep in s.keeps:
                by_start = {start: scores[_adadp(keep, start, sigma)] for start in self._starts}
                half = " half" * (keep != s.keeps[0])
                for start, score in by_start.items():
                    rows.append([f"{sigma:g}", KEEPS[keep], f"{start:g}", score.text])
                    figures[f"adadp{half} from {start:g} sigma={sigma:g}"] = score.mean
                finals = [score.finals for score in by_start.values()]
                apart = [max(of_seed) - min(of_seed) for of_seed in zip(*finals, strict=True)]
                spans[keep] = paired(apart, [0.0] * len(apart))
            claims.append(
                ExperimentClaim.under(
                    f"starts-sigma{sigma:g}",
                    "Fig. 4",
                    f"at sigma = {sigma:g}, ADADP ends alike from every eta_0 tried",
                    "what counts as alike",
                    {
                        f"{KEEPS[keep]}, " * (len(s.keeps) > 1) + f"within {_points(margin)}": (
                            within([span], -np.inf, margin),
                            f"{span.mean:.2f} points apart [{span.low:.2f}, {span.high:.2f}]",
                        )
                        for keep, span in spans.items()
                        for margin in self._margins
                    },
                )
            )
        table = Table("starts", "ADADP by eta_0", ["sigma", "keeps", "eta_0", "accuracy (%)"], rows)
        return Report([table], figures, claims)

    def _against_sgd(
        self,
        scores: Mapping[str, Score],
        adadp: Mapping[float, Score],
        epsilons: Mapping[float, float],
    ) -> Report:
        """Figure 5: ADADP against SGD at the rate tuned at the first sigma."""
        s = self.settings
        first = s.sigmas[0]
        once = _best(scores, SGD, s.rates, first)[0]
        title = f"Fig. 5: SGD's rate tuned at σ = {first:g} and reused\n{self._where}"
        rows: list[list[str | float | None]] = []
        panels, figures, claims, choices = [], {}, [], []
        for sigma in s.sigmas:
            reused = scores[_name(SGD, once, sigma)]
            again, tuned, chosen = _best(scores, SGD, s.rates, sigma)
            choices.append(chosen)
            adaptive = adadp[sigma]
            rows.append(
                [
                    f"{sigma:g}", f"{epsilons[sigma]:.3f}", f"{self._moments(sigma):.3f}",
                    adaptive.text, reused.text, tuned.text, f"{again:g}",
                ]
            )  # fmt: skip
            figures[f"5 sgd reused sigma={sigma:g}"] = reused.mean
            figures[f"5 sgd tuned sigma={sigma:g}"] = tuned.mean
            lines = [
                Curve("ADADP", adaptive, "adadp"),
                Curve("SGD" if sigma == first else "SGD, reused", reused, "sgd"),
            ]
            panels.append((_panel(sigma, epsilons[sigma]), lines))
            if sigma != first:
                claims.append(
                    self._from_all_starts(
                        f"5-sigma{sigma:g}",
                        "Fig. 5",
                        f"at sigma = {sigma:g}, SGD at the rate tuned at {first:g} loses to ADADP",
                        scores,
                        sigma,
                        reused,
                    )
                )
        columns = [
            "sigma", "epsilon", "by moments", "ADADP (%)", f"SGD at {once:g} (%)",
            "SGD tuned here (%)", "tuned rate",
        ]  # fmt: skip
        table = Table("figure5", title.replace("σ", "sigma"), columns, rows)
        picture = curves(title, panels, xlabel="epoch", first=1, width=max(2.9 * len(panels), 7.5))
        return Report([table], figures, claims, {"figure5": picture}, choices)

    def _without_noise(self, score: Score) -> Report:
        gap = paired(score.finals, [REACHED] * len(score.finals))
        claim = ExperimentClaim(
            "without-noise",
            "Without noise",
            f"without noise ADADP ends at {REACHED:g} % or more",
            gap.positive,
            f"{score.text} after {self.settings.noiseless} epochs",
        )
        return Report([], {"without noise": score.mean}, [claim])


def _ranked(
    scores: Mapping[str, Score], method: str, rates: Sequence[float], sigma: float
) -> list[tuple[float, Score]]:
    """Rates and their scores, the highest first."""
    tried = [(rate, scores[_name(method, rate, sigma)]) for rate in rates]
    return sorted(tried, key=lambda pair: -pair[1].mean)


def _best(
    scores: Mapping[str, Score], method: str, rates: Sequence[float], sigma: float
) -> tuple[float, Score, BestOfGrid]:
    tried = {rate: scores[_name(method, rate, sigma)] for rate in rates}
    return best(f"rate of {method} at sigma = {sigma:g}", tried)


def _points(margin: float) -> str:
    return f"{margin:g} point{'s' * (margin != 1)}"


def _panel(sigma: float, epsilon: float) -> str:
    return f"$\\sigma$ = {sigma:g}, $\\epsilon$ = {epsilon:.2f}"


def _adadp(keep: str, start: float, sigma: float) -> str:
    return _name("adadp-lr" if keep == "half" else "adadp-lr full", start, sigma)


def _name(method: str, rate: float, sigma: float) -> str:
    return f"{method} rate={rate:g} sigma={sigma:g}"
