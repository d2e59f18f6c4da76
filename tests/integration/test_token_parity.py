"""A run on tokens with masks and owners has the same bytes on every engine of one machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedsim


def config(path: Path, engine: str) -> fedsim.RunConfig:
    return fedsim.RunConfig.from_run_config(
        {
            "name": "tokens", "rounds": 2, "engine.name": engine,
            "data.name": str(path), "partition.name": "by-owner", "partition.clients": 5,
            "model.name": "nets:model", "task.metrics": "accuracy,perplexity",
            "model.personal": "1.bias", "client.state": "client",
            "client.batch-size": 2, "evaluate.every": 0, "evaluate.clients-every": 1,
        }
    )  # fmt: skip


@pytest.mark.slow
def test_tokens_masks_and_personal_parameters_are_the_same_bytes_on_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    owner = np.repeat([f"author {k}" for k in range(5)], 4)
    x = rng.integers(0, 6, (20, 4))
    mask = np.arange(4) < rng.integers(1, 5, (20, 1))
    np.savez(
        "text.npz", x_train=x, y_train=(x + 1) % 6, mask_train=mask, owner_train=owner,
        x_test=x[::2], y_test=(x[::2] + 1) % 6, owner_test=owner[::2], classes=6, vocabulary=6,
    )  # fmt: skip
    Path("nets.py").write_text(
        "from torch import nn\n\n\n"
        "def model(vocabulary, num_classes):\n"
        "    return nn.Sequential(nn.Embedding(vocabulary, 5), nn.Linear(5, num_classes))\n"
    )
    shown = ("clients-loss", "clients-perplexity", "clients-accuracy-min", "clients-num-examples")
    reached = {}
    for engine in ("local", "ray", "simulation"):
        result = fedsim.run(config(tmp_path / "text.npz", engine), out=tmp_path / engine)
        model = (tmp_path / engine / "model.safetensors").read_bytes()
        reached[engine] = (model, [[row[name] for name in shown] for row in result.metrics])
    assert reached["local"] == reached["ray"] == reached["simulation"]
    assert reached["local"][1][-1][3] == 10
