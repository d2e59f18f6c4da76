"""What a strategy cannot take, each with the word to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedsim.errors import FedsimError

__all__ = ["refuse_flowers_keywords", "refuse_running_statistics"]

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


def refuse_flowers_keywords(keywords: Mapping[str, object]) -> None:
    """Refuse keywords of Flower's strategies that mean nothing here, or something else.

    Raises
    ------
    FedsimError
        Saying what to use for the first that is known.
    TypeError
        As Python does, for one that nobody has.
    """
    for name, value in keywords.items():
        if name in _INSTEAD:
            raise FedsimError(f"{name} = {value!r} is not DPFedAvg's; use {_INSTEAD[name]}.")
        raise TypeError(f"DPFedAvg.__init__() got an unexpected keyword argument '{name}'")


def refuse_running_statistics(names: Iterable[str]) -> None:
    """Refuse parameters that are statistics of clients' examples, in a private run.

    Raises
    ------
    FedsimError
        Naming the first; by the names that torch and Keras give them.
    """
    for name in names:
        if name.rpartition(".")[2] in _RUNNING or name.rpartition("/")[2] in _RUNNING:
            raise FedsimError(
                f"'{name}' is a running statistic of the clients' examples, of which each client "
                "sends the mean over its data beside what it learnt; a private run cannot have "
                "it: use a normalisation without one, such as nn.GroupNorm, or leave it out of "
                "the arrays that are sent."
            )


_RUNNING = {"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance"}
