"""Whole runs on a GPU: beside the CPU's, repeated, and resumed."""

from __future__ import annotations

import logging

import pytest
import torch
from run_configs import IMAGES, RUNS, run_of

import fedsim
from fedsim import Callback
from fedsim.config.release_keys import release_digest
from fedsim.federation.arrays import tensors
from fedsim.reports.verification import verify_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
NAMES = [*RUNS, *IMAGES]
RELEASE = "5a" * 32


class Interrupt(Callback):
    """Ends a run after its first round, as Ctrl-C does."""

    def on_round(self, status):
        if status.round == 1:
            raise KeyboardInterrupt


def model_of(name, device, *others, **changes):
    config, objects = run_of(name, device, *others)
    return tensors(fedsim.run(config, **objects, **changes).arrays)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_releases_what_a_cpu_does_up_to_rounding(name, monkeypatch):
    # Noise is keyed by all that a run releases, its path and kernels among them.
    monkeypatch.setattr("fedsim.runs.resolve.run_digest", lambda *_, **__: RELEASE)
    # Both by the formula of a GPU: its draws are the same bytes on a CPU.
    for module in ("local_rounds", "trainer"):
        monkeypatch.setattr(f"fedsim.training.{module}.draws_on_device", lambda *_: True)
    cpu, gpu = (model_of(name, device) for device in ("cpu", "cuda"))
    for one, value in cpu.items():
        torch.testing.assert_close(gpu[one].cpu(), value, rtol=0, atol=1e-4)


def test_a_run_with_tf32_says_so_is_another_and_repeats_to_the_byte(tmp_path):
    name, fast = NAMES[0], "client.matmul=tf32"
    exact = model_of(name, "cuda", out=tmp_path / "exact")
    first, second = (model_of(name, "cuda", fast, out=tmp_path / part) for part in ("a", "b"))
    assert all(torch.equal(second[one], value) for one, value in first.items())
    assert not all(torch.equal(exact[one], value) for one, value in first.items())
    digests = set()
    for part in ("exact", "a", "b"):
        config = fedsim.load(tmp_path / part).config
        assert config.client.matmul == ("float32" if part == "exact" else "tf32")
        digests.add(release_digest(config))
    assert len(digests) == 2


def test_a_run_makes_its_blocks_as_small_as_the_gpu_needs_and_says_so(
    tmp_path, monkeypatch, caplog
):
    whole = model_of(NAMES[0], "cuda", out=tmp_path / "whole")
    memory = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr("fedsim.runs.factories.USABLE_SHARE", 2**20 / memory)
    with caplog.at_level(logging.WARNING):
        small = model_of(NAMES[0], "cuda", out=tmp_path / "small")
    sizes = [fedsim.load(tmp_path / part).config.client.block_size for part in ("small", "whole")]
    assert 1 <= sizes[0] < sizes[1]
    assert f"client.block-size is {sizes[0]}: {sizes[1]} clients at once" in caplog.text
    for one, value in whole.items():
        torch.testing.assert_close(small[one], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_a_gpu_repeats_and_resumes_to_the_byte(name, tmp_path):
    evaluated = "evaluate.every=1"
    config, objects = run_of(name, "cuda", evaluated)
    whole = model_of(name, "cuda", evaluated, out=tmp_path / "whole")
    stopped = fedsim.run(config, out=tmp_path / "parts", callbacks=[Interrupt()], **objects)
    assert stopped.ended == "interrupted"
    resumed = model_of(name, "cuda", evaluated, out=tmp_path / "parts", resume=True)
    assert all(torch.equal(resumed[one], value) for one, value in whole.items())
    for part in ("whole", "parts"):
        assert all(check.passed for check in verify_run(tmp_path / part))
        assert (tmp_path / part / "report.html").is_file()
