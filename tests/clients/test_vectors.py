"""Algorithms that send vectors beside their updates, against plain loops of the papers' own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import joined, make_data, make_mlp
from flwr.app import ConfigRecord
from torch import Tensor, nn

from fedsim.clients import SGD, FedNova, Proximal, Scaffold, Schedule
from fedsim.clients.base import DenseGradient, RoundMeans, RunFacts, Step
from fedsim.clients.scaffold import PrivateScaffold
from fedsim.cohorts import FixedCohort, FullCohort, PoissonCohort
from fedsim.engines import LocalGrid, array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import (
    AdaClip,
    Clipping,
    NoPrivacy,
    Normalization,
    NormBound,
    PerLayer,
    QuantileClipping,
)
from fedsim.randomness import Randomness
from fedsim.strategies import ClientTraining, DPFedAvg, TrimmedMean, sgd
from fedsim.training import ClientData, ExamplePrivacy, Trainer

SIZES = [4, 7, 0, 9, 5]
POPULATION = len(SIZES)


def make_trainer(algorithm, sizes=SIZES, **settings) -> Trainer:
    model = make_mlp(dtype=torch.float64)
    settings = {"batch_size": 0, "steps": 3, "state": "client", "path": "plain"} | settings
    data = make_data(sizes, dtype=torch.float64)
    return Trainer(model, algorithm, data, randomness=Randomness(1), **settings)


def initial(trainer: Trainer):
    vector = trainer.initial()[: trainer.layout.d]
    return array_record({k: v.clone() for k, v in trainer.layout.unflatten(vector).items()})


def run(trainer: Trainer, cohort=None, rounds=4, weighting="uniform", clients=None, **settings):
    strategy = DPFedAvg(
        mechanism=NoPrivacy(weighting),
        cohort=cohort or FullCohort(trainer.population),
        seed=3,
        clients=ClientTraining(algorithm=trainer.algorithm, **(clients or {})),
        fraction_evaluate=0.0,
        **settings,
    )
    result = strategy.start(LocalGrid(trainer), initial(trainer), num_rounds=rounds)
    return trainer.layout.flatten(tensors(result.arrays)), strategy


def cohorts(cohort, rounds: int) -> list[list[int]]:
    """Who takes part, from a strategy of its own."""
    asked: list[list[int]] = []
    trainer = make_trainer(SGD(lr=0.1), state="reset")
    original = trainer.train

    def noted(vector, client_ids, round):
        asked.append(client_ids.tolist())
        return original(vector, client_ids, round)

    trainer.train = noted
    run(trainer, cohort, rounds)
    return asked


def gradient(model: nn.Module, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
    model = copy.deepcopy(model)
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    loss = F.cross_entropy(model(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def scaffold(trainer: Trainer, chosen, rounds, option, lr, steps, server_lr):
    """Algorithm 1 of Karimireddy et al. 2020, letter by letter, with full local batches."""
    x = trainer.initial()[: trainer.layout.d].clone()
    c = torch.zeros_like(x)
    c_i = [torch.zeros_like(x) for _ in range(POPULATION)]
    for t in range(rounds):
        updates, changes = [], []
        for i in chosen[t]:
            own = trainer.data.indices[i]
            y, new = x.clone(), c_i[i]
            if len(own):
                examples = trainer.data.x[own], trainer.data.y[own]
                for _ in range(steps):
                    y = y - lr * (gradient(trainer.model, y, *examples) - c_i[i] + c)
                if option == "I":
                    new = gradient(trainer.model, x, *examples)
                else:
                    new = c_i[i] - c + (x - y) / (steps * lr)
            updates.append(y - x)
            changes.append(new - c_i[i])
            c_i[i] = new
        if not updates:
            continue
        x = x + server_lr * torch.stack(updates).mean(0)
        c = c + len(updates) / POPULATION * torch.stack(changes).mean(0)
    return x, c, c_i


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("partial", [False, True])
def test_scaffold_is_algorithm_1(option: str, partial: bool) -> None:
    cohort = FixedCohort(3, POPULATION) if partial else FullCohort(POPULATION)
    # Under option I every other evaluation goes to the variate.
    control, evaluations = ("gradient", 6) if option == "I" else ("steps", 3)
    trainer = make_trainer(Scaffold(lr=0.2, control=control), steps=evaluations)
    x, strategy = run(trainer, cohort, 6, server_optimizer=sgd(lr=0.7))
    expected = scaffold(trainer, cohorts(cohort, 6), 6, option, 0.2, 3, 0.7)
    torch.testing.assert_close(x, expected[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(strategy.state()["vectors"], expected[1], rtol=0, atol=1e-10)
    kept = trainer.state()
    for row, client in enumerate(kept["client_ids"].tolist()):
        variate = trainer.packing.unpack(kept["variate"])[row]
        torch.testing.assert_close(variate, expected[2][client], rtol=0, atol=1e-10)


def test_the_servers_variate_is_the_mean_of_the_clients() -> None:
    trainer = make_trainer(Scaffold(lr=0.2), batch_size=3, steps=None, epochs=2)
    _, strategy = run(trainer, PoissonCohort(0.5, POPULATION), 8)
    mean = trainer.packing.unpack(trainer.state()["variate"]).sum(0) / POPULATION
    torch.testing.assert_close(strategy.state()["vectors"], mean, rtol=0, atol=1e-12)


def test_under_a_schedule_a_variate_is_the_mean_gradient_too() -> None:
    """With c = c_i = 0 option II is sum(rate_k g_k) / sum(rate_k): what the rates weigh."""
    algorithm = Scaffold(lr=0.2, schedule=Schedule("inverse", decay=1.0, over="step"))
    trainer = make_trainer(algorithm)
    run(trainer, rounds=1)
    y = x = trainer.initial()[: trainer.layout.d]
    examples = trainer.data.x[trainer.data.indices[0]], trainer.data.y[trainer.data.indices[0]]
    rates = [0.2, 0.1, 0.2 / 3]
    for rate in rates:
        y = y - rate * gradient(trainer.model, y, *examples)
    variate = trainer.packing.unpack(trainer.state()["variate"])[0]
    torch.testing.assert_close(variate, (x - y) / sum(rates), rtol=0, atol=1e-12)


@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_with_momentum_a_variate_is_a_weighted_mean_of_gradients(control: str) -> None:
    """A step's gradient counts as often as momentum repeats it until the round ends."""
    lr, momentum, decay, steps = 0.1, 0.8, 0.05, 3
    algorithm = Scaffold(lr=lr, momentum=momentum, weight_decay=decay, control=control)
    trainer = make_trainer(algorithm, steps=steps if control == "steps" else 2 * steps)
    reached, strategy = run(trainer, rounds=3)
    x = trainer.initial()[: trainer.layout.d].clone()
    c, c_i = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(POPULATION)]
    weights = [(1 - momentum ** (steps - k)) / (1 - momentum) for k in range(steps)]
    for _ in range(3):
        updates = []
        for i, own in enumerate(trainer.data.indices):
            y, v, past = x.clone(), torch.zeros_like(x), []
            examples = trainer.data.x[own], trainer.data.y[own]
            for _ in range(steps if len(own) else 0):
                past.append(gradient(trainer.model, y, *examples) + decay * y)
                v = momentum * v + past[-1] - c_i[i] + c
                y = y - lr * v
            updates.append(y - x)
            if past and control == "steps":
                c_i[i] = sum(w * g for w, g in zip(weights, past, strict=True)) / sum(weights)
            elif past:
                c_i[i] = gradient(trainer.model, x, *examples)
        x, c = x + torch.stack(updates).mean(0), torch.stack(c_i).mean(0)
    torch.testing.assert_close(reached, x, rtol=0, atol=1e-10)
    torch.testing.assert_close(strategy.state()["vectors"], c, rtol=0, atol=1e-10)


def quadratic_trainer(algorithm, **settings) -> Trainer:
    """Two clients with ``f_i = a_i / 2 (w - m_i)^2``, a = (1, 2), m = (0, 3)."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    x = torch.tensor([[1.0], [2.0**0.5]], dtype=torch.float64)
    data = ClientData(
        x,
        torch.tensor([[0.0], [3.0 * 2**0.5]], dtype=torch.float64),
        [np.array([0]), np.array([1])],
    )

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum(1) / 2

    settings = {"batch_size": 0, "path": "plain"} | settings
    return Trainer(
        model, algorithm, data, loss=loss, metrics={}, randomness=Randomness(1), **settings
    )


def test_scaffold_goes_as_worked_out_by_hand() -> None:
    trainer = quadratic_trainer(Scaffold(lr=0.1), steps=2, state="client")
    wanted = [(1.265, -1.325, 0.95, -3.6), (1.4685, -1.0175, 1.3155, -3.3505)]
    for rounds, (x, c, first, second) in enumerate(wanted, 1):
        fresh = quadratic_trainer(Scaffold(lr=0.1), steps=2, state="client")
        reached, strategy = run(fresh, rounds=rounds)
        variates = fresh.packing.unpack(fresh.state()["variate"]).flatten().tolist()
        assert [reached.item(), strategy.state()["vectors"].item()] == pytest.approx([x, c])
        assert variates == pytest.approx([first, second])
    assert trainer.population == 2


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_scaffold_reaches_the_optimum_that_federated_averaging_misses(momentum: float) -> None:
    """f_1 + f_2 is least at 2; FedAvg's fixed point follows from 1 - (1 - lr a_i)^K instead."""
    averaged, _ = run(quadratic_trainer(SGD(lr=0.1), steps=20), rounds=200)
    pulls = [1 - 0.9**20, 1 - 0.8**20]
    wrong = (pulls[0] * 0 + pulls[1] * 3) / sum(pulls)
    assert averaged.item() == pytest.approx(wrong, abs=1e-9)
    algorithm = Scaffold(lr=0.1, momentum=momentum)
    corrected, _ = run(quadratic_trainer(algorithm, steps=20, state="client"), rounds=200)
    assert corrected.item() == pytest.approx(2.0, abs=1e-9)
    assert abs(wrong - 2.0) > 0.25


def fednova(trainer, rounds, lr, momentum, mu, taus, weights):
    """Wang et al. 2020: each client's steps, its normaliser by the closed form, the server's."""
    x = trainer.initial()[: trainer.layout.d].clone()
    p = np.array(weights) / np.sum(weights)
    for _ in range(rounds):
        direction, reach = torch.zeros_like(x), 0.0
        for i, tau in enumerate(taus):
            own, y, v = trainer.data.indices[i], x.clone(), torch.zeros_like(x)
            if not len(own):
                continue
            for _ in range(tau):
                g = gradient(trainer.model, y, trainer.data.x[own], trainer.data.y[own])
                v = momentum * v + g + mu * (y - x)
                y = y - lr * v
            if mu:
                a = (1 - (1 - lr * mu) ** tau) / (lr * mu)
            else:
                a = (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
            direction += p[i] * (y - x) / a
            reach += p[i] * a
        x = x + reach * direction
    return x


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.8, 0.0), (0.0, 0.7)])
def test_fednova_normalises_as_its_paper_does(momentum: float, mu: float) -> None:
    algorithm = FedNova(lr=0.1, momentum=momentum)
    wrapped = Proximal(algorithm, mu) if mu else algorithm
    # One example a batch, all of them the same: so many steps as a client has examples.
    trainer = make_trainer(wrapped, batch_size=1, steps=None, epochs=1, state="reset")
    for own in trainer.data.indices:
        if len(own):
            trainer.data.x[own] = trainer.data.x[own[0]].clone()
            trainer.data.y[own] = trainer.data.y[own[0]].clone()
    reached, _ = run(trainer, rounds=4, weighting="num-examples")
    expected = fednova(trainer, 4, 0.1, momentum, mu, SIZES, SIZES)
    torch.testing.assert_close(reached, expected, rtol=0, atol=1e-10)


def test_fednova_is_fedavg_where_all_take_as_many_steps() -> None:
    schedule = Schedule("inverse", decay=0.5, over="step")
    settings = {"lr": 0.1, "momentum": 0.5, "schedule": schedule}
    sizes = [4, 7, 9]
    nova, _ = run(make_trainer(Proximal(FedNova(**settings), 0.3), sizes, state="reset"))
    plain, _ = run(make_trainer(Proximal(SGD(**settings), 0.3), sizes, state="reset"))
    torch.testing.assert_close(nova, plain, rtol=0, atol=1e-12)


def test_fednova_with_a_declared_reach_sends_its_direction_alone() -> None:
    algorithm = FedNova(lr=1.0, reach=2.5)
    assert not algorithm.sends
    theta = torch.zeros(2, 2, dtype=torch.float64)
    state = algorithm.init(theta, {"lr": torch.ones(2, dtype=torch.float64)})
    gradients = torch.tensor([[-1.0, 0.0], [0.0, -2.0]], dtype=torch.float64)
    for step in range(3):
        # The first client takes two steps, the second three.
        kept = {name: value.clone() for name, value in state.items()}
        algorithm.step(state, DenseGradient(gradients.clone()), Step(1, step))
        if step == 2:
            state = {name: torch.cat([kept[name][:1], state[name][1:]]) for name in state}
    updates = algorithm.finish(state)
    assert algorithm.send(state) == {}
    assert updates.mean(0).tolist() == [1.25, 2.5]


def test_fednova_with_the_reach_of_its_clients_is_fednova() -> None:
    sizes, work = [4, 7, 9], {"batch_size": 2, "steps": None, "epochs": 1}
    known = (2 + 4 + 5) / 3
    sent, _ = run(make_trainer(FedNova(0.1), sizes, state="reset", **work), weighting="uniform")
    declared, _ = run(
        make_trainer(FedNova(0.1, reach=known), sizes, state="reset", **work), weighting="uniform"
    )
    torch.testing.assert_close(declared, sent, rtol=0, atol=1e-10)


@pytest.mark.spanning
@pytest.mark.parametrize(
    "algorithm", [Scaffold(lr=0.2), Scaffold(0.2, control="gradient"), FedNova(0.1)]
)
@pytest.mark.parametrize("path", ["plain", "func", "layered"])
def test_vectors_do_not_depend_on_path_or_blocks(algorithm, path: str) -> None:
    settings = {"batch_size": 3, "steps": None, "epochs": 2}
    one, first = run(make_trainer(algorithm, **settings))
    for block_size in (1, 2):
        trainer = make_trainer(algorithm, path=path, block_size=block_size, **settings)
        other, second = run(trainer)
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)
        torch.testing.assert_close(
            second.state()["vectors"], first.state()["vectors"], rtol=0, atol=1e-10
        )


def test_a_run_goes_on_with_the_servers_variate() -> None:
    whole, _ = run(make_trainer(Scaffold(lr=0.2)), PoissonCohort(0.6, POPULATION), 6)
    trainer = make_trainer(Scaffold(lr=0.2))
    _, before = run(trainer, PoissonCohort(0.6, POPULATION), 3)
    resumed = DPFedAvg(
        mechanism=NoPrivacy("uniform"),
        cohort=PoissonCohort(0.6, POPULATION),
        seed=3,
        clients=ClientTraining(algorithm=trainer.algorithm),
        fraction_evaluate=0.0,
    )
    result = resumed.start(LocalGrid(trainer), before.result.arrays, 6, state=before.state())
    assert torch.equal(trainer.layout.flatten(tensors(result.arrays)), whole)


def test_what_a_private_run_cannot_protect_is_refused() -> None:
    sentence = r"client\.name names Scaffold, which sends control in addition to the update"
    with pytest.raises(FedsimError, match=sentence):
        DPFedAvg(
            mechanism=Clipping(1.0),
            noise_multiplier=1.0,
            cohort=FullCohort(5),
            clients=ClientTraining(algorithm=Scaffold()),
        )
    with pytest.raises(FedsimError, match=sentence):
        make_trainer(Scaffold(), batch_size=2, privacy=ExamplePrivacy(Clipping(1.0), 1.0))


def test_fednova_of_a_private_run_needs_a_public_number_in_place_of_what_clients_send() -> None:
    private = RunFacts(mechanism=Clipping(1.0))
    with pytest.raises(FedsimError, match=r"client\.reach is 0; in a private run it must be a pub"):
        FedNova(0.1).for_run(private)
    assert FedNova(0.1).for_run(RunFacts()).sends
    assert not FedNova(0.1, reach=3.0).for_run(private).sends


@pytest.mark.parametrize(
    "mechanism", [NoPrivacy("num-examples"), Clipping(1.0), TrimmedMean(0.1)], ids=str
)
def test_scaffold_refuses_what_weighs_or_bounds_its_control_variates(mechanism) -> None:
    """Algorithm 1 adds their plain sum over N: else c is not the mean of all c_i."""
    key = "weighting is 'num-examples'" if type(mechanism) is NoPrivacy else "mechanism.name"
    said = rf"{key}.* Scaffold \(client\.name\) needs its plain mean"
    with pytest.raises(FedsimError, match=said):
        DPFedAvg(
            mechanism=mechanism,
            noise_multiplier=0.0,
            cohort=FullCohort(5),
            clients=ClientTraining(algorithm=Scaffold()),
        )
    with pytest.raises(FedsimError, match=r"needs its plain mean"):
        DPFedAvg(
            mechanism=mechanism,
            noise_multiplier=0.0,
            cohort=FullCohort(5),
            clients=ClientTraining(algorithm=Proximal(Scaffold(), 0.1)),
        )


def test_fednova_refuses_a_bound_of_its_steps_together_with_its_direction() -> None:
    """Clipped to norm 1, five steps and a direction would both be a fifth of themselves."""

    def strategy(algorithm) -> DPFedAvg:
        clients = ClientTraining(algorithm=algorithm)
        return DPFedAvg(
            mechanism=Clipping(1.0), noise_multiplier=0.0, cohort=FullCohort(5), clients=clients
        )

    with pytest.raises(FedsimError, match=r"it must be 'none' unless .* client\.reach"):
        strategy(Proximal(FedNova(0.1), 0.1))
    strategy(FedNova(0.1, reach=2.0))


def test_scaffold_needs_clients_that_keep_their_variates_and_share_the_whole_model() -> None:
    with pytest.raises(FedsimError, match=r"client\.state is 'reset'; it must be 'client'"):
        make_trainer(Scaffold(), state="reset")
    with pytest.raises(FedsimError, match=r"model\.personal is set, but Scaffold"):
        make_trainer(Scaffold(), personal=("3.weight",))


def test_a_client_that_diverges_keeps_the_variate_that_it_had() -> None:
    """Its reply does not count either, so that the server's stays the mean of the clients'."""
    trainer = make_trainer(Scaffold(lr=0.2))
    _, strategy = run(trainer, rounds=2)
    before = trainer.state()
    own = trainer.data.indices[1]
    trainer.data.x[own] = torch.nan
    resumed = DPFedAvg(
        mechanism=NoPrivacy("uniform"),
        cohort=FullCohort(POPULATION),
        seed=3,
        clients=ClientTraining(algorithm=trainer.algorithm),
        fraction_evaluate=0.0,
    )
    resumed.start(LocalGrid(trainer), strategy.result.arrays, 3, state=strategy.state())
    assert resumed.report is not None
    assert resumed.report.reasons["non-finite"] == 1
    after, column = trainer.state(), before["client_ids"].tolist().index(1)
    assert torch.equal(after["variate"][column], before["variate"][column])
    assert not torch.equal(after["variate"][0], before["variate"][0])
    mean = trainer.packing.unpack(after["variate"]).sum(0) / POPULATION
    torch.testing.assert_close(resumed.state()["vectors"], mean, rtol=0, atol=1e-12)


# -- in private runs, where the server computes the variate from the release -----------

ROUNDS = 5


CLIPPED = Clipping(0.4)


def private(algorithm=None, mechanism=CLIPPED, steps=3, **facts):
    algorithm = algorithm or Scaffold(lr=0.2)
    return algorithm.for_run(RunFacts(mechanism=mechanism, steps=steps, **facts))


def private_run(trainer: Trainer, mechanism, cohort, rounds=ROUNDS, z=0.0, **settings):
    strategy = DPFedAvg(
        mechanism=mechanism, cohort=cohort, noise_multiplier=z, seed=3,
        clients=ClientTraining(algorithm=trainer.algorithm), fraction_evaluate=0.0, **settings,
    )  # fmt: skip
    result = strategy.start(LocalGrid(trainer), initial(trainer), num_rounds=rounds)
    return trainer.layout.flatten(tensors(result.arrays)), strategy


@pytest.mark.spanning
@pytest.mark.parametrize("mechanism", [Clipping(0.4), Normalization(0.4), NormBound(0.3)], ids=str)
@pytest.mark.parametrize("size", [3, POPULATION])
def test_private_scaffold_is_scaffold_of_bounded_updates(mechanism, size: int) -> None:
    """Algorithm 1, option II, in whose sums and variates every update is the bounded one."""
    cohort = FixedCohort(size, POPULATION)
    trainer = make_trainer(private(mechanism=mechanism))
    reached, strategy = private_run(trainer, mechanism, cohort)
    chosen = cohorts(cohort, ROUNDS)
    x = trainer.initial()[: trainer.layout.d].clone()
    c, c_i = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(POPULATION)]
    for t in range(ROUNDS):
        total, change = torch.zeros_like(x), torch.zeros_like(x)
        for i in chosen[t]:
            own, y = trainer.data.indices[i], x.clone()
            for _ in range(3 if len(own) else 0):
                g = gradient(trainer.model, y, trainer.data.x[own], trainer.data.y[own])
                y = y - 0.2 * (g - c_i[i] + c)
            bounded = mechanism.bound((y - x)[None])[0]
            new = c_i[i] - c - bounded / (3 * 0.2)
            change, c_i[i], total = change + new - c_i[i], new, total + bounded
        x, c = x + total / size, c + change / POPULATION
    torch.testing.assert_close(reached, x, rtol=0, atol=1e-8)
    torch.testing.assert_close(strategy.state()["vectors"], c, rtol=0, atol=1e-8)
    torch.testing.assert_close(c, torch.stack(c_i).mean(0), rtol=0, atol=1e-12)
    # The rows are the updates alone.
    assert strategy._layout.d == len(x)


def test_private_scaffold_goes_as_worked_out_by_hand() -> None:
    """The same three rounds, with a bound that nothing reaches."""
    for rounds, (x, c) in enumerate([(1.265, -1.325), (1.4685, -1.0175), (1.6163275, -0.7391375)]):
        algorithm = private(Scaffold(lr=0.1), Clipping(10.0), steps=2)
        trainer = quadratic_trainer(algorithm, steps=2, state="client")
        reached, strategy = private_run(trainer, Clipping(10.0), FullCohort(2), rounds + 1)
        found = [reached.item(), strategy.state()["vectors"].item()]
        assert found == pytest.approx([x, c], abs=1e-7)


def test_private_scaffold_with_momentum_and_a_schedule_knows_its_clients_variates() -> None:
    schedule = Schedule("inverse", decay=0.5, over="step")
    algorithm = private(Scaffold(lr=0.2, momentum=0.7, weight_decay=0.01, schedule=schedule))
    trainer = make_trainer(algorithm, [4, 7, 3, 9, 5])
    _, strategy = private_run(trainer, CLIPPED, FixedCohort(3, POPULATION))
    mean = trainer.packing.unpack(trainer.state()["variate"]).sum(0) / POPULATION
    torch.testing.assert_close(strategy.state()["vectors"], mean, rtol=0, atol=1e-8)
    assert float(mean.norm()) > 0


ENDED = Schedule("cosine", length=2)  # 0 from round 3 on


@pytest.mark.parametrize("algorithm", [FedNova(0.1, schedule=ENDED), Scaffold(0.1, schedule=ENDED)])
def test_where_a_schedule_has_come_to_zero_clients_send_zeros(algorithm) -> None:
    trainer = make_trainer(algorithm)
    rows, _ = joined(trainer.train(trainer.initial(), np.arange(POPULATION), 3))
    assert torch.equal(rows, torch.zeros_like(rows))


def test_where_a_schedule_has_come_to_zero_private_variates_stay() -> None:
    variates = []
    for rounds in (2, 4):
        trainer = make_trainer(private(Scaffold(0.1, schedule=ENDED)), [4, 7, 3, 9, 5])
        _, strategy = private_run(trainer, CLIPPED, FullCohort(POPULATION), rounds)
        variates.append((trainer.state()["variate"], strategy.state()["vectors"]))
    assert torch.equal(variates[0][0], variates[1][0])
    assert torch.equal(variates[0][1], variates[1][1])


def test_the_noise_in_the_servers_variate_is_stationary() -> None:
    """Std z C / (N K lr) / sqrt(1 - (1 - q)^2) in each coordinate, here of 2000 in all rounds."""
    population, q, z, clip_norm, steps, lr = 1000, 0.1, 1.5, 0.7, 2, 0.1
    algorithm = private(Scaffold(lr=lr), Clipping(clip_norm), steps)
    randomness, kept = np.random.default_rng(5), torch.zeros(2000, dtype=torch.float64)
    for number in range(1, 61):
        noise = torch.from_numpy(randomness.normal(0, z * clip_norm, len(kept)))
        mean = noise / (q * population)
        means = RoundMeans(number, mean, {}, {"control": kept}, q)
        kept = algorithm.combine(means).vectors["control"]
    wanted = z * clip_norm / (population * steps * lr) / np.sqrt(1 - (1 - q) ** 2)
    assert float(kept.std()) == pytest.approx(wanted, rel=4 / np.sqrt(2 * len(kept)))


def test_private_scaffold_costs_what_federated_averaging_costs() -> None:
    cohort = PoissonCohort(0.5, POPULATION)
    trainer = make_trainer(private())
    _, scaffold_run = private_run(trainer, Clipping(0.4), cohort, z=2.0)
    _, plain = private_run(make_trainer(SGD(0.2)), Clipping(0.4), cohort, z=2.0)
    assert scaffold_run.privacy_statement().epsilon == plain.privacy_statement().epsilon
    assert len(scaffold_run.ledger.entries) == len(plain.ledger.entries) == ROUNDS


def test_how_many_clients_replied_does_not_enter_the_servers_variate(monkeypatch) -> None:
    shares, combine = [], PrivateScaffold.combine

    def noted(self, means):
        shares.append(means.share)
        return combine(self, means)

    monkeypatch.setattr(PrivateScaffold, "combine", noted)
    for z, shown in ((1.0, {0.5}), (0.0, {k / POPULATION for k in range(POPULATION + 1)})):
        shares.clear()
        cohort = PoissonCohort(0.5, POPULATION)
        _, strategy = private_run(make_trainer(private()), Clipping(0.4), cohort, 12, z=z)
        assert strategy.private == (z > 0)
        assert len(shares) == 12
        assert {*shares} <= shown
        assert len({*shares}) == 1 or not strategy.private


def test_what_private_clients_send_as_messages_has_the_vectors_of_their_rows_alone() -> None:
    """A wrapper that goes over the replies gets messages: of the update, and no variate."""
    trainer, mechanism = make_trainer(private()), Clipping(0.4)
    reached, _ = private_run(trainer, mechanism, FullCohort(POPULATION), rounds=1, z=1.0)
    trainer = make_trainer(private())
    strategy = DPFedAvg(
        mechanism=mechanism, cohort=FullCohort(POPULATION), noise_multiplier=1.0, seed=3,
        clients=ClientTraining(algorithm=trainer.algorithm), fraction_evaluate=0.0,
    )  # fmt: skip
    grid, arrays = LocalGrid(trainer), initial(trainer)
    asked = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    replies = list(grid.send_and_receive(asked))
    assert [*replies[0].content["arrays"]] == [*arrays]
    moved, _ = strategy.aggregate_train(1, replies)
    assert strategy.report.usable == POPULATION
    torch.testing.assert_close(trainer.layout.flatten(tensors(moved)), reached, rtol=0, atol=1e-9)


def test_private_scaffold_protects_examples_by_noise_in_their_gradients_alone() -> None:
    privacy = ExamplePrivacy(Clipping(1.0), 0.5)
    algorithm = Scaffold(0.2, 0.5).for_run(RunFacts(private_examples=True, steps=3))
    sizes = [4, 7, 6, 9, 5]
    trainer = make_trainer(algorithm, sizes, batch_size=2, privacy=privacy)
    _, strategy = run(trainer, clients={"private_examples": True})
    mean = trainer.packing.unpack(trainer.state()["variate"]).mean(0)
    torch.testing.assert_close(strategy.state()["vectors"], mean, rtol=0, atol=1e-10)
    assert float(mean.norm()) > 0
    plain = make_trainer(SGD(0.2), sizes, batch_size=2, privacy=privacy, state="reset")
    run(plain, clients={"private_examples": True})
    delta = 1e-5
    assert trainer.ledger.epsilon(delta) == plain.ledger.epsilon(delta) > 0


@pytest.mark.parametrize(
    ("algorithm", "facts", "sentence"),
    [
        (Scaffold(0.2, control="gradient"), {}, r"client\.control is 'gradient'.*must be 'steps'"),
        (Scaffold(0.2), {"steps": None}, r"client\.steps must be the number of local steps"),
        (
            Scaffold(0.2),
            {"mechanism": AdaClip()},
            r"know how AdaClip \(mechanism\.name\) bounds it",
        ),
        (Scaffold(0.2), {"mechanism": QuantileClipping()}, r"clients do not know how .* bounds it"),
        (Scaffold(0.2), {"mechanism": PerLayer(Clipping())}, r"Scaffold .client.name. needs"),
    ],
)
def test_where_the_variate_does_not_follow_from_the_release_it_is_refused(
    algorithm, facts, sentence
) -> None:
    with pytest.raises(FedsimError, match=sentence):
        private(algorithm, **facts)
