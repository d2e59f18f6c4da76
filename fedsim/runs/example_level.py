"""What clients of a config do to protect their examples, and with how much noise."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fedsim.config import RunConfig
from fedsim.config.plan import local_work, stopping
from fedsim.errors import FedsimError
from fedsim.runs import objects
from fedsim.training import ExamplePrivacy

__all__ = ["example_privacy"]


def example_privacy(
    config: RunConfig,
    sizes: Collection[int],
    calibrated_sizes: Collection[int],
    ledger_dir: Path | None,
) -> ExamplePrivacy:
    """What clients do to their examples' gradients, in a run with privacy for examples.

    Parameters
    ----------
    config : RunConfig
    sizes : collection of int
        Numbers of examples that clients here have.
    calibrated_sizes : collection of int
        Numbers that the noise must be enough for, where it follows from a target epsilon.
    ledger_dir : path or None
        Of the clients' ledgers; None: in memory.

    Raises
    ------
    FedsimError
        If a client has fewer examples than a batch, and whole clients are not protected.
    """
    client = config.client
    smallest = min(sizes, default=client.batch_size)
    # Where whole clients are protected too, how many examples one has decides nothing that others
    # see: a client with fewer than a batch takes them all.
    if client.batch_size > smallest and not config.private:
        raise FedsimError(
            f"client.batch-size = {client.batch_size}; with example-level privacy, where a "
            "batch is drawn at a rate of batch size over examples, it must be at most "
            f"{smallest}, what the smallest client has."
        )
    end = stopping(config.to_run_config())
    unnoised = ExamplePrivacy(
        mechanism=objects.mechanism(client.mechanism),
        noise_multiplier=client.noise.multiplier or 0.0,
        sampling=client.noise.sampling,
        chunk=client.noise.chunk,
        hardened=client.noise.hardened,
        delta=client.noise.delta,
        max_epsilon=client.noise.max_epsilon,
        stopping=end,
        ledger_dir=ledger_dir,
        unprotected_metrics=config.evaluate.unprotected,
    )
    target = client.noise.target_epsilon
    if target is None:
        return unnoised
    work = local_work(config)
    plans = (unnoised.plan(work, size, config.rounds) for size in calibrated_sizes)
    delta = end.planned_delta(client.noise.delta)
    needed = (plan.calibrated(target, delta) for plan in plans if plan is not None)
    noise_multiplier = max((plan.noise.multiplier for plan in needed), default=0.0)
    return replace(unnoised, noise_multiplier=noise_multiplier)
