"""Which kernel trains is a part of a run: resolved once, the same everywhere, or refused."""

from __future__ import annotations

import logging

import pytest
import torch
from clients_helpers import make_data, make_mlp

from fedsim import RunConfig
from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.kernels.dense import is_compiled
from fedsim.randomness import Randomness
from fedsim.runs.factories import make_trainer
from fedsim.runs.resolve import resolve
from fedsim.training import Trainer
from fedsim.training.paths import path_choice
from fedsim.training.paths.path_choice import resolve_kernel

compiled = pytest.mark.skipif(not is_compiled(torch.float32), reason="there is no C compiler")
CPU = torch.device("cpu")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_choice.dense, "is_compiled", lambda dtype: False)
    path_choice._can_compile.cache_clear()
    yield
    path_choice._can_compile.cache_clear()


def config_with(kernel: str, *others: str) -> RunConfig:
    settings = [
        "partition.clients=6",
        "data.train=:60",
        "model.name=mlp",
        "model.widths=16",
    ]
    return RunConfig.from_overrides([*settings, f"client.kernel={kernel}", *others])


@compiled
def test_the_rule_compiles_on_a_cpu_and_not_on_a_gpu() -> None:
    assert resolve_kernel("auto", CPU) == resolve_kernel("compiled", CPU) == "compiled"
    assert resolve_kernel("eager", CPU) == resolve_kernel("auto", torch.device("cuda")) == "eager"


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_rule_takes_torchs_operations_and_says_so_once(caplog) -> None:
    caplog.set_level(logging.INFO, path_choice.__name__)
    assert [resolve_kernel("auto", CPU) for _ in range(3)] == ["eager"] * 3
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("no_compiler")
def test_kernels_that_cannot_be_built_are_refused_with_the_way_out() -> None:
    with pytest.raises(FedsimError, match=r"--set client\.kernel=eager.*another run"):
        resolve(config_with("compiled"))
    assert resolve(config_with("auto")).config.client.kernel == "eager"


@compiled
@pytest.mark.parametrize(("wanted", "resolved"), [("auto", "compiled"), ("eager", "eager")])
def test_a_run_says_in_its_config_which_kernel_trains(wanted, resolved) -> None:
    run = resolve(config_with(wanted))
    assert run.config.client.kernel == run.trainer.kernel == resolved
    # And whoever reads that config trains with the same.
    again = resolve(run.config)
    assert again.trainer.kernel == resolved
    assert again.release == run.release


@compiled
def test_the_kernel_is_a_part_of_what_keys_the_noise() -> None:
    releases = {resolve(config_with(kernel)).release for kernel in ("auto", "compiled", "eager")}
    assert len(releases) == 2


@pytest.mark.usefixtures("no_compiler")
def test_a_deployed_node_without_a_compiler_trains_with_torchs_operations() -> None:
    def trainer(engine: str) -> Trainer:
        config = config_with("compiled", f"engine.name={engine}")
        return make_trainer(config, make_mlp(), make_data([4, 4]), device=CPU)

    assert trainer("deployment").kernel == "eager"
    with pytest.raises(FedsimError, match=r"client\.kernel"):
        trainer("local")


def test_a_copy_of_a_trainer_has_its_kernel() -> None:
    trainer = Trainer(
        make_mlp(), SGD(lr=0.1), make_data([4, 4]), kernel="eager", randomness=Randomness(1)
    )
    assert trainer.copy_for("cpu").kernel == trainer.on("plain").kernel == "eager"
