"""Paths: ways to compute a block's gradients, with the same results at different speeds."""

import warnings

# `torch.func.vmap` runs some operations, such as attention's, example by example, and warns of it
# each time: users cannot change that, and the numbers are the same.
warnings.filterwarnings(
    "ignore",
    "There is a performance drop because we have not yet implemented the batching rule",
    UserWarning,
)
