"""Words of other libraries lead to fedsim's own."""

from __future__ import annotations

from functools import partial

import pytest

from fedsim import RunConfig, registry
from fedsim.config.describe import keys
from fedsim.datasets import load
from fedsim.errors import FedsimError
from fedsim.synonyms import KEYS, NAMES

SAID = {
    "task.metrics=acc": "did you mean 'accuracy'?",
    "server.optimizer=fedavg": "'sgd' at server.lr = 1 adds the mean update, which is FedAvg.",
    "client.name=fedavg": "did you mean 'sgd'?",
    "client.name=fedprox": "client.proximal above 0 adds FedProx's term",
    "server.optimizer=fedprox": "client.proximal above 0 adds FedProx's term",
    "client.optimizer=adam": "did you mean 'name'?",
    "server.name=adam": "did you mean 'optimizer'?",
    "optimizer=adam": "did you mean client.name or server.optimizer?",
    "task.loss=mse": "did you mean 'squared-error'?",
    "task.metrics=mse": "did you mean 'rmse'?",
    "model.name=resnet18": "as 'nets:resnet18' for resnet18 in nets.py",
    "data.target=y": "did you mean data.columns (as in data.columns = 'y=income,owner=hospital')?",
    "data.name=fmnist": "did you mean 'fashion-mnist'?",
    "data.name=fashion_mnist": "did you mean 'fashion-mnist'?",
    "data.name=CIFAR-10": "did you mean 'cifar10'?",
    "model.hidden=64": "did you mean model.widths (with model.name = 'mlp')?",
    "cohort.fraction=0.1": "did you mean cohort.rate (with cohort.name = 'poisson')?",
    "client.learning-rate=0.1": "did you mean 'lr'?",
    "server.learning_rate=0.1": "did you mean 'lr'?",
    "client.batch_size=8": "did you mean 'batch-size'?",
    "noise.sigma=1.0": "did you mean 'multiplier'?",
    "lr=0.1": "did you mean client.lr or server.lr?",
    "batch-size=8": "did you mean client.batch-size?",
    "clip-norm=1.0": "did you mean mechanism.clip-norm or client.mechanism.clip-norm?",
    "alpha=0.5": "did you mean partition.alpha (with partition.name = 'dirichlet')?",
    "clients=10": "did you mean partition.clients?",
    "epochs=3": "did you mean client.epochs?",
    "device=cuda": "did you mean engine.device?",
    "adapter.target-modules=q": "did you mean adapter.targets (with adapter.name = 'lora')?",
    "adapter.r=4": "did you mean adapter.rank (with adapter.name = 'lora')?",
    "partition.name=noniid": "did you mean 'dirichlet'?",
    "rounds.number=3": "rounds = {'number': 3}; it must be a whole number.",
}


@pytest.mark.parametrize("override", SAID)
def test_what_other_libraries_say_leads_to_the_key_or_the_value(override: str) -> None:
    key, _, value = override.partition("=")
    # Any name of data may be a path, until it is looked for.
    read = (
        partial(load, value)
        if key == "data.name"
        else partial(RunConfig.from_overrides, [override])
    )
    with pytest.raises(FedsimError) as error:
        read()
    assert SAID[override] in str(error.value)


@pytest.mark.parametrize("word", KEYS)
def test_a_synonym_of_a_key_leads_to_keys_that_there_are(word: str) -> None:
    known = {key.name for key in keys()} | {"RAY_ADDRESS"}  # which no config may have
    for meant in KEYS[word]:
        assert meant.partition(" ")[0] in known
    table = KEYS[word][0].rpartition(".")[0]
    path = f"{table}.{word}" if table and " " not in table else word
    if path in known:  # it is a key, in this table
        return
    with pytest.raises(FedsimError, match="did you mean"):
        RunConfig.from_overrides([f"{path}=1"])


@pytest.mark.parametrize(("kind", "word"), [(kind, word) for kind in NAMES for word in NAMES[kind]])
def test_a_synonym_of_a_name_is_no_name_and_leads_to_one_or_says_what_to_do(
    kind: str, word: str
) -> None:
    meant, known = NAMES[kind][word], registry.names(kind)
    assert word not in known
    assert meant in known or " " in meant
