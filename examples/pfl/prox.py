"""AdaFedProx: a Flower strategy that tells clients another mu from round to round."""

from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedProx


@dataclass
class AdaFedProx(FedProx):
    """FedProx whose mu rises with the clients' loss, and falls once that has fallen for a while.

    Source: Li et al. 2020, section 5.3. Without a loss (in a private run clients show none) mu
    stays as it is.
    """

    mu: float = 0.01
    step: float = 0.1
    patience: int = 5

    def __post_init__(self) -> None:
        super().__init__(proximal_mu=self.mu)
        self.loss, self.falls = float("inf"), 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None and "loss" in metrics:
            self._follow(float(metrics["loss"]))
        return arrays, metrics

    def _follow(self, loss: float) -> None:
        self.falls = self.falls + 1 if loss < self.loss else 0
        if loss > self.loss:
            self.proximal_mu += self.step
        elif self.falls == self.patience:
            self.proximal_mu, self.falls = max(self.proximal_mu - self.step, 0.0), 0
        self.loss = loss
