"""Wrong arguments of public names: one sentence each, that names the argument."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, get_args

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

import fedsim
from fedsim import clients as algorithms
from fedsim import cohorts, engines, privacy, strategies, training
from fedsim import mechanisms as bounds
from fedsim import partitions as parts_of
from fedsim.arguments import check_arguments, explain_call
from fedsim.datasets import dataset_of
from fedsim.errors import FedsimError
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness

WRONG = [
    # fedsim itself
    ("fedsim.run(3)", "config"),
    ("fedsim.run('run.toml')", "config"),
    ("fedsim.run({'rounds': 3})", "config"),
    ("fedsim.run(config, engine=3)", "engine"),
    ("fedsim.run(config, engine='cluster')", "engine"),
    ("fedsim.run(config, out=3)", "out"),
    ("fedsim.run(config, overwrite='yes')", "overwrite"),
    ("fedsim.run(config, resume='yes')", "resume"),
    ("fedsim.run(config, callbacks=3)", "callbacks"),
    ("fedsim.run(config, callbacks=['x'])", "callbacks"),
    ("fedsim.run(config, model='softmax')", "model"),
    ("fedsim.run(config, model=torch.nn.Linear)", "model"),
    ("fedsim.run(config, data=3)", "data"),
    ("fedsim.run(config, data='digits')", "data"),
    ("fedsim.run(config, partition='iid')", "partition"),
    ("fedsim.run(config, partition=parts_of.IID)", "partition"),
    ("fedsim.run(config, strategy='FedAvg')", "strategy"),
    ("fedsim.load(3)", "path"),
    ("fedsim.load(None)", "path"),
    ("dataset_of(3)", "data"),
    ("fedsim.datasets.from_table({'y': [0] * 9}, columns=3)", "columns"),
    ("fedsim.datasets.from_table({'y': [0] * 9}, columns='y=y', types={'a': 'number'})", "types"),
    ("fedsim.datasets.from_table({'y': [0] * 9}, columns='y=y', normalize='yes')", "normalize"),
    ("fedsim.datasets.from_table(np.ones((9, 2), int), columns='y=y')", "table is of type ndarray"),
    ("fedsim.datasets.from_table({'y': torch.ones(9).to_sparse()}, columns='y=y')", "a table"),
    ("dataset_of(({'x': torch.ones(9, 1, device='meta'), 'y': [0]},) * 2)", "x of data"),
    ("fedsim.models.build('mlp', None, 3)", "input_shape"),
    ("fedsim.models.build('mlp', np.array(3), 3)", "input_shape"),
    ("parts_of.hold_out('x', 40, seed=1)", "amount"),
    ("parts_of.hold_out(np.nan, 40, seed=1)", "data.validation"),
    ("parts_of.hold_out(0.1, 40, np.zeros(3), seed=1)", "owners"),
    ("algorithms.Schedule.parse(3)", "text"),
    ("fedsim.RunConfig(client={'lr': np.zeros(3)})", "client.lr"),
    ("fedsim.RunConfig(rounds='x')", "rounds"),
    ("fedsim.RunConfig(rounds=1.5)", "rounds"),
    ("fedsim.RunConfig(rounds=True)", "rounds"),
    ("fedsim.RunConfig(seed=None)", "seed"),
    ("fedsim.RunConfig(client=3)", "client"),
    ("fedsim.RunConfig(client={'lr': 'x'})", "client.lr"),
    ("fedsim.RunConfig(round=3)", "round"),
    ("fedsim.RunConfig.load(3)", "path"),
    ("fedsim.RunConfig.load('missing.toml')", "missing.toml"),
    ("fedsim.RunConfig.load('run.toml', overrides='rounds=3')", "overrides"),
    ("fedsim.RunConfig.load('run.toml', allow_code=[3])", "allow_code"),
    ("fedsim.RunConfig.from_overrides('rounds=3')", "a list or another iterable but a string"),
    ("fedsim.RunConfig.from_overrides({'rounds': 3})", "overrides"),
    ("fedsim.RunConfig.from_overrides([3])", "overrides"),
    ("fedsim.RunConfig.parse('x')", "tree"),
    ("fedsim.RunConfig.parse([('rounds', 3)])", "tree"),
    ("fedsim.RunConfig.from_run_config('x')", "flat"),
    ("config.replace(rounds='x')", "rounds"),
    ("config.replace(**{'client.lr': []})", "client.lr"),
    # cohorts
    ("cohorts.PoissonCohort('x')", "rate"),
    ("cohorts.PoissonCohort(2.0)", "rate"),
    ("cohorts.PoissonCohort(0.1, '1000')", "population"),
    ("cohorts.PoissonCohort(0.1, 10.5)", "population"),
    ("cohorts.PoissonCohort(0.1, adjacency='replace-one')", "adjacency"),
    ("cohorts.PoissonCohort(0.1, adjacency=3)", "adjacency"),
    ("cohorts.FixedCohort('x', 10)", "size"),
    ("cohorts.FixedCohort(10, 'x')", "population"),
    ("cohorts.FixedCohort(20, 10)", "size"),
    ("cohorts.FullCohort('x')", "population"),
    ("cohorts.FullCohort(0)", "population"),
    ("cohorts.FullCohort(adjacency='add-remove')", "adjacency"),
    # mechanisms
    ("bounds.Clipping('1')", "clip-norm"),
    ("bounds.Clipping(None)", "clip-norm"),
    ("bounds.Clipping(-1)", "clip-norm"),
    ("bounds.Clipping([1.0])", "clip-norm"),
    ("bounds.Clipping(1).bound(np.zeros((2, 3)))", "block"),
    ("bounds.Clipping(1).bound([[1.0]])", "block"),
    ("bounds.Clipping(1).bound(torch.zeros(3))", "block"),
    ("bounds.Clipping(1).bound(torch.zeros(2, 3, dtype=torch.int64))", "block"),
    ("bounds.Clipping(1).bound(torch.zeros(2, 3), layout=3)", "layout"),
    ("bounds.Clipping(1).bound(torch.zeros(2, 3), state=3)", "state"),
    ("bounds.Normalization('1')", "clip-norm"),
    ("bounds.Normalization(0)", "clip-norm"),
    ("bounds.AdaClip(clip_norm='x')", "clip-norm"),
    ("bounds.AdaClip(beta1='x')", "beta1"),
    ("bounds.AdaptiveNoise(decay='x')", "decay"),
    ("bounds.AdaptiveNoise(noise_shape=3)", "noise-shape"),
    ("bounds.QuantileClipping(target_quantile='x')", "target-quantile"),
    ("bounds.QuantileClipping(target_quantile=2)", "target-quantile"),
    ("bounds.NoPrivacy('mean')", "weighting"),
    ("bounds.NoPrivacy(3)", "weighting"),
    ("bounds.PerLayer('clipping')", "PerLayer"),
    # strategies
    ("strategies.DPFedAvg(**given(cohort='poisson'))", "cohort"),
    ("strategies.DPFedAvg(**given(cohort=cohorts.PoissonCohort))", "cohort"),
    ("strategies.DPFedAvg(**given(mechanism='clipping'))", "mechanism"),
    ("strategies.DPFedAvg(**given(mechanism=1.0))", "mechanism"),
    ("strategies.DPFedAvg(**given(noise_multiplier='1'))", "noise_multiplier"),
    ("strategies.DPFedAvg(**given(noise_multiplier=-1))", "noise multiplier"),
    ("strategies.DPFedAvg(plan='x')", "plan"),
    ("strategies.DPFedAvg(**given(delta='x'))", "delta"),
    ("strategies.DPFedAvg(**given(delta=2))", "delta"),
    ("strategies.DPFedAvg(**given(max_epsilon='x'))", "max_epsilon"),
    ("strategies.DPFedAvg(**given(ledger=3))", "ledger"),
    ("strategies.DPFedAvg(**given(seed='x'))", "seed"),
    ("strategies.DPFedAvg(**given(seed=-1))", "seed"),
    ("strategies.DPFedAvg(**given(server_optimizer='adam'))", "server_optimizer"),
    ("strategies.DPFedAvg(**given(placement='node'))", "placement"),
    ("strategies.DPFedAvg(**given(hardened_noise='x'))", "hardened_noise"),
    ("strategies.DPFedAvg(**given(fraction_evaluate='x'))", "fraction_evaluate"),
    ("strategies.ClientMetrics(every='x')", "every"),
    ("strategies.ClientMetrics(every=0)", "every"),
    ("strategies.ClientMetrics(every=-1)", "every"),
    ("strategies.PrivateMetrics([], 8.0)", "ranges"),
    ("strategies.PrivateMetrics(['accuracy'], 8.0)", "ranges"),
    ("strategies.PrivateMetrics([strategies.ValueRange('loss', 0.0, 1.0)] * 2, 8.0)", "ranges"),
    ("strategies.PrivateMetrics([strategies.ValueRange('loss', 0.0, 1.0)], -1)", "noise-multip"),
    ("strategies.DPFedAvg(**given(fraction_evaluate=2.0, metrics=shown))", "fraction_evaluate"),
    ("strategies.DPFedAvg(**given(fraction_evaluate=-1.0, metrics=shown))", "fraction_evaluate"),
    ("strategies.DPFedAvg(**given(fraction_evaluate=0.0, metrics=noisy))", "fraction_evaluate"),
    ("strategies.DPFedAvg(**given(fraction_evaluate=2.0, metrics=noisy))", "fraction_evaluate"),
    ("strategies.DPFedAvg(**given(max_epsilon=-1))", "max_epsilon"),
    ("strategies.DPFedAvg(**given(max_epsilon=0))", "max_epsilon"),
    ("strategies.DPFedAvg(**given(max_epsilon=-1, ledger=privacy.Ledger()))", "max_epsilon"),
    ("strategies.DPFedAvg(**given(ledger='/tmp'))", "ledger"),
    ("strategies.DPFedAvg(**given(ledger='new/folder/l.jsonl'))", "there is no folder new/folder"),
    ("strategies.SecureAggregation('x')", "threshold"),
    ("strategies.Availability(replying=3)", "replying"),
    ("strategies.Availability(node_timeout=-1)", "node-timeout"),
    ("strategies.Availability(max_failed_rounds=0)", "max-failed-rounds"),
    ("strategies.ClientTraining(algorithm='sgd')", "algorithm"),
    ("strategies.ClientTraining(example_counts=3)", "example-counts"),
    ("strategies.DPFedAvg(**given(clients=3))", "be an object of fedsim.strategies.ClientTraining"),
    ("strategies.DPFedAvg(**given(clients=algorithms.SGD()))", "clients"),
    ("strategies.DPFedAvg(**given(metrics='loss'))", "metrics"),
    ("strategies.DPFedAvg(**given(availability=3))", "availability"),
    ("strategies.DPFedAvg(**given(weighted_by_key=3))", "weighted_by_key"),
    ("strategies.DPFedAvg(**given(fraction_fit=0.1))", "fraction_fit"),
    ("strategies.adam('x')", "lr"),
    ("strategies.adam(0)", "lr"),
    ("strategies.adam(betas=0.9)", "betas"),
    ("strategies.sgd('x')", "lr"),
    ("strategies.sgd(1.0, 'x')", "momentum"),
    ("strategy.start('grid', arrays)", "grid"),
    ("strategy.start(grid, {'w': torch.zeros(3)})", "initial_arrays"),
    ("strategy.start(grid, None)", "initial_arrays"),
    ("strategy.start(grid, arrays, num_rounds='x')", "num_rounds"),
    ("strategy.start(grid, arrays, num_rounds=1.5)", "num_rounds"),
    ("strategy.start(grid, arrays, timeout='x')", "timeout"),
    ("strategy.start(grid, arrays, train_config={'lr': 1})", "train_config"),
    ("strategy.start(grid, arrays, evaluate_fn=3)", "evaluate_fn"),
    ("strategy.start(grid, arrays, on_round=3)", "on_round"),
    ("strategy.start(grid, arrays, state=3)", "state"),
    ("strategy.start(grid, arrays, num_rounds=-1)", "num_rounds"),
    ("strategy.start(grid, arrays, num_rounds=0)", "num_rounds is 0; it must be at least 1"),
    ("strategy.start(grid, arrays, timeout=-1)", "timeout"),
    ("strategy.start(grid, arrays, timeout=float('nan'))", "timeout"),
    ("strategy.start(grid, arrays, state={})", "state"),
    ("strategy.start(grid, arrays, state={'a': 1})", "state"),
    ("strategy.start(grid, record(w=(3, 2)))", "initial_arrays"),
    ("strategy.start(grid, record(weight=(3, 4), bias=(3,)))", "initial_arrays"),
    ("strategy.start(grid, record(**{'weight': (3, 2), 'bias': (4,)}))", "initial_arrays"),
    ("strategy.start(grid, whole_numbers)", "initial_arrays"),
    ("strategy.start(grid, ArrayRecord())", "initial_arrays"),
    # training
    ("training.Trainer('softmax', algorithms.SGD(), data, randomness=seeded)", "model"),
    ("training.Trainer(torch.nn.Linear, algorithms.SGD(), data, randomness=seeded)", "model"),
    ("training.Trainer(model, 'sgd', data, randomness=seeded)", "algorithm"),
    ("training.Trainer(model, algorithms.SGD, data, randomness=seeded)", "algorithm"),
    ("training.Trainer(model, algorithms.SGD(), (1, 2), randomness=seeded)", "data"),
    ("training.Trainer(*trained, randomness=1)", "randomness"),
    ("training.Trainer(*trained, **keyed, batch_size='x')", "batch"),
    ("training.Trainer(*trained, **keyed, epochs='x')", "epochs"),
    ("training.Trainer(*trained, **keyed, steps='x')", "steps"),
    ("training.Trainer(*trained, **keyed, max_grad_norm=np.nan)", "client.max-grad-norm"),
    ("training.Trainer(*trained, **keyed, counts=[1.5, 2])", "client.work"),
    ("training.Trainer(*trained, **keyed, counts=np.ones((2, 2), int))", "client.work"),
    ("training.Trainer(*trained, **keyed, counts=['1', '2'])", "client.work"),
    ("training.Trainer(*trained, **keyed, counts=[[1], [1, 2]])", "client.work"),
    ("training.Trainer(*trained, **keyed, path='fast')", "path"),
    ("training.Trainer(*trained, **keyed, loss='mse')", "loss"),
    ("training.Trainer(*trained, **keyed, metrics='x')", "metrics"),
    ("training.Trainer(*trained, **keyed, privacy=1.0)", "privacy"),
    ("training.Trainer(*trained, **keyed, device='x')", "device"),
    ("training.Trainer(*trained, **keyed, device='cuda:99')", "device"),
    (
        "training.Trainer(*trained, **keyed, personal='w')",
        "personal",
    ),
    ("training.Trainer(*trained, **keyed, state='x')", "state"),
    *(
        (f"list(trainer.{call}({given}))", argument)
        for call in ("train", "evaluate")
        for given, argument in (
            ("trainer.initial(), [0, 1], 1", "client_ids"),
            ("trainer.initial(), np.array([0.5]), 1", "client_ids"),
            ("trainer.initial(), np.array([[0]]), 1", "client_ids"),
            ("trainer.initial(), np.arange(3), 1", "client_ids"),
            ("trainer.initial(), np.array([-1]), 1", "client_ids"),
            ("trainer.initial(), np.array([1, 0, 1]), 1", "client_ids"),
            ("torch.zeros(3), np.arange(2), 1", "vector"),
            ("torch.zeros(1, 9), np.arange(2), 1", "vector"),
            ("[0.0] * 9, np.arange(2), 1", "vector"),
            ("trainer.initial(), np.arange(2), '1'", "round"),
        )
    ),
    ("training.ClientData(x, y, 3)", "indices"),
    ("training.ClientData(x, y, [3])", "indices"),
    ("training.ClientData(x, y, [np.array([0.5])])", "indices"),
    ("training.ClientData(x, y, [np.array(1)])", "indices"),
    ("training.ClientData(x, y, np.array(1))", "indices"),
    ("training.ClientData(x.numpy(), y, [np.arange(4)])", "x"),
    ("training.ClientData(x, [0, 1, 0, 1], [np.arange(4)])", "y"),
    ("training.ClientData(x, y, [np.arange(9)])", "client 0"),
    ("training.ExamplePrivacy('clipping', 1.0)", "mechanism"),
    ("training.ExamplePrivacy(bounds.Clipping(1.0), 'x')", "noise"),
    ("training.ExamplePrivacy(bounds.Clipping(1.0), 1.0, chunk='x')", "chunk"),
    ("training.ExamplePrivacy(bounds.Clipping(1.0), 1.0, sampling='fixed')", "sampling"),
    ("algorithms.SGD(lr='x')", "lr"),
    ("algorithms.SGD(lr=-1)", "lr"),
    ("algorithms.SGD(schedule=3)", "schedule"),
    ("algorithms.AdadpLR(tol='x')", "tol"),
    ("algorithms.AdadpNoise(decay='x')", "decay"),
    # partitions
    ("parts_of.IID('x')", "clients"),
    ("parts_of.IID(0)", "clients"),
    ("parts_of.IID(2, seed='x')", "seed"),
    ("parts_of.IID(2, seed=-1)", "seed"),
    ("parts_of.Dirichlet(alpha='x')", "alpha"),
    ("parts_of.Shards(shards=1.5)", "shards"),
    ("parts_of.ByOwner(column=3)", "column"),
    ("parts_of.InterpolatedPathological(randomness='x')", "randomness"),
    ("parts_of.InterpolatedPathological(groups=3)", "groups"),
    ("parts_of.InterpolatedPathological(clients='x')", "clients"),
    # engines
    ("engines.LocalGrid('x')", "client"),
    ("engines.LocalGrid(trainer, num_nodes='x')", "num_nodes"),
    ("engines.LocalGrid(trainer, workers='x')", "workers"),
    ("engines.LocalGrid(trainer, workers=0)", "workers"),
    ("engines.LocalGrid(trainer, run_config=3)", "run_config"),
    ("engines.RayGrid('x')", "trainer"),
    ("engines.RayGrid(trainer, workers='x')", "workers"),
    ("engines.RayGrid(trainer, address=3)", "address"),
    ("engines.StreamingGrid('x')", "grid"),
    ("engines.StreamingGrid(grid, clients='x')", "clients"),
    ("engines.array_record([1, 2])", "arrays"),
    ("engines.array_record({'w': [1.0]})", "arrays"),
    ("engines.array_record('x')", "arrays"),
    ("engines.tensors({'w': 1})", "record"),
    # privacy
    ("privacy.epsilon(**asked(noise_multiplier='1'))", "noise_multiplier"),
    ("privacy.epsilon(**asked(noise_multiplier=-1))", "noise multiplier"),
    ("privacy.epsilon(**asked(cohort='poisson'))", "cohort"),
    ("privacy.epsilon(**asked(cohort=0.1))", "cohort"),
    ("privacy.epsilon(**asked(rounds='x'))", "rounds"),
    ("privacy.epsilon(**asked(rounds=1.5))", "rounds"),
    ("privacy.epsilon(**asked(rounds=0))", "rounds"),
    ("privacy.epsilon(**asked(delta='x'))", "delta"),
    ("privacy.epsilon(**asked(delta=0))", "delta"),
    ("privacy.calibrate(**target(target_epsilon='x'))", "target_epsilon"),
    ("privacy.calibrate(**target(target_epsilon=0))", "target epsilon"),
    ("privacy.calibrate(**target(cohort='full'))", "cohort"),
    ("privacy.calibrate(**target(rounds='x'))", "rounds"),
    ("privacy.calibrate(**target(delta='x'))", "delta"),
    ("privacy.epsilon(**asked(rounds=10**30))", "rounds"),
    ("privacy.calibrate(**target(rounds=10**30))", "rounds"),
    ("privacy.calibrate_events(3, target_epsilon=1.0, delta=1e-5)", "events"),
    ("privacy.worst_client(3, 1e-5)", "events"),
    ("privacy.Accountant(3)", "events"),
    ("privacy.Accountant('events')", "events"),
    ("privacy.Accountant([1.1])", "event"),
    ("privacy.tradeoff([1.1])", "event"),
    ("privacy.Accountant([privacy.Event(noise_multiplier=1.0)]).epsilon('x')", "delta"),
    ("privacy.Accountant([privacy.Event(noise_multiplier=1.0)]).delta('x')", "epsilon"),
    ("privacy.Budget('1', 1e-5)", "epsilon"),
    ("privacy.Budget(np.nan, 1e-5)", "max-epsilon"),
    ("privacy.Budget(1.0, 1.0)", "delta"),
    ("privacy.Ledger(delta=1e-5).would_exceed(event, np.nan)", "max-epsilon"),
    ("privacy.Ledger(delta=1e-5).would_exceed(event, '1')", "epsilon"),
    ("privacy.Ledger().record(3)", "entry"),
    ("privacy.Event(noise_multiplier=1.0, sides={'bits': 'x'})", "bits"),
    ("privacy.Event(noise_multiplier='x')", "noise-multiplier"),
    ("privacy.Event(noise_multiplier=1.0, law='poisson')", "law"),
    ("privacy.laws.PoissonLaw(rate='x')", "rate"),
    ("privacy.laws.FullLaw(population='x')", "population"),
    ("cohorts.InclusionSampler('x', 0.5)", "population"),
    ("cohorts.InclusionSampler(10, 'x')", "highest"),
    ("strategies.ValueRange('loss', 'x', 1.0)", "low"),
    ("fedsim.datasets.load(3)", "name"),
    ("fedsim.datasets.Dataset('d', 3, 4)", "train"),
    ("training.example_epsilon(3, 4, [5], 6)", "privacy"),
    ("privacy.Ledger(3)", "path"),
    ("privacy.Ledger(delta='x')", "delta"),
    ("privacy.Ledger(max_epsilon='x')", "max_epsilon"),
    ("privacy.Ledger(declared_event=3)", "declared_event"),
    ("privacy.Ledger.read(3)", "path"),
    ("Randomness('x')", "seed"),
    ("Randomness(-1)", "seed"),
    ("Randomness(1.5)", "seed"),
    ("Randomness(1, release=3)", "release"),
    (
        "ReleasePlan(**planned(sampler='x'))",
        "sampler",
    ),
    ("ReleasePlan(**planned(level='row'))", "level"),
    ("ReleasePlan(**planned(noise=1))", "noise"),
    ("privacy.Independent('x')", "multiplier"),
]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])
    data = training.ClientData(x, y, [np.arange(2), np.arange(2, 4)])
    model = torch.nn.Linear(2, 3)
    seeded = Randomness(1)
    trainer = training.Trainer(model, algorithms.SGD(lr=0.1), data, randomness=seeded)
    cohort = cohorts.PoissonCohort(0.5, 2)
    settings = {"mechanism": bounds.Clipping(1.0), "cohort": cohort, "noise_multiplier": 1.0}
    question = {"noise_multiplier": 1.0, "cohort": cohort, "rounds": 3, "delta": 1e-5}
    plan = {
        "level": "client",
        "sampler": cohort,
        "mechanism": bounds.Clipping(1.0),
        "noise": privacy.Independent(1.0),
    }
    target = {"target_epsilon": 5.0, "cohort": cohort, "rounds": 3, "delta": 1e-5}

    def record(**shapes: tuple[int, ...]) -> ArrayRecord:
        return engines.array_record({name: torch.zeros(shape) for name, shape in shapes.items()})

    return globals() | {
        "x": x,
        "y": y,
        "data": data,
        "model": model,
        "seeded": seeded,
        "dataset_of": dataset_of,
        "ReleasePlan": ReleasePlan,
        "keyed": {"randomness": seeded},
        "trained": (model, algorithms.SGD(), data),
        "planned": lambda **changes: plan | changes,
        "trainer": trainer,
        "event": privacy.Event(noise_multiplier=1.0),
        "cohort": cohort,
        "config": fedsim.RunConfig(),
        "grid": engines.LocalGrid(trainer),
        "arrays": record(weight=(3, 2), bias=(3,)),
        "whole_numbers": engines.array_record(
            {"weight": torch.zeros(3, 2, dtype=torch.int64), "bias": torch.zeros(3)}
        ),
        "record": record,
        "shown": strategies.ClientMetrics(unprotected=True),
        "noisy": strategies.ClientMetrics(
            private=strategies.PrivateMetrics([strategies.ValueRange("loss", 0.0, 1.0)], 8.0)
        ),
        "given": lambda **changes: settings | changes,
        "asked": lambda **changes: question | changes,
        "target": lambda **changes: target | changes,
    }


@pytest.mark.parametrize(("call", "argument"), WRONG, ids=[call for call, _ in WRONG])
def test_a_wrong_argument_is_refused_in_a_sentence_that_names_it(
    call: str, argument: str, names: dict[str, Any], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = strategies.DPFedAvg(**names["given"]())
    with pytest.raises(FedsimError) as refused:
        eval(call, {**names, "strategy": strategy})
    sentence = str(refused.value)
    assert _plain(argument) in _plain(sentence)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 600


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            "strategies.DPFedAvg(**given(noise_mutliplier=1.0))",
            "DPFedAvg has no argument 'noise_mutliplier'; did you mean 'noise_multiplier'?",
        ),
        (
            "bounds.Clipping(clipping_norm=1.0)",
            "Clipping has no argument 'clipping_norm'; did you mean 'clip_norm'? It takes",
        ),
        (
            "algorithms.SGD(learning_rate=0.1)",
            "SGD has no argument 'learning_rate'; did you mean 'lr'?",
        ),
        ("engines.LocalGrid()", "LocalGrid needs the argument 'client"),
        ("bounds.Clipping(1.0, 2.0)", "Clipping takes clip_norm by position, each once; name"),
        ("bounds.Clipping(1.0, clip_norm=2.0)", "Clipping takes clip_norm by position, each once;"),
        ("Randomness(sed=1)", "Randomness has no argument 'sed'; did you mean 'seed'?"),
        ("privacy.epsilon(noise_multiplier=1.1)", "epsilon needs the argument 'cohort'"),
        ("fedsim.load()", "load needs the argument 'path'"),
        (
            "strategies.DPFedAvg(**given(mechanism=bounds.Clipping))",
            "mechanism is the class Clipping; it must be an object of fedsim.mechanisms.Mechanism "
            "or None, such as Clipping(...) makes.",
        ),
    ],
)
def test_a_call_that_does_not_fit_is_one_sentence(
    call: str, sentence: str, names: dict[str, Any]
) -> None:
    with pytest.raises(FedsimError) as refused:
        eval(call, names)
    assert str(refused.value).startswith(sentence)


FACES = [
    "fedsim.adapters",
    "fedsim.audit",
    "fedsim.clients",
    "fedsim.cohorts",
    "fedsim.datasets",
    "fedsim.engines",
    "fedsim.mechanisms",
    "fedsim.models",
    "fedsim.partitions",
    "fedsim.privacy",
    "fedsim.server_optimizers",
    "fedsim.strategies",
    "fedsim.tasks",
    "fedsim.training",
]
VALUES = [
    None, -1, 0, 1.5, float("nan"), float("inf"), True, "x", "", b"x", [], [1, 2], {}, {"a": 1}, (),
    object(), int, np.zeros(3), torch.zeros(2), lambda *_: 1,
]  # fmt: skip
STARTS_PROCESSES = {"RayGrid"}
CALLED_EACH_STEP = {"call_with", "LazyArray"}
"""What trainers and grids call for each step and message, with what is theirs."""


def test_a_type_that_only_type_checkers_import_is_not_checked() -> None:
    @check_arguments
    def function(first: int, other: OnlyForTypeCheckers) -> int:  # type: ignore[name-defined]  # noqa: F821
        return first

    assert function(3, object()) == 3
    with pytest.raises(FedsimError, match="first is 'x'"):
        function("x", object())


def test_an_error_in_the_body_of_a_constructor_stays_its_own() -> None:
    def fails(self: object) -> None:
        raise TypeError("of the body")

    class Thing:
        def __init__(self) -> None:
            fails(self)

    with pytest.raises(TypeError, match="of the body"):
        explain_call(Thing)()


@pytest.mark.parametrize("face", ["fedsim", *FACES])
def test_every_public_name_says_which_argument_it_does_not_take(face: str) -> None:
    package = importlib.import_module(face)
    for name in sorted({*package.__all__} - CALLED_EACH_STEP):
        function = getattr(package, name)
        if not _is_tried(function) or "**" in str(inspect.signature(function)):
            continue
        if getattr(function, "_is_protocol", False) or function is fedsim.Callback:
            continue  # nobody makes one
        with pytest.raises(FedsimError, match="no_such_argument"):
            function(no_such_argument=1)


@pytest.mark.parametrize("face", FACES)
def test_no_argument_of_a_public_name_ends_in_an_error_of_other_code(
    face: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = importlib.import_module(face)
    others = _good_arguments()
    leaks = []
    for name in sorted({*package.__all__} - STARTS_PROCESSES - CALLED_EACH_STEP):
        function = getattr(package, name)
        if not _is_tried(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        required = {p.name for p in parameters if p.default is p.empty and p.kind in NAMED}
        for tried in (p.name for p in parameters if p.kind in NAMED):
            if not required - {tried} <= others.keys():
                continue
            given = {needed: others[needed] for needed in required - {tried}}
            for value in VALUES:
                try:
                    function(**given, **{tried: value})
                except (FedsimError, OSError):
                    pass
                except Exception as error:
                    if not callable(value):  # what a function gives is not looked at beforehand
                        leaks.append(f"{name}({tried}={value!r}): {error!r}")
    assert leaks == []


NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def _is_tried(thing: object) -> bool:
    """Whether it is a function, or a class of which there are objects and that is no error."""
    if isinstance(thing, type) and not get_args(thing):
        return not inspect.isabstract(thing) and not issubclass(thing, BaseException)
    return inspect.isfunction(thing)


def _good_arguments() -> dict[str, Any]:
    x, y = torch.randn(20, 5), torch.arange(20) % 3
    parts = [np.arange(10), np.arange(10, 20)]
    data = training.ClientData(x, y, parts)
    model, algorithm, randomness = torch.nn.Linear(5, 3), algorithms.SGD(lr=0.1), Randomness(1)
    trainer = training.Trainer(model, algorithm, data, randomness=randomness)
    return {
        "algorithm": algorithm, "alpha": 0.5, "clients": 10, "clip_norm": 1.0, "data": data,
        "cohort": cohorts.PoissonCohort(0.1, 100), "delta": 1e-5, "lr": 0.1,
        "mechanism": bounds.Clipping(1.0), "model": model, "noise_multiplier": 1.0, "num_nodes": 2,
        "parts": parts, "population": 100, "randomness": randomness, "rate": 0.1, "rounds": 3,
        "seed": 1, "size": 10, "target_epsilon": 3.0, "trainer": trainer, "trainer_or_app": trainer,
        "x": x, "y": y,
    }  # fmt: skip


def _plain(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")


def test_numbers_of_numpy_are_numbers() -> None:
    assert bounds.Clipping(np.float32(2)).clip_norm == 2
    assert cohorts.FullCohort(np.int64(3)).population == 3
    assert parts_of.IID(np.int32(2), seed=np.int64(1)).clients == 2
