from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fedsim import RunConfig, mechanisms
from fedsim.clients import SGD, AdadpLR, LocalAlgorithm, Proximal
from fedsim.clients.catalog import ALGORITHMS
from fedsim.config.keys import Section
from fedsim.config.sections import ClientSection, MechanismSection
from fedsim.errors import FedsimError
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    Normalization,
    PerLayer,
    PrivateScalar,
)
from fedsim.runs import objects


def config(**changes: Any) -> RunConfig:
    return RunConfig().replace(**changes)


def only(section: type[Section], key: str) -> list[str] | None:
    extra = section.model_fields[key].json_schema_extra
    return extra.get("only") if isinstance(extra, dict) else None  # type: ignore[return-value]


@pytest.mark.parametrize("name", objects._MECHANISMS)
def test_every_setting_of_a_mechanism_is_a_key_that_belongs_to_it(name: str) -> None:
    for field in fields(objects._MECHANISMS[name]):
        names = only(MechanismSection, field.name)
        assert names is not None
        assert name in names


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_an_algorithm_is_a_key_that_belongs_to_it(name: str) -> None:
    for field in fields(ALGORITHMS[name]):
        names = only(ClientSection, field.name)
        assert names is None or name in names


def test_mechanisms_have_the_configs_values() -> None:
    noise = {"noise.multiplier": 1.0}
    built = objects.mechanism(
        config(**{"mechanism.name": "normalization", "mechanism.clip-norm": 2.0, **noise}).mechanism
    )
    assert built == Normalization(2.0)
    built = objects.mechanism(
        config(**{"mechanism.name": "clipping", "mechanism.per-layer": True, **noise}).mechanism
    )
    assert built == PerLayer(Clipping(1.0))
    scalar = {"mechanism.private-scalar": "loss", "mechanism.private-scalar-high": 3.0}
    built = objects.mechanism(config(**{"mechanism.name": "clipping", **scalar, **noise}).mechanism)
    assert built == PrivateScalar(Clipping(1.0), name="loss", high=3.0)
    built = objects.mechanism(config(**{"mechanism.name": "adaclip", **noise}).mechanism)
    assert built == AdaClip()
    built = objects.mechanism(config(**{"mechanism.name": "adaptive-noise", **noise}).mechanism)
    assert built == AdaptiveNoise(1.0, float("inf"), 1.0)
    assert objects.mechanism(config().mechanism) == mechanisms.NoPrivacy("num-examples")


def test_adadps_defaults_depend_on_whether_its_gradients_are_noised() -> None:
    plain = objects.algorithm(config(**{"client.name": "adadp-lr"}))
    private = objects.algorithm(
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


def test_the_proximal_term_goes_with_any_algorithm() -> None:
    built = objects.algorithm(config(**{"client.proximal": 0.1}))
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
    own = {"client.name": "own_algorithm:Sign", "client.options": "scale=0.5"}
    built: Any = objects.algorithm(config(**own))
    assert isinstance(built, LocalAlgorithm)
    assert (built.lr, built.scale) == (0.1, 0.5)
    assert objects.loss(config(**{"model.loss": "own_algorithm:squared"})).__name__ == "squared"
    assert set(objects.metrics(config(**{"model.metrics": "accuracy,own_algorithm:squared"}))) == {
        "accuracy",
        "squared",
    }
    with pytest.raises(FedsimError, match="it must name a LocalAlgorithm"):
        objects.algorithm(config(**{"client.name": "own_algorithm:not_an_algorithm"}))
    with pytest.raises(FedsimError, match="'nonsense' is not one of"):
        objects.algorithm(
            config(**{"client.name": "own_algorithm:Sign", "client.options": "nonsense=1"})
        )
    with pytest.raises(FedsimError, match="no callable 'Missing'"):
        objects.algorithm(config(**{"client.name": "own_algorithm:Missing"}))
