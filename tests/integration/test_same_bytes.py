"""What runs release, to the byte: no change of code that promises "the same bytes" may move it.

``same_bytes.json`` holds sha256 digests. Those of exact sums of given rows, and of noise at a given
key, are the same on every machine. Those of runs (the exact sum of each round, the weights after
it) depend on how a processor and a build of torch order a sum: they are kept for each machine that
made them, and another machine skips them. A change that means to move bytes makes them anew, for
the machine that it runs on, with::

    PYTHONPATH=tests/helpers python tests/integration/test_same_bytes.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from this_machine import machine
from torch import Tensor, nn

import fedsim
from fedsim import Callback, RunConfig
from fedsim.cohorts import FullCohort
from fedsim.datasets import Dataset
from fedsim.federation.arrays import tensors
from fedsim.mechanisms import Clipping, NoiseSource, NoPrivacy, Normalization, PerLayer, Releaser
from fedsim.partitions import IID
from fedsim.privacy import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import DenseRows, Layout

FIXTURE = Path(__file__).with_name("same_bytes.json")
# In the place of the config's digest: a new key of the config then moves no noise here.
RELEASE = "5a" * 32

BASE = ["rounds=2", "seed=3", "evaluate.every=0", "partition.clients=24", "data.train=:240"]
MLP = ["model.name=mlp", "model.widths=16"]
POISSON = ["cohort.name=poisson", "cohort.rate=0.5"]
FIXED = ["cohort.name=fixed", "cohort.size=9"]
CLIPPING = ["mechanism.name=clipping", "mechanism.clip-norm=0.5", "noise.multiplier=0.8"]
EXAMPLES = ["client.mechanism.name=clipping", "client.noise.multiplier=0.9"]
SHARES = ["noise.placement=client"]

RUNS: dict[str, list[str]] = {
    "clipping, poisson": [*CLIPPING, *POISSON],
    "clipping, fixed, momentum, mlp": [*CLIPPING, *FIXED, *MLP, "client.momentum=0.9"],
    "clipping, shares, full": [*CLIPPING, *SHARES],
    "clipping, target epsilon, drawn plainly": [
        *CLIPPING[:2], *POISSON, "noise.target-epsilon=4.0", "noise.hardened=false",
    ],
    "normalisation, shares, poisson, server adam": [
        "mechanism.name=normalization", "noise.multiplier=0.5", *SHARES, *POISSON,
        "server.optimizer=adam", "server.lr=0.05",
    ],
    "coordinate clipping, devices": [
        "mechanism.name=coordinate-clipping", "noise.multiplier=0.5", "devices.availability=0.8",
        "devices.dropout=0.2",
    ],
    "quantile clipping, fixed, server momentum": [
        "mechanism.name=quantile-clipping", "noise.multiplier=0.5", *FIXED, "server.momentum=0.9",
    ],
    "adaclip, poisson, adam clients": [
        "mechanism.name=adaclip", "noise.multiplier=0.5", *POISSON, "client.name=adam",
        "client.lr=0.01",
    ],
    "adaptive noise, full, adadp-noise clients": [
        "mechanism.name=adaptive-noise", "noise.multiplier=0.5", "client.name=adadp-noise",
        "mechanism.threshold=1e-4", *MLP,
    ],
    "per layer, scalar, mlp": [
        *CLIPPING, *MLP, "mechanism.per-layer=true", "mechanism.private-scalar=loss", *POISSON,
    ],
    "no privacy, weighted, fixed, rmsprop clients": [
        "mechanism.weighting=num-examples", *FIXED, "client.name=rmsprop", "partition.name=shards",
    ],
    "no privacy, adadp-lr clients with state": [
        "client.name=adadp-lr", "client.state=client", "client.epochs=3",
    ],
    "no privacy, scaffold": [
        "client.name=scaffold", "client.state=client", "mechanism.weighting=uniform", *MLP,
    ],
    "no privacy, fednova, work of their own": ["client.name=fednova", "client.work=whole(1,3)"],
    "no privacy, ditto": ["client.name=ditto", "client.state=client", "client.lr=0.1", *FIXED],
    "no privacy, compressed, layered path": [
        "client.compression=top-k(0.1)", "client.state=client", "client.path=layered", *MLP,
    ],
    "no privacy, proximal, func path, float64": [
        "client.proximal=0.1", "client.path=func", "model.dtype=float64", *MLP,
    ],
    "median": ["mechanism.name=median", *FIXED],
    "krum": ["mechanism.name=krum", "mechanism.byzantine=2"],
    "trimmed mean": ["mechanism.name=trimmed-mean"],
    "examples, poisson batches": [*EXAMPLES, *MLP, *POISSON],
    "examples, shuffled, momentum, plain path": [
        *EXAMPLES, "client.noise.sampling=shuffle", "client.momentum=0.5", "client.path=plain",
    ],
    "examples, normalised per layer, target epsilon": [
        "client.mechanism.name=normalization", "client.mechanism.per-layer=true",
        "client.noise.target-epsilon=8.0", *MLP,
    ],
    "examples, quantile clipping, adam": [
        "client.mechanism.name=quantile-clipping", "client.noise.multiplier=0.7",
        "client.name=adam", "client.lr=0.01", "client.steps=3",
    ],
    "both levels": [*CLIPPING, *POISSON, *EXAMPLES],
}  # fmt: skip
ROBUST = ("median", "krum", "trimmed-mean")
SEVERAL_WORKERS = ("clipping, poisson", "normalisation, shares, poisson, server adam", "median")


def sha(parts: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(name.encode() + parts[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:24]


class Weights(Callback):
    """Digests of the weights after each round."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_round(self, status) -> None:
        self.found.append(sha(tensors(status.arrays)))


def digests_of(patch: pytest.MonkeyPatch, config: RunConfig, **objects: Any) -> dict[str, Any]:
    """Digests of the exact sum of each round, and of the weights after it."""
    sums: list[str] = []
    release = Releaser.release

    def watched(self, total, *args, **kwargs):
        if total.terms.owners is None:
            sums.append(sha(total.state()))
        return release(self, total, *args, **kwargs)

    weights = Weights()
    patch.setattr(Releaser, "release", watched)
    patch.setattr("fedsim.runs.resolve.run_digest", lambda *_: RELEASE)
    fedsim.run(config, callbacks=[weights], **objects)
    # A robust mean sums nothing that is released.
    sums = [] if config.mechanism.name in ROBUST else sums
    return {"sums": sums, "weights": weights.found}


def config_of(name: str, *others: str) -> RunConfig:
    return RunConfig.of([*BASE, "engine.device=cpu", *RUNS[name], *others])


def images(patch: pytest.MonkeyPatch, *settings: str) -> dict[str, Any]:
    """A run of made-up images through convolutions."""
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), rng.integers(0, 4, 60)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4)
    )
    data = Dataset.of("images", {"x": x, "y": y}, {"x": x[:8], "y": y[:8]}, classes=4)
    common = ["rounds=2", "seed=3", "evaluate.every=0", "partition.clients=6", "engine.device=cpu"]
    config = RunConfig.of([*common, *settings])
    return digests_of(patch, config, model=model, data=data, partition=IID(clients=6, seed=3))


IMAGES = {"images": CLIPPING, "images, examples": EXAMPLES}


def everywhere() -> dict[str, str]:
    """Digests of exact sums of given rows and of noise, which no machine may change."""
    # Whole numbers: their squares add up without rounding, so that no order of a sum shows.
    rows = torch.from_numpy(np.random.default_rng(1).integers(-40, 41, (64, 18))).float()
    layout = Layout.of({"a.weight": torch.empty(3, 4), "b.weight": torch.empty(2, 3)})
    found = {}
    for name, bound, z in (
        ("clipping", Clipping(0.7), 0.7),
        ("loose clipping", Clipping(1e3), 0.0),
        ("normalisation", Normalization(0.8), 0.7),
        ("normalisation without noise", Normalization(0.8), 0.0),
        ("layers", PerLayer(Clipping(0.5)), 0.7),
        ("no privacy", NoPrivacy("uniform"), 0.0),
    ):
        plan = ReleasePlan(
            level="client", sampler=FullCohort(64), bound=bound, noise=Independent(z)
        )
        total = Releaser(plan, layout).start(bound.init(layout))
        total.add(DenseRows(rows[:40].clone()))
        total.add(DenseRows(rows[40:].clone()), weights=torch.linspace(0, 1, 24).double())
        found[f"sum, {name}"] = sha(total.state())
    for seed, release, level, hardened in (
        (3, RELEASE, "client", True),
        (3, RELEASE, "client", False),
        (4, None, "example", False),
    ):
        generator = Randomness(seed, release).generator(
            Purpose.NOISE, level=level, round=2, client=5
        )
        noise = torch.from_numpy(NoiseSource(generator, hardened).normal(2001))
        found[f"noise, {level}, hardened={hardened}"] = sha({"noise": noise})
    return found


def made() -> dict[str, Any]:
    """Everything that the fixture holds of this machine."""
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, settings in IMAGES.items():
            with patch.context() as alone:
                runs[name] = images(alone, *settings)
        for name in RUNS:
            with patch.context() as alone:
                runs[name] = digests_of(alone, config_of(name))
    return {"everywhere": everywhere(), "machines": {machine(): runs}}


def expected(name: str) -> dict[str, Any]:
    machines = json.loads(FIXTURE.read_text())["machines"]
    if machine() not in machines:
        pytest.skip(f"no digests were made on {machine()}")
    return machines[machine()][name]


def test_exact_sums_and_noise_are_what_they_were_on_any_machine():
    assert everywhere() == json.loads(FIXTURE.read_text())["everywhere"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_releases_what_it_did(name, monkeypatch):
    assert digests_of(monkeypatch, config_of(name)) == expected(name)


@pytest.mark.parametrize("name", IMAGES)
def test_a_run_of_images_releases_what_it_did(name, monkeypatch):
    assert images(monkeypatch, *IMAGES[name]) == expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL_WORKERS)
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_several_workers_release_what_one_did(name, engine, monkeypatch):
    others = [f"engine.name={engine}", "engine.workers=2"]
    others += ["engine.cpus-per-worker=0.1"] if engine == "ray" else []
    found = digests_of(monkeypatch, config_of(name, *others))
    assert found["weights"] == expected(name)["weights"]


def test_one_noise_draw_that_is_shifted_changes_the_bytes_of_a_run(monkeypatch):
    normal = NoiseSource.normal

    def shifted(self, size):
        draws = normal(self, size)
        draws[0] += 1e-3
        return draws

    name = "clipping, poisson"
    before = expected(name)
    monkeypatch.setattr(NoiseSource, "normal", shifted)
    found = digests_of(monkeypatch, config_of(name))
    assert found["sums"][0] == before["sums"][0]
    assert found["weights"][1] != before["weights"][1]


def main() -> None:
    """Write this machine's digests; those of other machines stay."""
    torch.set_num_threads(1)
    fixture = made()
    if FIXTURE.exists():
        fixture["machines"] = json.loads(FIXTURE.read_text())["machines"] | fixture["machines"]
    FIXTURE.write_text(json.dumps(fixture, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
