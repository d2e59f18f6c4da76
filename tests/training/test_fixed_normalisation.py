"""A BatchNorm that stays in evaluation mode is a map of each example by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clients_helpers import joined, make_data
from torch import nn

from fedsim.clients import SGD
from fedsim.errors import FedsimError
from fedsim.mechanisms import Clipping
from fedsim.models import refuse_running_statistics
from fedsim.randomness import Randomness
from fedsim.training import ExamplePrivacy, Trainer


class Features(nn.Module):
    """Pre-trained features, frozen, and a head."""

    def __init__(self, stays=True, frozen=True):
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.head, self.stays = nn.Linear(5, 3), stays
        self.body[1].running_mean += torch.randn(5)
        self.body[1].running_var *= 3.0
        if frozen:
            self.body.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if self.stays:
            self.body.eval()
        return self

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def affine(model):
    """The same model with the layer written as the linear map that it is."""
    norm = model.body[1]
    scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
    twin = Features()
    twin.body[1] = linear = nn.Linear(5, 5)
    linear.weight.data = torch.diag(scale)
    linear.bias.data = norm.bias.detach() - norm.running_mean * scale
    twin.body.requires_grad_(False)
    return twin


@pytest.mark.parametrize("privacy", [None, ExamplePrivacy(Clipping(0.3), 0.0)])
def test_features_in_evaluation_mode_train_as_the_affine_map_that_they_are(privacy):
    rows = []
    for model in (Features(), affine(Features())):
        trainer = Trainer(
            model, SGD(lr=0.3), make_data([20, 9, 14]), batch_size=5, steps=6,
            randomness=Randomness(1, "ab"), privacy=privacy,
        )  # fmt: skip
        before = {name: value.clone() for name, value in model.named_buffers()}
        for number in (1, 2):
            row, _ = joined(trainer.train(trainer.initial(), np.arange(3), number))
            list(trainer.evaluate(trainer.initial(), np.arange(3), number))
        rows.append(row)
        assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)
    assert rows[0].abs().max() > 0.01
    refuse_running_statistics(Features())


def test_a_layer_that_goes_into_training_mode_is_refused_with_advice_that_keeps_its_features():
    def make(model):
        Trainer(model, SGD(lr=0.1), make_data([9]), randomness=Randomness(1))

    with pytest.raises(FedsimError, match=r"'body.1' .* not trained.* train\(\) that leaves"):
        make(Features(stays=False))
    with pytest.raises(FedsimError, match=r"'body.1' .* mixes examples .* model.fix = true"):
        make(Features(stays=False, frozen=False))
    with pytest.raises(FedsimError, match=r"body.1 .*pre-trained, keep them as they are"):
        refuse_running_statistics(Features(stays=False))
    no_statistics = Features()
    no_statistics.body[1] = nn.BatchNorm1d(5, track_running_stats=False)
    with pytest.raises(FedsimError, match="mixes examples"):
        make(no_statistics)
