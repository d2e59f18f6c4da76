"""What --resume refuses, what it allows, and what it says."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import Ledger
from fedsim.privacy.manifest import LEDGER_KEY, new_key
from fedsim.reports.verification import verify_run
from fedsim.runs.callbacks import Callback, RunStatus
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.directory import RunDirectory
from fedsim.runs.record import read_all
from fedsim.runs.run_ledgers import RunOutcome
from fedsim.runs.summary import complete_record

CONFIG = RunConfig.parse(
    {
        "rounds": 4,
        "partition": {"clients": 6, "max-examples": 60},
        "client": {"batch-size": 5},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
        "checkpoint": {"every": 2},
        "engine": {"device": "cpu"},
    }
)


@pytest.fixture
def done(tmp_path: Path) -> RunDirectory:
    fedsim.run(CONFIG, out=tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def resume(directory: RunDirectory, **changes: object):
    config = RunConfig.load(directory.config).replace(**changes)
    return fedsim.run(config, out=directory.path, resume=True)


def test_a_finished_run_says_so_is_left_as_it_was_and_can_be_given_more_rounds(
    done, tmp_path, caplog
):
    model, ledger = done.model.read_bytes(), done.ledger.read_bytes()
    assert [row["round"] for row in resume(done).metrics] == [0, 1, 2, 3, 4]
    assert "has finished all 4 rounds; " in caplog.text
    caplog.clear()
    assert (done.model.read_bytes(), done.ledger.read_bytes()) == (model, ledger)
    longer = resume(done, rounds=6)
    fedsim.run(CONFIG.replace(rounds=6), out=tmp_path / "six")
    assert done.model.read_bytes() == RunDirectory(tmp_path / "six").model.read_bytes()
    assert longer.ended == "finished"


def test_a_finished_run_that_is_resumed_without_its_key_stays_signed(tmp_path, monkeypatch):
    directory, public = RunDirectory(tmp_path / "run"), new_key(tmp_path / "key.pem")
    monkeypatch.setenv(LEDGER_KEY, str(tmp_path / "key.pem"))
    fedsim.run(CONFIG, out=directory.path)
    monkeypatch.delenv(LEDGER_KEY)
    assert resume(directory).ended == "finished"
    assert all(check.passed for check in verify_run(directory.path, public))
    # The key has not vouched for further rounds.
    resume(directory, rounds=5)
    assert not directory.signature.exists()


def test_a_resumed_run_cannot_have_fewer_rounds_than_it_has_made(done):
    config = done.config.read_bytes()
    with pytest.raises(FedsimError, match="it must be at least 4, the last round of the run"):
        resume(done, rounds=3)
    assert done.config.read_bytes() == config


@pytest.mark.parametrize("content", [b"\xff\xfe\x00round\n1\n", b"round,test-loss\n1,much\n"])
def test_metrics_that_cannot_be_read_are_refused_in_a_sentence(done, content):
    done.metrics.write_bytes(content)
    with pytest.raises(FedsimError, match=r"metrics\.csv is damaged .*remove it"):
        resume(done, rounds=6)
    with pytest.raises(FedsimError, match=r"metrics\.csv is damaged"):
        complete_record(done.path)
    done.metrics.unlink()
    assert resume(done, rounds=6).metrics[-1]["round"] == 6


def test_what_a_run_without_its_config_has_left_is_no_run_to_go_on_with(done):
    done.config.unlink()
    with pytest.raises(FedsimError, match=r"metrics\.csv.* of a run but not its config\.toml"):
        fedsim.run(CONFIG, out=done.path, resume=True)
    fedsim.run(CONFIG.replace(rounds=1), out=done.path, overwrite=True)


def test_a_later_fedsims_directory_is_neither_loaded_nor_shown_nor_compared(done):
    (done.path / ".fedsim-run").write_text('{"format": 9}')
    for look in (fedsim.load, complete_record, lambda path: read_all([path])):
        with pytest.raises(FedsimError, match="format 9, and this fedsim knows 1"):
            look(done.path)


def test_a_run_of_another_version_whose_statement_needs_its_config_says_so(tmp_path):
    fedsim.run(CONFIG.replace(**{"devices.availability": 0.9}), out=tmp_path / "run")
    config = RunDirectory(tmp_path / "run").config
    config.write_text(config.read_text() + "[strange]\nkey = 1\n")
    with pytest.raises(FedsimError, match="of another version of fedsim"):
        assert complete_record(tmp_path / "run").statements


def test_a_calibrated_run_keeps_its_noise_whatever_its_rounds(tmp_path):
    config = CONFIG.replace(**{"noise.multiplier": "", "noise.target-epsilon": 3.0})
    first = fedsim.run(config, out=tmp_path / "run")
    longer = fedsim.run(config.replace(rounds=6), out=tmp_path / "run", resume=True)
    assert first.privacy.epsilon <= 3.0 < longer.privacy.epsilon
    again = fedsim.run(config.replace(rounds=6), out=tmp_path / "run", resume=True)
    assert again.privacy.epsilon == longer.privacy.epsilon
    fedsim.run(config.replace(rounds=8), out=tmp_path / "run", resume=True)
    with pytest.raises(FedsimError, match=r"noise\.multiplier = .*; it must be .* as it was"):
        fedsim.run(
            config.replace(**{"noise.target-epsilon": 2.0}), out=tmp_path / "run", resume=True
        )


@pytest.mark.parametrize(
    ("key", "value"), [("client.lr", 0.2), ("noise.multiplier", 2.0), ("seed", 5)]
)
def test_what_changes_the_release_is_refused_by_name_and_touches_nothing(done, key, value):
    before = {path: path.read_bytes() for path in done.path.rglob("*") if path.is_file()}
    with pytest.raises(FedsimError, match=rf"{key} = {value}; it must be .* as it was"):
        resume(done, **{key: value})
    assert before == {path: path.read_bytes() for path in done.path.rglob("*") if path.is_file()}


def test_a_config_that_was_edited_in_the_directory_is_held_against_the_checkpoint(done):
    done.config.write_text(done.config.read_text().replace("lr = 0.1", "lr = 0.3"))
    with pytest.raises(FedsimError, match=r"client\.lr = 0\.3; it must be 0\.1 as it was"):
        resume(done)


def test_budgets_metrics_and_engines_may_change(done):
    result = resume(done, **{"rounds": 5, "noise.max-epsilon": 50.0, "evaluate.every": 5})
    assert [row["round"] for row in result.metrics] == [0, 1, 2, 3, 4, 5]


def test_a_run_that_its_budget_stopped_goes_on_with_a_larger_one(tmp_path):
    three = fedsim.run(CONFIG.replace(rounds=3)).privacy.epsilon * 1.0001
    config = CONFIG.replace(**{"noise.max-epsilon": three})
    assert fedsim.run(config, out=tmp_path / "run").ended == "budget"
    larger = config.replace(**{"noise.max-epsilon": 99.0})
    assert fedsim.run(larger, out=tmp_path / "run", resume=True).ended == "finished"
    fedsim.run(CONFIG, out=tmp_path / "whole")
    assert RunDirectory(tmp_path / "run").model.read_bytes() == (
        RunDirectory(tmp_path / "whole").model.read_bytes()
    )


def test_without_a_run_resume_starts_one(tmp_path):
    fedsim.run(CONFIG, out=tmp_path / "run", resume=True)
    assert RunOutcome.read(RunDirectory(tmp_path / "run").path) == ("finished", "")


def test_what_is_no_runs_directory_is_refused_untouched(tmp_path):
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(FedsimError, match="no run's marker"):
        fedsim.run(CONFIG, out=tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_run_that_somebody_writes_to_is_not_resumed(done):
    with (
        done.lock_for_resume(done.config.read_text()),
        pytest.raises(FedsimError, match="another run is"),
    ):
        resume(RunDirectory(done.path))


def test_a_directory_that_cannot_be_made_ready_for_a_resume_is_put_back(done, monkeypatch):
    before = {path.name: path.read_bytes() for path in done.path.iterdir() if path.is_file()}
    unlink = Path.unlink

    def failing(path, **options):
        if path.name == done.report.name:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(FedsimError, match="cannot be used"), done.lock_for_resume("seed = 2\n"):
        pass
    after = {path.name: path.read_bytes() for path in done.path.iterdir() if path.is_file()}
    assert after == before


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_two_are_refused(done, caplog):
    model = done.model.read_bytes()
    for number, last in ((4, False), (2, True)):
        (file,) = (done.checkpoint / f"round-{number}").iterdir()
        file.write_bytes(file.read_bytes()[:-3] + b"abc")
        if not last:
            resume(done)
            assert "was cut off or changed" in caplog.text
            assert done.model.read_bytes() == model
            (file,) = (done.checkpoint / "round-4").iterdir()
            file.write_bytes(b"")
    with pytest.raises(FedsimError, match=r"no checkpoint in .* can be used"):
        resume(done)


def test_a_checkpoint_of_another_format_is_refused_in_a_sentence(done, monkeypatch):
    monkeypatch.setattr("fedsim.runs.checkpoints.FORMAT", 4)
    with pytest.raises(FedsimError, match="format 3, and this fedsim reads 4; resume the run with"):
        resume(done)


@pytest.mark.parametrize("harm", ["removed", "cut", "edited"])
def test_a_ledger_that_does_not_go_on_from_the_checkpoint_is_refused(done, harm):
    lines = done.ledger.read_text().splitlines(keepends=True)
    if harm == "removed":
        done.ledger.unlink()
    elif harm == "cut":
        done.ledger.write_text("".join(lines[:-2]))
    else:
        done.ledger.write_text("".join(lines).replace('"round":2', '"round":9'))
    with pytest.raises(FedsimError, match=r"does not continue the checkpoint's|proves nothing"):
        resume(done, rounds=5)


@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_a_ledger_of_examples_that_does_not_go_on_from_the_checkpoint_is_refused(tmp_path, harm):
    examples = {"client.mechanism.name": "clipping", "client.noise.multiplier": 2.0}
    unset = {"mechanism.name": "none", "noise.multiplier": "", "partition.clients": 3}
    fedsim.run(CONFIG.replace(**examples, **unset), out=tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    path = directory.examples
    lines = path.read_bytes().splitlines(keepends=True)
    resume(directory)  # as it is, it goes on
    if harm == "removed":
        path.unlink()
    else:
        path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(FedsimError, match=r"examples\.jsonl does not continue the checkpoint's"):
        resume(directory, rounds=6)


def test_a_run_that_was_overwritten_has_no_checkpoint_of_the_one_before(done):
    fedsim.run(CONFIG.replace(**{"client.lr": 0.3, "rounds": 1}), out=done.path, overwrite=True)
    assert Checkpoints(done.checkpoint).rounds() == [1]
    assert resume(done, rounds=2).metrics[-1]["round"] == 2


def test_with_system_entropy_rounds_are_charged_again_and_drawn_anew(tmp_path, monkeypatch):
    config = CONFIG.replace(**{"noise.entropy": "system"})
    fedsim.run(config.replace(rounds=3), out=tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    for file in (run.checkpoint / "round-3").iterdir():
        file.unlink()
    result = fedsim.run(config, out=tmp_path / "run", resume=True)
    assert [entry.round for entry in Ledger.read(run.ledger).entries] == [1, 2, 3, 3, 4]
    assert result.metrics[-1]["epsilon"] == result.privacy.epsilon


class StopAt(Callback):
    def __init__(self, round_number: int) -> None:
        self.round_number, self.seen = round_number, 0

    def on_round(self, status: RunStatus) -> str | None:
        self.seen += 1
        assert "asked" not in status.metrics
        return "it is enough" if status.round == self.round_number else None

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


def test_a_callback_stops_the_run_and_keeps_what_it_knew(tmp_path):
    first, second = StopAt(3), StopAt(9)
    result = fedsim.run(CONFIG, out=tmp_path / "run", callbacks=[first])
    assert (result.ended, result.why) == ("stopped", "Stopped early: it is enough.")
    assert [row["round"] for row in result.metrics] == [0, 1, 2, 3]
    fedsim.run(CONFIG, out=tmp_path / "run", resume=True, callbacks=[second])
    assert second.seen == first.seen + 1


def test_a_run_stops_early_by_a_central_metric_also_after_a_resume(tmp_path):
    config = CONFIG.replace(
        **{"client.lr": 1e-9, "noise.multiplier": 1.0, "server.lr": 1e-12, "rounds": 9,
           "data.validation": 0.2, "stop.metric": "validation-accuracy", "stop.patience": 3}
    )  # fmt: skip
    result = fedsim.run(config, out=tmp_path / "run")
    assert result.ended == "stopped"
    assert "all rounds up to 9 are charged" in " ".join(str(result.privacy).split())
    assert "validation-accuracy has not been better than" in result.why
    assert result.metrics[-1]["round"] == 3
    assert len(fedsim.run(config, out=tmp_path / "run", resume=True).metrics) == 4
    for metric in ("usable", "train-loss", "clients-loss", "test-loss"):
        with pytest.raises(FedsimError, match=r"stop\.metric = .* must be validation-loss, val"):
            fedsim.run(config.replace(**{"stop.metric": metric}))
    best = config.replace(**{"checkpoint.best": "validation-loss", "stop.metric": ""})
    fedsim.run(best, out=tmp_path / "best")
    kept = Checkpoints(RunDirectory(tmp_path / "best").checkpoint).best()
    rows = RunDirectory(tmp_path / "best").metrics_file.rows()[1:]
    assert kept is not None
    assert kept.row["validation-loss"] == min(row["validation-loss"] for row in rows)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"resume": True}, "resume=True continues the run in a directory, and out= names none"),
        ({"overwrite": True}, "overwrite=True replaces the run in a directory, and out= names"),
        ({"resume": True, "overwrite": True, "out": "x"}, "would replace; give one of them"),
    ],
)
def test_flags_that_could_not_do_what_they_say(
    flags: dict[str, object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedsimError, match=sentence):
        fedsim.run(CONFIG, **flags)
    assert not list(tmp_path.iterdir())


def test_a_resume_that_is_refused_for_its_ledger_keeps_how_the_run_ended(done):
    done.ledger.write_bytes(done.ledger.read_bytes()[:-300])  # counted by the checkpoint
    before = {path.name: path.read_bytes() for path in done.path.iterdir() if path.is_file()}
    with pytest.raises(FedsimError, match="does not continue the checkpoint's"):
        resume(done)
    after = {path.name: path.read_bytes() for path in done.path.iterdir() if path.is_file()}
    assert after == before
