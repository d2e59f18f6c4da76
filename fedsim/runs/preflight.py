"""Checks of a whole run before anything is written or started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from flwr.app import ConfigRecord
from torch import nn

from fedsim import optional_packages, regular_files
from fedsim.clients.base import DenseGradient, Step
from fedsim.clients.proximal import Proximal, server_numbers
from fedsim.config import RunConfig
from fedsim.config.sections import TaskSection
from fedsim.datasets.array_checks import UNUSABLE
from fedsim.errors import FedsimError
from fedsim.federation.optimizers import FlowerOptimizer
from fedsim.mechanisms import Releaser
from fedsim.mechanisms.bounded_values import joint_norm
from fedsim.models.modules import has_hooks
from fedsim.privacy import Accountant
from fedsim.privacy.assumptions import large_delta
from fedsim.privacy.manifest import signing_key
from fedsim.runs.callbacks import Measure
from fedsim.runs.factories import most_expensive_client, private_metrics
from fedsim.runs.loggers import loggers
from fedsim.runs.resolve import Resolved, driver_charges_examples, make_strategy, open_ledger
from fedsim.runs.round_rows import row_columns
from fedsim.tasks import ExactSum, MeanOf, TopK
from fedsim.tasks.losses import BinaryCrossEntropy, CrossEntropy, is_fedsims_own
from fedsim.training import Trainer
from fedsim.training.evaluation import WIDTH, evaluate_clients
from fedsim.training.own_state import OwnState
from fedsim.training.paths.path_choice import TrainedModel
from fedsim.training.paths.plain import PlainPath
from fedsim.training.trainer_checks import loss_on

TOO_NOISY = 0.05
"""Warn if the noise on a mean has a larger standard deviation than this share of its range."""


def check(resolved: Resolved) -> None:
    """Refuse a run that cannot work; called before its directory or a server is touched.

    Data, model and client algorithm are built already. The mechanism, its scalars and the budget
    are checked against the model; loss and metrics are tried on one example, and the client
    algorithm in one step.

    Raises
    ------
    FedsimError
        The message names the key, its value and what is allowed. Errors raised by the user's own
        code are passed on unchanged.
    """
    if resolved.config.engine.name in ("ray", "simulation"):
        optional_packages.require(f"engine.name = {resolved.config.engine.name!r}", "ray")
    if resolved.config.engine.name != "deployment":  # there each node has its own directory
        _check_state_dir(resolved.config.client.state_dir)
    if resolved.config.privacy.ledger and not resolved.config.engine.federation:
        _check_shared_ledgers(resolved)
    strategy = make_strategy(resolved)
    strategy.check(resolved.initial_arrays)
    if isinstance(strategy.server_optimizer, FlowerOptimizer):
        config = strategy.server_optimizer.client_config(resolved.trainer.initial(), ConfigRecord())
        server_numbers(resolved.trainer.algorithm, config)
    _check_scalars(resolved, strategy.plan.mechanism.side_scalar_names)
    row_columns(resolved, strategy)
    for key, metric in (
        ("checkpoint.best", resolved.config.checkpoint.best),
        ("stop.metric", resolved.config.stop.metric),
    ):
        if metric:
            Measure.of_column(resolved, key, metric)
    loggers(resolved.config.log.to)
    _check_client_noise(resolved)
    if not resolved.config.engine.federation:  # there the key is on the server's machine
        signing_key(resolved.config.noise.ledger_key)
    _try_example(resolved)
    _try_step(resolved)


def _check_shared_ledgers(resolved: Resolved) -> None:
    """Refuse a ledger of other clients or another kind, or one that cannot be written."""
    path = Path(resolved.config.privacy.ledger)
    if (nearest := regular_files.unwritable(path.parent)) is not None:
        raise FedsimError(
            f"privacy.ledger = '{path}', but {nearest} is not a writable directory; it must be in "
            "one."
        )
    open_ledger(resolved, "client", None)
    if driver_charges_examples(resolved.config):
        open_ledger(resolved, "example", None)


def warnings(resolved: Resolved) -> list[str]:
    """Warnings about a run's guarantee and its metrics, before its first round."""
    config, sentences = resolved.config, []
    if config.private:
        sentences.append(large_delta(config.noise.delta, "client", config.partition.clients))
        sentences.append(_noisy_metrics(config))
    # A client's number of examples is public at example level alone. In a deployment nodes have it.
    if config.client.private and not config.private and config.engine.name != "deployment":
        smallest = min(resolved.data.sizes, default=None)
        sentences.append(large_delta(config.client.noise.delta, "example", smallest))
    sentences += _unusable_test_examples(resolved)
    sentences += _constant_metrics(resolved)
    sentences += _second_softmax(resolved)
    sentences += _parameters_of_loss(resolved)
    return [sentence for sentence in sentences if sentence]


def _unusable_test_examples(resolved: Resolved) -> Iterator[str]:
    """Warning about public test examples of a private run that cannot be used."""
    config, data = resolved.config, resolved.data
    unusable = data.dataset.test.columns.get(UNUSABLE)
    # What is wrong with clients' own test examples is theirs: a warning would depend on it.
    if config.evaluate.every and "test" not in data.client_splits and unusable is not None:
        yield (
            f"Warning: {unusable.sum():,} of {len(unusable):,} test examples are left out of "
            "metrics: they have a label or token outside the declared range (data.classes, "
            "data.vocabulary), or numbers that are not finite."
        )


def _constant_metrics(resolved: Resolved) -> Iterator[str]:
    """Warnings about metrics that are 1 for every model."""
    classes = resolved.data.dataset.num_classes
    for name, metric in resolved.trainer.metrics.items():
        if isinstance(metric, TopK) and 0 < classes <= metric.k:
            yield (
                f"Warning: {name} is 1 whatever the model gives: k = {metric.k} (task.metrics), "
                f"and there are {classes} classes."
            )


_INSIDE: dict[object, tuple[object, ...]] = {
    CrossEntropy: (nn.Softmax, nn.functional.softmax, torch.softmax, "softmax"),
    BinaryCrossEntropy: (nn.Sigmoid, torch.sigmoid, "sigmoid"),
}
"""Functions that a loss applies itself. Not log-softmax: applied twice it changes nothing."""


def _second_softmax(resolved: Resolved) -> Iterator[str]:
    """Warning if the model ends in a function that its loss applies again."""
    inside = _INSIDE.get(type(resolved.trainer.loss), ())
    if _last_call(resolved.trainer.trained) in inside:
        *_, name = inside
        yield (
            f"Warning: the model ends in a {name}, and task.loss = "
            f"'{resolved.config.task.loss}' applies one to what the model gives: with both it "
            "trains badly; leave out the model's, so that it gives logits."
        )


def _parameters_of_loss(resolved: Resolved) -> Iterator[str]:
    """Warning if a loss has parameters that expect to be trained."""
    loss = resolved.trainer.loss
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if names := [name for name, parameter in parameters if parameter.requires_grad]:
        yield (
            f"Warning: task.loss has parameters ({', '.join(names)}), which are not trained, since "
            "only those of the model are; make them parameters of the model to train them."
        )


def _last_call(trained: TrainedModel) -> object:
    """Class, function or name of the method that a model calls last; None if it is unknown."""
    last: nn.Module = trained.model
    if (read := trained.reading.model) is not None:
        (output,) = (node for node in read.module.graph.nodes if node.op == "output")
        (node,) = output.all_input_nodes
        if node.op != "call_module":
            return node.target
        last = read.module.get_submodule(str(node.target))
    while type(last) is nn.Sequential and len(last) and not has_hooks(last):
        last = last[-1]
    return None if has_hooks(last) else type(last)


def _noisy_metrics(config: RunConfig) -> str:
    """Warning if the noise of private evaluations is large relative to their ranges; else empty."""
    released = private_metrics(config)
    if released is None:
        return ""
    noise = released.noise_multiplier * joint_norm(released.ranges)
    clients = config.evaluate.fraction * config.partition.clients
    if (error := noise / clients) < TOO_NOISY:
        return ""
    return (
        f"Warning: over about {clients:,.6g} clients the noise of a private evaluation moves a "
        f"mean by up to {error:.2g} of its range (one standard deviation); a smaller "
        "evaluate.multiplier or larger evaluate.target-share, fewer metrics, no quantiles or more "
        "clients reduce that."
    )


def _check_client_noise(resolved: Resolved) -> None:
    """Refuse noise that no client's mechanism suits, and a budget too small for one round."""
    # Both depend on clients' sizes, which are protected in a client-private run: there the client
    # itself fails.
    config, trainer, sizes = resolved.config, resolved.trainer, resolved.data.sizes
    if config.private or (privacy := trainer.privacy) is None:
        return
    plan = privacy.plan(trainer.workload.work, max(sizes, default=0))
    if plan is not None:
        Releaser([plan], trainer.packing.layout, exact=False)
    worst = most_expensive_client(config, privacy, sizes, 1)
    if (budget := config.client.noise.max_epsilon) is None or worst is None:
        return
    delta = privacy.delta
    if (spent := Accountant([worst]).epsilon(delta)) > budget:
        raise FedsimError(
            f"client.noise.max-epsilon = {budget} at delta = {delta}; it must be at least "
            f"{spent:.4g}, the cost of one round for a client."
        )


def _check_state_dir(name: str) -> None:
    """Refuse a ``client.state-dir`` that clients on this machine could not write to."""
    if name and (nearest := regular_files.unwritable(Path(name))) is not None:
        raise FedsimError(
            f"client.state-dir = '{name}', but {nearest} is not a writable directory; it must be "
            "one, or a place for one."
        )


def _check_scalars(resolved: Resolved, names: tuple[str, ...]) -> None:
    reported = resolved.trainer.reported
    for name in names:
        if name not in reported:
            raise FedsimError(
                f"mechanism.private-scalar = '{name}'; it must be a number that these clients "
                f"report: {', '.join(reported)}."
            )


def _try_example(resolved: Resolved) -> None:
    """Try loss and metrics on one example; `try_model` has already tried the model."""
    trainer = resolved.trainer
    if (one := trainer.data.one_example(protected=resolved.config.protects)) is None:
        return
    if resolved.config.private and isinstance(trainer.path, PlainPath):
        OwnState(trainer.model, trainer.loss)  # refuses a model whose state cannot be restored
    trainer.model.eval()
    theta = trainer.personal.initial[None]
    evaluate_clients(
        [trainer.path], theta, one, one.indices, {"loss": MeanOf(trainer.loss)}
    )  # before the metrics: what is wrong with both is wrong with the loss
    index = torch.from_numpy(one.indices[0]).to(trainer.device)
    x, y = one.inputs(index, theta.dtype), one.targets(index, theta.dtype)
    outputs = trainer.path.outputs(theta, x[None])[0].detach().requires_grad_()
    for name, metric in trainer.metrics.items():
        try:
            evaluate_clients([trainer.path], theta, one, one.indices, {name: metric})
        except FedsimError as error:
            if not is_fedsims_own(metric):
                raise
            raise _metric_does_not_fit(name, resolved, outputs, y) from error
    # For outputs without a gradient `torch.func` returns zeros: clients would learn nothing.
    if not trainer.trained.loss(outputs, y).requires_grad:
        raise FedsimError(
            f"task.loss = {resolved.config.task.loss!r}, whose values have no gradient (as after "
            "argmax, detach or a comparison); it must be differentiable in the model's outputs."
        )


def _metric_does_not_fit(
    name: str, resolved: Resolved, outputs: torch.Tensor, targets: torch.Tensor
) -> FedsimError:
    """The error for a metric that does not take what the loss takes."""
    value = resolved.config.task.metrics
    by_default = ", its default" if value == TaskSection.metrics else ""
    fitting = (
        "'rmse,r2' for numbers, 'f1,auc' for labels 0 and 1"
        if targets.is_floating_point()
        else "'accuracy' for classes (a logit for each)"
    )
    return FedsimError(
        f"task.metrics = '{value}'{by_default}: {name} does not compare outputs "
        f"{list(outputs.shape)} with targets {list(targets.shape)} of {targets.dtype}, which "
        f"task.loss does; set it, for example, to {fitting}, or '' for the loss alone."
    )


LOOKED_AT = 5_000
"""Training examples at most that are looked at for the cause of a run's failure."""
LARGE_GRADIENT = 1e15
"""Length of a gradient from which on no usual learning rate gives a step that can be summed."""


class _NotFinite(MeanOf):
    """Number of examples whose loss is not finite."""

    def finish(self, state: ExactSum) -> float:
        return state.bad


def why_untrainable(trainer: Trainer) -> str:
    """Why clients cannot train whatever the learning rate, from their examples; empty if they can.

    It looks at the loss and its gradients at the initial model. Not for a run that protects them.
    """
    examples, theta = np.concatenate(trainer.data.indices)[:LOOKED_AT], trainer.personal.initial
    trainer.model.eval()
    path = PlainPath(trainer.model, trainer.packing, trainer.trained.loss)
    loss = {"loss": _NotFinite(loss_on(trainer.loss, torch.device("cpu")))}
    bad = int(evaluate_clients([path], theta[None], trainer.data, [examples], loss)["loss"][0])
    if bad:
        return (
            f"at the initial model the loss is not finite on {bad:,} of {len(examples):,} training "
            "examples (0/0, the logarithm of 0, or inputs that are too large)"
        )
    for index in torch.split(torch.from_numpy(examples).to(trainer.device), WIDTH):
        x, y = trainer.data.inputs(index, theta.dtype), trainer.data.targets(index, theta.dtype)
        weight = theta.new_full((1, len(index)), 1 / len(index))
        gradient, _ = path.gradient(theta[None], x[None], y[None], weight)
        length = float(gradient.dense().double().norm())
        if not length < LARGE_GRADIENT:
            return (
                f"at the initial model a gradient is {length:.2g} long, of examples with inputs up "
                f"to {float(x.abs().max()):.2g}"
            )
    return ""


def _try_step(resolved: Resolved) -> None:
    """Try one step of the client algorithm at zeros; in a round, every client would fail alone."""
    algorithm, width = resolved.trainer.algorithm, resolved.trainer.layout.d
    if isinstance(algorithm, Proximal):  # the inner step is the one that a user may have written
        algorithm = algorithm.algorithm
    result: object = algorithm.step(
        algorithm.example_state(width), DenseGradient(torch.zeros(1, width)), Step(1, 0)
    )
    if result is not None:
        raise FedsimError(
            f"client.name names {algorithm.label}, whose step returns a "
            f"{type(result).__name__}; it must change the state that it is given, and return "
            "nothing."
        )
