"""What runs release, to the byte: no change of code that promises "the same bytes" may move it.

``same_bytes.json`` holds sha256 digests. Those of exact sums of given rows, and of noise at a given
key, are the same on every machine. Those of runs (the exact sum of each round, the weights after
it) depend on how a processor and a build of torch order a sum: they are kept for each machine that
made them, and another machine skips them. A change that means to move bytes makes them anew, for
the machine that it runs on (those of other machines that it moves are taken out by hand), with::

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
from run_configs import IMAGES, ROBUST, RUNS, run_of
from this_machine import machine
from torch import Tensor

import fedsim
from fedsim import Callback, RunConfig
from fedsim.cohorts import FullCohort
from fedsim.federation.arrays import tensors
from fedsim.mechanisms import Clipping, NoiseSource, NoPrivacy, Normalization, PerLayer, Releaser
from fedsim.privacy import Independent
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import DenseRows, Layout

FIXTURE = Path(__file__).with_name("same_bytes.json")
# In the place of the config's digest: a new key of the config then moves no noise here.
RELEASE = "5a" * 32

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
        if total.definition.owners is None:
            sums.append(sha(total.state()))
        return release(self, total, *args, **kwargs)

    weights = Weights()
    patch.setattr(Releaser, "release", watched)
    patch.setattr("fedsim.runs.resolve.run_digest", lambda *_, **__: RELEASE)
    fedsim.run(config, callbacks=[weights], **objects)
    # A robust mean sums nothing that is released.
    sums = [] if config.mechanism.name in ROBUST else sums
    return {"sums": sums, "weights": weights.found}


def everywhere() -> dict[str, str]:
    """Digests of exact sums of given rows and of noise, which no machine may change."""
    # Whole numbers: their squares add up without rounding, so that no order of a sum shows.
    rows = torch.from_numpy(np.random.default_rng(1).integers(-40, 41, (64, 18))).float()
    layout = Layout.of({"a.weight": torch.empty(3, 4), "b.weight": torch.empty(2, 3)})
    found = {}
    for name, mechanism, z in (
        ("clipping", Clipping(0.7), 0.7),
        ("loose clipping", Clipping(1e3), 0.0),
        ("normalisation", Normalization(0.8), 0.7),
        ("normalisation without noise", Normalization(0.8), 0.0),
        ("layers", PerLayer(Clipping(0.5)), 0.7),
        ("no privacy", NoPrivacy("uniform"), 0.0),
    ):
        plan = ReleasePlan(
            level="client", sampler=FullCohort(64), mechanism=mechanism, noise=Independent(z)
        )
        total = Releaser(plan, layout).start(mechanism.init(layout))
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
        for name in (*IMAGES, *RUNS):
            with patch.context() as alone:
                runs[name] = released_by(alone, name)
    return {"everywhere": everywhere(), "machines": {machine(): runs}}


def expected(name: str) -> dict[str, Any]:
    digests = json.loads(FIXTURE.read_text())["machines"].get(machine(), {})
    if name not in digests:
        pytest.skip(f"no digest of this run was made on {machine()}")
    return digests[name]


def test_exact_sums_and_noise_are_what_they_were_on_any_machine():
    assert everywhere() == json.loads(FIXTURE.read_text())["everywhere"]


def released_by(patch: pytest.MonkeyPatch, name: str, *others: str) -> dict[str, Any]:
    config, objects = run_of(name, "cpu", *others)
    return digests_of(patch, config, **objects)


@pytest.mark.parametrize("name", [*RUNS, *IMAGES])
def test_a_run_releases_what_it_did(name, monkeypatch):
    assert released_by(monkeypatch, name) == expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL_WORKERS)
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_several_workers_release_what_one_did(name, engine, monkeypatch):
    others = [f"engine.name={engine}", "engine.workers=2"]
    others += ["engine.cpus-per-worker=0.1"] if engine == "ray" else []
    found = released_by(monkeypatch, name, *others)
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
    found = released_by(monkeypatch, name)
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
