"""A run that was killed and is resumed ends with the bytes of one that was not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from killed_runs import killed_in
from slow_cases import slow_but

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.federation.accounting import Accounting
from fedsim.privacy import Accountant, Ledger
from fedsim.runs.callbacks import Measure
from fedsim.runs.checkpoints import Checkpoints, RunState
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import MetricsFile, Row
from fedsim.runs.resolve import resolve
from fedsim.runs.session import Session

BASE = RunConfig.parse(
    {
        "seed": 7,
        "rounds": 6,
        "partition": {"clients": 8, "max-examples": 160},
        "model": {"name": "mlp", "widths": "8"},
        "client": {"batch-size": 5, "epochs": 1},
        "cohort": {"name": "poisson", "rate": 0.5},
        "checkpoint": {"every": 2},
        "engine": {"device": "cpu"},
    }
)
PRIVATE = {
    "mechanism.name": "quantile-clipping",
    "mechanism.bit-noise": 0.5,
    "noise.multiplier": 1.0,
}
EXAMPLES = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
ADADP = {"client.name": "adadp-lr"}
PLAN = {"mechanism.name": "clipping", "noise.multiplier": 2.0}
GROUPS = {**PLAN, "cohort.name": "cyclic", "cohort.groups": 3, "cohort.rate": 0.8}
APART = {**PLAN, "cohort.name": "separated", "cohort.separation": 2, "cohort.max-participations": 2}
EVALUATED = {
    "mechanism.name": "clipping",
    "evaluate.private": True,
    "evaluate.clients-every": 2,
    "evaluate.quantiles": True,
    "evaluate.ranges": "loss(0,4)",
}
CASES: dict[str, dict[str, Any]] = {
    "nothing private": {},
    "momentum": {**PRIVATE, "server.momentum": 0.9},
    "adam": {**PRIVATE, "server.optimizer": "adam", "server.lr": 0.01},
    "flower's yogi": {**PRIVATE, "server.optimizer": "fedyogi"},
    "an average of the model": {
        **PRIVATE,
        "server.optimizer": "averaged",
        "server.decay": 0.5,
        "server.schedule": "cosine(length=6)",
    },
    "a schedule": {
        **PRIVATE,
        "server.optimizer": "fedadagrad",
        "server.lr": 0.01,
        "server.schedule": "cosine(length=6)",
    },
    "personal parameters": {
        "model.personal": "fc2.*",
        "client.state": "client",
        "evaluate.every": 0,
        "evaluate.clients-every": 2,
    },
    "layers": {**PRIVATE, "mechanism.per-layer": True},
    "adaclip": {"mechanism.name": "adaclip", "noise.multiplier": 1.0},
    "clients keep their rate": {**ADADP, "client.state": "client"},
    "on the disk": {**ADADP, "client.state": "client", "client.state-dir": "kept"},
    "private examples": {**EXAMPLES, **ADADP, "client.state": "client"},
    "private examples in passes": {
        **EXAMPLES,
        "client.noise.sampling": "shuffle",
        "client.epochs": 2,
        "client.state": "client",
    },
    "both levels": {**PRIVATE, **EXAMPLES},
    "a budget": {**PRIVATE, "noise.max-epsilon": 9.0},
    "a client's budget": {**EXAMPLES, "client.noise.max-epsilon": 30.0},
    "target epsilon": {"mechanism.name": "clipping", "noise.target-epsilon": 3.0},
    "shares": {"mechanism.name": "clipping", "noise.multiplier": 1.0, "noise.placement": "client"},
    "masked shares": {
        **PLAN,
        "noise.placement": "client",
        "cohort.rate": 0.9,
        "secagg.threshold": 3,
        "secagg.simulate": True,
    },
    "private control variates": {
        **PLAN,
        "client.name": "scaffold",
        "client.state": "client",
        "client.epochs": 1,
        "client.steps": 3,
    },
    "banded noise, amplified": {**GROUPS, "noise.name": "banded"},
    "banded noise": {**APART, "noise.name": "banded", "noise.bands": 4},
    "buffered noise": {**GROUPS, "noise.name": "blt"},
    "lambda-CGD": {**GROUPS, "noise.name": "lambda-cgd", "noise.hardened": False},
    "a tree": {**GROUPS, "noise.name": "tree"},
    "a target for a plan": {
        "cohort.name": "cyclic",
        "cohort.groups": 3,
        "mechanism.name": "clipping",
        "noise.name": "banded",
        "noise.target-epsilon": 3.0,
    },
    "a budget of a plan": {**APART, "noise.name": "tree", "noise.max-epsilon": 40.0},
    "a random allocation": {
        **PLAN,
        "cohort.name": "allocation",
        "cohort.participations": 2,
        "cohort.rate": "",
    },
    "a random allocation in blocks": {
        **PLAN,
        "cohort.name": "allocation",
        "cohort.participations": 2,
        "cohort.blocks": True,
        "cohort.rate": "",
    },
    "groups in turn": {**GROUPS, "noise.max-epsilon": 5.5},
    "private evaluations": {**EVALUATED, "cohort.rate": 0.5, "noise.target-epsilon": 9.0},
    "private evaluations of groups, with a budget": {
        **GROUPS,
        **EVALUATED,
        "noise.name": "banded",
        "evaluate.fraction": 0.5,
        "evaluate.multiplier": 1.5,
        "noise.max-epsilon": 9.0,
    },
    "a stop by private evaluations": {
        **PLAN,
        **EVALUATED,
        "evaluate.multiplier": 3.0,
        "stop.metric": "clients-accuracy",
        "stop.patience": 2,
    },
}


FAST = (
    "momentum", "personal parameters", "layers", "on the disk", "a budget", "shares",
    "private control variates", "banded noise", "a random allocation", "groups in turn",
    "private evaluations",
)  # fmt: skip
"""Every part of a run's state, once or twice."""


def left(directory: Path) -> dict[str, object]:
    """What a run must have the same: all but times and seconds."""
    run = RunDirectory(directory)
    rows = [
        {k: v for k, v in row.items() if k not in ("seconds", "clients-per-second")}
        for row in run.metrics_file.rows()
    ]
    ledgers = sorted([run.ledger, *directory.rglob("client-*.jsonl")])
    return {
        "model": run.model.read_bytes(),
        "rows": rows,
        "clients": run.client_metrics.exists() and run.client_metrics.read_bytes(),
        "ledgers": {str(path.relative_to(directory)): hashes(path) for path in ledgers},
    }


def hashes(ledger: Path) -> list[str]:
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    return [json.loads(line)["hash"] for line in lines]


@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(case, tmp_path):
    settings = dict(CASES[case])
    for name in ("whole", "killed"):
        if "client.state-dir" in settings:
            settings["client.state-dir"] = str(tmp_path / name / "clients" / "kept")
        config = BASE.replace(**settings)
        if name == "whole":
            whole = fedsim.run(config, out=tmp_path / name)
            continue
        with killed_in(4):
            fedsim.run(config, out=tmp_path / name)
    assert Checkpoints(tmp_path / "killed" / "checkpoint").rounds() == [2]
    resumed = fedsim.run(config, out=tmp_path / "killed", resume=True)
    assert resumed.ended == whole.ended
    assert left(tmp_path / "killed") == left(tmp_path / "whole")
    assert str(resumed.privacy.epsilon) == str(whole.privacy.epsilon)


def test_a_run_may_be_resumed_again_after_its_metrics_have_changed(tmp_path):
    config = BASE.replace(**{"rounds": 2, "evaluate.clients-every": 1})
    fedsim.run(config, out=tmp_path)
    changes = {"rounds": 3, "evaluate.clients-every": 0}
    fedsim.run(config.replace(**changes), out=tmp_path, resume=True)
    last = fedsim.run(config.replace(rounds=4), out=tmp_path, resume=True)
    assert [row["round"] for row in last.metrics if "clients-loss" in row] == [1, 2, 4]
    assert RunDirectory(tmp_path).metrics_file.rows() == last.metrics
    lines = (tmp_path / "client-metrics.csv").read_text().splitlines()
    assert lines[0] == "round,client,num-examples,loss,accuracy"
    assert [line.partition(",")[0] for line in lines[1:]] == [n for n in "124" for _ in range(8)]


def test_clients_state_of_a_checkpoint_is_kept_in_a_directory_that_is_given_on_resume(tmp_path):
    config = BASE.replace(**CASES["clients keep their rate"])
    whole = fedsim.run(config, out=tmp_path / "whole")
    with killed_in(4):
        fedsim.run(config, out=tmp_path / "killed")
    on_disk = config.replace(**{"client.state-dir": str(tmp_path / "clients")})
    resumed = fedsim.run(on_disk, out=tmp_path / "killed", resume=True)
    norms, expected = ([row.get("update-norm") for row in r.metrics] for r in (resumed, whole))
    assert norms == expected


def test_a_state_of_another_format_is_refused():
    kept, text = Session(resolve(BASE)).state().to_parts()
    with pytest.raises(ValueError, match="has format 9, and this fedsim reads"):
        RunState.from_parts(kept, text.replace('"format": 3', '"format": 9'))


@pytest.mark.parametrize("case", ["banded noise", "a tree", "lambda-CGD"])
def test_a_plan_of_the_systems_entropy_goes_on_with_a_fresh_secret(case, tmp_path):
    config = BASE.replace(**CASES[case], **{"noise.entropy": "system"})
    with killed_in(4):
        fedsim.run(config, out=tmp_path)
    state = Checkpoints(tmp_path / "checkpoint").newest().strategy["noise"]
    ((first, secret),) = state["secrets"]
    assert first == 1
    with killed_in(5):
        fedsim.run(config, out=tmp_path, resume=True)
    # Rounds 1 and 2 keep theirs; those that are made since have one of their own.
    again = Checkpoints(tmp_path / "checkpoint").newest().strategy["noise"]["secrets"]
    assert [pair[0] for pair in again] == [1, 3]
    assert again[0] == [1, secret] != again[1]
    resumed = fedsim.run(config, out=tmp_path, resume=True)
    entries = Ledger.read(tmp_path / "ledger.jsonl").entries
    # Rounds 3 to 5 were drawn twice: each is a row of the plan more, and nothing else.
    assert [entry.round for entry in entries] == [1, 2, 3, 4, 3, 4, 5, 5, 6]
    plan = resolve(RunConfig.load(tmp_path / "config.toml")).plan
    charged = [plan.charge(t) for t in range(1, 7)]
    charged += [plan.charge(t, redrawn=True) for t in (3, 4, 5)]
    spent = Accountant(charged).epsilon(config.noise.delta)
    assert resumed.privacy.epsilon == pytest.approx(spent)
    # Nobody needs the secret any more, and nothing else has it.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_after_a_row_that_could_not_be_written_no_checkpoint_counts_on_it(tmp_path, monkeypatch):
    append = MetricsFile.append

    def full_in_round_2(file: MetricsFile, row: Row) -> None:
        if row["round"] == 2:
            time.sleep(0.5)  # the next rounds are done meanwhile
            raise OSError(28, "No space left on device", str(file.path))
        append(file, row)

    monkeypatch.setattr(MetricsFile, "append", full_in_round_2)
    config = BASE.replace(**{"checkpoint.every": 1})
    with pytest.raises((FedsimError, OSError), match="No space left"):
        fedsim.run(config, out=tmp_path)
    monkeypatch.setattr(MetricsFile, "append", append)
    assert Checkpoints(tmp_path / "checkpoint").rounds() == [1, 2]
    resumed = fedsim.run(config, out=tmp_path, resume=True)
    assert [row["round"] for row in resumed.metrics] == list(range(7))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize("rounds", [0, 0.5, 1])
def test_a_resume_that_fails_before_its_first_round_leaves_what_it_found(
    rounds, tmp_path, monkeypatch
):
    config, out = BASE.replace(**{"rounds": 2, **PRIVATE}), tmp_path / "run"
    fedsim.run(config, out=out)
    found = files_of(out)
    assert {"done", "report.html", "summary.json", "manifest.json"} <= {*found}
    append = MetricsFile.append

    def fails(*_):
        raise FedsimError("the strategy's state is of another model.")

    def only_once(self, row):
        monkeypatch.setattr(MetricsFile, "append", fails)
        append(self, row)

    if rounds == 1:
        monkeypatch.setattr(MetricsFile, "append", only_once)
    elif rounds:  # in the first one, at its ledger line
        monkeypatch.setattr(Accounting, "record", fails)
    else:
        monkeypatch.setattr("fedsim.runs.runner.drive", fails)
    with pytest.raises(FedsimError, match="of another model"):
        fedsim.run(config.replace(rounds=5), out=out, resume=True)
    assert (files_of(out) == found) == (rounds < 1)
    monkeypatch.undo()
    resumed = fedsim.run(config.replace(rounds=5), out=out, resume=True)
    assert (resumed.ended, resumed.metrics[-1]["round"]) == ("finished", 5)


def test_a_failed_run_keeps_the_model_of_its_last_row_also_after_another_failure(
    tmp_path, monkeypatch
):
    config, out = BASE.replace(**{"checkpoint.every": 4, **PRIVATE}), tmp_path / "run"
    record = Accounting.record

    def fails(*_):
        raise FedsimError("memory is exhausted.")

    def fails_after_line_5(self, server_round, *arguments):
        reason = record(self, server_round, *arguments)
        return fails() if server_round == 5 else reason

    def fails_before_line_6(self, server_round, *arguments):
        return fails() if server_round == 6 else record(self, server_round, *arguments)

    for resume, failing, last in ((False, fails_after_line_5, 4), (True, fails_before_line_6, 5)):
        monkeypatch.setattr(Accounting, "record", failing)
        with pytest.raises(FedsimError, match="memory is exhausted"):
            fedsim.run(config, out=out, resume=resume)
        monkeypatch.setattr(Accounting, "record", record)
        fedsim.run(config.replace(rounds=last), out=tmp_path / f"{last}")
        saved, expected = fedsim.load(out), fedsim.load(tmp_path / f"{last}")
        assert saved.round == saved.metrics[-1]["round"] == last
        assert all(values.equal(expected.weights[name]) for name, values in saved.weights.items())


def test_early_stopping_judges_no_round_without_its_metric_on_resume(tmp_path: Path) -> None:
    # A round that measures nothing, three after the best so far, ended a resumed run at once.
    class Interrupts(fedsim.Callback):
        def on_round(self, status: fedsim.RunStatus) -> None:
            if status.round == 8:
                raise KeyboardInterrupt

    config = RunConfig().replace(
        **{"rounds": 9, "partition.clients": 5, "client.lr": 0.3, "checkpoint.every": 7},
        **{"data.validation": 0.1, "evaluate.every": 4, "stop.metric": "validation-loss"},
        **{"stop.patience": 3},
    )
    whole = fedsim.run(config)
    cut = fedsim.run(config, out=tmp_path / "run", callbacks=[Interrupts()])
    assert cut.ended == "interrupted"
    resumed = fedsim.run(config, out=tmp_path / "run", resume=True)
    assert (
        (len(whole.metrics), whole.ended)
        == (len(resumed.metrics), resumed.ended)
        == (10, "finished")
    )


def test_the_best_checkpoint_is_of_a_round_that_was_not_repeated(tmp_path, monkeypatch) -> None:
    config = BASE.replace(
        **{**PLAN, "noise.entropy": "system", "data.validation": 0.2, "rounds": 6,
           "checkpoint.best": "validation-loss"}
    )  # fmt: skip

    class Kill(fedsim.Callback):
        def on_round(self, status: fedsim.RunStatus) -> None:
            if status.round == 4:
                raise KeyboardInterrupt

    best_rounds = [1, 3]
    monkeypatch.setattr(Measure, "improves", lambda self, row, best: row["round"] in best_rounds)
    killed = fedsim.run(config, out=tmp_path / "run", callbacks=Kill())
    checkpoints = Checkpoints(tmp_path / "run/checkpoint")
    assert (killed.rounds, checkpoints.rounds(), checkpoints.rounds("best")) == (4, [2], [1, 3])
    best_rounds.clear()  # no repeated or later round is as good as the first
    fedsim.run(config, out=tmp_path / "run", resume=True)
    assert (checkpoints.rounds(), checkpoints.rounds("best")) == ([4, 6], [1])
    saved = fedsim.load(tmp_path / "run", best=True)
    row = dict(saved.best.row)
    assert row == saved.metrics[1]
    best_rounds[:] = [7, 9, 10]
    longer = config.replace(rounds=10)
    fedsim.run(longer, out=tmp_path / "run", resume=True)
    assert (checkpoints.rounds(), checkpoints.rounds("best")) == ([8, 10], [7, 10])


@pytest.mark.parametrize(
    "hidden",
    [{"evaluate.clients-every": 0}, {"evaluate.private": True, "evaluate.multiplier": 3.0}],
)
def test_metrics_without_noise_of_earlier_rounds_stay_in_the_statement(hidden, tmp_path) -> None:
    shown = {"evaluate.clients-every": 1, "evaluate.unprotected": True, "rounds": 2}
    config, out = BASE.replace(**{**PLAN, **shown}), tmp_path / "run"
    fedsim.run(config, out=out)
    found = files_of(out)
    with pytest.raises(FedsimError, match=r"evaluate.unprotected = false; it must be true as it"):
        fedsim.run(
            config.replace(**{"rounds": 4, "evaluate.unprotected": False, **hidden}),
            out=out,
            resume=True,
        )
    assert files_of(out) == found
    quiet = fedsim.run(
        config.replace(**{"rounds": 4, "evaluate.clients-every": 0}), out=out, resume=True
    )
    assert "clients-loss" not in quiet.metrics[-1]
    assert "loss (means and quantiles) of clients' own evaluations" in str(quiet.privacy)
