"""Compare private methods on several federations and epsilons, as a map of the most accurate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from matplotlib.figure import Figure

from experiments.framework.base import (
    NOT_EMPTY,
    BestOfGrid,
    ExperimentClaim,
    Members,
    Report,
    Result,
    Table,
    seeds_text,
)
from experiments.framework.config_runs import (
    ConfigRuns,
    ConfigRunsSettings,
    LeaderboardEntry,
    Variant,
)
from experiments.framework.spread import all_ahead, listed, over_seeds, paired
from experiments.landscape.picture import Square, map_picture
from fedsim.config import RunConfig, Scalar
from fedsim.privacy import Accountant
from fedsim.privacy.selection import Distribution, selection_epsilon
from fedsim.runs.factories import release_plan
from fedsim.runs.metrics import Row

PRICE = "price"
NUMBERS: tuple[Distribution, ...] = ("logarithmic", "poisson")


@dataclass(frozen=True, kw_only=True)
class FederationKeys(Variant):
    """A federation: data, partition, level of privacy.

    ``seed`` is the seed of the runs by which bounds are chosen.
    """

    level: Literal["client", "example"] = "client"
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class LandscapeMethod(Variant):
    """A method, with a name for its noise and cohort.

    At example level, its keys of bound and noise apply to the clients' own mechanism; a method
    that changes the cohort exists at client level only.
    """

    noise: str = ""

    def at(self, level: str) -> dict[str, Scalar] | None:
        """Its keys at a level; None if it does not exist at that level."""
        if level == "client":
            return self.keys
        if any(key.startswith("cohort.") for key in self.keys):
            return None
        tables = ("mechanism.", "noise.")
        return {
            f"client.{key}" if key.startswith(tables) else key: value
            for key, value in self.keys.items()
        }


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A claim: one method is more accurate than another in these federations at these epsilons."""

    name: str
    says: str
    ahead: str
    behind: str
    federations: Annotated[list[str], NOT_EMPTY]
    epsilons: Annotated[list[float], NOT_EMPTY]


@dataclass(frozen=True, kw_only=True)
class LandscapeSettings(ConfigRunsSettings):
    """Keys of ``experiment.toml``.

    Attributes
    ----------
    clip_norms : list of float
        Grid from which each method's C is chosen; empty if the methods' keys set C.
    seeds : int
        Number of seeds that are shown; if C is chosen, they are fresh ones.
    """

    title: str
    panel: str
    epsilons: Annotated[list[float], NOT_EMPTY]
    clip_norms: list[float] = field(default_factory=list)
    federations: Annotated[list[FederationKeys], NOT_EMPTY]
    methods: Annotated[list[LandscapeMethod], NOT_EMPTY]
    claims: list[Contest] = field(default_factory=list)


class Landscape(ConfigRuns):
    """A method's bound is chosen with one seed, on validation examples; fresh seeds are shown."""

    settings: LandscapeSettings
    partial: ClassVar[bool] = True

    def plans(self) -> dict[str, dict[str, Scalar]]:
        """Changed keys for every federation, epsilon, and method that exists at its level."""
        settings = self.settings
        return {
            _cell(federation.name, epsilon, method.name): {
                **self._in_turn(federation.keys | keys),
                f"{_table(federation)}noise.target-epsilon": epsilon,
            }
            for federation in settings.federations
            for epsilon in settings.epsilons
            for method in settings.methods
            if (keys := method.at(federation.level)) is not None
        }

    def _in_turn(self, keys: dict[str, Scalar]) -> dict[str, Scalar]:
        """Keys with a default for cyclic groups: as large as the mean Poisson cohort."""
        if keys.get("cohort.name") != "cyclic" or "cohort.groups" in keys:
            return keys
        rate = keys.get("cohort.rate", self.base.to_run_config()["cohort.rate"])
        return keys | {"cohort.groups": round(1 / float(rate)), "cohort.rate": ""}

    def members(self) -> Members:
        """All cells, seed by seed; if C is chosen, the choice's cost and each cell's grid."""
        plans = self.plans()
        if not self.settings.clip_norms:
            return {
                f"{name} seed={seed}": self._settings_of(keys, seed)
                for seed in self._seeds
                for name, keys in plans.items()
            }
        return self._prices() | {
            self._label_of(name, bound): self._settings_of(
                keys | self._bound(name, bound), self._federation(name).seed
            )
            for name, keys in plans.items()
            for bound in self.settings.clip_norms
        }

    def followers(self, results: Mapping[str, Result]) -> Members:
        """Fresh seeds at the best bound of every cell whose grid is complete."""
        return {
            f"{name} seed={seed}": self._settings_of(keys | self._bound(name, choice.value), seed)
            for name, keys in self.plans().items()
            if (choice := self._choice(results, name)) is not None
            for seed in self._seeds
        }

    def run(self, settings: Mapping[str, Any]) -> Result:
        """The result of a run, or the privacy cost of the best of a random number of such runs."""
        if PRICE not in settings:
            return super().run(settings)
        config, count = self.config_of(settings[PRICE]), len(self.settings.clip_norms)
        delta, plan = config.noise.delta, release_plan(config)
        one = plan.event().over_rounds(config.rounds)
        everything = Accountant([one] * count).epsilon(delta)
        result: Result = {"one": plan.epsilon(delta), "all": everything}
        for name in NUMBERS:
            result[name] = selection_epsilon([one], count, delta, distribution=name)
        return result

    def config_of(self, settings: Mapping[str, Any]) -> RunConfig:
        """Config of a member; only with ``weights-for`` does it start from the pretrained model."""
        config = super().config_of(settings)
        return config if config.model.weights_for else config.replace(**{"model.weights": ""})

    def summary(self, rows: Sequence[Row]) -> Result:
        """Accuracies (%) after the last round, and the epsilon."""
        last = rows[-1]
        result: Result = {"test": 100 * last["test-accuracy"]}
        result["epsilon"] = last.get("epsilon", last.get("example-epsilon"))
        if "validation-accuracy" in last:
            result["validation"] = 100 * last["validation-accuracy"]
        return result

    def report(self, results: Mapping[str, Result]) -> Report:
        """The map as a table and a picture, the chosen bounds, what choosing costs, and claims."""
        tests = {name: self._tests(results, name) for name in self.plans()}
        choices = {name: self._choice(results, name) for name in tests}
        # Until fresh seeds have been run, the accuracy of the choosing seed is shown, not judged.
        chosen = {
            name: results[self._label_of(name, choice.value)]["test"]
            for name, choice in choices.items()
            if choice is not None
        }
        tables = [self._map(tests, chosen)]
        if self.settings.clip_norms:
            tables += [self._bounds(choices), self._misset(results, choices), self._price(results)]
        return Report(
            tables=tables,
            figures={name: over_seeds(values)[0] for name, values in tests.items() if values},
            claims=[
                self._claim(claim, tests)
                for claim in self.settings.claims
                if set(claim.epsilons) <= set(self.settings.epsilons)
            ],
            pictures={"map": self._picture(tests, chosen)},
            choices=[choice for choice in choices.values() if choice is not None],
        )

    def entries(self, results: Mapping[str, Result]) -> list[LeaderboardEntry]:
        """Every cell whose seeds have all been run."""
        entries = []
        for name in self.plans():
            tests = {
                member: results[member]["test"]
                for seed in self._seeds
                if (member := f"{name} seed={seed}") in results
            }
            if len(tests) == self.settings.seeds:
                federation = f"{self.settings.title}: {self._federation(name).name}"
                method = name.rpartition("eps=")[2].partition(", ")[2]
                entries.append(LeaderboardEntry(method, federation, tests))
        return entries

    @property
    def _seeds(self) -> range:
        first = 2 if self.settings.clip_norms else 1
        return range(first, first + self.settings.seeds)

    def _federation(self, name: str) -> FederationKeys:
        """The federation of a cell."""
        return next(f for f in self.settings.federations if name.startswith(f"{f.name}, "))

    def _bound(self, name: str, value: float) -> dict[str, Scalar]:
        """Key and value that set a cell's bound."""
        return {f"{_table(self._federation(name))}mechanism.clip-norm": value}

    def _label_of(self, name: str, bound: float) -> str:
        """Name of a cell's run at one bound of the grid."""
        return f"{name} C={bound:g} seed={self._federation(name).seed}"

    def _prices(self) -> Members:
        kinds = {method.noise: method for method in reversed(self.settings.methods)}
        return {
            f"{PRICE}, {noise}, eps={epsilon:g}": {
                PRICE: self._settings_of({**method.keys, "noise.target-epsilon": epsilon}, 1)
            }
            for noise, method in kinds.items()
            for epsilon in self.settings.epsilons
        }

    def _settings_of(self, keys: dict[str, Scalar], seed: int) -> dict[str, Any]:
        """Settings of a run; only runs with frozen features depend on the pretrained model."""
        settings = self.member_settings({**keys, "seed": seed})
        if "model.weights-for" not in settings["run"]:
            settings.pop("pretraining", None)
        return settings

    def _choice(self, results: Mapping[str, Result], name: str) -> BestOfGrid | None:
        """Choice of a cell's bound by validation accuracy; None before all have been run."""
        members = {bound: self._label_of(name, bound) for bound in self.settings.clip_norms}
        if not members or any(member not in results for member in members.values()):
            return None
        scores = {bound: results[member]["validation"] for bound, member in members.items()}
        return BestOfGrid(f"C of {name}", scores)

    def _tests(self, results: Mapping[str, Result], name: str) -> list[float]:
        """Test accuracies of a cell's seeds that have been run."""
        members = [f"{name} seed={seed}" for seed in self._seeds]
        return [results[member]["test"] for member in members if member in results]

    def _columns(self) -> list[tuple[str, float]]:
        """Every federation at every epsilon."""
        settings = self.settings
        return [(f.name, epsilon) for f in settings.federations for epsilon in settings.epsilons]

    def _rows(self, name: str, title: str, cell_text: Mapping[str, str | None]) -> Table:
        """A table with a row per federation and epsilon, and a column per method."""
        methods = [method.name for method in self.settings.methods]
        rows: list[list[str | float | None]] = [
            [
                f"{federation}, epsilon {epsilon:g}",
                *(cell_text.get(_cell(federation, epsilon, method)) for method in methods),
            ]
            for federation, epsilon in self._columns()
        ]
        return Table(name, title, ["federation", *methods], rows)

    def _map(self, tests: Mapping[str, Sequence[float]], chosen: Mapping[str, float]) -> Table:
        title = (
            f"{self.settings.title}: test accuracy (%) after {self.base.rounds} rounds, mean ± "
            f"s.d. of {seeds_text(self.settings.seeds)}"
        )
        cells = {name: self._text(v, chosen.get(name)) for name, v in tests.items()}
        return self._rows("map", title, cells)

    def _text(self, values: Sequence[float], chosen: float | None) -> str:
        if not values:
            return "not run" if chosen is None else f"{chosen:.2f} (seed of the choice)"
        mean, spread = over_seeds(values)
        text = f"{mean:.2f} ± {spread:.2f}" if len(values) > 1 else f"{mean:.2f}"
        complete = len(values) == self.settings.seeds
        return text if complete else f"{text} ({seeds_text(len(values))})"

    def _bounds(self, choices: Mapping[str, BestOfGrid | None]) -> Table:
        values = ", ".join(f"{bound:g}" for bound in self.settings.clip_norms)
        title = f"C that ends highest on validation examples with one seed, of {values}"
        cells = {name: f"{c.value:g}" if c is not None else None for name, c in choices.items()}
        return self._rows("bounds", title, cells)

    def _misset(
        self, results: Mapping[str, Result], choices: Mapping[str, BestOfGrid | None]
    ) -> Table:
        """Table of the test accuracy lost with a C two values of the grid away from the best."""
        bounds = self.settings.clip_norms
        cells: dict[str, str | None] = {}
        for name, choice in choices.items():
            if choice is not None:
                tests = [results[self._label_of(name, bound)]["test"] for bound in bounds]
                best = bounds.index(choice.value)
                cells[name] = ", ".join(
                    f"{tests[k] - tests[best]:+.1f}" if 0 <= k < len(bounds) else "-"
                    for k in (best - 2, best + 2)
                )
        title = (
            "Points lost by a C that is two values of the grid too small, and too large; one seed"
        )
        return self._rows("misset", title, cells)

    def _price(self, results: Mapping[str, Result]) -> Table:
        """Table of epsilon: of one run, of a random-stopping choice, and of all runs together."""
        rows: list[list[str | float | None]] = []
        for name in self._prices():
            if name in results:
                result = results[name]
                noise = name.removeprefix(f"{PRICE}, ").partition(", eps=")[0]
                rows.append([noise, result["one"], *(result[n] for n in NUMBERS), result["all"]])
        count = len(self.settings.clip_norms)
        title = (
            f"Epsilon at delta = {self.base.noise.delta:g} with the same noise: of one run, of the "
            f"best of a random number of runs of mean {count}, and of {count} runs together"
        )
        columns = ["noise and cohort", "one run", *(f"{n} number" for n in NUMBERS), "all together"]
        return Table("price", title, columns, rows)

    def _claim(self, claim: Contest, tests: Mapping[str, Sequence[float]]) -> ExperimentClaim:
        gains, names = [], []
        for federation in claim.federations:
            for epsilon in claim.epsilons:
                first, second = (
                    tests[_cell(federation, epsilon, method)]
                    for method in (claim.ahead, claim.behind)
                )
                if min(len(first), len(second)) < self.settings.seeds:
                    says = "not all of its runs are made"
                    return ExperimentClaim(claim.name, self.settings.panel, claim.says, None, says)
                gains.append(paired(first, second))
                names.append(f"{federation}, eps {epsilon:g}")
        return ExperimentClaim(
            claim.name, self.settings.panel, claim.says, all_ahead(gains), listed(gains, names)
        )

    def _picture(self, tests: Mapping[str, Sequence[float]], chosen: Mapping[str, float]) -> Figure:
        methods, columns = [m.name for m in self.settings.methods], self._columns()
        squares = []
        for federation, epsilon in columns:
            cells = [_cell(federation, epsilon, method) for method in methods]
            complete = [v for c in cells if len(v := tests.get(c, [])) == self.settings.seeds]
            # A column has no best method before all of it has been run.
            whole = len(complete) == sum(cell in tests for cell in cells)
            top = max(complete, key=lambda values: over_seeds(values)[0]) if whole else None
            squares.append(
                [self._square(tests.get(c), chosen.get(c), top, len(complete)) for c in cells]
            )
        labels = [f"{federation}, epsilon {epsilon:g}" for federation, epsilon in columns]
        return map_picture(self.settings.title, methods, labels, squares)

    def _square(
        self,
        values: Sequence[float] | None,
        chosen: float | None,
        top: Sequence[float] | None,
        methods: int,
    ) -> Square:
        """Square of a cell, compared with the best of the ``methods`` in its column."""
        if values is None:
            return Square("")
        if not values:
            return Square("not run" if chosen is None else f"{chosen:.1f}\n(seed of the choice)")
        mean = over_seeds(values)[0]
        if top is None:
            return Square(f"{mean:.1f}\n({seeds_text(len(values))})")
        behind = paired(top, values)
        # The best is compared with each of the others, so the intervals must hold jointly.
        level = behind.mean == 0 or behind.interval(max(methods - 1, 1))[0] <= 0
        return Square(f"{mean:.1f}", behind.mean, level)


def _table(federation: FederationKeys) -> str:
    """Prefix of the config keys of a federation's bound and noise."""
    return "" if federation.level == "client" else "client."


def _cell(federation: str, epsilon: float, method: str) -> str:
    return f"{federation}, eps={epsilon:g}, {method}"
