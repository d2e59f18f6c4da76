"""A perceptron with batch normalisation, which writers may keep to themselves."""

from collections import OrderedDict

from torch import nn


def normalised(input_shape: tuple[int, ...], num_classes: int, width: int = 32) -> nn.Module:
    """One hidden layer, normalised."""
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            first=nn.Linear(input_shape[0], width),
            norm=nn.BatchNorm1d(width),
            relu=nn.ReLU(),
            last=nn.Linear(width, num_classes),
        )
    )
