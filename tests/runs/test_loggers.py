"""What loggers are told, read back from where they put it."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.sweep import grid_runs, parse_axes, run_sweep

CONFIG = RunConfig.parse(
    {
        "rounds": 3,
        "partition": {"clients": 6, "max-examples": 60},
        "mechanism": {"name": "clipping"},
        "noise": {"multiplier": 1.0},
        "checkpoint": {"every": 1},
        "engine": {"device": "cpu"},
        "log": {"to": "tensorboard"},
    }
)


def read(directory: Path) -> tuple[dict[str, dict[int, float]], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    scalars = {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
    return scalars, events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_tensorboard_has_every_number_of_every_round_once_also_after_a_resume(tmp_path):
    fedsim.run(CONFIG, out=tmp_path / "run")
    result = fedsim.run(CONFIG.replace(rounds=5), out=tmp_path / "run", resume=True)
    scalars, config = read(tmp_path / "run")
    for name in ("test-loss", "epsilon", "usable"):
        expected = {row["round"]: row[name] for row in result.metrics if name in row}
        assert scalars[name] == pytest.approx(expected)
    assert 'to = "tensorboard"' in config
    # It is a run's file: the next run in its place does not add to it.
    fedsim.run(CONFIG.replace(rounds=1), out=tmp_path / "run", overwrite=True)
    assert set(read(tmp_path / "run")[0]["test-loss"]) == {0, 1}


def test_a_logger_that_is_none_or_not_installed_is_refused_at_once(tmp_path):
    with pytest.raises(FedsimError, match=r"log\.to = 'paper'; it must be of tensorboard"):
        fedsim.run(CONFIG.replace(**{"log.to": "paper"}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class MLflow(ModuleType):
    """Like mlflow-skinny 3.17: one active run, which calls without ``run_id`` go to."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = ModuleSpec("mlflow", None)
        self.active: list[str] = []
        self.params: dict[str, dict[str, object]] = {}
        self.rows: dict[str, dict[int, dict[str, float]]] = {}
        self.states: dict[str, str] = {}

    def start_run(self, run_id: str | None, run_name: str, nested: bool = False) -> Any:
        if self.active and not nested:
            raise Exception(f"Run with UUID {self.active[0]} is already active.")
        run_id = run_id or f"run-{len(self.rows)}"
        self.rows.setdefault(run_id, {})
        self.active.append(run_id)
        self.states[run_id] = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, run_name=run_name))

    def end_run(self, status: str = "FINISHED") -> None:
        self.states[self.active.pop()] = status

    def log_params(self, params: dict[str, object], run_id: str | None = None) -> None:
        self.params[run_id or self.active[-1]] = params

    def log_metrics(self, metrics: dict[str, float], step: int, run_id: str | None = None) -> None:
        self.rows[run_id or self.active[-1]][step] = metrics

    def MlflowClient(self) -> Any:  # noqa: N802
        return SimpleNamespace(set_terminated=self.states.__setitem__)


class WandB(ModuleType):
    """Like wandb 0.31: `init` returns the active run, if another one is not asked for."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.active: list[Any] = []
        self.params: dict[str, dict[str, object]] = {}
        self.rows: dict[str, dict[int, dict[str, float]]] = {}
        self.states: dict[str, str] = {}

    def init(self, *, reinit: str = "default", **settings: Any) -> Any:
        if self.active and reinit != "create_new":
            return self.active[-1]
        run_id = settings["id"] or f"run-{len(self.rows)}"
        rows = self.rows.setdefault(run_id, {})
        self.params.setdefault(run_id, settings["config"])

        def log(row: dict[str, float], step: int) -> None:
            assert self.states[run_id] == "RUNNING", f"Run ({run_id}) is finished."
            rows[step] = {name: value for name, value in row.items() if name != "round"}

        def finish(exit_code: int) -> None:
            self.states[run_id] = "FAILED" if exit_code else "FINISHED"
            self.active.remove(run)

        run = SimpleNamespace(id=run_id, log=log, finish=finish)
        self.states[run_id] = "RUNNING"
        self.active.append(run)
        return run


class Trackio(ModuleType):
    """Like trackio 0.43: `init` ends the run that is current in its context; runs have names."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None)
        self.current: ContextVar[Any] = ContextVar("current", default=None)
        self.active: list[str] = []
        self.params: dict[str, dict[str, object]] = {}
        self.rows: dict[str, dict[int, dict[str, float]]] = {}
        self.states: dict[str, str] = {}

    def init(self, *, project: str, name: str, resume: str = "never", **settings: Any) -> Any:
        if (previous := self.current.get()) is not None:
            previous.finish()
        assert resume == "allow" or name not in self.rows
        print("* Trackio project initialized: fedsim")
        rows = self.rows.setdefault(name, {})
        self.params.setdefault(name, settings["config"])
        self.states[name] = "RUNNING"
        self.active.append(name)

        def finish() -> None:
            if self.states[name] == "RUNNING":
                self.states[name] = "FINISHED"
                self.active.remove(name)

        def log(row: dict[str, float], step: int) -> None:
            assert self.states[name] == "RUNNING", f"Run ({name}) is finished."
            rows[step] = row

        run = SimpleNamespace(name=name, log=log, finish=finish)
        self.current.set(run)
        return run


@pytest.mark.parametrize("kind", [MLflow, WandB, Trackio])
def test_every_run_of_a_sweep_has_a_run_of_its_own_in_a_tracker(
    kind, tmp_path, monkeypatch, capsys
):
    tracker = kind()
    name = tracker.__name__
    monkeypatch.setitem(sys.modules, name, tracker)
    for rounds in (2, 3):  # the second time the run is resumed
        config = CONFIG.replace(**{"log.to": name, "rounds": rounds})
        fedsim.run(config, out=tmp_path / "alone", resume=True)
    grid = grid_runs(config, parse_axes(["client.lr=0.1,0.5"]))
    run_sweep(grid, tmp_path)
    assert "Trackio" not in capsys.readouterr().out  # which may be `--json`'s
    assert not tracker.active
    assert set(tracker.states.values()) == {"FINISHED"}
    directories = [tmp_path / "alone", *(tmp_path / member.label for member in grid)]
    for directory, run in zip(directories, tracker.rows, strict=True):
        expected = {row["round"]: row for row in RunDirectory(directory).metrics_file.rows()}
        logged = tracker.rows[run]
        assert logged.keys() == expected.keys()
        for number, row in expected.items():
            assert logged[number] == pytest.approx({k: v for k, v in row.items() if k != "round"})
    assert [p["client.lr"] for p in tracker.params.values()] == [CONFIG.client.lr, 0.1, 0.5]


def test_rows_of_a_run_that_mlflow_did_not_start_go_to_no_other_run(monkeypatch, tmp_path):
    tracker = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", tracker)
    tracker.start_run(None, "the user's own")

    def unreachable(*args: Any, **keywords: Any) -> Any:
        raise ConnectionError("no server")

    tracker.start_run = unreachable
    fedsim.run(CONFIG.replace(**{"log.to": "mlflow", "rounds": 1}), out=tmp_path / "run")
    assert tracker.rows == {"run-0": {}}
    assert tracker.states == {"run-0": "RUNNING"}
