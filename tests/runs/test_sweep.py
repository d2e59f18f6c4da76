from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_runs import killed_in
from slow_cases import slow_but

import fedsim
from fedsim import RunConfig
from fedsim.allowed_code import allow
from fedsim.cli import main
from fedsim.cli.sweep_cost import _joint
from fedsim.cohorts import PoissonCohort
from fedsim.config.release_keys import split_settings
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Event, epsilon
from fedsim.reports.sweep import joint_cost, joint_example_cost
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import MetricsFile, Row
from fedsim.runs.record import RunRecord
from fedsim.runs.run_ledgers import RunLedgers
from fedsim.runs.sweep import SweepRun, grid_runs, has_run_ended, parse_axes, run_sweep
from fedsim.training import Trainer

BASE = RunConfig().replace(
    **{
        "rounds": 3,
        "partition.clients": 30,
        "cohort.name": "poisson",
        "cohort.rate": 0.4,
        "mechanism.name": "clipping",
        "noise.multiplier": 1.0,
        "client.lr": 0.5,
        "client.batch-size": 5,
    }
)


@pytest.mark.parametrize(
    "overs",
    slow_but(
        3,
        [
            ["client.lr=0.1,0.5", "seed=1,2"],
            ["partition.name=iid,shards", "server.lr=0.5,1.0"],
            ["client.name=adadp-lr", "client.state=client", "client.lr=0.1,0.2"],
            ["noise.max-epsilon=5.0,100.0"],
            ["model.dtype=float32,float64"],
            ["client.proximal=0.1,0.5"],
            [
                "server.optimizer=flwr.serverapp.strategy:FedProx",
                "client.proximal=0.1",
                "server.options.proximal-mu=0.2,0.7",
            ],
            ["client.mechanism.name=clipping", "client.noise.multiplier=1.0,2.0"],
        ],
    ),
    ids=" ".join,
)
def test_runs_of_a_sweep_end_with_the_same_bytes_as_alone(overs: list[str], tmp_path: Path) -> None:
    allow(["flwr.serverapp.strategy"])
    grid = grid_runs(BASE, parse_axes(overs))
    run_sweep(grid, tmp_path)
    for number, member in enumerate(grid):
        alone = tmp_path / f"alone-{number}"
        fedsim.run(member.config, out=alone)
        for name in ("model.safetensors", "config.toml"):
            assert (tmp_path / member.label / name).read_bytes() == (alone / name).read_bytes()
        ledgers = [
            sorted(p.name for p in d.glob("clients/*")) for d in (tmp_path / member.label, alone)
        ]
        assert ledgers[0] == ledgers[1]
        together, apart = (RunDirectory(d).metrics for d in (tmp_path / member.label, alone))
        assert together.read_text().count("\n") == apart.read_text().count("\n")


LEANING = """
from dataclasses import dataclass, replace
from fedsim.clients import SGD

@dataclass(frozen=True)
class Leaning(SGD):
    reach: float = 0.0

    def for_run(self, facts):
        return replace(self, reach=facts.mechanism.clip_norm)

    def step(self, state, gradient, at):
        super().step(state, gradient, at)
        state["theta"] *= self.reach
"""
WAVES = """
import torch

class Waves(torch.nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(input_shape[0], 16))
        self.fc = torch.nn.Linear(16, num_classes)

    def forward(self, x):
        return self.fc((x @ self.frequencies).cos())
"""


@pytest.mark.parametrize(
    ("settings", "over"),
    [
        ({"data.name": "four.npz"}, "noise.multiplier=1.0,0.0"),
        ({"model.name": "waves:Waves"}, "seed=1,2"),
        (
            {"client.name": "leaning:Leaning", "client.options.lr": 0.1},
            "mechanism.clip-norm=1.0,0.5",
        ),
        (
            {
                "mechanism.name": "none",
                "noise.multiplier": "",
                "client.mechanism.name": "adaptive-noise",
                "client.mechanism.unsafe-non-private-raw-statistics": True,
                "client.noise.multiplier": 1.0,
            },
            "client.lr=0.1,0.2",
        ),
    ],
    ids=[
        "examples that are protected or not",
        "a model with buffers of its seed",
        "an algorithm made for a bound",
        "no guarantee",
    ],
)
def test_runs_that_would_train_otherwise_share_no_block(
    settings: dict[str, Any], over: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("leaning.py").write_text(LEANING)
    Path("waves.py").write_text(WAVES)
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    # The training examples have a class that the test examples lack.
    np.savez("four.npz", x_train=x, y_train=np.arange(200) % 4, x_test=x, y_test=np.arange(200) % 3)
    base = BASE.replace(**{"client.lr": RunConfig().client.lr}).replace(**settings)
    grid = grid_runs(base, parse_axes([over]))
    run_sweep(grid, tmp_path / "sweep")
    for number, member in enumerate(grid):
        alone = tmp_path / f"alone-{number}"
        fedsim.run(member.config, out=alone)
        together = tmp_path / "sweep" / member.label
        assert (together / "model.safetensors").read_bytes() == (
            alone / "model.safetensors"
        ).read_bytes()
        names = [
            sorted(path.name for path in run.glob("clients/*.jsonl")) for run in (together, alone)
        ]
        assert names[0] == names[1]


ADAPTED = {"adapter.name": "lora", "adapter.rank": 2, "adapter.targets": "fc1"}


@pytest.mark.parametrize(
    ("settings", "over"),
    [
        ({"model.trainable": "fc2.*"}, "seed=1,2"),
        (ADAPTED, "seed=1,2"),
        (ADAPTED, "adapter.alpha=1.0,8.0"),
        (ADAPTED, "adapter.factors=both,frozen-a"),
    ],
)
def test_each_run_keeps_its_own_frozen_parameters_and_adapter(
    settings: dict[str, Any], over: str, tmp_path: Path
) -> None:
    base = BASE.replace(**{"model.name": "mlp", "model.widths": "8", "rounds": 2, **settings})
    grid = grid_runs(base, parse_axes([over]))
    run_sweep(grid, tmp_path)
    fedsim.run(grid[1].config, out=tmp_path / "alone")
    assert RunDirectory(tmp_path / grid[1].label).model.read_bytes() == (
        RunDirectory(tmp_path / "alone").model.read_bytes()
    )


def test_an_interrupted_sweep_resumes_where_it_stopped(tmp_path: Path) -> None:
    grid = grid_runs(BASE, parse_axes(["model.dtype=float32,float64"]))
    seen: list[str] = []

    def stop(member, row):
        seen.append(member.label)
        if member is grid[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(grid, tmp_path, stop)
    assert [has_run_ended(member, tmp_path) for member in grid] == [True, False]
    seen.clear()
    run_sweep(grid, tmp_path, lambda member, row: seen.append(member.label))
    assert set(seen) == {grid[1].label}
    assert all(has_run_ended(member, tmp_path) for member in grid)


def test_runs_resumed_from_their_checkpoints_end_with_the_same_bytes_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = grid_runs(BASE.replace(**{"checkpoint.every": 1}), parse_axes(["client.lr=0.1,0.5"]))
    append, made = MetricsFile.append, []

    def noted(file: MetricsFile, row: Row) -> None:
        made.append(row["round"])
        append(file, row)

    with killed_in(2):
        run_sweep(grid, tmp_path)
    monkeypatch.setattr(MetricsFile, "append", noted)
    run_sweep(grid, tmp_path)
    assert 1 not in made
    assert all(has_run_ended(member, tmp_path) for member in grid)
    for number, member in enumerate(grid):
        fedsim.run(member.config, out=tmp_path / f"alone-{number}")
        resumed, alone = (
            RunDirectory(tmp_path / name) for name in (member.label, f"alone-{number}")
        )
        assert resumed.model.read_bytes() == alone.model.read_bytes()
        assert [row["round"] for row in resumed.metrics_file.rows()] == [0, 1, 2, 3]


def test_a_directory_of_another_sweep_is_refused(tmp_path: Path) -> None:
    run_sweep(grid_runs(BASE, parse_axes(["seed=1"])), tmp_path)
    with pytest.raises(FedsimError, match="a run of another config"):
        run_sweep(grid_runs(BASE.replace(rounds=2), parse_axes(["seed=1"])), tmp_path)


def test_runs_whose_clients_share_a_directory_do_not_share_their_state(tmp_path: Path) -> None:
    weights = []
    for name, state_dir in (("memory", ""), ("files", str(tmp_path / "kept"))):
        kept = {"client.momentum": 0.9, "client.state": "client", "client.state-dir": state_dir}
        config = BASE.replace(rounds=8, **kept)
        grid = grid_runs(config, parse_axes(["client.lr=0.1,0.5"]))
        run_sweep(grid, tmp_path / name)
        models = [tmp_path / name / run.label / "model.safetensors" for run in grid]
        weights.append([fedsim.load(path.parent).weights for path in models])
    for in_memory, in_files in zip(*weights, strict=True):
        assert all(values.equal(in_files[key]) for key, values in in_memory.items())


def test_choosing_among_runs_costs_their_composition(tmp_path: Path) -> None:
    grid = grid_runs(BASE, parse_axes(["client.lr=0.1,0.2,0.3"]))
    run_sweep(grid, tmp_path)
    together = epsilon(noise_multiplier=1.0, cohort=PoissonCohort(rate=0.4), rounds=9, delta=1e-5)
    assert joint_cost(grid, 1e-5).epsilon == pytest.approx(together, rel=1e-6)
    alone = epsilon(noise_multiplier=1.0, cohort=PoissonCohort(rate=0.4), rounds=3, delta=1e-5)
    record = RunRecord.read(tmp_path / grid[0].label, RunLedgers())
    assert record.last("epsilon") == pytest.approx(alone, rel=1e-6)
    # Evaluations are a part of the plans.
    evaluated = {"evaluate.private": True, "evaluate.clients-every": 2, "evaluate.multiplier": 2.0}
    spent = Accountant([Event.of(PoissonCohort(rate=0.4), 1.0).times(9)])
    spent.add(Event.of(PoissonCohort(rate=1.0), 2.0).times(3))
    runs = grid_runs(BASE.replace(**evaluated), parse_axes(["client.lr=0.1,0.2,0.3"]))
    assert joint_cost(runs, 1e-5).epsilon == pytest.approx(spent.epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize(
    ("over", "composes"),
    [
        (["client.lr=0.1,0.2"], True),
        (["seed=1,2"], False),
        (["partition.max-examples=20,30"], False),
        (["data.validation=0.1,0.2"], False),
    ],
)
def test_the_joint_cost_is_stated_only_where_all_runs_have_the_same_clients(
    over, composes, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(BASE.replace(rounds=1).to_toml())
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "c.toml", "--out", "out", *(word for o in over for word in ("--over", o))])
    assert ended.value.code in (0, None)
    told = " ".join(capsys.readouterr().out.split())
    assert ("by composition, epsilon = " in told) == composes
    assert ("no figure for all of them together at client level: they split examples" in told) == (
        not composes
    )


def test_partitions_without_a_seed_have_the_same_clients_in_every_run() -> None:
    changes = {"partition.name": "by-owner", "partition.clients": 9}
    grid = grid_runs(BASE.replace(**changes), parse_axes(["seed=1,2"]))
    assert len({str(split_settings(member.config)) for member in grid}) == 1
    others = grid_runs(BASE.replace(**changes), parse_axes(["partition.column=owner,work"]))
    assert len({str(split_settings(member.config)) for member in others}) == 2
    dealt = grid_runs(BASE, parse_axes(["seed=1,2"]))
    assert len({str(split_settings(member.config)) for member in dealt}) == 2


def test_runs_of_different_splits_cannot_share_a_ledger(
    tmp_path: Path,
) -> None:
    protected = {"client.mechanism.name": "clipping", "client.noise.multiplier": 2.0}
    free = {"mechanism.name": "none", "noise.multiplier": ""}
    kept = {"privacy.ledger": str(tmp_path / "kept.jsonl")}
    grid = grid_runs(BASE.replace(**free, **protected, **kept), parse_axes(["seed=1,2"]))
    with pytest.raises(FedsimError, match="the costs of different people cannot be added up"):
        run_sweep(grid, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_choosing_among_runs_costs_each_clients_examples_their_composition(
    tmp_path: Path,
) -> None:
    protected = {"client.mechanism.name": "clipping", "client.noise.multiplier": 2.0}
    free = {"mechanism.name": "none", "noise.multiplier": "", "rounds": 2, "cohort.rate": 1.0}
    grid = grid_runs(BASE.replace(**free, **protected), parse_axes(["client.lr=0.1,0.5"]))
    run_sweep(grid, tmp_path)
    one, both = joint_example_cost(grid[:1], 1e-5), joint_example_cost(grid, 1e-5)
    assert both.releases == 2 * one.releases
    assert both.epsilon > one.epsilon > 0
    alone = RunRecord.read(tmp_path / grid[0].label).last("example-epsilon")
    assert one.epsilon == pytest.approx(alone)


def test_a_sweep_says_that_releases_of_different_neighbours_have_no_joint_cost() -> None:
    tree = {k: v for k, v in BASE.to_run_config().items() if k != "cohort.rate"}
    others = RunConfig.from_run_config({**tree, "cohort.name": "fixed", "cohort.size": 4})
    runs = [SweepRun({}, BASE), SweepRun({}, others)]
    told = _joint(runs, lambda runs: joint_cost(runs, 1e-5), "client")
    assert "which have no figure: events are accounted for" in told


def test_axes_take_any_values_and_refuse_nonsense() -> None:
    axes = parse_axes(["client.lr=0.1,1e-3", 'model.widths="8,8","16"', "cohort.name=full,fixed"])
    assert axes == {
        "client.lr": [0.1, 1e-3],
        "model.widths": ["8,8", "16"],
        "cohort.name": ["full", "fixed"],
    }
    for bad in (["client.lr"], ["client.lr="], ["seed=1", "seed=2"]):
        with pytest.raises(FedsimError):
            parse_axes(bad)
    with pytest.raises(FedsimError, match=r"client\.lr = -1"):
        grid_runs(BASE, {"client.lr": [0.1, -1.0]})


PLAIN = BASE.replace(**{"mechanism.name": "none", "noise.multiplier": "", "rounds": 5})


def test_a_failed_run_states_its_reason_and_the_others_finish(tmp_path: Path) -> None:
    grid = grid_runs(PLAIN, parse_axes(["client.lr=0.1,1e6"]))
    outcomes = run_sweep(grid, tmp_path)
    assert [outcomes[member.label].ended for member in grid] == ["finished", "failed"]
    assert "3 rounds in a row" in outcomes[grid[1].label].why
    assert "client.lr, server.lr or another learning rate" in outcomes[grid[1].label].why
    alone = tmp_path / "alone"
    fedsim.run(grid[0].config, out=alone)
    whole = RunDirectory(tmp_path / grid[0].label)
    assert whole.model.read_bytes() == (alone / "model.safetensors").read_bytes()
    # It would fail again: a sweep that is run once more is done.
    before = whole.metrics.stat().st_mtime_ns
    assert run_sweep(grid, tmp_path) == outcomes
    assert whole.metrics.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "over", slow_but(1, ["cohort.rate=0.02,0.4", "evaluate.clients-every=0,1,2"])
)
def test_runs_that_evaluate_at_different_rounds_end_with_the_same_bytes_as_alone(
    over: str, tmp_path: Path
) -> None:
    # With rates of their own, runs have models of their own.
    grid = grid_runs(PLAIN.replace(rounds=3), parse_axes(["client.lr=0.1,0.5", over]))
    run_sweep(grid, tmp_path)
    for number, member in enumerate(grid):
        alone = tmp_path / f"alone-{number}"
        fedsim.run(member.config, out=alone)
        together = RunDirectory(tmp_path / member.label)
        assert together.model.read_bytes() == (alone / "model.safetensors").read_bytes()
        timed = {"seconds", "clients-per-second"}
        rows = [
            [
                {k: v for k, v in row.items() if k not in timed}
                for row in directory.metrics_file.rows()
            ]
            for directory in (together, RunDirectory(alone))
        ]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("error", [ArithmeticError("overflow"), SystemExit(3)])
def test_only_the_client_that_raises_in_a_shared_block_fails(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Trainer.fit

    def fit(self: Trainer, vector: Any, client_ids: Any, round: int, **settings: Any) -> Any:
        if 33 in client_ids:
            raise error
        return honest(self, vector, client_ids, round, **settings)

    monkeypatch.setattr(Trainer, "fit", fit)
    grid = grid_runs(PLAIN.replace(**{"cohort.rate": 1.0}), parse_axes(["client.lr=0.1,0.2"]))
    rows: list[tuple[str, object]] = []
    run_sweep(grid, tmp_path, lambda member, row: rows.append((member.label, row.get("failed"))))
    # Clients are numbered one member after another: 33 is the second one's client 3.
    assert {count for label, count in rows if label == grid[0].label} == {0, None}
    assert {count for label, count in rows if label == grid[1].label} == {1, None}


def test_an_axis_reads_values_as_set_does() -> None:
    base = RunConfig().replace(**{"model.name": "mlp", "model.widths": 8})
    grid = grid_runs(base, parse_axes(["model.widths=64,[64,64]"]))
    assert [member.point["model.widths"] for member in grid] == ["64", "64,64"]
    for text in ("64,64", "[64,64]", "[64, 64]", "'64,64'"):
        typed = RunConfig.from_overrides(["model.name=mlp", f"model.widths={text}"])
        assert typed.model.widths == (64, 64)
    assert RunConfig.from_overrides(["model.name=mlp", "model.widths=64"]).model.widths == (64,)


def test_files_are_named_values_of_an_axis_that_is_no_key(tmp_path: Path) -> None:
    single, several = tmp_path / "prox.toml", tmp_path / "methods.toml"
    single.write_text("client.proximal = 0.5\n")
    several.write_text("[SCAFFOLD]\nclient.name = 'scaffold'\n[big.client]\nlr = 0.5\n")
    axes = parse_axes([f"method={single},{several}", "seed=1,2"])
    grid = grid_runs(RunConfig.parse({}), axes)
    assert [run.label for run in grid] == [
        f"method={name},seed={seed}" for name in ("prox", "SCAFFOLD", "big") for seed in (1, 2)
    ]
    prox, scaffold, big = (run.config for run in grid[::2])
    assert prox == RunConfig.parse({"client": {"proximal": 0.5}})
    assert scaffold == RunConfig.parse({"client": {"name": "scaffold"}})
    assert big == RunConfig.parse({"client": {"lr": 0.5}})


def test_two_axes_that_set_one_key_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("client.lr = 0.5\n")
    for overs in ([f"method={file}", "client.lr=0.1"], [f"a={file}", f"b={file}"]):
        with pytest.raises(FedsimError, match=r"sets client\.lr, which another axis sets too"):
            grid_runs(RunConfig.parse({}), parse_axes(overs))
    same = tmp_path / "same.toml"
    same.write_text(file.read_text())
    with pytest.raises(FedsimError, match="--over method has a value twice"):
        grid_runs(RunConfig.parse({}), parse_axes([f"method={file},{same}"]))


@pytest.mark.parametrize(
    "over",
    [
        "client.lr=0.1,0.1",
        "client.lr=0.1,0.3,0.10",
        "client.lr=1,1.0",
        "model.widths=64,'64'",
        "model.widths='64,64',[64,64]",
        "server.options.lr=0.5,0.50",
        "server.options.lr=word,'word'",
    ],
)
def test_a_value_that_is_twice_on_an_axis_is_refused(over: str) -> None:
    base = RunConfig().replace(**{"model.name": "mlp", "model.widths": 8})
    key = over.partition("=")[0]
    axes = parse_axes(["server.optimizer=mine:ServerSGD", over, "seed=1,2"])
    with pytest.raises(FedsimError, match=f"^--over {key} has a value twice"):
        grid_runs(base, axes)


def test_each_value_of_a_users_option_is_a_run_labelled_by_it() -> None:
    axes = parse_axes(["server.optimizer=mine:ServerSGD", "server.options.lr=0.5,1.0", "seed=1,2"])
    labels = [member.point["server.options.lr"] for member in grid_runs(BASE, axes)]
    assert labels == ["0.5", "0.5", "1.0", "1.0"]
    assert len({member.label for member in grid_runs(BASE, axes)}) == 4


def test_options_of_equal_text_and_different_types_have_separate_directories() -> None:
    axes = parse_axes(
        ["server.optimizer=mine:ServerSGD", "server.options.lr=1,1.0,'1',true,'true','True',word"]
    )
    grid = grid_runs(BASE, axes)
    values = [member.point["server.options.lr"] for member in grid]
    assert values == ["1", "1.0", "'1'", "True", "'true'", "'True'", "word"]
    assert len({member.label for member in grid}) == len(grid)


def test_a_bad_value_on_an_axis_is_refused_by_its_key() -> None:
    with pytest.raises(FedsimError, match=r"client\.lr = 'fast'; it must be a number"):
        grid_runs(BASE, parse_axes(["client.lr=0.1,fast,0.3"]))
    with pytest.raises(FedsimError, match=r"client\.momentum = 0\.9 has no effect with .*'adam'"):
        grid_runs(BASE, parse_axes(["client.name=sgd,adam", "client.momentum=0.9"]))


def test_an_axis_gives_what_the_config_lacks(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    text = BASE.replace(rounds=1).to_toml().splitlines()
    Path("c.toml").write_text("\n".join(x for x in text if not x.startswith("multiplier = ")))
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "c.toml", "--out", "out", "--over", "noise.multiplier=1.0,2.0"])
    assert ended.value.code in (0, None)
    with pytest.raises(SystemExit) as refused:
        main(["sweep", "c.toml", "--out", "other", "--over", "client.lr=0.1,0.2"])
    assert refused.value.code == 2
    assert "noise.multiplier = ''; it must be a number" in capsys.readouterr().err
