"""The leaderboard: a row for every method whose runs are stored, and rows of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.framework.config_runs import ConfigRuns, LeaderboardEntry
from experiments.framework.judge import TEXTS, markdown_table
from experiments.framework.run import Stored, directories, gathered, load
from experiments.framework.spread import mean_text
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

COLUMNS = [
    "data", "method", "level", "epsilon", "delta", "accuracy (%)", "seeds", "seconds", "date",
    "commit", "config and command",
]  # fmt: skip
NOT_STORED = "not stored"
DATA = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10 (lossy JPEG)",
}


def leaderboard() -> str:
    """The page, in Markdown: a table for each federation, the most accurate first.

    Raises
    ------
    FedsimError
        If a row of others in ``pages.toml`` lacks a column, or has another.
    """
    texts, tables = TEXTS["leaderboard"], dict[str, list[dict[str, str]]]()
    for row in [*_stored_rows(), *texts["rows"]]:
        if row.keys() != {"federation", *COLUMNS}:
            raise FedsimError(
                f"pages.toml: a row of the leaderboard has {', '.join(row)}; it must have "
                f"federation, {', '.join(COLUMNS)}."
            )
        tables.setdefault(row["federation"], []).append(row)
    blocks = [texts["introduction"].strip()]
    for title, rows in tables.items():
        ranked = sorted(rows, key=lambda row: -float(row["accuracy (%)"].split()[0]))
        cells = [[row[name] for name in COLUMNS] for row in ranked]
        blocks += [f"## {title}", markdown_table(COLUMNS, cells)]
    return "\n\n".join([*blocks, texts["rules"].strip()]) + "\n"


def _stored_rows() -> Iterator[dict[str, str]]:
    for directory in directories().values():
        experiment, everything = load(directory), Stored.load(directory)
        stored, members = gathered(experiment, everything)
        complete = len(stored.members) == len(members) or experiment.partial
        if not (complete and isinstance(experiment, ConfigRuns)):
            continue
        if experiment.pretraining is not None:
            experiment.weights = Path("model.safetensors")  # a config's name for it, not read
        for entry in experiment.entries(stored.results):
            config = experiment.config_of(members[next(iter(entry.accuracies))])
            yield _row(directory.name, config, everything, entry)


def _row(
    name: str, config: RunConfig, everything: Stored, entry: LeaderboardEntry
) -> dict[str, str]:
    stored = [everything.members[member] for member in entry.accuracies]
    spent = [one["result"].get("epsilon") for one in stored]
    private = [epsilon for epsilon in spent if epsilon is not None]
    at_clients = config.mechanism.name != "none"
    noise = config.noise if at_clients else config.client.noise
    # A run's ledger is verified before its result counts.
    proof = "ledger verified" if config.noise.entropy == "system" else "simulated"
    data = DATA.get(config.data.name, config.data.name)
    plan = next(iter(entry.accuracies)).rpartition(" seed=")[0]
    values = [
        f"{data}, features of a public part" if config.model.weights_for else data,
        entry.method,
        ("client" if at_clients else "example") if private else "none",
        f"{max(private):.2f} ({proof})" if private else "none",
        f"{noise.delta:g}" if private else "none",
        mean_text([*entry.accuracies.values()]),
        str(len(stored)),
        _seconds(stored, everything),
        _common(stored, "date"),
        _common(stored, "commit"),
        f'`fedsim experiment {name} --again --only "{plan} seed=*"`',
    ]
    return {"federation": entry.federation, **dict(zip(COLUMNS, values, strict=True))}


def _seconds(stored: Sequence[Mapping[str, Any]], everything: Stored) -> str:
    for key, where in (("seconds", ""), ("gpu", " on a GPU")):
        if all(key in one for one in stored):
            return f"{sum(one[key] for one in stored):,.0f}{where}"
    if everything.seconds:
        return f"{everything.seconds:,.0f} for all {len(everything.members)} runs"
    return f"{NOT_STORED}: {sum('seconds' not in one for one in stored)} on a GPU"


def _common(stored: Sequence[Mapping[str, Any]], key: str) -> str:
    """All different values; a run that did not record one says so."""
    return ", ".join(dict.fromkeys(one.get(key) or NOT_STORED for one in stored))
