"""Ways to the gradients of a block: all of the same numbers, at different speeds."""
