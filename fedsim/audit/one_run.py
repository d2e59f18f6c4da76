"""One run with many canaries, each in or out by a coin (Steinke, Nasr and Jagielski 2023).

What was guessed is held against the whole trade-off curve (`fedsim.audit.fdp_bound`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import hadamard
from torch import Tensor

from fedsim.audit.claim import Claim, common_claim
from fedsim.audit.fdp_bound import guesses_epsilon_bound, refuted_p_value
from fedsim.audit.observe import Parameters, Plan, observe
from fedsim.audit.worlds import EXAMPLES, Canaries, reach
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout

__all__ = ["OneRun", "guess"]

Floats = npt.NDArray[np.float64]
Coins = npt.NDArray[np.bool_]

SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)


@dataclass(frozen=True)
class OneRun:
    """How well the coins of one run were guessed.

    Attributes
    ----------
    canaries, guesses, correct : int
    p_value : float
        Probability bound of so many correct guesses, if the claim is true.
    epsilon_bound : float
        Lower bound on epsilon at the claim's delta.
    """

    canaries: int
    guesses: int
    correct: int
    p_value: float
    epsilon_bound: float


def guess(
    plan: Plan, start: Parameters, canaries: int, risk: float, seed: int
) -> tuple[OneRun, Claim]:
    """A first run chooses how many coins to guess; a second one counts.

    Parameters
    ----------
    start : mapping of name to Tensor
        As many parameters as the next power of two from ``canaries``, or more.
    canaries : int
        At most the population.
    """
    (scores, coins, claim), (fresh, fresh_coins, fresh_claim) = (
        _play(plan, start, canaries, seed, run) for run in (0, 1)
    )
    common_claim((claim, fresh_claim))
    # Whichever share would refute the claim most clearly in the first run.
    share = min(
        SHARES, key=lambda share: refuted_p_value(canaries, *_guess(scores, coins, share), claim)
    )
    widest = max(
        SHARES,
        key=lambda share: guesses_epsilon_bound(
            canaries, *_guess(scores, coins, share), risk, claim.delta
        ),
    )
    guesses, correct = _guess(fresh, fresh_coins, share)
    p_value = refuted_p_value(canaries, guesses, correct, claim)
    bound = guesses_epsilon_bound(canaries, *_guess(fresh, fresh_coins, widest), risk, claim.delta)
    return OneRun(canaries, guesses, correct, p_value, bound), claim


def _guess(scores: Floats, coins: Coins, share: float) -> tuple[int, int]:
    """Guess "in" for the highest scores and "out" for the lowest; guesses and correct ones."""
    half = max(1, round(share * len(scores) / 2))
    order = np.argsort(scores, kind="stable")
    return 2 * half, int((~coins[order[:half]]).sum() + coins[order[-half:]].sum())


def _play(
    plan: Plan, start: Parameters, canaries: int, seed: int, run: int
) -> tuple[Floats, Coins, Claim]:
    """Scores and coins of the canaries, both ``[canaries]``, and what the run claims."""
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run", client=1, part=run)
    run_seed = int(draws.integers(2**63))
    strategy = plan.strategy(run_seed)
    layout = Layout.of(start)
    population, adjacency = strategy.cohort.population, strategy.cohort.adjacency
    assert population is not None
    if canaries > min(population, layout.d):
        raise FedsimError(
            f"canaries is {canaries}; it must be at most the population, {population}, and the "
            f"number of parameters, {layout.d}."
        )
    coins = draws.random(canaries) < 0.5
    # Ids are arbitrary: those who are there come first, so that the grid can end after them.
    coins = np.sort(coins)[::-1].copy()
    directions = _directions(canaries, layout.d, draws)
    rows = reach(strategy.mechanism, layout) * directions
    ok = np.ones(canaries, dtype=np.bool_)
    senders = canaries
    if adjacency == "replace-one":
        rows[torch.from_numpy(~coins)] *= -1
    elif adjacency == "zero-out":
        ok = coins
    else:
        senders = int(coins.sum())
    metrics = {"num-examples": np.full(canaries, EXAMPLES)}
    metrics |= dict.fromkeys(strategy.mechanism.side_names, np.zeros(canaries))
    trainer = Canaries(rows[:senders], ok[:senders], metrics, silent=population - canaries)
    seen = observe(plan, trainer, start, run_seed)
    moved = torch.from_numpy(seen.moves.sum(0))
    return (directions @ moved).numpy(), coins, seen.claim


def _directions(canaries: int, d: int, draws: np.random.Generator) -> Tensor:
    """Orthogonal rows of +-1, so that every coordinate of a row reaches its bound."""
    size = 1 << (d.bit_length() - 1)
    if size != d:
        raise FedsimError(f"the model has {d} parameters; one run needs a power of two of them.")
    signs = draws.choice([-1.0, 1.0], size=d)
    chosen = draws.permutation(d)[:canaries]
    return torch.from_numpy(hadamard(d)[chosen] * signs)
