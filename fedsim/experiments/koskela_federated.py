"""Koskela and Honkela's federated figures: 1a, 1b, 2a, 2b and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from fedsim.config import Scalar
from fedsim.experiments.base import Claim, Report, Result, Settings, Table
from fedsim.experiments.config_runs import Score
from fedsim.experiments.curves import Line, curves, sweeps
from fedsim.experiments.koskela import Koskela, KoskelaSettings, optimiser

__all__ = ["KoskelaFederated", "KoskelaFederatedSettings"]

ADADP, SGD, ADAM = "adadp-lr", "sgd", "adam"


class KoskelaFederatedSettings(KoskelaSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    mixed : float
        Randomness of the clients' data in figures 1a, 2b and 3.
    randomness : list of float
        Figure 2a's, ascending.
    batches : list of int
        Figure 1b's; every client goes through its examples once a round whatever the batch.
    starts : list of float
        eta_0 of ADADP in figure 2b, where clients either start from it every round or keep
        the rate they reached: the paper does not say which.
    rates, adam_rates : list of float
        Constant rates that SGD and Adam choose among by their final test accuracy.
    """

    mixed: float = 0.33
    randomness: list[float]
    batches: list[int]
    starts: list[float]
    rates: list[float]
    adam_rates: list[float]


class KoskelaFederated(Koskela):
    """Federated averaging of ADADP, of SGD and of Adam."""

    settings: KoskelaFederatedSettings
    settings_type: ClassVar[type[Settings]] = KoskelaFederatedSettings
    last: ClassVar[int] = 5

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Everything that some figure shows, once."""
        s, start, batch = self.settings, self._start, self._batch
        points = [(ADADP, start, rho, batch) for rho in (s.mixed, *s.randomness)]
        points += [(SGD, rate, rho, batch) for rho in (s.mixed, *s.randomness) for rate in s.rates]
        points += [(ADADP, eta, s.mixed, batch) for eta in s.starts]
        points += [(ADAM, rate, s.mixed, batch) for rate in s.adam_rates]
        for own in s.batches:
            points.append((ADADP, start, 0.0, own))
            points += [(SGD, rate, 0.0, own) for rate in s.rates]
        plans: dict[str, dict[str, Scalar]] = {
            _name(method, rate, rho, own): {
                **optimiser(method, rate),
                "partition.randomness": rho,
                "client.batch-size": own,
            }
            for method, rate, rho, own in points
        }
        for eta in s.starts:
            plan = plans[_name(ADADP, eta, s.mixed, batch)]
            plans[_kept(eta)] = {**plan, "client.state": "client"}
        return plans

    def report(self, results: Mapping[str, Result]) -> Report:
        """A table and a picture a figure, and what the paper says about each."""
        scores = self.scores(results)
        parts = [self._over_rounds(scores), self._over_rates(scores)]
        if self.settings.batches:
            parts.append(self._over_batches(scores))
        if self.settings.randomness:
            parts.append(self._over_randomness(scores))
        rejected = [
            float(result["rejected"])
            for name in self.plans()
            if name.startswith(ADADP)
            for result in self.of_plan(results, name)
        ]
        figures = {"rejected (%)": 100 * sum(rejected) / len(rejected)}
        return Report(
            tables=[table for part in parts for table in part.tables],
            figures=figures | {k: v for part in parts for k, v in part.figures.items()},
            claims=[claim for part in parts for claim in part.claims],
            pictures={k: v for part in parts for k, v in part.pictures.items()},
        )

    @property
    def _start(self) -> float:
        return self.base.client.lr

    @property
    def _batch(self) -> int:
        return self.base.client.batch_size

    @property
    def _where(self) -> str:
        return self.where("examples a client", "rounds")

    def _best(
        self, scores: Mapping[str, Score], method: str, rates: Sequence[float], rho: float,
        batch: int,
    ) -> tuple[float, Score]:  # fmt: skip
        """The rate that ends highest, and its score."""
        found = {rate: scores[_name(method, rate, rho, batch)] for rate in rates}
        rate = max(found, key=lambda each: found[each].mean)
        return rate, found[rate]

    def _over_rounds(self, scores: Mapping[str, Score]) -> Report:
        """Figure 1a, and figure 3 where there are rates for Adam."""
        s, batch = self.settings, self._batch
        adadp = scores[_name(ADADP, self._start, s.mixed, batch)]
        rate, sgd = self._best(scores, SGD, s.rates, s.mixed, batch)
        lines = [Line("ADADP", adadp, "adadp"), Line(f"SGD, tuned: {rate:g}", sgd, "sgd")]
        others = [
            Line("", scores[_name(SGD, each, s.mixed, batch)], "other")
            for each in s.rates
            if each != rate
        ]
        if others:
            others[0] = Line("SGD, the other rates", others[0].score, "other")
        title = f"Fig. 1a: {100 * s.mixed:g} % random\n{self._where}"
        pictures = {"figure1a": curves(title, [("", [*others, *lines])], xlabel="round")}
        figures = {"1a adadp": adadp.mean, "1a sgd": sgd.mean}
        rows: list[list[str | float | None]] = [
            ["ADADP", f"{self._start:g}", adadp.text],
            ["SGD", f"{rate:g}", sgd.text],
        ]
        claims = [
            Claim(
                "1a",
                f"1a: at {100 * s.mixed:g} % random, ADADP ends above SGD with its best constant "
                "rate",
                adadp.mean > sgd.mean,
                f"{adadp.mean:.2f} against {sgd.mean:.2f}",
            )
        ]
        if s.adam_rates:
            adam_rate, adam = self._best(scores, ADAM, s.adam_rates, s.mixed, batch)
            rows.append(["Adam", f"{adam_rate:g}", adam.text])
            figures["3 adam"] = adam.mean
            adams = [
                Line(f"Adam, {each:.1e}", scores[_name(ADAM, each, s.mixed, batch)], k)
                for k, each in enumerate(s.adam_rates)
            ]
            pictures["figure3"] = curves(
                f"Fig. 3: Adam, {100 * s.mixed:g} % random\n{self._where}",
                [("", [*adams, lines[0]])],
                xlabel="round",
            )
            claims.append(
                Claim(
                    "3",
                    "3: Adam with its best rate ends below ADADP",
                    adam.mean < adadp.mean,
                    f"{adam.mean:.2f} against {adadp.mean:.2f}",
                )
            )
        table = Table("figure1a", title, ["method", "rate", "final accuracy (%)"], rows)
        return Report([table], figures, claims, pictures)

    def _over_rates(self, scores: Mapping[str, Score]) -> Report:
        """Figure 2b."""
        s, batch = self.settings, self._batch
        adadp = {eta: scores[_name(ADADP, eta, s.mixed, batch)] for eta in s.starts}
        kept = {eta: scores[_kept(eta)] for eta in s.starts}
        sgd = {rate: scores[_name(SGD, rate, s.mixed, batch)] for rate in s.rates}
        lines = {"adadp": adadp, "adadp kept": kept, "sgd": sgd}
        title = f"Fig. 2b: accuracy against the rate, {100 * s.mixed:g} % random\n{self._where}"
        rows = [
            [f"{x:g}", *(which[x].text if x in which else None for which in lines.values())]
            for x in sorted({*adadp, *sgd})
        ]
        ranges = {
            name: max(each.mean for each in which.values())
            - min(each.mean for each in which.values())
            for name, which in lines.items()
        }
        figures = {
            f"2b {name} {x:g}": score.mean
            for name, which in lines.items()
            for x, score in which.items()
        }
        figures |= {f"2b {name} range": value for name, value in ranges.items()}
        claims = [
            Claim(
                f"2b-{name.partition(' ')[2] or 'reset'}",
                "2b: over these rates ADADP's accuracy varies less than a quarter as much as "
                f"SGD's, eta {how}",
                ranges[name] < ranges["sgd"] / 4,
                f"{ranges[name]:.2f} against {ranges['sgd']:.2f} points",
            )
            for name, how in (
                ("adadp", "starting anew every round"),
                ("adadp kept", "kept by the client"),
            )
        ]
        picture = sweeps(
            title,
            [
                ("ADADP, every round from $\\eta_0$", adadp, "adadp"),
                ("ADADP, $\\eta$ kept from round to round", kept, "kept"),
                ("SGD, constant $\\eta$", sgd, "sgd"),
            ],
            xlabel="$\\eta_0$ of ADADP, $\\eta$ of SGD",
            log=True,
        )
        columns = ["rate", "ADADP from it (%)", "ADADP, kept (%)", "SGD with it (%)"]
        return Report(
            [Table("figure2b", title, columns, rows)], figures, claims, {"figure2b": picture}
        )

    def _over_batches(self, scores: Mapping[str, Score]) -> Report:
        """Figure 1b."""
        s = self.settings
        title = f"Fig. 1b: every client its own classes\n{self._where}"
        rows: list[list[str | float | None]] = []
        panels, ahead = [], []
        figures: dict[str, float] = {}
        for own in s.batches:
            adadp = scores[_name(ADADP, self._start, 0.0, own)]
            rate, sgd = self._best(scores, SGD, s.rates, 0.0, own)
            rows.append([str(own), adadp.text, sgd.text, f"{rate:g}"])
            figures |= {f"1b adadp B={own}": adadp.mean, f"1b sgd B={own}": sgd.mean}
            ahead.append(adadp.mean - sgd.mean)
            lines = [Line(f"SGD, tuned: {rate:g}", sgd, "sgd"), Line("ADADP", adadp, "adadp")]
            panels.append((f"|B| = {own}", lines))
        claim = Claim(
            "1b",
            "1b: with one class pair a client, ADADP ends above rate-tuned SGD at every |B|",
            min(ahead) > 0,
            ", ".join(f"{gain:+.2f}" for gain in ahead) + " points",
        )
        columns = ["|B|", "ADADP (%)", "SGD (%)", "SGD's rate"]
        return Report(
            [Table("figure1b", title, columns, rows)],
            figures,
            [claim],
            {"figure1b": curves(title, panels, xlabel="round")},
        )

    def _over_randomness(self, scores: Mapping[str, Score]) -> Report:
        """Figure 2a."""
        s, batch = self.settings, self._batch
        adadp = {rho: scores[_name(ADADP, self._start, rho, batch)] for rho in s.randomness}
        best = {rho: self._best(scores, SGD, s.rates, rho, batch) for rho in s.randomness}
        uniform = best[s.randomness[-1]][0]
        fixed = {rho: scores[_name(SGD, uniform, rho, batch)] for rho in s.randomness}
        tuned = {rho: score for rho, (_, score) in best.items()}
        lines = {"adadp": adadp, "sgd tuned": tuned, "sgd fixed": fixed}
        drops = {
            name: which[s.randomness[-1]].mean - which[s.randomness[0]].mean
            for name, which in lines.items()
        }
        title = f"Fig. 2a: accuracy against randomness\n{self._where}"
        rows = [
            [f"{rho:g}", *(which[rho].text for which in lines.values()), f"{best[rho][0]:g}"]
            for rho in s.randomness
        ]
        figures = {
            f"2a {name} rho={rho:g}": which[rho].mean
            for name, which in lines.items()
            for rho in s.randomness
        }
        figures |= {f"2a {name} drop": drop for name, drop in drops.items()}
        claims = [
            Claim(
                f"2a-{name.rpartition(' ')[2]}",
                f"2a: from uniform to pathological data SGD loses more than ADADP, {how}",
                drops[name] > drops["adadp"],
                f"{drops[name]:.2f} against {drops['adadp']:.2f} points",
            )
            for name, how in (
                ("sgd tuned", "its rate tuned at each randomness"),
                ("sgd fixed", "its rate tuned on uniform data"),
            )
        ]
        picture = sweeps(
            title,
            [
                ("ADADP", adadp, "adadp"),
                ("SGD, tuned at each randomness", tuned, "sgd"),
                (f"SGD, tuned on uniform data: {uniform:g}", fixed, "fixed"),
            ],
            xlabel="randomness of the clients' data",
        )
        columns = [
            "randomness", "ADADP (%)", "SGD, tuned (%)", f"SGD at {uniform:g} (%)", "tuned rate",
        ]  # fmt: skip
        return Report(
            [Table("figure2a", title, columns, rows)], figures, claims, {"figure2a": picture}
        )


def _name(method: str, rate: float, rho: float, batch: int) -> str:
    return f"{method} rate={rate:g} rho={rho:g} B={batch}"


def _kept(eta: float) -> str:
    return f"{ADADP} kept, from {eta:g}"
