"""Compressed updates with error feedback against a plain loop over clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data, make_mlp
from hypothesis import given
from hypothesis import strategies as st

import fedsim
from fedsim import RunConfig
from fedsim.clients import SGD, Scaffold
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.randomness import Randomness
from fedsim.runs.resolve import resolve
from fedsim.training import Trainer
from fedsim.training.payload import Compression

SIZES = [9, 0, 4, 12]
IDS = np.arange(4)
CONFIG = RunConfig().replace(
    **{
        "rounds": 4,
        "partition.clients": 10,
        "client.batch-size": 20,
        "client.state": "client",
        "client.compression": "top-k(0.05)",
        "evaluate.every": 4,
    }
)


def largest(row: torch.Tensor, share: float) -> torch.Tensor:
    """All but so many of the coordinates made 0, one by one."""
    order = sorted(range(len(row)), key=lambda i: -abs(float(row[i])))
    sent = torch.zeros_like(row)
    for i in order[: int(np.ceil(share * len(row)))]:
        sent[i] = row[i]
    return sent


def rounded(row: torch.Tensor, bits: int) -> torch.Tensor:
    """Each coordinate to the nearest multiple."""
    if bits == 1:
        mean = sum(abs(float(v)) for v in row) / len(row)
        return torch.tensor([np.sign(float(v)) * mean for v in row], dtype=row.dtype)
    unit = max(abs(float(v)) for v in row) / (2 ** (bits - 1) - 1)
    if unit == 0:
        return row
    return torch.tensor([round(float(v) / unit) * unit for v in row], dtype=row.dtype)


def test_a_share_is_of_so_many_coordinates_as_its_decimals_say() -> None:
    for hundredths in range(1, 101):
        share = Compression(share=hundredths / 100)
        for d in (1, 7, 100, 650, 10_000, 1_000_000):
            assert share.coordinates(d) == -(-hundredths * d // 100)
    assert Compression(share=1e-20).coordinates(10**6) == 1


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("text", ["top-k(0.2)", "bits(4)", "bits(1)"])
def test_clients_send_what_a_plain_loop_does_and_keep_the_rest(text: str, block_size: int) -> None:
    settings = {"batch_size": 4, "randomness": Randomness(3), "block_size": block_size}
    data = make_data(SIZES, dtype=torch.float64)
    made_of = make_mlp(dtype=torch.float64), SGD(lr=0.3), data
    plain = Trainer(*made_of, **settings)
    ours = Trainer(*made_of, compression=Compression.parse(text), state="client", **settings)
    left_out = torch.zeros(4, plain.layout.d, dtype=torch.float64)
    vector = plain.initial()
    for number in (1, 2, 3):
        # Client 3 takes part in odd rounds only.
        ids = IDS if number % 2 else IDS[:3]
        rows = joined(plain.train(vector, ids, number), ids)[0]
        sent = joined(ours.train(vector, ids, number), ids)[0]
        for client in ids.tolist():
            target = rows[client] + left_out[client]
            if not SIZES[client]:
                expected = torch.zeros_like(target)
            elif text == "top-k(0.2)":
                expected = largest(target, 0.2)
            else:
                expected = rounded(target, 4 if text == "bits(4)" else 1)
            torch.testing.assert_close(sent[client], expected, rtol=0, atol=1e-12)
            left_out[client] = target - expected
        vector = vector + sent.mean(0)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(1, 16))
def test_a_row_is_compressed_alike_whoever_stands_beside_it(row: list[float], bits: int) -> None:
    rows = torch.tensor([row, row[::-1]], dtype=torch.float32)
    for compression in (Compression(bits=bits), Compression(share=0.3)):
        assert torch.equal(compression(rows)[:1], compression(rows[:1]))
        error = compression(rows) - rows
        assert (error.norm(dim=1) <= rows.norm(dim=1) * (1 + 1e-5)).all()
    sent = Compression(share=0.3)(rows)
    assert ((sent != 0).sum(dim=1) <= np.ceil(0.3 * len(row))).all()


@pytest.mark.parametrize("text", ["top-k(0.05)", "bits(2)"])
def test_a_private_bound_holds_for_what_is_sent(text: str) -> None:
    config = CONFIG.replace(**{"client.compression": text, "client.lr": 5.0})
    trainer = resolve(config).trainer
    clipping = Clipping(0.01)
    vector = trainer.initial()
    for number in (1, 2, 3):
        rows = joined(trainer.train(vector, np.arange(10), number))[0]
        bounded = clipping.bound(rows)  # the server's, on what arrives
        assert (bounded.norm(dim=1) <= 0.01 * (1 + 1e-6)).all()
        if text == "top-k(0.05)":
            assert ((bounded != 0).sum(dim=1) <= 33).all()
    private = {"mechanism.name": "clipping", "noise.multiplier": 1.0, "cohort.name": "poisson"}
    metrics = fedsim.run(config.replace(**private, **{"cohort.rate": 0.5})).metrics
    assert metrics[-1]["epsilon"] > 0


def test_a_compressed_run_that_was_cut_ends_with_the_same_bytes_and_counts_its_bytes(
    tmp_path: Path,
) -> None:
    whole = fedsim.run(CONFIG, out=tmp_path / "whole")
    fedsim.run(CONFIG.replace(rounds=2), out=tmp_path / "cut")
    fedsim.run(CONFIG, out=tmp_path / "cut", resume=True)
    models = [tmp_path / name / "model.safetensors" for name in ("whole", "cut")]
    assert models[0].read_bytes() == models[1].read_bytes()
    # 33 of 650 coordinates, each with its place.
    assert whole.metrics[-1]["bytes-up"] == 10 * 33 * 8
    assert whole.metrics[-1]["bytes-down"] == 10 * 650 * 4
    assert Compression(bits=3).bytes(650, 4) == 244 + 4


def test_compression_without_what_it_needs_is_refused() -> None:
    for bad in ("top-k(0)", "top-k(2)", "bits(0)", "bits(17)", "bits(1.5)", "zip"):
        with pytest.raises(FedsimError, match=r"client\.compression = '"):
            resolve(CONFIG.replace(**{"client.compression": bad})).trainer  # noqa: B018
    with pytest.raises(FedsimError, match="clients keep the part that is not sent"):
        resolve(CONFIG.replace(**{"client.state": "reset"})).trainer  # noqa: B018
    with pytest.raises(FedsimError, match="send their update alone"):
        Trainer(
            make_mlp(),
            Scaffold(lr=0.1),
            make_data(SIZES),
            randomness=Randomness(1),
            state="client",
            compression=Compression(bits=8),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"devices.availability": 0.6, "client.work": "whole(1,3)"}]
)
def test_compressed_updates_are_the_same_bytes_on_ray(
    changes: dict[str, object], tmp_path: Path
) -> None:
    config = CONFIG.replace(**changes, **{"client.compression": "top-k(0.05)"})
    fedsim.run(config, out=tmp_path / "local")
    fedsim.run(config, engine="ray", out=tmp_path / "ray")
    models = [tmp_path / name / "model.safetensors" for name in ("local", "ray")]
    assert models[0].read_bytes() == models[1].read_bytes()
