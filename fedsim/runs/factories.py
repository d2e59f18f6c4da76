"""Makes the objects that a config's tables describe, and the trainer of its clients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp.strategy import Strategy
from torch import nn

from fedsim import mechanisms, registry, tasks
from fedsim.arguments import as_text
from fedsim.clients import LocalAlgorithm, Proximal, RunFacts
from fedsim.clients.schedules import CONSTANT, Schedule
from fedsim.config import RunConfig, plan
from fedsim.config.devices import work_counts
from fedsim.config.plan import entropy, evaluation_event, may_stop
from fedsim.config.privacy_sections import ClientMechanismSection, MechanismSection, read_ranges
from fedsim.errors import FedsimError
from fedsim.federation.client_settings import PrivateMetrics
from fedsim.federation.optimizers import FlowerOptimizer, Scheduled
from fedsim.keywords import arguments_of
from fedsim.mechanisms import Mechanism
from fedsim.mechanisms.bounded_values import ValueRange
from fedsim.privacy import Event, worst_client
from fedsim.privacy.laws import Full
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.runs.data_split import RunData
from fedsim.strategies import ServerOptimizer
from fedsim.tasks import Loss, Metric
from fedsim.training import ClientData, ExamplePrivacy, Trainer, example_events
from fedsim.training.block_memory import USABLE_SHARE
from fedsim.training.frozen_stem import split_frozen_stem
from fedsim.training.paths.path_choice import most_rows


def mechanism(settings: MechanismSection | ClientMechanismSection) -> Any:
    """The `Mechanism` that bounds updates, or a client's per-example gradients."""
    mechanism = settings.make()
    if settings.per_layer:
        mechanism = mechanisms.PerLayer(mechanism)
    if isinstance(settings, MechanismSection) and settings.private_scalar:
        mechanism = mechanisms.PrivateScalar(
            mechanism,
            name=settings.private_scalar,
            high=settings.private_scalar_high,
            fraction=settings.private_scalar_fraction,
        )
    return mechanism


def algorithm(config: RunConfig) -> LocalAlgorithm:
    """The client algorithm."""
    client = config.client
    facts = RunFacts(
        private_examples=client.private,
        mechanism=mechanism(config.mechanism) if config.private else None,
        steps=None if client.work else client.steps or None,
    )
    local_algorithm: LocalAlgorithm = client.make().for_run(facts)
    return Proximal(local_algorithm, client.proximal) if client.proximal else local_algorithm


def release_plan(config: RunConfig) -> ReleasePlan[Mechanism]:
    """The server's release plan, with the config's noise or noise calibrated to its target."""
    return plan.release_plan(config, mechanism(config.mechanism))


def private_metrics(config: RunConfig) -> PrivateMetrics | None:
    """The metrics that the config releases with noise; None without private evaluation.

    Raises
    ------
    FedsimError
        If a range names no metric, or no metric has a range.
    """
    event = evaluation_event(config)
    if event is None:
        return None
    evaluate, by_name = config.evaluate, {"loss": None, **metrics(config)}
    declared = read_ranges(evaluate.ranges)
    for name in declared:
        if name not in by_name:
            raise FedsimError(
                f"evaluate.ranges has '{name}'; it must be of {', '.join(by_name)}, the loss and "
                "task.metrics."
            )
    natural = {name: metric.ends for name, metric in by_name.items() if metric and metric.ends}
    ranges = [
        ValueRange(name, *ends, quantiles=evaluate.quantiles)
        for name, ends in sorted((natural | declared).items())
    ]
    if not ranges:
        raise FedsimError(
            f"evaluate.ranges is empty, and {', '.join(by_name)} have no range of their own; it "
            "must give at least one, such as 'loss(0,5)'."
        )
    return PrivateMetrics(ranges, event.noise_multiplier, config.noise.hardened)


def loss(config: RunConfig) -> Loss:
    """The per-example loss."""
    task = config.task
    factory = task.find()
    settings = task.settings_for(factory, _outputs_and_targets_names(factory))
    return tasks.loss_of(task.loss, factory, settings)


def metrics(config: RunConfig) -> dict[str, Metric]:
    """The metrics of an evaluation (without the loss), by their labels.

    A label is the last part of the metric's name and the values of its options: the label of
    ``top-k(k=3)`` is ``top-k-3``.

    Raises
    ------
    FedsimError
        If two metrics would have the same label.
    """
    by_label: dict[str, Metric] = {}
    for name, options in config.task.named_metrics():
        factory = registry.find("metric", name, "task.metrics")
        label = "-".join([name.rpartition(":")[2], *map(str, options.values())])
        if label in by_label:
            raise FedsimError(
                f"task.metrics = '{config.task.metrics}' has two that would be called '{label}'; "
                "once is enough, and others must have other names or options."
            )
        table, derived = f"task.metrics.{name}", _outputs_and_targets_names(factory)
        by_label[label] = tasks.metric_of(
            factory, arguments_of(factory, name, options, table, derived)
        )
    return by_label


def _outputs_and_targets_names(factory: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's first two parameters, outputs and targets; empty for a class."""
    if isinstance(factory, type):
        return ()
    try:
        return tuple(inspect.signature(factory).parameters)[:2]
    except ValueError:
        return ()


_OPTIMIZER = ("starting_point", "step", "state", "restore")


def server_optimizer(config: RunConfig) -> ServerOptimizer:
    """The server optimizer, which applies the noisy mean to the model."""
    choice = config.server.make()
    optimizer: ServerOptimizer = FlowerOptimizer(choice) if isinstance(choice, Strategy) else choice
    if not all(callable(getattr(optimizer, name, None)) for name in _OPTIMIZER):
        raise FedsimError(
            f"server.optimizer is '{config.server.optimizer}'; it must name a "
            "fedsim.strategies.ServerOptimizer, or a strategy of Flower's that refines the mean."
        )
    try:
        schedule = Schedule.parse(config.server.schedule)
    except FedsimError as error:
        raise FedsimError(f"server.schedule = '{config.server.schedule}': {error}") from None
    return optimizer if schedule == CONSTANT else Scheduled(optimizer, schedule)


def make_trainer(
    config: RunConfig,
    model: nn.Module,
    data: ClientData,
    test: ClientData | None = None,
    *,
    device: torch.device,
    personal: Collection[str] = (),
    privacy: ExamplePrivacy | None = None,
    state_dir: Path | None = None,
) -> Trainer:
    """Make a trainer for these clients' data; its draws are keyed by the seed alone.

    Parameters
    ----------
    config : RunConfig
    model : nn.Module
        The initialised model.
    data : ClientData
        The examples of all clients, or of one node's.
    test : ClientData, optional
        Clients' own test examples.
    device : torch.device
    personal : collection of str
        Names of the parameters that clients do not share.
    privacy : ExamplePrivacy, optional
        Example-level privacy of the clients' training.
    state_dir : path, optional
        Directory of the clients' state.
    """
    client, work = config.client, config.client.make_work()
    # Ray's workers, virtual clients and nodes may have GPUs that this process has not.
    if client.matmul == "tf32" and device.type != "cuda" and config.engine.name == "local":
        raise FedsimError(
            "client.matmul = 'tf32', but clients train on a CPU (engine.device); it must be "
            "'float32' there."
        )
    all_clients = data.population == config.partition.clients
    # Outputs of frozen first layers never change, so they are computed once for each example.
    tail, inputs = split_frozen_stem(model, data)
    if test is not None:
        test_tail, test_inputs = split_frozen_stem(model, test)
        # One model takes training and test inputs: precompute both or neither.
        if model in (tail, test_tail):
            tail, inputs, test_inputs = model, data, test
        test = test_inputs
    # A node's operator need not install a compiler; without one, updates differ by rounding only.
    optional_kernel = config.engine.name == "deployment" and client.kernel == "compiled"
    trainer = Trainer(
        tail,
        algorithm(config),
        inputs,
        batch_size=work.batch_size,
        epochs=work.epochs,
        steps=work.steps,
        counts=work_counts(client.work, config.partition.clients, config.seed)
        if all_clients
        else None,
        loss=loss(config),
        metrics=metrics(config),
        path=client.path,
        kernel="auto" if optional_kernel else client.kernel,
        matmul=client.matmul,
        block_size=client.block_size or _cohort_block(config, model, data, device),
        # With system entropy this is `Randomness(None)`: the public seed determines no draw.
        randomness=Randomness(seed_or_none(config)),
        device=device,
        privacy=privacy,
        max_grad_norm=client.max_grad_norm,
        state=client.state,
        state_dir=state_dir,
        test=test,
        personal=personal,
    )
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        # Workers that share a GPU have a part of it each.
        share = min(1.0, config.engine.gpus_per_worker or 1.0) * USABLE_SHARE
        trainer.limit_memory(int(memory * share))
    return trainer


def _cohort_block(
    config: RunConfig, model: nn.Module, data: ClientData, device: torch.device
) -> int:
    """Clients of a block on a GPU: a whole cohort if memory allows. 0 (a rule) on a CPU.

    A Poisson cohort is larger than its mean and three standard deviations about once in a thousand
    rounds, and is split into two blocks then.
    """
    if device.type != "cuda":
        return 0
    engine, expected_size = config.engine, plan.cohort(config).expected_size
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    cohort_limit = math.ceil(expected_size + 3 * math.sqrt(expected_size))
    # A block for each of Ray's workers: each of its steps is computed for a whole block.
    workers = 1
    if engine.name == "ray":
        gpus = torch.cuda.device_count() / (engine.gpus_per_worker or 1.0)
        workers = engine.workers or max(1, int(gpus))
    clients = min(cohort_limit, max(1, data.population))
    return min(-(-clients // workers), most_rows(device, size))


def seed_or_none(config: RunConfig) -> int | None:
    """Seed of a run's draws; None if they use the operating system's entropy."""
    return None if entropy(config) == "system" else config.seed


def state_dir(config: RunConfig) -> Path | None:
    """Directory of the clients' state, one for each run's name; None without `client.state-dir`."""
    directory = config.client.state_dir
    return Path(directory) / config.name if directory else None


def example_privacy(config: RunConfig, data: RunData) -> ExamplePrivacy | None:
    """Example-level privacy of the clients' training; None without it.

    Raises
    ------
    FedsimError
        If a client has fewer examples than a batch, and client-level privacy is off; or if what is
        released may end the run, and not all clients are in every round.
    """
    client = config.client
    if client.mechanism.name == "none":
        return None
    smallest = min(data.sizes, default=client.batch_size)
    # With client-level privacy a client's size is protected and may not cause a visible error:
    # there a client with fewer examples than a batch takes them all.
    if client.batch_size > smallest and not config.private:
        raise FedsimError(
            f"client.batch-size = {client.batch_size}; with example-level privacy it must be at "
            f"most {smallest}, the smallest client's number of examples."
        )
    stops = may_stop(config.to_run_config())
    if stops and not isinstance(plan.cohort(config), Full):
        key = "stop.metric" if config.stop.metric else "stop.callbacks"
        raise FedsimError(
            f"cohort.name = {as_text(config.cohort.name)}; it must be 'full' while clients protect "
            f"their examples and what is released may end the run ({key}): a client is charged for "
            "all rounds before its first, and must know in how many it is."
        )
    unnoised = ExamplePrivacy(
        mechanism=mechanism(client.mechanism),
        noise_multiplier=client.noise.multiplier or 0.0,
        hardened=client.noise.hardened,
        sampling=client.noise.sampling,
        chunk=client.noise.chunk,
        delta=client.noise.delta,
        max_epsilon=client.noise.max_epsilon,
        rounds=config.rounds,
        may_stop=stops,
        unprotected_metrics=config.evaluate.unprotected,
    )
    target = client.noise.target_epsilon
    if target is None:
        return unnoised
    work = config.client.make_work()
    plans = (unnoised.plan(work, size) for size in data.planned_sizes)
    delta = client.noise.delta
    calibrated_plans = (plan.calibrated(target, delta) for plan in plans if plan is not None)
    multiplier = max((plan.noise.multiplier for plan in calibrated_plans), default=0.0)
    return unnoised.scaled(multiplier)


def most_expensive_client(
    config: RunConfig, privacy: ExamplePrivacy | None, sizes: Collection[int], rounds: int
) -> Event | None:
    """Event of the most expensive client among those of these sizes; None if none releases."""
    if privacy is None or not rounds:
        return None
    events = example_events(privacy, config.client.make_work(), sizes, rounds)
    return worst_client(events, privacy.delta) if events else None
