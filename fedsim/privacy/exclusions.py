"""What a guarantee, or the lack of one, excludes: once, for configs, strategies and trainers.

A sentence names the key of a config, and the argument in Python where that has another name.
"""

from __future__ import annotations

from fedsim.errors import FedsimError


def check_budget(max_epsilon: float | None, *, private: bool) -> None:
    """Refuse a budget of nothing, or in a run that is not ``private`` at client level.

    Raises
    ------
    FedsimError
    """
    if max_epsilon is not None and not max_epsilon > 0:
        raise FedsimError(f"noise.max-epsilon is {max_epsilon} (max_epsilon); it must be above 0.")
    if max_epsilon is not None and not private:
        raise FedsimError(
            f"noise.max-epsilon is {max_epsilon}; it must be unset (max_epsilon=None) in a run "
            "without a mechanism and noise: it has no budget to keep."
        )


def check_bounds_rows(mechanism: object, user: str) -> None:
    """Refuse a robust mean where ``user`` needs a mechanism for single rows.

    Raises
    ------
    FedsimError
    """
    if getattr(mechanism, "protects_nobody", False):
        raise FedsimError(
            f"{user} is given {mechanism!r}, which does not bound single rows. A robust mean "
            "takes a round's rows whole: mechanism.per-layer and mechanism.private-scalar must be "
            "unset with it, and client.mechanism.name another."
        )


def check_private_work(counts: object, max_grad_norm: float) -> None:
    """Refuse local work that clients with private examples cannot have.

    Parameters
    ----------
    counts : object
        Each client's own number of passes or steps (``client.work``); None without.
    max_grad_norm : float
        Largest norm of a batch's gradient; 0 for no limit.

    Raises
    ------
    FedsimError
    """
    if counts is not None:
        raise FedsimError(
            "client.work is set; it must be empty where clients protect their examples "
            "(client.mechanism): their numbers of steps are a declared constant of the plan, the "
            "same for all."
        )
    if max_grad_norm:
        raise FedsimError(
            f"client.max-grad-norm is {max_grad_norm}; it must be 0 where clients protect their "
            "examples: client.mechanism bounds their gradients."
        )


def check_private_metrics(*, private: bool, private_examples: bool) -> None:
    """Refuse the release of clients' metrics with noise where it has no budget, or no effect.

    Parameters
    ----------
    private, private_examples : bool
        Whether the run is private at client level, and whether clients protect their examples.

    Raises
    ------
    FedsimError
    """
    must = "evaluate.private is set (metrics.private); it must be left out"
    if not private:
        raise FedsimError(f"{must} in a run without client-level privacy, which has no budget.")
    if private_examples:
        raise FedsimError(
            f"{must} where clients protect their examples (client.mechanism): the server would see "
            "metrics of them without noise."
        )


def refuse_bare_metrics(setting: str) -> None:
    """Refuse a ``setting``, with its value, that shows metrics of protected clients without noise.

    Raises
    ------
    FedsimError
    """
    raise FedsimError(
        f"{setting} releases metrics of clients' data without noise in a run that is private at "
        "client or example level; it must be 0, or at client level evaluate.private = true "
        "(metrics.private) to have them with noise, or evaluate.unprotected = true "
        "(metrics.unprotected) to allow them without."
    )
