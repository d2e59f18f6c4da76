"""Ways to the gradients of a block: all of the same numbers, at different speeds."""

import warnings

# `torch.func.vmap` takes some operations, such as attention's, one after another, and says so each
# time: users can change nothing about it, and the numbers are the same.
warnings.filterwarnings(
    "ignore",
    "There is a performance drop because we have not yet implemented the batching rule",
    UserWarning,
)
