"""Settings that a strategy refuses, each with what to use instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.arguments import shown
from fedsim.clients import LocalAlgorithm
from fedsim.clients.base import refuse_vectors
from fedsim.cohorts import Cohort
from fedsim.errors import FedsimError
from fedsim.federation.aggregation.robust import RobustMean
from fedsim.mechanisms import Mechanism, NoPrivacy
from fedsim.mechanisms.scaling import ScalingBound
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import Bounded, ReleasePlan
from fedsim.rows.alternation import Alternation
from fedsim.rows.layout import Layout

SPREAD = 10.0
"""No independent cohort is larger than expected by so many standard deviations."""

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
        As Python does, for one that is not known.
    """
    for name, value in keywords.items():
        if name in _INSTEAD:
            raise FedsimError(f"{name} = {value!r} is not DPFedAvg's; use {_INSTEAD[name]}.")
        raise TypeError(f"DPFedAvg.__init__() got an unexpected keyword argument '{name}'")


def plan_of_keywords(
    plan: ReleasePlan[Mechanism | RobustMean] | None,
    mechanism: Mechanism | RobustMean | None,
    cohort: Cohort | None,
    noise_multiplier: float | None,
    hardened_noise: bool | None,
) -> ReleasePlan[Mechanism | RobustMean]:
    """The plan that was given, or the one that these keywords make.

    Raises
    ------
    FedsimError
        If there are both, or keywords that make no plan.
    """
    keywords = {
        "mechanism": mechanism,
        "cohort": cohort,
        "noise_multiplier": noise_multiplier,
        "hardened_noise": hardened_noise,
    }
    if plan is not None:
        if doubled := [name for name, value in keywords.items() if value is not None]:
            raise FedsimError(
                f"{doubled[0]} is given beside plan=, which says it already; leave one of them out."
            )
        if plan.level != "client":
            raise FedsimError(
                f"plan.level is '{plan.level}'; a strategy's rows are clients: it must be 'client'."
            )
        return plan
    if mechanism is None or cohort is None:
        missing = "mechanism" if mechanism is None else "cohort"
        raise FedsimError(
            f"{missing} is not given; DPFedAvg takes mechanism=, cohort= and noise_multiplier=, or "
            "a ReleasePlan as plan=."
        )
    if noise_multiplier is None and mechanism.guarantee != "none":
        raise FedsimError(
            f"noise_multiplier is not given; with {mechanism} it must be a number above 0, or 0.0 "
            "to train without noise and without a guarantee."
        )
    hardened = True if hardened_noise is None else hardened_noise
    noise = Independent(noise_multiplier or 0.0, hardened)
    return ReleasePlan(level="client", sampler=cohort, bound=mechanism, noise=noise)


def refuse_other_arrays(arrays: Mapping[str, Tensor], layout: Layout | None) -> None:
    """Refuse initial parameters that no client could train.

    Parameters
    ----------
    arrays : mapping of str to Tensor
    layout : Layout or None
        Of what clients train, where that is known.

    Raises
    ------
    FedsimError
        Naming the first that is missing, unknown, out of its place or of another shape or dtype.
    """
    if not arrays:
        raise FedsimError("initial_arrays is empty; it must hold the model's parameters.")
    if layout is None:
        return
    wanted = {entry.name: entry for entry in layout.entries}
    if list(arrays) != list(wanted):
        raise FedsimError(
            f"initial_arrays has {shown(list(arrays))}; it must have the parameters that clients "
            f"train, in their order: {', '.join(wanted)}."
        )
    for name, tensor in arrays.items():
        if tuple(tensor.shape) != wanted[name].shape or not tensor.is_floating_point():
            raise FedsimError(
                f"initial_arrays has '{name}' of shape {list(tensor.shape)} and {tensor.dtype}; it "
                f"must be of shape {list(wanted[name].shape)} and {wanted[name].dtype}."
            )


def refuse_client_state(private: bool, placement: str) -> None:
    """Refuse to average the state that clients report, where they may not report it.

    Raises
    ------
    FedsimError
    """
    must = "client.state is 'server' (average_client_state=True); it must be 'reset' or 'client' "
    if private:
        raise FedsimError(
            f"{must}in a run with client-level privacy: what clients report of their state would "
            "be a release of its own."
        )
    if placement == "client":
        raise FedsimError(
            f"{must}while noise.placement = 'client': clients send their shares and nothing else."
        )


def refuse_shares(plan: ReleasePlan[Bounded], placement: str) -> None:
    """Refuse to place noise in clients where there is none, or none that they could share.

    Raises
    ------
    FedsimError
    """
    if placement != "client":
        return
    must = "placement = 'client' (noise.placement); it must be 'server' with"
    if plan.bound.guarantee == "none":
        raise FedsimError(f"{must} {plan.bound}, which has no noise that clients could share.")
    if plan.noise.correlated or not plan.noise.divisible:
        noise = type(plan.noise).__name__
        raise FedsimError(f"{must} {noise} noise (noise.name), which cannot be added in shares.")


def refuse_vectors_of(
    algorithm: LocalAlgorithm | None, mechanism: Mechanism | RobustMean, protects: bool
) -> None:
    """Refuse vectors in a private run, and weights and bounds where they must be plain means.

    Raises
    ------
    FedsimError
    """
    if algorithm is None:
        return
    if protects:
        refuse_vectors(algorithm)
    if not algorithm.plain_means or mechanism == NoPrivacy("uniform"):
        return
    if mechanism.guarantee != "none" and not algorithm.sends:
        return  # it bounds the same way itself
    raise FedsimError(
        f"{mechanism} (mechanism.name) weighs or bounds what clients send, of which "
        f"{type(algorithm).__name__} (client.name) needs the plain mean; it must be 'none' with "
        "mechanism.weighting = 'uniform'."
    )


def allowed_alternation(
    alternation: Alternation | None, plan: ReleasePlan[Bounded], algorithm: LocalAlgorithm | None
) -> Alternation | None:
    """The alternation, unless something is of all coordinates of a row, of which some rest.

    Raises
    ------
    FedsimError
        For a bound of more than a row's norm, noise that cancels over rounds, and named vectors.
    """
    if alternation is None:
        return None
    bound, two = plan.bound, Layout.of({"row": torch.zeros(2)})
    by_norm = isinstance(bound, ScalingBound) and all(
        value.numel() == 1 for value in bound.init(two).values()
    )
    if not (by_norm or isinstance(bound, NoPrivacy | RobustMean)):
        raise FedsimError(
            f"{bound} (mechanism.name) bounds by more than a row's norm, and some of a row's "
            "entries rest in each round (adapter.factors = 'alternating'); it must be 'clipping', "
            "'normalization', 'quantile-clipping' or 'none', alone."
        )
    if not isinstance(plan.noise, Independent):
        raise FedsimError(
            f"{plan.noise} (noise.name) cancels over rounds, which it does not where some of a "
            "row's entries rest in each (adapter.factors = 'alternating'); it must be "
            "'independent'."
        )
    if algorithm is not None and algorithm.receives:
        raise FedsimError(
            f"{type(algorithm).__name__} (client.name) sends vectors of all parameters, and some "
            "rest in each round (adapter.factors = 'alternating'); it must send its update alone."
        )
    return alternation


def refuse_private_metrics(
    metrics: object,
    plan: ReleasePlan[Bounded],
    placement: str,
    private_examples: bool,
    aggregate: object,
) -> None:
    """Refuse private metrics that have no budget, or that the server would see without noise.

    Raises
    ------
    FedsimError
    """
    if metrics is None:
        return
    must = "private_metrics is given (evaluate.private); it must be left out"
    if not plan.private:
        raise FedsimError(f"{must} in a run without client-level privacy, which has no budget.")
    if placement == "client":
        raise FedsimError(
            f"{must} while placement = 'client': clients send their shares and nothing else."
        )
    if private_examples:
        raise FedsimError(
            f"{must} where clients protect their examples: the server would see metrics of them "
            "without noise."
        )
    if plan.selection is not None:
        raise FedsimError(f"{must} in a run of a selection, which is charged as whole runs alone.")
    if aggregate is not None:
        raise FedsimError(
            f"{must} beside evaluate_metrics_aggr_fn, which would see metrics without noise."
        )


def refuse_void_settings(
    plan: ReleasePlan[Mechanism | RobustMean],
    max_epsilon: float | None,
    private_examples: bool,
    example_counts: Sequence[int] | None,
) -> None:
    """Refuse settings that contradict a guarantee, or claim one that is not there.

    Raises
    ------
    FedsimError
    """
    mechanism = plan.bound
    if isinstance(mechanism, RobustMean) and plan.noise.multiplier:
        raise FedsimError(
            f"noise.multiplier is {plan.noise.multiplier}; it must be unset with {mechanism} "
            "(mechanism.name): what one client moves a robust mean by depends on all others' "
            "updates, and is bounded by no sensitivity of the plan's."
        )
    if mechanism.guarantee == "none" and max_epsilon is not None:
        raise FedsimError(
            f"max_epsilon = {max_epsilon}, but {mechanism} gives no guarantee to account for."
        )
    if private_examples and mechanism.weighting == "num-examples" and example_counts is None:
        raise FedsimError(
            "example_counts is None, but clients protect their examples and their updates are "
            "weighed by num-examples (mechanism.weighting); declare the counts, which are then "
            "public, or weigh uniformly."
        )


def allowed_fraction(fraction_evaluate: float | None, shows_clients: bool) -> float:
    """Share of the clients that evaluate; by default all, or none where that would show them.

    Raises
    ------
    FedsimError
    """
    if fraction_evaluate is None:
        return 1.0 if shows_clients else 0.0
    if fraction_evaluate > 0 and not shows_clients:
        raise FedsimError(
            f"fraction_evaluate = {fraction_evaluate} releases metrics of clients' data "
            "without noise; set it to 0, or unprotected_metrics=True to allow that."
        )
    return fraction_evaluate


def refuse_too_many(cohort: Cohort, most: int) -> None:
    """Refuse a cohort that may have more clients than one exact sum has room for.

    Found out in a round, it would end a run by who was drawn.

    Raises
    ------
    FedsimError
    """
    expected = cohort.expected_size
    likely = min(cohort.population or math.inf, expected + SPREAD * math.sqrt(expected))
    if likely > most:
        raise FedsimError(
            f"the {cohort.name} cohort may draw {likely:,.0f} clients (cohort, partition.clients); "
            f"one exact sum has room for {most:,}, so that it must draw fewer."
        )


def declared_counts(counts: Sequence[int] | None, cohort: Cohort) -> npt.NDArray[np.float64] | None:
    """Example counts by client id, ``[population]``.

    Raises
    ------
    FedsimError
    """
    if counts is None:
        return None
    if len(counts) != cohort.population or min(counts) < 0:
        raise FedsimError(
            f"example_counts has {len(counts)} numbers; it must have one, 0 or more, for each of "
            f"the {cohort.population} clients of the population."
        )
    return np.asarray(counts, dtype=np.float64)


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
                "sends the mean over its data with its update; a private run cannot have "
                "it: use a normalisation without one, such as nn.GroupNorm, or leave it out of "
                "the arrays that are sent."
            )


_RUNNING = {"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_variance"}
