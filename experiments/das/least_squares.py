"""The synthetic quadratic problem of Das et al. as clients that fedsim can train.

Client i minimises ``f_i(w) = 1/2 (w - w_i*)^T Q_i (w - w_i*)`` with ``Q_i = A_i A_i^T``, which
is least squares: its examples are the columns of A_i, with targets ``A_i^T w_i*``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsim.array_types import Ints
from fedsim.clients import SGD
from fedsim.mechanisms import Mechanism
from fedsim.randomness import Purpose, Randomness
from fedsim.rows.block import Block, BlockTrainer
from fedsim.training import ClientData, Trainer

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LeastSquares:
    """``n`` quadratics in ``d`` dimensions, each of rank ``m``.

    Parameters
    ----------
    n, d, m : int
        Numbers of clients, dimensions, and columns of A_i.
    heterogeneity : float
        ``w_i* ~ heterogeneity * N(0, I)``. Entries of A_i are ``N(0, 1/d)``.
    seed : int
    """

    n: int
    d: int
    m: int
    heterogeneity: float
    seed: int

    @cached_property
    def A(self) -> Floats:  # noqa: N802
        """A_i, ``[n, d, m]``."""
        draws = self._draws(1).standard_normal((self.n, self.d, self.m))
        return np.asarray(draws / math.sqrt(self.d))

    @cached_property
    def optima(self) -> Floats:
        """w_i*, ``[n, d]``."""
        return self.heterogeneity * self._draws(2).standard_normal((self.n, self.d))

    @cached_property
    def hessian(self) -> Floats:
        """Mean of the Q_i, ``[d, d]``."""
        flat = self.A.transpose(1, 0, 2).reshape(self.d, -1)
        return np.asarray(flat @ flat.T / self.n)

    @cached_property
    def optimum(self) -> Floats:
        """``w* = (sum Q_i)^-1 sum Q_i w_i*``, ``[d]``."""
        pulls = np.einsum("ndm,nm->d", self.A, self._targets) / self.n
        return np.asarray(np.linalg.solve(self.hessian, pulls))

    @cached_property
    def _targets(self) -> Floats:
        """A_i^T w_i*, ``[n, m]``."""
        return np.asarray(np.einsum("ndm,nd->nm", self.A, self.optima))

    def start(self, scale: float) -> Floats:
        """Start ``w* + scale * N(0, I)``: scale 1 is the slides' I1, 1/5 their I2."""
        return self.optimum + scale * self._draws(3).standard_normal(self.d)

    def gap(self, w: Floats) -> float:
        """``f(w) - f(w*)``, f being the mean of the f_i."""
        away = w - self.optimum
        return float(away @ self.hessian @ away / 2)

    def trainer(self, *, lr: float, steps: int) -> Trainer:
        """Clients that take ``steps`` full gradient steps from the global parameters."""
        columns = self.A.transpose(0, 2, 1).reshape(-1, self.d)
        share = np.arange(self.n * self.m, dtype=np.int64).reshape(self.n, self.m)
        model = nn.Sequential(nn.Linear(self.d, 1, bias=False))

        def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
            # Times m: the trainer takes the mean over a batch, but f_i is a sum over m examples.
            return (self.m / 2) * (outputs[:, 0] - targets).square()

        return Trainer(
            model,
            SGD(lr=lr),
            ClientData(
                torch.from_numpy(columns.astype(np.float32)),
                torch.from_numpy(self._targets.astype(np.float32).reshape(-1)),
                list(share),
            ),
            batch_size=self.m,
            steps=steps,
            loss=half_squares,
            metrics={},
            randomness=Randomness(self.seed),
        )

    def update(self, w: Floats, client: int, *, lr: float, steps: int) -> Floats:
        """A client's ``w_E - w`` in closed form.

        ``U diag((1 - lr lambda)^E - 1) U^T (w - w_i*)`` with the eigenpairs of Q_i.
        """
        U, singular, _ = np.linalg.svd(self.A[client], full_matrices=False)
        shrunk = (1 - lr * singular**2) ** steps - 1
        return np.asarray(U @ (shrunk * (U.T @ (w - self.optima[client]))))

    def _draws(self, part: int) -> np.random.Generator:
        return Randomness(self.seed).generator(Purpose.INIT, level="run", part=part)


class ClosedForm(BlockTrainer):
    """A block trainer that computes the result of `LeastSquares.trainer` in closed form.

    It sends the rows of `LeastSquares.update`, all clients at once, in a thousandth of the time.
    """

    def __init__(self, problem: LeastSquares, *, lr: float, steps: int) -> None:
        self._problem = problem
        self._U, singular, _ = np.linalg.svd(problem.A, full_matrices=False)
        self._shrunk = (1 - lr * singular**2) ** steps - 1

    @property
    def population(self) -> int:
        """Number of clients."""
        return self._problem.n

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """One block with the updates of all sampled clients."""
        w, U = vector.double().numpy(), self._U[client_ids]
        along = np.einsum("ndm,nd->nm", U, w - self._problem.optima[client_ids])
        rows = np.einsum("ndm,nm->nd", U, self._shrunk[client_ids] * along)
        yield Block(
            client_ids,
            torch.from_numpy(rows.astype(np.float32)),
            {"num-examples": np.full(len(client_ids), float(self._problem.m))},
            np.ones(len(client_ids), dtype=bool),
        )

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """No blocks: clients do not evaluate."""
        return iter(())


class Watched(BlockTrainer):
    """A block trainer that records the mean bounded norm of its updates in each round.

    Attributes
    ----------
    bounded : list of float
        Mean of ``||bound(update)||`` over the clients, for each round.
    """

    def __init__(self, trainer: Trainer | ClosedForm, mechanism: Mechanism) -> None:
        self._trainer = trainer
        self._mechanism = mechanism
        self.bounded: list[float] = []

    @property
    def population(self) -> int:
        """Number of clients."""
        return self._trainer.population

    def train(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Blocks of the wrapped trainer; appends one number to `bounded`."""
        total, count = 0.0, 0
        for block in self._trainer.train(vector, client_ids, round):
            assert block.rows is not None
            rows = self._mechanism.bound(block.rows.double())
            total += float(torch.linalg.vector_norm(rows, dim=1).sum())
            count += len(rows)
            yield block
        self.bounded.append(total / count)

    def evaluate(self, vector: Tensor, client_ids: Ints, round: int) -> Iterator[Block]:
        """Blocks of the wrapped trainer."""
        return self._trainer.evaluate(vector, client_ids, round)


def snr_of_normalization(noise_multiplier: float, clients: int, d: int) -> float:
    """Signal-to-noise ratio of normalised updates under full participation (Das et al.).

    ``C / E||zeta_i||``, where client i's share of the noise is ``N(0, (z C)^2 / r I)`` and so
    ``E||zeta_i|| = z C / sqrt(r) * sqrt(2) Gamma((d + 1) / 2) / Gamma(d / 2)``. C cancels.

    Examples
    --------
    >>> round(snr_of_normalization(21.91456, clients=100, d=200), 6)
    0.032307
    """
    chi = math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    return math.sqrt(clients) / (noise_multiplier * chi)
