"""The privatised step over a whole block, beside one sum at a time."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_cnn, make_data, make_mlp
from cuda_helpers import NoReadingBack, Tape, as_if_on_a_gpu, pretend, rounds
from release_helpers import one_round, plan_of
from slow_cases import slow_but
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.ordinary_networks import TASKS
from fedsim.clients import SGD, AdadpLR
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    CoordinateClipping,
    Mechanism,
    NoiseSource,
    Normalization,
    PerLayer,
    QuantileClipping,
    Release,
    Releaser,
    SimpleMechanism,
)
from fedsim.mechanisms.base import BoundedRows
from fedsim.privacy import Independent
from fedsim.randomness import Randomness
from fedsim.rows import DenseRows, Layout, LinearPart, OuterRows
from fedsim.training import ClientData, ExamplePrivacy, Trainer, local_rounds, private_steps
from fedsim.training.client_state import CarriedState
from fedsim.training.graphs import StepGraphs
from fedsim.training.own_state import OwnState
from fedsim.training.paths import factored
from fedsim.training.paths.examples import VmapMethod
from fedsim.training.paths.factored import HookMethod, product_layers
from fedsim.training.private_steps import PrivateStepper
from fedsim.training.probe import Probe


@dataclasses.dataclass(frozen=True)
class Largest(SimpleMechanism):
    """Somebody's own bound, which knows no factors: the largest entry becomes C / sqrt(d)."""

    clip_norm: float

    def radius(self, round_state, d):
        return self.clip_norm

    def bound_(self, y, round_state):
        most = y.abs().amax(-1)
        factor = self.clip_norm / y.shape[-1] ** 0.5 / most * (1 - 2.0**-40)
        factor = factor.clamp(max=1.0).masked_fill(~most.isfinite(), torch.nan)
        return BoundedRows(factor, factor < 1, {})


# A client without data, one that leaves a step's second chunk empty, and several sizes.
SIZES = [20, 7, 0, 33, 12, 3, 25]
IDS = np.arange(len(SIZES))
CPU = torch.device("cpu")
MECHANISMS: dict[str, Mechanism] = {
    "clipping": Clipping(0.5),
    "normalization": Normalization(0.5, smoothing=0.01),
    "coordinates": CoordinateClipping(0.1),
    "quantile": QuantileClipping(initial_clip_norm=0.3, bit_noise=1.0),
    "adaclip": AdaClip(clip_norm=0.5),
    "literal adaclip": AdaClip(h2=1e-2, literal=True),
    "first phase": AdaptiveNoise(clip_norm=0.5, threshold=1e9, beta=3.0),
    "second phase": AdaptiveNoise(clip_norm=0.5, threshold=0.0, beta=3.0),
    "both phases": AdaptiveNoise(
        clip_norm=0.5, threshold=4e-4, beta=3.0, noise_shape="optimal", switch="root"
    ),
    "own": Largest(0.5),
    "layers": PerLayer(Clipping(0.4)),
    "mixed layers": PerLayer(
        (("1.*", QuantileClipping(bit_noise=2.0)), ("*", AdaClip(0.5))), shares=(0.25, 0.75)
    ),
}
EVERY = pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS.keys())


def trainer_of(mechanism, z=0.7, *, model=None, data=None, **settings):
    settings = {"batch_size": 6, "steps": 3, "randomness": Randomness(5, "ab")} | settings
    return Trainer(
        model or make_mlp(37, 19),
        settings.pop("algorithm", SGD(lr=0.3)),
        data or make_data(SIZES, features=37),
        privacy=ExamplePrivacy(mechanism, z, chunk=settings.pop("chunk", 4)),
        **settings,
    )


def updates(trainer, rounds=1):
    of_rounds = (joined(trainer.train(trainer.initial(), IDS, t + 1)) for t in range(rounds))
    return torch.cat([rows for rows, _ in of_rounds])


@pytest.mark.spanning
@EVERY
@pytest.mark.parametrize("z", [0.0, 0.7])
@pytest.mark.parametrize("chunk", [4, 16])
def test_a_private_client_has_the_same_bytes_alone_and_in_a_block(mechanism, z, chunk):
    found = [
        updates(
            trainer_of(
                mechanism,
                z,
                block_size=size,
                chunk=chunk,
                state="client",
                algorithm=AdadpLR(lr=0.2, tol=1.0, discard=False),
            ),
            rounds=2,
        )
        for size in (1, 3, 7)
    ]
    assert torch.isfinite(found[0]).all()
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@pytest.mark.spanning
@pytest.mark.parametrize("features", [1, 5, 64, 100])
@pytest.mark.parametrize("hidden", [1, 8, 31])
def test_bytes_do_not_depend_on_the_block_for_layers_of_any_width(features, hidden):
    model, data = make_mlp(features, hidden), make_data(SIZES, features=features)
    for mechanism in (Clipping(0.5), AdaClip(0.5)):
        one, two = (
            updates(trainer_of(mechanism, model=model, data=data, block_size=size))
            for size in (1, 7)
        )
        assert torch.equal(one, two)


class OneByOne(Releaser):
    """Every owner's sum made and released alone, in the exact way of a server."""

    def with_numbers(self, numbers):
        other = super().with_numbers(numbers)
        plans = [plan_of(self.mechanism, self.noise, r) for r in numbers["denominator"].tolist()]
        other.alone = [Releaser(plan, self.layout) for plan in plans]
        return other

    def start(self, state, active=None):
        own = [{name: tensor[k] for name, tensor in state.items()} for k in range(active)]
        return Sums([one.start(its) for one, its in zip(self.alone, own, strict=True)])

    def release(self, total, noise):
        sources = [Drawn(None, left=draws) for draws in noise.draws.numpy()]
        made = [
            one.release(partial, source)
            for one, partial, source in zip(self.alone, total.sums, sources, strict=True)
        ]
        RELEASED.append(len(made))
        state = {name: torch.stack([one.state[name] for one in made]) for name in made[0].state}
        return Release(torch.stack([one.mean for one in made]), state)


RELEASED = []


@dataclasses.dataclass(frozen=True)
class Drawn(NoiseSource):
    """Draws that have been made."""

    left: np.ndarray = dataclasses.field(kw_only=True)

    def normal(self, size):
        drawn, left = self.left[:size].copy(), self.left[size:]
        object.__setattr__(self, "left", left)
        return drawn


@dataclasses.dataclass
class Sums:
    sums: list

    def add_owners(self, rows, weights, counts, owners=slice(None)):
        for k, owner in enumerate(torch.arange(len(self.sums))[owners].tolist()):
            self.sums[owner].add(rows[k, slice(counts[k])], weights=weights[k, : counts[k]])


@pytest.mark.spanning
@EVERY
@pytest.mark.parametrize("make", [make_mlp, make_cnn])
def test_a_block_releases_what_one_sum_at_a_time_does(monkeypatch, mechanism, make):
    exact = {"dtype": torch.float64}
    data = make_data(SIZES, features=36, shape=None if make is make_mlp else (1, 6, 6), **exact)
    model = make_mlp(36, **exact) if make is make_mlp else make_cnn(**exact)
    if make is make_cnn and mechanism is MECHANISMS["mixed layers"]:
        mechanism = PerLayer((("0.*", QuantileClipping(bit_noise=2.0)), ("*", AdaClip(0.5))))
    settings = {"model": model, "data": data, "state": "client"}
    together = updates(trainer_of(mechanism, **settings), rounds=2)
    monkeypatch.setattr(local_rounds, "Releaser", OneByOne)
    RELEASED.clear()
    apart = updates(trainer_of(mechanism, **settings), rounds=2)
    assert sum(RELEASED) > 2 * 3 * (len(SIZES) - 2)
    # Apart, implicit sums are rounded to their grid of 2^-30 once for every chunk.
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-7)


class Block:
    """Round after round of n owners."""

    def __init__(self, mechanism, layout, n, z, state=None, denominator=4.0):
        if state is None:
            state = {k: v.expand(n, *v.shape) for k, v in mechanism.init(layout).items()}
        self.state, self.n = state, n
        self.releaser = Releaser(
            [plan_of(mechanism, Independent(z), denominator)] * n, layout, exact=False
        )

    def begin(self):
        self.total = self.releaser.start(self.state, self.n)

    def add(self, *given):
        self.total.add_owners(*given)

    def release(self, sources):
        release = self.releaser.release(self.total, *sources)
        self.state = release.state
        return release.mean


def start(mechanism: Mechanism, layout: Layout, n: int, z: float) -> Block:
    return Block(mechanism, layout, n, z)


def sources(n: int) -> list[NoiseSource]:
    return [NoiseSource(np.random.default_rng([3, k])) for k in range(n)]


def layout_of(dtype=torch.float32) -> Layout:
    return Layout.of({"1.weight": torch.empty(3, 5, dtype=dtype), "1.bias": torch.empty(3)})


def both_kinds(x, delta):
    """The same rows as factors and written out."""
    outer = OuterRows((LinearPart(x, delta),))
    return outer, DenseRows(outer.dense())


@EVERY
def test_padding_and_examples_that_are_not_finite_contribute_exactly_nothing(mechanism):
    if mechanism is MECHANISMS["mixed layers"]:
        mechanism = PerLayer((("*", QuantileClipping(bit_noise=2.0)),))
    generator = torch.Generator().manual_seed(2)
    x, delta = (torch.randn(3, 6, size, generator=generator) for size in (5, 3))
    x[:, 4:] = torch.tensor([torch.nan, 1e30])[:, None]  # padding
    x[1, 0, 2], delta[2, 3, 1] = torch.inf, torch.nan
    counts, weights = [4, 4, 4], torch.zeros(3, 6, dtype=torch.float64)
    weights[:, :4] = 1
    good = [[0, 1, 2, 3], [1, 2, 3], [0, 1, 2]]
    for kind in range(2):
        block = start(mechanism, layout_of(), 3, 0.8)
        for _ in range(2):  # rounds
            block.begin()
            block.add(both_kinds(x, delta)[kind], weights, counts)
            means = block.release(sources(3)).clone()
        for k, rows in enumerate(good):
            alone = start(mechanism, layout_of(), 1, 0.8)
            for _ in range(2):
                alone.begin()
                own = both_kinds(x[k : k + 1, rows], delta[k : k + 1, rows])[kind]
                ones = torch.ones(1, len(rows), dtype=torch.float64)
                alone.add(own, ones, [len(rows)])
                mean = alone.release(sources(3)[k : k + 1])
            assert torch.isfinite(mean).all()
            assert torch.equal(means[k], mean[0])


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e8, 1e30])
@pytest.mark.parametrize("noisy", [False, True])
def test_no_example_moves_a_sum_by_more_than_c(size, noisy):
    class Silent(np.random.Generator):
        def standard_normal(self, size=None):
            return np.zeros(size)

    silence = [NoiseSource(Silent(np.random.PCG64(0)))] * 50
    generator = torch.Generator().manual_seed(9)
    x, delta = (torch.randn(50, 1, width, generator=generator) for width in (5, 3))
    for mechanism in (Clipping(0.7), Normalization(0.7), QuantileClipping(0.5, 0.2, 0.7, 1.0)):
        for rows in both_kinds(x * size, delta):
            block = start(mechanism, layout_of(), 50, 0.5 if noisy else 0.0)
            block.begin()
            block.add(rows, torch.ones(50, 1, dtype=torch.float64), [1] * 50)
            sums = block.release(silence) * 4.0
            norms = torch.linalg.vector_norm(sums, dim=1)
            assert (norms <= 0.7).all()
            if size >= 1e8:
                assert (norms >= 0.7 * (1 - 1e-5)).all()


def test_clients_of_one_block_may_be_in_either_phase():
    mechanism = AdaptiveNoise(clip_norm=0.5, threshold=0.01, beta=3.0)
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(4, 6, 18, generator=generator, dtype=torch.float64)
    spread = torch.linspace(0, 1, 18, dtype=torch.float64) ** 2
    state = {"mean_square": spread * torch.tensor([[0.0], [1.0], [1e-6], [4.0]])}
    ones, made = torch.ones(4, 6, dtype=torch.float64), []
    layout = Layout.of({"w": torch.empty(18, dtype=torch.float64)})
    for own in ([0, 1, 2, 3], [0], [1], [2], [3]):
        theirs = {"mean_square": state["mean_square"][own]}
        block = Block(mechanism, layout, len(own), 1.0, theirs, 6.0)
        block.begin()
        block.add(DenseRows(rows[own]), ones[own], [6] * len(own))
        made.append((block.release([sources(4)[k] for k in own]), block.state["mean_square"]))
    assert mechanism.round_state(state)["adaptive"].flatten().tolist() == [False, True, False, True]
    for together, apart in zip(made[0], zip(*made[1:], strict=True), strict=True):
        assert torch.equal(together, torch.cat(apart))


@pytest.mark.spanning
@pytest.mark.parametrize("make", [make_mlp, make_cnn])
@EVERY
def test_a_private_step_for_a_gpu_is_that_of_a_cpu_and_reads_nothing_back(
    monkeypatch, mechanism, make
):
    exact = {"dtype": torch.float64}
    shape = None if make is make_mlp else (1, 6, 6)
    if make is make_cnn and mechanism is MECHANISMS["mixed layers"]:
        mechanism = PerLayer((("0.*", QuantileClipping(bit_noise=2.0)), ("*", AdaClip(0.5))))
    model = make_mlp(36, **exact) if make is make_mlp else make_cnn(**exact)
    data = make_data(SIZES, features=36, shape=shape, **exact)
    expected = updates(trainer_of(mechanism, model=model, data=data))
    trainer = trainer_of(mechanism, model=model, data=data)
    vector = pretend(trainer.initial())
    trainer = as_if_on_a_gpu(monkeypatch, trainer)
    trainer.rounds.releases = None
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **kind: pretend(zeros(*size, **kind)))
    step = PrivateStepper.step_eagerly

    def watched(*given):
        with NoReadingBack():
            return step(*given)

    monkeypatch.setattr(PrivateStepper, "step_eagerly", watched)
    found, _ = joined(trainer.train(vector, IDS, 1))
    assert found.is_cuda
    # On a GPU rows that are centred are written out, and need no margin for what might cancel.
    atol = 1e-6 if "center=True" in repr(mechanism) else 1e-9
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=atol)


def fakes_a_gpu() -> bool:
    """Whether this release of torch makes tensors of a GPU without data, and without a driver."""
    try:
        with FakeTensorMode():
            return torch.empty(1, device="cuda").to("cuda").is_cuda
    except RuntimeError:
        return False


class NoHost(TorchDispatchMode):
    """Refuses operations on tensors of the host: a graph would repeat the values it has seen."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
        assert {one.device.type for one in tensors} <= {"cuda"}, func
        return out


@pytest.mark.skipif(not fakes_a_gpu(), reason="this release of torch needs a driver")
@pytest.mark.parametrize("entropy", ["config", "system"])
@pytest.mark.parametrize(
    "name", slow_but(("clipping", "layers", "mixed layers", "second phase"), MECHANISMS)
)
def test_no_private_step_mixes_the_gpu_with_the_host(monkeypatch, name, entropy):
    """On tensors without data, which know their device and refuse to be read."""
    mechanism = MECHANISMS[name]
    monkeypatch.setattr("fedsim.training.graphs.CudaRecorder", lambda device: None)
    on_host = []

    def zeros(noise, sizes, device):
        on_host.append(sizes)
        return torch.zeros(len(noise), sum(sizes), dtype=torch.float64, device=device)

    monkeypatch.setattr(private_steps, "normals", zeros)
    step = PrivateStepper.step_eagerly

    def watched(*given):
        with NoHost():
            return step(*given)

    monkeypatch.setattr(PrivateStepper, "step_eagerly", watched)
    own = make_data(SIZES).indices
    with FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
            clients = ClientData(torch.empty(100, 6), torch.zeros(100, dtype=torch.int64), own)
        monkeypatch.setattr(model, "to", lambda device: model)
        # What is not there cannot be compared.
        monkeypatch.setattr(Probe, "fastest", lambda probe, ways: ways[0])
        source = Randomness(0 if entropy == "config" else None)
        trainer = trainer_of(mechanism, model=model, data=clients, device="cuda", randomness=source)
        trainer.stepper.captured_step = None
        start = trainer.packing.pack(trainer.initial().unsqueeze(0))
        for _, clients in trainer.rounds.blocks(IDS, 1, [source] * len(IDS), len(IDS)):
            n = len(clients)
            if not any(len(own[client]) for client in clients.client_ids):
                continue
            steps = trainer.rounds._loop(clients)
            ended = steps.run(
                start.expand(n, -1).clone(),
                {k: start.new_full((n,), v) for k, v in trainer.algorithm.numbers().items()},
                CarriedState(np.ones(n, dtype=np.bool_), {}),
            )
            assert ended.theta.device.type == "cuda"
    assert bool(on_host) == (entropy == "system")


def by_hooks(trained, hidden):
    structure = trained.reading.structure
    layers = product_layers(structure, trained.packing)
    return HookMethod(structure.module, trained.packing, trained.reading.loss, layers)


def by_vmap(trained, hidden):
    state = OwnState(trained.model, trained.loss, trained.packing.slices)
    return VmapMethod(trained.model, trained.packing, trained.loss, state)


METHODS = {
    "layered": (make_mlp, lambda trained, hidden: hidden),
    "hooks": (make_cnn, by_hooks),
    "vmap": (make_cnn, by_vmap),
}
# Blocks that grow and shrink and come back, of clients that end at different times.
COHORTS = [[0, 1, 4], range(7), range(4)]


def on_a_gpu(monkeypatch, mechanism, make, method, *, in_step, recorder, **settings):
    """Rows of some rounds of steps made as on a GPU; None as a recorder: eagerly."""
    exact = {"dtype": torch.float64}
    shape = None if make is make_mlp else (1, 6, 6)
    model = make_mlp(36, **exact) if make is make_mlp else make_cnn(**exact)
    data = make_data(SIZES, features=36, shape=shape, **exact)
    trainer = trainer_of(mechanism, model=model, data=data, state="client", **settings)
    private = trainer.rounds.private
    private = dataclasses.replace(
        private, method=method(trainer.trained, private.method), draws_in_step=in_step
    )
    trainer.rounds.private = private
    vector = pretend(trainer.initial())
    with monkeypatch.context() as patch:
        trainer = as_if_on_a_gpu(patch, trainer)
        trainer.rounds.releases = None
        zeros, part = torch.zeros, factored._part
        patch.setattr(torch, "zeros", lambda *size, **kind: pretend(zeros(*size, **kind)))
        # A transform of torch's gives back plain tensors, whose terms may cancel unseen.
        patch.setattr(factored, "_part", lambda m, x, d: part(m, pretend(x), pretend(d)))
        if recorder is not None:
            trainer.stepper.captured_step = StepGraphs(private, recorder, 4)
        found = rounds(trainer, vector, COHORTS)
    return found, trainer


@pytest.mark.spanning
@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("way", METHODS)
@EVERY
def test_captured_private_steps_are_the_eager_ones_to_the_byte(
    monkeypatch, mechanism, way, in_step
):
    make, method = METHODS[way]
    if make is make_cnn and mechanism is MECHANISMS["mixed layers"]:
        mechanism = PerLayer((("0.*", QuantileClipping(bit_noise=2.0)), ("*", AdaClip(0.5))))
    algorithm, tape = AdadpLR(lr=0.2, tol=1.0, discard=False), Tape()
    how = {"in_step": in_step, "algorithm": algorithm, "steps": None, "epochs": 1}
    eager, _ = on_a_gpu(monkeypatch, mechanism, make, method, recorder=None, **how)
    replayed, trainer = on_a_gpu(monkeypatch, mechanism, make, method, recorder=tape, **how)
    assert all(torch.isfinite(rows).all() for rows in eager)
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    graphs = trainer.stepper.captured_step
    assert graphs.can_capture
    assert tape.recordings >= len(graphs.graphs) > 0


@pytest.mark.parametrize("way", METHODS)
def test_steps_of_a_whole_block_are_those_of_one_client_after_another(monkeypatch, way):
    """Beside the CPU's way: rows of each client alone, without padding, from the same noise."""
    make, method = METHODS[way]
    found = []
    for whole in (True, False):
        with monkeypatch.context() as patch:
            if not whole:
                patch.setattr(PrivateStepper, "step_eagerly", one_by_one)
            how = {"in_step": True, "recorder": None, "steps": 3}
            found.append(on_a_gpu(patch, AdaClip(0.5), make, method, **how)[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [VmapMethod, HookMethod])
def test_a_chunks_rows_are_gone_before_the_next_ones_are_made(monkeypatch, kind):
    make, method = METHODS["vmap" if kind is VmapMethod else "hooks"]
    made, of_client = [], kind.of_client

    def watched(own, *given):
        assert not any(rows() for rows in made)
        rows, losses = of_client(own, *given)
        made.append(weakref.ref(rows))
        return rows, losses

    monkeypatch.setattr(kind, "of_client", watched)
    data = make_data(SIZES, features=36, shape=(1, 6, 6))
    trainer = trainer_of(Clipping(0.5), model=make(), data=data)
    private = trainer.rounds.private
    trainer.rounds.private = dataclasses.replace(
        private, method=method(trainer.trained, private.method)
    )
    updates(trainer)
    assert len(made) > 20


@pytest.mark.parametrize("name", ["residual", "attention", "u-net", "wide-and-deep", "lora"])
def test_users_models_that_were_read_give_rows_of_a_whole_block(name):
    (task,) = (task for task in TASKS if task.name == name)
    torch.manual_seed(0)
    x, y = task.examples(6, torch.Generator().manual_seed(1))
    data = ClientData(x, y, [np.arange(3), np.arange(3, 6)])
    model = task.model()
    trainer = trainer_of(
        Clipping(1.0), model=model, data=data, batch_size=3, steps=1, loss=task.loss, metrics={}
    )
    trained, structure = trainer.trained, trainer.trained.reading.structure
    method = VmapMethod(structure.module, trained.packing, trained.reading.loss, None)
    assert method.takes_blocks
    theta = trainer.packing.pack(trainer.initial()[None]).expand(2, -1).clone()
    theta += 0.01 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(2))
    inputs = data.inputs(torch.arange(6).view(2, 3), torch.float32)
    targets = data.targets(torch.arange(6).view(2, 3), torch.float32)
    rows, losses = method.block_rows(theta, inputs, targets)
    for k in range(2):
        own, own_losses = trainer.rounds.private.method.of_client(theta[k], inputs[k], targets[k])
        torch.testing.assert_close(rows.dense()[k], own.dense()[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(losses[k], own_losses, rtol=1e-4, atol=1e-5)


step_of_a_block = PrivateStepper.step_eagerly


def one_by_one(private, state, index, usable, at, counts=None, seeds=None):
    drawn, own = usable.sum(2), []
    for row in (slice(k, k + 1) for k in range(len(index))):
        mine = {name: entry[row].as_subclass(torch.Tensor) for name, entry in state.items()}
        chunks = int((drawn[row] > 0).sum())
        inputs = (one[row, :chunks].as_subclass(torch.Tensor) for one in (index, usable))
        step_of_a_block(private, mine, *inputs, at, drawn[row, :chunks].T.tolist())
        own.append(mine)
    state.clear()
    state |= {name: pretend(torch.cat([mine[name] for mine in own])) for name in own[0]}
    return torch.zeros(len(index), index[0].numel())


def test_noise_drawn_in_the_step_is_a_clients_own_and_fresh_in_every_step(monkeypatch):
    draws = []
    real = private_steps.normals_at

    def watched(key, counter, size, *, hardened):
        drawn = real(key, counter, size, hardened=hardened)
        draws.extend(tuple(row) for row in torch.cat([key, counter], 1).tolist())
        return drawn

    monkeypatch.setattr(private_steps, "normals_at", watched)
    used = []
    monkeypatch.setattr(Randomness, "address_observer", used.append)
    make, method = METHODS["layered"]
    how = {"in_step": True, "recorder": None, "steps": 3}
    on_a_gpu(monkeypatch, Clipping(0.5), make, method, **how)
    noise = [one for one in used if one.purpose.name == "STEP_NOISE"]
    clients = sum(len([k for k in cohort if SIZES[k]]) for cohort in COHORTS)
    assert len({*draws}) == len(draws) == len({*noise}) == len(noise) == 3 * clients
    steps = {(words[2] & 2**48 - 1, words[3], words[4]) for words in draws}
    assert steps == {(one.part, one.round, one.client) for one in noise}


def test_the_padding_of_a_step_is_an_example_of_the_clients_own():
    trainer = trainer_of(Clipping(0.5), steps=9)
    for _, clients in trainer.rounds.blocks(IDS, 1, [Randomness(0)] * len(IDS), len(IDS)):
        if len(trainer.data.indices[clients.client_ids[0]]):
            index = trainer.rounds._loop(clients).batches.index
            for client, own in zip(clients.client_ids, index, strict=True):
                assert {*own.flatten().tolist()} <= {*trainer.data.indices[client].tolist()}


def test_noise_for_a_block_is_what_each_client_draws_alone():
    mechanism = PerLayer((("1.weight", Clipping(1.0)), ("*", Clipping(1e-9))))
    layout = Layout.of({"1.weight": torch.empty(3, 5), "1.bias": torch.empty(3)})
    block = start(mechanism, layout, 3, 2.0)
    block.begin()
    means = block.release([dataclasses.replace(own, hardened=True) for own in sources(3)])
    for k, source in enumerate(sources(3)):
        alone = one_round(
            mechanism,
            {},
            torch.empty(0, 18),
            2.0,
            4.0,
            dataclasses.replace(source, hardened=True),
            layout=layout,
        )
        assert torch.equal(means[k], alone.mean)
