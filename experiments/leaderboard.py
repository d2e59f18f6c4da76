"""The leaderboard: a row for every method whose runs are stored, and rows of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from experiments.framework.base import Experiment, LeaderboardEntry, read_table
from experiments.framework.config_runs import ConfigRuns
from experiments.framework.judge import TEXTS, markdown_table
from experiments.framework.run import Stored, StoredResult, directories, gathered, load
from experiments.framework.spread import mean_text
from fedsim.config import RunConfig

NOT_STORED = "not stored"
COLUMNS = {"accuracy": "accuracy (%)", "run_with": "config and command"}
DATA = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10 (lossy JPEG)",
}


@dataclass(frozen=True, kw_only=True)
class LeaderboardRow:
    """A row, in the words of the page; the federation is its table's title."""

    federation: str
    data: str
    method: str
    level: str
    epsilon: str
    delta: str
    accuracy: str
    seeds: str
    seconds: str
    date: str
    commit: str
    run_with: str


@dataclass(frozen=True)
class OthersRows:
    """``[[leaderboard.rows]]`` of pages.toml: all columns as texts, accuracy as "81.20 ± .31"."""

    rows: list[LeaderboardRow] = field(default_factory=list)


def leaderboard() -> str:
    """The page, in Markdown: a table for each federation, the most accurate first."""
    texts = TEXTS["leaderboard"]
    others = read_table(OthersRows, {"rows": texts["rows"]}, "pages.toml: leaderboard.").rows
    tables: dict[str, list[LeaderboardRow]] = {}
    for row in [*_stored_rows(), *others]:
        tables.setdefault(row.federation, []).append(row)
    names = [one.name for one in fields(LeaderboardRow)][1:]
    columns = [COLUMNS.get(name, name) for name in names]
    blocks = [texts["introduction"].strip()]
    for title, rows in tables.items():
        ranked = sorted(rows, key=lambda row: -float(row.accuracy.split()[0]))
        cells = [[getattr(row, name) for name in names] for row in ranked]
        blocks += [f"## {title}", markdown_table(columns, cells, 2)]
    return "\n\n".join([*blocks, texts["rules"].strip()]) + "\n"


def _stored_rows() -> Iterator[LeaderboardRow]:
    for directory in directories().values():
        experiment, stored = load(directory, data=Path("data")), Stored.load(directory)
        without = type(experiment).entries is Experiment.entries
        if without or not isinstance(experiment, ConfigRuns) or not stored.members:
            continue
        if experiment.pretraining is not None:
            experiment.weights = Path("model.safetensors")  # a config's name for it, not read
        found, members = gathered(experiment, stored)
        if len(found) == len(members) or experiment.partial:
            settings = {member.name: member.settings for member in members}
            for entry in experiment.entries({name: one.result for name, one in found.items()}):
                config = experiment.config_of(settings[next(iter(entry.accuracies))])
                yield _row(directory.name, config, stored, entry)


def _row(
    name: str, config: RunConfig, everything: Stored, entry: LeaderboardEntry
) -> LeaderboardRow:
    stored = [everything.members[member] for member in entry.accuracies]
    spent = [one.result.get("epsilon") for one in stored]
    private = [epsilon for epsilon in spent if epsilon is not None]
    noise = config.noise if config.mechanism.name != "none" else config.client.noise
    data = DATA.get(config.data.name, config.data.name)
    plan = next(iter(entry.accuracies)).rpartition(" seed=")[0]
    return LeaderboardRow(
        federation=entry.federation,
        data=f"{data}, features of a public part" if config.model.weights_for else data,
        method=entry.method,
        level=_level(config) if private else "none",
        epsilon=f"{max(private):.2f} ({_proof(config)})" if private else "none",
        delta=f"{noise.delta:g}" if private else "none",
        accuracy=mean_text(list(entry.accuracies.values())),
        seeds=str(len(stored)),
        seconds=_seconds(stored, everything),
        date=_common([one.date for one in stored]),
        commit=_common([one.commit for one in stored]),
        run_with=f'`fedsim experiment {name} --again --only "{plan} seed=*"`',
    )


def _level(config: RunConfig) -> str:
    return "client" if config.mechanism.name != "none" else "example"


def _proof(config: RunConfig) -> str:
    """Whether noise protects anybody; a run's ledger is verified before its result counts."""
    return "ledger verified" if config.noise.entropy == "system" else "simulated"


def _seconds(stored: Sequence[StoredResult], everything: Stored) -> str:
    cores = [one.seconds for one in stored if one.seconds is not None]
    gpus = [one.gpu for one in stored if one.gpu is not None]
    if len(cores) == len(stored):
        return f"{sum(cores):,.0f}"
    if len(gpus) == len(stored):
        return f"{sum(gpus):,.0f} on a GPU"
    if everything.untimed:
        return f"{everything.untimed:,.0f} for all {len(everything.members)} runs"
    return f"{NOT_STORED}: {len(stored) - len(cores)} on a GPU"


def _common(values: Sequence[str]) -> str:
    """All different values; a run that did not record one says so."""
    return ", ".join(dict.fromkeys(value or NOT_STORED for value in values))
