"""What runs write into their ledgers: killed, resumed, copied, overwritten, added up, ended."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_runs import killed_in
from typer.testing import CliRunner

import fedsim
from fedsim import RunConfig
from fedsim.cli.app import app
from fedsim.errors import FedsimError
from fedsim.privacy import Accountant, Event, Ledger
from fedsim.reports.verification import verify_run
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.directory import RunDirectory
from fedsim.runs.record import RunRecord
from fedsim.runs.run_ledgers import ledger_paths

DELTA = 1e-5
CLIENTS = {"mechanism.name": "clipping", "noise.multiplier": 1.0}
EXAMPLES = {"client.mechanism.name": "clipping", "client.noise.multiplier": 1.0}
LEVELS: dict[str, dict[str, Any]] = {
    "clients": CLIENTS,
    "examples": EXAMPLES,
    "both": {**CLIENTS, **EXAMPLES},
    "shares": {**CLIENTS, "noise.placement": "client"},
}
SYSTEM = {"noise.entropy": "system"}


def config(**settings: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "rounds": 5,
            "partition": {"clients": 6, "max-examples": 20},
            "client": {"batch-size": 5},
            "cohort": {"name": "full"},
            "checkpoint": {"every": 2},
            "evaluate": {"every": 0},
            "engine": {"device": "cpu"},
        }
    ).replace(**settings)


def killed(plan: RunConfig, out: Path, last: int = 4) -> None:
    """Run until this round's checkpoint and row are to be written."""
    with killed_in(last):
        fedsim.run(plan, out=out)


def rounds_of(path: Path) -> list[int | None]:
    return [entry.round for entry in Ledger.read(path).entries]


def ledgers(out: Path) -> list[Path]:
    return [path for path in ledger_paths({}, out).values() if path.exists()]


def verified(out: Path) -> bool:
    return all(check.passed for check in verify_run(out))


@pytest.mark.spanning
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("every", [2, 0])
def test_a_killed_log_is_cut_back_and_ends_with_the_same_bytes(level, workers, every, tmp_path):
    plan = config(**LEVELS[level], **{"engine.workers": workers, "checkpoint.every": every})
    out, whole = tmp_path / "run", tmp_path / "whole"
    killed(plan, out)
    assert Checkpoints(RunDirectory(out).checkpoint).rounds() == ([2] if every else [])
    assert rounds_of(out / "ledger.jsonl") == [1, 2, 3, 4]
    resumed, alone = fedsim.run(plan, out=out, resume=True), fedsim.run(plan, out=whole)
    assert resumed.ended == alone.ended == "finished"
    for name in ("model.safetensors", "config.toml"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    for mine, theirs in zip(ledgers(out), ledgers(whole), strict=True):
        assert {*rounds_of(mine)} == {1, 2, 3, 4, 5}
        assert Ledger.read(mine).heads == Ledger.read(theirs).heads
    assert [s.epsilon for s in resumed.statements] == [s.epsilon for s in alone.statements]
    assert verified(out)


@pytest.mark.spanning
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_a_round_of_evidence_that_is_drawn_again_is_charged_again(level, workers, tmp_path):
    plan = config(**LEVELS[level], **SYSTEM, **{"engine.workers": workers})
    killed(plan, tmp_path)
    lines = {path: Ledger.read(path).lines for path in ledgers(tmp_path)}
    result = fedsim.run(plan, out=tmp_path, resume=True)
    for path, before in lines.items():
        assert Ledger.read(path).lines[: len(before)] == before
    assert rounds_of(tmp_path / "ledger.jsonl") == [1, 2, 3, 4, 3, 4, 5]
    if level in ("clients", "shares"):
        assert result.privacy.cost.releases == 7
    if level in ("examples", "both"):
        worst = Ledger.read(tmp_path / "ledger-examples.jsonl").history
        assert sum(worst.counts.values()) == 7 * 4  # four steps a round
    assert verified(tmp_path)


@pytest.mark.parametrize("noise", ["blt", "banded", "lambda-cgd", "tree"])
def test_two_copies_of_a_killed_run_add_independent_noise(noise, tmp_path):
    """They ended .04 to .065 apart, where independent noise gives 25.9: one secret for both."""
    settings = {"noise.name": noise, "noise.multiplier": 5.0, "client.lr": 0.01}
    plan = config(**CLIENTS | settings, **SYSTEM)
    killed(plan, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    models = []
    for name in ("a", "b"):
        result = fedsim.run(plan, out=tmp_path / name, resume=True)
        models.append(np.concatenate([a.numpy().ravel() for a in result.arrays.values()]))
    # Three rounds' noise of z C / n an entry, less what correlation cancels.
    alike = 5.0 / 6 * np.sqrt(len(models[0]))
    assert np.linalg.norm(models[0] - models[1]) > alike


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("every", [10, 0])
def test_a_plan_charged_as_a_whole_is_charged_once_however_early_it_dies(last, every, tmp_path):
    """It was charged twice, 2.288 for 1.555, and under a budget of 1.2 times never began again."""
    settings = {"noise.name": "blt", "noise.multiplier": 8.0, "checkpoint.every": every}
    plan = config(**CLIENTS | settings, **SYSTEM).replace(rounds=12)
    cost = fedsim.run(plan).privacy.epsilon
    plan = plan.replace(**{"noise.max-epsilon": 1.4 * cost})
    killed(plan, tmp_path, last)
    result = fedsim.run(plan, out=tmp_path, resume=True)
    assert (result.ended, result.rounds) == ("finished", 12)
    redrawn = Ledger.read(tmp_path / "ledger.jsonl").entries[last : 2 * last]
    assert [entry.event.count for entry in redrawn] == [1] * last
    assert cost < result.privacy.epsilon < 1.4 * cost
    assert verified(tmp_path)


def test_a_log_is_overwritten_and_evidence_is_not(tmp_path):
    first = fedsim.run(config(**CLIENTS), out=tmp_path / "log")
    run = RunDirectory(tmp_path / "log").run
    again = fedsim.run(config(**CLIENTS), out=tmp_path / "log", overwrite=True)
    assert again.privacy.epsilon == first.privacy.epsilon
    assert again.privacy.head == first.privacy.head
    assert RunDirectory(tmp_path / "log").run != run
    for level in ("clients", "examples"):
        out = tmp_path / level
        fedsim.run(config(**LEVELS[level], **SYSTEM), out=out)
        before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
        with pytest.raises(FedsimError, match=r"is evidence of private releases.* another --out"):
            fedsim.run(config(**LEVELS[level]), out=out, overwrite=True)
        assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    fedsim.run(config(**SYSTEM), out=tmp_path / "free")  # protects nobody
    fedsim.run(config(**SYSTEM), out=tmp_path / "free", overwrite=True)


@pytest.mark.parametrize("entropy", ["config", "system"])
@pytest.mark.parametrize("level", ["clients", "examples", "both"])
def test_runs_that_name_one_ledger_add_up(level, entropy, tmp_path):
    path = tmp_path / "shared.jsonl"
    plan = config(**LEVELS[level], **{"privacy.ledger": str(path), "noise.entropy": entropy})
    first = fedsim.run(plan, out=tmp_path / "a")
    second = fedsim.run(plan.replace(**{"client.lr": 0.2}), out=tmp_path / "b")
    for one, both in zip(first.statements, second.statements, strict=True):
        assert both.cost.releases == 2 * one.cost.releases
        assert both.epsilon > one.epsilon
    assert not ledgers(tmp_path / "a")
    assert verified(tmp_path / "a")
    assert verified(tmp_path / "b")
    (read, *_) = RunRecord.read(tmp_path / "a").statements  # over all lines that they share
    assert read.epsilon == second.privacy.epsilon
    for changes, key in (
        ({"seed": 5}, "seed = 5; it must be 1"),
        ({"partition.max-examples": 19}, "partition.max-examples = 19; it must be 20"),
        ({"partition.clients": 5}, "population = 5; it must be 6"),
        ({"data.train": ":900"}, "data.train = ':900'; it must be ''"),
    ):
        with pytest.raises(FedsimError, match=f"^{key}.*other people are its clients"):
            fedsim.run(plan.replace(**changes), out=tmp_path / "c")
        assert not (tmp_path / "c").exists()
    other = "config" if entropy == "system" else "system"
    with pytest.raises(FedsimError, match="they are never mixed"):
        fedsim.run(plan.replace(**{"noise.entropy": other}), out=tmp_path / "c")


def test_one_budget_holds_for_all_runs_of_a_ledger(tmp_path):
    shared = {"privacy.ledger": str(tmp_path / "shared.jsonl"), "checkpoint.every": 1}
    plan = config(**CLIENTS, **SYSTEM, **shared)
    first = fedsim.run(plan, out=tmp_path / "a").privacy.epsilon
    limited = plan.replace(**{"noise.max-epsilon": 1.3 * first})
    second = fedsim.run(limited, out=tmp_path / "b")
    assert second.ended == "budget"
    assert first < second.privacy.epsilon <= 1.3 * first
    assert 0 < second.rounds < 5
    # A run that may end by what it has released is as long as that budget affords.
    closed = fedsim.run(limited.replace(**{"stop.callbacks": True}), out=tmp_path / "c")
    assert (closed.ended, closed.rounds) == ("budget", 0)


def test_a_log_that_others_have_extended_keeps_the_lines_that_are_no_suffix(tmp_path):
    plan = config(**CLIENTS, **{"privacy.ledger": str(tmp_path / "shared.jsonl")})
    killed(plan, tmp_path / "a")
    fedsim.run(plan.replace(rounds=1), out=tmp_path / "b")
    fedsim.run(plan, out=tmp_path / "a", resume=True)
    # Rounds 3 and 4 count twice, never too few.
    assert rounds_of(tmp_path / "shared.jsonl") == [1, 2, 3, 4, 1, 3, 4, 5]


# -- early ends -----------------------------------------------------------------------

PLANNED = config(**CLIENTS).replace(**{"rounds": 20, "noise.multiplier": 10.0})
OF_EXAMPLES = config(**EXAMPLES).replace(
    **{"rounds": 20, "client.noise.multiplier": 10.0, "client.batch-size": 0, "client.steps": 1}
)


def cost(rounds: int, z: float = 10.0) -> float:
    return Accountant([Event(noise_multiplier=z, count=rounds)]).epsilon(DELTA)


class StopAt(Callback):
    def __init__(self, last: int) -> None:
        self.last = last

    def on_round(self, status: RunStatus) -> str | None:
        return "enough" if status.round >= self.last else None


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("plan", [PLANNED, OF_EXAMPLES])
def test_an_end_by_what_was_released_costs_all_planned_rounds(plan, declared, tmp_path):
    column = "epsilon" if plan is PLANNED else "example-epsilon"
    plan = plan.replace(**{"stop.callbacks": declared})
    result = fedsim.run(plan, out=tmp_path, callbacks=[StopAt(3)])
    assert (result.ended, result.rounds) == ("stopped", 3)
    assert result.privacy.epsilon == pytest.approx(cost(20))
    spent = [row[column] for row in result.metrics]
    if declared:  # before the first round
        assert spent == pytest.approx([cost(20)] * 3)
    else:
        assert spent == pytest.approx([cost(1), cost(2), cost(20)])
    assert "all rounds up to 20 are charged" in " ".join(str(result.privacy).split())
    assert verified(tmp_path)
    again = fedsim.run(plan, out=tmp_path, resume=True)
    assert (again.ended, again.rounds) == ("finished", 20)
    assert again.privacy.epsilon == pytest.approx(cost(20))
    assert verified(tmp_path)
    if not declared:  # an open plan goes on, and pays for what goes beyond
        longer = fedsim.run(plan.replace(rounds=22), out=tmp_path, resume=True)
        assert longer.privacy.epsilon == pytest.approx(cost(22))
    else:
        with pytest.raises(FedsimError, match=r"rounds = 22; it must be 20 .* nothing extends"):
            fedsim.run(plan.replace(rounds=22), out=tmp_path, resume=True)
        with pytest.raises(FedsimError, match=r"stop\.callbacks = unset; it must be true"):
            fedsim.run(plan.replace(**{"stop.callbacks": False}), out=tmp_path, resume=True)


@pytest.mark.parametrize("declared", [False, True])
def test_a_budget_makes_a_plan_shorter_by_events_alone(declared, tmp_path):
    budget = 1.001 * cost(7)
    plan = PLANNED.replace(**{"noise.max-epsilon": budget, "stop.callbacks": declared})
    result = fedsim.run(plan, out=tmp_path / "a", callbacks=[StopAt(3)])
    assert result.privacy.epsilon == pytest.approx(cost(7)) == result.metrics[-1]["epsilon"]
    whole = fedsim.run(plan, out=tmp_path / "b")
    assert (whole.ended, whole.rounds) == ("budget", 7)
    assert "round 8 would exceed max-epsilon" in whole.why
    assert whole.privacy.epsilon == pytest.approx(cost(7))
    if declared:  # nothing extends it
        more = plan.replace(**{"noise.max-epsilon": 2 * budget})
        assert fedsim.run(more, out=tmp_path / "b", resume=True).rounds == 7
    correlated = plan.replace(**{"noise.name": "blt", "stop.callbacks": True})
    with pytest.raises(FedsimError, match="the cost of rounds that are charged together"):
        fedsim.run(correlated, out=tmp_path / "c")


def test_a_clients_budget_makes_the_rest_of_a_plan_shorter(tmp_path):
    """All 20 rounds were charged: the run exceeded its budget, and could not be resumed."""
    budget = {"client.noise.max-epsilon": 1.001 * cost(7)}
    plan = OF_EXAMPLES.replace(**budget)
    result = fedsim.run(plan, out=tmp_path / "a", callbacks=[StopAt(3)])
    assert result.privacy.epsilon == pytest.approx(cost(7))
    resumed = fedsim.run(plan, out=tmp_path / "a", resume=True)
    assert (resumed.ended, resumed.rounds) == ("budget", 7)
    assert resumed.privacy.epsilon == pytest.approx(cost(7))
    spent = fedsim.run(plan, out=tmp_path / "b", callbacks=[StopAt(7)])
    assert spent.privacy.epsilon == pytest.approx(cost(7))


def test_of_clients_that_have_spent_unequally_each_is_charged_what_its_budget_affords(tmp_path):
    sampled = {"cohort.name": "poisson", "cohort.rate": 0.5}
    budget = {"client.noise.max-epsilon": 1.001 * cost(6)}
    plan = OF_EXAMPLES.replace(**sampled, **budget, rounds=8)
    fedsim.run(plan, out=tmp_path, callbacks=[StopAt(4)])
    ledger = Ledger.read(tmp_path / "ledger-examples.jsonl")
    made = Counter(c for e in ledger.entries if not e.through for c in e.clients or ())
    assert len({*made.values()}) > 1
    charged = {c: sum(history.counts.values()) for c, history in ledger.histories.items()}
    assert charged == {client: min(count + 4, 6) for client, count in made.items()}


@pytest.mark.parametrize("plan", [PLANNED, OF_EXAMPLES])
def test_an_end_after_a_redrawn_round_costs_all_that_was_drawn_and_the_rest(plan, tmp_path):
    """Its metrics were refused, since the ledger has a later round than the last row."""
    plan = plan.replace(**SYSTEM)
    killed(plan, tmp_path)
    result = fedsim.run(plan, out=tmp_path, resume=True, callbacks=[StopAt(3)])
    assert result.rounds == 3
    assert result.privacy.epsilon == pytest.approx(cost(4 + 1 + 17))
    assert verified(tmp_path)
    # Of the rest, round 4 has been drawn before.
    again = fedsim.run(plan, out=tmp_path, resume=True)
    assert again.privacy.epsilon == pytest.approx(cost(4 + 1 + 17 + 1))
    assert verified(tmp_path)


@pytest.mark.parametrize("last", [5, 25])
@pytest.mark.parametrize("entropy", ["config", "system"])
@pytest.mark.parametrize("plan", [PLANNED, OF_EXAMPLES])
def test_a_longer_run_that_is_ended_again_costs_all_its_rounds(plan, entropy, last, tmp_path):
    """At example level, those beyond the first plan cost nothing, or only what was made of them."""
    plan = plan.replace(**{"noise.entropy": entropy})
    fedsim.run(plan, out=tmp_path, callbacks=[StopAt(3)])
    longer = plan.replace(rounds=30)
    result = fedsim.run(longer, out=tmp_path, resume=True, callbacks=[StopAt(last)])
    assert (result.ended, result.rounds) == ("stopped", last)
    assert result.privacy.epsilon == pytest.approx(cost(30))
    assert verified(tmp_path)


def test_private_evaluations_are_charged_with_the_plan_that_may_end(tmp_path):
    evaluated = {
        "cohort.name": "poisson",
        "cohort.rate": 0.5,
        "evaluate.private": True,
        "evaluate.clients-every": 3,
        "evaluate.multiplier": 20.0,
        "stop.callbacks": True,
    }
    result = fedsim.run(PLANNED.replace(**evaluated), out=tmp_path, callbacks=[StopAt(4)])
    open_plan = PLANNED.replace(**evaluated).replace(**{"stop.callbacks": False})
    assert result.privacy.epsilon == pytest.approx(fedsim.run(open_plan).privacy.epsilon)
    assert len({row["epsilon"] for row in result.metrics}) == 1
    assert verified(tmp_path)


@pytest.mark.parametrize("entropy", ["config", "system"])
def test_killed_and_resumed_a_closed_plan_is_charged_once(entropy, tmp_path):
    plan = PLANNED.replace(**{"stop.callbacks": True, "noise.entropy": entropy, "rounds": 10})
    killed(plan, tmp_path)
    result = fedsim.run(plan, out=tmp_path, resume=True)
    drawn_again = 2 if entropy == "system" else 0
    assert result.privacy.epsilon == pytest.approx(cost(10 + drawn_again))
    assert verified(tmp_path)


def test_at_example_level_an_end_by_releases_needs_a_full_cohort():
    sampled = {"cohort.name": "poisson", "cohort.rate": 0.5, "stop.callbacks": True}
    with pytest.raises(FedsimError, match=r"cohort\.name = 'poisson'; it must be 'full'"):
        fedsim.run(OF_EXAMPLES.replace(**sampled))


def test_a_target_is_met_at_delta_whether_or_not_releases_may_end_the_run():
    target = PLANNED.replace(**{"noise.multiplier": "", "noise.target-epsilon": 2.0})
    stops = target.replace(**{"stop.callbacks": True})
    assert fedsim.run(stops).privacy.epsilon == fedsim.run(target).privacy.epsilon


def test_an_end_that_nobody_declared_is_assumed_and_its_plan_priced(tmp_path):
    killed(PLANNED, tmp_path)
    (statement,) = RunRecord.read(tmp_path).statements
    assert statement.epsilon == pytest.approx(cost(4))
    said = " ".join(str(statement).split())
    assert "Assumed: that the run has ended after 4 of 20 planned rounds does not follow" in said
    assert f"all of them would cost epsilon {cost(20):.4g}" in said
    assert "planned rounds" not in str(fedsim.run(PLANNED, out=tmp_path, resume=True).privacy)


def test_a_callback_that_exits_has_ended_it(tmp_path):
    class Exit(Callback):
        def on_round(self, status: RunStatus) -> None:
            if status.round == 2:
                sys.exit("enough")

    result = fedsim.run(PLANNED, out=tmp_path, callbacks=[Exit()])
    assert (result.ended, result.why) == ("stopped", "Stopped early: Exit has stopped it.")
    assert result.privacy.epsilon == pytest.approx(cost(20))


def test_a_free_run_that_may_end_early_is_resumed_for_longer(tmp_path):
    free = config(**{"stop.callbacks": True})
    fedsim.run(free, out=tmp_path, callbacks=[StopAt(2)])
    assert fedsim.run(free.replace(rounds=7), out=tmp_path, resume=True).rounds == 7


# -- what lies beside it --------------------------------------------------------------


def test_a_run_leaves_no_key_no_archive_and_no_hash_of_data(tmp_path):
    fedsim.run(config(**LEVELS["both"]), out=tmp_path)
    fedsim.run(config(**LEVELS["both"]), out=tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".fedsim-run", "checkpoint", "config.toml", "done", "ledger.jsonl",
        "ledger-examples.jsonl", "manifest.json", "metrics.csv", "model.safetensors",
        "report.html", "summary.json",
    }  # fmt: skip


def test_a_last_line_that_is_cut_short_is_dropped_unless_a_checkpoint_counts_it(tmp_path):
    plan = config(**CLIENTS)
    killed(plan, tmp_path / "a")
    for cut in (9, 1):
        out = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "a", out)
        data = (out / "ledger.jsonl").read_bytes()
        (out / "ledger.jsonl").write_bytes(data[:-cut])
        assert fedsim.run(plan, out=out, resume=True).ended == "finished"
        assert rounds_of(out / "ledger.jsonl") == [1, 2, 3, 4, 5]
    lines = (tmp_path / "a" / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a" / "ledger.jsonl").write_bytes(b"".join(lines[:3])[:-5])  # of round 2
    with pytest.raises(FedsimError, match=r"does not (hold|continue)"):
        fedsim.run(plan, out=tmp_path / "a", resume=True)


def test_verification_says_what_it_does_not_cover(tmp_path):
    fedsim.run(config(**CLIENTS), out=tmp_path)
    shutil.rmtree(tmp_path / "checkpoint")
    shown = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert shown.exit_code == 0
    assert "Not covered: checkpoint/" in " ".join(shown.output.split())


@pytest.mark.parametrize("change", ["x", "sizes"])
def test_a_run_is_resumed_with_data_of_the_shape_and_split_that_it_began_with(change, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 3, 60)
    path = tmp_path / "data.npz"

    def write(x: Any, y: Any) -> None:
        np.savez(path, x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])

    plan = config(**CLIENTS, **{"data.name": str(path), "data.classes": 3})
    write(x, y)
    killed(plan, tmp_path / "run")
    write(*((x.astype(np.float64), y) if change == "x" else (x[:55], y[:55])))
    other = "inputs of another shape or type" if change == "x" else "other numbers of examples"
    with pytest.raises(FedsimError, match=rf"^data\.name = .*{other}"):
        fedsim.run(plan, out=tmp_path / "run", resume=True)
    write(x + np.float32(0.25), y)  # contents are the user's
    assert fedsim.run(plan, out=tmp_path / "run", resume=True).ended == "finished"
