"""The models of the benchmarks' publishers."""

import torch
from torch import Tensor, nn
from torchvision.models import resnet18


def femnist(num_classes: int) -> nn.Module:
    """Two convolutions and a dense layer, with dropout after both (Reddi et al. 2021)."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, num_classes),
    )
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(module.weight)
    return model


class Characters(nn.Module):
    """Two LSTMs of 256; they predict the character after each, or only after the last (LEAF)."""

    def __init__(self, vocabulary: int, num_classes: int, last: bool = False) -> None:
        super().__init__()
        self.last = last
        self.embed = nn.Embedding(vocabulary, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lstm(self.embed(x))[0]
        return self.head(h[:, -1] if self.last else h)


class Words(nn.Module):
    """One LSTM of 670 between words of 96 numbers (Reddi et al. 2021)."""

    def __init__(self, vocabulary: int, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 96)
        self.lstm = nn.LSTM(96, 670, batch_first=True)
        self.project = nn.Linear(670, 96)
        self.head = nn.Linear(96, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.project(self.lstm(self.embed(x))[0]))


def celeba(num_classes: int) -> nn.Module:
    """LEAF's four convolutions, with GroupNorm for the BatchNorm, which mixes examples."""
    layers: list[nn.Module] = []
    for width in (3, 32, 32, 32):
        layers += [
            nn.Conv2d(width, 32, 3, padding=1),
            nn.GroupNorm(2, 32),
            nn.MaxPool2d(2),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 5 * 5, num_classes))


def cifar100(num_classes: int) -> nn.Module:
    """ResNet-18 with GroupNorm for small images (Reddi et al. 2021)."""
    net = resnet18(num_classes=num_classes, norm_layer=lambda width: nn.GroupNorm(2, width))
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


class Logistic(nn.Module):
    """FLamby's logistic regression: the score of class 1, beside 0 for class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.linear(x), (1, 0))


def tcga_brca() -> nn.Module:
    """FLamby's linear model, with a larger output for a longer time."""
    return nn.Linear(39, 1)


def cox(outputs: Tensor, targets: Tensor) -> Tensor:
    """Minus the logarithm of Cox's partial likelihood within a batch ``[B]``: a death's share.

    The outputs ``[B, 1]`` are minus the risks; targets ``[B, 2]`` are times and deaths. It compares
    the examples of a batch, so that it has no gradient of an example: no run can protect those.
    """
    risks, (times, deaths) = -outputs[:, 0], targets.unbind(1)
    later = times[None, :] >= times[:, None]
    at_risk = risks.expand_as(later).masked_fill(~later, -torch.inf).logsumexp(1)
    return deaths * (at_risk - risks)
