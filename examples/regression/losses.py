"""A loss of one's own: one number for each example."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def log_cosh(outputs: Tensor, targets: Tensor, width: float = 1.0) -> Tensor:
    """``width^2 log cosh(error / width)``: outputs ``[B, 1]``, targets ``[B]``: ``[B]``."""
    error = torch.abs(outputs[:, 0] - targets) / width
    return width**2 * (error + F.softplus(-2 * error) - math.log(2))
