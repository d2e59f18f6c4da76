"""Checks of a strategy's settings; each error says what to use instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsim.arguments import as_text, unknown_argument_error
from fedsim.cohorts import Cohort
from fedsim.errors import FedsimError
from fedsim.rows.layout import PREFIX, Layout
from fedsim.training.trainer_checks import CARRIED

COHORT_DEVIATIONS = 10.0
"""Margin for Poisson cohorts: none exceeds its expected size by so many standard deviations."""

_INSTEAD = {
    "fraction_train": "cohort=PoissonCohort(rate=fraction_train, population=...), whose draws are "
    "accounted for",
    "fraction_fit": "cohort=PoissonCohort(rate=fraction_fit, population=...), whose draws are "
    "accounted for",
    "min_train_nodes": "cohort=FixedCohort(size=min_train_nodes, population=...), or "
    "min_available_nodes= to wait for nodes",
    "min_fit_clients": "cohort=FixedCohort(size=min_fit_clients, population=...), or "
    "min_available_nodes= to wait for nodes",
    "min_evaluate_nodes": "fraction_evaluate=, of the clients that are there",
    "min_available_clients": "min_available_nodes=",
    "clipping_norm": "mechanism=Clipping(clip_norm=clipping_norm)",
    "num_sampled_clients": "cohort=FixedCohort(size=num_sampled_clients, population=...)",
    "strategy": "DPFedAvg itself, and server_optimizer= for what refines its mean, such as FedAdam",
    "eta": "server_optimizer=adam(lr=eta)",
    "server_learning_rate": "server_optimizer=sgd(lr=server_learning_rate)",
    "server_momentum": "server_optimizer=sgd(momentum=server_momentum)",
    "initial_parameters": "start(grid, initial_arrays=...)",
    "accept_failures": "nothing: failures are counted, and end no private run",
}


def refuse_keywords(strategy: Callable[..., Any], keywords: Mapping[str, object]) -> None:
    """Refuse keywords that a strategy does not take.

    Raises
    ------
    FedsimError
        For keywords of Flower's strategies that have no meaning here, or another one, with those
        to use instead; for any other with the closest one, if there is one.
    """
    for name in keywords:
        if name not in _INSTEAD:
            raise unknown_argument_error(strategy, name)
    if keywords:
        given = " and ".join(f"{name} = {value!r}" for name, value in keywords.items())
        verb = "is not an argument" if len(keywords) == 1 else "are not arguments"
        instead = "; and ".join(_INSTEAD[name] for name in keywords)
        raise FedsimError(f"{given} {verb} of DPFedAvg; use {instead}.")


def in_existing_folder(ledger: str | PathLike[str] | None) -> Path | None:
    """A ledger's path; refused if its folder does not exist, where earlier releases cannot be.

    Raises
    ------
    FedsimError
    """
    path = None if ledger is None else Path(ledger)
    if path is not None and not path.parent.is_dir():
        raise FedsimError(
            f"ledger is '{path}', and there is no folder {path.parent}; it must be a file in a "
            "folder that exists."
        )
    return path


def refuse_other_arrays(arrays: Mapping[str, Tensor], layout: Layout | None) -> None:
    """Refuse initial parameters that are not those of the clients' model.

    Parameters
    ----------
    arrays : mapping of str to Tensor
    layout : Layout or None
        Layout of the parameters that clients train; None if it is not known.

    Raises
    ------
    FedsimError
        If a name is missing, unknown or out of order, or a shape or dtype differs; it names the
        first.
    """
    if not arrays:
        raise FedsimError("initial_arrays is empty; it must hold the model's parameters.")
    if layout is None:
        return
    expected = {entry.name: entry for entry in layout.entries}
    if list(arrays) != list(expected):
        raise FedsimError(
            f"initial_arrays has {as_text(list(arrays))}; it must have the parameters that clients "
            f"train, in their order: {', '.join(expected)}."
        )
    for name, tensor in arrays.items():
        if tuple(tensor.shape) != expected[name].shape or not tensor.is_floating_point():
            raise FedsimError(
                f"initial_arrays has '{name}' of shape {list(tensor.shape)} and {tensor.dtype}; it "
                f"must be of shape {list(expected[name].shape)} and {expected[name].dtype}."
            )


def refuse_too_many(cohort: Cohort, max_rows: int) -> None:
    """Refuse a sampler whose cohorts may exceed the capacity of one exact sum.

    This is checked before the run: in a round, it would end the run depending on the secret cohort.

    Raises
    ------
    FedsimError
    """
    expected = cohort.expected_size
    likely = min(cohort.population or math.inf, expected + COHORT_DEVIATIONS * math.sqrt(expected))
    if likely > max_rows:
        raise FedsimError(
            f"the {cohort.name} cohort may draw {likely:,.0f} clients (cohort, partition.clients); "
            f"one exact sum has room for {max_rows:,}, so that it must draw fewer."
        )


def refuse_untrainable(arrays: Mapping[str, Tensor], *, private: bool) -> None:
    """Refuse parameters that could not be trained here as the caller expects.

    These are complex numbers, which are in no row, formats that no Flower array carries, names of
    the vectors that clients send, and, in a private run, running statistics of clients' examples:
    they are recognised by the names that torch and Keras give them.

    Raises
    ------
    FedsimError
        Naming the first.
    """
    for name, tensor in arrays.items():
        is_real = tensor.is_floating_point()
        if tensor.is_complex() or (is_real and tensor.dtype not in CARRIED):
            raise FedsimError(
                f"'{name}' is {tensor.dtype}; parameters must be one of "
                f"{', '.join(map(str, CARRIED))} (whole numbers and booleans are sent, but not "
                "trained)."
            )
        if name.startswith(PREFIX):
            raise FedsimError(
                f"'{name}' begins with '{PREFIX}', as vectors do that clients send beside their "
                "update; it must have another name."
            )
        is_running = name.rpartition(".")[2] in _RUNNING or name.rpartition("/")[2] in _RUNNING
        if private and is_running:
            raise FedsimError(
                f"'{name}' is a running statistic of the clients' examples, of which each client "
                "sends the mean over its data with its update; a private run cannot have "
                "it: use a normalisation without one, such as nn.GroupNorm, or leave it out of "
                "the arrays that are sent."
            )


_RUNNING = {"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance"}
