"""What a run costs that its own releases have ended, wherever its ledger is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from killed_runs import killed_in
from typer.testing import CliRunner

import fedsim
from fedsim import RunConfig
from fedsim.cli.app import app
from fedsim.privacy import Accountant, Event, Ledger
from fedsim.privacy.laws import PoissonLaw
from fedsim.reports.sweep import joint_example_cost
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.metrics import Row
from fedsim.runs.record import RunRecord
from fedsim.runs.session import Session

DELTA = 1e-3
CONFIG = RunConfig.parse(
    {
        "rounds": 50,
        "partition": {"clients": 6, "max-examples": 60},
        "client": {"batch-size": 10},
        "cohort": {"name": "full"},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 10.0, "delta": DELTA},
        "evaluate": {"every": 0},
    }
)
CHEAP = CONFIG.replace(**{"rounds": 1, "noise.multiplier": 1000.0})
EXAMPLES = CONFIG.replace(
    **{
        "mechanism.name": "none",
        "noise.multiplier": "",
        "client.mechanism.name": "clipping",
        "client.batch-size": 0,
        "client.steps": 1,
        "client.noise.multiplier": 10.0,
        "client.noise.delta": DELTA,
    }
)


def cost(*events: tuple[float, int]) -> float:
    """Of so many plain Gaussians of each multiplier."""
    return Accountant(Event(noise_multiplier=z, count=n) for z, n in events).epsilon(DELTA)


class StopAt(Callback):
    def __init__(self, last: int) -> None:
        self.last = last

    def on_round(self, status: RunStatus) -> str | None:
        return "enough" if status.round >= self.last else None


def stopped(out: Path, last: int = 2, config: RunConfig = CONFIG, **settings: object):
    return fedsim.run(config.replace(**settings), out=out, callbacks=[StopAt(last)])


def verified(run: Path) -> bool:
    return CliRunner().invoke(app, ["privacy", str(run), "--verify"]).exit_code == 0


def test_its_ledger_says_the_same_wherever_it_is_read(tmp_path: Path) -> None:
    result = stopped(tmp_path)
    ledger, planned = Ledger.read(tmp_path / "ledger.jsonl"), cost((10.0, 50))
    assert result.privacy.epsilon == planned
    assert result.metrics[-1]["epsilon"] == RunRecord.read(tmp_path).rows[-1]["epsilon"] == planned
    assert ledger.statement(DELTA).epsilon == planned
    assert ledger.statement(DELTA).cost.releases == ledger.num_releases == 2
    assert (ledger.cost(DELTA).epsilon, ledger.cost(DELTA).releases) == (planned, 2)
    said = " ".join(str(ledger.statement(DELTA)).split())
    assert "2 releases;" in said
    assert "Released values ended a run before its planned end" in said
    for source in (tmp_path, tmp_path / "ledger.jsonl"):
        shown = CliRunner().invoke(app, ["privacy", str(source)]).output
        assert shown.rstrip().splitlines()[-1].split() == ["2", "2", f"{planned:.4f}"]
    assert verified(tmp_path)


@pytest.mark.parametrize("declared", [False, True])
def test_overwritten_it_still_costs_what_was_planned(tmp_path: Path, declared: bool) -> None:
    stopped(tmp_path, **{"stop.callbacks": declared})
    after = fedsim.run(CHEAP, out=tmp_path, overwrite=True).privacy
    assert after.epsilon == pytest.approx(cost((10.0, 50), (1000.0, 1)))
    assert (after.cost.releases, after.before) == (3, 2)
    # A run of the same config makes none of another run's rounds.
    again = fedsim.run(CONFIG, out=tmp_path, overwrite=True).privacy
    assert again.epsilon == pytest.approx(cost((10.0, 100), (1000.0, 1)))
    assert verified(tmp_path)
    last = fedsim.run(CHEAP, out=tmp_path, overwrite=True).privacy
    assert last.epsilon == pytest.approx(cost((10.0, 100), (1000.0, 2)))
    assert last.cost.releases == 54


def test_a_declared_end_may_have_been_what_killed_it(tmp_path: Path) -> None:
    with killed_in(3):
        fedsim.run(CONFIG.replace(**{"stop.callbacks": True}), out=tmp_path)
    after = fedsim.run(CHEAP, out=tmp_path, overwrite=True).privacy
    assert after.epsilon == pytest.approx(cost((10.0, 50), (1000.0, 1)))


def test_resumed_it_makes_rounds_that_are_charged_already(tmp_path: Path) -> None:
    stopped(tmp_path, rounds=4)
    further = stopped(tmp_path / "other", rounds=4)
    assert further.privacy.epsilon == cost((10.0, 4))
    config = CONFIG.replace(rounds=6)
    result = fedsim.run(config, out=tmp_path, resume=True)
    assert [row["epsilon"] for row in result.metrics] == pytest.approx(
        [cost((10.0, n)) for n in (1, 4, 4, 4, 5, 6)]
    )
    assert (result.privacy.epsilon, result.privacy.cost.releases) == (cost((10.0, 6)), 6)
    assert Ledger.read(tmp_path / "ledger.jsonl").statement(DELTA).epsilon == cost((10.0, 6))
    assert "Released values ended" not in str(result.privacy)
    assert verified(tmp_path)
    after = fedsim.run(CHEAP, out=tmp_path, overwrite=True).privacy
    assert after.epsilon == pytest.approx(cost((10.0, 6), (1000.0, 1)))


def test_killed_and_resumed_again_it_counts_planned_rounds_once(tmp_path: Path) -> None:
    config = CONFIG.replace(**{"rounds": 10, "checkpoint.every": 4})
    stopped(tmp_path, config=config)
    with killed_in(7):
        fedsim.run(config, out=tmp_path, resume=True)
    result = fedsim.run(config, out=tmp_path, resume=True)
    assert [row["epsilon"] for row in result.metrics[1:]] == pytest.approx([cost((10.0, 10))] * 9)
    assert verified(tmp_path)


def test_a_budget_would_have_ended_it_too(tmp_path: Path) -> None:
    budget = 1.001 * cost((10.0, 5))
    result = stopped(tmp_path, **{"noise.max-epsilon": budget})
    assert result.privacy.epsilon == cost((10.0, 5)) == result.metrics[-1]["epsilon"]
    assert Ledger.read(tmp_path / "ledger.jsonl").statement(DELTA).epsilon == cost((10.0, 5))
    # The rounds that the budget allows are those that are charged.
    going_on = CONFIG.replace(**{"noise.max-epsilon": budget})
    resumed = fedsim.run(going_on, out=tmp_path, resume=True)
    assert (resumed.ended, resumed.rounds) == ("budget", 5)


def test_clients_ledgers_that_later_runs_share_count_what_it_planned(tmp_path: Path) -> None:
    shared = {"client.state-dir": str(tmp_path / "clients")}
    first = stopped(tmp_path / "a", config=EXAMPLES, name="a", **shared)
    assert (first.privacy.level, first.privacy.epsilon) == ("example", cost((10.0, 50)))
    assert first.metrics[-1]["example-epsilon"] == cost((10.0, 50))
    assert verified(tmp_path / "a")
    cheap = {"rounds": 1, "client.noise.multiplier": 1000.0, "name": "b", **shared}
    both = cost((10.0, 50), (1000.0, 1))
    second = fedsim.run(EXAMPLES.replace(**cheap), out=tmp_path / "b").privacy
    assert (second.epsilon, second.cost.releases) == (pytest.approx(both), 3)
    # Rounds that were not made are priced at the run's own noise, not at the last run's.
    (now,) = RunRecord.read(tmp_path / "a").statements
    assert now.epsilon == pytest.approx(both)
    assert verified(tmp_path / "b")


def test_one_that_declares_its_end_counts_what_another_run_of_the_same_clients_planned(
    tmp_path: Path,
) -> None:
    shared = {"client.state-dir": str(tmp_path / "clients")}
    stopped(tmp_path / "a", config=EXAMPLES, name="a", **shared)
    second = stopped(
        tmp_path / "b", config=EXAMPLES, name="b", **shared, **{"stop.callbacks": True}
    )
    spent = Accountant([Event(noise_multiplier=10.0, count=52)])  # 50 that a had planned, 2 of b
    assert (
        second.privacy.epsilon
        == spent.epsilon(DELTA / 100)
        == second.metrics[-1]["example-epsilon"]
    )
    assert verified(tmp_path / "b")
    own = str(Ledger.read(tmp_path / "b" / "ledger.jsonl").run)
    among = joint_example_cost({tmp_path / "clients": 48}, DELTA, 50, runs=[own])
    assert among.epsilon == pytest.approx(spent.epsilon(DELTA / 100))


class StopAtStart(Callback):
    def on_start(self, status: RunStatus) -> bool:
        return status.round > 0


def test_planned_evaluations_may_cost_just_what_the_rounds_do(tmp_path: Path) -> None:
    event = Event(noise_multiplier=10.0, law=PoissonLaw(rate=0.5, population=6))
    evaluated = {
        "cohort.name": "poisson",
        "cohort.rate": 0.5,
        "evaluate.private": True,
        "evaluate.clients-every": 1,
        "evaluate.fraction": 0.5,
        "evaluate.multiplier": 10.0,
        "checkpoint.every": 1,
    }
    config = CONFIG.replace(**evaluated)
    first = stopped(tmp_path, config=config.replace(rounds=20)).privacy
    assert first.epsilon == pytest.approx(Accountant([event.times(40)]).epsilon(DELTA))
    longer = config.replace(rounds=40)
    again = fedsim.run(longer, out=tmp_path, resume=True, callbacks=[StopAt(3)]).privacy
    assert again.epsilon == pytest.approx(Accountant([event.times(80)]).epsilon(DELTA))
    assert (again.cost.releases, verified(tmp_path)) == (6, True)


def test_a_callback_that_exits_has_ended_it(tmp_path: Path) -> None:
    class Exit(Callback):
        def on_round(self, status: RunStatus) -> None:
            if status.round == 2:
                sys.exit("enough")

    result = fedsim.run(CONFIG, out=tmp_path, callbacks=[Exit()])
    assert (result.ended, result.why) == ("stopped", "Stopped early: Exit has stopped it.")
    assert result.privacy.epsilon == cost((10.0, 50))
    assert Ledger.read(tmp_path / "ledger.jsonl").epsilon(DELTA) == cost((10.0, 50))


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("config", [CONFIG, EXAMPLES])
def test_it_may_end_as_it_is_resumed(tmp_path: Path, config: RunConfig, killed: bool) -> None:
    examples = config is EXAMPLES
    shared = {"client.state-dir": str(tmp_path / "clients")} if examples else {}
    config = config.replace(**{"checkpoint.every": 1, "name": "a", **shared})
    out = tmp_path / "a"
    if killed:
        with killed_in(3):
            fedsim.run(config, out=out)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "_finish_round", ending_after(2))
            assert fedsim.run(config, out=out).ended == "interrupted"
    result = fedsim.run(config, out=out, resume=True, callbacks=[StopAtStart()])
    assert (result.ended, result.rounds) == ("stopped", 2)
    column = "example-epsilon" if examples else "epsilon"
    assert result.privacy.epsilon == result.metrics[-1][column] == cost((10.0, 50))
    if not examples:
        assert Ledger.read(out / "ledger.jsonl").epsilon(DELTA) == cost((10.0, 50))
    if not killed:  # its row of round 2 stays as it was written last
        assert verified(out)
        again = fedsim.run(config, out=out, resume=True)
        assert again.metrics[1] == result.metrics[-1]
        assert again.privacy.epsilon == cost((10.0, 50))
        assert verified(out)
    if examples:
        cheap = {"rounds": 1, "client.noise.multiplier": 1000.0, "name": "b", **shared}
        after = fedsim.run(EXAMPLES.replace(**cheap), out=tmp_path / "b").privacy
        assert after.epsilon == pytest.approx(cost((10.0, 50), (1000.0, 1)))


def ending_after(last: int) -> Callable[[Session, Row], None]:
    finish_round = Session._finish_round

    def finish(session: Session, row: Row) -> None:
        if row["round"] == last:
            session.end()
        finish_round(session, row)

    return finish
