from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim import RunConfig, mechanisms, registry
from fedsim.clients import SGD, AdadpLR, LocalAlgorithm, Proximal
from fedsim.config.privacy_sections import MechanismSection
from fedsim.config.release_keys import release_digest
from fedsim.config.sections import (
    ClientSection,
    CohortSection,
    ModelSection,
    PartitionSection,
    ServerSection,
)
from fedsim.config.tables import ObjectTable
from fedsim.datasets import load
from fedsim.errors import FedsimError
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    Normalization,
    PerLayer,
    PrivateScalar,
)
from fedsim.models import build
from fedsim.partitions import Dirichlet
from fedsim.runs import factories
from fedsim.runs.object_overrides import ObjectOverrides
from fedsim.runs.resolve import make_strategy, resolve
from fedsim.settings import REQUIRED
from fedsim.training import ClientData


def config(**changes: Any) -> RunConfig:
    return RunConfig().replace(**changes)


TABLES: list[type[ObjectTable]] = [
    PartitionSection, ModelSection, ClientSection, CohortSection, MechanismSection, ServerSection,
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "name"), [(s, name) for s in TABLES for name in registry.names(s.kind)]
)
def test_a_table_has_the_settings_of_what_it_names_at_their_defaults(
    section: type[ObjectTable], name: str
) -> None:
    chosen: dict[str, Any] = {f"{section.table}.{section.selector}": name}
    if section is MechanismSection and name not in {"none", "krum", "median", "trimmed-mean"}:
        chosen["noise.multiplier"] = 1.0
    if name == "mlp":
        chosen["model.widths"] = 8
    if name == "buffered":
        chosen["devices.seconds-per-step"] = 1.0
    table = getattr(config(**chosen), section.table)
    settings = section.declared_settings(name)
    defaults = {s.name: s.default for s in settings if s.default is not REQUIRED}
    assert set(table.object_settings) == {s.name for s in settings}
    assert defaults.items() <= table.object_settings.items()
    made = table.make(clients=100, seed=1, population=100)
    assert {key: getattr(made, key) for key in defaults} == defaults


def test_mechanisms_have_the_configs_values() -> None:
    noise = {"noise.multiplier": 1.0}
    built = factories.mechanism(
        config(**{"mechanism.name": "normalization", "mechanism.clip-norm": 2.0, **noise}).mechanism
    )
    assert built == Normalization(2.0)
    built = factories.mechanism(
        config(**{"mechanism.name": "clipping", "mechanism.per-layer": True, **noise}).mechanism
    )
    assert built == PerLayer(Clipping(1.0))
    scalar = {"mechanism.private-scalar": "loss", "mechanism.private-scalar-high": 3.0}
    built = factories.mechanism(
        config(**{"mechanism.name": "clipping", **scalar, **noise}).mechanism
    )
    assert built == PrivateScalar(Clipping(1.0), name="loss", high=3.0)
    built = factories.mechanism(config(**{"mechanism.name": "adaclip", **noise}).mechanism)
    assert built == AdaClip()
    built = factories.mechanism(config(**{"mechanism.name": "adaptive-noise", **noise}).mechanism)
    assert built == AdaptiveNoise()
    assert factories.mechanism(config().mechanism) == mechanisms.NoPrivacy("num-examples")


def test_adadps_defaults_depend_on_whether_its_gradients_are_noised() -> None:
    plain = factories.algorithm(config(**{"client.name": "adadp-lr"}))
    private = factories.algorithm(
        config(
            **{
                "client.name": "adadp-lr",
                "client.mechanism.name": "clipping",
                "client.noise.multiplier": 2.0,
            }
        )
    )
    assert isinstance(plain, AdadpLR)
    assert isinstance(private, AdadpLR)
    assert (plain.tol, plain.discard) == (0.1, True)
    assert (private.tol, private.discard) == (1.0, False)


def test_a_first_rate_above_its_limit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    above = config(**{"client.name": "adadp-lr", "client.lr": 20.0})
    with pytest.raises(FedsimError, match=r"client\.lr is 20; .* at most client.eta-max, 10"):
        fedsim.run(above, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_proximal_term_goes_with_any_algorithm() -> None:
    built = factories.algorithm(config(**{"client.proximal": 0.1}))
    assert built == Proximal(SGD(lr=0.1), 0.1)


OWN = """
from dataclasses import dataclass
import torch
from fedsim.clients import LocalAlgorithm

@dataclass(frozen=True)
class Sign(LocalAlgorithm):
    lr: float
    scale: float = 1.0

    def step(self, state, gradient, at):
        state["theta"] -= self.scale * self.lr * gradient.dense().sign()

def squared(outputs, targets):
    return ((outputs - torch.nn.functional.one_hot(targets, outputs.shape[-1])) ** 2).sum(-1)

def not_an_algorithm(lr):
    return 3
"""


def test_a_users_own_algorithm_and_loss_are_found_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    own = {"client.name": "own_algorithm:Sign", "client.options": "scale=0.5,lr=0.1"}
    built: Any = factories.algorithm(config(**own))
    assert isinstance(built, LocalAlgorithm)
    assert (built.lr, built.scale) == (0.1, 0.5)
    assert factories.loss(config(**{"task.loss": "own_algorithm:squared"})).__name__ == "squared"
    assert set(factories.metrics(config(**{"task.metrics": "accuracy,own_algorithm:squared"}))) == {
        "accuracy",
        "squared",
    }
    with pytest.raises(FedsimError, match=r"it must name a fedsim\.clients\.LocalAlgorithm"):
        factories.algorithm(
            config(**{"client.name": "own_algorithm:not_an_algorithm", "client.options": "lr=1"})
        )
    with pytest.raises(
        FedsimError,
        match=r"client.options.nonsense is not a setting of 'own_algo\w+:Sign'",
    ):
        factories.algorithm(
            config(**{"client.name": "own_algorithm:Sign", "client.options": "nonsense=1"})
        )
    with pytest.raises(FedsimError, match=r"client.options.lr = 'fast'; it must be a number"):
        factories.algorithm(
            config(**{"client.name": "own_algorithm:Sign", "client.options": "lr=fast"})
        )
    with pytest.raises(FedsimError, match="no callable 'Missing'"):
        factories.algorithm(config(**{"client.name": "own_algorithm:Missing"}))


def test_objects_from_python_take_the_place_of_what_a_config_names() -> None:
    small = config(**{"rounds": 2, "partition.clients": 4, "client.batch-size": 50})
    by_name = fedsim.run(small.replace(**{"partition.name": "dirichlet", "partition.alpha": 1.0}))
    given = fedsim.run(
        small,
        partition=Dirichlet(alpha=1.0, clients=4, seed=1),
        data=load("digits"),
        model=build("softmax", (64,), 10, seed=1),
    )
    ours, theirs = (result.arrays.to_torch_state_dict() for result in (by_name, given))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(FedsimError, match=r"has 5 clients, and partition\.clients = 4"):
        fedsim.run(small, partition=Dirichlet(clients=5))
    with pytest.raises(FedsimError, match="it must be 'local' or 'ray'"):
        fedsim.run(small, engine="simulation", partition=Dirichlet(clients=4))


def test_a_private_run_of_other_objects_draws_other_noise() -> None:
    private = config(
        **{"mechanism.name": "clipping", "noise.multiplier": 1.0, "partition.clients": 4}
    )
    plain, given = (
        resolve(private),
        resolve(private, overrides=ObjectOverrides(partition=Dirichlet(clients=4))),
    )
    assert plain.release != given.release


def test_objects_that_start_or_compute_otherwise_share_no_noise_and_resume_no_run(
    tmp_path: Path,
) -> None:
    private = config(
        **{"mechanism.name": "clipping", "noise.multiplier": 1.0, "partition.clients": 4,
           "rounds": 2, "client.batch-size": 50}
    )  # fmt: skip

    def made(activation: nn.Module, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 8), activation, nn.Linear(8, 10))

    nets = [made(nn.Tanh(), 1), made(nn.ReLU(), 1), made(nn.Tanh(), 2), made(nn.Tanh(), 1)]
    releases = [resolve(private, overrides=ObjectOverrides(model=net)).release for net in nets]
    assert len(set(releases)) == 3
    assert releases[0] == releases[3]
    out = tmp_path / "run"
    fedsim.run(private, out=out, model=nets[0])
    more = private.replace(rounds=3)
    for other in (nets[1], nets[2]):
        with pytest.raises(FedsimError, match="that it began with"):
            fedsim.run(more, out=out, resume=True, model=other)
    on = fedsim.run(more, out=out, resume=True, model=nets[3])
    assert on.privacy.cost.releases == 3


class OneTooFew(Dirichlet):
    """Forgets its last client."""

    def indices(self, targets, columns=None):
        return super().indices(targets, columns)[:-1]


def test_a_partition_that_deals_to_fewer_clients_than_declared_is_refused() -> None:
    with pytest.raises(FedsimError, match=r"to 3 clients, and partition\.clients = 4"):
        _ = resolve(
            config(**{"partition.clients": 4}),
            overrides=ObjectOverrides(partition=OneTooFew(clients=4)),
        ).data.client_indices


def test_a_strategy_of_flowers_takes_the_place_of_the_server_table() -> None:
    from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian

    small = config(**{"rounds": 2, "partition.clients": 4, "evaluate.every": 0})
    plain, averaged = fedsim.run(small), fedsim.run(small, strategy=FedAvg())
    adam = fedsim.run(small, strategy=FedAdam(eta=0.01))
    again = fedsim.run(small, strategy=FedAdam(eta=0.01))
    for name, array in plain.arrays.items():
        np.testing.assert_allclose(averaged.arrays[name].numpy(), array.numpy(), atol=1e-6)
        assert not np.allclose(adam.arrays[name].numpy(), array.numpy(), atol=1e-4)
        assert again.arrays[name].numpy().tobytes() == adam.arrays[name].numpy().tobytes()
    with pytest.raises(FedsimError, match="FedMedian, which needs the replies of single clients"):
        fedsim.run(small, strategy=FedMedian())
    with pytest.raises(
        FedsimError, match="strategy is a DPFedAvg, which a config's tables describe"
    ):
        fedsim.run(small, strategy=make_strategy(resolve(small)))
    with pytest.raises(FedsimError, match=r"partition= or strategy= it must be 'local' or 'ray'"):
        fedsim.run(small, engine="simulation", strategy=FedAvg())
    slow, fast = (ObjectOverrides(strategy=FedAdam(eta=eta)) for eta in (0.01, 0.1))
    assert resolve(small, slow).release != resolve(small, fast).release


def test_a_block_on_a_gpu_holds_a_cohort() -> None:
    # A GPU computes every step for a whole block.
    large = RunConfig.from_overrides(
        ["partition.clients=200", "data.train=:400", "cohort.name=poisson", "cohort.rate=0.25"]
    )
    clients = ClientData(
        torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), [np.array([0])] * 200
    )
    few = ClientData(clients.x, clients.y, clients.indices[:3])

    def block(device: str, model: nn.Module, data: ClientData) -> int:
        return factories._cohort_block(large, model, data, torch.device(device))

    assert block("cuda", nn.Linear(2, 2), clients) == 72  # 50 + 3 sqrt(50)
    assert block("cuda", nn.Linear(2, 2), few) == 3
    assert block("cuda", nn.Linear(8192, 8192, bias=False), clients) == 8  # 2 GiB
    assert block("cpu", nn.Linear(2, 2), clients) == 0
    # A block for each of several GPUs.
    large = large.replace(**{"engine.name": "ray", "engine.workers": 3})
    assert block("cuda", nn.Linear(2, 2), clients) == 24


def test_tf32_needs_a_gpu_and_is_another_run() -> None:
    config = RunConfig.from_overrides(["data.train=:400", "engine.device=cpu"])
    fast = config.replace(**{"client.matmul": "tf32"})
    assert release_digest(fast) != release_digest(config)
    with pytest.raises(FedsimError, match=r"client\.matmul = 'tf32', but clients train on a CPU"):
        resolve(fast)
