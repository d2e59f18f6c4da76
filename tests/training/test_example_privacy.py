"""Example-level privacy in the client."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients_helpers import as_trained, joined, make_cnn, make_data, make_mlp, reading_of
from torch import nn

from fedsim.clients import SGD, AdadpLR, AdadpNoise, RMSProp
from fedsim.cohorts import PoissonCohort
from fedsim.errors import FedsimError
from fedsim.mechanisms import AdaClip, AdaptiveNoise, Clipping, Normalization, QuantileClipping
from fedsim.privacy import Ledger, epsilon
from fedsim.privacy.local_work import LocalWork
from fedsim.privacy.noise import Independent
from fedsim.randomness import Randomness
from fedsim.rows import DenseRows, Layout
from fedsim.rows.packing import Packing
from fedsim.tasks import CrossEntropy
from fedsim.training import ClientData, ExamplePrivacy, Trainer, example_epsilon, example_events
from fedsim.training.batches import chunk_width, plan_poisson
from fedsim.training.paths.factored import PositionsPart
from fedsim.training.paths.program import lowered
from fedsim.training.private_steps import max_chunk
from fedsim.training.probe import gradient_methods

SIZES = [20, 7, 0, 33, 12]
IDS = np.arange(len(SIZES))
# One release, whatever the noise: trainers with it and without draw the same batches.
RANDOMNESS = Randomness(3, "ab")
Z64 = {"dtype": torch.float64}


def private_trainer(algorithm, mechanism=None, z=1.0, *, model=None, data=None, **kw):
    given = {k: kw.pop(k) for k in ("sampling", "chunk", "hardened") if k in kw}
    ledger = kw.pop("ledger", None)
    privacy = None if mechanism is None else ExamplePrivacy(mechanism, z, **given)
    kw = {"batch_size": 5, "steps": 4, "randomness": RANDOMNESS} | kw
    trainer = Trainer(
        model or make_mlp(**Z64),
        algorithm,
        data or make_data(SIZES, **Z64),
        privacy=privacy,
        **kw,
    )
    if ledger is not None:
        trainer.record_in(Ledger(ledger, delta=1e-5))
    return trainer


def final(trainer, ids=IDS, round=1):
    return trainer.fit(trainer.initial(), ids, round)


def rows_by_autograd(model, x, y):
    rows = []
    for k in range(len(x)):
        grads = torch.autograd.grad(
            F.cross_entropy(model(x[k : k + 1]), y[k : k + 1]), list(model.parameters())
        )
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows)


class Sequence2(nn.Module):
    """A linear layer over positions, a convolution with stride and padding, and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.conv = nn.Conv2d(1, 3, 3, stride=2, padding=1, bias=False)
        self.head = nn.Linear(18, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x.squeeze(1))).unsqueeze(1)
        return self.head(torch.relu(self.conv(h)).flatten(1))


class Normed(nn.Module):
    """A model whose gradients have no factors: GroupNorm has parameters of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (make_mlp(**Z64), (6,)),
        (make_mlp(bias=False, **Z64), (6,)),
        (make_cnn(**Z64), (1, 6, 6)),
        (Sequence2().double(), (1, 6, 6)),
        (Normed().double(), (6,)),
    ],
    ids=["mlp", "mlp without biases", "cnn", "positions", "generic"],
)
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("way", [0, -2, -1])
def test_rows_of_examples_are_their_gradients(model, shape, shaped, way):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 7, *shape, generator=generator, **Z64)
    y = torch.randint(3, (2, 7), generator=generator)
    packing = Packing(Layout.of(dict(model.named_parameters())))
    reading = reading_of(model, shape)
    program = lowered(reading, packing)
    rows = gradient_methods(as_trained(model, packing, reading, program))[way].rows
    theta = packing.layout.flatten(dict(model.named_parameters())).expand(2, -1)
    found = list(rows(packing.pack(theta), x, y, [7, 4], None))
    for k, count in enumerate((7, 4)):
        examples = found[k] if len(found) > 1 else found[0]
        at = 0 if len(found) > 1 else k
        own, losses = examples.rows[at : at + 1, :count], examples.losses[at, :count]
        dense = rows_by_autograd(model, x[k, :count], y[k, :count])
        torch.testing.assert_close(own.dense()[0], dense, rtol=0, atol=1e-12)
        scale = center = None
        if shaped:
            scale = torch.rand(dense.shape[1], generator=generator, **Z64) + 0.5
            center = torch.randn(dense.shape[1], generator=generator, **Z64) * 0.01
        expected = DenseRows(dense)
        torch.testing.assert_close(
            own.norms(*(None if v is None else v[None] for v in (scale, center)))[0],
            expected.norms(scale, center),
            rtol=1e-9,
            atol=1e-12,
        )
        weights = torch.rand(count, generator=generator, **Z64)
        torch.testing.assert_close(own.sum(weights[None])[0], expected.sum(weights))
        loss = F.cross_entropy(model(x[k, :count]), y[k, :count], reduction="none")
        torch.testing.assert_close(losses, loss.detach())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("n", "positions", "inputs", "outputs"), [(3, 1, 5, 2), (2, 9, 2, 3), (4, 2, 6, 5)]
)
def test_norms_and_sums_over_positions_agree_whichever_is_written_down(
    n, positions, inputs, outputs, bias
):
    generator = torch.Generator().manual_seed(n + 7 * positions)
    part = PositionsPart(
        torch.randn(2, n, positions, inputs, generator=generator, **Z64),
        torch.randn(2, n, positions, outputs, generator=generator, **Z64),
        bias,
    )
    assert part.is_formed == (positions == 9)
    expected, weights = part.dense(), torch.rand(2, n, generator=generator, **Z64)
    weights[:, 0] = 0
    assert expected.shape == (2, n, part.size)
    torch.testing.assert_close(part.squares(None, None).values, expected.square().sum(2))
    sums = torch.cat(part.sums(weights), dim=1)
    torch.testing.assert_close(sums, (weights[:, :, None] * expected).sum(1))


def opacus_step(model, x, y, *, lr, clip_norm, expected, noise):
    """One step of Opacus's optimiser on this batch, with this noise added to its sum."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=lr),
            noise_multiplier=0.0,
            max_grad_norm=clip_norm,
            expected_batch_size=expected,
        )
        F.cross_entropy(wrapped(x), y).backward()
    optimizer.pre_step()
    start = 0
    for parameter in wrapped.parameters():
        stop = start + parameter.numel()
        parameter.grad += noise[start:stop].view_as(parameter).to(parameter) / expected
        start = stop
    optimizer.original_optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in wrapped.parameters()])


@pytest.mark.parametrize("make", [make_mlp, make_cnn])
def test_one_step_of_dp_sgd_is_opacus_step_on_the_same_batch_and_noise(make):
    shape = None if make is make_mlp else (1, 6, 6)
    data = make_data([40], features=6 if shape is None else 36, shape=shape)
    trainer = private_trainer(
        SGD(lr=0.5), Clipping(0.3), 0.8, model=make(), data=data,
        batch_size=16, steps=1,
    )  # fmt: skip
    start = trainer.initial()
    ours = final(trainer, IDS[:1]).theta[0]
    batch = plan_poisson(trainer.workload.work, data.indices, IDS[:1], [RANDOMNESS], 1, 32)
    at = torch.from_numpy(batch.index[batch.weight > 0])
    # The noise is what a step without data moves by.
    quiet = private_trainer(
        SGD(lr=0.5), Clipping(0.3), 1e-9, model=make(), data=data,
        batch_size=16, steps=1,
    )  # fmt: skip
    clean = final(quiet, IDS[:1]).theta[0]
    noise = (clean - ours) / 0.5 * 16
    assert noise.std().item() == pytest.approx(0.8 * 0.3, rel=0.35)
    theirs = opacus_step(
        make(), data.x[at], data.y[at], lr=0.5, clip_norm=0.3, expected=16, noise=noise
    )
    assert (start - theirs).abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_noise_on_the_sum_has_standard_deviation_z_times_c():
    trainer = private_trainer(SGD(lr=1.0), Clipping(0.5), 2.0, steps=1)
    quiet = private_trainer(SGD(lr=1.0), Clipping(0.5), 1e-9, steps=1)
    draws = []
    for t in range(60):
        noisy, clean = final(trainer, IDS[:1], t).theta, final(quiet, IDS[:1], t).theta
        draws.append((noisy - clean)[0] * 5)
    values = torch.stack(draws).flatten()
    # A chi-square with 60 * 53 degrees of freedom: five standard deviations are 6.3 %.
    assert values.std().item() == pytest.approx(1.0, rel=0.063)


def test_poisson_batches_are_whole_and_binomial():
    indices = [np.arange(50, dtype=np.int64)]
    sizes = []
    for t in range(300):
        batch = plan_poisson(LocalWork(10, None, 2), indices, IDS[:1], [Randomness(0)], t, 4)
        counts = (batch.weight > 0).sum((2, 3))
        sizes += counts[0].tolist()
        for step in range(2):
            drawn = batch.index[0, step][batch.weight[0, step] > 0]
            assert len(set(drawn)) == len(drawn) == counts[0, step]
    assert max(sizes) > 12  # more than three chunks of four
    # Binomial(50, 0.2): mean 10, variance 8, 600 draws.
    assert np.mean(sizes) == pytest.approx(10, abs=5 * np.sqrt(8 / 600))
    assert np.var(sizes) == pytest.approx(8, rel=0.3)


def test_the_size_of_chunks_changes_nothing_but_rounding():
    data = make_data([40], **Z64)
    thetas = [
        final(
            private_trainer(SGD(lr=0.5), Clipping(0.2), chunk=chunk, data=data, batch_size=12),
            IDS[:1],
        ).theta
        for chunk in (2, 5, 64)
    ]
    torch.testing.assert_close(thetas[1], thetas[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(thetas[2], thetas[0], rtol=0, atol=1e-9)
    assert [chunk_width(b) for b in (1, 2, 10, 200)] == [2, 4, 16, 64]
    assert [chunk_width(b, 256) for b in (10, 100, 200)] == [16, 256, 256]


def test_chunks_are_wide_on_a_gpu_for_models_whose_rows_fit():
    def most(device, d):
        packing = SimpleNamespace(layout=SimpleNamespace(d=d))
        return max_chunk(SimpleNamespace(device=torch.device(device), packing=packing))

    assert most("cuda", 334_336) == 256
    assert most("cuda", 11_000_000) == most("cpu", 334_336) == 64


@pytest.mark.parametrize(
    "algorithm",
    [
        SGD(lr=0.3),
        AdadpLR(lr=0.3, tol=1.0, discard=False),
        AdadpLR(lr=0.3, tol=1.0, keep="half", discard=False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_private_client_has_the_same_bytes_in_every_block(algorithm, sampling):
    data, model = make_data(SIZES, features=37), make_mlp(37, 19)
    reference = None
    for block_size in (1, 2, 5):
        trainer = private_trainer(
            algorithm, Clipping(0.5), model=model, data=data, block_size=block_size,
            sampling=sampling, steps=None, epochs=2,
        )  # fmt: skip
        rows = joined(trainer.train(trainer.initial(), IDS, 1))[0]
        reference = rows if reference is None else reference
        assert torch.equal(rows, reference)
    assert torch.equal(rows[2], torch.zeros_like(rows[2]))


@pytest.mark.parametrize("path", ["plain", "layered"])
def test_private_adadp_without_adaptation_is_dp_sgd_with_half_the_rate(path):
    still = AdadpLR(lr=0.4, keep="half", alpha_min=1.0, alpha_max=1.0, discard=False)
    adadp = final(private_trainer(still, Clipping(0.5), path=path))
    sgd = final(private_trainer(SGD(lr=0.2), Clipping(0.5), path=path))
    torch.testing.assert_close(adadp.theta, sgd.theta, rtol=0, atol=1e-12)


def test_adaclip_with_centre_zero_and_even_scale_is_dp_sgd():
    # h1 = h2 fixes s, so b = C in every coordinate for good.
    C, d = 0.5, 53
    fixed = AdaClip(clip_norm=C, center=False, h1=C**2 / d, h2=C**2 / d, beta2=0.0)
    adaclip = final(private_trainer(SGD(lr=0.3), fixed))
    clipping = final(private_trainer(SGD(lr=0.3), Clipping(C)))
    torch.testing.assert_close(adaclip.theta, clipping.theta, rtol=0, atol=1e-7)


def test_xus_optimiser_that_never_leaves_its_first_phase_is_rmsprop_on_clipped_gradients():
    never = AdaptiveNoise(clip_norm=0.5, threshold=float("inf"), beta=1.0)
    xu = AdadpNoise(lr=0.01, decay=0.9, eps=1e-16)
    ours = final(private_trainer(xu, never))
    plain = final(private_trainer(xu, Clipping(0.5)))
    # Factors and dense rows bound with different margins, a few parts in a million.
    torch.testing.assert_close(ours.theta, plain.theta, rtol=0, atol=1e-6)
    other = final(private_trainer(RMSProp(lr=0.01, decay=0.9, eps=1e-16), Clipping(0.5)))
    torch.testing.assert_close(plain.theta, other.theta, rtol=0, atol=1e-6)


def test_every_mechanism_and_algorithm_runs_on_every_path():
    for mechanism in (
        Normalization(0.5, smoothing=0.01),
        AdaClip(clip_norm=0.5),
        AdaptiveNoise(clip_norm=0.5, threshold=0.0, beta=3.0),
    ):
        thetas = [
            final(private_trainer(AdadpNoise(lr=0.01), mechanism, path=path)).theta
            for path in ("plain", "layered")
        ]
        assert torch.isfinite(thetas[0]).all()
        torch.testing.assert_close(*thetas, rtol=0, atol=1e-6)


def test_the_rate_settles_where_noise_dominates():
    # eta* = sqrt(2) tol |B| / (sigma C sqrt(d)) on the mean scale.
    data = make_data([400], features=300, classes=10)
    model = nn.Sequential(nn.Linear(300, 10))
    sigma, C, B = 4.0, 1.0, 40
    expected = np.sqrt(2) * B / (sigma * C * np.sqrt(3010))
    for start in (1e-3, 0.05, 3.0):  # 59 iterations up from the first of them
        trainer = private_trainer(
            AdadpLR(lr=start, tol=1.0, discard=False), Clipping(C), sigma,
            model=model, data=data, batch_size=B, steps=160,
        )  # fmt: skip
        eta = final(trainer, IDS[:1]).metrics["eta"][0]
        assert eta == pytest.approx(expected, rel=0.05)


def test_a_clients_ledger_counts_every_invocation(tmp_path):
    trainer = private_trainer(
        AdadpLR(lr=0.3, discard=True), Clipping(0.5), 1.5, ledger=tmp_path / "l.jsonl", steps=6,
    )  # fmt: skip
    for t in (1, 2):
        final(trainer, IDS, t)
    ledger = Ledger.read(tmp_path / "l.jsonl")
    assert sorted(ledger.histories) == [0, 1, 3, 4]  # client 2 has no examples
    of_client = [entry for entry in ledger.entries if 3 in entry.clients]
    assert [entry.round for entry in of_client] == [1, 2]
    event = of_client[0].event
    assert (event.count, event.law.rate, event.noise_multiplier) == (6, 5 / 33, 1.5)
    assert ledger.level == "example"
    assert ledger.histories[3].accountant.epsilon(1e-5) == pytest.approx(
        epsilon(noise_multiplier=1.5, cohort=PoissonCohort(rate=5 / 33), rounds=12, delta=1e-5),
        rel=1e-6,
    )


def test_the_line_is_on_disk_before_anything_is_computed(tmp_path):
    built = False

    def broken(outputs, targets):
        if built:
            raise RuntimeError("on purpose")
        return CrossEntropy()(outputs, targets)

    path = tmp_path / "l.jsonl"
    trainer = private_trainer(SGD(lr=0.3), Clipping(0.5), ledger=path, loss=broken)
    built = True
    for _ in range(2):  # a second attempt draws the same, and of the first nothing has left
        with pytest.raises(RuntimeError, match="on purpose"):
            final(trainer, IDS[:1])
        assert len(Ledger.read(path).entries) == 1


@pytest.mark.parametrize("randomness", [RANDOMNESS, Randomness(None)])
@pytest.mark.parametrize("keeps", ["log", "evidence"])
def test_each_request_that_is_answered_is_a_line(tmp_path, keeps, randomness):
    """A node keeps evidence, whatever the server says of its entropy."""
    trainer = private_trainer(SGD(lr=0.3), Clipping(0.5), randomness=randomness)
    trainer.record_in(Ledger(tmp_path / "l.jsonl", keeps=keeps, client=0))
    trainer.join("a run")
    if keeps == "log" and randomness is not RANDOMNESS:
        return
    for _ in range(2):
        final(trainer, IDS[:1])
    ledger = Ledger.read(tmp_path / "l.jsonl", delta=1e-5)
    assert [(entry.round, entry.run) for entry in ledger.entries] == [(1, "a run")] * 2
    assert ledger.epsilon() == pytest.approx(
        epsilon(noise_multiplier=1.0, cohort=PoissonCohort(rate=5 / 20), rounds=8, delta=1e-5),
        rel=1e-6,
    )


@pytest.mark.parametrize("asked", [[1, 2, 3], [2, 3], [1, 1, 2]])
def test_a_plan_that_may_stop_is_charged_at_a_clients_first_request(tmp_path, asked):
    trainer = private_trainer(SGD(lr=0.3), Clipping(0.5), sampling="poisson")
    privacy = replace(trainer.privacy, rounds=6, may_stop=True)
    trainer = private_trainer(SGD(lr=0.3))._copy(privacy=privacy)
    trainer.record_in(Ledger(tmp_path / "l.jsonl", keeps="evidence"))
    trainer.join("a run")
    for number in asked:
        final(trainer, IDS[:1], number)
    ledger = Ledger.read(tmp_path / "l.jsonl")
    again = len(asked) - len({*asked})  # a request that is repeated is one more release
    assert [entry.event.count for entry in ledger.entries] == [
        24,
        *(4 if n in asked[:k] else 0 for k, n in enumerate(asked) if k),
    ]
    assert sum(ledger.history.counts.values()) == 24 + 4 * again
    with pytest.raises(FedsimError, match="round 7 would follow the last one that client 0 was"):
        final(trainer, IDS[:1], 7)


def test_two_processes_of_one_run_are_charged_for_each_time_that_a_round_is_drawn(tmp_path):
    private = private_trainer(SGD(lr=0.3), Clipping(0.5), sampling="poisson")
    privacy = replace(private.privacy, rounds=6, may_stop=True)
    trainers = [private_trainer(SGD(lr=0.3))._copy(privacy=privacy) for _ in range(2)]
    for trainer in trainers:  # such as copies of a killed run, which share a ledger
        trainer.record_in(Ledger(tmp_path / "l.jsonl", keeps="evidence"))
        trainer.join("a run")
    for number in (1, 2, 3):
        for trainer in trainers:
            final(trainer, IDS[:1], number)
    counts = [entry.event.count for entry in Ledger.read(tmp_path / "l.jsonl").entries]
    assert counts == [24, 4, 0, 4, 0, 4]


def test_a_noise_multiplier_gives_independent_noise_hardened_unless_told_otherwise():
    bound = Clipping(1.0)
    assert ExamplePrivacy(bound, 2).noise == Independent(2.0, hardened=True)
    privacy = ExamplePrivacy(bound, noise_multiplier=2.0, hardened=False)
    assert privacy.noise == Independent(2.0, hardened=False)
    assert privacy.scaled(3.0).noise == Independent(3.0, hardened=False)
    assert repr(ExamplePrivacy(bound, 2).noise) == repr(Independent(2.0, hardened=True))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"delta": 2.0}, r"delta is 2\.0; it must be less than 1"),
        ({"delta": 0.0}, r"delta is 0\.0; it must be greater than 0"),
        ({"max_epsilon": -1.0}, r"max-epsilon is -1\.0; it must be greater than 0"),
        ({"chunk": -1}, "chunk is -1; it must be at least 0"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_when_it_is_given(settings, sentence):
    with pytest.raises(FedsimError, match=sentence):
        ExamplePrivacy(Clipping(1.0), 1.0, **settings)


def test_shuffled_passes_are_charged_without_amplification():
    privacy = ExamplePrivacy(Clipping(1.0), 2.0, sampling="shuffle")
    event = privacy.plan(LocalWork(10, epochs=3), 95).event()
    assert (event.law.name, event.count) == ("shuffle", 3)
    assert privacy.plan(LocalWork(10, None, 11), 95).event().count == 2


def test_full_batches_are_charged_as_full_participation():
    event = ExamplePrivacy(Clipping(1.0), 2.0).plan(LocalWork(0, None, 7), 30).event()
    assert (event.law.name, event.law.rate, event.count) == ("full", 1.0, 7)


def test_the_worst_client_is_found_among_rates_and_counts():
    privacy = ExamplePrivacy(Clipping(1.0), 2.0)
    plan, sizes = LocalWork(10, epochs=1), [20, 50, 200, 1000, 0]
    worst = example_epsilon(privacy, plan, sizes, rounds=5)
    each = [example_epsilon(privacy, plan, [size], rounds=5) for size in sizes if size]
    assert worst == pytest.approx(max(each))
    # Only the client without examples costs nothing.
    assert len(example_events(privacy, plan, sizes, 5)) == 4


def test_private_clients_report_no_loss_unless_asked():
    quiet = private_trainer(SGD(lr=0.3), Clipping(0.5))
    assert set(final(quiet).metrics) == {"num-examples"}
    loud = Trainer(
        make_mlp(**Z64), SGD(lr=0.3), make_data(SIZES, **Z64), steps=2, randomness=Randomness(1),
        privacy=ExamplePrivacy(Clipping(0.5), 1.0, unprotected_metrics=True),
    )  # fmt: skip
    assert final(loud).metrics["loss"][0] > 0


def test_one_example_more_is_told_apart_and_therefore_not_what_is_claimed():
    # Full batches of noise 100: the noise on the mean shows its denominator, 20 or 21.
    def spread(size):
        trainer = private_trainer(
            SGD(lr=1.0), Clipping(1e-3), 100.0, data=make_data([size], **Z64), batch_size=0, steps=1
        )
        ends = [final(trainer, IDS[:1], t).theta - trainer.initial() for t in range(200)]
        return torch.stack(ends).std().item(), trainer.ledger.statement(1e-5)

    (wide, statement), (narrow, _) = spread(20), spread(21)
    # 200 * 53 draws: a standard deviation is known to .7 %.
    assert wide / narrow == pytest.approx(21 / 20, rel=0.03)
    assert statement.adjacency == "zero-out"
    assert "Public: the number of every client's examples" in str(statement)


def test_a_bound_that_leaves_no_noise_for_steps_is_refused_before_the_first_round():
    few_rows = ExamplePrivacy(QuantileClipping(bit_noise=0.05), noise_multiplier=1.0)
    with pytest.raises(FedsimError, match=r"bit-noise 0.05 and 3 expected rows .*batch-size"):
        trainer_of_sizes([12], few_rows, batch_size=3)


def test_no_clients_size_decides_whether_a_bound_and_noise_are_refused():
    few_rows = ExamplePrivacy(QuantileClipping(bit_noise=0.2), noise_multiplier=1.0)
    for batch_size in (0, 3):  # 3 rows leave noise for the sum; 1 or 2 do not
        trainer = trainer_of_sizes([1, 2], few_rows, batch_size)
        with pytest.raises(FedsimError, match=r"and [12] expected rows"):
            next(trainer.train(trainer.initial(), np.arange(2), 1))


def trainer_of_sizes(sizes, privacy, batch_size) -> Trainer:
    examples = sum(sizes)
    parts = np.split(np.arange(examples), np.cumsum(sizes)[:-1])
    data = ClientData(torch.zeros(examples, 2), torch.zeros(examples).long(), parts)
    settings = {"randomness": Randomness(1), "privacy": privacy}
    return Trainer(nn.Linear(2, 2), SGD(1.0), data, batch_size=batch_size, **settings)
