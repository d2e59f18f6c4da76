"""Matrix factorisation: a rating is the product of a user's factors and a film's."""

from torch import Tensor, nn


class Factors(nn.Module):
    def __init__(self, vocabulary: dict[str, int], width: int = 4) -> None:
        super().__init__()
        self.users = nn.Embedding(vocabulary["user"], width)
        self.films = nn.Embedding(vocabulary["film"], width)

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return (self.users(user) * self.films(film)).sum(-1)
