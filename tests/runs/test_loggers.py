"""What loggers are told, read back from where they put it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedsim
from fedsim import RunConfig
from fedsim.errors import FedsimError

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
